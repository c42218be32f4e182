"""Totals are exact: every symbol once, whatever the lanes."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import CODE_STREAMS, NUMBERED, STREAMS, TEXT, stream_model, text_model, wave_model
from txl_audio.dynamic import DynamicConfig
from txl_audio.evaluate import (
    EvaluateConfig,
    Totals,
    evaluate,
    score_document,
    score_tokens,
    window_begins,
)
from txl_audio.model.positions import RelativeConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import ConfigError, DataError


def documents_for(model: SequenceModel, lengths: tuple[int, ...] = (130, 7, 61, 2, 300)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, model.spec.vocab_size, n).astype(np.uint8) for n in lengths]


@pytest.mark.parametrize("window", ["sliding", "same_length"])
@pytest.mark.parametrize("stream", [*STREAMS, *CODE_STREAMS, "text"])
def test_lanes_and_order_change_nothing(stream: str, window: str) -> None:
    model = stream_model(stream, window=window)
    documents = documents_for(model)
    alone = torch.cat([score_document(model, document) for document in documents])
    assert len(alone) == 500 - (5 if stream == "text" else 0)
    # A text is cut into a piece for every lane, and a piece begins without what stands before it.
    for lanes in (1,) if stream == "text" else (1, 2, 3, 8):
        totals = evaluate(model, documents, EvaluateConfig(lanes=lanes))
        assert totals.count == len(alone)
        assert totals.nats == pytest.approx(alone.double().sum().item(), rel=1e-5)
    backwards = evaluate(model, documents[::-1], EvaluateConfig(lanes=lanes))
    assert backwards.nats == pytest.approx(totals.nats, rel=1e-5)


def test_with_the_papers_window_the_count_is_exact_too() -> None:
    for model, expected in ((wave_model(window="segment"), 500), (text_model(window="segment"), 495)):
        documents = documents_for(model)
        counts = {evaluate(model, documents, EvaluateConfig(lanes=lanes)).count for lanes in (1, 2, 8)}
        assert counts == {expected}


def test_a11_zeros_are_scored_like_any_code() -> None:
    model = wave_model()
    totals = evaluate(model, [np.zeros(37, dtype=np.uint8)])
    assert totals.count == 37 and math.isfinite(totals.nats) and totals.nats > 0


def test_sums_are_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a sum beyond 2^24 would lose what is added to it one by one."""
    model = text_model()

    def nll(inputs: torch.Tensor, targets: torch.Tensor, state: Any, reset: Any) -> tuple[torch.Tensor, Any]:
        nats = torch.where(targets >= 0, 1.0, 0.0)
        nats[0, 0] = 2.0**25
        return nats, state

    monkeypatch.setattr(model, "nll", nll)
    assert evaluate(model, [np.zeros(101, dtype=np.uint8)], EvaluateConfig(lanes=1)) == Totals(
        2.0**25 + 99, 100
    )


def test_bits() -> None:
    assert Totals(nats=24 * math.log(2), count=3).bits == pytest.approx(8.0)
    assert Totals(nats=0.0, count=0).bits == 0.0


def test_uniform_guessing_costs_the_logarithm_of_the_vocabulary() -> None:
    model = text_model()
    with torch.no_grad():
        for parameter in (model.embedding.weight, model.head.bias):
            parameter.zero_()
    totals = evaluate(model, [np.arange(50) % TEXT.vocab_size])
    assert totals.bits == pytest.approx(math.log2(TEXT.vocab_size), abs=1e-5)


def test_warm_memory_runs_on_between_documents() -> None:
    model = wave_model()
    documents = documents_for(model)
    warm = evaluate(model, documents, EvaluateConfig(lanes=1), warm=True)
    cold = evaluate(model, documents, EvaluateConfig(lanes=1))
    assert warm.count == cold.count and abs(warm.nats - cold.nats) > 1e-2


def test_limit_and_progress() -> None:
    model = text_model()
    seen: list[int] = []
    totals = evaluate(
        model, [np.zeros(3000, dtype=np.uint8)], EvaluateConfig(lanes=1), limit=500, progress=seen.append
    )
    assert seen == sorted(seen) and seen[-1] == totals.count
    assert 500 <= totals.count < 1000


def test_the_model_is_left_as_it_was() -> None:
    model = wave_model(dropout=0.5)
    documents = documents_for(model, (40, 9))
    state = torch.get_rng_state()
    expected = evaluate(model, documents)
    assert not model.training
    model.train()
    assert evaluate(model, documents) == expected  # without dropout
    assert model.training and all(p.grad is None for p in model.parameters())
    score_document(model, documents[0])
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_bfloat16_is_close() -> None:
    model = wave_model("p4-codes")
    documents = documents_for(model)
    exact, rough = (evaluate(model, documents, precision=p).bits for p in ("float32", "bfloat16"))
    assert rough == pytest.approx(exact, rel=5e-3) and rough != exact


def test_scores_of_a_document() -> None:
    text, wave = text_model(), wave_model()
    assert score_document(text, np.array([1, 2, 3])).shape == (2,)
    assert score_document(text, np.array([1])).shape == (0,)  # M18: targets are the next symbols
    nats = score_document(wave, np.array([1, 2, 3, 4, 5]))
    assert nats.shape == (5,) and nats.dtype == torch.float32 and (nats > 0).all()
    assert score_document(wave, np.zeros(0, dtype=np.uint8)).shape == (0,)


def test_parallel_streams_of_tokens() -> None:
    model = text_model()
    tokens = torch.randint(TEXT.vocab_size, (20, 3))
    nats = score_tokens(model, tokens)
    assert nats.shape == (19, 3) and nats.dtype == torch.float32
    for lane in range(3):
        alone = score_document(model, tokens[:, lane].numpy())
        torch.testing.assert_close(nats[:, lane], alone, rtol=1e-5, atol=1e-5)


def test_tokens_that_cannot_be_scored() -> None:
    model = text_model()
    for tokens in (torch.zeros(5, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(DataError, match=r"expected tokens of shape \[N \+ 1, B\]"):
            score_tokens(model, tokens)
    with pytest.raises(DataError, match="1 symbol per frame, got shape .* and 4 symbols per frame"):
        score_tokens(wave_model(), torch.zeros(4, 2, dtype=torch.int64))
    for wrong in (torch.full((3, 1), 11), torch.full((3, 1), -1), torch.zeros(3, 1)):
        with pytest.raises(DataError, match="tokens must be integers in 0..10"):
            score_tokens(model, wrong)


@pytest.mark.parametrize("stride", [1, 3, 4])
@pytest.mark.parametrize("scheme", ["absolute", "alrfou", "relative"])
def test_sliding_windows_score_every_target_with_the_longest_context(scheme: str, stride: int) -> None:
    model = text_model(**NUMBERED.get(scheme, {"mem_len": 0, "window": "segment"}))
    documents = documents_for(model, (30, 3, 1, 5, 6))
    expected, count = 0.0, 0
    for document in documents:
        line = torch.from_numpy(document).long()[None, :, None]
        end = 0
        for begin in [*range(0, len(document) - 5, stride), max(0, len(document) - 5)]:
            window = line[:, begin : begin + 5]  # segments of 4 and the symbol after
            if window.size(1) < 2:
                continue
            nats, _ = model.nll(window[:, :-1], window[:, 1:], model.initial_state(1))
            new = begin + nats.size(1) - end
            expected, count, end = (
                expected + nats[0, nats.size(1) - new :].sum().item(),
                count + new,
                end + new,
            )
    assert count == sum(len(document) - 1 for document in documents)
    for lanes in (1, 5):
        totals = evaluate(model, documents, EvaluateConfig(stride=stride, lanes=lanes))
        assert totals.count == count and totals.nats == pytest.approx(expected, rel=1e-6)


UNSTAGED = [name for name in STREAMS if not name.startswith("staged")]


@pytest.mark.parametrize("stream", UNSTAGED)
def test_sliding_windows_over_frames_keep_the_symbols_before(stream: str) -> None:
    """With windows that do not overlap nothing but the history of samples goes from one to the next."""
    model = wave_model(stream, mem_len=0, window="segment")
    documents = documents_for(model, (64, 128))
    whole = evaluate(model, documents, EvaluateConfig(lanes=1))
    windows = evaluate(model, documents, EvaluateConfig(stride=4, lanes=3))
    assert windows.count == whole.count and windows.nats == pytest.approx(whole.nats, rel=1e-6)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("stream", [*UNSTAGED, "text"])
def test_scores_of_single_documents_and_streams_heed_the_stride(stream: str, stride: int) -> None:
    model = stream_model(stream, mem_len=0, window="segment")
    documents = documents_for(model, (66, 3, 1))
    settings = EvaluateConfig(stride=stride)
    scores = [score_document(model, document, settings) for document in documents]
    assert [len(s) for s in scores] == ([65, 2, 0] if stream == "text" else [66, 3, 1])
    totals = evaluate(model, documents, settings)
    assert sum(s.double().sum().item() for s in scores) == pytest.approx(totals.nats, rel=1e-6)
    if stream == "text":
        assert totals.nats != pytest.approx(evaluate(model, documents).nats, rel=1e-4)
        tokens = torch.from_numpy(np.stack([documents[0], documents[0][::-1]], axis=1))
        nats = score_tokens(model, tokens, settings)
        assert nats.shape == (65, 2)
        torch.testing.assert_close(nats[:, 0], scores[0])


def test_a_score_does_not_learn() -> None:
    model, dynamic = text_model(), EvaluateConfig(dynamic=DynamicConfig(method="sgd"))
    with pytest.raises(ConfigError, match="scored without learning; leave dynamic out"):
        score_document(model, np.array([1, 2, 3]), dynamic)
    with pytest.raises(ConfigError, match="scored without learning; leave dynamic out"):
        score_tokens(model, torch.zeros(4, 2, dtype=torch.int64), dynamic)


def test_lanes_by_default() -> None:
    text, wave = TEXT, wave_model().spec
    dynamic = DynamicConfig()
    for config, expected in (
        (EvaluateConfig(), (1, 8)),
        (EvaluateConfig(dynamic=dynamic), (1, 1)),
        (EvaluateConfig(stride=1), (16, 16)),
        (EvaluateConfig(lanes=3, stride=1), (3, 3)),
        (EvaluateConfig(lanes=3, dynamic=dynamic), (3, 3)),
    ):
        assert (config.lanes_of(text), config.lanes_of(wave)) == expected


def test_windows_are_cut_as_they_are_needed() -> None:
    assert [b.tolist() for b in window_begins(12, 4, stride=3, lanes=2)] == [[0], [3, 6], [8]]
    assert [b.tolist() for b in window_begins(10, 4, stride=3, lanes=9)] == [[0], [3, 6]]
    assert [b.tolist() for b in window_begins(4, 4, stride=1, lanes=2)] == [[0]]
    assert list(window_begins(0, 0, stride=1, lanes=2)) == []
    # Of a long text no table is made of all windows.
    first, second = islice(window_begins(10**13, 512, stride=1, lanes=16), 2)
    assert first.tolist() == [0] and second.tolist() == list(range(1, 17))


def test_settings_of_its_own_equal_a_model_built_with_them() -> None:
    changes = {"mem_len": 9, "segment_len": 7, "window": "same_length"}
    model = text_model()
    built = text_model(**changes, positions=RelativeConfig(clamp_len=5))
    documents = documents_for(model)
    expected = evaluate(built, documents, EvaluateConfig(segment_len=7))
    got = evaluate(model, documents, EvaluateConfig(**changes, clamp_len=5))
    assert got == expected != evaluate(model, documents)
    alone = score_document(model, documents[0], EvaluateConfig(**changes, clamp_len=5))
    torch.testing.assert_close(alone, score_document(built, documents[0]), rtol=1e-5, atol=1e-5)


def test_segments_are_long_where_nothing_depends_on_them() -> None:
    lengths = {
        (window, dynamic): EvaluateConfig(dynamic=DynamicConfig() if dynamic else None)
        .view(text_model(window=window))
        .core.config.segment_len
        for window in ("segment", "same_length", "sliding")
        for dynamic in (False, True)
    }
    assert {key for key, length in lengths.items() if length == 256} == {
        ("same_length", False),
        ("sliding", False),
    }
    assert set(lengths.values()) == {4, 256}


def test_settings_that_cannot_be_used() -> None:
    documents = [np.zeros(9, dtype=np.uint8)]
    for model, config, message in (
        (text_model(), EvaluateConfig(stride=1), "stride is for models without memory"),
        (text_model(mem_len=0), EvaluateConfig(stride=1), "window sliding; leave stride out"),
        (text_model(**NUMBERED["alrfou"]), EvaluateConfig(stride=5), "stride 5 would leave out targets"),
        (text_model(**NUMBERED["alrfou"]), EvaluateConfig(mem_len=4), "expected mem_len 0, got 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(model, documents, config)
    with pytest.raises(ConfigError, match="stride scores windows without memory, so none can be warm"):
        evaluate(text_model(**NUMBERED["alrfou"]), documents, EvaluateConfig(stride=1), warm=True)
    with pytest.raises(ValueError, match="two ways to evaluate"):
        EvaluateConfig(stride=1, dynamic=DynamicConfig())


def test_nothing_to_score() -> None:
    with pytest.raises(DataError, match="at least one document"):
        evaluate(wave_model(), [])


def test_predictors_run_along_the_whole_stream() -> None:
    model = wave_model("staged-p4", mem_len=0, window="segment")
    with pytest.raises(ConfigError, match="predictors run along the whole stream; leave stride out"):
        evaluate(model, documents_for(model, (9,)), EvaluateConfig(stride=2))
