"""Sound that a client sent: decoded in memory, never more of it than was asked for."""

from __future__ import annotations

import threading
from io import BytesIO

import numpy as np
import soundfile

from txl_audio.data.audio import resample
from txl_audio.serve.protocol import Refusal

_MAGIC = (b"RIFF", b"fLaC", b"OggS")
_RATES_HZ = (1_000, 192_000)
_MOST_CHANNELS = 8
_BLOCK_SAMPLES = 1 << 16
_DECODING = threading.BoundedSemaphore(2)
"""What is decoded at once: long sound of a high rate takes hundreds of megabytes for a moment."""


def read_upload(data: bytes, *, most_s: float, sample_rate_hz: int) -> np.ndarray:
    """A WAV, FLAC or OGG file as pcm [N] float32 at `sample_rate_hz`, the mean of its channels.

    The sound is what `data.audio.load_audio` reads of the same file. A header that says too much is refused
    before anything is decoded, and decoding stops at `most_s` whatever the header says. Raises Refusal
    `bad_audio` or `too_long`.
    """
    if not data.startswith(_MAGIC):
        raise Refusal("bad_audio", "the upload is no WAV, FLAC or OGG file; convert it to one of these")
    try:
        with _DECODING, soundfile.SoundFile(BytesIO(data)) as file:
            rate_hz = _checked_rate(file, most_s)
            pcm = _mono(file, most=round(most_s * rate_hz))
            pcm = resample(pcm, from_hz=rate_hz, to_hz=sample_rate_hz)
    except (soundfile.SoundFileError, OSError, MemoryError, TypeError, ValueError) as error:
        if isinstance(error, Refusal):
            raise
        reason = " ".join(str(error).split()).rpartition(": ")[2]
        raise Refusal("bad_audio", f"the upload cannot be read as audio: {reason}") from error
    if not np.isfinite(pcm).all():
        raise Refusal("bad_audio", "the upload has NaN, infinite or enormous samples")
    return pcm


def _checked_rate(file: soundfile.SoundFile, most_s: float) -> int:
    lowest, highest = _RATES_HZ
    if not lowest <= file.samplerate <= highest:
        raise Refusal("bad_audio", f"the upload has {file.samplerate} Hz, expected {lowest} to {highest}")
    if not 1 <= file.channels <= _MOST_CHANNELS:
        raise Refusal("bad_audio", f"the upload has {file.channels} channels, expected 1 to {_MOST_CHANNELS}")
    if file.frames < 1:
        raise Refusal("bad_audio", "the upload holds no samples")
    if file.frames > most_s * file.samplerate:
        raise Refusal(
            "too_long",
            f"the upload has {file.frames / file.samplerate:.0f} s, at most {most_s:g} are taken",
        )
    return file.samplerate


def _mono(file: soundfile.SoundFile, *, most: int) -> np.ndarray:
    blocks, read = [], 0
    while len(block := file.read(_BLOCK_SAMPLES, dtype="float32", always_2d=True)):
        read += len(block)
        if read > most:
            raise Refusal("too_long", "the upload is longer than its header says")
        with np.errstate(over="ignore", invalid="ignore"):  # such samples are refused later
            blocks.append(block.mean(axis=1))
    if read != file.frames:
        raise Refusal("bad_audio", f"the upload breaks off after {read} of {file.frames} samples")
    return np.concatenate(blocks)
