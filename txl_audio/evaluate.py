"""Exact totals: every symbol of a split or file is scored once, and sums are divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from txl_audio import runtime
from txl_audio.config import Config
from txl_audio.data.stream import Documents, Symbols, TokenStream, document_frames
from txl_audio.dynamic import DynamicConfig, dynamic_scores
from txl_audio.model.sequence import SequenceModel, SequenceState
from txl_audio.model.transformer import Window
from txl_audio.tokens import IGNORE, ConfigError, DataError, TokenSpec

Progress = Callable[[int], None]

TEXT = -1
"""Key of the text among the parts of totals."""

LONG_SEGMENT = 256
"""Frames per segment, at least, where the result does not depend on them: short ones are slow."""


class EvaluateConfig(Config):
    """How a model is scored. What is left out stays as it was trained.

    lanes: documents side by side; by default 8 for audio and 1 for text, which is then read in order. With
    N lanes a text is cut into N pieces, each of which begins without what stands before it. Dynamic
    evaluation has 1 lane by default, and a stride, where lanes are windows side by side, 16.
    segment_len, mem_len, window, clamp_len: of the core, see CoreConfig and RelativeConfig. Where the
    result does not depend on segments (windows sliding and same_length), they are by default long, except
    in dynamic evaluation, which learns after each.
    stride: sliding-window evaluation of a model without memory. A window of segment_len frames moves on
    by `stride` frames, and what is new in it is scored; 1 gives every target the longest context.
    dynamic: goes on learning while it is scored, see DynamicConfig.
    """

    lanes: int | None = Field(default=None, ge=1)
    segment_len: int | None = Field(default=None, ge=1)
    mem_len: int | None = Field(default=None, ge=0)
    window: Window | None = None
    clamp_len: int | None = Field(default=None, ge=1)
    stride: int | None = Field(default=None, ge=1)
    dynamic: DynamicConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> EvaluateConfig:
        if self.stride is not None and self.dynamic is not None:
            raise ValueError("stride and dynamic are two ways to evaluate; leave one of them out")
        return self

    def lanes_of(self, spec: TokenSpec) -> int:
        if self.lanes is not None:
            return self.lanes
        if self.stride is not None:
            return 16
        return 1 if self.dynamic is not None or spec.modality == "text" else 8

    def view(self, model: SequenceModel) -> SequenceModel:
        """The model as it is scored, with the same weights. Raises ConfigError for what it cannot do."""
        trained = model.core.config
        segment_len = self.segment_len
        if segment_len is None and self.dynamic is None and (self.window or trained.window) != "segment":
            segment_len = max(trained.segment_len, LONG_SEGMENT)
        viewed = model.view(
            mem_len=self.mem_len, segment_len=segment_len, window=self.window, clamp_len=self.clamp_len
        )
        core = viewed.core.config
        if self.stride is not None and (core.mem_len > 0 or core.window != "segment"):
            raise ConfigError(
                f"stride is for models without memory and with window segment, got mem_len {core.mem_len} "
                f"and window {core.window}; leave stride out"
            )
        if self.stride is not None and model.stage is not None:
            raise ConfigError(
                "stride scores windows that begin anywhere, and this model's predictors run along the whole "
                "stream; leave stride out"
            )
        if self.stride is not None and self.stride > core.segment_len:
            raise ConfigError(
                f"stride {self.stride} would leave out targets between windows of {core.segment_len} frames"
            )
        return viewed


@dataclass(frozen=True)
class Totals:
    """Sum of nats over `count` symbols.

    parts: of frames of a codec's codes, the same of every place, by its number from 0, and, with the key
    TEXT, of what is text beside them.
    """

    nats: float
    count: int
    parts: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        none = (0.0, 0)
        parts = {
            key: (
                self.parts.get(key, none)[0] + other.parts.get(key, none)[0],
                self.parts.get(key, none)[1] + other.parts.get(key, none)[1],
            )
            for key in sorted({*self.parts, *other.parts})
        }
        return Totals(self.nats + other.nats, self.count + other.count, parts)

    @property
    def bits(self) -> float:
        """Bits per symbol."""
        return self.nats / max(1, self.count) / math.log(2)

    def of_codes(self, frame_rate_hz: float) -> dict[str, float]:
        """Bits of a codec's codes per second of audio, per frame and per stage (codebook), and of a symbol of
        the text beside them. Nothing where there are no such parts."""
        if not self.parts:
            return {}
        bits = {key: nats / math.log(2) for key, (nats, _) in self.parts.items()}
        text, characters = bits.pop(TEXT, 0.0), self.parts.get(TEXT, (0.0, 0))[1]
        frames = max(1, self.parts[0][1])
        per_frame = sum(bits.values()) / frames
        return {
            "bits_per_second": per_frame * frame_rate_hz,
            "bits_per_frame": per_frame,
            **{f"bits_per_frame_stage_{place + 1}": value / frames for place, value in bits.items()},
            **({"bits_per_text_symbol": text / characters} if characters else {}),
        }


def evaluate(
    model: SequenceModel,
    documents: Documents,
    config: EvaluateConfig | None = None,
    *,
    warm: bool = False,
    precision: runtime.Precision = "float32",
    train: Documents | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Totals:
    """Scores every symbol of the documents. The model is left as it was.

    Cold (the default): the model forgets at each document's begin, so that the result does not
    depend on lanes or order (with window `segment` it does, a little: documents begin anywhere in a
    segment). Warm: memory runs on from document to document within a lane.
    `train` is what dynamic evaluation with rms measures gradients on. `limit` stops after about so many
    symbols. `progress` gets the number of symbols scored. Raises ConfigError for settings that the model
    does not have, for a stride with `warm`, and where dynamic evaluation diverges.
    """
    config = config or EvaluateConfig()
    with _evaluating(model):
        totals = Totals(0.0, 0)
        for more in _scores(model, documents, config, warm, precision, train):
            totals += more
            if progress:
                progress(totals.count)
            if limit is not None and totals.count >= limit:
                break
    return totals


@contextmanager
def _evaluating(model: SequenceModel) -> Iterator[None]:
    """Without dropout; a model that was training does so again afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


Scores = Iterator[Totals]
"""Of one batch after another."""


def _scores(
    model: SequenceModel,
    documents: Documents,
    config: EvaluateConfig,
    warm: bool,
    precision: runtime.Precision,
    train: Documents | None,
) -> Scores:
    """By the way of evaluation that `config` asks for."""
    viewed, lanes = config.view(model), config.lanes_of(model.spec)
    if warm and config.stride is not None:
        raise ConfigError("stride scores windows without memory, so none can be warm; leave one of them out")

    def stream(of: Documents) -> TokenStream:
        length = viewed.core.config.segment_len
        return TokenStream(of, model.spec, lanes=lanes, segment_len=length, reset=not warm)

    if config.dynamic is not None:
        batches = None if train is None else stream(train)
        scores = dynamic_scores(
            viewed, stream(documents), config.dynamic, lanes=lanes, precision=precision, train=batches
        )
        return (Totals(nats, count) for nats, count in scores)
    if config.stride is not None:
        return _window_scores(viewed, documents, stride=config.stride, lanes=lanes, precision=precision)
    return _segment_scores(viewed, stream(documents), lanes=lanes, precision=precision)


@torch.no_grad()
def _segment_scores(
    model: SequenceModel, stream: TokenStream, *, lanes: int, precision: runtime.Precision
) -> Scores:
    device = next(model.parameters()).device
    with runtime.autocast(device, precision):
        state = model.projected(model.initial_state(lanes))
    for batch in stream:
        batch = batch.to(device)
        with runtime.autocast(device, precision):
            nats, state = model.nll(batch.inputs, batch.targets, state, batch.reset)
        yield _totals(nats, batch.targets, model.spec)


def _window_scores(
    model: SequenceModel, documents: Documents, *, stride: int, lanes: int, precision: runtime.Precision
) -> Scores:
    for index in range(len(documents)):
        inputs, targets = _frames(documents[index], model.spec)
        for nats, wanted in window_nats(
            model, inputs, targets, stride=stride, lanes=lanes, precision=precision
        ):
            yield _totals(nats, wanted, model.spec)


@torch.no_grad()
def window_nats(
    model: SequenceModel,
    inputs: Tensor,
    targets: Tensor,
    *,
    stride: int,
    lanes: int,
    precision: runtime.Precision = "float32",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of one document, inputs and targets [T, K], as lanes.

    Yields (nats, targets) [B, new, K] of what is new in every window: where the target is not IGNORE, the
    nats are those of all targets of the document, in order.
    """
    device, total, places = next(model.parameters()).device, len(inputs), model.spec.symbols_per_frame
    size, kept = min(model.core.config.segment_len, total), model.history - places
    # Symbols before every frame: what heads and embeddings see beyond the frame itself.
    before = torch.cat([torch.full((kept,), model.spec.start_symbol), inputs.flatten()])
    for begin in window_begins(total, size, stride=stride, lanes=lanes):
        new = size if begin[0] == 0 else min(stride, size)
        at = begin[:, None] + torch.arange(size)
        wanted = targets[at[:, -new:]]
        # The last window of a document may move on by less than the others.
        already = torch.where(begin == 0, 0, (begin - 1) // stride * stride + size)
        wanted[at[:, -new:] < already[:, None]] = IGNORE
        recent = before[begin[:, None] * places + torch.arange(kept)].to(device)
        state = SequenceState(model.core.first_memory(len(begin)), recent)
        with runtime.autocast(device, precision):
            hidden, context, _ = model.encode(inputs[at].to(device), targets[at].to(device), state)
            nats = model.head.nll(hidden[:, -new:], context.last(new), wanted.to(device))
        yield nats.cpu(), wanted


def window_begins(frames: int, size: int, *, stride: int, lanes: int) -> Iterator[Tensor]:
    """Where windows of `size` frames begin, up to `lanes` at a time, so that the last ends with the frames.

    The first window comes alone: it scores all its frames, the others only what is new in them.
    """
    if frames == 0:
        return
    last = frames - size
    windows = 1 + -(-last // stride)
    yield torch.tensor([0])
    for first in range(1, windows, lanes):
        yield (torch.arange(first, min(first + lanes, windows)) * stride).clamp(max=last)


def _frames(symbols: Symbols, spec: TokenSpec) -> tuple[Tensor, Tensor]:
    """Inputs and targets [T, K] of one document."""
    inputs, targets = (torch.from_numpy(f.astype(np.int64)) for f in document_frames(symbols, spec))
    return inputs, targets


def _totals(nats: Tensor, targets: Tensor, spec: TokenSpec) -> Totals:
    """Of nats [B, T, K], which are 0 where targets [B, T, K] are IGNORE."""
    nats, scored, parts = nats.double(), targets != IGNORE, {}
    if spec.modality == "codes":
        text = targets >= spec.codes
        parts = {place: _sums(nats, scored & ~text, place) for place in range(targets.size(-1))}
        if spec.text_size:
            parts[TEXT] = _sums(nats, text, 0)
    return Totals(nats.sum().item(), int(scored.sum()), parts)


def _sums(nats: Tensor, which: Tensor, place: int) -> tuple[float, int]:
    which = which[..., place]
    return nats[..., place][which].sum().item(), int(which.sum())


def score_document(model: SequenceModel, symbols: np.ndarray, config: EvaluateConfig | None = None) -> Tensor:
    """Nats of every scored symbol of one document [N], float32: [N], or [N - 1] for text.

    Of text the first symbol is only context, so a text of one symbol has no score. Raises ConfigError for
    settings that the model does not have, and for dynamic ones.
    """
    pieces = list(score_pieces(model, symbols, config))
    return torch.cat(pieces) if pieces else torch.zeros(0)


def score_pieces(
    model: SequenceModel, symbols: np.ndarray, config: EvaluateConfig | None = None
) -> Iterator[Tensor]:
    """As `score_document`, segment by segment as they are asked for: nats [n], [N] in all."""
    inputs, targets = _frames(symbols, model.spec)
    if config is not None and config.stride is not None:
        with _evaluating(model):
            viewed, lanes = config.view(model), config.lanes_of(model.spec)
            for nats, wanted in window_nats(viewed, inputs, targets, stride=config.stride, lanes=lanes):
                yield nats[wanted != IGNORE]
        return
    at = 0
    for nats in _score(model, inputs[None], targets[None], config):
        wanted = targets[at : at + nats.size(1)] != IGNORE
        at += nats.size(1)
        yield nats[0][wanted]


def score_tokens(model: SequenceModel, tokens: Tensor, config: EvaluateConfig | None = None) -> Tensor:
    """tokens [N + 1, B] of B parallel text streams -> nats [N, B] of tokens 1..N, float32.

    Memory is carried from the first one on. Raises DataError for frames of several symbols, other
    shapes, or tokens outside the vocabulary; ConfigError as `score_document`.
    """
    if model.spec.symbols_per_frame != 1 or tokens.dim() != 2 or tokens.size(0) < 2:
        raise DataError(
            f"expected tokens of shape [N + 1, B] for a model of 1 symbol per frame, got shape "
            f"{tuple(tokens.shape)} and {model.spec.symbols_per_frame} symbols per frame"
        )
    if tokens.is_floating_point() or int(tokens.min()) < 0 or int(tokens.max()) >= model.spec.vocab_size:
        raise DataError(f"tokens must be integers in 0..{model.spec.vocab_size - 1}")
    line = tokens.T.long()[..., None]
    inputs, targets = line[:, :-1], line[:, 1:]
    return torch.cat(list(_score(model, inputs, targets, config)), dim=1)[..., 0].T.contiguous()


@torch.no_grad()
def _score(
    model: SequenceModel, inputs: Tensor, targets: Tensor, config: EvaluateConfig | None
) -> Iterator[Tensor]:
    """inputs, targets [B, T, K] of whole streams -> nats [B, n, K] of one segment after another."""
    config = config or EvaluateConfig()
    if config.dynamic is not None:
        raise ConfigError("single files and token streams are scored without learning; leave dynamic out")
    with _evaluating(model):
        viewed = config.view(model)
        if config.stride is not None:
            yield _score_windows(viewed, inputs, targets, config.stride, config.lanes_of(model.spec))
            return
        device, length = next(model.parameters()).device, viewed.core.config.segment_len
        state = viewed.projected(viewed.initial_state(inputs.size(0)))
        for at in range(0, inputs.size(1), length):
            part = slice(at, at + length)
            nats, state = viewed.nll(inputs[:, part].to(device), targets[:, part].to(device), state)
            yield nats.cpu()


def _score_windows(model: SequenceModel, inputs: Tensor, targets: Tensor, stride: int, lanes: int) -> Tensor:
    """As `_score`, every stream by itself in windows."""
    nats = torch.zeros(targets.shape)
    for stream in range(inputs.size(0)):
        windows = window_nats(model, inputs[stream], targets[stream], stride=stride, lanes=lanes)
        scored = [found[wanted != IGNORE] for found, wanted in windows]
        if scored:
            nats[stream][targets[stream] != IGNORE] = torch.cat(scored)
    return nats
