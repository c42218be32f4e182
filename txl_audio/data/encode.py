"""Recordings to symbols: every file is read, resampled, trimmed, scaled and encoded, several at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import soundfile
import torch

from txl_audio.codecs.mulaw import clipped_count
from txl_audio.data import audio
from txl_audio.data.recordings import Recording
from txl_audio.data.shards import symbol_dtype
from txl_audio.data.variants import vary
from txl_audio.tokens import Codec, DataError

# Starting a process costs seconds, for which one process prepares hundreds of short files.
_FILES_PER_WORKER = 1024


@dataclass(frozen=True)
class Settings:
    """What a worker needs besides the file."""

    codec: Codec
    trim_db: float | None
    gain: str


@dataclass(frozen=True)
class Prepared:
    """One file's result, on its way from a worker to the writer."""

    symbols: np.ndarray
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `Document` that depend on the file's content."""
    samples: int = 0
    """Length at the codec's rate, before trimming."""
    channels: int = 1


def encoded(
    recordings: Sequence[Recording], settings: Settings, workers: int | None
) -> Generator[Prepared | str, None, None]:
    """Results in the order of the recordings; a bounded number is held at a time."""
    if workers is None:
        workers = min(os.cpu_count() or 1, len(recordings) // _FILES_PER_WORKER)
    if workers <= 1:
        yield from (encode_or_reason(recording, settings) for recording in recordings)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    )
    pending: deque[Future[Prepared | str]] = deque()
    try:
        for recording in recordings:
            pending.append(pool.submit(_run_in_worker, recording))
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended unexpectedly; with little memory use fewer workers, in a script call "
            "prepare below `if __name__ == '__main__':`, then run again to continue"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_or_reason(recording: Recording, settings: Settings) -> Prepared | str:
    """One file's symbols, or the reason why it cannot be used."""
    try:
        return _encode(recording, settings)
    except DataError as error:
        return str(error).removeprefix(f"{recording.path}: ")
    except (OSError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def _encode(recording: Recording, settings: Settings) -> Prepared:
    spec = settings.codec.spec
    pcm, rate_hz, sha256 = recording.read()
    if recording.claim is not None:
        _check_claim(len(pcm), rate_hz, *recording.claim)
    pcm = audio.resample(pcm, from_hz=rate_hz, to_hz=spec.sample_rate_hz)
    samples, kept = len(pcm), None
    if settings.trim_db is not None:
        kept = audio.trim(pcm, settings.trim_db, sample_rate_hz=spec.sample_rate_hz)
        if kept == (0, 0):
            raise DataError("only silence, nothing is left after trimming")
        pcm = pcm[kept[0] : kept[1]]
    gain = audio.gain_factor(pcm, settings.gain)
    if gain != 1.0:
        pcm = pcm * np.float32(gain)
    if recording.variant:
        frame_samples = 1 if spec.modality == "waveform" else round(spec.sample_rate_hz / spec.frame_rate_hz)
        pcm, own = vary(pcm, recording.id, sample_rate_hz=spec.sample_rate_hz, frame_samples=frame_samples)
        gain *= own
    clipped = clipped_count(pcm)
    codes = settings.codec.encode(torch.from_numpy(pcm.clip(-1, 1))[None])[0].numpy()
    if spec.modality == "waveform":
        # The flat stream: what fills the last frame is no part of the recording.
        codes = codes.reshape(-1, 1)[: len(pcm)]
    fields = {
        "sha256": sha256,
        "sample_rate_hz": rate_hz,
        "gain": gain,
        "trim": kept,
        "clipped": clipped,
    }
    return Prepared(
        symbols=codes.astype(symbol_dtype(spec.vocab_size)),
        fields=fields,
        samples=samples,
        channels=soundfile.info(recording.path).channels if recording.part is None else 1,
    )


def _check_claim(samples: int, rate_hz: int, claimed: int, claimed_hz: int) -> None:
    expected = audio.resampled_length(samples, from_hz=rate_hz, to_hz=claimed_hz)
    # Other tools round lengths after resampling to the nearest; the file itself leaves no doubt.
    if abs(expected - claimed) > (0 if rate_hz == claimed_hz else 1):
        raise DataError(
            f"the manifest says {claimed} samples at {claimed_hz} Hz, the file has {samples} at {rate_hz} Hz"
        )


_worker_settings: Settings | None = None


def _start_worker(settings: Settings) -> None:
    global _worker_settings
    _worker_settings = settings
    torch.set_num_threads(1)  # the processes are the parallelism


def _run_in_worker(recording: Recording) -> Prepared | str:
    assert _worker_settings is not None
    return encode_or_reason(recording, _worker_settings)
