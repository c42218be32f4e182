"""Exact totals: every symbol of a split or file is scored once, and sums are divided once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from txl_audio import runtime
from txl_audio.data.stream import Documents, TokenStream, document_frames
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import IGNORE, DataError

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Totals:
    """Sum of nats over `count` symbols."""

    nats: float
    count: int

    @property
    def bits(self) -> float:
        """Bits per symbol."""
        return self.nats / max(1, self.count) / math.log(2)


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    documents: Documents,
    *,
    lanes: int = 8,
    warm: bool = False,
    precision: runtime.Precision = "float32",
    limit: int | None = None,
    progress: Progress | None = None,
) -> Totals:
    """Scores every symbol of the documents.

    Cold (the default): the model forgets at each document's begin, so that the result does not
    depend on lanes or order (with window `segment` it does, a little: documents begin anywhere in a
    segment). Warm: memory runs on from document to document within a lane.
    `limit` stops after about so many symbols. `progress` gets the number of symbols scored.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    stream = TokenStream(
        documents, model.spec, lanes=lanes, segment_len=evaluation_segment(model), reset=not warm
    )
    state = model.initial_state(lanes)
    nats, count = 0.0, 0
    for batch in stream:
        batch = batch.to(device)
        with runtime.autocast(device, precision):
            out, state = model.nll(batch.inputs, batch.targets, state, batch.reset)
        nats += out.double().sum().item()
        count += int((batch.targets != IGNORE).sum())
        if progress:
            progress(count)
        if limit is not None and count >= limit:
            break
    model.train(was_training)
    return Totals(nats, count)


def evaluation_segment(model: SequenceModel) -> int:
    """Frames per segment: the model's own where the result depends on it, else long ones for speed."""
    config = model.core.config
    return config.segment_len if config.window == "segment" else max(config.segment_len, 256)


@torch.no_grad()
def score_document(model: SequenceModel, symbols: np.ndarray) -> Tensor:
    """Nats of every scored symbol of one document [N], float32: [N], or [N - 1] for text."""
    frames_in, frames_out = document_frames(symbols, model.spec)
    inputs, targets = (torch.from_numpy(f.astype(np.int64))[None] for f in (frames_in, frames_out))
    nats = _score(model, inputs, targets)
    return nats.flatten()[targets.flatten() >= 0]


@torch.no_grad()
def score_tokens(model: SequenceModel, tokens: Tensor) -> Tensor:
    """tokens [N + 1, B] of B parallel text streams -> nats [N, B] of tokens 1..N, float32.

    Memory is carried from the first one on, in segments of the model's own length. Raises DataError
    for frames of several symbols, other shapes, or tokens outside the vocabulary.
    """
    if model.spec.symbols_per_frame != 1 or tokens.dim() != 2 or tokens.size(0) < 2:
        raise DataError(
            f"expected tokens of shape [N + 1, B] for a model of 1 symbol per frame, got shape "
            f"{tuple(tokens.shape)} and {model.spec.symbols_per_frame} symbols per frame"
        )
    if tokens.is_floating_point() or int(tokens.min()) < 0 or int(tokens.max()) >= model.spec.vocab_size:
        raise DataError(f"tokens must be integers in 0..{model.spec.vocab_size - 1}")
    line = tokens.T.long()[..., None]
    return _score(model, line[:, :-1], line[:, 1:])[..., 0].T.contiguous()


def _score(model: SequenceModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [B, T, K] of whole streams -> nats [B, T, K]."""
    was_training = model.training
    model.eval()
    device, length = next(model.parameters()).device, evaluation_segment(model)
    state, nats = model.initial_state(inputs.size(0)), []
    for at in range(0, inputs.size(1), length):
        part = slice(at, at + length)
        out, state = model.nll(inputs[:, part].to(device), targets[:, part].to(device), state)
        nats.append(out.cpu())
    model.train(was_training)
    return torch.cat(nats, dim=1) if nats else torch.zeros(targets.shape)
