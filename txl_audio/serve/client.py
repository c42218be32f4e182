"""A client of the streaming server.

from txl_audio.serve.client import connect

with connect("http://127.0.0.1:8000", "kathleen", seconds=5) as stream:
    for piece in stream:        # int16 samples as they are made; of a text model, text
        play(piece)
        stream.set(temperature=0.8)
    print(stream.finished)      # {'type': 'finished', 'samples': 80000, 'reason': 'complete'}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from txl_audio.serve.protocol import PIECE_BYTES, Code, Refusal


class Stream:
    """What a server sends: iterate over it.

    Attributes:
        events: the newest event of each type, by type: queued, started, stats.
        finished: the event of the end, None before it.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.events: dict[str, dict[str, Any]] = {}

    @property
    def finished(self) -> dict[str, Any] | None:
        return self.events.get("finished")

    def __iter__(self) -> Iterator[np.ndarray | str]:
        """Samples [n] int16, or pieces of text. Raises Refusal with the server's code and words."""
        while self.finished is None:
            try:
                message = self._socket.recv()
            except ConnectionClosed as error:
                raise Refusal("internal", f"the connection ended within the stream: {error}") from error
            if isinstance(message, bytes):
                yield np.frombuffer(message, "<i2")
                continue
            event = json.loads(message)
            if event["type"] == "error":
                raise Refusal(cast("Code", event["code"]), event["message"])
            if event["type"] == "text":
                yield event["text"]
            else:
                self.events[event["type"]] = event

    def set(
        self, *, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None
    ) -> None:
        """Exchanges how symbols are drawn from now on; None is the model's own setting."""
        self._say("set", temperature=temperature, top_k=top_k, top_p=top_p)

    def pause(self) -> None:
        self._say("pause")

    def resume(self) -> None:
        self._say("resume")

    def stop(self) -> None:
        """Ends the stream; `finished` comes."""
        self._say("stop")

    def _say(self, kind: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": kind, **fields}))


@contextmanager
def connect(
    url: str, model: str, *, prompt: bytes = b"", token: str | None = None, **request: Any
) -> Iterator[Stream]:
    """A stream from the server at `url`, http://HOST:PORT.

    prompt: an audio file to continue. request: further fields of the start message, see `protocol.Start`:
    seconds, tokens, seed, temperature, top_k, top_p, text, ahead_s.
    """
    address = url.replace("http", "ws", 1).rstrip("/") + "/v1/stream"
    headers = {"Authorization": f"Bearer {token}"} if token else None
    # A stream that is left with sound unread does not wait for the server's goodbye behind it.
    options: Any = {"max_size": None, "compression": None, "close_timeout": 0.2}
    with connect_socket(address, additional_headers=headers, **options) as socket:
        start = {"type": "start", "model": model, "prompt_bytes": len(prompt), **request}
        with suppress(ConnectionClosed):  # an answer has come already, which the stream gives
            socket.send(json.dumps(start))
            for at in range(0, len(prompt), PIECE_BYTES):
                socket.send(prompt[at : at + PIECE_BYTES])
        yield Stream(socket)
