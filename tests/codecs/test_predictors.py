"""The predictors against a plain recursion, and the contract of a stage: causal, streaming, reset."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.helpers import speech_like
from tests.tiny import PREDICTORS
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.codecs.predictors import WINDOW, PredictorsConfig, RlsConfig
from txl_audio.tokens import IGNORE

CODEC = MuLawCodec(4)
STAGE = PREDICTORS.build(CODEC.levels)
FULL = PredictorsConfig()
START = CODEC.spec.start_symbol


def frames_of(seconds: float, seed: int) -> torch.Tensor:
    """[1, T, 4] codes of something like speech."""
    return CODEC.encode(torch.from_numpy(speech_like(seconds, seed))[None])


def inputs_of(targets: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(targets[:, :1], START), targets[:, :-1]], dim=1)


def plain_rls(x: np.ndarray, config: RlsConfig, expansion: float, decay: float) -> np.ndarray:
    """Predictions by the textbook recursion (Haykin, table 10.1) with weights, ridge, expansion and limit."""
    n = config.order
    w, p, h, e, peak = np.zeros(n), 100 * np.eye(n), np.zeros(n), 1e-4, 0.0
    out = []
    for t, sample in enumerate(x):
        out.append(np.clip((w * expansion ** np.arange(1, n + 1)) @ h, -peak, peak))
        free = w @ h
        weight = (e + 1e-8) ** -config.weighting
        k = p @ h / (config.forgetting / weight + h @ p @ h)
        w = w + k * (sample - free)
        p = (p - np.outer(k, h @ p)) / config.forgetting
        e += 0.02 * ((sample - np.clip(free, -1, 1)) ** 2 - e)
        c = t % n
        k = p[:, c] / (1 / config.ridge + p[c, c])
        w = w - k * w[c]
        p = p - np.outer(k, p[c])
        peak = max(peak * decay, abs(sample))
        h = np.concatenate([[sample], h[:-1]])
    return np.array(out)


def test_predictions_are_those_of_the_textbook() -> None:
    targets = frames_of(0.2, 1)
    side, _ = STAGE.run(inputs_of(targets), targets, STAGE.initial_state(1))
    x = CODEC.decode(targets)[0].double().numpy()
    expected = [plain_rls(x, f, PREDICTORS.expansion, PREDICTORS.peak_decay) for f in PREDICTORS.filters]
    reference = (expected[0] + expected[1]) / 2
    flat = side.reshape(-1, STAGE.width).double().numpy()
    np.testing.assert_allclose(flat[:, 0], reference, atol=1e-6)
    scale = flat[:, 1]
    for f, prediction in enumerate(expected):
        distance = np.clip((prediction - reference) / scale, -8, 8)
        np.testing.assert_allclose(flat[:, STAGE.deviations.start + f], distance, atol=1e-3)
    # The newest residual of a vector is the one of the sample before, in units of the scale then.
    residual = np.clip((x - reference)[:-1] / scale[:-1], -8, 8) / 2
    np.testing.assert_allclose(flat[1:, 1 + WINDOW], residual, atol=1e-3)


def test_a_predictable_signal_is_predicted() -> None:
    t = torch.arange(8000) / 16_000
    targets = CODEC.encode((0.3 * torch.sin(2 * math.pi * 220 * t))[None])
    stage = PredictorsConfig(expansion=1.0).build(CODEC.levels)
    side, _ = stage.run(inputs_of(targets), targets, stage.initial_state(1))
    x = CODEC.decode(targets).flatten()
    error = x - side[0, :, :, 0].flatten()
    assert error[4000:].square().mean() < 1e-3 * x[4000:].square().mean()


def test_a_sample_changes_nothing_before_it() -> None:
    targets = frames_of(0.05, 2)
    side, _ = STAGE.run(inputs_of(targets), targets, STAGE.initial_state(1))
    changed = targets.clone()
    frame, place = 60, 2
    changed[0, frame, place] = (changed[0, frame, place] + 90) % 256
    other, _ = STAGE.run(inputs_of(changed), changed, STAGE.initial_state(1))
    at = frame * 4 + place
    flat, other = side.reshape(-1, STAGE.width), other.reshape(-1, STAGE.width)
    assert torch.equal(flat[: at + 1], other[: at + 1])
    assert not torch.equal(flat[at + 1], other[at + 1])


@pytest.mark.parametrize("lengths", [[1] * 40, [7, 33], [40]])
def test_any_split_gives_the_same_vectors(lengths: list[int]) -> None:
    targets = frames_of(0.02, 3)[:, :40].repeat(2, 1, 1)
    inputs = inputs_of(targets)
    whole, last = STAGE.run(inputs, targets, STAGE.initial_state(2))
    state, at, parts = STAGE.initial_state(2), 0, []
    for n in lengths:
        side, state = STAGE.run(inputs[:, at : at + n], targets[:, at : at + n], state)
        parts.append(side)
        at += n
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, last)
    # Sample by sample, as sampling does.
    state = STAGE.initial_state(2)
    for t in range(40):
        _, state = STAGE.observe(inputs[:, t], state)
        for place in range(4):
            side, _ = STAGE.observe(targets[:, t, :place], state)
            assert torch.equal(side, whole[:, t, place])


def test_a_document_begins_anew() -> None:
    first, second = frames_of(0.02, 4), frames_of(0.02, 5)
    alone, _ = STAGE.run(inputs_of(second), second, STAGE.initial_state(1))
    inputs = torch.cat([inputs_of(first), inputs_of(second)], dim=1)
    targets = torch.cat([first, second], dim=1)
    targets[0, first.size(1) - 1, 2:] = IGNORE  # the first document ends inside a frame
    both, _ = STAGE.run(inputs, targets, STAGE.initial_state(1))
    assert torch.equal(both[:, first.size(1) :], alone)
    _, state = STAGE.observe(first.flatten(1), STAGE.initial_state(1))
    side, state = STAGE.observe(inputs_of(second)[:, 0], state)
    assert torch.equal(side, alone[:, 0, 0]) and torch.equal(state, STAGE.initial_state(1))


@pytest.mark.parametrize("kind", ["silence", "full scale", "noise", "pulses"])
def test_vectors_stay_finite_and_predictions_within_the_peak(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 16_000
    codes = {
        "silence": torch.full((n,), 128),
        "full scale": torch.tensor([0, 255]).repeat(n // 2),
        "noise": torch.randint(256, (n,), generator=generator),
        "pulses": torch.where(torch.arange(n) % 997 == 0, 255, 128),
    }[kind]
    targets = codes.reshape(1, -1, 4)
    stage = FULL.build(CODEC.levels)
    side, state = stage.run(inputs_of(targets), targets, stage.initial_state(1))
    assert torch.isfinite(side).all() and torch.isfinite(state).all()
    assert side[..., 0].abs().max() <= CODEC.levels[codes].abs().max() and side[..., 1].min() > 0
    assert side[..., 2:].abs().max() < 30


def test_settings_are_named_in_the_hash_and_checked() -> None:
    other = PredictorsConfig(expansion=0.99)
    assert PREDICTORS.hash != FULL.hash != other.hash
    assert FULL.hash == PredictorsConfig().hash
    with pytest.raises(ValidationError, match="1 filters are given, expected at least 2"):
        PredictorsConfig(filters=FULL.filters[:1])
    with pytest.raises(ValidationError, match="less than or equal to 32"):
        RlsConfig(order=33, forgetting=0.99, weighting=0.5, ridge=0)
