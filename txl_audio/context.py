"""Relative effective context length: from where on more context no longer helps the models of a group.

Source: Dai et al. 2019 (arXiv 1901.02860), section 4.4 and appendix C. Shapes: G models of a group,
C contexts, N positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from txl_audio.data.stream import Documents, document_frames
from txl_audio.evaluate import EvaluateConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import ConfigError, DataError, TokenSpec

THRESHOLD = 0.01
"""Relative gain below which more context no longer counts (the paper's)."""


def relative_gain(
    shorter: NDArray[np.floating], longer: NDArray[np.floating], hardest: float
) -> NDArray[np.float64]:
    """What every model gains from more context where the group needs it most, [G].

    shorter, longer [G, N]: nats of the same positions at context c and c'. With the baseline of a
    position b = the lowest loss of any model at c, and the fraction `hardest` of positions with the
    highest b,

        f(c, c') = mean of min(b, loss at c'),    gain = (exp f(c, c) - exp f(c, c')) / exp f(c, c)
    """
    baseline = shorter.min(axis=0)
    kept = max(1, round(hardest * baseline.size))
    chosen = np.argsort(-baseline, kind="stable")[:kept]
    before = baseline[chosen].astype(np.float64).mean()
    after = np.minimum(baseline, longer)[:, chosen].astype(np.float64).mean(axis=1)
    return 1.0 - np.exp(after - before)


@dataclass(frozen=True)
class Reach:
    """How far one model of a group sees, for one fraction of positions.

    length: the effective context in frames; `whole` is false where every measured context still helped,
    so that the length is a lower bound. gains: from every context to the next.
    """

    length: int
    whole: bool
    gains: tuple[float, ...]


def effective_length(contexts: Sequence[int], gains: Sequence[float]) -> Reach:
    """contexts [C] ascending, gains [C - 1]: the first context from which one step more gains too little."""
    for context, gain in zip(contexts[:-1], gains, strict=True):
        if gain < THRESHOLD:
            return Reach(context, True, tuple(gains))
    return Reach(contexts[-1], False, tuple(gains))


@dataclass(frozen=True)
class Sampled:
    """Sampled targets: inputs [N, C, K], the frames before each, oldest first; targets [N, K]."""

    inputs: Tensor
    targets: Tensor


def sample_positions(
    documents: Documents, spec: TokenSpec, *, count: int, context: int, seed: int = 0
) -> Sampled:
    """`count` positions at random among those with `context` frames of their document before them.

    Raises DataError where there is none.
    """
    frames = [document_frames(documents[i], spec) for i in range(len(documents))]
    room = np.array([max(0, len(inputs) - context + 1) for inputs, _ in frames])
    total = int(room.sum())
    if total == 0:
        longest = max(len(inputs) for inputs, _ in frames)
        raise DataError(
            f"no document has {context} frames of context, the longest has {longest}; lower --longest"
        )
    chosen = np.sort(np.random.default_rng(seed).choice(total, size=min(count, total), replace=False))
    ends = np.cumsum(room)
    inputs, targets = [], []
    for place in chosen:
        document = int(np.searchsorted(ends, place, side="right"))
        begin = int(place - (ends[document] - room[document]))
        frames_in, frames_out = frames[document]
        inputs.append(frames_in[begin : begin + context])
        targets.append(frames_out[begin + context - 1])
    stacked = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in (inputs, targets))
    return Sampled(*stacked)


@torch.no_grad()
def losses_at(model: SequenceModel, sampled: Sampled, context: int, *, lanes: int) -> NDArray[np.float32]:
    """Nats of every position [N] given exactly `context` frames, by a model that begins with them.

    A model without memory sees no more than a segment of them, as when it is trained.
    """
    core, device = model.core.config, next(model.parameters()).device
    seen = context if core.mem_len > 0 else min(context, core.segment_len)
    out: list[Tensor] = []
    for inputs, targets in zip(sampled.inputs.split(lanes), sampled.targets.split(lanes), strict=True):
        inputs = inputs[:, inputs.size(1) - seen :].to(device)
        targets = torch.cat([inputs[:, 1:], targets[:, None].to(device)], dim=1)
        state = model.projected(model.initial_state(len(inputs)))
        # A short segment first, so that the last frame stands at the end of a whole one and sees most.
        first = seen % core.segment_len or core.segment_len
        nats = torch.empty(0)
        for end in range(first, seen + 1, core.segment_len):
            part = slice(max(0, end - core.segment_len), end)
            hidden, window, state = model.encode(inputs[:, part], targets[:, part], state)
            if end == seen:
                nats = model.head.nll(hidden[:, -1:], window.last(1), targets[:, -1:])
        out.append(nats.sum(dim=(1, 2)).cpu())
    return torch.cat(out).numpy()


@dataclass(frozen=True)
class Contexts:
    """Result of `measure`: contexts [C] in frames; nats [G, C, N]; reach[fraction][model]."""

    contexts: tuple[int, ...]
    nats: NDArray[np.float32]
    reach: dict[float, tuple[Reach, ...]]


def measure(
    models: Sequence[SequenceModel],
    settings: Sequence[EvaluateConfig],
    documents: Documents,
    *,
    fractions: Sequence[float],
    step: int,
    longest: int,
    positions: int,
    lanes: int = 16,
    seed: int = 0,
) -> Iterator[Contexts]:
    """Grows the context by `step` frames until no model gains any more, or to `longest`.

    Yields what is known after every context. Raises ConfigError for fractions outside (0, 1], models
    of different streams or no room to grow; DataError where no document is long enough.
    """
    if not all(0 < r <= 1 for r in fractions):
        raise ConfigError(f"fractions of positions lie above 0 and up to 1, got {list(fractions)}")
    if longest < 2 * step:
        raise ConfigError(
            f"contexts of {step} to {longest} frames leave nothing to compare; raise --longest or lower "
            "--step"
        )
    for model in models[1:]:
        model.spec.require(models[0].spec, here="one run", there="the first")
    views = [config.view(model) for model, config in zip(models, settings, strict=True)]
    sampled = sample_positions(documents, models[0].spec, count=positions, context=longest, seed=seed)
    contexts: list[int] = []
    nats: list[NDArray[np.float32]] = []
    for context in range(step, longest + 1, step):
        nats.append(np.stack([losses_at(view, sampled, context, lanes=lanes) for view in views]))
        contexts.append(context)
        result = reaches(contexts, np.stack(nats, axis=1), fractions)
        yield result
        if len(contexts) > 1 and all(r.whole for group in result.reach.values() for r in group):
            return


def reaches(contexts: Sequence[int], nats: NDArray[np.floating], fractions: Sequence[float]) -> Contexts:
    """Effective lengths of a group from its losses [G, C, N] at `contexts`."""
    reach: dict[float, tuple[Reach, ...]] = {}
    for fraction in fractions:
        steps = [relative_gain(nats[:, i], nats[:, i + 1], fraction) for i in range(len(contexts) - 1)]
        reach[fraction] = tuple(
            effective_length(contexts, [float(gain[model]) for gain in steps]) for model in range(len(nats))
        )
    return Contexts(tuple(contexts), nats.astype(np.float32), reach)
