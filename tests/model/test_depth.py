"""Codes of a neural codec, and text that stands beside them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.tiny import CODE_STREAMS, CODES, codes_model, wave_model
from txl_audio.cli.evaluate import figures_of
from txl_audio.data.stream import document_frames
from txl_audio.evaluate import TEXT, EvaluateConfig, Totals, evaluate, score_document
from txl_audio.model.depth import DepthHeadConfig
from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.tokens import IGNORE, ConfigError, SpecError

NOTHING = 11  # the start symbol: 7 codes, 4 symbols of text
MIXED = np.array([[7, NOTHING, NOTHING], [9, NOTHING, NOTHING], [1, 2, 3], [4, 5, 6], [10, NOTHING, NOTHING]])


def test_text_stands_alone_in_its_frame() -> None:
    spec = CODES.with_text(4, "0")
    assert (spec.vocab_size, spec.codes, spec.start_symbol) == (11, 7, NOTHING)
    inputs, targets = document_frames(MIXED.reshape(-1), spec)
    assert inputs.tolist() == [[NOTHING] * 3, *MIXED[:-1].tolist()]
    assert targets.tolist() == np.where(MIXED == NOTHING, IGNORE, MIXED).tolist()
    delayed = document_frames(MIXED.reshape(-1), spec.delayed(1))[1]
    assert delayed[:, 1].tolist() == [IGNORE] * 3 + [2, 5, IGNORE, IGNORE]


@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_codes_and_text_are_told_apart(stream: str) -> None:
    """In the first place all symbols have a probability, in the others codes only."""
    model = codes_model(stream, text_size=4)
    hidden, window = torch.randn(2, 12), torch.randint(7, (2, model.head.history))
    for place in range(3):
        p = model.head.log_probs(hidden, window, place).exp()
        torch.testing.assert_close(p.sum(-1), torch.ones(2))
        assert (p[:, 7:] > 0).all() if place == 0 else not p[:, 7:].any()


@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_totals_by_place(stream: str) -> None:
    model = codes_model(stream, text_size=4)
    documents = [MIXED.reshape(-1), MIXED[2:4].reshape(-1)]
    totals = evaluate(model, documents, EvaluateConfig(lanes=2))
    assert {key: count for key, (_, count) in totals.parts.items()} == {0: 4, 1: 4, 2: 4, TEXT: 3}
    assert totals.count == 15 and math.isfinite(totals.nats)
    assert sum(nats for nats, _ in totals.parts.values()) == pytest.approx(totals.nats)
    alone = sum(score_document(model, document).sum().item() for document in documents)
    assert totals.nats == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_weights_of_codebooks_are_in_the_objective_only(stream: str) -> None:
    """Every codebook has its own weight, at whatever step it is read; text has none, so 1."""
    model = codes_model(stream, text_size=4)
    inputs, targets = (torch.from_numpy(f)[None] for f in document_frames(MIXED.reshape(-1), model.spec))
    state, weights = model.initial_state(1), torch.tensor([2.0, 0.5, 3.0])
    nats, objective, count, _ = model.losses(inputs, targets, state, weights=weights)
    parts = evaluate(model, [MIXED.reshape(-1)]).parts
    assert nats.item() == pytest.approx(sum(part for part, _ in parts.values()), rel=1e-5)
    expected = parts[TEXT][0] + sum(w * parts[place][0] for place, w in enumerate(weights.tolist()))
    assert objective.item() == pytest.approx(expected, rel=1e-5)
    assert int(count) == 9


def test_figures_of_codes() -> None:
    """50 frames a second, of which there are 4; a text of 3 symbols beside them."""
    bits = {0: (8.0, 4), 1: (4.0, 4), 2: (2.0, 4), TEXT: (6.0, 3)}
    totals = Totals(20 * math.log(2), 15, {key: (b * math.log(2), n) for key, (b, n) in bits.items()})
    assert figures_of(CODES, totals) == {
        "bits_per_second": pytest.approx(50 * 3.5),
        "bits_per_frame": pytest.approx(3.5),
        "bits_per_frame_stage_1": pytest.approx(2.0),
        "bits_per_frame_stage_2": pytest.approx(1.0),
        "bits_per_frame_stage_3": pytest.approx(0.5),
        "bits_per_text_symbol": pytest.approx(2.0),
    }
    assert figures_of(CODES, Totals(math.log(2), 2)) == {"bits_per_code": pytest.approx(0.5)}


def test_a_walk_reads_the_codes_before() -> None:
    model = codes_model("codes-depth")
    hidden, window = torch.randn(1, 12), torch.tensor([[1, 2]])
    other = torch.tensor([[1, 3]])
    for place, reads in ((0, False), (1, True), (2, True)):
        a, b = (model.head.log_probs(hidden, w, place) for w in (window, other))
        assert torch.equal(a, b) != reads


def test_errors() -> None:
    wave = wave_model().spec
    with pytest.raises(ConfigError, match="head depth is of neural codecs' codes, got mulaw"):
        DepthHeadConfig(kind="depth").build(wave, 8, SymbolEmbeddingConfig().build(wave, 8))
    with pytest.raises(SpecError, match="delay_frames is 1, but only codes can be delayed, got mulaw"):
        wave.delayed(1)
    with pytest.raises(SpecError, match="text beside waveform .mulaw. is not supported"):
        wave.with_text(3, "0")
