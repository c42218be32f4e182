"""How a symbol is drawn from a distribution.

Shapes: B lanes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from txl_audio.tokens import ConfigError


@dataclass(frozen=True)
class Filters:
    """What may be drawn. Temperature 0 takes the most likely symbol.

    top_k keeps the k most likely symbols, top_p the fewest whose probabilities reach p (of those that top_k
    keeps); a symbol as likely as the last of them stays too.
    tails, for waveforms, whose symbols are in order of amplitude: the probability that is cut from each
    end. Recordings have such samples too, but go on as they should; a model that hears its own may not.
    Raises ConfigError for values that cannot be meant.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    tails: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}, expected a number from 0 up")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}, expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if not 0 <= self.tails < 0.5:
            raise ConfigError(f"tails is {self.tails}, expected at least 0 and less than 0.5")

    def between_tails(self, uniforms: Tensor) -> Tensor:
        """Uniform numbers in [0, 1) to where they do not reach the tails."""
        return self.tails + (1 - 2 * self.tails) * uniforms

    def draw(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        """log_probs [B, V], one number in [0, 1) for each lane [B] float64 -> symbols [B] int64.

        By inversion: the first symbol, in order, at which the cumulative probability exceeds the number. So
        a symbol depends on nothing but these two, whatever computed them.
        """
        if self.temperature == 0:
            return log_probs.argmax(-1)
        scores = log_probs.double()
        p = ((scores - scores.amax(-1, keepdim=True)) / self.temperature).exp()
        if self.top_k is not None or self.top_p is not None:
            ordered = p.sort(descending=True).values[:, : self.top_k]
            reached = ordered.cumsum(-1)
            last = (reached < (self.top_p or 1.0) * reached[:, -1:]).sum(-1, keepdim=True)
            p = p.masked_fill(p < ordered.gather(-1, last), 0.0)
        ends = p.cumsum(-1)
        before = (ends <= uniforms[:, None] * ends[:, -1:]).sum(-1)
        return before.clamp(max=p.size(-1) - 1)
