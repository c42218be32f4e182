"""Uploaded sound: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.test_turns import still, until
from txl_audio.data.audio import load_audio
from txl_audio.serve import uploads
from txl_audio.serve.protocol import Refusal
from txl_audio.serve.uploads import read_upload


def sound_file(
    pcm: np.ndarray, rate_hz: int = 16_000, form: str = "WAV", subtype: str | None = None
) -> bytes:
    file = BytesIO()
    soundfile.write(file, pcm, rate_hz, format=form, subtype=subtype)
    return file.getvalue()


def tone(seconds: float, rate_hz: int = 16_000) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate_hz)) / rate_hz)


FILES = {form: sound_file(tone(0.05), form=form) for form in ("WAV", "FLAC", "OGG")}


def read_or_refused(data: bytes) -> tuple[str, np.ndarray]:
    try:
        return "", read_upload(data, most_s=1.0, sample_rate_hz=16_000)
    except Refusal as refusal:
        return refusal.code, np.empty(0)


def refused(data: bytes, most_s: float = 1.0) -> str:
    with pytest.raises(Refusal) as error:
        read_upload(data, most_s=most_s, sample_rate_hz=16_000)
    assert "\n" not in str(error.value)
    return error.value.code


@pytest.mark.parametrize(
    ("form", "rate_hz", "channels"),
    [("WAV", 16_000, 1), ("WAV", 44_100, 2), ("FLAC", 8_000, 1), ("FLAC", 48_000, 2), ("OGG", 16_000, 1)],
)
def test_uploads_are_read_as_files_are(tmp_path: Path, form: str, rate_hz: int, channels: int) -> None:
    pcm = np.stack([tone(0.6, rate_hz) * (1 + c) / 2 for c in range(channels)], axis=1)
    data = sound_file(pcm, rate_hz, form)
    path = tmp_path / f"x.{form.lower()}"
    path.write_bytes(data)
    read = read_upload(data, most_s=1.0, sample_rate_hz=16_000)
    np.testing.assert_array_equal(read, load_audio(path))


def test_what_is_no_audio() -> None:
    wav, flac = sound_file(tone(0.5)), sound_file(tone(0.5), form="FLAC")
    for data in (b"", b"RIFF", b"x" * 1000, wav[:30], flac[:100], wav[:44], b"fLaC" + bytes(1000), b"OggS"):
        assert refused(data) == "bad_audio", data[:8]
    assert refused(flac[: len(flac) // 2]) == "bad_audio"  # breaks off
    assert refused(sound_file(tone(0.1), form="AIFF")) == "bad_audio"  # read by libsndfile, not taken here
    assert refused(sound_file(tone(0.1), rate_hz=500)) == "bad_audio"
    assert refused(sound_file(np.zeros((100, 9)))) == "bad_audio"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("rate_hz", [16_000, 22_050])
def test_samples_that_are_no_sound(value: float, rate_hz: int) -> None:
    pcm = tone(0.2, rate_hz).astype(np.float32)
    pcm[100:110] = [value, -value] * 5
    assert refused(sound_file(np.stack([pcm, pcm], axis=1), rate_hz, subtype="FLOAT")) == "bad_audio"


def test_long_sound_is_refused_before_it_is_decoded() -> None:
    flac = sound_file(np.zeros(16_000 * 120), form="FLAC")  # two minutes in a few kilobytes
    assert len(flac) < 200_000
    tracemalloc.start()
    assert refused(flac) == "too_long"
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_header_of_ten_hours() -> None:
    wav = bytearray(sound_file(tone(0.5)))
    at = wav.index(b"data") + 4
    wav[at : at + 4] = struct.pack("<I", 16_000 * 2 * 36_000)
    tracemalloc.start()
    code, pcm = read_or_refused(bytes(wav))  # libsndfile may believe the header or the size of the file
    assert code in ("too_long", "bad_audio") or len(pcm) == 8000
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


@settings(max_examples=60)
@given(
    form=st.sampled_from(sorted(FILES)),
    cut=st.floats(0, 1),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
)
def test_damaged_files_are_read_or_refused(form: str, cut: float, edits: list[tuple[float, int]]) -> None:
    data = bytearray(FILES[form])
    for place, value in edits:
        data[int(place**3 * len(data))] = value  # mostly the header
    data = data[: round((1 - cut**3) * len(data))]
    code, pcm = read_or_refused(bytes(data))
    assert code in ("", "bad_audio", "too_long")
    assert code or (pcm.ndim == 1 and 1 <= len(pcm) <= 16_000 and np.isfinite(pcm).all())


def test_two_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, inside = threading.Event(), []
    mono = uploads._mono

    def slow(*arguments: Any, **named: Any) -> np.ndarray:
        inside.append(None)
        gate.wait(20)
        return mono(*arguments, **named)

    monkeypatch.setattr(uploads, "_mono", slow)
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(read_or_refused, FILES["WAV"]) for _ in range(5)]
        until(lambda: len(inside) >= 2)
        stays, seen = still(lambda: len(inside)), len(inside)
        gate.set()
        assert stays and seen == 2
        assert [answer.result()[0] for answer in answers] == [""] * 5
