"""Frame by frame with PyTorch: the reference of all faster steps, and what runs on a GPU.

Shapes: B lanes, K symbols per frame.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from txl_audio.model.sequence import SequenceDecodeState, SequenceModel
from txl_audio.sampling.filters import Filters


class Stepper(Protocol):
    """What a sampler's backend does."""

    def run(
        self, state: SequenceDecodeState, frame: Tensor, known: Tensor, uniforms: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        """The n frames after `frame` [B, K], the newest, which `state` has not seen yet; it is changed.

        known [B, m]: their first symbols, where these are given. uniforms [B, n, K] float64: what the others
        are drawn with. Returns the frames [B, n, K] and what the last one cost [B, K] float32, in nats under
        the unfiltered model, 0 for given symbols.
        """
        ...


class Stepwise:
    """`Stepper` of PyTorch operations."""

    def __init__(self, model: SequenceModel) -> None:
        self.model = model
        if model.stage is not None:  # compiles it, not in the middle of a stream
            model.stage.observe(torch.empty(1, 0, dtype=torch.int64), model.stage.initial_state(1))

    @torch.inference_mode()
    def run(
        self, state: SequenceDecodeState, frame: Tensor, known: Tensor, uniforms: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        places, frames, uniforms = frame.size(1), [frame], uniforms.to(frame.device)
        nats = torch.zeros(frame.shape, device=frame.device)
        for index in range(uniforms.size(1)):
            hidden = self.model.step_(frames[-1], state)
            symbols = known[:, index * places : (index + 1) * places]
            nats = torch.zeros_like(nats)
            for place in range(symbols.size(1), places):
                log_probs = self.model.log_probs(hidden, state, symbols)
                symbol = filters.draw(log_probs, uniforms[:, index, place])[:, None]
                nats[:, place] = -log_probs.gather(-1, symbol)[:, 0]
                symbols = torch.cat([symbols, symbol], dim=1)
            frames.append(symbols)
        return torch.stack(frames[1:], dim=1), nats
