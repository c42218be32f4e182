"""Audio files to mono float32 at one rate: find, decode, resample, trim, gain.

Files are read with soundfile: torchaudio's loader needs another package and FFmpeg since 2.9.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
import soxr

from txl_audio.tokens import ConfigError, DataError

READABLE = frozenset(
    {".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".aifc"}
    | {".au", ".snd", ".caf", ".w64", ".rf64", ".sph", ".nist", ".voc"}
)
# Found all the same, so that a folder of these is reported and not taken for an empty one.
_NOT_READABLE = frozenset({".m4a", ".mp4", ".aac", ".wma", ".amr", ".webm", ".ape", ".wv"})

RESAMPLER = "soxr HQ, ceil(N * to / from) samples"
_LEVEL_WINDOW_S = 0.01


def find_audio(folder: str | Path) -> list[Path]:
    """Audio files below a folder, sorted by their relative POSIX path. Hidden files are left out.

    Raises DataError where `folder` is not a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"no folder at {folder}; expected a folder with audio files")
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix.lower() in READABLE | _NOT_READABLE
    }
    # "._name.wav" is what macOS leaves in archives: it has the suffix, but holds no audio.
    visible = (name for name in found if not any(part.startswith(".") for part in name.split("/")))
    return [found[name] for name in sorted(visible) if found[name].is_file()]


def read_audio(path: str | Path, *, channel: int | None = None) -> tuple[np.ndarray, int]:
    """One file as (pcm [N] float32, rate_hz): the mean of its channels, or one `channel`.

    Integer formats are scaled to [-1, 1); floats are kept as they are, also beyond 1. The whole
    file is held in memory. Raises DataError with the reason where it cannot be read, holds no
    samples or samples that are not finite, or lacks the channel.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no audio file at {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes)")
    if path.suffix.lower() in _NOT_READABLE:
        raise DataError(f"{path}: {path.suffix} files cannot be read; convert it to FLAC or WAV")
    try:
        pcm, rate_hz = decode_audio(path)
        return to_mono(pcm, channel=channel), rate_hz
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def decode_audio(file: Path | BinaryIO) -> tuple[np.ndarray, int]:
    """An encoded file as (pcm [N, channels] float32, rate_hz). Raises DataError where it is none."""
    try:
        return soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, MemoryError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rpartition(": ")[2] or type(error).__name__
        raise DataError(f"not readable as audio: {reason}") from error


def to_mono(pcm: np.ndarray, *, channel: int | None = None) -> np.ndarray:
    """pcm [N, channels] -> [N]: the mean, or one channel.

    Raises DataError for no samples, samples that are not finite, and a channel that is not there.
    """
    if len(pcm) == 0:
        raise DataError("the file holds no samples")
    if channel is not None and not 0 <= channel < pcm.shape[1]:
        raise DataError(f"channel {channel} was asked for, the file has {pcm.shape[1]} (from 0)")
    mono = pcm.mean(axis=1) if channel is None else np.ascontiguousarray(pcm[:, channel])
    if not np.isfinite(mono).all():
        raise DataError("the file has NaN or infinite samples")
    return mono


def load_audio(path: str | Path, *, sample_rate_hz: int = 16_000, channel: int | None = None) -> np.ndarray:
    """One file as pcm [N] float32 at `sample_rate_hz`. Raises as `read_audio`."""
    pcm, rate_hz = read_audio(path, channel=channel)
    return resample(pcm, from_hz=rate_hz, to_hz=sample_rate_hz)


def resampled_length(samples: int, *, from_hz: int, to_hz: int) -> int:
    """Samples after resampling: ceil(N * to / from), in integers. The one rule of the project."""
    return -(-samples * to_hz // from_hz)


def resample(pcm: np.ndarray, *, from_hz: int, to_hz: int) -> np.ndarray:
    """pcm [N] -> [ceil(N * to / from)] float32 with soxr's HQ setting; unchanged at equal rates."""
    if from_hz <= 0 or to_hz <= 0:
        raise DataError(f"sample rates are positive, got {from_hz} and {to_hz} Hz")
    if from_hz == to_hz:
        return pcm
    length = resampled_length(len(pcm), from_hz=from_hz, to_hz=to_hz)
    # soxr rounds its length to the nearest. Zeros after the end, which it assumes anyway, make it
    # compute the last sample rather than leaving one to be made up.
    padded = np.pad(pcm, (0, from_hz // to_hz + 2))
    try:
        resampled = soxr.resample(padded, from_hz, to_hz, quality="HQ")
    except (RuntimeError, ValueError) as error:
        raise DataError(f"cannot resample from {from_hz} to {to_hz} Hz: {error}") from error
    return np.ascontiguousarray(resampled[:length])


def trim(pcm: np.ndarray, relative_db: float, *, sample_rate_hz: int = 16_000) -> tuple[int, int]:
    """Where a clip begins and ends: (start, end) samples of pcm [N].

    Cuts 10 ms windows at both ends whose RMS level is more than `relative_db` below that of the
    loudest window of the same clip, so quiet recordings are treated like loud ones. A clip of
    zeros gives (0, 0); a clip shorter than a window is kept. Raises ConfigError unless
    `relative_db` is positive.
    """
    if not relative_db > 0:
        raise ConfigError(
            f"trimming needs a positive number of dB below the loudest part, got {relative_db}; try 40"
        )
    window = max(1, round(_LEVEL_WINDOW_S * sample_rate_hz))
    if not np.any(pcm):
        return 0, 0
    starts = np.arange(0, len(pcm), window)
    energy = np.add.reduceat(np.square(pcm, dtype=np.float64), starts)
    power = energy / np.diff(np.append(starts, len(pcm)))
    (loud,) = np.nonzero(power >= power.max() * 10 ** (-relative_db / 10))
    return int(loud[0]) * window, min((int(loud[-1]) + 1) * window, len(pcm))


def gain_factor(pcm: np.ndarray, rule: str) -> float:
    """The linear factor by which a gain rule scales one clip; 1.0 for a clip of zeros.

    Rules: `none`; `rms:DB` and `peak:DB` bring the clip's RMS or peak to DB dBFS (DB at most 0).
    Raises ConfigError for another rule.
    """
    measure, target_db = parse_gain(rule)
    if measure == "none" or not np.any(pcm):
        return 1.0
    level = np.abs(pcm).max() if measure == "peak" else math.sqrt(np.mean(np.square(pcm, dtype=np.float64)))
    return float(10 ** (target_db / 20) / level)


def parse_gain(rule: str) -> tuple[str, float]:
    """A gain rule as (measure, dBFS). Raises ConfigError naming the rules there are."""
    measure, colon, value = rule.partition(":")
    try:
        target_db = float(value) if colon else 0.0
    except ValueError:
        target_db = math.nan
    if rule != "none" and not (measure in ("rms", "peak") and colon and -200 <= target_db <= 0):
        raise ConfigError(f"no gain rule {rule!r}; expected none, rms:-23 or peak:-1 (dBFS, at most 0)")
    return measure, target_db


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
