"""Variants of training recordings: the same ones wherever they are made, and of nothing but `train`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.codecs.tiny_codecs import codec_settings
from tests.data.test_audio import bad_files, sine
from txl_audio import cli
from txl_audio.codecs import build_codec
from txl_audio.data import audio
from txl_audio.data.merge import merge
from txl_audio.data.prepare import prepare
from txl_audio.data.prepared import MANIFEST_FILE
from txl_audio.data.shards import Shards
from txl_audio.data.variants import GAIN_DB, SPEED, vary
from txl_audio.tokens import ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten short files with what is said in them, one of them loud, and bad ones among them."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(10):
        peak = 1.0 if i == 3 else 0.3
        soundfile.write(folder / f"{i:02d}.wav", sine(900 + 37 * i, hz=200.0 + 50 * i, peak=peak), 16_000)
    bad_files(folder)
    names = sorted(path.stem for path in folder.iterdir())
    (tmp_path / "texts.tsv").write_text("".join(f"{name}\tword {name[-1]}\n" for name in names))
    return folder


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_only_training_recordings_have_variants(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"transcripts": tmp_path / "texts.tsv", "split": "every-5th"}
    plain = prepare(folder, tmp_path / "plain", **settings)
    varied = prepare(folder, tmp_path / "varied", variants=3, **settings)
    a, b = Shards.open(tmp_path / "plain"), Shards.open(tmp_path / "varied")
    train = a.of_split("train")
    ids = [i for d in train for i in (d.id, f"{d.id}~1", f"{d.id}~2")]
    assert [d.id for d in b.of_split("train")] == ids and 2 * len(train) == varied.documents - plain.documents
    by_id = {d.id: d for d in b.documents}
    for document in a.documents:
        same = by_id[document.id]
        np.testing.assert_array_equal(a.symbols(document), b.symbols(same))
        for variant in (by_id[f"{document.id}~{n}"] for n in (1, 2)) if document in train else ():
            assert (variant.split, variant.text) == ("train", document.text)
            assert (variant.source, variant.sha256) == (document.source, document.sha256)
            assert abs(document.frames / variant.frames - 1) <= SPEED + 0.01
            assert variant.gain != 1.0 and variant.clipped == 0
    assert {d.split for d in b.documents if "~" in d.id} == {"train"}
    assert varied.rejected == plain.rejected, "a file that cannot be used says so once"
    for name in (MANIFEST_FILE, "vocabulary.json"):
        assert content(tmp_path / "plain")[name] == content(tmp_path / "varied")[name]
    assert b.preparation == {
        **a.preparation,
        "variants": 3,
        "variation": "speed within 8%, level within 6 dB, begin within a frame",
    }


@pytest.mark.parametrize("codec", ["mulaw", "rvq"])
def test_variants_are_the_same_in_shards_workers_and_after_an_interruption(
    folder: Path, tmp_path: Path, codec: str, request: pytest.FixtureRequest
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    settings: dict[str, Any] = {"codec": build_codec(codec, **codec_settings(codec, request, weights))}
    settings |= {"transcripts": tmp_path / "texts.tsv", "split": "every-5th", "variants": 3}
    prepare(folder, tmp_path / "whole", **settings)
    expected = content(tmp_path / "whole")

    for i in (3, 1, 2):
        prepare(folder, tmp_path / "shards", shard=(i, 3), **settings)
    merge(tmp_path / "shards")
    assert content(tmp_path / "shards") == expected
    assert prepare(folder, tmp_path / "shards", **settings).unchanged

    def stop_after(documents: int) -> Callable[[int, int, float], None]:
        def stop(done: int, total: int, seconds: float) -> None:
            if done == documents:
                raise KeyboardInterrupt

        return stop

    for documents in (2, 3, 4):  # after the first recording of train, its first variant, its second
        with pytest.raises(KeyboardInterrupt):
            prepare(folder, tmp_path / "stopped", progress=stop_after(documents), **settings)
    workers = 2 if codec == "mulaw" else 1  # starting them takes a while
    prepare(folder, tmp_path / "stopped", workers=workers, **settings)
    assert content(tmp_path / "stopped") == expected


def test_more_variants_begin_with_the_same_ones_in_any_company(folder: Path, tmp_path: Path) -> None:
    """A variant depends on its own name alone, not on what else there is."""
    few, many = tmp_path / "few", tmp_path / "many"
    prepare(folder, many, variants=4, split="all:train")
    (folder / "00.wav").unlink()
    prepare(folder, few, variants=2, split="all:train")
    a, b = Shards.open(few), Shards.open(many)
    by_id = {d.id: d for d in b.documents}
    assert len(a.documents) == 18 and len(b.documents) == 40
    for document in a.documents:
        np.testing.assert_array_equal(a.symbols(document), b.symbols(by_id[document.id]))


def test_a_variant_is_the_recording_at_another_speed_level_and_begin() -> None:
    pcm = sine(16_000, hz=1000, peak=0.25)
    lengths, gains, begins = [], [], []
    for n in range(80):
        varied, gain = vary(pcm, f"name~{n}", sample_rate_hz=16_000, frame_samples=320)
        assert varied.dtype == np.float32
        hz = np.argmax(np.abs(np.fft.rfft(varied, 160_000))) / 10
        speed = hz / 1000
        lengths.append(speed)
        gains.append(20 * np.log10(gain))
        begins.append(16_000 - len(varied) * speed)
        middle = varied[1000:-1000]
        assert np.abs(middle).max() == pytest.approx(0.25 * gain, rel=0.02)
    for values, low, high in ((lengths, 1 - SPEED, 1 + SPEED), (gains, -GAIN_DB, GAIN_DB), (begins, 0, 320)):
        span, slack = high - low, 0.02 * (high - low)
        assert low - slack < min(values) < low + 0.1 * span
        assert high - 0.1 * span < max(values) < high + slack


@pytest.mark.parametrize("samples", [1, 2, 319, 320, 321])
def test_short_loud_and_silent_recordings(samples: int) -> None:
    """What is left has at least one sample; a gain never clips, silence stays silence."""
    loud = np.where(np.arange(samples) % 50 < 25, 1.0, -1.0).astype(np.float32)
    for pcm in (loud, 3 * loud, np.zeros_like(loud)):
        for n in range(20):
            varied, gain = vary(pcm, f"a~{n}", sample_rate_hz=16_000, frame_samples=320)
            assert len(varied) >= 1 and np.isfinite(gain) and np.abs(varied).max() < 1
            assert np.any(varied) == np.any(pcm)


def test_a_variant_is_of_the_trimmed_and_scaled_recording(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "out", variants=2, split="all:train", trim_db=40, gain="peak:-3")
    shards, codec = Shards.open(tmp_path / "out"), build_codec("mulaw")
    own, variant = shards.documents[4:6]
    assert (own.id, variant.id) == ("02", "02~1")
    assert own.trim is not None and own.trim == variant.trim
    pcm = audio.load_audio(folder / "02.wav")[slice(*own.trim)] * np.float32(own.gain)
    expected, gain = vary(pcm, "02~1", sample_rate_hz=16_000, frame_samples=1)
    assert variant.gain == own.gain * gain
    decoded = codec.decode(torch.from_numpy(np.array(shards.symbols(variant), dtype=np.int64))[None])[0]
    np.testing.assert_allclose(decoded.numpy(), expected, atol=0.02)


def test_names_and_numbers_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="variants is 0, expected 1, which is the recording as it is"):
        prepare(folder, tmp_path / "out", variants=0)
    prepare(folder, tmp_path / "out", variants=2)
    with pytest.raises(DataError, match="holds shards of .*--overwrite"):
        prepare(folder, tmp_path / "out", variants=3)
    soundfile.write(folder / "05~1.wav", sine(500), 16_000)
    with pytest.raises(DataError, match="a recording is called '05~1', as a variant would be; rename it"):
        prepare(folder, tmp_path / "other", variants=2, split="all:train")


def test_the_verb_makes_variants(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verb(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["prepare", "--out", str(tmp_path / "out"), "--json", *map(str, words)])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    _, out, _ = verb(folder, "--variants", "3", "--split", "all:train")
    assert json.loads(out)["documents"] == 30
    code, _, err = verb("--dataset", "chars", tmp_path / "texts.tsv", "--variants", "2")
    assert code == 2 and "--variants" in err
