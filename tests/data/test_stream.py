"""Lanes over documents: every symbol is a target once, and lanes continue where they stood."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from txl_audio.data.disturb import DisturbConfig
from txl_audio.data.sentences import ShuffledSentences
from txl_audio.data.stream import Batch, TokenStream, document_frames, frames_at
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
    symbols = np.arange(sum(lengths))
    ends = np.cumsum(lengths).tolist()
    usable = sum(n > first for n in lengths)
    if not usable:
        with pytest.raises(DataError, match="no document has a symbol to predict"):
            TokenStream(documents, spec, lanes=lanes, segment_len=segment_len, seed=seed)
        return
    batches = list(TokenStream(documents, spec, lanes=lanes, segment_len=segment_len, seed=seed))
    for batch in batches:
        assert batch.inputs.shape == batch.targets.shape == (lanes, segment_len, spec.symbols_per_frame)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.reset.shape == (lanes, segment_len) and batch.reset.dtype == torch.bool
    seen, pieces = [], 0
    share = -(-sum(max(0, n - first) for n in lengths) // lanes)
    for lane in range(lanes):
        for inputs, targets in lane_documents(batches, lane):
            scored = targets[targets != IGNORE].tolist()
            # Symbols are numbered through, so a piece of a document is a run of numbers.
            assert scored == symbols[scored[0] : scored[-1] + 1].tolist()
            assert sum(scored[0] <= end - 1 < scored[-1] for end in ends) == 0, "over a document's end"
            seen += scored
            pieces += 1
            frames = -(-len(scored) // spec.symbols_per_frame)
            # Each input frame is what stands before its target frame.
            if spec.scores_first:
                assert (inputs[0] == V).all()
                assert torch.equal(inputs[1:frames], targets[: frames - 1])
            else:
                assert inputs[:frames, 0].tolist() == [symbol - 1 for symbol in scored]
                assert len(scored) <= share
            assert (targets[frames:] == IGNORE).all()
    firsts = {end - n for end, n in zip(ends, lengths, strict=True)} if first else set()
    assert sorted(seen) == sorted(set(symbols.tolist()) - firsts)
    assert usable <= pieces <= usable + lanes and (lanes > 1 or pieces == usable)
    assert not spec.scores_first or pieces == usable, "recordings are not cut"


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


def test_m12_one_giant_document_fills_every_lane() -> None:
    """Lanes stand side by side in the text as in the authors' code, which leaves out the last targets."""
    batches = list(TokenStream(documents_of([24]), TEXT, lanes=3, segment_len=5))
    assert len(batches) == 2
    lanes = torch.cat([batch.targets[..., 0] for batch in batches], dim=1)
    assert lanes.tolist() == [
        [*range(1, 8), *[IGNORE] * 3],
        [*range(8, 16), -1, -1],
        [*range(16, 24), -1, -1],
    ]
    inputs = torch.cat([batch.inputs[..., 0] for batch in batches], dim=1)
    assert [lane[0] for lane in inputs.tolist()] == [0, 7, 15], "one symbol of context before each piece"
    assert [batch.reset.sum(1).tolist() for batch in batches] == [[1, 1, 1], [0, 0, 0]]
    (alone,) = TokenStream(documents_of([24]), TEXT, lanes=1, segment_len=23)
    assert alone.reset.sum() == 1 and (alone.targets != IGNORE).all()


SEPARATOR = 0


def sentences_of(*lengths: int) -> np.ndarray:
    """A separator, then sentences of so many words, each word another number, each with its separator."""
    line, word = [SEPARATOR], 1
    for n in lengths:
        line += [*range(word, word + n), SEPARATOR]
        word += n
    return np.array(line, dtype=np.uint16)


def split_at_separators(symbols: Iterable[int]) -> list[tuple[int, ...]]:
    sentences: list[tuple[int, ...]] = []
    sentence: list[int] = []
    for symbol in symbols:
        sentence.append(symbol)
        if symbol == SEPARATOR:
            sentences.append(tuple(sentence))
            sentence = []
    return [*sentences, tuple(sentence)] if sentence else sentences


@given(
    symbols=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    cuts=st.tuples(st.integers(0, 31), st.integers(0, 31)),
    seed=st.integers(0, 5),
)
def test_shuffled_sentences_stay_whole(symbols: list[int], cuts: tuple[int, int], seed: int) -> None:
    line = ShuffledSentences(np.array(symbols), SEPARATOR, np.random.default_rng(seed))
    whole = line[0 : len(line)].tolist()
    assert len(line) == len(whole) == len(symbols) and whole[0] == symbols[0]
    before, after = split_at_separators(symbols[1:]), split_at_separators(whole[1:])
    assert sorted(before) == sorted(after)
    if symbols[1:] and symbols[-1] != SEPARATOR:
        assert before[-1] == after[-1], "what no separator ends stays last"
    a, b = sorted(cuts)
    assert line[a:b].tolist() == whole[a:b]


def test_sentences_are_shuffled_anew_every_epoch_of_training() -> None:
    document = sentences_of(3, 1, 4, 2, 5, 3, 2, 6, 1, 3)

    def epochs(seed: int | None, lanes: int = 1) -> list[list[int]]:
        stream = TokenStream(
            [document], TEXT, lanes=lanes, segment_len=8, seed=seed, epochs=2, separator=SEPARATOR
        )
        targets = torch.cat([batch.targets[..., 0] for batch in stream], dim=1).flatten()
        line = targets[targets != IGNORE].tolist()
        return [line[: len(line) // 2], line[len(line) // 2 :]]

    first, second = epochs(7)
    assert first != second != document[1:].tolist() != first
    for line in (first, second):
        assert sorted(split_at_separators(line)) == sorted(split_at_separators(document[1:].tolist()))
    assert epochs(7) == [first, second] != epochs(8)
    assert epochs(None) == [document[1:].tolist()] * 2, "evaluation keeps the order"
    assert sorted(itertools.chain(*epochs(7, lanes=3))) == sorted(2 * document[1:].tolist())


def test_pieces_of_shuffled_sentences_fit_together() -> None:
    """Every piece is cut from the same order of the sentences, whichever lane reads it."""
    document = sentences_of(*[2] * 12)
    (batch,) = TokenStream([document], TEXT, lanes=4, segment_len=9, seed=3, separator=SEPARATOR)
    assert not batch.inputs[:, 0].any(), "here every piece begins after a separator"
    sentences = split_at_separators(batch.targets.flatten().tolist())
    assert sorted(sentences) == [(2 * i + 1, 2 * i + 2, SEPARATOR) for i in range(12)] != sentences


@pytest.mark.parametrize("stop", range(0, 34, 3))
def test_resume_inside_pieces_and_shuffled_sentences(stop: int) -> None:
    """Also where one lane still reads a piece of the epoch before."""
    documents = [sentences_of(*lengths) for lengths in ([5, 2, 9, 1], [4], [3, 3, 3, 8, 1, 1], [30])]

    def make() -> TokenStream:
        return TokenStream(documents, TEXT, lanes=3, segment_len=4, seed=1, epochs=5, separator=SEPARATOR)

    stream = make()
    for _ in range(stop):
        next(stream)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    rest, again = list(stream), list(resumed)
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
    (batch,) = TokenStream(documents_of([2]), TEXT, lanes=2, segment_len=3)
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
        TokenStream(documents_of([1, 1]), TEXT, lanes=1, segment_len=4)


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


@given(symbols=st.integers(0, 20), spec=specs, at=st.integers(0, 20), n=st.integers(0, 20))
def test_frames_are_read_where_they_lie(symbols: int, spec: TokenSpec, at: int, n: int) -> None:
    line = np.arange(symbols, dtype=np.uint16)
    inputs, targets = document_frames(line, spec)
    at = min(at, len(targets))
    n = min(n, len(targets) - at)
    part = frames_at(line, spec, at, n)
    np.testing.assert_array_equal(part[0], inputs[at : at + n])
    np.testing.assert_array_equal(part[1], targets[at : at + n])


def codes(delay_frames: int) -> TokenSpec:
    return TokenSpec("codes", V, 3, 50.0, 16_000, "test", "0", delay_frames=delay_frames)


def test_delayed_frames_are_a_shifted_view() -> None:
    """MusicGen's delay pattern by hand: row t holds code k of frame t - k."""
    inputs, targets = document_frames(np.arange(6), codes(1))
    assert targets.tolist() == [[0, IGNORE, IGNORE], [3, 1, IGNORE], [IGNORE, 4, 2], [IGNORE, IGNORE, 5]]
    assert inputs.tolist() == [[V, V, V], [0, V, V], [3, 1, V], [V, 4, 2]]


@given(frames=st.integers(0, 9), delay=st.integers(0, 3), at=st.integers(0, 20), n=st.integers(0, 20))
def test_delayed_codes_are_all_there_once(frames: int, delay: int, at: int, n: int) -> None:
    line, spec = np.arange(3 * frames, dtype=np.uint16), codes(delay)
    inputs, targets = document_frames(line, spec)
    assert len(targets) == (frames + 2 * delay if frames else 0)
    undelayed = [targets[k * delay : k * delay + frames, k] for k in range(3)]
    np.testing.assert_array_equal(np.stack(undelayed, axis=1).reshape(-1), line)
    assert (targets == IGNORE).sum() == (6 * delay if frames else 0)
    np.testing.assert_array_equal(inputs[1:], np.where(targets[:-1] == IGNORE, V, targets[:-1]))
    at = min(at, len(targets))
    n = min(n, len(targets) - at)
    for whole, part in zip((inputs, targets), frames_at(line, spec, at, n), strict=True):
        np.testing.assert_array_equal(part, whole[at : at + n])


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
    with pytest.raises(DataError, match="position is of 2 documents, here are 1; resume with the data"):
        TokenStream(documents_of([4]), wave(1), lanes=2, segment_len=3).load_state_dict(two.state_dict())
    with pytest.raises(DataError, match="holds .'epoch'., expected .* start anew"):
        two.load_state_dict({"epoch": 0})


def test_disturbances_are_heard_and_segments_fit_together() -> None:
    """Inputs and what frames see of themselves are one line, disturbed anew every epoch; see test_disturb."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(100, 156, 20_000).astype(np.uint8) for _ in range(4)]
    spec = replace(wave(4), vocab_size=256)
    settings = {"lanes": 2, "segment_len": 100, "seed": 1, "epochs": 2}
    disturb = DisturbConfig(noise=0.7, bursts=0.5)
    clean = list(TokenStream(documents, spec, **settings))
    batches = list(TokenStream(documents, spec, **settings, disturb=disturb))
    changed = unscored = 0
    for batch, plain in zip(batches, clean, strict=True):
        assert torch.equal(plain.heard, plain.targets) and torch.equal(batch.reset, plain.reset)
        goes_on = ~batch.reset[:, 1:]
        assert torch.equal(batch.heard[:, :-1][goes_on], batch.inputs[:, 1:][goes_on])
        assert torch.equal(batch.heard < 0, plain.targets < 0)
        changed += int((batch.heard != plain.targets).sum())
        unscored += int(((batch.targets < 0) & (plain.targets >= 0)).sum())
    assert changed > 1000 and unscored > 50
    for lane in range(2):
        heard, inputs, reset = (
            torch.cat([getattr(b, n)[lane] for b in batches]) for n in ("heard", "inputs", "reset")
        )
        assert torch.equal(heard[:-1][~reset[1:]], inputs[1:][~reset[1:]])
    # A resume goes on with the same disturbances.
    first = TokenStream(documents, spec, **settings, disturb=disturb)
    for _ in range(4):
        next(first)
    again = TokenStream(documents, spec, **settings, disturb=disturb)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    following = next(again)
    assert torch.equal(following.heard, batches[4].heard) and torch.equal(
        following.targets, batches[4].targets
    )
