"""Whose turn it is: streams share a few threads, piece by piece.

Knows neither models nor sockets. Work is an iterator, of which a thread makes one piece at a time, so that a
hundred milliseconds of sound for one stream and the same for the next take turns. Who had least of the
threads' time is next, so that long turns, of text or of a slow model, get no more of it. Streams of one model
could also be computed as lanes of one batch; on a CPU that makes 20 of them only 15 % cheaper than turns, and
they would have to begin and pause together.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from txl_audio.serve.protocol import Refusal, ending
from txl_audio.tokens import TxlError

OUTBOX_PIECES = 20
"""What is made and not taken yet; with this many, a stream pauses until its client takes one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Something made: how many samples or symbols, and how many seconds of sound."""

    data: Any
    count: int
    seconds: float = 0.0


@dataclass(frozen=True)
class End:
    """Why a stream ended; `error` where that was not meant."""

    reason: Literal["complete", "stopped", "shutdown", "error"]
    error: Refusal | None = None


class _EndedError(Exception):
    """Nobody waits for what is prepared."""


class Job:
    """One stream's work; its methods are those of `Turns`.

    Args:
        prepare: called once, on a thread of its own, for what may take long: a prompt to be read. Returns the
            pieces. What it or they raise ends the job: a TxlError as `bad_message`, a Refusal as it is. Its
            argument is to be called now and then: it raises where the job has ended meanwhile.
        ahead_s: see `protocol.Start`.
        notify: called from any thread when something changed.

    Attributes:
        place: in the queue, from 1; 0 with a slot.
        prepared: pieces are being made.
        paused_at: since when no more is made, of `time.monotonic`; None while more is.
        end: why it ended; pieces may still be there to take.
        made_s, made: seconds of sound and pieces so far.
        lag_s: how far the newest piece came behind the clock that runs from the first one.
        spent_s: what making it all took, with waiting for others and without waiting for the client.
    """

    def __init__(
        self,
        prepare: Callable[[Callable[[], None]], Iterator[Piece]],
        *,
        notify: Callable[[], None] = lambda: None,
        ahead_s: float | None = None,
    ) -> None:
        self.prepare, self.notify, self.ahead_s = prepare, notify, ahead_s
        self.place, self.prepared = 0, False
        self.paused_at: float | None = None
        self.end: End | None = None
        self.made_s, self.made, self.lag_s, self.spent_s = 0.0, 0, 0.0, 0.0
        self.pieces: Iterator[Piece] | None = None
        self.outbox: deque[Piece] = deque()
        self.in_turn, self.turn = False, 0
        self.used_s = 0.0  # of the threads' time, see `Turns._next`
        self.ready_at = math.inf  # when it last could have gone on, but for `ahead_s`
        self.clock_from: float | None = None

    def go_on(self) -> None:
        """Raises where it has ended."""
        if self.end is not None:
            raise _EndedError

    def clock_s(self, now: float) -> float:
        """Seconds since the first piece, without those paused."""
        if self.clock_from is None:
            return 0.0
        return max(0.0, (now if self.paused_at is None else self.paused_at) - self.clock_from)

    def due_at(self, now: float) -> float:
        """When the next piece may be made; infinity until something changes."""
        full = len(self.outbox) >= OUTBOX_PIECES
        paused = self.paused_at is not None
        if self.pieces is None or self.in_turn or paused or full or self.end is not None:
            return math.inf
        if self.ahead_s is None:
            return self.ready_at
        return max(self.ready_at, now + self.made_s - self.ahead_s - self.clock_s(now))


class Turns:
    """Slots, a queue for them, and the threads that do the work of those who have one.

    Args:
        slots: jobs that are worked on. queue: how many more may wait. workers: threads.
    """

    def __init__(self, *, slots: int, queue: int, workers: int) -> None:
        self.slots, self.queue = slots, queue
        self._changed = threading.Condition()
        self._playing: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._closed, self._turn, self._used_s = False, 0, 0.0
        self._threads = [threading.Thread(target=self._work, name=f"turns-{n}") for n in range(workers)]
        for thread in self._threads:
            thread.daemon = True  # a piece that is being made does not keep a process from ending
            thread.start()

    @property
    def jobs(self) -> list[Job]:
        """Those that have a slot."""
        with self._changed:
            return list(self._playing)

    @property
    def playing(self) -> int:
        return len(self._playing)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, job: Job) -> None:
        """Gives a job a slot or a place in the queue. Raises Refusal `busy` or `shutdown`."""
        with self._changed:
            if self._closed:
                raise ending()
            if len(self._playing) < self.slots:
                self._begin(job)
            elif len(self._waiting) < self.queue:
                self._waiting.append(job)
                job.place = len(self._waiting)
            else:
                raise Refusal(
                    "busy", f"all {self.slots} slots are taken and {self.queue} streams wait; try again later"
                )
        job.notify()

    def take(self, job: Job) -> Piece | None:
        """The next piece, if there is one; it makes room for another."""
        with self._changed:
            if not job.outbox:
                return None
            if len(job.outbox) >= OUTBOX_PIECES:
                job.ready_at = time.monotonic()
                self._changed.notify()
            return job.outbox.popleft()

    def pause(self, job: Job) -> None:
        """Makes no more until `resume`; what is made can be taken."""
        with self._changed:
            if job.paused_at is None:
                job.paused_at = time.monotonic()
        job.notify()  # who waits for a piece may wait for so long only while paused

    def resume(self, job: Job) -> None:
        with self._changed:
            if job.paused_at is not None:
                now = time.monotonic()
                if job.clock_from is not None:
                    job.clock_from += now - max(job.paused_at, job.clock_from)
                job.paused_at, job.ready_at = None, now
                self._changed.notify()
        job.notify()

    def stop(self, job: Job) -> None:
        """Ends a job, frees its slot and forgets what was not taken; nothing where it has ended."""
        with self._changed:
            if job.end is None:
                self._end(job, End("stopped"))
            job.outbox.clear()
        job.notify()

    def close(self) -> None:
        """Ends all jobs and the threads; nothing can enter any more."""
        with self._changed:
            self._closed = True
            jobs = [job for job in (*self._playing, *self._waiting) if job.end is None]
            self._waiting.clear()
            for job in jobs:
                job.outbox.clear()
                self._end(job, End("shutdown"))
            self._changed.notify_all()
        for job in jobs:
            job.notify()

    def join(self) -> None:
        """Waits for the threads after `close`."""
        for thread in self._threads:
            thread.join()

    # What follows is called with the lock held, but for `_prepare` and `_work`.

    def _begin(self, job: Job) -> None:
        job.place = 0
        self._playing.append(job)
        # A thread of its own, as a long prompt would keep a worker from all other streams; the system shares
        # the cores between them. There are never more such threads than slots.
        threading.Thread(target=self._prepare, args=(job,), name="prepare", daemon=True).start()

    def _prepare(self, job: Job) -> None:
        pieces, error = None, None
        try:
            pieces = job.prepare(job.go_on)
        except Exception as failed:
            error = failed
        with self._changed:
            job.prepared, job.pieces, job.ready_at = True, pieces, time.monotonic()
            if error is not None and job.end is None:
                self._end(job, _failure(error))
            if job.end is not None:
                self._release(job)
            self._changed.notify()
        job.notify()

    def _end(self, job: Job, end: End) -> None:
        job.end = end
        if job in self._waiting:
            self._waiting.remove(job)
            self._tell_places()
        # While it is prepared it holds its slot: there are never more such threads. `go_on` ends it soon.
        if job.prepared:
            self._release(job)

    def _release(self, job: Job) -> None:
        job.pieces = None
        if job not in self._playing:
            return
        self._playing.remove(job)
        if self._waiting and not self._closed:
            following = self._waiting.popleft()
            self._begin(following)
            following.notify()
            self._tell_places()

    def _tell_places(self) -> None:
        for place, job in enumerate(self._waiting, 1):
            job.place = place
            job.notify()

    def _next(self) -> Job | None:
        """The job that has had least of the threads' time; None when closed.

        Start-time fair queueing (Goyal, Vin and Cheng 1996): who comes, or was not ready for a while, begins
        with as much as the one served last, so that waiting saves nothing up.
        """
        while not self._closed:
            now = time.monotonic()
            due = {job: job.due_at(now) for job in self._playing}
            ready = [job for job in self._playing if due[job] <= now]
            if ready:
                return min(ready, key=lambda job: (max(job.used_s, self._used_s), job.turn))
            soonest = min(due.values(), default=math.inf)
            self._changed.wait(None if soonest == math.inf else soonest - now)
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next()
                if job is None:
                    return
                assert job.pieces is not None
                pieces, began = job.pieces, job.due_at(time.monotonic())
                self._turn += 1
                job.in_turn, job.turn = True, self._turn
                job.used_s = self._used_s = max(job.used_s, self._used_s)
                self._changed.notify()  # others may be ready too
            piece, end, started = None, End("complete"), time.monotonic()
            try:
                piece = next(pieces, None)
            except Exception as error:
                end = _failure(error)
            with self._changed:
                now = time.monotonic()
                job.in_turn, job.ready_at = False, now
                job.spent_s += now - began
                job.used_s += now - started
                if job.end is None and piece is None:
                    self._end(job, end)
                elif job.end is None and piece is not None:
                    job.outbox.append(piece)
                    if job.clock_from is None:
                        job.clock_from = now
                    job.lag_s = max(0.0, job.clock_s(now) - job.made_s)
                    job.made_s, job.made = job.made_s + piece.seconds, job.made + 1
            job.notify()


def _failure(error: Exception) -> End:
    if isinstance(error, Refusal):
        return End("error", error)
    if isinstance(error, TxlError):
        return End("error", Refusal("bad_message", " ".join(str(error).split())))
    _log.error("a stream failed", exc_info=error)
    return End("error", Refusal("internal", "the server failed at this stream; its log says why"))
