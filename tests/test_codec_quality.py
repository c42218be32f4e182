"""Figures of decoded speech: what they are of the same sound, of less of it, and of known texts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers import speech_like
from txl_audio import codec_quality
from txl_audio.codecs import build_codec
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.tokens import ConfigError, DataError


def noisy(pcm: np.ndarray, snr_db: float) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(len(pcm)).astype(np.float32)
    return pcm + noise * pcm.std() * np.float32(10 ** (-snr_db / 20))


def test_log_spectral_distance_is_in_db_and_has_a_floor() -> None:
    pcm = speech_like(1.0, 0)
    distance = codec_quality.log_spectral_distance_db
    assert distance(pcm, pcm) == 0
    loud = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    assert distance(loud, (loud / 2).astype(np.float32)) == pytest.approx(20 * math.log10(2), rel=1e-3)
    assert distance(np.zeros(16_000, np.float32), np.float32(1e-7) * loud) == 0  # neither is heard
    sine = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000).astype(np.float32)
    assert codec_quality._levels_db(sine)[20].max() == pytest.approx(0, abs=0.01)  # full scale is 0 dB


def test_pesq_and_stoi_fall_with_noise() -> None:
    pytest.importorskip("pesq")
    pytest.importorskip("pystoi")
    pcm = speech_like(2.0, 1)
    pesq = [codec_quality.pesq_wb(pcm, noisy(pcm, snr_db)) for snr_db in (60, 20, 0)]
    assert 4.64 >= pesq[0] > pesq[1] > pesq[2] >= 1
    stoi = [codec_quality.stoi(pcm, noisy(pcm, snr_db)) for snr_db in (60, 0, -10)]
    assert 1.001 >= stoi[0] > stoi[1] > stoi[2]
    assert math.isnan(codec_quality.pesq_wb(pcm[:1000], pcm[:1000]))  # too short
    assert math.isnan(codec_quality.stoi(pcm[:4000], pcm[:4000]))
    assert math.isnan(codec_quality.stoi(np.zeros(16_000, np.float32), pcm[:16_000]))


def test_long_recordings_are_judged_in_parts() -> None:
    """PESQ's C code writes past its tables where there are more than 50 utterances, and crashes."""
    pytest.importorskip("pesq")
    word = np.concatenate([speech_like(0.4, 1), np.zeros(4800, np.float32)])
    pcm = np.tile(word, 70)  # 49 s
    assert 1 <= codec_quality.pesq_wb(pcm, noisy(pcm, 20)) < 4.6
    seen = []

    class Pesq:
        PesqError = SimpleNamespace(RETURN_VALUES=0)

        @staticmethod
        def pesq(rate_hz: int, one: np.ndarray, other: np.ndarray, *_: object, **__: object) -> float:
            seen.append((len(one), len(other)))
            return (1.5, -1.0, 2.5, 2.0)[len(seen) - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_quality, "import_module", lambda name: Pesq)
        assert codec_quality.pesq_wb(pcm, pcm) == pytest.approx(2.0)  # what has no speech does not count
    assert len(seen) == 4 and all(one == other <= 16 * 16_000 for one, other in seen)
    assert sum(one for one, _ in seen) == len(pcm)


def test_words_are_counted_over_all_texts() -> None:
    pytest.importorskip("jiwer")
    rate = codec_quality.word_error_rate
    assert rate(["Tom's hat, twice.", "no"], ["tom's hat twice", "no"]) == 0
    assert rate(["a b c", "d"], ["a x c", "d e"]) == 0.5  # one substituted, one added, of four
    assert rate(["a b c d", ""], ["", "heard where nothing is"]) == 1
    assert math.isnan(rate([""], [""]))


def test_the_recogniser_hears_words_and_forgets_recordings(shared: Path) -> None:
    pytest.importorskip("pocketsphinx")
    flac = next((shared / "data" / "kathleen_arctic_16k" / "flac").rglob("arctic_a0021_*.flac"))
    pcm = codec_quality.load_audio(flac)
    recognise = codec_quality.recogniser()
    first = recognise(pcm)
    assert len(first.split()) >= 4
    assert len(recognise(np.zeros(8000, np.float32)).split()) <= 1
    assert recognise(pcm) == first


def test_codecs_are_compared_over_files(tmp_path: Path) -> None:
    pytest.importorskip("pesq")
    pytest.importorskip("jiwer")
    pytest.importorskip("pystoi")
    for i in range(2):
        soundfile.write(tmp_path / f"{i}.wav", speech_like(1.5, i), 16_000)
    files = [tmp_path / "0.wav", tmp_path / "1.wav"]

    class Coarse(MuLawCodec):
        """mu-law without the lower bits."""

        def decode(self, codes: torch.Tensor, *, samples: int | None = None) -> torch.Tensor:
            return super().decode(codes // 16 * 16 + 8, samples=samples)

    said = iter(["one two", "three", "one two", "three", "one", "three"])
    found = codec_quality.evaluate_codecs(
        files, {"fine": build_codec("mulaw"), "coarse": Coarse()}, recognise=lambda pcm: next(said)
    )
    original, fine, coarse = found.rows
    assert (original.codec, original.bit_rate, fine.bit_rate) == ("original", 256_000.0, 128_000.0)
    assert (found.words, found.files, found.seconds) == ("original", 2, 3.0)
    assert [row.word_error_rate for row in found.rows] == pytest.approx([0, 0, 1 / 3])
    assert fine.pesq_wb > coarse.pesq_wb and fine.stoi > coarse.stoi
    assert fine.log_spectral_distance_db < coarse.log_spectral_distance_db
    assert fine.real_time_factor > 0
    assert original.to_json()["pesq_wb"] is None
    assert {name: len(pcm) for name, pcm in found.sounds.items()} == dict.fromkeys(
        ("original", "fine", "coarse"), 24_000
    )
    against = codec_quality.evaluate_codecs(
        files, {}, recognise=lambda pcm: "one", transcripts={"0": "One.", "1": "two three"}
    )
    assert against.words == "transcripts" and against.rows[0].word_error_rate == pytest.approx(2 / 3)


def test_files_that_cannot_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "short.wav", np.zeros(100), 16_000)
    with pytest.raises(DataError, match="no files were given"):
        codec_quality.evaluate_codecs([], {})
    with pytest.raises(DataError, match="short.wav has 100 samples, expected at least 0.1 s"):
        codec_quality.evaluate_codecs([tmp_path / "short.wav"], {})
    soundfile.write(tmp_path / "long.wav", np.zeros(8000), 16_000)
    with pytest.raises(DataError, match="no transcript of long"):
        codec_quality.evaluate_codecs([tmp_path / "long.wav"], {}, transcripts={})

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(codec_quality, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs the package pystoi .*txl-audio\[codec-quality\]"):
        codec_quality.stoi(np.zeros(10, np.float32), np.zeros(10, np.float32))
