"""How close decoded speech is to the original: figures people know, over files and codecs.

PESQ-wb (ITU-T P.862.2), STOI (Taal et al. 2011) and word errors come from the packages pesq, pystoi,
pocketsphinx and jiwer: `pip install 'txl-audio[codec-quality]'`. All figures are of 16 kHz sound.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from txl_audio.data.audio import load_audio, resample
from txl_audio.tokens import Codec, ConfigError, DataError

SAMPLE_RATE_HZ = 16_000
# Levels below count as this: what is not heard would otherwise decide the distance of spectra.
_FLOOR_DB = -80.0
_WINDOW, _HOP = 512, 128
# PESQ is made for 8 to 30 s, and its C code writes past its tables where it finds more than 50 utterances, of
# which each takes at least 0.4 s with the pause after it.
_PESQ_S = 16

Pcm = NDArray[np.float32]
Recogniser = Callable[[Pcm], str]


@dataclass(frozen=True)
class Quality:
    """Figures of one codec over files, each file with the same weight; words and time are of all together.

    Attributes:
        codec: as it was asked for; `original` for the recordings themselves.
        bit_rate: bits per second of sound.
        pesq_wb: 1 to 4.64; NaN for the original, and where no file has speech that PESQ finds.
        stoi: 0 to 1; NaN as of PESQ.
        log_spectral_distance_db: see `log_spectral_distance_db`.
        word_error_rate: share of the words of the transcripts; without those, of what the recogniser hears in
            the original. NaN without a recogniser.
        real_time_factor: seconds for encoding and decoding, per second of sound.
    """

    codec: str
    bit_rate: float
    pesq_wb: float
    stoi: float
    log_spectral_distance_db: float
    word_error_rate: float
    real_time_factor: float

    def to_json(self) -> dict[str, Any]:
        """Fields by name; what is not known is None."""
        return {k: None if v != v else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_codecs` found.

    Attributes:
        rows: the original first.
        words: word errors are against `transcripts`, what is heard in the `original`, or `none` are known.
        files: how many.
        seconds: of sound, in all files.
        sounds: the first file, pcm [N] by row.
    """

    rows: tuple[Quality, ...]
    words: str
    files: int
    seconds: float
    sounds: dict[str, Pcm]


def evaluate_codecs(
    files: Sequence[Path],
    codecs: Mapping[str, Codec],
    *,
    recognise: Recogniser | None = None,
    transcripts: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None,
) -> Evaluation:
    """Encodes and decodes every file with every codec and compares.

    Args:
        files: audio of any rate; read at 16 kHz, and at the codec's rate where that is another.
        codecs: by the name that the table shows.
        recognise: what counts word errors, see `recogniser`; None leaves them out.
        transcripts: text by the stem of the file's name, for all files.
        progress: called with (recordings done, in all, unit), every codec's and the original one by one.

    Raises ConfigError where a package is missing; DataError for no files, and for one that cannot be read, is
    shorter than a tenth of a second or has no transcript.
    """
    if not files:
        raise DataError("no files were given, expected at least one recording of speech")
    originals = [load_audio(path, sample_rate_hz=SAMPLE_RATE_HZ) for path in files]
    for path, original in zip(files, originals, strict=True):
        if len(original) < SAMPLE_RATE_HZ // 10:
            raise DataError(f"{path} has {len(original)} samples, expected at least 0.1 s; leave it out")
        if transcripts is not None and path.stem not in transcripts:
            raise DataError(f"no transcript of {path.stem}; add a line for it, or leave the file out")
    seconds = sum(map(len, originals)) / SAMPLE_RATE_HZ
    sounds = {"original": originals[0]}
    done, total = 0, len(files) * (1 + len(codecs))

    def hear(pcm: Pcm) -> str:
        nonlocal done
        done += 1
        progress(done, total, "recordings")
        return "" if recognise is None else recognise(pcm)

    def errors(heard: Sequence[str]) -> float:
        return math.nan if recognise is None else word_error_rate(wanted, heard)

    heard = [hear(original) for original in originals]
    wanted = heard if transcripts is None else [transcripts[path.stem] for path in files]
    # PCM of 16 bits; compared with itself there is nothing to find but the recogniser's own errors.
    nan = math.nan
    rows = [Quality("original", 16.0 * SAMPLE_RATE_HZ, nan, nan, nan, errors(heard), nan)]
    for name, codec in codecs.items():
        busy_s, heard = 0.0, []
        figures: list[tuple[float, float, float]] = []
        for path, original in zip(files, originals, strict=True):
            decoded, took_s = _there_and_back(path, original, codec)
            busy_s += took_s
            distance_db = log_spectral_distance_db(original, decoded)
            figures.append((pesq_wb(original, decoded), stoi(original, decoded), distance_db))
            heard.append(hear(decoded))
            sounds.setdefault(name, decoded)
        pesq, intelligibility, distance_db = (_mean(column) for column in zip(*figures, strict=True))
        rate, factor = codec.spec.bit_rate, busy_s / seconds
        rows.append(Quality(name, rate, pesq, intelligibility, distance_db, errors(heard), factor))
    words = "none" if recognise is None else "original" if transcripts is None else "transcripts"
    return Evaluation(tuple(rows), words, len(files), seconds, sounds)


def _there_and_back(path: Path, original: Pcm, codec: Codec) -> tuple[Pcm, float]:
    """Decoded sound at 16 kHz, as long as the original, and the seconds that both directions took."""
    rate_hz = codec.spec.sample_rate_hz
    given = original if rate_hz == SAMPLE_RATE_HZ else load_audio(path, sample_rate_hz=rate_hz)
    pcm = torch.from_numpy(given.clip(-1, 1))[None]
    begun = time.perf_counter()
    decoded = codec.decode(codec.encode(pcm), samples=len(given))[0].numpy()
    took_s = time.perf_counter() - begun
    decoded = resample(decoded, from_hz=rate_hz, to_hz=SAMPLE_RATE_HZ)[: len(original)]
    return np.pad(decoded, (0, len(original) - len(decoded))), took_s


def pesq_wb(original: Pcm, decoded: Pcm) -> float:
    """MOS-LQO of wide-band PESQ, 1 to 4.64, for pcm [N] at 16 kHz; NaN where it finds no speech.

    Of more than 16 s the mean of equal parts.
    """
    pesq, scores = _package("pesq"), []
    parts = max(1, math.ceil(len(original) / (_PESQ_S * SAMPLE_RATE_HZ)))
    for one, other in zip(np.array_split(original, parts), np.array_split(decoded, parts), strict=True):
        score = math.nan  # as of silence, which it would divide by
        if one.any():
            score = pesq.pesq(SAMPLE_RATE_HZ, one, other, "wb", on_error=pesq.PesqError.RETURN_VALUES)
        scores.append(float(score) if score >= 1 else math.nan)
    return _mean(scores)


def stoi(original: Pcm, decoded: Pcm) -> float:
    """Short-time objective intelligibility, about 0 to 1, for pcm [N] at 16 kHz.

    NaN where there is less than 0.4 s of sound that is not silence.
    """
    pystoi = _package("pystoi")
    if not original.any():
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(pystoi.stoi(original, decoded, SAMPLE_RATE_HZ))
        except RuntimeWarning:  # it would say 0.00001
            return math.nan


def log_spectral_distance_db(original: Pcm, decoded: Pcm) -> float:
    """Root mean square over frequency of the difference of levels, mean over windows of 32 ms every 8 ms.

    pcm [N] at 16 kHz. Levels under -80 dB (of a sine of full scale) count as -80 dB.
    """
    one, other = _levels_db(original), _levels_db(decoded)
    return float(np.sqrt(np.square(one - other).mean(-1)).mean())


def _levels_db(pcm: Pcm) -> NDArray[np.float64]:
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(pcm, _WINDOW // 2), _WINDOW)[::_HOP]
    # Four over the window's length: a Hann window halves, and half of a sine is at negative frequencies.
    size = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW + 1)[:-1])) * (4 / _WINDOW)
    return np.maximum(20 * np.log10(np.maximum(size, 1e-9)), _FLOOR_DB)


def recogniser(one_of: Sequence[str] = ()) -> Recogniser:
    """PocketSphinx with the English model that its package brings: pcm [N] at 16 kHz -> words.

    one_of: hears nothing but one of these.
    """
    own = {"lm": None} if one_of else {}
    decoder = _package("pocketsphinx").Decoder(samprate=SAMPLE_RATE_HZ, loglevel="FATAL", **own)
    if one_of:
        decoder.add_jsgf_string("one", f"#JSGF V1.0; grammar one; public <one> = {' | '.join(one_of)};")
        decoder.activate_search("one")

    def recognise(pcm: Pcm) -> str:
        decoder.reinit_feat()  # forgets the level of the recordings before
        decoder.start_utt()
        decoder.process_raw((pcm.clip(-1, 1) * 32767).astype(np.int16).tobytes(), full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        return "" if hypothesis is None else hypothesis.hypstr

    return recognise


def word_error_rate(wanted: Sequence[str], heard: Sequence[str]) -> float:
    """Substituted, left out and added words of all texts, per wanted word; NaN where none is wanted.

    Case and punctuation do not count.
    """
    pairs = [(_plain(text), _plain(other)) for text, other in zip(wanted, heard, strict=True)]
    pairs = [(text, other) for text, other in pairs if text]
    if not pairs:
        return math.nan
    return float(_package("jiwer").wer([text for text, _ in pairs], [other for _, other in pairs]))


def _plain(text: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter == "'" else " " for letter in text.lower())
    return " ".join(kept.split())


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"judging a codec needs the package {name} ({error}); pip install 'txl-audio[codec-quality]'"
        ) from error
