"""Reading, resampling and trimming: rows A5, A6, A7, A13 and A14 of the cases."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from txl_audio.data import audio
from txl_audio.tokens import ConfigError, DataError

RATE_HZ = 16_000


def sine(
    samples: int = RATE_HZ, *, rate_hz: int = RATE_HZ, hz: float = 440.0, peak: float = 0.5
) -> np.ndarray:
    return (peak * np.sin(2 * np.pi * hz * np.arange(samples) / rate_hz)).astype(np.float32)


FORMATS = [  # name, suffix, format, subtype, channels, one step
    ("u8", "wav", "WAV", "PCM_U8", 1, 2**-7),
    ("s16", "wav", "WAV", "PCM_16", 1, 2**-15),
    ("s24", "wav", "WAV", "PCM_24", 1, 2**-23),
    ("s32", "wav", "WAV", "PCM_32", 1, 2**-23),
    ("f32", "wav", "WAV", "FLOAT", 1, 0.0),
    ("f64", "wav", "WAV", "DOUBLE", 1, 0.0),
    ("stereo", "wav", "WAV", "PCM_16", 2, 2**-15),
    ("extensible", "wav", "WAVEX", "PCM_16", 1, 2**-15),
    ("flac", "flac", "FLAC", "PCM_16", 1, 2**-15),
    ("ogg", "ogg", "OGG", "VORBIS", 1, 0.02),  # what this encoder loses, not the reader
    ("upper", "WAV", "WAV", "PCM_16", 1, 2**-15),
]


@pytest.mark.parametrize(("name", "suffix", "format", "subtype", "channels", "step"), FORMATS)
def test_one_sine_in_every_format(
    tmp_path: Path, name: str, suffix: str, format: str, subtype: str, channels: int, step: float
) -> None:  # A5
    wave = sine()
    path = tmp_path / f"{name}.{suffix}"
    data = np.stack([wave * 0.5, wave * 1.5], axis=1) if channels == 2 else wave
    soundfile.write(path, data, RATE_HZ, format=format, subtype=subtype)
    pcm, rate_hz = audio.read_audio(path)
    assert rate_hz == RATE_HZ
    assert pcm.dtype == np.float32 and pcm.shape == wave.shape
    np.testing.assert_allclose(pcm, wave, rtol=0, atol=step + 1e-7)
    assert audio.find_audio(tmp_path) == [path]


def test_mp3_keeps_the_sound(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.mp3", sine(), RATE_HZ, format="MP3")
    pcm, rate_hz = audio.read_audio(tmp_path / "a.mp3")
    middle = pcm[4000:12000]
    assert rate_hz == RATE_HZ
    assert np.argmax(np.abs(np.fft.rfft(middle))) == 220  # 440 Hz in half a second
    assert abs(np.abs(middle).max() - 0.5) < 0.02


def test_one_channel_can_be_chosen(tmp_path: Path) -> None:
    left, right = sine(800), sine(800, hz=1000)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], axis=1), RATE_HZ, subtype="FLOAT")
    np.testing.assert_array_equal(audio.read_audio(tmp_path / "a.wav", channel=1)[0], right)
    np.testing.assert_array_equal(audio.load_audio(tmp_path / "a.wav", channel=0), left)
    with pytest.raises(DataError, match="channel 2 was asked for, the file has 2"):
        audio.read_audio(tmp_path / "a.wav", channel=2)


def test_wav_and_flac_load_without_torchaudio(tmp_path: Path) -> None:  # A7
    for suffix in ("wav", "flac"):
        soundfile.write(tmp_path / f"a.{suffix}", sine(100), RATE_HZ)
    program = (
        "import sys; sys.modules['torchaudio'] = sys.modules['torchcodec'] = None\n"
        "import txl_audio.data.prepare\n"
        "from txl_audio.data.audio import load_audio\n"
        f"print([len(load_audio({str(tmp_path)!r} + '/a.' + s)) for s in ('wav', 'flac')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[100, 100]", done.stderr


def bad_files(folder: Path) -> dict[str, str]:
    """Writes files that cannot be used; their names and what has to be said about them."""
    (folder / "zero_bytes.wav").write_bytes(b"")
    (folder / "text.wav").write_text("this is no audio, whatever its name says\n" * 10)
    (folder / "corrupt.flac").write_bytes(b"fLaC" + bytes(range(200)))
    (folder / "compressed.m4a").write_bytes(b"\0\0\0\x20ftypM4A ")
    soundfile.write(folder / "no_samples.wav", np.zeros(0, np.float32), RATE_HZ)
    broken = sine(100)
    broken[50] = np.nan
    soundfile.write(folder / "nan.wav", broken, RATE_HZ, subtype="FLOAT")
    return {
        "zero_bytes.wav": "0 bytes",
        "text.wav": "not readable as audio: Format not recognised",
        "corrupt.flac": "not readable as audio",
        "compressed.m4a": "convert it to FLAC",
        "no_samples.wav": "no samples",
        "nan.wav": "NaN or infinite",
    }


def test_bad_files_say_what_is_wrong(tmp_path: Path) -> None:  # A14
    for name, reason in bad_files(tmp_path).items():
        with pytest.raises(DataError, match=reason) as error:
            audio.read_audio(tmp_path / name)
        assert name in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(DataError, match="no audio file at"):
        audio.read_audio(tmp_path / "absent.wav")


def test_a_cut_off_flac_is_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, RATE_HZ)
    soundfile.write(tmp_path / "a.flac", noise, RATE_HZ)
    content = (tmp_path / "a.flac").read_bytes()
    (tmp_path / "a.flac").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError):
        audio.read_audio(tmp_path / "a.flac")


def test_files_are_found_in_order_and_hidden_ones_are_not(tmp_path: Path) -> None:
    names = ["b/1.wav", "a.FLAC", "b.wav", "Z.ogg", "b/._1.wav", ".cache/x.wav", "notes.txt", "c.m4a"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.wav").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in audio.find_audio(tmp_path)]
    assert found == ["Z.ogg", "a.FLAC", "b.wav", "b/1.wav", "c.m4a"]
    with pytest.raises(DataError, match="no folder at"):
        audio.find_audio(tmp_path / "absent")


def test_one_rounding_rule(tmp_path: Path) -> None:  # A13
    assert audio.resampled_length(44_101, from_hz=44_100, to_hz=16_000) == 16_001
    soundfile.write(tmp_path / "a.wav", sine(44_101, rate_hz=44_100), 44_100)
    assert len(audio.load_audio(tmp_path / "a.wav")) == 16_001


@given(st.integers(1, 3000), st.sampled_from([8000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000, 96_000]))
def test_resampling_has_exactly_the_stated_length(samples: int, rate_hz: int) -> None:
    expected = math.ceil(Fraction(samples) * 16_000 / rate_hz)
    assert audio.resampled_length(samples, from_hz=rate_hz, to_hz=16_000) == expected
    out = audio.resample(np.ones(samples, np.float32), from_hz=rate_hz, to_hz=16_000)
    assert out.shape == (expected,) and out.dtype == np.float32


@pytest.mark.parametrize("rate_hz", [8000, 22_050, 44_100, 48_000])
def test_resampling_keeps_a_sine(rate_hz: int) -> None:
    out = audio.resample(sine(rate_hz, rate_hz=rate_hz), from_hz=rate_hz, to_hz=16_000)
    np.testing.assert_allclose(out[500:-500], sine()[500:-500], atol=2e-4)


def test_resampling_to_the_same_rate_changes_nothing() -> None:
    wave = sine(100)
    assert audio.resample(wave, from_hz=RATE_HZ, to_hz=RATE_HZ) is wave
    with pytest.raises(DataError, match="positive"):
        audio.resample(wave, from_hz=0, to_hz=RATE_HZ)


def test_trimming_is_relative_to_the_clip() -> None:  # A6
    noise = np.random.default_rng(0).normal(0, 1e-4, 2 * RATE_HZ).astype(np.float32)
    noise[8000:24_000] += sine()
    start, end = audio.trim(noise, 40)
    assert (start, end) == (8000, 24_000)
    assert audio.trim(noise * np.float32(0.01), 40) == (start, end)


def test_trimming_short_and_silent_clips() -> None:  # A6
    assert audio.trim(np.zeros(RATE_HZ, np.float32), 40) == (0, 0)
    assert audio.trim(np.zeros(0, np.float32), 40) == (0, 0)
    assert audio.trim(sine(100), 40) == (0, 100)
    assert audio.trim(sine(), 40) == (0, RATE_HZ)
    with pytest.raises(ConfigError, match="positive number of dB"):
        audio.trim(sine(), -40)


def test_gain_rules() -> None:
    wave = sine(peak=0.01)
    assert audio.gain_factor(wave, "none") == 1.0
    assert audio.gain_factor(np.zeros(10, np.float32), "rms:-23") == 1.0
    peak = np.abs(wave * audio.gain_factor(wave, "peak:-1")).max()
    assert 20 * math.log10(peak) == pytest.approx(-1, abs=1e-4)
    rms = math.sqrt(np.mean(np.square(wave * audio.gain_factor(wave, "rms:-23"))))
    assert 20 * math.log10(rms) == pytest.approx(-23, abs=1e-4)


@pytest.mark.parametrize("rule", ["", "loud", "rms", "peak:", "rms:x", "peak:3", "rms:nan", "none:1"])
def test_unknown_gain_rules_are_named(rule: str) -> None:
    with pytest.raises(ConfigError, match="expected none, rms:-23 or peak:-1"):
        audio.parse_gain(rule)


def test_sha256_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert audio.file_sha256(tmp_path / "a") == expected
