"""Totals are exact: every symbol once, whatever the lanes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import STREAMS, TEXT, text_model, wave_model
from txl_audio.evaluate import Totals, evaluate, score_document, score_tokens
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import DataError


def make(stream: str, **changes: object) -> SequenceModel:
    return text_model(**changes) if stream == "text" else wave_model(stream, **changes)


def documents_for(model: SequenceModel, lengths: tuple[int, ...] = (130, 7, 61, 2, 300)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, model.spec.vocab_size, n).astype(np.uint8) for n in lengths]


@pytest.mark.parametrize("window", ["sliding", "same_length"])
@pytest.mark.parametrize("stream", [*STREAMS, "text"])
def test_lanes_and_order_change_nothing(stream: str, window: str) -> None:
    model = make(stream, window=window)
    documents = documents_for(model)
    alone = torch.cat([score_document(model, document) for document in documents])
    assert len(alone) == 500 - (5 if stream == "text" else 0)
    for lanes in (1, 2, 3, 8):
        totals = evaluate(model, documents, lanes=lanes)
        assert totals.count == len(alone)
        assert totals.nats == pytest.approx(alone.double().sum().item(), rel=1e-5)
    backwards = evaluate(model, documents[::-1], lanes=2)
    assert backwards.nats == pytest.approx(totals.nats, rel=1e-5)


def test_with_the_papers_window_the_count_is_exact_too() -> None:
    model = wave_model(window="segment")
    documents = documents_for(model)
    assert {evaluate(model, documents, lanes=lanes).count for lanes in (1, 2, 8)} == {500}


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
    assert evaluate(model, [np.zeros(101, dtype=np.uint8)], lanes=1) == Totals(2.0**25 + 99, 100)


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
    warm = evaluate(model, documents, lanes=1, warm=True)
    cold = evaluate(model, documents, lanes=1)
    assert warm.count == cold.count and abs(warm.nats - cold.nats) > 1e-2


def test_limit_and_progress() -> None:
    model = text_model()
    seen: list[int] = []
    totals = evaluate(model, [np.zeros(3000, dtype=np.uint8)], lanes=1, limit=500, progress=seen.append)
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


def test_nothing_to_score() -> None:
    with pytest.raises(DataError, match="at least one document"):
        evaluate(wave_model(), [])
