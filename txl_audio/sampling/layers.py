"""The networks of the compiled step: embedding, core, and what walks a frame.

Every function is the twin of a PyTorch method, named in its docstring; tests hold them together.

Shapes: B lanes, K symbols per frame, V vocabulary, W history symbols, D model width, H heads, d head width,
L layers, C ring slots, F width of the head, S side values, T taps, M mixture components.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

from txl_audio.sampling.matrix import product
from txl_audio.sampling.numerics import (
    FAST,
    add_bias,
    add_bias_gelu,
    add_dots,
    add_rows,
    as_ring,
    dense,
    exp,
    f32,
    from_ring,
    larger,
    layer_norm,
    put,
    ring_dots,
    ring_rows,
)


@register_jitable(fastmath=FAST)
def read_window(features, symbols, side, out):
    """`SampleFeatures.forward`, `StageFeatures.forward`: window [W] -> out [I]; returns (center, unit)."""
    samples, table = features.samples, features.table
    for i in range(samples):
        out[i] = table[symbols[i], 0]
    if features.staged:
        out[samples:] = side[2:]
        return side[0], side[1]
    power = f32(0.0)
    for i in range(samples):
        amplitude = table[symbols[i], 1]
        power += amplitude * amplitude
        out[samples + i] = amplitude
        out[2 * samples + i] = table[symbols[i], 2]
    level = np.sqrt(power / f32(samples) + f32(1e-7))
    for i in range(samples, 2 * samples):
        out[i] /= level
    out[3 * samples] = math.log(level) * f32(0.3) + f32(1.0)
    return f32(0.0), level


@register_jitable
def cluster(words, index, width):
    """One cluster's table [n, d] and projection [D, d], D the `width` of the model; without rows if none."""
    if not len(words.projections):
        width = 0
    before = at = 0
    for i in range(index):
        before += (words.bounds[i + 1] - words.bounds[i]) * words.widths[i]
        at += width * words.widths[i]
    rows, own = words.bounds[index + 1] - words.bounds[index], words.widths[index]
    table = words.tables[before : before + rows * own].reshape((rows, own))
    return table, words.projections[at : at + width * own].reshape((width, own))


@register_jitable(fastmath=FAST)
def score_words(head, hidden, output):
    """`AdaptiveHead.log_probs` but for a constant of every lane: hidden [B, D] -> output [B, V]."""
    lanes, width = hidden.shape
    words = head.words
    entries = np.empty((lanes, len(head.entries)), np.float32)
    for index in range(len(words.widths)):
        table, projection = cluster(words, index, width)
        low, high = words.bounds[index], words.bounds[index + 1]
        narrow = hidden
        if len(projection):
            narrow = np.zeros((lanes, words.widths[index]), np.float32)
            for b in range(lanes):
                add_rows(narrow[b], hidden[b], projection)
        for b in range(lanes):
            scores = output[b][low:high]
            scores[:] = head.vocabulary_bias[0, low:high]
            add_dots(scores, table, narrow[b])
            if index == 0:
                entries[b] = head.entry_bias
                add_dots(entries[b], head.entries, narrow[b])
            else:
                shift = entries[b, index - 1] - log_sum_exp(scores)
                for i in range(scores.size):
                    scores[i] += shift


@register_jitable(fastmath=FAST)
def log_sum_exp(x):
    """Of x [N]."""
    largest, total = x[0], 0.0
    for i in range(x.size):
        largest = larger(largest, x[i])
    for i in range(x.size):
        total += exp(x[i] - largest)
    return largest + f32(math.log(total))


@register_jitable(fastmath=FAST)
def embed(embedding, line, at, places, side, x):
    """`Embedding.forward`: the symbols line [B, N] before index `at` -> x [B, D]."""
    lanes = len(x)
    table, words, ngrams = embedding.table, embedding.words, embedding.ngrams
    if len(words.widths):
        for b in range(lanes):
            symbol, index = line[b, at - 1], 0
            while symbol >= words.bounds[index + 1]:
                index += 1
            vectors, projection = cluster(words, index, x.shape[1])
            vector = vectors[symbol - words.bounds[index]]
            if len(projection):
                x[b] = f32(0.0)
                add_dots(x[b], projection, vector)
            else:
                x[b] = vector
        x *= f32(embedding.scale)
        return
    if not len(table):
        samples = embedding.features.samples
        inputs = np.empty((lanes, embedding.read.inputs), np.float32)
        for b in range(lanes):
            read_window(embedding.features, line[b][at - samples : at], side[b], inputs[b])
        hidden = np.empty((lanes, len(embedding.read_bias)), np.float32)
        product(inputs, embedding.read, 0, hidden)
        add_bias_gelu(hidden, embedding.read_bias)
        product(hidden, embedding.write, 0, x)
        add_bias(x, embedding.write_bias)
        return
    total = np.zeros((lanes, table.shape[1]), np.float32)
    for b in range(lanes):
        for place in range(places):
            total[b] += table[place * embedding.rows + line[b, at - places + place]]
    if len(embedding.projection):
        x[:] = f32(0.0)
        dense(total, embedding.projection, x)
    else:
        x[:] = total
    if len(ngrams.lengths):
        total = np.zeros((lanes, ngrams.table.shape[1]), np.float32)
        for b in range(lanes):
            for index, n in enumerate(ngrams.lengths):
                number = 0
                for i in range(at - n, at):
                    number = number * ngrams.base + line[b, i]
                total[b] += ngrams.table[number % ngrams.rows + index * ngrams.rows]
        dense(total, ngrams.projection, x)
    x *= f32(embedding.scale)


@register_jitable(fastmath=FAST)
def attend(query, keys, values, scores, slot, seen, scratch, out):
    """Attention of one head: query [d] on the `seen` newest rows of keys and values [C, d], newest at `slot`.

    scores [C]: what positions add, from the farthest distance to 0; overwritten. out [d]: the mean of values.
    In that order the ring's two parts, before and after its turn, lie one behind another.
    """
    slots, newer = len(scores), min(seen, slot + 1)
    older = seen - newer
    scores = scores[slots - seen :]
    as_ring(query, scratch, keys)
    ring_dots(scores[:older], keys[slots - older :], scratch)
    ring_dots(scores[older:], keys[slot + 1 - newer : slot + 1], scratch)
    largest = scores[0]
    for i in range(scores.size):
        largest = larger(largest, scores[i])
    total = f32(0.0)
    for i in range(scores.size):
        weight = exp(scores[i] - largest)
        scores[i] = weight
        total += weight
    scratch[:] = f32(0.0)
    ring_rows(scratch, scores[:older], values[slots - older :])
    ring_rows(scratch, scores[older:], values[slot + 1 - newer : slot + 1])
    from_ring(scratch, out, values)
    for i in range(out.size):
        out[i] /= total


@register_jitable(fastmath=FAST)
def step(core, x, keys, values, start, time, phase):
    """`TransformerXL.step_`: x [B, D] becomes hidden; keys, values [L, B, H, C, d] get a frame more."""
    layers, lanes, heads, slots = keys.shape[:4]
    width = core.u.shape[2]
    scale = f32(1.0 / math.sqrt(width))
    slot, both = time % slots, heads * width
    inner, added = np.empty_like(x), np.empty_like(x)
    qkv = np.empty((lanes, 3 * both), np.float32)
    mixed = np.empty((lanes, both), np.float32)
    content, scratch = np.empty(width, np.float32), np.empty(width, np.float32)
    position = np.empty((lanes, width), np.float32)
    scores = np.empty((lanes, slots), np.float32)
    wide = np.empty((lanes, core.expand_bias.shape[1]), np.float32)
    for layer in range(layers):
        if len(core.added):
            add_bias(x, core.added[phase, layer])
        if core.pre:
            layer_norm(x, core.attention_norm[layer], inner)
        else:
            inner[:] = x
        product(inner, core.qkv, layer, qkv)
        for head in range(heads):
            low, high = head * width, head * width + width
            for b in range(lanes):
                put(keys[layer, b, head, slot], qkv[b][both + low : both + high])
                put(values[layer, b, head, slot], qkv[b][2 * both + low : 2 * both + high])
                for i in range(width):
                    position[b, i] = (qkv[b, low + i] + core.v[layer, head, i]) * scale
            if core.r.number:
                product(position, core.r, layer * heads + head, scores)
                for b in range(lanes):
                    for i in range(slots):
                        scores[b, i] += core.b[layer, head, i] * scale
            else:
                scores[:] = f32(0.0)
            for b in range(lanes):
                for i in range(width):
                    content[i] = (qkv[b, low + i] + core.u[layer, head, i]) * scale
                seen = min(time - start[b], core.reach + core.grows * phase) + 1
                attend(
                    content, keys[layer, b, head], values[layer, b, head], scores[b], slot, seen,
                    scratch, mixed[b][low:high],
                )  # fmt: skip
        product(mixed, core.out, layer, added)
        x += added
        if not core.pre:
            layer_norm(x, core.attention_norm[layer], x)
            inner[:] = x
        else:
            layer_norm(x, core.feed_forward_norm[layer], inner)
        product(inner, core.expand, layer, wide)
        if core.gelu:
            add_bias_gelu(wide, core.expand_bias[layer])
        else:
            add_bias(wide, core.expand_bias[layer])
            np.maximum(wide, f32(0.0), wide)
        product(wide, core.contract, layer, added)
        add_bias(added, core.contract_bias[layer])
        x += added
        if not core.pre:
            layer_norm(x, core.feed_forward_norm[layer], x)
    if len(core.final_norm):
        layer_norm(x, core.final_norm, x)


@register_jitable(fastmath=FAST)
def walk(head, inputs, conditions, place, z, output):
    """The network of `FrameHead.parameters_of`: inputs [B, I], conditions [B, K F] -> output [B, O]."""
    lanes, width = z.shape
    product(inputs, head.read, 0, z)
    for b in range(lanes):
        z[b] += conditions[b][place * width : (place + 1) * width]
    add_bias_gelu(z, head.read_bias)
    output[:] = head.output_bias
    dense(refined(head, z), head.output, output)


@register_jitable(fastmath=FAST)
def walk_codes(head, line, at, conditions, place, z, output):
    """`DepthHead.logits` of one place of the frame at line [B, at]: conditions [B, K F] -> output [B, V]."""
    lanes, width = z.shape
    symbols = output.shape[1]
    for b in range(lanes):
        z[b] = conditions[b][place * width : (place + 1) * width]
        if len(head.earlier):
            for before in range(place):
                z[b] += head.earlier[before * symbols + min(line[b, at + before], symbols - 1)]
    product(refined(head, z), head.vocabulary, place, output)
    add_bias(output, head.vocabulary_bias[place])


@register_jitable(fastmath=FAST)
def refined(head, z):
    """z [B, F], which is changed, through a head's `ResidualBlock`s and its norm -> [B, F]."""
    inner, added = np.empty_like(z), np.empty_like(z)
    for block in range(len(head.inner_bias)):
        layer_norm(z, head.norms[block], inner)
        product(inner, head.inner, block, added)
        add_bias_gelu(added, head.inner_bias[block])
        product(added, head.outer, block, inner)
        add_bias(inner, head.outer_bias[block])
        z += inner
    layer_norm(z, head.norms[len(head.norms) - 1], inner)
    return inner
