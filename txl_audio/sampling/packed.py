"""A model's weights as the compiled sampler reads them: tuples of arrays.

Shapes: B lanes, K symbols per frame, V vocabulary, W history symbols, D model width, H heads, d head width,
L layers, C ring slots, F width of the head, S side values, T taps, M mixture components.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from txl_audio.sampling.matrix import Matrix

# What is missing is an array of no elements: so all models share one compilation.


class Features(NamedTuple):
    """`embeddings.SampleFeatures` or `StageFeatures`: table [V + 1, 3] of what a symbol says by itself."""

    samples: int
    table: np.ndarray
    staged: bool


class Ngrams(NamedTuple):
    """`embeddings.NgramEmbedding`: lengths [N], table [N rows, E]."""

    lengths: np.ndarray
    base: int
    rows: int
    table: np.ndarray
    projection: np.ndarray


class Words(NamedTuple):
    """Clusters of `AdaptiveEmbedding` or `AdaptiveHead`: bounds [C + 1] of their ids, widths [C]; tables and
    projections of all, [n_i, d_i] and [D, d_i], each one behind another in a line, float32."""

    bounds: np.ndarray
    widths: np.ndarray
    tables: np.ndarray
    projections: np.ndarray


class Embedding(NamedTuple):
    """`SymbolEmbedding` (table [K rows, E]), `AdaptiveEmbedding` (words), `SampleEmbedding` (read, write)."""

    table: np.ndarray
    rows: int
    scale: float
    projection: np.ndarray
    words: Words
    ngrams: Ngrams
    features: Features
    read: Matrix
    read_bias: np.ndarray
    write: Matrix
    write_bias: np.ndarray


class Core(NamedTuple):
    """`TransformerXL`. Norms are [weight, bias]; see `positions.Terms` for u, v, r [L H, d, C] and b, which
    run from the farthest distance to 0; added [offsets, L, D]: positions added to layer inputs."""

    qkv: Matrix
    out: Matrix
    expand: Matrix
    expand_bias: np.ndarray
    contract: Matrix
    contract_bias: np.ndarray
    attention_norm: np.ndarray
    feed_forward_norm: np.ndarray
    final_norm: np.ndarray
    pre: bool
    gelu: bool
    u: np.ndarray
    v: np.ndarray
    r: Matrix
    b: np.ndarray
    added: np.ndarray
    reach: int
    grows: int
    segment_len: int


class Head(NamedTuple):
    """`SoftmaxHead` (vocabulary [V, E]), `AdaptiveHead` (words), `FrameHead` (read) or `DepthHead` (condition
    without read; vocabulary [V, F] of every place). predict has no rows where a frame head ends in a softmax.

    codes: symbols of places after the first, which has V; vocabulary_bias [1, V], or [K, V] of every place;
    earlier [(K - 1) V, F]: what codes before a place add; entries [C - 1, d_0]: vectors of the clusters after
    the first, which the first softmax chooses too; edges [V + 1] float64; first_gate: where in a side vector
    deviations begin.
    """

    codes: int
    projection: np.ndarray
    vocabulary: Matrix
    vocabulary_bias: np.ndarray
    earlier: np.ndarray
    words: Words
    entries: np.ndarray
    entry_bias: np.ndarray
    features: Features
    read: Matrix
    read_bias: np.ndarray
    condition: Matrix
    norms: np.ndarray
    inner: Matrix
    inner_bias: np.ndarray
    outer: Matrix
    outer_bias: np.ndarray
    output: np.ndarray
    output_bias: np.ndarray
    predict: np.ndarray
    shared: np.ndarray
    edges: np.ndarray
    first_gate: int
    mixtures: int


class Stage(NamedTuple):
    """`codecs.predictors.Predictors`; width 0 where there is none. start [Z]: of a lane's state; ends: of the
    state's parts."""

    width: int
    start: np.ndarray
    ends: tuple[int, ...]
    levels: np.ndarray
    orders: np.ndarray
    settings: np.ndarray
    shape: np.ndarray


class Draw(NamedTuple):
    """`filters.Filters`: top_k is V and top_p 1 where nothing is left out. The first symbol of a frame is one
    from `first` to before `stop`."""

    temperature: float
    top_k: int
    top_p: float
    first: int
    stop: int
