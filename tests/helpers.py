"""Signals for tests, computed, so that no test depends on a recording."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE_HZ = 16_000

# First three formants of five vowels in Hz (Peterson and Barney 1952, men): i, e, a, o, u.
_FORMANTS_HZ = (
    (270, 2290, 3010),
    (530, 1840, 2480),
    (730, 1090, 2440),
    (570, 840, 2410),
    (300, 870, 2240),
)


def speech_like(seconds: float, seed: int) -> NDArray[np.float32]:
    """Voiced bursts under formant envelopes, hisses and pauses: float32 [N] at 16 kHz, peak 0.5.

    It has what matters in speech for these tests: pitch, level that moves, silence that is not zero.
    """
    rng = np.random.default_rng(seed)
    samples = round(seconds * SAMPLE_RATE_HZ)
    pcm = 1e-3 * rng.standard_normal(samples)
    at = int(rng.integers(0, 800))
    while at < samples:
        n = int(rng.uniform(0.06, 0.22) * SAMPLE_RATE_HZ)
        burst = _hiss(n, rng) if rng.random() < 0.25 else _vowel(n, rng)
        burst = burst * np.hanning(n) * rng.uniform(0.3, 1.0)
        end = min(at + n, samples)
        pcm[at:end] += burst[: end - at]
        pause_s = 0.25 if rng.random() < 0.2 else 0.02
        at += n + int(rng.uniform(0.5, 1.5) * pause_s * SAMPLE_RATE_HZ)
    peak = np.abs(pcm).max(initial=1e-9)
    return (0.5 * pcm / peak).astype(np.float32)


def _vowel(n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Harmonics of a gliding pitch, each as loud as the formants make it; [n], peak 1."""
    t = np.arange(n) / SAMPLE_RATE_HZ
    pitch_hz = rng.uniform(90, 230) * (1 + rng.uniform(-0.6, 0.6) * t)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE_HZ
    formants_hz = np.array(_FORMANTS_HZ[rng.integers(len(_FORMANTS_HZ))])
    harmonics = np.arange(1, int(4000 / pitch_hz.max()) + 1)
    distance_hz = harmonics[:, None] * pitch_hz.mean() - formants_hz
    gain = (np.exp(-((distance_hz / 120) ** 2)) * [1.0, 0.5, 0.25]).sum(1) + 0.02
    voice = (gain[:, None] * np.sin(harmonics[:, None] * phase)).sum(0)
    return voice / np.abs(voice).max()


def _hiss(n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Noise without its low end, as in s; [n]."""
    return 0.15 * np.diff(rng.standard_normal(n + 1))
