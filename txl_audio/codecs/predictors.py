"""Adaptive linear predictors: what a waveform codec knows of the next sample before any network runs.

Recursive-least-squares filters (Haykin, Adaptive Filter Theory, ch. 10) follow the stream in float64 and
predict every sample from those before it. Their predictions, errors and scales are inputs of embedding and
head: a network that is told what a filter expects need not learn to filter.

Generated sound feeds back into the filters, and filters close to instability then overshoot until
everything clips. So predictions come from filters of expanded bandwidth, w_i g^i (as in speech codecs,
e.g. ITU-T G.728), and are limited to a slowly decaying peak of the samples. Training sees the same.

Shapes: B lanes, T frames, K symbols per frame, S side values per sample, Z numbers of state, F filters.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from txl_audio.config import Config
from txl_audio.model.contracts import SideStage
from txl_audio.runtime import compiled
from txl_audio.tokens import settings_hash

WINDOW = 32
"""Residuals in a side vector, and the longest RLS filter."""
_FIXED = 2 + WINDOW + 9
_CLIP = 8.0
_SMALLEST = 2e-5

# What a lane's state holds, one after another: scalars; the newest samples and residuals, newest first; of
# every filter some numbers, weights, gains and covariance, with room for the longest; scratch.
_TIME, _PEAK, _FAST, _SLOW, _REFERENCE, _LEVEL, _SYLLABLE, _PHRASE, _SCALARS = range(9)
_PREDICTION, _FREE, _ERROR, _LEVERAGE, _NUMBERS = range(5)
PARTS = 8


class RlsConfig(Config):
    """One filter. `forgetting` is per sample; a sample counts (recent squared error)^-`weighting`, so that
    onsets do not overturn it; `ridge` pulls one weight a sample towards 0, in turns: without it the
    covariance grows without bound in silence."""

    order: int = Field(ge=1, le=WINDOW)
    forgetting: float = Field(gt=0, le=1)
    weighting: float = Field(ge=0, le=1)
    ridge: float = Field(gt=0)


class PredictorsConfig(Config):
    """The filters; the mean of the first two is the reference that residuals are taken from.

    expansion: g above. peak_decay: per sample, of the peak that limits predictions.
    """

    filters: tuple[RlsConfig, ...] = (
        RlsConfig(order=32, forgetting=0.995, weighting=0.5, ridge=1e-5),
        RlsConfig(order=16, forgetting=0.99, weighting=0.7, ridge=1e-4),
        RlsConfig(order=32, forgetting=0.998, weighting=0.7, ridge=1e-4),
    )
    expansion: float = Field(default=0.98, gt=0, le=1)
    peak_decay: float = Field(default=0.9998, gt=0, le=1)

    @field_validator("filters")
    @classmethod
    def _two(cls, filters: tuple[RlsConfig, ...]) -> tuple[RlsConfig, ...]:
        if len(filters) < 2:
            raise ValueError(
                f"{len(filters)} filters are given, expected at least 2: their mean is the reference"
            )
        return filters

    @property
    def hash(self) -> str:
        return settings_hash({"version": 1, **self.model_dump(mode="json")})

    def build(self, levels: Tensor) -> Predictors:
        """`levels` [V]: amplitude of every symbol."""
        return Predictors(self, levels)


class Predictors(SideStage):
    """The stage for one codec. It holds settings only; the state of lanes is a tensor [B, Z] float64.

    A side vector: reference and scale (mean absolute residual of the last hundred samples or so), both
    amplitudes; then what networks read, all about 1: the last 32 residuals in units of the scale, newest
    last; log scale; log of a faster scale over it; log of the codec's step at the reference over it; the
    reference, companded, and its magnitude; log levels over 6, 60 and 600 ms; log peak; of every filter its
    distance from the reference, then the log of its recent error, in units of the scale, then how unusual
    the window is to it (leverage).
    """

    def __init__(self, config: PredictorsConfig, levels: Tensor) -> None:
        filters = config.filters
        self.config, self.hash = config, config.hash
        self.width = _FIXED + 3 * len(filters)
        self.deviations = slice(_FIXED, _FIXED + len(filters))
        self.levels = levels.double().numpy()
        self.orders = np.array([f.order for f in filters])
        self.settings = np.array([[f.forgetting, f.weighting, f.ridge] for f in filters])
        self.shape = np.array([config.expansion, config.peak_decay])
        filters_room = [len(filters) * size for size in (_NUMBERS, WINDOW, WINDOW, WINDOW * WINDOW)]
        self.sizes = [_SCALARS, WINDOW, WINDOW, *filters_room, WINDOW]
        self.start = np.zeros(sum(self.sizes))
        scalars, _, _, numbers, _, _, covariance, _ = self.parts(self.start)
        scalars[[_FAST, _SLOW, _LEVEL, _SYLLABLE, _PHRASE]] = 1e-3
        numbers[_ERROR::_NUMBERS] = 1e-4
        for f, n in enumerate(self.orders):
            covariance[f * WINDOW * WINDOW :][: n * n] = 100 * np.eye(n).ravel()

    def parts(self, lane: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views of a lane's state [Z] as the compiled functions want it: with slices of one array, a
        compiler could not rule out that a write changes what is read next, and would not vectorise."""
        return tuple(np.split(lane, np.cumsum(self.sizes)[:-1]))

    def initial_state(self, lanes: int) -> Tensor:
        return torch.from_numpy(self.start).expand(lanes, -1).clone()

    def run(self, inputs: Tensor, targets: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        lanes, frames, places = inputs.shape
        side = np.empty((lanes, frames, places, self.width), dtype=np.float32)
        after = state.numpy(force=True).copy()
        before = inputs.numpy(force=True), targets.numpy(force=True)
        start, ahead = self.parts(self.start), after.copy()

        def walk(lane: int) -> None:
            _walk(
                before[0][lane], before[1][lane],
                self.parts(ahead[lane]), self.parts(after[lane]), start, side[lane],
                self.levels, self.orders, self.settings, self.shape,
            )  # fmt: skip

        threads = min(lanes, torch.get_num_threads())
        if threads == 1:
            for lane in range(lanes):
                walk(lane)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(walk, range(lanes)))
        return torch.from_numpy(side).to(inputs.device), torch.from_numpy(after)

    def observe(self, symbols: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        lanes, after = symbols.numpy(force=True), state.numpy(force=True).copy()
        side = np.empty((len(lanes), self.width), dtype=np.float32)
        for line, lane, out in zip(lanes, after, side, strict=True):
            own = self.parts(lane)
            for symbol in line:
                if symbol >= len(self.levels):
                    lane[:] = self.start
                observe(symbol, own, self.levels, self.orders, self.settings, self.shape)
            features(own, self.orders, out)
        return torch.from_numpy(side).to(symbols.device), torch.from_numpy(after)


@compiled()
def split(lane, ends):
    """`Predictors.parts` for compiled callers; ends: of the parts, the cumulative sum of `sizes`."""
    a, b, c, d, e, f, g, _ = ends
    return (
        lane[:a], lane[a:b], lane[b:c], lane[c:d], lane[d:e], lane[e:f], lane[f:g], lane[g:]
    )  # fmt: skip


@compiled()
def _walk(inputs, targets, ahead, after, start, side, levels, orders, settings, shape):
    """Side vectors [T, K, S] of one lane's targets [T, K].

    The state `ahead` runs ahead over the targets; `after` becomes that after the last input frame.
    """
    frames, places = inputs.shape
    for t in range(frames):
        begins = inputs[t, 0] >= len(levels)  # a start symbol
        if begins:
            for part in range(len(ahead)):
                ahead[part][:] = start[part]
        for place in range(places):
            # What became known since the vector before: one symbol, or at a beginning a frame.
            known = places if place == 0 and (t == 0 or begins) else 1
            for i in range(known):
                if known > 1:
                    symbol = inputs[t, i]
                elif place > 0:
                    symbol = targets[t, place - 1]
                else:
                    symbol = inputs[t, places - 1]
                observe(symbol, ahead, levels, orders, settings, shape)
            if place == 0 and t == frames - 1:
                for part in range(len(ahead)):
                    after[part][:] = ahead[part]
            features(ahead, orders, side[t, place])


@compiled()
def features(lane, orders, out):
    """Writes the side vector [S] float32 of the next sample."""
    scalars, residuals, numbers = lane[0], lane[2], lane[3]
    reference, slow = scalars[_REFERENCE], scalars[_SLOW]
    out[0], out[1] = reference, slow
    for i in range(WINDOW):
        out[2 + i] = residuals[WINDOW - 1 - i] * 0.5
    at = 2 + WINDOW
    out[at] = (math.log(slow) + 6.0) * 0.5
    out[at + 1] = math.log(scalars[_FAST] / slow)
    # Derivative of the mu-law curve: the width of a bin.
    out[at + 2] = math.log((1 / 255 + abs(reference)) * (2 / 255 * math.log(256.0)) / slow)
    companded = math.log1p(255.0 * abs(reference)) / math.log(256.0)
    out[at + 3] = math.copysign(companded, reference)
    out[at + 4] = companded
    for i in range(3):
        out[at + 5 + i] = (math.log(scalars[_LEVEL + i]) + 4.0) * 0.5
    out[at + 8] = (math.log(scalars[_PEAK] + _SMALLEST) + 2.0) * 0.5
    filters = len(orders)
    deviations, errors, leverages = _FIXED, _FIXED + filters, _FIXED + 2 * filters
    for f in range(filters):
        own = numbers[f * _NUMBERS : (f + 1) * _NUMBERS]
        deviation = (own[_PREDICTION] - reference) / slow
        out[deviations + f] = min(max(deviation, -_CLIP), _CLIP)
        out[errors + f] = 0.5 * math.log((own[_ERROR] + 1e-10) / (slow * slow))
        out[leverages + f] = own[_LEVERAGE]


@compiled(fastmath=True, error_model="numpy")
def observe(symbol, lane, levels, orders, settings, shape):
    """Adapts a lane's state to the sample that came and predicts the next; no sample, no change."""
    if symbol < 0 or symbol >= len(levels):
        return
    scalars, samples, residuals, numbers, weights, gains, covariance, row = lane
    x = levels[symbol]
    step = int(scalars[_TIME])
    scalars[_TIME] = step + 1
    residual = x - scalars[_REFERENCE]
    scalars[_PEAK] = max(scalars[_PEAK] * shape[1], abs(x))
    unit = min(max(residual / scalars[_SLOW], -_CLIP), _CLIP)
    magnitude = abs(residual) + _SMALLEST
    # A mean of all samples while they are few.
    share = 1.0 / (step + 2)
    scalars[_FAST] += max(0.1, share) * (magnitude - scalars[_FAST])
    scalars[_SLOW] += max(0.01, share) * (magnitude - scalars[_SLOW])
    # What sound does over 6, 60 and 600 ms, which no window of samples shows.
    level = abs(x) + _SMALLEST
    scalars[_LEVEL] += max(0.01, share) * (level - scalars[_LEVEL])
    scalars[_SYLLABLE] += max(0.001, share) * (level - scalars[_SYLLABLE])
    scalars[_PHRASE] += max(0.0001, share) * (level - scalars[_PHRASE])
    for f in range(len(orders)):
        n, vector, matrix = orders[f], f * WINDOW, f * WINDOW * WINDOW
        _adapt(
            x, step, samples[:n], numbers[f * _NUMBERS : (f + 1) * _NUMBERS], weights[vector : vector + n],
            gains[vector : vector + n], row, covariance[matrix : matrix + n * n], settings[f],
        )  # fmt: skip
    for i in range(WINDOW - 1, 0, -1):
        samples[i] = samples[i - 1]
        residuals[i] = residuals[i - 1]
    samples[0], residuals[0] = x, unit
    reference = 0.0
    for f in range(len(orders)):
        n, vector, matrix = orders[f], f * WINDOW, f * WINDOW * WINDOW
        own = numbers[f * _NUMBERS : (f + 1) * _NUMBERS]
        _predict(
            samples[:n], own, weights[vector : vector + n], gains[vector : vector + n],
            covariance[matrix : matrix + n * n], settings[f], shape[0], scalars[_PEAK],
        )  # fmt: skip
        if f < 2:
            reference += 0.5 * own[_PREDICTION]
    scalars[_REFERENCE] = reference


@compiled(fastmath=True, error_model="numpy")
def _adapt(x, step, samples, own, weights, gains, row, covariance, settings):
    """The RLS update; `gains` = covariance . samples was computed with the prediction, `row` is scratch."""
    n, forgetting, ridge = len(samples), settings[0], settings[2]
    error = x - min(max(own[_FREE], -1.0), 1.0)
    leverage = 0.0
    for i in range(n):
        leverage += gains[i] * samples[i]
    weight = (own[_ERROR] + 1e-8) ** -settings[1]
    gain = 1.0 / (forgetting / weight + leverage)
    for i in range(n):
        weights[i] += gain * gains[i] * (x - own[_FREE])
    own[_ERROR] += 0.02 * (error * error - own[_ERROR])
    # The ridge is an observation of 0 on one weight, so that no direction is ever forgotten entirely; its
    # vector is a row of the covariance as it will be, so that one pass does both updates.
    c = step % n
    step_c = gain * gains[c]
    for i in range(n):
        row[i] = (covariance[c * n + i] - step_c * gains[i]) / forgetting
    pull = ridge / (1.0 + ridge * row[c])
    pulled = pull * weights[c]
    for i in range(n):
        weights[i] -= row[i] * pulled
    for i in range(n):
        line = covariance[i * n : i * n + n]  # a line of its own lets the loop vectorise
        by_gain, by_row = gain * gains[i], pull * row[i]
        for j in range(n):
            line[j] = (line[j] - by_gain * gains[j]) / forgetting - by_row * row[j]
    if step % 32 == 0:
        # Rounding makes it unsymmetric, and then it diverges.
        for i in range(n):
            for j in range(i):
                mean = 0.5 * (covariance[i * n + j] + covariance[j * n + i])
                covariance[i * n + j] = mean
                covariance[j * n + i] = mean


@compiled(fastmath=True, error_model="numpy")
def _predict(samples, own, weights, gains, covariance, settings, expansion, peak):
    """Prediction of the next sample, and what the update after it needs."""
    n = len(samples)
    free, prediction, leverage, shrink = 0.0, 0.0, 0.0, 1.0
    for i in range(n):
        shrink *= expansion
        term = weights[i] * samples[i]
        free += term
        prediction += term * shrink
        gains[i] = 0.0
    for i in range(n):
        line, sample = covariance[i * n : i * n + n], samples[i]  # symmetric: rows serve as columns
        for j in range(n):
            gains[j] += line[j] * sample
    for i in range(n):
        leverage += gains[i] * samples[i]
    own[_FREE] = free
    own[_PREDICTION] = min(max(prediction, -peak), peak)
    weight = (own[_ERROR] + 1e-8) ** -settings[1]
    own[_LEVERAGE] = leverage / (settings[0] / weight + leverage)
