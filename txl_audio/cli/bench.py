"""The speed of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from txl_audio.cli.common import Device, Json, Stream, app, say, tell

bench = typer.Typer(
    no_args_is_help=True, help="Speed, as ratios against a reference measured in the same run."
)
app.add_typer(bench, name="bench")


@bench.command("train")
def bench_train(
    seconds: Annotated[float, typer.Option(min=1, help="Measured time per setting.")] = 20.0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Training throughput of the plain text shape: 6 layers, d_model 256, segment and memory 256, batch 8."""
    from txl_audio.bench import train

    figures = train.train_throughput(seconds=seconds, device=device, tell=say)
    tell(figures, train.table(figures), as_json)


@bench.command("sampler")
def bench_sampler(
    target: Annotated[
        str,
        typer.Argument(help="Config file for random weights, run folder, or kathleen: the model that ships."),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured time per setting.")] = 2.0,
    stream: Stream = None,
    as_json: Json = False,
) -> None:
    """Speed of sampling on one thread of the CPU, by backend, memory length and number of streams."""
    from txl_audio import recipe
    from txl_audio.bench import sampler

    model = recipe.describe(target, overrides or [], draw=True)
    chosen = model.streams[recipe.stream_name(model, stream, origin=target)]
    figures = sampler.sampler_speed(chosen, seconds=seconds, tell=say)
    tell(figures, sampler.table(figures), as_json)
