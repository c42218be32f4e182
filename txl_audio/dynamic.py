"""Dynamic evaluation: a model that goes on learning from what it has just been scored on.

Sources: Krause et al. 2018 (arXiv 1709.07432), and 2019 for Transformer-XL (arXiv 1904.08378).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from txl_audio import runtime
from txl_audio.config import Config
from txl_audio.data.stream import Batch
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import IGNORE, ConfigError


class DynamicConfig(Config):
    """How weights w, trained to w0, follow the gradient g of a segment's mean nats.

    sgd:  w += -lr g + decay (w0 - w)
    rms:  w += -lr g / (s + epsilon) + min(1, decay s / mean(s)) (w0 - w)

    with s the root mean square of the gradients of training segments: `collect` symbols of them, cut as
    the scored ones. By default lr is 1e-4 for rms and 0.03 for sgd, of the size that the papers' code has
    for segments of about 64 symbols; decay and epsilon are the paper's. All of them are worth choosing on
    the validation split. The papers learn from one stream in order, so that a segment profits from the one
    before it: lanes are 1 unless they are given together with `dynamic`, not those of a run's other scores.
    """

    method: Literal["sgd", "rms"] = "rms"
    lr: float | None = Field(default=None, ge=0)
    decay: float = Field(default=0.002, ge=0, le=1)
    epsilon: float = Field(default=2e-5, gt=0)
    collect: int = Field(default=200_000, ge=1)

    @property
    def rate(self) -> float:
        """The lr in use."""
        return {"sgd": 0.03, "rms": 1e-4}[self.method] if self.lr is None else self.lr


def dynamic_scores(
    model: SequenceModel,
    stream: Iterable[Batch],
    config: DynamicConfig,
    *,
    lanes: int,
    precision: runtime.Precision,
    train: Iterable[Batch] | None,
) -> Iterator[tuple[float, int]]:
    """(sum of nats, count) of every batch, each scored before it is learned from.

    The learning happens in a copy: `model` is not changed. `train` gives the segments whose gradients
    method rms measures, cut as those of `stream`. Raises ConfigError for rms without them, and where the
    weights run away.
    """
    learner = copy.deepcopy(model)
    weights = [p for p in learner.parameters() if p.requires_grad]
    trained = [w.detach().clone() for w in weights]
    sizes, mean = None, 1.0
    if config.method == "rms":
        if train is None:
            raise ConfigError(
                "dynamic evaluation with rms measures gradients on the training split and got none; "
                "evaluate data that has a split train, or use sgd"
            )
        losses = _losses(learner, train, lanes=lanes, precision=precision)
        sizes = gradient_sizes(losses, weights, symbols=config.collect)
        mean = sum(s.double().sum().item() for s in sizes) / sum(s.numel() for s in sizes)
    scored = 0
    for loss, count in _losses(learner, stream, lanes=lanes, precision=precision):
        nats = loss.item()
        if not math.isfinite(nats):
            raise ConfigError(
                f"dynamic evaluation diverged after {scored:,} symbols; lower evaluate.dynamic.lr, which is "
                f"{config.rate}"
            )
        yield nats, count
        scored += count
        for i, gradient in enumerate(_gradients(loss, count, weights)):
            step, pull = config.rate * gradient, config.decay
            if sizes is not None:
                step = step / (sizes[i] + config.epsilon)
                pull = (pull * sizes[i] / mean).clamp(max=1)
            weights[i].data += pull * (trained[i] - weights[i].data) - step


def gradient_sizes(
    losses: Iterable[tuple[Tensor, int]], weights: Sequence[Tensor], *, symbols: int
) -> list[Tensor]:
    """Root mean square, over segments, of the gradient of the mean nats: one tensor per weight."""
    squares = [torch.zeros_like(w) for w in weights]
    segments, seen = 0, 0
    for loss, count in losses:
        for square, gradient in zip(squares, _gradients(loss, count, weights), strict=True):
            square += gradient**2
        segments, seen = segments + 1, seen + count
        if seen >= symbols:
            break
    return [(square / segments).sqrt() for square in squares]


def _losses(
    model: SequenceModel, stream: Iterable[Batch], *, lanes: int, precision: runtime.Precision
) -> Iterator[tuple[Tensor, int]]:
    """(sum of nats, with its graph; count) of every batch; what is done to the weights between two shows."""
    device = next(model.parameters()).device
    state = model.initial_state(lanes)
    for batch in stream:
        batch = batch.to(device)
        with torch.enable_grad(), runtime.autocast(device, precision):
            nats, state = model.nll(batch.inputs, batch.targets, state, batch.reset)
        yield nats.double().sum(), int((batch.targets != IGNORE).sum())


def _gradients(loss: Tensor, count: int, weights: Sequence[Tensor]) -> list[Tensor]:
    """Of the mean nats, zero where a weight has no part in them."""
    return list(torch.autograd.grad(loss / max(1, count), weights, allow_unused=True, materialize_grads=True))
