"""Generation and scores over plain HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Literal, TypeAlias, get_args

import anyio
import numpy as np
import soundfile
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from txl_audio import recipe
from txl_audio.evaluate import Totals
from txl_audio.serve import protocol
from txl_audio.serve.models import Generation, ServedModel
from txl_audio.serve.protocol import PIECE_BYTES, Refusal, read_query
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

Body: TypeAlias = Callable[[AsyncIterator[Piece]], AsyncIterator[bytes]]
"""Makes of a job's pieces what is sent."""


class GenerateQuery(protocol.Request):
    """format: `wav` or `flac`, a whole file; `s16le` or `text`, as it is made. Default: wav, text."""

    format: Format | None = None


class ScoreQuery(protocol.Config):
    model: str


async def generate(request: Request) -> Response:
    """A file, or a stream of samples or text; the body is an audio file to continue, or empty."""
    service = _service(request)
    query = read_query(GenerateQuery, dict(request.query_params))
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
    with service.connections.enter(_client(request)):
        data = await service.before_end(_body(request, service.limits.upload_bytes))
        if data:
            prompt = await _decoded(data, model, service.limits.prompt_s)
            generation = Generation(model, query, service.limits, prompt)
    body = partial(_file, form=form, rate_hz=model.sample_rate_hz) if whole else _as_made
    return _Answer(service, _client(request), generation.prepare, body, MEDIA_TYPES[form])


async def score(request: Request) -> Response:
    """Nats and bits per sample of the audio file in the body."""
    service = _service(request)
    model = service.model(read_query(ScoreQuery, dict(request.query_params)).model)
    if model.kind != "audio":
        raise Refusal("unsupported", f"{model.name} makes {model.kind} and scores no audio")
    with service.connections.enter(_client(request)):
        data = await service.before_end(_body(request, service.limits.upload_bytes))
        pcm = await _decoded(data, model, service.limits.score_s)
    body = partial(_totals, bits_name=recipe.bits_name(model.model.spec))
    return _Answer(service, _client(request), lambda _: model.scores(pcm), body, "application/json")


async def _as_made(pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield piece.data if isinstance(piece.data, bytes) else piece.data.encode()


async def _file(pieces: AsyncIterator[Piece], *, form: Format, rate_hz: int) -> AsyncIterator[bytes]:
    file = BytesIO()
    with soundfile.SoundFile(file, "w", rate_hz, 1, "PCM_16", format=form.upper()) as sound:
        async for piece in pieces:
            sound.write(np.frombuffer(piece.data, "<i2"))
    file.seek(0)
    while part := file.read(PIECE_BYTES):
        yield part


async def _totals(pieces: AsyncIterator[Piece], *, bits_name: str) -> AsyncIterator[bytes]:
    totals = Totals(0.0, 0)
    async for piece in pieces:
        totals += piece.data
    yield json.dumps({"nats": totals.nats, "count": totals.count, bits_name: totals.bits}).encode()


def _service(request: Request) -> Service:
    """Raises Refusal `unauthorised`."""
    service: Service = request.app.state.service
    service.check_token(bearer(request.headers.get("authorization")))
    return service


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


class _Answer(Response):
    """What a job makes, sent as it comes. A client that leaves, or takes nothing for too long, ends it.

    Its connection counts until everything is sent, also of a file that was made long before.
    """

    def __init__(
        self,
        service: Service,
        client: str,
        prepare: Callable[[Callable[[], None]], Iterator[Piece]],
        body: Body,
        media_type: str,
    ) -> None:
        self.media_type, self.status_code, self.background = media_type, 200, None
        self.init_headers({"cache-control": "no-store"})
        self._service, self._client, self._prepare, self._body = service, client, prepare, body
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        changed = asyncio.Event()
        job = Job(self._prepare, notify=notifier(changed))
        with self._service.connections.enter(self._client), self._service.playing(job):
            listening = asyncio.create_task(self._until_left(receive))
            sending = asyncio.create_task(self._send(send, self._pieces(job, changed)))
            try:
                await asyncio.wait({listening, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    await sending
            except Refusal:
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

    async def _send(self, send: Send, pieces: AsyncIterator[Piece]) -> None:
        async for data in self._body(pieces):
            await self._head(send)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(0)  # `send` may not wait at all; others have to come in between
        await self._head(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _head(self, send: Send) -> None:
        """Not before there is something to send: what fails until then is answered with its own status."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _pieces(self, job: Job, changed: asyncio.Event) -> AsyncIterator[Piece]:
        """All of a job. Raises Refusal where it fails."""
        begun, first = time.monotonic(), True
        while True:
            changed.clear()
            end = job.end  # before taking: pieces that came before the end are taken first
            piece = self._service.turns.take(job)
            if piece is not None:
                if first:
                    self._service.first_piece(begun)
                first = False
                yield piece
            elif end is None:
                await changed.wait()
            elif end.reason == "shutdown":
                raise protocol.ending()
            elif end.error is not None:
                raise end.error
            else:
                return


assert set(MEDIA_TYPES) == set(get_args(Format))
