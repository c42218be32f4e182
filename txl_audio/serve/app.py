"""The web application: routes, errors and the page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from txl_audio.serve import http, openapi
from txl_audio.serve.protocol import Refusal
from txl_audio.serve.security import Guard
from txl_audio.serve.service import Service, bearer
from txl_audio.serve.websocket import stream

PAGE = Path(__file__).parent / "page"


def create_app(service: Service) -> Starlette:
    """An ASGI application for a service, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    app = Starlette(
        routes=[
            WebSocketRoute("/v1/stream", stream),
            Route("/v1/models", _models),
            Route("/v1/generate", http.generate, methods=["POST"]),
            Route("/v1/score", http.score, methods=["POST"]),
            Route("/healthz", _health),
            Route("/metrics", _metrics),
            Route("/openapi.json", _openapi),
            Route("/", _page),
            Mount("/page", _Fresh(directory=PAGE)),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _left,
            Exception: _failed,
        },
        middleware=[Middleware(Guard, any_host=service.any_host)],
        lifespan=lifespan,
    )
    app.state.service = service
    return app


class _Fresh(StaticFiles):
    """Files that a browser asks for anew: modules of two versions do not work together."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse(
        {
            "models": [model.facts() for model in service.models.values()],
            "slots": service.turns.slots,
            "token_needed": service.token is not None,
            "limits": service.limits.model_dump(),
        }
    )


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_token(bearer(request.headers.get("authorization")))
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi.describe())


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    request.app.state.service.metrics.refused.labels(error.code).inc()
    headers = {"unauthorised": {"www-authenticate": "Bearer"}, "busy": {"retry-after": "10"}}
    return _error(error.http_status, error.code, str(error), headers.get(error.code))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(
        error.status_code, "bad_message", f"{request.method} {error.detail}", dict(error.headers or {})
    )


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, "internal", "the server failed at this request; its log says why")
