"""What the core remembers: an immutable value in training and scoring, an owned ring in sampling.

Shapes: L layers, B lanes, M memory frames, D model width, H heads, d head width, C ring slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from txl_audio.model.positions import Terms


@dataclass(frozen=True)
class Memory:
    """The newest M inputs of every layer, detached (segment-level recurrence, section 3.2).

    Attributes:
        hidden: L tensors [B, M, D], oldest frame first.
        valid: [B] int64; only the newest `valid` frames of a lane exist, older rows are ignored.
    """

    hidden: tuple[Tensor, ...]
    valid: Tensor

    @classmethod
    def empty(
        cls, *, n_layer: int, lanes: int, mem_len: int, d_model: int, device: torch.device | str = "cpu"
    ) -> Memory:
        """A memory in which nothing exists yet."""
        hidden = tuple(torch.zeros(lanes, mem_len, d_model, device=device) for _ in range(n_layer))
        return cls(hidden, torch.zeros(lanes, dtype=torch.int64, device=device))

    @property
    def lanes(self) -> int:
        return self.valid.size(0)

    @property
    def mem_len(self) -> int:
        return self.hidden[0].size(1)

    @property
    def n_layer(self) -> int:
        return len(self.hidden)

    def filled(self) -> Memory:
        """All rows count as real: the zero memory that Hugging Face and TensorFlow attend to."""
        return replace(self, valid=torch.full_like(self.valid, self.mem_len))

    def reset(self, lanes: Tensor) -> Memory:
        """Forgets everything in the lanes where `lanes` [B] bool is true."""
        return replace(self, valid=self.valid.masked_fill(lanes, 0))

    def select(self, lanes: Tensor) -> Memory:
        """The memory of other lanes: `lanes` [B'] int64 indexes the present ones."""
        return Memory(tuple(h[lanes] for h in self.hidden), self.valid[lanes])

    def detach(self) -> Memory:
        return Memory(tuple(h.detach() for h in self.hidden), self.valid)


@dataclass(frozen=True)
class ProjectedMemory:
    """The same memory as keys and values, for scoring many segments with weights that stay.

    Made by `TransformerXL.project`, and as immutable as `Memory`. No gradient flows through it.

    Attributes:
        keys, values: L tensors [H, B, M, d], oldest frame first.
        valid: as in `Memory`.
        terms: score terms of every layer for all distances of the longest segment.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor
    terms: tuple[Terms | None, ...]
    longest_segment: int

    @property
    def lanes(self) -> int:
        return self.valid.size(0)

    @property
    def mem_len(self) -> int:
        return self.keys[0].size(2)

    @property
    def n_layer(self) -> int:
        return len(self.keys)

    def terms_for(self, distances: int) -> tuple[Terms | None, ...]:
        """Score terms of every layer for distances 0..N-1."""
        return tuple(None if term is None else term.first(distances) for term in self.terms)

    def reset(self, lanes: Tensor) -> ProjectedMemory:
        """Forgets everything in the lanes where `lanes` [B] bool is true."""
        return replace(self, valid=self.valid.masked_fill(lanes, 0))

    def select(self, lanes: Tensor) -> ProjectedMemory:
        """The memory of other lanes: `lanes` [B'] int64 indexes the present ones."""
        return replace(
            self,
            keys=tuple(k[:, lanes] for k in self.keys),
            values=tuple(v[:, lanes] for v in self.values),
            valid=self.valid[lanes],
        )


AnyMemory: TypeAlias = Memory | ProjectedMemory


@dataclass
class DecodeState:
    """Projected keys and values of the last C frames of every layer, for one owner.

    The slot of frame t is t mod C. All lanes step together; `start` says from which frame on a
    lane may look. Numbers that steps change are tensors on the ring's device, and steps write in place: so
    one step is the same work at the same addresses as the next, as a CUDA graph demands.

    Attributes:
        keys, values: [L, B, H, C, d].
        start: [B] int64, first frame that exists in each lane.
        time: [] int64, frames written so far.
        segment_phase: [] int64, offset of the next frame in its segment (window `segment`, and positions
            that are numbered inside segments).
        terms: score terms of every layer for distances 0..C-1, computed once.
    """

    keys: Tensor
    values: Tensor
    start: Tensor
    time: Tensor
    segment_phase: Tensor
    terms: tuple[Terms | None, ...]

    @property
    def capacity(self) -> int:
        return self.keys.size(3)

    def reset_(self, lanes: Tensor) -> None:
        """Forgets everything in the lanes where `lanes` [B] bool is true."""
        self.start[lanes] = self.time

    def fork(self) -> DecodeState:
        """An independent copy, for trying several continuations."""
        changing = ("keys", "values", "start", "time", "segment_phase")
        return replace(self, **{name: getattr(self, name).clone() for name in changing})

    def nbytes(self) -> int:
        """Bytes held beside the weights, constant however long the stream."""
        tensors = [self.keys, self.values, self.start]
        # The other parts of a term are views of the weights.
        tensors += [t for term in self.terms if term is not None for t in (term.r, term.b) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)
