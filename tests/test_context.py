"""Relative effective context length: by hand on tables of losses, then on models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.tiny import NUMBERED, TEXT, text_model, wave_model
from txl_audio.context import (
    effective_length,
    losses_at,
    measure,
    reaches,
    relative_gain,
    sample_positions,
)
from txl_audio.evaluate import EvaluateConfig, score_document
from txl_audio.tokens import ConfigError, DataError, SpecError


def test_gain_by_hand() -> None:
    shorter = np.array([[4.0, 1.0, 2.0, 3.0], [5.0, 0.5, 3.0, 2.0]])
    longer = np.array([[3.0, 9.0, 2.0, 2.0], [6.0, 0.0, 1.0, 1.0]])
    # Baselines 4, 0.5, 2, 2. Hardest quarter: position 0 alone, and worse than the baseline is no loss.
    assert relative_gain(shorter, longer, 0.25) == pytest.approx([1 - math.exp(3 - 4), 0.0])
    # All of them: mean baseline 8.5 / 4; after it (3 + 0.5 + 2 + 2) / 4 and (4 + 0 + 1 + 1) / 4.
    assert relative_gain(shorter, longer, 1.0) == pytest.approx(
        [1 - math.exp((7.5 - 8.5) / 4), 1 - math.exp((6 - 8.5) / 4)]
    )


def test_length_is_where_the_gain_first_falls_under_one_percent() -> None:
    reach = effective_length([10, 20, 30, 40], [0.5, 0.009, 0.3])
    assert (reach.length, reach.whole) == (20, True)
    assert effective_length([10, 20], [0.0]).length == 10
    still = effective_length([10, 20, 30], [0.5, 0.01])
    assert (still.length, still.whole) == (30, False)


def test_a_group_whose_lengths_are_known() -> None:
    """One model gains up to 30, one up to 20, on the hard half only; the easy half never changes."""
    contexts = [10, 20, 30, 40, 50]
    hard = np.array([[5.0, 4.0, 3.0, 3.0, 3.0], [5.0, 4.0, 4.0, 4.0, 4.0]])
    nats = np.stack([hard, np.full_like(hard, 0.1)] * 3, axis=-1)  # [G, C, N]
    result = reaches(contexts, nats, [0.5])
    # At 20 both have 4, so the group's baseline is 4 and the second gains nothing any more; at 30 the
    # baseline is the first one's 3.
    assert [r.length for r in result.reach[0.5]] == [30, 20]
    assert [r.whole for r in result.reach[0.5]] == [True, True]
    assert result.reach[0.5][0].gains == pytest.approx([1 - math.exp(-1), 1 - math.exp(-1), 0, 0])


def test_positions_have_their_context_and_all_are_possible() -> None:
    documents = [np.arange(5), np.arange(2), np.arange(20, 24)]
    spec = TEXT
    sampled = sample_positions(documents, spec, count=99, context=3)
    # Every target with 3 symbols before it, each once, in order.
    assert sampled.targets.flatten().tolist() == [3, 4, 23]
    assert sampled.inputs[..., 0].tolist() == [[0, 1, 2], [1, 2, 3], [20, 21, 22]]
    some = sample_positions([np.arange(1000)], spec, count=50, context=3, seed=1)
    assert len(set(some.targets.flatten().tolist())) == 50
    with pytest.raises(DataError, match="no document has 9 frames of context, the longest has 4"):
        sample_positions(documents, spec, count=1, context=9)


@pytest.mark.parametrize("context", [1, 4, 7, 12])
@pytest.mark.parametrize("window", ["sliding", "segment"])
def test_losses_are_those_of_a_text_that_begins_there(window: str, context: int) -> None:
    model = text_model(window=window, mem_len=12)
    document = np.random.default_rng(0).integers(0, TEXT.vocab_size, 40)
    sampled = sample_positions([document], TEXT, count=9, context=12)
    got = losses_at(model, sampled, context, lanes=4)
    for inputs, target, nats in zip(sampled.inputs, sampled.targets, got, strict=True):
        line = torch.cat([inputs[12 - context :, 0], target])
        alone = score_document(model.view(mem_len=12, segment_len=12), line.numpy())
        assert nats == pytest.approx(alone[-1].item(), rel=1e-5)


def test_without_memory_a_segment_is_all_there_is() -> None:
    for changes in ({"mem_len": 0, "window": "segment"}, *NUMBERED.values()):
        model = text_model(**changes)
        document = np.random.default_rng(0).integers(0, TEXT.vocab_size, 40)
        sampled = sample_positions([document], TEXT, count=9, context=12)
        four, twelve = (losses_at(model, sampled, context, lanes=9) for context in (4, 12))
        np.testing.assert_array_equal(four, twelve)
        assert not np.array_equal(four, losses_at(model, sampled, 3, lanes=9))


def test_measuring_stops_when_nothing_gains() -> None:
    """A model without memory cannot gain beyond its segment of 4 frames."""
    model = text_model(**NUMBERED["alrfou"])
    documents = [np.random.default_rng(0).integers(0, TEXT.vocab_size, 200)]
    steps = list(
        measure(
            [model], [EvaluateConfig()], documents, fractions=[1.0, 0.5], step=4, longest=40, positions=20
        )
    )
    assert [s.contexts for s in steps] == [(4,), (4, 8)]
    assert all(group[0].length == 4 and group[0].whole for group in steps[-1].reach.values())


def test_sound_is_measured_in_frames() -> None:
    model = wave_model()
    documents = [np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8)]
    *_, last = measure(
        [model, model], [EvaluateConfig()] * 2, documents, fractions=[0.5], step=5, longest=10, positions=8
    )
    assert last.nats.shape == (2, 2, 8)
    np.testing.assert_array_equal(last.nats[0], last.nats[1])


def test_what_cannot_be_measured() -> None:
    model, documents = text_model(), [np.zeros(50, dtype=np.uint8)]

    def first(models: list, fractions: list[float], longest: int) -> None:
        settings = [EvaluateConfig()] * len(models)
        next(measure(models, settings, documents, fractions=fractions, step=5, longest=longest, positions=3))

    with pytest.raises(ConfigError, match="fractions of positions lie above 0"):
        first([model], [0.0], 20)
    with pytest.raises(ConfigError, match="leave nothing to compare"):
        first([model], [0.5], 9)
    with pytest.raises(SpecError, match="hold different symbols"):
        first([model, wave_model()], [0.5], 20)
