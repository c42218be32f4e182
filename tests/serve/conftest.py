"""A running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.serve.models import NoiseModel, letters, tiny
from txl_audio.serve.protocol import Limits
from txl_audio.serve.running import running
from txl_audio.serve.service import Service


@dataclass(frozen=True)
class Server:
    """url: http://127.0.0.1:PORT."""

    url: str
    service: Service
    tiny: NoiseModel
    letters: NoiseModel


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """`serve(slots=2, token=None, **limits)`: a server of the models tiny (sound) and letters (text)."""
    with ExitStack() as stack:

        def start(*, slots: int = 2, token: str | None = None, **limits: Any) -> Server:
            sound, text = tiny(), letters()
            service = Service([sound, text], limits=Limits(**limits), slots=slots, token=token)
            server = Server(stack.enter_context(running(service)), service, sound, text)
            stack.callback(sound.gate.set)  # runs first: nothing waits while the server ends
            stack.callback(text.gate.set)
            return server

        yield start


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()
