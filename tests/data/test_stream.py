"""Lanes over documents: every symbol is a target once, and lanes continue where they stood."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from txl_audio.data.stream import Batch, TokenStream, document_frames
from txl_audio.tokens import IGNORE, DataError, TokenSpec

V = 50_000
TEXT = TokenSpec("text", V, 1, 0.0, 0, "test", "0")


def wave(symbols_per_frame: int) -> TokenSpec:
    return TokenSpec("waveform", V, symbols_per_frame, 16_000 / symbols_per_frame, 16_000, "test", "0")


def documents_of(lengths: Iterable[int]) -> list[np.ndarray]:
    """Documents in which every symbol is another one, so that it can be followed."""
    documents, at = [], 0
    for n in lengths:
        documents.append(np.arange(at, at + n, dtype=np.uint16))
        at += n
    return documents


def lane_documents(batches: list[Batch], lane: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What one lane read, cut at its resets: (inputs, targets) frames of each document."""
    inputs, targets, reset = (
        torch.cat([getattr(batch, name)[lane] for batch in batches])
        for name in ("inputs", "targets", "reset")
    )
    begins = [*reset.nonzero().flatten().tolist(), len(reset)]
    assert not begins or begins[0] in (0, len(reset)), "something stands before a lane's first document"
    return [(inputs[a:b], targets[a:b]) for a, b in itertools.pairwise(begins)]


specs = st.one_of(st.just(TEXT), st.integers(1, 5).map(wave))


@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=9),
    spec=specs,
    lanes=st.integers(1, 4),
    segment_len=st.integers(1, 7),
    seed=st.one_of(st.none(), st.integers(0, 3)),
)
def test_every_symbol_is_scored_once_in_order(
    lengths: list[int], spec: TokenSpec, lanes: int, segment_len: int, seed: int | None
) -> None:
    documents = documents_of(lengths)
    first = 0 if spec.scores_first else 1
    usable = {int(d[0]): d for d in documents if len(d) > first}
    stream = TokenStream(documents, spec, lanes=lanes, segment_len=segment_len, seed=seed)
    if not usable:
        with pytest.raises(DataError, match="no document has a symbol to predict"):
            next(stream)
        return
    batches = list(stream)
    for batch in batches:
        assert batch.inputs.shape == batch.targets.shape == (lanes, segment_len, spec.symbols_per_frame)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.reset.shape == (lanes, segment_len) and batch.reset.dtype == torch.bool
    seen = []
    for lane in range(lanes):
        for inputs, targets in lane_documents(batches, lane):
            scored = targets[targets != IGNORE]
            document = torch.from_numpy(usable[int(scored[0]) - first].astype(np.int64))
            assert torch.equal(scored, document[first:])
            seen.append(int(document[0]))
            frames = -(-len(scored) // spec.symbols_per_frame)
            # Each input frame is what stands before its target frame.
            if spec.scores_first:
                assert (inputs[0] == V).all()
                assert torch.equal(inputs[1:frames], targets[: frames - 1])
            else:
                assert torch.equal(inputs[:frames, 0], document[:-1])
            assert (targets[frames:] == IGNORE).all()
    assert sorted(seen) == sorted(usable)


@pytest.mark.parametrize("spec", [TEXT, wave(1), wave(4)], ids=["text", "p1", "p4"])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("stop", range(9))
def test_resume_gives_the_same_batches(stop: int, seed: int | None, spec: TokenSpec) -> None:
    documents = documents_of([30, 3, 17, 1, 9, 40, 2])

    def make() -> TokenStream:
        return TokenStream(documents, spec, lanes=3, segment_len=4, seed=seed, epochs=3)

    stream = make()
    for _ in range(stop):
        next(stream)
    saved = json.loads(json.dumps(stream.state_dict()))
    resumed = make()
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == stream.state_dict()
    rest = list(stream)
    again = list(resumed)
    assert len(rest) == len(again) > 0
    for a, b in zip(rest, again, strict=True):
        assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("inputs", "targets", "reset"))


def order(batches: Iterable[Batch]) -> list[int]:
    """First symbols of documents as one lane begins them."""
    return [int(t) for batch in batches for t in batch.targets[0, batch.reset[0], 0]]


def test_epochs_are_shuffled_anew_from_the_seed() -> None:
    documents = documents_of([3] * 20)

    def run(seed: int | None, epochs: int = 2) -> list[int]:
        return order(TokenStream(documents, wave(1), lanes=1, segment_len=3, seed=seed, epochs=epochs))

    first, second = run(1)[:20], run(1)[20:]
    assert sorted(first) == sorted(second) == [3 * i for i in range(20)]
    assert first != second != sorted(second)
    assert run(1) == run(1) and run(1) != run(2)
    assert run(None) == [3 * i for i in range(20)] * 2


def test_an_endless_stream_goes_on() -> None:
    stream = TokenStream(documents_of([5, 2]), wave(1), lanes=2, segment_len=3, epochs=None)
    batches = [next(stream) for _ in range(50)]
    assert all((batch.targets >= 0).all() for batch in batches)


def test_idle_lanes_are_ignored() -> None:
    (batch,) = TokenStream(documents_of([4, 4]), wave(2), lanes=5, segment_len=2)
    assert batch.reset.any(1).tolist() == [True, True, False, False, False]
    assert (batch.targets[2:] == IGNORE).all() and (batch.inputs[2:] == V).all()
    (batch,) = TokenStream(documents_of([4]), TEXT, lanes=2, segment_len=3)
    assert (batch.targets[1] == IGNORE).all() and not batch.inputs[1].any()


def test_an_exhausted_stream_stays_so() -> None:
    stream = TokenStream(documents_of([4]), wave(1), lanes=1, segment_len=3)
    assert len(list(stream)) == 2
    with pytest.raises(StopIteration):
        next(stream)


def test_m12_last_partial_segments_are_scored() -> None:
    """5 sentences of 4 tokens: 15 targets, the first token of each is context."""
    stream = TokenStream(documents_of([4] * 5), TEXT, lanes=2, segment_len=3)
    targets = torch.cat([batch.targets.flatten() for batch in stream])
    assert sorted(targets[targets >= 0].tolist()) == [i for i in range(20) if i % 4]


def test_m18_one_token_of_text_has_no_target() -> None:
    inputs, targets = document_frames(np.array([7]), TEXT)
    assert inputs.shape == targets.shape == (0, 1)
    with pytest.raises(DataError, match="text needs at least 2 symbols"):
        next(TokenStream(documents_of([1, 1]), TEXT, lanes=1, segment_len=4))


def test_text_targets_are_the_next_symbols() -> None:
    inputs, targets = document_frames(np.array([7, 8, 9]), TEXT)
    assert inputs[:, 0].tolist() == [7, 8] and targets[:, 0].tolist() == [8, 9]


def test_a11_code_0_is_a_code_and_padding_is_not() -> None:
    spec = TokenSpec("waveform", 256, 4, 4000.0, 16_000, "test", "0")
    inputs, targets = document_frames(np.zeros(6, dtype=np.uint8), spec)
    assert inputs.tolist() == [[256] * 4, [0] * 4]
    assert targets.tolist() == [[0] * 4, [0, 0, IGNORE, IGNORE]]


def test_an_empty_document_has_no_frames() -> None:
    inputs, targets = document_frames(np.zeros(0, dtype=np.uint8), wave(4))
    assert inputs.shape == targets.shape == (0, 4)


def test_large_vocabularies_keep_their_ids() -> None:
    spec = TokenSpec("codes", 2**15, 2, 50.0, 16_000, "test", "0")
    inputs, targets = document_frames(np.array([2**15 - 1, 0, 5, 6], dtype=np.uint16), spec)
    assert inputs[0].tolist() == [2**15] * 2 and targets[0].tolist() == [2**15 - 1, 0]
    frames = document_frames(np.array([40_000, 49_999], dtype=np.uint16), TEXT)
    assert [f[0, 0] for f in frames] == [40_000, 49_999]


def test_warm_streams_say_nothing_of_beginnings() -> None:
    stream = TokenStream(documents_of([4, 4]), wave(1), lanes=1, segment_len=3, reset=False)
    assert not any(batch.reset.any() for batch in stream)


def test_errors() -> None:
    with pytest.raises(DataError, match="at least one document, got none"):
        TokenStream([], wave(1), lanes=1, segment_len=3)
    two = TokenStream(documents_of([4, 4]), wave(1), lanes=2, segment_len=3)
    three = TokenStream(documents_of([4, 4]), wave(1), lanes=3, segment_len=3)
    with pytest.raises(DataError, match="saved position has 2 lanes, this stream 3; resume with the saved"):
        three.load_state_dict(two.state_dict())
