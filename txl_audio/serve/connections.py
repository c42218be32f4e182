"""Sockets that do not wait for ever: what uvicorn gives clients any time for has limits here."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from txl_audio.serve.protocol import Limits

_MOST_FRAGMENTS = 1024
"""Of one message. They may be empty, so that the size of a message does not bound what they take."""

_LINGER_S = 2.0


class _Reading(asyncio.Protocol):
    """What both kinds share: a client that takes nothing of what is sent for `idle_s` is cut off."""

    transport: asyncio.Transport
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Whatever the system has not taken waits: writing pauses, also behind the last of an answer.
        self.transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = _later(self._limits.idle_s, self.transport)

    def resume_writing(self) -> None:
        self._unread = _cancelled(self._unread)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread = _cancelled(self._unread)
        super().connection_lost(exc)

    @property
    def _limits(self) -> Limits:
        return self.config.app.state.service.limits  # pyright: ignore[reportAttributeAccessIssue]


class HttpConnection(_Reading, H11Protocol):
    """The headers of every request have to be complete within `start_s`, from the last answer on."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late = _cancelled(self._late)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Also of a body that nobody reads any more: its request is answered."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.get_protocol() is not self:  # it has become a WebSocket
            self._late, self._unread = _cancelled(self._late), _cancelled(self._unread)
        elif answering:
            self._late = _cancelled(self._late)
        elif self._late is None:
            self._late = _later(self._limits.start_s, self.transport)


class SocketConnection(_Reading, WebSocketsSansIOProtocol):
    """Pings and empty fragments do not take memory without end, and what is wrong is told."""

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():  # RFC 6455, 5.5.3: not every ping has to be answered
            self.transport.write(pong)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MOST_FRAGMENTS:
            self.transport.abort()
            return
        super().handle_cont(event)

    def handle_parser_exception(self) -> None:
        """A message that is too large, say: its rest is thrown away for a moment.

        To close a socket with something unread resets it, and then the client may not get the reason.
        """
        if self.close_sent:
            return
        assert self.conn.close_sent is not None
        gone: Any = {"type": "websocket.disconnect", "code": self.conn.close_sent.code}
        self.queue.put_nowait(gone)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.resume_reading()
        self.close_sent = True
        self.close_timer = self.loop.call_later(_LINGER_S, self.transport.abort)


def _later(seconds: float, transport: asyncio.Transport) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
