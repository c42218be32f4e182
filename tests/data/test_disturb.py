"""Disturbed recordings: what is heard changes, what is predicted stays true, and nothing learns to burst."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import speech_like
from txl_audio.codecs.mulaw import mulaw_decode, mulaw_encode
from txl_audio.data.disturb import UNSCORED, DisturbConfig, disturbed
from txl_audio.tokens import IGNORE

CODES = mulaw_encode(0.4 * speech_like(3.0, 1))


def drawn(seed: int = 0, **shares: float) -> tuple[np.ndarray, np.ndarray]:
    return disturbed(CODES.astype(np.uint8), DisturbConfig(**shares), np.random.default_rng(seed))


def test_nothing_changes_without_a_share() -> None:
    heard, targets = drawn(noise=0, bursts=0)
    assert (heard == CODES).all() and heard is targets  # nothing is copied


def test_noise_is_heard_and_targets_are_clean() -> None:
    deviations = []
    for seed in range(20):
        heard, targets = drawn(seed, noise=1, codes=3.0, bursts=0)
        assert (targets == CODES).all() and heard.min() >= 0 and heard.max() <= 255
        deviations.append(float((heard - CODES).std()))
    assert (
        max(deviations) < 3.2 and min(deviations) < 1 and np.median(deviations) == pytest.approx(1.5, abs=0.7)
    )


def test_bursts_are_louder_than_the_recording_and_die_away() -> None:
    heard, targets = drawn(noise=0, bursts=1)
    unscored = targets == IGNORE
    assert 0 < unscored.mean() < 0.1
    begins = np.flatnonzero(np.diff(unscored.astype(int)) == 1) + 1
    loud, plain = np.abs(mulaw_decode(heard)), np.abs(mulaw_decode(CODES))
    assert len(begins) > 3
    for at in begins:
        assert unscored[at : at + min(UNSCORED, len(CODES) - at)].all()
    assert np.median([loud[at : at + 320].max() for at in begins]) > plain.max()
    # Never quieter, and by itself again where no burst is near.
    assert (loud >= plain - 0.02).all()
    assert (heard == CODES).mean() > 0.1
    # What is scored is what is heard: the way back is what there is to learn.
    assert (targets[~unscored] == heard[~unscored]).all()


def test_shares_are_of_recordings() -> None:
    changed = [(drawn(seed, noise=0.5, bursts=0)[0] != CODES).any() for seed in range(60)]
    assert 0.3 < np.mean(changed) < 0.7


def test_the_same_draw_is_the_same_disturbance() -> None:
    for first, second in zip(drawn(3, noise=1, bursts=1), drawn(3, noise=1, bursts=1), strict=True):
        assert (first == second).all()
    assert (
        (disturbed(np.empty(0, np.uint8), DisturbConfig(noise=1, bursts=1), np.random.default_rng(0))[0]).size
        == 0
    )
