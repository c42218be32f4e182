"""What every embedding and every head does; the core between them knows neither.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width, W history symbols.
"""

from __future__ import annotations

from torch import Tensor, nn


class Embedding(nn.Module):
    """The contract: `history` symbols up to and including the newest input frame -> [B, T, D]."""

    history: int

    def forward(self, history: Tensor) -> Tensor:
        """history [B, T, W]: the last W symbols of each step, newest last; W = `self.history`."""
        raise NotImplementedError


class Head(nn.Module):
    """The contract of every head. `history` is how many symbols before a frame it looks at."""

    history: int = 0

    def nll(self, hidden: Tensor, history: Tensor, targets: Tensor) -> Tensor:
        """Nats of every symbol, float32 [B, T, K], 0 where a target is IGNORE.

        hidden [B, T, D]; history [B, T, W] symbols before each frame; targets [B, T, K].
        """
        raise NotImplementedError

    def log_probs(self, hidden: Tensor, window: Tensor, place: int) -> Tensor:
        """Log-probabilities of the symbol at `place` of the frame, float32 [B, V].

        hidden [B, D]; window [B, W]: the W symbols before it, those of its own frame included.
        """
        raise NotImplementedError
