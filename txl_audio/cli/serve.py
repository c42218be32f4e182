"""The streaming server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from txl_audio.cli.common import Device, app, say

if TYPE_CHECKING:
    from txl_audio.serve.service import Service


@app.command()
def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [LIMIT=VALUE]...",
            help="Run folders, or kathleen: the model that ships; and limits: queue=4, stream_s=60.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="TXL_AUDIO_TOKEN", help="What clients have to know.")
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(min=1, help="Streams at once. [default: what the machine does in real time]"),
    ] = None,
    device: Device = "auto",
) -> None:
    """Stream models to a page and to programs, while they generate.

    Limits and their defaults: txl_audio.serve.protocol.Limits. The interface: /openapi.json.
    """
    from txl_audio import runtime
    from txl_audio.config import parse
    from txl_audio.serve import models, running
    from txl_audio.serve.protocol import Limits
    from txl_audio.serve.security import is_loopback
    from txl_audio.serve.service import Service, workers_for

    running.require_token(host, token)
    limits = parse(Limits, "{}", [word for word in words if "=" in word], origin="limits")
    sock = running.bind(host, port)  # before the models are loaded: a taken port is said at once
    served = models.load([word for word in words if "=" not in word], device=device)
    # Streams share the cores; threads within one would only get in the way.
    with runtime.single_thread(runtime.device("cpu")):
        for model in served:
            model.warm_up(workers_for(model), say)
        service = Service(
            served, limits=limits, slots=streams, token=token or None, any_host=not is_loopback(host)
        )
        running.serve(service, sock, lambda: _started(service, host, sock.getsockname()[1]))


def _started(service: Service, host: str, port: int) -> None:
    for model in service.models.values():
        speed = model.real_time_factor
        factor = "" if speed is None else f", real-time factor {speed:.2f}"
        say(f"{model.name}: {model.backend}{factor}")
    count, name = service.turns.slots, f"[{host}]" if ":" in host else host
    streams = "stream" if count == 1 else "streams"
    say(f"listening on http://{name}:{port}, {count} {streams} at once; Ctrl-C ends it")
