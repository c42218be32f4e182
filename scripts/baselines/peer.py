"""What every peer is to train.py: a causal network over samples, with a state.

Shapes: B lanes, T samples of a segment. The state is tensors with the lanes in front.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

CODES = 256
"""Vocabulary: the codes of 8-bit mu-law."""
START = CODES
"""The input before the first sample of a document."""

State = tuple[Tensor, ...]


class Peer(nn.Module):
    """The contract, and how a peer is trained: lanes times segment is one step.

    lr: peak rate of AdamW.
    """

    lanes: ClassVar[int]
    segment_samples: ClassVar[int]
    lr: ClassVar[float]

    def initial_state(self, lanes: int) -> State:
        """Before a document's first sample."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """inputs [B, T], the sample before each one to be predicted -> logits [B, T, 256], state after them.

        Two segments with the state between them give what one gives, except for a peer without memory.
        """
        raise NotImplementedError


def reset(state: State, initial: State, begins: Tensor) -> State:
    """The state with lanes `begins` [B] bool back at the start of a document; no gradient into the past."""
    lanes = [begins.view(-1, *[1] * (part.dim() - 1)) for part in state]
    return tuple(
        torch.where(lane, first, part.detach())
        for lane, first, part in zip(lanes, initial, state, strict=True)
    )


def amplitudes(symbols: Tensor) -> Tensor:
    """Symbols as companded values in [-1, 1]; the start symbol stands just beyond."""
    return symbols / 127.5 - 1
