"""Which requests come from where they should."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from txl_audio.serve.protocol import Refusal

_POLICY = (
    "default-src 'self'; connect-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "worker-src 'self'; style-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own and reachable from nowhere else."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Answers 403 to requests of other sites' pages, and to names that are not this machine's.

    A browser sends Origin with every WebSocket and every POST; another site's page is refused by it. A site
    whose name was pointed at 127.0.0.1 (DNS rebinding) has the same Origin and Host, so on loopback the Host
    has to be a name of loopback, unless `any_host`. Programs send no Origin.
    """

    def __init__(self, app: ASGIApp, *, any_host: bool) -> None:
        self.app, self.any_host = app, any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is not None:
            body = {"error": {"code": refusal.code, "message": str(refusal)}}
            await JSONResponse(body, refusal.http_status)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS.items()]}
            await send(message)

        await self.app(scope, receive, with_headers)

    def _refusal(self, headers: Headers) -> Refusal | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            from_here = origin is None or urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return Refusal("forbidden", "the Host or Origin of the request is no address")
        if not self.any_host and not is_loopback(name):
            return Refusal("forbidden", "the Host is not this machine; use 127.0.0.1 or localhost")
        if not from_here:
            return Refusal("forbidden", "the request comes from another site's page")
        return None
