"""Generation and scores over plain HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Literal, get_args

import anyio
import numpy as np
import soundfile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from txl_audio import recipe
from txl_audio.evaluate import Totals
from txl_audio.serve import protocol
from txl_audio.serve.models import Generation, ServedModel
from txl_audio.serve.protocol import Refusal, read_query
from txl_audio.serve.service import Service, bearer
from txl_audio.serve.turns import Job, Piece
from txl_audio.serve.uploads import read_upload
from txl_audio.serve.websocket import notifier

Format = Literal["wav", "flac", "s16le", "text"]

MEDIA_TYPES: dict[Format, str] = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "s16le": "application/octet-stream",
    "text": "text/plain; charset=utf-8",
}

_LOOK_S = 0.5
"""How often it is looked whether a client that waits for a whole file has left."""


class GenerateQuery(protocol.Request):
    """format: `wav` or `flac`, a whole file; `s16le` or `text`, as it is made. Default: wav, text."""

    format: Format | None = None


class ScoreQuery(protocol.Config):
    model: str


async def generate(request: Request) -> Response:
    """A file, or a stream of samples or text; the body is an audio file to continue, or empty."""
    service: Service = request.app.state.service
    service.check_token(bearer(request.headers.get("authorization")))
    begun, query = time.monotonic(), read_query(GenerateQuery, dict(request.query_params))
    model = service.model(query.model)
    form = query.format or ("wav" if model.kind == "audio" else "text")
    if (form == "text") != (model.kind == "text"):
        raise Refusal("unsupported", f"{model.name} makes {model.kind}, which is not sent as {form}")
    generation = Generation(model, query, service.limits)
    whole = form in ("wav", "flac")
    if whole and generation.seconds > service.limits.file_s:
        # A file is held in memory until it is complete.
        raise Refusal(
            "too_long",
            f"a {form} file has at most {service.limits.file_s:g} seconds; use format s16le",
        )
    with service.connection(_client(request)):
        data = await _body(request, service.limits.upload_bytes)
        if data:
            prompt = await _decoded(data, model, service.limits.prompt_s)
            generation = Generation(model, query, service.limits, prompt)
    changed = asyncio.Event()
    job = Job(generation.prepare, notify=notifier(changed))
    if not whole:
        return _Stream(service, job, changed, _client(request), media_type=MEDIA_TYPES[form])
    with service.connection(_client(request)), service.playing(job):
        file = BytesIO()
        with soundfile.SoundFile(file, "w", model.sample_rate_hz, 1, "PCM_16", format=form.upper()) as sound:
            async for piece in _while_listened(request, _pieces(service, job, changed, begun)):
                sound.write(np.frombuffer(piece.data, "<i2"))
    return Response(file.getvalue(), media_type=MEDIA_TYPES[form])


async def score(request: Request) -> Response:
    """Nats and bits per sample of the audio file in the body."""
    service: Service = request.app.state.service
    service.check_token(bearer(request.headers.get("authorization")))
    begun = time.monotonic()
    model = service.model(read_query(ScoreQuery, dict(request.query_params)).model)
    if model.kind != "audio":
        raise Refusal("unsupported", f"{model.name} makes {model.kind} and scores no audio")
    with service.connection(_client(request)):
        pcm = await _decoded(await _body(request, service.limits.upload_bytes), model, service.limits.score_s)
        changed = asyncio.Event()
        job = Job(lambda: model.scores(pcm), notify=notifier(changed))
        totals = Totals(0.0, 0)
        with service.playing(job):
            async for piece in _while_listened(request, _pieces(service, job, changed, begun)):
                totals += piece.data
    name = recipe.bits_name(model.model.spec)
    return JSONResponse({"nats": totals.nats, "count": totals.count, name: totals.bits})


def _client(request: Request) -> str:
    return request.client.host if request.client else "unknown"


async def _body(request: Request, most: int) -> bytes:
    """Raises Refusal `too_large` before more than `most` bytes were taken, and `idle` where none come."""
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > most:
        raise Refusal("too_large", f"the body has {said} bytes, at most {most} are taken")
    data, limits = bytearray(), request.app.state.service.limits
    chunks = request.stream()
    while True:
        try:
            with anyio.fail_after(limits.idle_s):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise Refusal("idle", f"nothing of the body came for {limits.idle_s:g} seconds") from None
        if chunk is None:
            return bytes(data)
        data += chunk
        if len(data) > most:
            raise Refusal("too_large", f"the body has more than the {most} bytes that are taken")


async def _decoded(data: bytes, model: ServedModel, most_s: float) -> np.ndarray:
    if model.kind == "text":
        raise Refusal("unsupported", f"{model.name} makes text and continues no sound; use the field text")
    return await asyncio.to_thread(read_upload, data, most_s=most_s, sample_rate_hz=model.sample_rate_hz)


async def _pieces(
    service: Service, job: Job, changed: asyncio.Event, begun: float
) -> AsyncIterator[Piece | None]:
    """All of a job, and None where nothing is there yet. Raises Refusal where the job fails."""
    first = True
    while True:
        changed.clear()
        end = job.end
        piece = service.turns.take(job)
        if piece is not None:
            if first:
                service.first_piece(begun)
            first = False
            yield piece
        elif end is not None:
            if end.reason == "shutdown":
                raise Refusal("shutdown", "the server is ending; try again when it is back")
            if end.error is not None:
                raise end.error
            return
        else:
            with anyio.move_on_after(_LOOK_S):
                await changed.wait()
            yield None


async def _while_listened(request: Request, pieces: AsyncIterator[Piece | None]) -> AsyncIterator[Piece]:
    """Raises ClientDisconnect where the client leaves."""
    looked = time.monotonic()
    async for piece in pieces:
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            if await request.is_disconnected():
                raise ClientDisconnect
        if piece is not None:
            yield piece


class _Stream(Response):
    """Pieces as they come; a client that leaves, or takes none for too long, ends them."""

    def __init__(
        self, service: Service, job: Job, changed: asyncio.Event, client: str, *, media_type: str
    ) -> None:
        self.media_type, self.status_code, self.background = media_type, 200, None
        self.init_headers({"cache-control": "no-store"})
        self._service, self._job, self._changed, self._client = service, job, changed, client
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        with self._service.connection(self._client), self._service.playing(self._job):
            listening = asyncio.create_task(self._until_left(receive))
            sending = asyncio.create_task(self._send(send, begun))
            try:
                await asyncio.wait({listening, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    await sending
            except (Refusal, TimeoutError):
                # After the head nothing can be said any more: the body ends unfinished, which clients see.
                if not self._started:
                    raise
            finally:
                for task in (listening, sending):
                    task.cancel()
                await asyncio.gather(listening, sending, return_exceptions=True)

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _send(self, send: Send, begun: float) -> None:
        async for piece in _pieces(self._service, self._job, self._changed, begun):
            if piece is None:
                continue
            await self._head(send)
            data = piece.data if isinstance(piece.data, bytes) else piece.data.encode()
            body = {"type": "http.response.body", "body": data, "more_body": True}
            with anyio.fail_after(self._service.limits.idle_s):
                await send(body)
            await asyncio.sleep(0)  # `send` may not wait at all; others have to come in between
        await self._head(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _head(self, send: Send) -> None:
        """Not before the first piece: what fails until then is answered with its own status."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


assert set(MEDIA_TYPES) == set(get_args(Format))
