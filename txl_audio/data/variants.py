"""Training recordings prepared several times, each time a little different: for small sets.

A model learns the codes of a small set by heart, though the same sound would have others if the codec's
frames began a little later. Speed is changed together with pitch, as in Ko et al. 2015, "Audio augmentation
for speech recognition".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from txl_audio.data import audio
from txl_audio.data.recordings import Recording
from txl_audio.tokens import ConfigError, DataError

SPEED, GAIN_DB = 0.08, 6.0
"""A variant is at most so much faster or slower, and louder or softer."""
LOUDEST = 1 - 2**-15
"""Peak that no variant exceeds, the highest of 16 bits: none is clipped."""
VARIATION = f"speed within {SPEED:.0%}, level within {GAIN_DB:g} dB, begin within a frame"
"""What shards say of how their variants were made."""


def with_variants(recordings: Sequence[Recording], variants: int) -> list[list[Recording]]:
    """Every recording, followed by its variants where it is of `train`: NAME~1 to NAME~(variants - 1).

    Raises ConfigError for fewer than 1, DataError where a recording is called as a variant of another.
    """
    if variants < 1:
        raise ConfigError(f"variants is {variants}, expected 1, which is the recording as it is, or more")
    groups = [
        [replace(r, id=f"{r.id}~{n}" if n else r.id, variant=n) for n in range(variants)]
        if r.split == "train"
        else [r]
        for r in recordings
    ]
    own = {r.id for r in recordings}
    if taken := [v.id for group in groups for v in group[1:] if v.id in own]:
        raise DataError(f"a recording is called {taken[0]!r}, as a variant would be; rename it")
    return groups


def vary(pcm: np.ndarray, name: str, *, sample_rate_hz: int, frame_samples: int) -> tuple[np.ndarray, float]:
    """pcm [N] float32 -> (a variant of it, float32 [M] with M at least 1, its linear gain).

    It is drawn from `name` alone, so it is the same in any process and order. Less than a codec's frame is
    cut off at its begin. A gain that would clip ends where the peak is `LOUDEST`.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()))
    begin = int(rng.integers(min(frame_samples, len(pcm))))
    speed, gain_db = rng.uniform(1 - SPEED, 1 + SPEED), rng.uniform(-GAIN_DB, GAIN_DB)
    # Read at this rate and played at the other, it is faster by their ratio.
    pcm = audio.resample(pcm[begin:], from_hz=sample_rate_hz, to_hz=round(sample_rate_hz / speed))
    peak = float(np.abs(pcm).max())
    gain = min(10 ** (gain_db / 20), LOUDEST / peak) if peak else 10 ** (gain_db / 20)
    return pcm * np.float32(gain), gain
