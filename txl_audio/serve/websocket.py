"""One stream over a WebSocket."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from txl_audio.serve.models import Generation
from txl_audio.serve.protocol import Refusal, Set, Start, read_control, read_start
from txl_audio.serve.service import Service, bearer
from txl_audio.serve.turns import Job
from txl_audio.serve.uploads import read_upload

_STATS_S = 1.0


async def stream(websocket: WebSocket) -> None:
    """The route: from the start message to the event that ends it."""
    service: Service = websocket.app.state.service
    await websocket.accept()
    client = websocket.client.host if websocket.client else "unknown"
    session = _Session(websocket, service)
    try:
        await session.run(client)
    except WebSocketDisconnect:
        return
    except Refusal as refusal:
        service.metrics.refused.labels(refusal.code).inc()
        await session.close(refusal)
    else:
        await session.close(None)


def notifier(changed: asyncio.Event) -> Callable[[], None]:
    """Sets an event of this loop from any thread."""
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    return notify


class _Session:
    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self.websocket, self.service, self.limits = websocket, service, service.limits

    async def run(self, client: str) -> None:
        """Raises Refusal, and WebSocketDisconnect where the client leaves."""
        with self.service.arriving.enter(client):
            start = await self.service.before_end(self._start())
        with self.service.connections.enter(client):
            begun = time.monotonic()
            generation = await self.service.before_end(self._generation(start))
            changed = asyncio.Event()
            job = Job(generation.prepare, ahead_s=start.ahead_s, notify=notifier(changed))
            with self.service.playing(job):
                control = asyncio.create_task(self._control(job, generation))
                delivery = asyncio.create_task(self._deliver(job, generation, changed, begun))
                try:
                    await asyncio.wait({control, delivery}, return_when=asyncio.FIRST_COMPLETED)
                    # Control ends only by a fault or with the client; delivery at the end of the stream.
                    await (delivery if delivery.done() else control)
                finally:
                    for task in (control, delivery):
                        task.cancel()
                    await asyncio.gather(control, delivery, return_exceptions=True)

    async def close(self, refusal: Refusal | None) -> None:
        """Says why, where the client still listens, and closes."""
        if self.websocket.application_state is not WebSocketState.CONNECTED:
            return
        try:
            if refusal is not None:
                await self._send(refusal.event)
            await self.websocket.close(1000 if refusal is None else refusal.close_code)
        except (WebSocketDisconnect, RuntimeError):
            pass  # it left

    async def _start(self) -> Start:
        start = read_start(await self._text(self.limits.start_s))
        self.service.check_token(start.token, bearer(self.websocket.headers.get("authorization")))
        return start

    async def _generation(self, start: Start) -> Generation:
        model = self.service.model(start.model)
        plain = Generation(model, start, self.limits)
        if not start.prompt_bytes:
            return plain
        if model.kind == "text":
            raise Refusal("unsupported", f"{model.name} makes text and continues no sound; use text")
        most = self.limits.upload_bytes
        if start.prompt_bytes > most:
            raise Refusal("too_large", f"the prompt has {start.prompt_bytes} bytes, at most {most} are taken")
        data = bytearray()
        while len(data) < start.prompt_bytes:
            piece = (await self._receive(self.limits.idle_s)).get("bytes")
            if not piece or len(data) + len(piece) > start.prompt_bytes:
                raise Refusal(
                    "bad_message",
                    f"expected binary messages of {start.prompt_bytes} bytes in all after the start message",
                )
            data += piece
        prompt = await asyncio.to_thread(
            read_upload, bytes(data), most_s=self.limits.prompt_s, sample_rate_hz=model.sample_rate_hz
        )
        return Generation(model, start, self.limits, prompt)

    async def _control(self, job: Job, generation: Generation) -> None:
        turns = self.service.turns
        while True:
            message = read_control(await self._text(None))
            if isinstance(message, Set):
                generation.filters = generation.model.filters(message)
            elif message.type == "pause":
                turns.pause(job)
            elif message.type == "resume":
                turns.resume(job)
            else:
                turns.stop(job)

    async def _deliver(self, job: Job, generation: Generation, changed: asyncio.Event, begun: float) -> None:
        stats, place, started, made = _Stats(job), 0, False, 0
        audio = generation.model.kind == "audio"
        while True:
            changed.clear()
            end = job.end  # before taking: pieces that came before the end are taken first
            if job.place != place:
                place = job.place
                if place:
                    await self._send({"type": "queued", "place": place})
            if job.prepared and not started and (end is None or end.reason != "error"):
                started = True
                await self._send(self._started(generation))
            piece = self.service.turns.take(job)
            if piece is not None:
                if not made:
                    self.service.first_piece(begun)
                made += piece.count
                if isinstance(piece.data, bytes):
                    await self.websocket.send_bytes(piece.data)
                elif piece.data:
                    await self._send({"type": "text", "text": piece.data})
                if audio and (event := stats.event()):
                    await self._send(event)
                await asyncio.sleep(0)  # sending may not wait at all; others have to come in between
                continue
            if end is not None:
                if end.error is not None:
                    raise end.error
                if audio and job.made:
                    await self._send(stats.now())
                counts = {"samples": made} if audio else {"samples": 0, "tokens": made}
                await self._send({"type": "finished", **counts, "reason": end.reason})
                return
            left_s = math.inf
            if job.paused_at is not None:
                left_s = job.paused_at + self.limits.idle_s - time.monotonic()
            if left_s <= 0:
                raise Refusal("idle", f"the stream was paused for {self.limits.idle_s:g} seconds")
            with anyio.move_on_after(left_s):
                await changed.wait()

    def _started(self, generation: Generation) -> dict[str, Any]:
        model = generation.model
        return {
            "type": "started",
            "model": model.name,
            "kind": model.kind,
            "sample_rate_hz": model.sample_rate_hz,
            "seed": generation.request.seed,
            "backend": model.backend,
            "prompt_samples": generation.prompt_samples,
        }

    async def _text(self, within_s: float | None) -> str:
        message = await self._receive(within_s)
        text = message.get("text")
        if text is None:
            raise Refusal("bad_message", "got a binary message, expected JSON as text")
        if len(text.encode()) > self.limits.message_bytes:
            raise Refusal("too_large", f"a JSON message may have {self.limits.message_bytes} bytes")
        return text

    async def _receive(self, within_s: float | None) -> dict[str, Any]:
        try:
            with anyio.fail_after(within_s):
                message = await self.websocket.receive()
        except TimeoutError:
            raise Refusal("idle", f"no message came for {within_s:g} seconds") from None
        await asyncio.sleep(0)  # many may wait already; others have to come in between
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        return dict(message)

    async def _send(self, event: dict[str, Any]) -> None:
        await self.websocket.send_text(json.dumps(event))


class _Stats:
    """How fast a stream comes, about once a second of the clock."""

    def __init__(self, job: Job) -> None:
        self._job, self._at, self._made_s, self._spent_s, self._factor = job, time.monotonic(), 0.0, 0.0, 0.0

    def event(self) -> dict[str, Any] | None:
        return self.now() if time.monotonic() - self._at >= _STATS_S else None

    def now(self) -> dict[str, Any]:
        job = self._job
        made_s = job.made_s - self._made_s
        if made_s > 0:
            self._factor = (job.spent_s - self._spent_s) / made_s
            self._made_s, self._spent_s = job.made_s, job.spent_s
        self._at = time.monotonic()
        return {
            "type": "stats",
            "seconds_made": round(job.made_s, 3),
            "real_time_factor": round(self._factor, 4),
            "lag_s": round(job.lag_s, 3),
        }
