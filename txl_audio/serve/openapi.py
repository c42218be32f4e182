"""The OpenAPI 3.1 description of the HTTP routes, with the WebSocket's messages as schemas."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from txl_audio import __version__
from txl_audio.serve.http import MEDIA_TYPES, GenerateQuery, ScoreQuery
from txl_audio.serve.protocol import HTTP_STATUS, Command, Set, Start

_UPLOAD = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    "description": "A WAV, FLAC or OGG file.",
}
_SOCKET = (
    "WebSocket /v1/stream: send one Start as JSON text, and where prompt_bytes is not 0 so many bytes of an "
    "audio file, in binary messages of at most 64 KiB. Sound comes as binary messages of s16le mono samples, "
    "all else as JSON text with a type: queued, started, stats, text, finished, error. After that, Set and "
    "Command may be sent at any time."
)


def describe() -> dict[str, Any]:
    """The description, a JSON object."""
    models: list[type[BaseModel]] = [Start, Set, Command]
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "enum": list(HTTP_STATUS)},
                    "message": {"type": "string"},
                },
                "required": ["code", "message"],
            }
        },
        "required": ["error"],
    }
    binary = {"schema": {"type": "string", "format": "binary"}}
    generated = dict.fromkeys(MEDIA_TYPES.values(), binary)
    generate = _operation("Sound or text.", GenerateQuery, content=generated, upload=True)
    return {
        "openapi": "3.1.0",
        "info": {"title": "txl-audio", "version": __version__, "description": _SOCKET},
        "paths": {
            "/v1/models": {"get": _operation("The models that are served, slots and limits.", token=False)},
            "/v1/generate": {"post": generate},
            "/v1/score": {"post": _operation("Bits per sample of an audio file.", ScoreQuery, upload=True)},
            "/healthz": {"get": _operation("Whether the server runs.", token=False)},
            "/metrics": {"get": _operation("Prometheus metrics.", content={"text/plain": {}})},
        },
        "components": {
            "schemas": {**schemas["$defs"], "Error": error},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    summary: str,
    query: type[BaseModel] | None = None,
    *,
    content: dict[str, Any] | None = None,
    upload: bool = False,
    token: bool = True,
) -> dict[str, Any]:
    schema = {} if query is None else query.model_json_schema()
    required = schema.get("required", [])
    parameters = [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]
    failed = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {
        "summary": summary,
        **({"parameters": parameters} if parameters else {}),
        **({"requestBody": _UPLOAD} if upload else {}),
        "responses": {
            "200": {"description": summary, "content": content or {"application/json": {}}},
            "default": {"description": "A refusal.", "content": {"application/json": failed}},
        },
        "security": [{"token": []}, {}] if token else [],
    }
