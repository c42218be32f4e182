"""A server that runs: sockets, ending, and threads for tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from txl_audio.serve.app import create_app
from txl_audio.serve.connections import HttpConnection, SocketConnection
from txl_audio.serve.protocol import PIECE_BYTES
from txl_audio.serve.security import is_loopback
from txl_audio.serve.service import Service
from txl_audio.tokens import ConfigError, TxlError

_SEND_BUFFER_BYTES = 1 << 16
"""What the system takes of sound that a client has not read, 2 s of it; by default it would be minutes."""

_GRACE_S = 5
"""What ends after this time is cut off."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address, and takes connections when the server starts.

    Raises TxlError where that cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
        sock.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise TxlError(f"cannot listen on {host} port {port}: {reason}; choose another --port") from error
    return sock


def require_token(host: str, token: str | None) -> None:
    """Raises ConfigError where a server for others would have no token."""
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"{host} can be reached by other machines, which needs a token: give --token WORD or set "
            "TXL_AUDIO_TOKEN; or leave --host out to serve this machine only"
        )


def serve(service: Service, sock: socket.socket, started: Callable[[], object] = lambda: None) -> None:
    """Serves until SIGINT or SIGTERM, then ends all streams with an event."""
    _Server(service, started).run(sockets=[sock])


@contextmanager
def running(service: Service) -> Iterator[str]:
    """A server in a thread, on a free port of 127.0.0.1; gives its address, http://127.0.0.1:PORT."""
    sock, ready = bind("127.0.0.1", 0), threading.Event()
    server = _Server(service, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="server")
    thread.start()
    try:
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        service.turns.join()


class _Server(uvicorn.Server):
    def __init__(self, service: Service, started: Callable[[], object]) -> None:
        self._service, self._started = service, started
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=HttpConnection,
                ws=SocketConnection,
                # More than either, so that a message that is a little too large is answered with words.
                ws_max_size=limits.message_bytes + PIECE_BYTES,
                ws_per_message_deflate=False,  # sound does not get smaller, and memory is bounded without
                # A client that reads nothing does not answer pings either; it gets the same time.
                ws_ping_timeout=limits.idle_s,
                timeout_graceful_shutdown=_GRACE_S,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams end with an event before uvicorn closes their connections.
        self._service.close()
        for _ in range(20):
            if not self._service.open_connections:
                break
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)
