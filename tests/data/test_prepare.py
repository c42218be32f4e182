"""Preparing folders and manifests: bytes, resuming, rejects (A6, A11, A13, A14)."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.data.test_audio import bad_files, sine
from txl_audio import cli
from txl_audio.codecs import MuLawCodec
from txl_audio.codecs.mulaw import mulaw_encode
from txl_audio.data import audio, datasets
from txl_audio.data import prepare as prepare_module
from txl_audio.data.prepare import prepare
from txl_audio.data.prepared import MANIFEST_FILE, REJECTED_FILE
from txl_audio.data.shards import Shards
from txl_audio.tokens import ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve short 16-bit files of different lengths, two of them at other rates."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(10):
        soundfile.write(folder / f"{i:02d}.wav", sine(400 + 37 * i, hz=200.0 + 50 * i), 16_000)
    soundfile.write(folder / "10.flac", sine(441, rate_hz=44_100), 44_100)
    soundfile.write(folder / "11.wav", sine(300, rate_hz=8000), 8000)
    return folder


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_symbols_are_the_codes_of_the_files(folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, float]] = []
    report = prepare(folder, tmp_path / "out", progress=lambda *call: calls.append(call))
    shards = Shards.open(tmp_path / "out")
    assert shards.spec == MuLawCodec().spec
    assert [d.id for d in shards.documents] == [f"{i:02d}" for i in range(12)]
    for document in shards.documents:
        path = folder / document.source
        assert document.sample_rate_hz == soundfile.info(path).samplerate
        assert document.sha256 == audio.file_sha256(path)
        assert (document.gain, document.trim, document.clipped) == (1.0, None, 0)
        expected = mulaw_encode(audio.load_audio(path).clip(-1, 1))
        np.testing.assert_array_equal(shards.symbols(document)[:, 0], expected)
    assert shards.preparation == {
        "sample_rate_hz": 16_000,
        "channels": "mean",
        "resampler": "soxr HQ, ceil(N * to / from) samples",
        "trim_db": None,
        "gain": "none",
        "quantiser": "mu-law 255, 256 codes",
        "split": "every-20th",
    }
    assert shards.splits == {"val": 1, "train": 10, "test": 1}
    assert shards.of_split("test")[0].id == "10"
    total = sum(d.frames for d in shards.documents)
    assert (report.documents, report.samples, report.rejected, report.unchanged) == (12, total, (), False)
    assert sum(report.seconds.values()) == pytest.approx(total / 16_000)
    assert [call[:2] for call in calls] == [(i, 12) for i in range(1, 13)]
    assert calls[-1][2] == pytest.approx(total / 16_000)


def test_frames_of_any_size_give_the_same_shards(folder: Path, tmp_path: Path) -> None:
    for p in (1, 7):
        prepare(folder, tmp_path / f"{p}", codec=MuLawCodec(p))
    assert content(tmp_path / "1") == content(tmp_path / "7")


@pytest.mark.parametrize("after", [1, 5, 11])
def test_an_interrupted_run_continues(
    folder: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int, seconds: float) -> None:
        if done == after:
            raise KeyboardInterrupt

    prepare(folder, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    read: list[str] = []
    original = audio.read_audio
    monkeypatch.setattr(audio, "read_audio", lambda path: (read.append(path.name), original(path))[1])
    calls: list[tuple[int, int, float]] = []
    report = prepare(folder, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert len(read) == 12 - after
    assert calls[0][:2] == (after + 1, 12)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert report.documents == 12
    assert not (tmp_path / "out.partial").exists()


def test_an_interrupted_run_with_other_settings_starts_anew(folder: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, seconds: float) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out", progress=stop)
    prepare(folder, tmp_path / "out", gain="peak:-1")
    prepare(folder, tmp_path / "whole", gain="peak:-1")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_same_call_again_does_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_files(folder)
    out = tmp_path / "out"
    first = prepare(folder, out)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "encoded", None)  # no file may be worked on
        again = prepare(folder, out)
    assert again.unchanged and not first.unchanged
    assert again.rejected == first.rejected and again.seconds == first.seconds
    with pytest.raises(DataError, match=r"compressed.m4a: .*convert it"):
        prepare(folder, out, strict=True)
    soundfile.write(folder / "00.wav", sine(500), 16_000)
    assert not prepare(folder, out).unchanged
    assert Shards.open(out).documents[0].frames == 500
    assert not prepare(folder, out, trim_db=40, overwrite=True).unchanged


def test_another_set_is_replaced_only_when_asked(folder: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    soundfile.write(other / "00.wav", sine(123), 16_000)
    prepare(folder, out)
    before = content(out)
    holds = f"{out} holds shards of {folder}, .*{{}} now; choose another --out, or .*--overwrite"
    with pytest.raises(DataError, match=holds.format(other)):
        prepare(other, out)
    others: list[dict[str, Any]] = [{"gain": "peak:-1"}, {"split": "every-5th"}, {"trim_db": 40}]
    for settings in others:
        with pytest.raises(DataError, match=holds.format(folder)):
            prepare(folder, out, **settings)
    soundfile.write(folder / "new.wav", sine(300), 16_000)
    with pytest.raises(DataError, match=holds.format(folder)):  # its splits would move
        prepare(folder, out)
    assert content(out) == before and not (tmp_path / "out.partial").exists()
    assert prepare(other, out, overwrite=True).documents == 1
    assert prepare(other, out).unchanged
    (out / REJECTED_FILE).unlink()
    with pytest.raises(DataError, match="holds shards of unknown origin"):
        prepare(other, out)


def test_the_same_files_made_again_are_the_same_set(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "out")
    before = (tmp_path / "out" / "tokens.bin").read_bytes()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert not prepare(folder, tmp_path / "out").unchanged
    assert (tmp_path / "out" / "tokens.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("files", "rule", "warning"),
    [
        (12, "every-20th", None),
        (2, "every-20th", None),
        (1, "every-20th", "no `train` documents, .* every-20th needs more recordings"),
        (3, "all:train", "no `val` documents, .* --split every-20th would"),
        (3, "all:test", "no `train` and no `val` documents, .* --split every-20th would"),
    ],
)
def test_splits_that_training_lacks_are_named(
    folder: Path, tmp_path: Path, files: int, rule: str, warning: str | None
) -> None:
    for path in sorted(folder.iterdir())[files:]:
        path.unlink()
    reports = [prepare(folder, tmp_path / "out", split=rule) for _ in range(2)]
    assert reports[1].unchanged and reports[0].warnings == reports[1].warnings
    assert [re.match(str(warning), said) is not None for said in reports[0].warnings] == [True] * bool(
        warning
    )


def test_the_verb_warns_overwrites_and_passes_the_subset(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["prepare", "--out", str(tmp_path / "out"), "--json", *map(str, words)])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    code, out, err = verb(folder, "--split", "all:train")
    assert code == 0 and "warning: no `val` documents" in err and "--split every-20th" in err
    assert len(json.loads(out)["warnings"]) == 1
    code, out, err = verb(folder)
    assert (code, out) == (1, "") and "--overwrite" in err
    code, out, err = verb(folder, "--overwrite")
    assert code == 0 and json.loads(out)["warnings"] == [] and "warning" not in err

    fetched: list[tuple[object, ...]] = []
    monkeypatch.setattr(datasets, "download", lambda name, root, *, subset: fetched.append((name, subset)))
    known = ("--dataset", "librispeech", "--root", tmp_path / "absent")
    assert verb(*known, "--subset", "train-clean-360")[0] == 2 and not fetched
    assert verb(*known, "--download", "--subset", "train-clean-360")[0] == 1  # nothing came
    assert fetched == [("librispeech", "train-clean-360")]


def test_a_close_that_was_stopped_is_finished_by_the_same_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out")
    monkeypatch.undo()
    assert prepare(folder, tmp_path / "out").unchanged
    prepare(folder, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_continuing_leaves_the_manifest_as_it_was(folder: Path, tmp_path: Path) -> None:
    """Killed while it continues, after a manifest line whose document was not written."""

    def stop(done: int, total: int, seconds: float) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    manifest = tmp_path / "out.partial" / MANIFEST_FILE
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out", progress=stop)
    inode = manifest.stat().st_ino
    manifest.write_bytes(manifest.read_bytes() + b'{"id": "05", "sou')
    for lines in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            prepare(folder, tmp_path / "out", progress=stop)
        assert [json.loads(line)["id"] for line in manifest.read_text().splitlines()] == [
            f"{i:02d}" for i in range(lines)
        ]
        assert manifest.stat().st_ino == inode
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged; delete it and prepare again"):
        prepare(folder, tmp_path / "out")


def test_bad_files_are_listed_with_reasons(folder: Path, tmp_path: Path) -> None:  # A14
    reasons = bad_files(folder)
    report = prepare(folder, tmp_path / "out")
    assert report.documents == 12
    assert {item.source for item in report.rejected} == set(reasons)
    listed = json.loads((tmp_path / "out" / REJECTED_FILE).read_text())["rejected"]
    assert [item["source"] for item in listed] == sorted(reasons)
    for item in listed:
        assert reasons[item["source"]].rpartition(": ")[2] in item["reason"]
        assert str(folder) not in item["reason"]
    with pytest.raises(DataError, match=r"^compressed.m4a: "):
        prepare(folder, tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(DataError, match="no audio in"):
        prepare(tmp_path / "source", tmp_path / "out")
    names = bad_files(tmp_path / "source")
    with pytest.raises(DataError, match=f"none of the {len(names)} files"):
        prepare(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_silence_is_scored_or_trimmed_away(tmp_path: Path) -> None:  # A6, A11
    (tmp_path / "source").mkdir()
    soundfile.write(tmp_path / "source" / "silent.wav", np.zeros(16_000), 16_000)
    prepare(tmp_path / "source", tmp_path / "kept")
    shards = Shards.open(tmp_path / "kept")
    assert (shards.symbols(shards.documents[0]) == 128).all()
    assert shards.documents[0].frames == 16_000
    soundfile.write(tmp_path / "source" / "short.wav", sine(100), 16_000)
    report = prepare(tmp_path / "source", tmp_path / "trimmed", trim_db=40)
    assert [(r.source, r.reason[:12]) for r in report.rejected] == [("silent.wav", "only silence")]
    document = Shards.open(tmp_path / "trimmed").documents[0]
    assert (document.id, document.trim, document.frames) == ("short", (0, 100), 100)


def test_trimming_gain_and_clipping_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    padded = np.concatenate([np.zeros(1600), sine(3200, peak=0.01), np.zeros(800)])
    soundfile.write(tmp_path / "source" / "quiet.wav", padded, 16_000, subtype="FLOAT")
    report = prepare(tmp_path / "source", tmp_path / "out", trim_db=40, gain="rms:-1")
    document = Shards.open(tmp_path / "out").documents[0]
    assert (document.trim, document.frames) == ((1600, 4800), 3200)
    rms = 0.01 / math.sqrt(2)
    assert 20 * math.log10(document.gain * rms) == pytest.approx(-1, abs=0.01)
    # A sine at -1 dBFS RMS peaks at 1.26 and is beyond 1 for 42 % of the time.
    assert document.clipped == report.clipped == pytest.approx(0.42 * 3200, rel=0.03)


def test_the_manifest_says_what_the_loader_gives(folder: Path, tmp_path: Path) -> None:  # A13
    soundfile.write(folder / "long.wav", sine(44_101, rate_hz=44_100), 44_100)
    stereo = np.stack([sine(400), sine(400)], axis=1)
    soundfile.write(folder / "stereo.wav", stereo, 16_000)
    prepare(folder, tmp_path / "out", trim_db=10)
    fields = {"id", "sources", "sampling_rate", "num_samples", "duration", "transforms"}
    lines = (tmp_path / "out" / MANIFEST_FILE).read_text().splitlines()
    items = {item["id"]: item for item in map(json.loads, lines)}
    for item in items.values():
        assert set(item) <= fields  # Lhotse's Recording(**item) takes no others
        path = item["sources"][0]["source"]
        assert item["num_samples"] == len(audio.load_audio(path)) and item["sampling_rate"] == 16_000
        assert item["duration"] == item["num_samples"] / 16_000
    assert items["long"]["num_samples"] == 16_001
    assert items["long"]["transforms"][0]["name"] == "Resample"
    assert "transforms" not in items["00"]
    assert items["stereo"]["sources"][0]["channels"] == [0, 1]


def test_a_manifest_prepares_the_same_symbols(folder: Path, tmp_path: Path) -> None:
    bad_files(folder)
    prepare(folder, tmp_path / "first", split="all:train")
    second = prepare(tmp_path / "first" / MANIFEST_FILE, tmp_path / "second")
    assert second.rejected == () and second.documents == 12
    a, b = Shards.open(tmp_path / "first"), Shards.open(tmp_path / "second")
    assert (a.path / "tokens.bin").read_bytes() == (b.path / "tokens.bin").read_bytes()
    assert [d.id for d in a.documents] == [d.id for d in b.documents]
    assert (b.preparation["split"], b.splits) == ("every-20th", {"val": 1, "train": 10, "test": 1})
    lines = (tmp_path / "first" / MANIFEST_FILE).read_text().splitlines()
    split = [json.dumps(json.loads(line) | {"split": "val"}) for line in lines]
    (tmp_path / "own.jsonl").write_text("\n".join(split))
    prepare(tmp_path / "own.jsonl", tmp_path / "third")
    c = Shards.open(tmp_path / "third")
    assert (c.preparation["split"], c.splits) == ("official", {"val": 12})


def test_a_manifest_that_is_wrong_about_a_file(folder: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    lines = []
    # The second is off by one; the third gives the length after resampling.
    for name, samples in (("00.wav", 400), ("01.wav", 438), ("10.flac", 160)):
        source = {"type": "file", "channels": [0], "source": f"source/{name}"}
        item = {"id": name, "sources": [source], "sampling_rate": 16_000, "num_samples": samples}
        lines.append(json.dumps(item | {"duration": samples / 16_000}))
    source = {"type": "file", "channels": [0], "source": "gone.wav"}
    item = {"id": "gone", "sources": [source], "sampling_rate": 8000, "num_samples": 8, "duration": 0.001}
    manifest.write_text("\n".join([*lines, json.dumps(item)]))
    report = prepare(manifest, tmp_path / "out")
    assert [d.id for d in Shards.open(tmp_path / "out").documents] == ["00.wav", "10.flac"]
    assert report.rejected[0].source == "source/01.wav"
    assert "manifest says 438 samples at 16000 Hz, the file has 437" in report.rejected[0].reason
    assert "no audio file" in report.rejected[1].reason


def test_wrong_settings_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no gain rule"):
        prepare(folder, tmp_path / "out", gain="loud")
    with pytest.raises(ConfigError, match="positive number of dB"):
        prepare(folder, tmp_path / "out", trim_db=-40)
    with pytest.raises(ConfigError, match="no split rule"):
        prepare(folder, tmp_path / "out", split="random")
    with pytest.raises(DataError, match="not a shard folder"):
        prepare(folder, folder)
    assert not any(tmp_path.glob("out*"))


def test_real_speech(shared: Path, tmp_path: Path) -> None:
    flac = shared / "data" / "kathleen_arctic_16k" / "flac"
    few = tmp_path / "few"
    few.mkdir()
    for path in audio.find_audio(flac)[:21]:
        (few / path.name).symlink_to(path)
    report = prepare(few, tmp_path / "out")
    shards = Shards.open(tmp_path / "out")
    assert shards.splits == {"val": 2, "train": 18, "test": 1}
    assert (report.clipped, report.rejected) == (0, ())
    fsdd = tmp_path / "fsdd"
    fsdd.mkdir()
    for name in ("0_george_0", "0_george_5"):
        (fsdd / f"{name}.flac").symlink_to(shared / "data" / "fsdd_8k" / "flac" / f"{name}.flac")
    prepare("fsdd", tmp_path / "digits", root=fsdd)
    digits = Shards.open(tmp_path / "digits")
    assert digits.splits == {"test": 1, "val": 1}
    for document in digits.documents:
        assert document.sample_rate_hz == 8000
        samples = soundfile.info(fsdd / document.source).frames
        assert document.frames == 2 * samples
