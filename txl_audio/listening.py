"""How sound compares with speech, in figures: levels, spectrum, voicing, pauses, bursts, collapse.

Likelihood does not say how a model sounds when it continues its own output, so generated excerpts are
compared with real ones of the same speaker. Everything is for sound at 16 kHz. Levels are RMS levels in dB
below full scale: a sine of full scale has -3 dBFS.

Shapes: N samples, S whole seconds, F frequency bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy.signal
from numpy.typing import NDArray

from txl_audio.tokens import DataError

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 320
FLOOR_DBFS = -120.0
"""Level of digital silence."""

LOUD_DBFS = -12.0
"""Frames above it are bursts: speech recorded with ordinary headroom has none."""

CLIPPED = 0.999
"""Amplitude from which a sample counts as clipped: only the outermost codes of mu-law reach it."""

SILENT_DB = 25.0
"""A frame is silent this far below the level of its excerpt."""

PAUSE_FRAMES = 5
"""Silent frames in a row, 100 ms, that make a pause: shorter ones are closures within words."""

WINDOW_S = 5
"""Length of the windows in which a collapse or a hum is looked for; they move on by 1 s."""

BAND_EDGES_HZ = tuple(62.5 * 2**octave for octave in range(8))
"""Octave bands, 62.5 Hz to 8 kHz."""

PITCH_HZ = (75.0, 500.0)
VOICING_THRESHOLD = 0.45

_FRAMES_PER_S = SAMPLE_RATE_HZ // FRAME_SAMPLES
_SPECTRUM_SAMPLES = 1024


@dataclass(frozen=True)
class Sound:
    """Statistics of one excerpt, or of several together (`pooled`).

    Attributes:
        seconds: how much sound was measured.
        level_dbfs: mean power, in dB.
        level_p10_dbfs, level_p50_dbfs, level_p90_dbfs: percentiles of the levels of 20 ms frames.
        loud: share of frames above LOUD_DBFS.
        clipped: share of samples at full scale.
        silent: share of frames more than SILENT_DB below level_dbfs.
        voiced: share of frames that are neither silent nor without a pitch; see `voiced_frames`.
        longest_run_s: longest stretch without a pause of PAUSE_FRAMES silent frames.
        band_dbfs: long-term power in the octave bands between BAND_EDGES_HZ.
        lowest_window_dbfs: level of the quietest window of WINDOW_S.
        steadiest_window_db: least standard deviation of frame levels in such a window. In speech the
            level moves all the time; in hum and in noise it stands still.
        purest_window: greatest share of such a window's power within one bin (15.6 Hz) of its spectrum.
            A gliding voice spreads its power, a whistle or mains hum does not.
    """

    seconds: float
    level_dbfs: float
    level_p10_dbfs: float
    level_p50_dbfs: float
    level_p90_dbfs: float
    loud: float
    clipped: float
    silent: float
    voiced: float
    longest_run_s: float
    band_dbfs: tuple[float, ...]
    lowest_window_dbfs: float
    steadiest_window_db: float
    purest_window: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(pcm: NDArray[np.floating[Any]]) -> Sound:
    """Statistics of pcm [N] float at 16 kHz, full scale 1. What follows the last whole second is left out.

    Raises DataError for another shape or type, for less than one second and for samples that are not finite.
    """
    if pcm.ndim != 1 or not np.issubdtype(pcm.dtype, np.floating) or pcm.size < SAMPLE_RATE_HZ:
        raise DataError(
            f"got sound of shape {list(pcm.shape)} and type {pcm.dtype}, expected floats [N] of at least "
            f"{SAMPLE_RATE_HZ} samples (1 s); give one channel at 16 kHz"
        )
    if not np.isfinite(pcm).all():
        raise DataError(f"sound has {int((~np.isfinite(pcm)).sum())} samples that are not finite numbers")
    seconds = pcm.size // SAMPLE_RATE_HZ
    pcm = pcm[: seconds * SAMPLE_RATE_HZ]
    power = np.square(pcm.reshape(-1, FRAME_SAMPLES), dtype=np.float64).mean(1)
    frames_dbfs, level_dbfs = _db(power), float(_db(power.mean()))
    silent = frames_dbfs <= max(level_dbfs - SILENT_DB, FLOOR_DBFS)
    p10, p50, p90 = (float(level) for level in np.percentile(frames_dbfs, (10, 50, 90)))

    blocks = pcm.reshape(seconds, SAMPLE_RATE_HZ)
    freqs_hz, density = scipy.signal.welch(blocks, SAMPLE_RATE_HZ, nperseg=_SPECTRUM_SAMPLES)
    spectrum = density * freqs_hz[1]  # power in each bin, [S, F]
    bands = np.add.reduceat(spectrum.mean(0), np.searchsorted(freqs_hz, BAND_EDGES_HZ[:-1]))
    window_spectrum = _windows(spectrum, 1).mean(1)
    purity = window_spectrum.max(1) / np.maximum(window_spectrum.sum(1), 1e-12)
    return Sound(
        seconds=float(seconds),
        level_dbfs=level_dbfs,
        level_p10_dbfs=p10,
        level_p50_dbfs=p50,
        level_p90_dbfs=p90,
        loud=float((frames_dbfs > LOUD_DBFS).mean()),
        clipped=float((np.abs(pcm) >= CLIPPED).mean()),
        silent=float(silent.mean()),
        voiced=float((voiced_frames(pcm) & ~silent).mean()),
        longest_run_s=_longest_run(silent) / _FRAMES_PER_S,
        band_dbfs=tuple(float(level) for level in _db(bands)),
        lowest_window_dbfs=float(_db(_windows(power, _FRAMES_PER_S).mean(1)).min()),
        steadiest_window_db=float(_windows(frames_dbfs, _FRAMES_PER_S).std(1).min()),
        purest_window=float(purity.max()),
    )


def voiced_frames(pcm: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Which 20 ms frames of pcm [N] have a pitch, bool [N // 320].

    The criterion of Praat (Boersma 1993, "Accurate short-term analysis of the fundamental frequency"): the
    autocorrelation of a 40 ms Hann window, divided by that of the window, has a local maximum of at least
    VOICING_THRESHOLD at a lag of a pitch within PITCH_HZ.
    """
    length, n_fft = 2 * FRAME_SAMPLES, 4 * FRAME_SAMPLES
    low, high = (round(SAMPLE_RATE_HZ / freq_hz) for freq_hz in reversed(PITCH_HZ))
    window = np.hanning(length)
    padded = np.pad(pcm, (FRAME_SAMPLES // 2, length))
    frames = np.lib.stride_tricks.sliding_window_view(padded, length)[::FRAME_SAMPLES]
    frames = frames[: pcm.size // FRAME_SAMPLES]
    of_window = np.fft.irfft(np.abs(np.fft.rfft(window, n_fft)) ** 2)[: high + 2]
    voiced = np.empty(len(frames), np.bool_)
    for at in range(0, len(frames), 4096):  # bounds the memory for long excerpts
        part = frames[at : at + 4096]
        spectrum = np.fft.rfft((part - part.mean(1, keepdims=True)) * window, n_fft)
        correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:, : high + 2] / of_window
        correlation /= np.maximum(correlation[:, :1], 1e-12)
        middle = correlation[:, low : high + 1]
        before, after = correlation[:, low - 1 : high], correlation[:, low + 1 : high + 2]
        peaks = (middle >= before) & (middle > after) & (middle >= VOICING_THRESHOLD)
        voiced[at : at + 4096] = peaks.any(1)
    return voiced


def pooled(sounds: Sequence[Sound]) -> Sound:
    """Excerpts of one length as one: means of powers, of shares and of percentiles; extremes of extremes."""

    def values(name: str) -> list[Any]:
        return [getattr(sound, name) for sound in sounds]

    def power(name: str) -> Any:
        return _db(np.mean(10 ** (np.array(values(name)) / 10), axis=0))

    means = ("level_p10_dbfs", "level_p50_dbfs", "level_p90_dbfs", "loud", "clipped", "silent", "voiced")
    return Sound(
        seconds=sum(values("seconds")),
        level_dbfs=float(power("level_dbfs")),
        **{name: float(np.mean(values(name))) for name in means},
        longest_run_s=max(values("longest_run_s")),
        band_dbfs=tuple(float(level) for level in power("band_dbfs")),
        lowest_window_dbfs=min(values("lowest_window_dbfs")),
        steadiest_window_db=min(values("steadiest_window_db")),
        purest_window=max(values("purest_window")),
    )


@dataclass(frozen=True)
class Verdict:
    """Whether generated sound keeps one limit.

    Attributes:
        limit: what is limited, in words.
        value: of all excerpts together.
        worst: of the excerpt that is furthest off.
        bound: what the value has to stay under, or over where `below` is false.
        in_every: whether every excerpt has to keep the limit, or all of them together.
        kept_by: excerpts that keep it; `excerpts`: out of so many.
    """

    limit: str
    value: float
    worst: float
    bound: float
    below: bool
    in_every: bool
    kept_by: int
    excerpts: int

    @property
    def holds(self) -> bool:
        if self.in_every:
            return self.kept_by == self.excerpts
        return self.value < self.bound if self.below else self.value > self.bound

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def verdict_table(verdicts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table of verdicts, each as `Verdict.to_json` gives it."""
    lines = ["| limit | all together | worst | allowed | kept by | holds |", "|---|---|---|---|---|---|"]
    for v in verdicts:
        allowed = f"{'under' if v['below'] else 'over'} {v['bound']:.3g}{' in every one' * v['in_every']}"
        kept, holds = f"{v['kept_by']} of {v['excerpts']}", "yes" if v["holds"] else "no"
        lines.append(f"| {v['limit']} | {v['value']:.3g} | {v['worst']:.3g} | {allowed} | {kept} | {holds} |")
    return lines


def compare(generated: Sequence[Sound], real: Sound) -> tuple[Verdict, ...]:
    """Generated excerpts against real speech: no burst, collapse or hum in any, and alike on the whole.

    What is asked of every excerpt: fewer than .005 of its frames above LOUD_DBFS; no window of WINDOW_S more
    than 25 dB below the level of real speech; in no window levels that stand still (a deviation under 4 dB;
    real speech has 8 to 13) or a third of the power in one bin (real speech: up to .19). Of all together:
    level within 6 dB, every octave band within 6 dB, 10th percentile of the frame levels (the pauses)
    within 8 dB. Raises DataError where there is no excerpt.
    """
    if not generated:
        raise DataError("no excerpts were given, expected at least one to compare with real speech")
    whole = pooled(generated)

    def bands_off_db(sound: Sound) -> float:
        pairs = zip(sound.band_dbfs, real.band_dbfs, strict=True)
        return max(abs(one - other) for one, other in pairs)

    def verdict(
        limit: str,
        measure: Callable[[Sound], float],
        bound: float,
        *,
        below: bool = True,
        in_every: bool = False,
    ) -> Verdict:
        each = [measure(sound) for sound in generated]
        kept = sum(value < bound if below else value > bound for value in each)
        worst = max(each) if below else min(each)
        return Verdict(limit, measure(whole), worst, bound, below, in_every, kept, len(each))

    return (
        verdict("burst: share of loud frames", lambda s: s.loud, 0.005, in_every=True),
        verdict(
            "collapse: quietest 5 s under real speech, dB",
            lambda s: real.level_dbfs - s.lowest_window_dbfs,
            25.0,
            in_every=True,
        ),
        verdict(
            "hum or noise: deviation of levels in 5 s, dB",
            lambda s: s.steadiest_window_db,
            4.0,
            below=False,
            in_every=True,
        ),
        verdict("tone: share of power in one bin in 5 s", lambda s: s.purest_window, 1 / 3, in_every=True),
        verdict("level: off real speech, dB", lambda s: abs(s.level_dbfs - real.level_dbfs), 6.0),
        verdict("spectrum: octave band furthest off, dB", bands_off_db, 6.0),
        verdict(
            "pauses: 10th percentile of levels off, dB",
            lambda s: abs(s.level_p10_dbfs - real.level_p10_dbfs),
            8.0,
        ),
    )


def _db(power: Any) -> Any:
    return 10 * np.log10(np.maximum(power, 10 ** (FLOOR_DBFS / 10)))


def _windows(values: NDArray[np.float64], per_second: int) -> NDArray[np.float64]:
    """Windows [W, WINDOW_S per_second, ...] of values along time; all there is where that is shorter."""
    length = min(WINDOW_S * per_second, len(values))
    views = np.lib.stride_tricks.sliding_window_view(values, length, axis=0)[::per_second]
    return np.moveaxis(views, -1, 1)


def _longest_run(silent: NDArray[np.bool_]) -> int:
    """Frames of the longest stretch between pauses."""
    longest, begun, quiet = 0, 0, 0
    for at, is_silent in enumerate(silent):
        quiet = quiet + 1 if is_silent else 0
        if quiet >= PAUSE_FRAMES:
            begun = at + 1
        longest = max(longest, at + 1 - begun - quiet)
    return longest
