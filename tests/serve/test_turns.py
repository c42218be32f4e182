"""Slots, the queue and whose turn it is, with work that needs no model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from txl_audio.serve.protocol import Refusal
from txl_audio.serve.turns import OUTBOX_PIECES, Job, Piece, Turns
from txl_audio.tokens import DataError


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns(slots=2, queue=2, workers=1)
    yield made
    made.close()
    made.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def still(value: Callable[[], object]) -> bool:
    """Whether it stays as it is for a while."""
    before = value()
    time.sleep(0.1)
    return value() == before


def endless(_: object = None, *, seconds: float = 0.1) -> Iterator[Piece]:
    return (Piece(number, 1, seconds) for number in itertools.count())


def taken(turns: Turns, job: Job) -> list[int]:
    """All of a job's pieces, until it ends."""
    found: list[int] = []
    while True:
        end = job.end
        if (piece := turns.take(job)) is not None:
            found.append(piece.data)
        elif end is not None:
            return found
        else:
            time.sleep(0.001)


def test_pieces_come_in_order_and_then_the_end(turns: Turns) -> None:
    told = threading.Event()
    job = Job(lambda _: itertools.islice(endless(), 50), notify=told.set)
    turns.enter(job)
    assert taken(turns, job) == list(range(50))
    assert job.end is not None and job.end.reason == "complete" and told.is_set()
    assert job.made == 50 and job.made_s == pytest.approx(5.0)
    assert turns.playing == 0


def test_who_takes_nothing_pauses_only_its_own_stream(turns: Turns) -> None:
    # A15: memory bounded, generation stops, other streams unaffected.
    slow, other = Job(endless), Job(lambda _: itertools.islice(endless(), 500))
    turns.enter(slow)
    turns.enter(other)
    assert taken(turns, other) == list(range(500))
    until(lambda: slow.made == OUTBOX_PIECES)
    assert still(lambda: slow.made) and len(slow.outbox) == OUTBOX_PIECES
    assert turns.take(slow) == Piece(0, 1, 0.1)
    until(lambda: slow.made == OUTBOX_PIECES + 1)  # exactly as much as there is room for
    assert still(lambda: slow.made)


def test_who_leaves_frees_its_slot_even_in_its_turn(turns: Turns) -> None:
    gate, begun = threading.Event(), threading.Event()

    def pieces(_: object) -> Iterator[Piece]:
        begun.set()
        gate.wait()
        yield Piece(0, 1)

    job = Job(pieces)
    turns.enter(job)
    assert begun.wait(20) and turns.playing == 1
    turns.stop(job)
    assert turns.playing == 0 and job.end is not None and job.end.reason == "stopped"
    gate.set()
    following = Job(lambda _: itertools.islice(endless(), 3))
    turns.enter(following)
    assert taken(turns, following) == [0, 1, 2]
    assert turns.take(job) is None  # what its last turn made is forgotten


def test_the_queue_tells_places_and_has_an_end(turns: Turns) -> None:
    jobs = [Job(endless) for _ in range(4)]
    for job in jobs:
        turns.enter(job)
    assert [job.place for job in jobs] == [0, 0, 1, 2] and turns.waiting == 2
    with pytest.raises(Refusal, match="all 2 slots are taken and 2 streams wait") as refused:
        turns.enter(Job(endless))
    assert refused.value.code == "busy"
    turns.stop(jobs[2])  # from the queue
    assert [job.place for job in jobs] == [0, 0, 1, 1]
    until(lambda: jobs[0].prepared)  # before, it cannot give up its slot
    turns.stop(jobs[0])
    assert jobs[3].place == 0
    until(lambda: jobs[3].made > 0)


def test_who_leaves_while_it_is_prepared_frees_its_slot(turns: Turns) -> None:
    begun = threading.Event()

    def prepare(go_on: Callable[[], None]) -> Iterator[Piece]:
        while True:  # a prompt that is read
            go_on()
            begun.set()
            time.sleep(0.001)

    job = Job(prepare)
    turns.enter(job)
    assert begun.wait(20) and turns.playing == 1
    turns.stop(job)
    until(lambda: turns.playing == 0)
    assert job.end is not None and job.end.reason == "stopped" and job.end.error is None


def test_long_turns_get_no_more_time_than_short_ones(turns: Turns) -> None:
    order: list[str] = []
    ready = threading.Event()

    def work(name: str, turn_s: float) -> Callable[[object], Iterator[Piece]]:
        def prepare(_: object) -> Iterator[Piece]:
            ready.wait(20)
            return pieces()

        def pieces() -> Iterator[Piece]:
            for number in range(OUTBOX_PIECES):
                order.append(name)
                time.sleep(turn_s)
                yield Piece(number, 1)

        return prepare

    jobs = [Job(work("long", 0.04)), Job(work("short", 0.01))]
    for job in jobs:
        turns.enter(job)
        turns.pause(job)
    ready.set()
    until(lambda: all(job.prepared for job in jobs))
    for job in jobs:
        turns.resume(job)
    until(lambda: order.count("short") == OUTBOX_PIECES)
    # 4 to 1, but for what a busy machine makes of it; by turns it would be 1 to 1.
    assert 1 <= order.count("long") <= OUTBOX_PIECES / 2


def test_a_listener_is_served_just_ahead_of_its_clock(turns: Turns) -> None:
    job = Job(lambda _: endless(seconds=0.05), ahead_s=0.3)
    begun = time.monotonic()
    turns.enter(job)
    found = 0
    while found < 12:
        found += turns.take(job) is not None
        time.sleep(0.001)
    # 0.6 s of sound, of which 0.3 may come at once; the next piece not before it is due.
    assert time.monotonic() - begun >= 0.6 - 0.3 - 0.05
    turns.pause(job)
    until(lambda: not job.in_turn)
    while turns.take(job) is not None:
        pass
    assert still(lambda: job.made)
    turns.resume(job)
    until(lambda: turns.take(job) is not None)


def test_a_pause_stops_the_making_and_not_the_taking(turns: Turns) -> None:
    job = Job(endless)
    turns.enter(job)
    until(lambda: job.made == OUTBOX_PIECES)
    turns.pause(job)
    turns.pause(job)
    assert [turns.take(job) is not None for _ in range(OUTBOX_PIECES + 1)] == [True] * OUTBOX_PIECES + [False]
    assert still(lambda: job.made)
    turns.resume(job)
    turns.resume(job)
    until(lambda: turns.take(job) is not None)


def test_faults_end_a_job_with_words(turns: Turns, caplog: pytest.LogCaptureFixture) -> None:
    def fails(error: Exception) -> Iterator[Piece]:
        yield Piece(0, 1)
        raise error

    def raises(error: Exception) -> Callable[[object], Iterator[Piece]]:
        def prepare(_: object) -> Iterator[Piece]:
            raise error

        return prepare

    known = DataError("line 1: no letter z"), Refusal("bad_audio", "no sound"), RuntimeError("secret")
    for error, code in zip(known, ("bad_message", "bad_audio", "internal"), strict=True):
        for prepare, before in ((raises(error), []), (lambda _, error=error: fails(error), [0])):
            job = Job(prepare)
            turns.enter(job)
            assert taken(turns, job) == before
            assert job.end is not None and job.end.error is not None and job.end.error.code == code
            assert ("secret" in str(job.end.error)) is False
            until(lambda: turns.playing == 0)
    assert "secret" in caplog.text  # the log says what clients are not told


def test_closing_ends_everything_with_its_reason() -> None:
    turns = Turns(slots=1, queue=1, workers=2)
    jobs = [Job(endless), Job(endless)]
    for job in jobs:
        turns.enter(job)
    turns.close()
    turns.join()
    assert [job.end.reason for job in jobs if job.end] == ["shutdown", "shutdown"]
    with pytest.raises(Refusal) as refused:
        turns.enter(Job(endless))
    assert refused.value.code == "shutdown"


def test_time_is_counted_without_waiting_for_the_client(turns: Turns) -> None:
    job = Job(lambda _: itertools.islice(endless(), OUTBOX_PIECES + 1))
    turns.enter(job)
    until(lambda: job.made == OUTBOX_PIECES)
    time.sleep(0.6)
    taken(turns, job)
    assert job.spent_s < 0.6
