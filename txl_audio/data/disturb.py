"""Recordings disturbed for training, so that a model that hears its own sound finds back.

Sampled sound drifts to where no recording is: a tone that has begun to grow grows on, a noise stays. A model
learns the way back only from a past that has left the usual one. Two disturbances show it: noise on what
it hears while the target is the clean sample, as LPCNet is trained (Valin and Skoglund 2019, section
3.3), and bursts, which are louder than all of the recording and die away.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from txl_audio.codecs.mulaw import CODES, SAMPLE_RATE_HZ, mulaw_decode, mulaw_encode
from txl_audio.config import Config
from txl_audio.tokens import IGNORE

BETWEEN_S = 0.3
"""Mean time between two bursts of a recording that has some."""
HEIGHTS, DECAYS_S, LARGEST_GAIN = (1.2, 5.0), (0.005, 0.05), 300.0
"""A burst reaches up to so many times the recording's peak, and falls to 1/e in so long."""
AHEAD = SAMPLE_RATE_HZ // 50
"""Samples whose peak says by how much a burst has to be amplified."""
UNSCORED = 64
"""Samples after a burst's begin that are no targets: nothing should learn to begin one."""


class DisturbConfig(Config):
    """Shares of the recordings that have noise or bursts, drawn anew every epoch.

    codes: largest standard deviation of the noise.
    """

    noise: float = Field(default=0.5, ge=0, le=1)
    codes: float = Field(default=2.0, gt=0)
    bursts: float = Field(default=0.25, ge=0, le=1)


def disturbed(
    codes: np.ndarray, config: DisturbConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """mu-law codes [N] -> (heard, targets), [N]; targets are IGNORE where a burst begins.

    Where nothing is disturbed both are `codes` itself, else int64.
    """
    heard = targets = codes
    if rng.random() < config.bursts:
        heard = codes.astype(np.int64)
        unscored = np.zeros(len(codes), dtype=bool)
        pcm = mulaw_decode(heard)
        gain = np.ones_like(pcm)
        for at in _begins(len(pcm), rng):
            height = np.abs(pcm).max() * np.exp(rng.uniform(*np.log(HEIGHTS)))
            jump = min(height / (np.abs(pcm[at : at + AHEAD]).max() + 1e-6), LARGEST_GAIN)
            decay = np.exp(rng.uniform(*np.log(DECAYS_S))) * SAMPLE_RATE_HZ
            tail = gain[at : at + round(20 * decay)]  # no gain is left after that
            np.maximum(tail, 1 + max(0.0, jump - 1) * np.exp(-np.arange(len(tail)) / decay), out=tail)
            unscored[at : at + UNSCORED] = True
        heard = mulaw_encode((pcm * gain).clip(-1, 1))
        targets = np.where(unscored, IGNORE, heard)
    if rng.random() < config.noise:
        noise = rng.random() * config.codes * rng.standard_normal(len(codes))
        heard = np.clip(heard + np.rint(noise).astype(np.int64), 0, CODES - 1)
    return heard, targets


def _begins(samples: int, rng: np.random.Generator) -> list[int]:
    """Places at random, at least UNSCORED apart."""
    gaps = UNSCORED + rng.exponential(BETWEEN_S * SAMPLE_RATE_HZ, size=1 + samples // UNSCORED)
    at = np.cumsum(gaps).astype(int)
    return at[at < samples].tolist()
