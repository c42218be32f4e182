"""The compiled step: the network's output as a distribution, the draw, and the loop over many frames.

It runs in one call without Python and writes into the tensors of `SequenceDecodeState`, seen as NumPy arrays.
Every function is the twin of a PyTorch method, named in its docstring; tests hold them together.

Shapes: B lanes, K symbols per frame, V vocabulary, W history symbols, D model width, H heads, d head width,
L layers, C ring slots, F width of the head, S side values, T taps, M mixture components.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

from txl_audio.codecs import predictors
from txl_audio.model.heads import OFFSET_GAIN, UNIFORM_SHARE
from txl_audio.sampling.layers import embed, read_window, score_words, step, walk, walk_codes
from txl_audio.sampling.matrix import product
from txl_audio.sampling.numerics import FAST, add_bias, dense, exp, exp64, f32, larger
from txl_audio.sampling.stepwise import FREE


@register_jitable(fastmath=FAST, error_model="numpy")
def mixture(head, output, taps, inputs, side, center, unit, parts):
    """The mixture of `FrameHead.parameters_of` as parts [3, M] float64: weights, means, 1 / scales."""
    m, basis = head.mixtures, inputs[inputs.size - taps.size :]
    if not head.features.staged:
        basis = inputs[head.features.samples : head.features.samples + taps.size]
    prediction = f32(0.0)
    for i in range(taps.size):
        prediction += taps[i] * basis[i]
    for i in range(output.size - 3 * m):
        prediction += output[3 * m + i] * side[head.first_gate + i]
    largest = output[:m].max()
    total = 0.0
    for k in range(m):
        parts[0, k] = exp64(output[k] - largest)
        total += parts[0, k]
        parts[1, k] = center + unit * (prediction + OFFSET_GAIN * output[m + k])
        parts[2, k] = exp64(-min(max(output[2 * m + k], -9.0), 2.0)) / unit
    parts[0] /= total


@register_jitable(fastmath=FAST, error_model="numpy")
def below(head, parts, symbol):
    """Probability of all symbols before `symbol`, with `heads.with_floor`."""
    symbols = len(head.edges) - 1
    if symbol == 0 or symbol == symbols:
        return 1.0 if symbol else 0.0
    total = 0.0
    for k in range(parts.shape[1]):
        total += parts[0, k] / (1.0 + exp64((parts[1, k] - head.edges[symbol]) * parts[2, k]))
    return (1.0 - UNIFORM_SHARE) * total + UNIFORM_SHARE * symbol / symbols


@register_jitable(fastmath=FAST, error_model="numpy")
def masses(head, parts, out):
    """Probabilities [V] of all symbols. Differences of float64 are exact enough: none is below the floor."""
    symbols = out.size
    out[:] = 0.0
    for k in range(parts.shape[1]):
        weight, mean, rate = parts[0, k], parts[1, k], parts[2, k]
        for c in range(symbols - 1):
            out[c] += weight / (1.0 + exp64((mean - head.edges[c + 1]) * rate))
    out[symbols - 1] = 1.0
    for c in range(symbols - 1, 0, -1):
        out[c] = (1.0 - UNIFORM_SHARE) * (out[c] - out[c - 1]) + UNIFORM_SHARE / symbols
    out[0] = (1.0 - UNIFORM_SHARE) * out[0] + UNIFORM_SHARE / symbols


@register_jitable(fastmath=FAST)
def softmax(logits, out):
    """logits [V] -> probabilities [V] float64."""
    largest = logits[0]
    for c in range(logits.size):
        largest = larger(largest, logits[c])
    total = 0.0
    for c in range(logits.size):
        out[c] = exp(logits[c] - largest)
        total += out[c]
    for c in range(logits.size):
        out[c] /= total


@register_jitable
def choose(draw, probabilities, uniform):
    """`Filters.draw` of one lane."""
    if draw.temperature == 0.0:
        return probabilities.argmax()
    p = probabilities
    if draw.temperature != 1.0:
        p = (p / p.max()) ** (1.0 / draw.temperature)
    least = 0.0
    if draw.top_k < p.size or draw.top_p < 1.0:
        ordered = np.sort(p)[::-1][: draw.top_k]
        least = ordered[-1]
        if draw.top_p < 1.0:
            wanted, reached = draw.top_p * ordered.sum(), 0.0
            for value in ordered:
                least = value
                reached += value
                if reached >= wanted:
                    break
    total = 0.0
    for value in p:
        if value >= least:
            total += value
    threshold, reached, last = uniform * total, 0.0, 0
    for c in range(p.size):
        if p[c] >= least:
            reached += p[c]
            last = c
            if reached > threshold:
                break
    return last


@register_jitable
def bisect(head, parts, uniform):
    """As `choose` where nothing is left out: the first symbol up to which there is more than `uniform`."""
    low, high = 0, len(head.edges) - 2
    while low < high:
        middle = (low + high) // 2
        if below(head, parts, middle + 1) > uniform:
            high = middle
        else:
            low = middle + 1
    return low


@register_jitable
def observe(stage, line, first, last, ahead, side):
    """`Predictors.observe`: symbols line [B, first:last] go into ahead [B, Z]; writes side [B, S]."""
    if stage.width and last > first:
        for b in range(len(line)):
            parts = predictors.split(ahead[b], stage.ends)
            for i in range(first, last):
                if line[b, i] >= len(stage.levels):  # a start symbol
                    ahead[b] = stage.start
                predictors.observe(line[b, i], parts, stage.levels, stage.orders, stage.settings, stage.shape)
            predictors.features(parts, stage.orders, side[b])


@register_jitable
def run(
    embedding,
    core,
    head,
    stage,
    draw,
    keys,
    values,
    start,
    ahead,
    line,
    at,
    time,
    phase,
    uniforms,
    nats,
):
    """`stepwise.Stepwise.run`: goes over n frames and writes those of their symbols that are FREE.

    keys, values, start: of `DecodeState`. ahead [B, Z]: the stage's state before `at - K` of line [B, N], and
    afterwards before the last input frame. line: `at - K` recent symbols, the newest frame, then n frames,
    which are FREE at the same places in all lanes. uniforms [B, n, K] float64. nats [B, K]: of the last
    frame.
    """
    lanes, frames, places = uniforms.shape
    width = core.attention_norm.shape[2]
    hidden = np.empty((lanes, width), np.float32)
    side = np.zeros((lanes, stage.width), np.float32)
    going = ahead.copy()
    observed = at - places
    conditioned = head.condition.number > 0
    framewise, logistic = len(head.read_bias) > 0, len(head.predict) > 0
    symbols = len(head.edges) - 1 if framewise else head.vocabulary_bias.shape[1]
    inputs = np.empty((lanes, head.read.inputs), np.float32)
    z = np.empty((lanes, head.norms.shape[2]), np.float32)
    narrow = np.empty((lanes, len(head.projection)), np.float32)
    output = np.empty((lanes, len(head.output_bias) if framewise else symbols), np.float32)
    conditions = np.empty((lanes, head.condition.outputs), np.float32)
    taps = np.empty((lanes, len(head.shared)), np.float32)
    parts = np.empty((3, head.mixtures))
    probabilities = np.empty(symbols)
    unfiltered = draw.temperature == 1.0 and draw.top_k >= symbols and draw.top_p >= 1.0
    center, unit = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for frame in range(frames):
        observe(stage, line, observed, at, going, side)
        observed = at
        if frame == frames - 1:
            ahead[:] = going
            nats[:] = f32(0.0)
        embed(embedding, line, at, places, side, hidden)
        step(core, hidden, keys, values, start, time, phase)
        time += 1
        phase = (phase + 1) % core.segment_len
        begun = False
        for place in range(places):
            now = at + place
            if line[0, now] != FREE:
                continue
            if conditioned and not begun:
                product(hidden, head.condition, 0, conditions)
                if logistic:
                    taps[:] = head.shared
                    dense(hidden, head.predict, taps)
            begun = True
            if framewise:
                observe(stage, line, observed, now, going, side)
                observed = now
                for b in range(lanes):
                    window = line[b][now - head.features.samples : now]
                    center[b], unit[b] = read_window(head.features, window, side[b], inputs[b])
                walk(head, inputs, conditions, place, z, output)
            elif conditioned:
                walk_codes(head, line, at, conditions, place, z, output)
            elif len(head.words.widths):
                score_words(head, hidden, output)
            else:
                if len(head.projection):
                    narrow[:] = f32(0.0)
                    dense(hidden, head.projection, narrow)
                    product(narrow, head.vocabulary, 0, output)
                else:
                    product(hidden, head.vocabulary, 0, output)
                add_bias(output, head.vocabulary_bias[0])
            # Text beside codes stands in the first place only.
            count = head.codes if place else symbols
            first, stop = (0, count) if place else (draw.first, draw.stop)
            for b in range(lanes):
                uniform = uniforms[b, frame, place]
                if logistic:
                    mixture(head, output[b], taps[b], inputs[b], side[b], center[b], unit[b], parts)
                if logistic and unfiltered:
                    symbol = bisect(head, parts, uniform)
                    p = below(head, parts, symbol + 1) - below(head, parts, symbol)
                else:
                    if logistic:
                        masses(head, parts, probabilities)
                    else:
                        softmax(output[b][:count], probabilities[:count])
                    symbol = first + choose(draw, probabilities[first:stop], uniform)
                    p = probabilities[symbol]
                line[b, now] = symbol
                nats[b, place] = -math.log(p)
        at += places
