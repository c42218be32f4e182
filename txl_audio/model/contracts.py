"""What every embedding and every head does; the core between them knows neither.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width, W history symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn


class SideStage(Protocol):
    """What a codec computes beside its symbols, causally and without weights to learn.

    For every symbol to be predicted it gives a vector of `width` numbers that depends only on the symbols
    before it: a reference value and a scale, both in the codec's amplitudes, then inputs for networks. It
    holds settings only: the state of lanes is a tensor [B, Z] float64 on the CPU, which a document begins
    anew.

    hash: of everything that changes the vectors. deviations: which inputs are predictions' distances from the
    reference, in units of the scale.
    """

    width: int
    hash: str
    deviations: slice

    def initial_state(self, lanes: int) -> Tensor: ...

    def run(self, inputs: Tensor, targets: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Side vectors [B, T, K, S] float32 of targets [B, T, K], and the state after `inputs`.

        inputs [B, T, K]: the frames before them, which are the targets of the frame before, or start symbols:
        there a document begins. Targets that are IGNORE are none.
        """
        ...

    def observe(self, symbols: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The side vector [B, S] of what follows symbols [B, n], of which a start symbol begins anew, and the
        state there."""
        ...


@dataclass(frozen=True)
class Waveform:
    """What sample embeddings and heads need to know of a waveform codec.

    levels [V] float32: amplitude of every symbol. edges [V - 1]: smallest amplitudes of symbols 1 to V - 1.
    """

    levels: Tensor
    edges: Tensor
    stage: SideStage | None = None


class Context(NamedTuple):
    """What the symbols of frames may depend on beside the core's output.

    history [B, T, W]: symbols before each frame. frame [B, T, K]: the frame itself, of which a place sees
    the symbols before it; it is what is scored, unless it was disturbed. side [B, T, K, S]: what the stage
    gives for each symbol, where the stream has one.
    """

    history: Tensor
    frame: Tensor
    side: Tensor | None = None

    def last(self, frames: int) -> Context:
        """Of the newest `frames`."""
        side = None if self.side is None else self.side[:, -frames:]
        return Context(self.history[:, -frames:], self.frame[:, -frames:], side)


class Embedding(nn.Module):
    """The contract: `history` symbols up to and including the newest input frame -> [B, T, D].

    inner: names of the submodules inside the network: neither tables nor outputs; see `OptimConfig`.
    """

    history: int
    inner: tuple[str, ...] = ()

    def forward(self, history: Tensor, side: Tensor | None = None) -> Tensor:
        """history [B, T, W]: the last W symbols of each step, newest last; W = `self.history`.

        side [B, T, S]: what the stage gives for the symbol after them, where the stream has one.
        """
        raise NotImplementedError


class Head(nn.Module):
    """The contract of every head. `history` is how many symbols before a frame it looks at; `inner` as in
    Embedding."""

    history: int = 0
    inner: tuple[str, ...] = ()

    def nll(self, hidden: Tensor, context: Context, targets: Tensor) -> Tensor:
        """Nats of every symbol, float32 [B, T, K], 0 where a target is IGNORE.

        hidden [B, T, D]; context of the same frames; targets [B, T, K].
        """
        raise NotImplementedError

    def log_probs(self, hidden: Tensor, window: Tensor, place: int, side: Tensor | None = None) -> Tensor:
        """Log-probabilities of the symbol at `place` of the frame, float32 [B, V].

        hidden [B, D]; window [B, W]: the W symbols before it, those of its own frame included; side [B, S].
        """
        raise NotImplementedError
