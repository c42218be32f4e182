"""The compiled CPU step of a model: its weights as the kernels read them, and the call.

Shapes: B lanes, K symbols per frame, D model width, H heads, L layers, C ring slots.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from txl_audio import runtime
from txl_audio.codecs import predictors
from txl_audio.codecs.predictors import PARTS, Predictors
from txl_audio.model import heads
from txl_audio.model.adaptive import AdaptiveEmbedding, AdaptiveHead
from txl_audio.model.block import ResidualBlock
from txl_audio.model.depth import DepthHead
from txl_audio.model.embeddings import (
    NgramEmbedding,
    SampleEmbedding,
    SampleFeatures,
    StageFeatures,
    SymbolEmbedding,
)
from txl_audio.model.heads import TAP_GAIN, FrameHead, SoftmaxHead
from txl_audio.model.memory import DecodeState
from txl_audio.model.sequence import SequenceDecodeState, SequenceModel
from txl_audio.model.transformer import TransformerXL
from txl_audio.sampling import kernels, layers, matrix, numerics, packed, stepwise
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.matrix import Matrix

Weights: TypeAlias = Literal["float32", "int8"]
Pack: TypeAlias = Callable[[Tensor | Iterable[Tensor] | None], Matrix]


def unsupported(model: SequenceModel, weights: Weights) -> str | None:
    """Why there is no compiled step for a model; None where there is one."""
    device = next(model.parameters()).device
    if device.type != "cpu":
        return f"the model is on {device}, and the compiled step runs on a CPU"
    if not isinstance(model.embedding, SymbolEmbedding | AdaptiveEmbedding | SampleEmbedding):
        return f"its embedding, {type(model.embedding).__name__}, is not compiled"
    if not isinstance(model.head, SoftmaxHead | AdaptiveHead | FrameHead | DepthHead):
        return f"its head, {type(model.head).__name__}, is not compiled"
    if not isinstance(model.stage, Predictors | None):
        return "its codec has a stage that is not compiled"
    if weights == "int8" and model.core.config.d_head % 2:
        return f"int8 weights need an even d_head, got {model.core.config.d_head}"
    return None


class Compiled:
    """`stepwise.Stepper` of compiled kernels (see `kernels.run`).

    Args:
        state: whose position terms are taken. Its ring is changed to bfloat16 with int8 weights, where
            reading it takes about as long as reading the weights.
        among: what the first symbol of a frame may be; None: any.
        weights: int8 rounds the large matrices, each output by its own scale; those at the end of a frame
            head, on which predictions depend most, and those of adaptive clusters stay float32.
    """

    def __init__(
        self,
        model: SequenceModel,
        state: SequenceDecodeState,
        among: range | None = None,
        *,
        weights: Weights = "float32",
    ) -> None:
        assert unsupported(model, weights) is None
        self._vocabulary = model.spec.vocab_size
        self._among = among or range(self._vocabulary)
        self._segment_len = model.core.config.segment_len
        if weights == "int8":
            core = state.core
            core.keys, core.values = core.keys.to(torch.bfloat16), core.values.to(torch.bfloat16)
        lanes = len(state.recent)
        pack = partial(_matrix, kind=weights, lanes=lanes)
        self._parts = (
            _embedding(model.embedding, pack),
            _core(model.core, state.core, pack),
            _head(model.head, pack, codes=model.spec.codes),
            _stage(model.stage),
        )
        frame = torch.zeros(lanes, model.spec.symbols_per_frame, dtype=torch.int64)
        none = frame[:, None][:, :0]
        # No frames: it only compiles, or loads what was, which takes a fraction of a second.
        self.run(state, frame, none, none.double(), Filters())

    def run(
        self, state: SequenceDecodeState, frame: Tensor, given: Tensor, uniforms: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        lanes, frames, places = uniforms.shape
        history, core = state.recent.size(1), state.core
        line = torch.cat([state.recent, frame, given.flatten(1)], dim=1)
        nats = torch.zeros(lanes, places)
        stage = torch.empty(lanes, 0, dtype=torch.float64) if state.stage is None else state.stage
        most = min(filters.top_k or self._vocabulary, self._vocabulary)
        among = self._among.start, self._among.stop
        draw = packed.Draw(float(filters.temperature), most, float(filters.top_p or 1.0), *among)
        _run(
            *self._parts, draw, _ring(core.keys), _ring(core.values), core.start.numpy(), stage.numpy(),
            line.numpy(), history + places, int(core.time), int(core.segment_phase),
            uniforms.numpy(), nats.numpy(),
        )  # fmt: skip
        core.time += frames
        core.segment_phase.add_(frames).remainder_(self._segment_len)
        state.recent = line[:, frames * places : frames * places + history].clone()
        return line[:, history + places :].view(lanes, frames, places), nats


def _ring(values: Tensor) -> np.ndarray:
    """The same memory; bfloat16 in pairs."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint32)
    return values.numpy()


def _array(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.detach().float().numpy())


def _matrix(weights: Tensor | Iterable[Tensor] | None, *, kind: Weights, lanes: int) -> Matrix:
    """A matrix [O, I], or several, [N, O, I]; none where there is none."""
    if weights is None:
        return Matrix.pack(np.empty((0, 0, 0), np.float32), kind, lanes=lanes)
    stacked = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
    return Matrix.pack(_array(stacked.reshape(-1, *stacked.shape[-2:])), kind, lanes=lanes)


def _norm(norm: nn.LayerNorm) -> Tensor:
    assert norm.eps == 1e-5
    return torch.stack([norm.weight, norm.bias])


def _core(core: TransformerXL, state: DecodeState, pack: Pack) -> packed.Core:
    config, layers = core.config, core.layers
    heads, width = config.n_head, config.d_head
    u = torch.zeros(len(layers), heads, width)
    v, b, r = u.clone(), torch.zeros(len(layers), heads, state.capacity), []
    for index, terms in enumerate(state.terms):
        if terms is not None:
            u[index], v[index] = terms.u, 0.0 if terms.v is None else terms.v
            b[index] = 0.0 if terms.b is None else terms.b.flip(1)
            r.append(terms.r.flip(1))
    offsets = core.positions.max_segment or 0
    added = torch.zeros(offsets, len(layers), config.d_model)
    for offset in range(offsets):
        for index in range(len(layers)):
            zero = torch.zeros(1, 1, config.d_model)
            added[offset, index] = core.positions.add(index, zero, offset=offset)[0, 0].detach()
    final = core.final_norm
    # The first frame of a segment sees mem_len frames and itself, later ones more where the window grows.
    reach = int(core.window_limit(1, torch.device("cpu"))[0, 0])
    return packed.Core(
        qkv=pack(x.qkv.weight for x in layers),
        out=pack(x.out.weight for x in layers),
        expand=pack(x.expand.weight for x in layers),
        expand_bias=_array(torch.stack([x.expand.bias for x in layers])),
        contract=pack(x.contract.weight for x in layers),
        contract_bias=_array(torch.stack([x.contract.bias for x in layers])),
        attention_norm=_array(torch.stack([_norm(x.attention_norm) for x in layers])),
        feed_forward_norm=_array(torch.stack([_norm(x.feed_forward_norm) for x in layers])),
        final_norm=_array(
            _norm(final) if isinstance(final, nn.LayerNorm) else torch.empty(0, config.d_model)
        ),
        pre=config.norm == "pre",
        gelu=config.activation == "gelu",
        u=_array(u),
        v=_array(v),
        r=pack(r or None),
        b=_array(b),
        added=_array(added),
        reach=reach,
        grows=int(config.window == "segment"),
        segment_len=config.segment_len,
    )


def _features(features: SampleFeatures | StageFeatures | None) -> packed.Features:
    if features is None:
        return packed.Features(0, np.empty((0, 3), np.float32), False)
    table, staged = features.table, isinstance(features, StageFeatures)
    if staged:
        table = torch.nn.functional.pad(table[:, None], (0, 2))
    return packed.Features(features.samples, _array(table), staged)


def _embedding(embedding: nn.Module, pack: Pack) -> packed.Embedding:
    nothing, none = torch.empty(0), np.empty((0, 0), np.float32)
    if isinstance(embedding, SampleEmbedding):
        read, write = cast("tuple[nn.Linear, nn.Linear]", (embedding.net[0], embedding.net[2]))
        return packed.Embedding(
            none, 0, 1.0, none, _words(None), _ngrams(None), _features(embedding.features),
            pack(read.weight), _array(read.bias), pack(write.weight), _array(write.bias),
        )  # fmt: skip
    if isinstance(embedding, AdaptiveEmbedding):
        return packed.Embedding(
            none, 0, embedding.d_model**0.5, none, _words(embedding), _ngrams(None), _features(None),
            pack(None), _array(nothing), pack(None), _array(nothing),
        )  # fmt: skip
    assert isinstance(embedding, SymbolEmbedding)
    projection = none if embedding.projection is None else _array(embedding.projection.weight)
    return packed.Embedding(
        _array(embedding.weight), embedding.rows, embedding.scale, projection,
        _words(None), _ngrams(embedding.ngrams), _features(None),
        pack(None), _array(nothing), pack(None), _array(nothing),
    )  # fmt: skip


def _words(clusters: AdaptiveEmbedding | AdaptiveHead | None) -> packed.Words:
    none, numbers = np.empty(0, np.float32), np.empty(0, np.int64)
    if clusters is None:
        return packed.Words(numbers, numbers, none, none)
    every = range(len(clusters.bounds) - 1)
    tables, projections = ([of(i) for i in every] for of in (clusters.table, clusters.projection))
    lines = [[_array(x).ravel() for x in group if x is not None] for group in (tables, projections)]
    return packed.Words(
        np.array(clusters.bounds),
        np.array([table.size(1) for table in tables if table is not None]),
        *(np.concatenate([none, *line]) for line in lines),
    )


def _ngrams(ngrams: NgramEmbedding | None) -> packed.Ngrams:
    if ngrams is None:
        none = np.empty((0, 0), np.float32)
        return packed.Ngrams(np.empty(0, np.int64), 1, 1, none, none)
    lengths, table = np.array(ngrams.config.lengths), _array(ngrams.table)
    return packed.Ngrams(lengths, ngrams.base, ngrams.config.rows, table, _array(ngrams.projection.weight))


def _head(head: nn.Module, pack: Pack, *, codes: int) -> packed.Head:
    nothing: dict[str, Any] = dict.fromkeys(("vocabulary", "read", "condition", "inner", "outer"), pack(None))
    flat = ("entry_bias", "read_bias", "output_bias", "shared")
    nothing |= dict.fromkeys(flat, np.empty(0, np.float32))
    square = ("projection", "vocabulary_bias", "earlier", "entries", "output", "predict")
    nothing |= dict.fromkeys((*square, "inner_bias", "outer_bias"), np.empty((0, 0), np.float32))
    nothing |= {"norms": np.empty((0, 2, 0), np.float32), "edges": np.empty(0), "features": _features(None)}
    nothing |= {"codes": codes, "words": _words(None), "first_gate": 0, "mixtures": 0}
    if isinstance(head, SoftmaxHead):
        given: dict[str, Any] = {
            "vocabulary": pack(head.vectors),
            "vocabulary_bias": _array(head.bias[None]),
        }
        if head.projection is not None:
            given["projection"] = _array(head.projection.weight)
        return packed.Head(**nothing | given)
    if isinstance(head, AdaptiveHead):
        given = {
            "words": _words(head),
            "vocabulary_bias": _array(torch.cat(list(head.biases))[None]),
            "entries": _array(head.cluster_weight),
            "entry_bias": _array(head.cluster_bias),
        }
        return packed.Head(**nothing | given)
    assert isinstance(head, FrameHead | DepthHead)
    blocks = cast("list[ResidualBlock]", list(head.blocks))
    given = {
        "condition": pack(head.condition.weight),
        "norms": _array(torch.stack([_norm(x.norm) for x in blocks] + [_norm(head.norm)])),
    }
    if blocks:
        for name in ("inner", "outer"):
            layers = [getattr(block, name) for block in blocks]
            given[name] = pack(x.weight for x in layers)
            given[f"{name}_bias"] = _array(torch.stack([x.bias for x in layers]))
    if isinstance(head, DepthHead):
        given |= {"vocabulary": pack(head.output.transpose(1, 2)), "vocabulary_bias": _array(head.bias)}
        if head.earlier is not None:
            given["earlier"] = _array(head.earlier)
        return packed.Head(**nothing | given)
    given |= {
        "features": _features(head.features),
        "read": pack(head.read.weight),
        "read_bias": _array(head.read.bias),
        "output": _array(head.output.weight),
        "output_bias": _array(head.output.bias),
        "edges": head.edges.double().numpy(),
    }
    if head.predict is not None:
        given |= {
            "predict": _array(TAP_GAIN * head.predict.weight),
            "shared": _array(TAP_GAIN * head.shared),
            "mixtures": head.mixtures,
            "first_gate": 0 if head.stage is None else head.stage.deviations.start,
        }
    return packed.Head(**nothing | given)


def _stage(stage: Any) -> packed.Stage:
    if stage is None:
        none, numbers = np.empty(0), np.empty(0, np.int64)
        return packed.Stage(0, none, (0,) * PARTS, none, numbers, np.empty((0, 0)), none)
    ends = tuple(int(end) for end in np.cumsum(stage.sizes))
    return packed.Stage(
        stage.width, stage.start, ends, stage.levels, stage.orders, stage.settings, stage.shape
    )


def _cached(stamp: int) -> Any:
    """`kernels.run`, kept on disk: beside this file, or in the user's cache folder if that is read-only.

    numba looks for changes in this file only, and cannot read what was kept of classes that are gone; so
    every state of the sources has a name of its own.
    """

    def run(*arguments):
        kernels.run(*numerics.borrowed(arguments))

    run.__qualname__ = f"run_{stamp:08x}"
    return runtime.compiled()(run)


def _stamp(*modules: Any) -> int:
    """Changes with the source of `modules`."""
    stamp = 0
    for module in modules:
        stamp = zlib.crc32(Path(module.__file__).read_bytes(), stamp)
    return stamp


_run = _cached(_stamp(kernels, layers, matrix, numerics, packed, stepwise, predictors, heads))
