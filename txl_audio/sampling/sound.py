"""Sound files and pipes: prompts in, generated sound out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import soundfile
import torch

from txl_audio.data.audio import load_audio
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.compiled import Weights
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Backend, Sampler
from txl_audio.tokens import Codec, ConfigError, DataError


def read_symbols(path: str | Path, codec: Codec) -> np.ndarray:
    """Symbols [N] of an audio file, at the codec's rate."""
    pcm = load_audio(path, sample_rate_hz=codec.spec.sample_rate_hz)
    return symbols_of(pcm.clip(-1, 1), codec)  # as preparation does


def symbols_of(pcm: np.ndarray, codec: Codec) -> np.ndarray:
    """Symbols [N] of sound [n] float32 at the codec's rate: whole frames of codes, or as many samples."""
    symbols = codec.encode(torch.from_numpy(pcm)[None]).flatten()
    return (symbols if codec.spec.modality == "codes" else symbols[: len(pcm)]).numpy()


def continuation(
    model: SequenceModel,
    codec: Codec,
    *,
    seconds: float,
    prompt: str | Path | None,
    prompt_seconds: float | None,
    with_prompt: bool,
    text: np.ndarray | None = None,
    filters: Filters,
    seed: int,
    backend: Backend = "auto",
    weights: Weights = "float32",
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[np.ndarray, bool]]:
    """Chunks (pcm [n] float32, whether it was generated) of a continuation, or of sound from nothing.

    text: frames [N, K] before all sound, of a stream that has text beside its codes; see `Transcripts`.
    Raises ConfigError, DataError or SpecError at once, before there is anything to write.
    """
    if not all(math.isfinite(s) for s in (seconds, prompt_seconds or 0.0)):
        raise ConfigError("--seconds and --prompt-seconds need to be finite")
    rate, pcm = codec.spec.sample_rate_hz, np.empty(0, np.float32)
    if prompt is not None:
        pcm = load_audio(prompt, sample_rate_hz=rate)
        if prompt_seconds is not None:
            pcm = pcm[: round(prompt_seconds * rate)]
    elif with_prompt or prompt_seconds is not None:
        raise ConfigError("--with-prompt and --prompt-seconds need --prompt FILE")

    def chunks() -> Iterator[tuple[np.ndarray, bool]]:
        symbols = symbols_of(pcm, codec) if len(pcm) else np.empty(0, np.int64)
        if with_prompt and len(pcm):
            # The codec decodes whole frames; what fills up the last one is cut off again.
            places = codec.spec.symbols_per_frame
            frames = np.pad(symbols, (0, -len(symbols) % places)).reshape(1, -1, places)
            yield codec.decode(torch.from_numpy(frames), samples=len(pcm))[0].numpy(), False
        if text is not None:
            symbols = np.concatenate([text.reshape(-1), symbols])
        sampler = Sampler(
            model,
            prompt=torch.from_numpy(symbols)[None],
            filters=filters,
            seed=seed,
            backend=backend,
            weights=weights,
            tell=tell,
        )
        for chunk in sampler.pcm(codec, samples=round(seconds * rate)):
            yield chunk[0].cpu().numpy(), True

    return chunks()


@contextmanager
def sound_writer(path: str | Path | None, rate_hz: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Writes chunks of sound [n] as 16-bit samples: to a file, or raw s16le to standard output.

    A file appears, or replaces an older one, only when it is complete. Raises DataError where its
    ending names no such format.
    """
    if path is None:

        def write(pcm: np.ndarray) -> None:
            sys.stdout.buffer.write(int16(pcm).astype("<i2").tobytes())
            sys.stdout.buffer.flush()

        yield write
        return
    path = Path(path)
    kind = path.suffix[1:].upper()
    if not kind or not soundfile.check_format(kind, "PCM_16"):
        raise DataError(
            f"cannot write sound to {path}: no 16-bit format is called {path.suffix!r}; use .wav or .flac"
        )
    unfinished = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with soundfile.SoundFile(unfinished, "w", rate_hz, 1, "PCM_16", format=kind) as file:
            yield lambda pcm: file.write(int16(pcm))
        unfinished.replace(path)
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"cannot write sound to {path}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def int16(pcm: np.ndarray) -> np.ndarray:
    """Amplitudes to the nearest 16-bit samples, with the scale that reading them divides by."""
    return np.clip(np.rint(pcm * 32768.0), -32768, 32767).astype(np.int16)
