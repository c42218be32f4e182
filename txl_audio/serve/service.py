"""What all routes share: the models, the slots, who may use them, and what is counted."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client import Counter as Count

from txl_audio.serve.models import ServedModel, slots_for
from txl_audio.serve.protocol import Limits, Refusal, ending
from txl_audio.serve.turns import Job, Turns
from txl_audio.tokens import ConfigError

_SPARE = 16
"""Connections beyond slots and queue: they send a prompt, or take what was made."""

_ARRIVING = 128
"""WebSockets that have not said yet what they want, nor shown a token. They cost little and leave soon."""

T = TypeVar("T")


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, turns: Turns) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        for name, what, value in (
            ("slots", "Streams that can be worked on at once.", lambda: turns.slots),
            ("streams", "Streams that are worked on.", lambda: turns.playing),
            ("queued", "Streams that wait for a slot.", lambda: turns.waiting),
        ):
            Gauge(f"txl_audio_{name}", what, registry=registry).set_function(value)
        self.ended = Count("txl_audio_ended", "Streams by how they ended.", ["reason"], registry=registry)
        self.refused = Count("txl_audio_refused", "Refusals by their code.", ["code"], registry=registry)
        self.made_s = Count("txl_audio_sound_seconds", "Sound that was made.", registry=registry)
        self.spent_s = Count("txl_audio_spent_seconds", "Time streams took to make it.", registry=registry)
        self.first_s = Histogram(
            "txl_audio_first_piece_seconds",
            "From a stream's slot or place in the queue to its first piece.",
            buckets=(0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )

    def job_ended(self, job: Job) -> None:
        self.ended.labels(job.end.reason if job.end else "left").inc()
        self.made_s.inc(job.made_s)
        self.spent_s.inc(max(0.0, job.spent_s))


class Room:
    """Connections that are counted together.

    Args:
        most: at once. most_each: of one client's address.
    """

    def __init__(self, most: int, *, most_each: int) -> None:
        self.most, self.most_each = most, most_each
        self._clients: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._clients.total()

    @contextmanager
    def enter(self, client: str) -> Iterator[None]:
        """Counts one connection of a client's address. Raises Refusal `limit` or `busy`."""
        if self._clients[client] >= self.most_each:
            raise Refusal(
                "limit", f"{client} has {self.most_each} streams already, as many as one client gets"
            )
        if len(self) >= self.most:
            raise Refusal("busy", "too many connections; try again later")
        self._clients[client] += 1
        try:
            yield
        finally:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]


class Service:
    """Args:
    models: warmed up; ConfigError for two of one name.
    slots: streams at once; None takes what the machine does in real time, see `models.slots_for`.
    token: that clients need; None for none.
    any_host: whether the Host that a request names may be any; else only this machine's own names.

    Attributes:
        arriving, connections: who has not said yet what it wants and shown the token, and who has.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        limits: Limits | None = None,
        slots: int | None = None,
        token: str | None = None,
        any_host: bool = False,
    ) -> None:
        self.models = {model.name: model for model in models}
        if len(self.models) != len(models) or not models:
            raise ConfigError("a server needs models of different names")
        self.limits, self.token, self.any_host = limits or Limits(), token, any_host
        workers = min(workers_for(model) for model in models)
        self.turns = Turns(
            slots=slots_for(models, workers) if slots is None else slots,
            queue=self.limits.queue,
            workers=workers,
        )
        self.metrics = Metrics(self.turns)
        each = self.limits.streams_per_client
        self.arriving = Room(_ARRIVING, most_each=each)
        self.connections = Room(self.turns.slots + self.limits.queue + _SPARE, most_each=each)
        self._closed = asyncio.Event()

    def model(self, name: str) -> ServedModel:
        """Raises Refusal `unknown_model`."""
        if name not in self.models:
            known = ", ".join(self.models)
            raise Refusal("unknown_model", f"no model of that name is served; there are {known}")
        return self.models[name]

    def check_token(self, *given: str | None) -> None:
        """Raises Refusal `unauthorised` unless one of `given` is the token, where one is needed."""
        if self.token is None:
            return
        # Every one is compared, in a time that does not tell how much of it is right.
        same = [hmac.compare_digest((word or "").encode(), self.token.encode()) for word in given]
        if not any(same):
            raise Refusal("unauthorised", "a token is needed: Authorization: Bearer TOKEN, or field token")

    @property
    def open_connections(self) -> int:
        return len(self.arriving) + len(self.connections)

    def close(self) -> None:
        """Ends everything with its event; called in the event loop."""
        self.turns.close()
        self._closed.set()

    async def before_end(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. Raises Refusal `shutdown` where the server ends first."""
        working, closed = asyncio.create_task(work), asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait({working, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ending()
            return working.result()
        finally:
            working.cancel()
            closed.cancel()

    @contextmanager
    def playing(self, job: Job) -> Iterator[None]:
        """A job in the turns, stopped and counted at the end. Raises Refusal `busy` or `shutdown`."""
        self.turns.enter(job)
        try:
            yield
        finally:
            self.turns.stop(job)
            self.metrics.job_ended(job)

    def first_piece(self, since: float) -> None:
        self.metrics.first_s.observe(time.monotonic() - since)


def bearer(header: str | None) -> str | None:
    """The token of an Authorization header."""
    kind, _, token = (header or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def workers_for(model: ServedModel) -> int:
    """Threads that make sound: one for each core that this process may use, or for the GPU."""
    if next(model.model.parameters()).device.type != "cpu":
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
