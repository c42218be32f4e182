"""Frame by frame with PyTorch: the reference of all faster steps, and what runs on a GPU.

Shapes: B lanes, K symbols per frame.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from txl_audio.model.sequence import SequenceDecodeState, SequenceModel
from txl_audio.sampling.filters import Filters

FREE = -1
"""In place of a symbol that is not given."""


class Stepper(Protocol):
    """What a sampler's backend does."""

    def run(
        self, state: SequenceDecodeState, frame: Tensor, given: Tensor, uniforms: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        """The n frames after `frame` [B, K], the newest, which `state` has not seen yet; it is changed.

        given [B, n, K]: their symbols, FREE where one is to be drawn, in all lanes alike.
        uniforms [B, n, K] float64: what to draw with. Returns the frames [B, n, K] and what the last one cost
        [B, K] float32, in nats under the unfiltered model, 0 for given symbols.
        """
        ...


class Stepwise:
    """`Stepper` of PyTorch operations. among: what the first symbol of a frame may be; None: any."""

    def __init__(self, model: SequenceModel, among: range | None = None) -> None:
        self.model, self.among = model, among
        if model.stage is not None:  # compiles it, not in the middle of a stream
            model.stage.observe(torch.empty(1, 0, dtype=torch.int64), model.stage.initial_state(1))

    @torch.inference_mode()
    def run(
        self, state: SequenceDecodeState, frame: Tensor, given: Tensor, uniforms: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        free = (given[0] == FREE).tolist()
        frames, uniforms, given = [frame], uniforms.to(frame.device), given.to(frame.device)
        nats = torch.zeros(frame.shape, device=frame.device)
        for index in range(uniforms.size(1)):
            hidden = self.model.step_(frames[-1], state)
            symbols, nats = frame[:, :0], torch.zeros_like(nats)
            for place, drawn in enumerate(free[index]):
                symbol = given[:, index, place, None]
                if drawn:
                    log_probs = self.model.log_probs(hidden, state, symbols)
                    allowed = only(log_probs, self.among if place == 0 else None)
                    symbol = filters.draw(allowed, uniforms[:, index, place])[:, None]
                    nats[:, place] = -log_probs.gather(-1, symbol)[:, 0]
                symbols = torch.cat([symbols, symbol], dim=1)
            frames.append(symbols)
        return torch.stack(frames[1:], dim=1), nats


def only(log_probs: Tensor, among: range | None) -> Tensor:
    """log_probs [B, V] of the symbols `among`, -inf elsewhere."""
    if among is None:
        return log_probs
    symbol = torch.arange(log_probs.size(-1), device=log_probs.device)
    return log_probs.masked_fill((symbol < among.start) | (symbol >= among.stop), float("-inf"))
