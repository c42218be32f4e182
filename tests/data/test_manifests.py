"""Lhotse's manifests of recordings and cuts, and Shar."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.data.test_audio import sine
from tests.data.test_datasets import tree
from txl_audio.data.audio import read_audio
from txl_audio.data.datasets import find_recordings
from txl_audio.data.manifests import read_manifest
from txl_audio.data.prepare import prepare
from txl_audio.data.recordings import Recording
from txl_audio.data.shards import Shards
from txl_audio.tokens import DataError


def item(**changes: Any) -> dict[str, Any]:
    return {
        "id": "a",
        "sources": [{"type": "file", "channels": [0], "source": "audio/a.wav"}],
        "sampling_rate": 16_000,
        "num_samples": 8000,
        "duration": 0.5,
    } | changes


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_manifests_are_read(tmp_path: Path, suffix: str) -> None:
    tree(tmp_path, "audio/a.wav")
    lines = [item(), item(id="b", split="test", channel_ids=[0])]
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    path = tmp_path / f"recordings{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    first, second = find_recordings(path)
    assert first == Recording(
        id="a",
        path=tmp_path / "audio/a.wav",
        source="audio/a.wav",
        claim=(8000, 16_000),
    )
    assert (second.id, second.split) == ("b", "test")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no Lhotse recording"),
        ("[]", "no Lhotse recording"),
        (json.dumps({"id": "a"}), "KeyError: 'sources'"),
        (json.dumps(item(sampling_rate=0)), "no Lhotse recording"),
        (json.dumps(item(duration=1.0)), "duration and num_samples"),
        (json.dumps(item(sources=[{"type": "url", "source": "x"}])), r"\['url'\], expected one of type"),
        (json.dumps(item(sources=[])), "expected one of type 'file'"),
        (json.dumps(item(transforms=[{"name": "Speed", "kwargs": {}}])), r"transforms \['Speed'\]"),
        (json.dumps(item()) + "\n" + json.dumps(item()), "a second recording is called 'a'"),
    ],
)
def test_bad_manifest_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(item(id="first")) + "\n" + line)
    with pytest.raises(DataError, match=reason) as error:
        read_manifest(path)
    assert f"{path}:{line.count(chr(10)) + 2}: " in str(error.value)


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.gz"
    for content in (b"plain text", gzip.compress(b"{}" * 100)[:-12]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not readable as a manifest"):
            read_manifest(path)


RATE_HZ = 16_000


def cut(name: str, start: float, duration: float, **changes: Any) -> dict[str, Any]:
    """A cut of `name`.wav, which lasts a second, as `CutSet.to_file` writes it."""
    recording = item(id=name, duration=1.0, num_samples=RATE_HZ, channel_ids=[0])
    recording["sources"] = [{"type": "file", "channels": [0], "source": f"audio/{name}.wav"}]
    said = [
        {"id": "s2", "recording_id": name, "start": 0.1, "duration": 0.1, "channel": 0, "text": " you. "},
        {"id": "s1", "recording_id": name, "start": 0.0, "duration": 0.1, "channel": 0, "text": "Hello,"},
    ]
    said = [segment | {"speaker": "ann"} for segment in said]
    return {
        "id": f"{name}-{start:g}",
        "start": start,
        "duration": duration,
        "channel": 0,
        "supervisions": said,
        "recording": recording,
        "type": "MonoCut",
    } | changes


def write(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in items))
    return path


@pytest.fixture
def sounds(tmp_path: Path) -> dict[str, np.ndarray]:
    """Two files of a second and what is in them."""
    files = {name: tmp_path / "audio" / f"{name}.wav" for name in "ab"}
    (tmp_path / "audio").mkdir()
    for path, hz in zip(files.values(), (200.0, 300.0), strict=True):
        soundfile.write(path, sine(RATE_HZ, hz=hz), RATE_HZ)
    return {name: read_audio(path)[0] for name, path in files.items()}


def test_cuts_are_pieces_with_text_and_speaker(tmp_path: Path, sounds: dict[str, np.ndarray]) -> None:
    pytest.importorskip("lhotse")
    both = [
        {"offset": 0.0, "type": "MonoCut", "cut": cut("a", 0.0, 0.5, supervisions=[])},
        {"offset": 0.25, "type": "MonoCut", "cut": cut("b", 0.5, 0.25)},
    ]
    path = write(
        tmp_path / "cuts.jsonl",
        cut("a", 0.25, 0.5, custom={"split": "test"}),
        cut("b", 0.0, 1.0, supervisions=[]),
        {"id": "mix", "tracks": both, "type": "MixedCut"},
    )
    first, second, mixed = read_manifest(path)
    assert (first.id, first.split, first.text, first.speaker) == ("a-0.25", "test", "Hello, you.", "ann")
    assert (second.id, second.split, second.text, second.speaker) == ("b-0", None, "", "")
    pcm, rate_hz, _ = first.read()
    assert rate_hz == RATE_HZ
    np.testing.assert_array_equal(pcm, sounds["a"][4000:12000])
    np.testing.assert_array_equal(second.read().pcm, sounds["b"])
    expected = sounds["a"][:8000].copy()
    expected[4000:] += sounds["b"][8000:12000]
    np.testing.assert_allclose(mixed.read().pcm, expected, atol=1e-6)
    assert (mixed.text, mixed.speaker) == ("Hello, you.", "ann")


def test_shards_keep_what_cuts_say(tmp_path: Path, sounds: dict[str, np.ndarray]) -> None:
    """Whole files, as cuts and as Shar, give the symbols of the files; bad ones are listed, as ever."""
    lhotse = pytest.importorskip("lhotse")
    good = [cut("a", 0.0, 1.0), cut("b", 0.0, 1.0, supervisions=[])]
    path = write(tmp_path / "cuts.jsonl", *good)
    shar = tmp_path / "shar"
    shar.mkdir()
    whole = [
        lhotse.MonoCut.from_dict({k: v for k, v in c.items() if k not in ("type", "recording")}) for c in good
    ]
    for c in whole:
        c.recording = lhotse.Recording.from_file(tmp_path / "audio" / f"{c.id[0]}.wav")
    lhotse.CutSet.from_cuts(whole).to_shar(shar, fields={"recording": "wav"}, shard_size=1)
    sound = np.zeros(RATE_HZ, np.float32)
    sound[5] = np.nan
    soundfile.write(tmp_path / "audio" / "nan.wav", sound, RATE_HZ, subtype="FLOAT")
    write(tmp_path / "bad.jsonl", *good, cut("nan", 0.0, 1.0), cut("absent", 0.0, 1.0), cut("a", 0.5, 2.0))

    prepare(tmp_path / "audio", tmp_path / "files", split="all:train")
    files = {d.id: d for d in Shards.open(tmp_path / "files").documents}
    symbols = Shards.open(tmp_path / "files").symbols
    for name, source in (("cuts", path), ("shar", shar), ("bad", tmp_path / "bad.jsonl")):
        out = tmp_path / f"of_{name}"
        report = prepare(source, out, split="all:train")
        shards = Shards.open(out)
        assert [(d.id, d.text, d.speaker) for d in shards.documents] == [
            ("a-0", "Hello, you.", "ann"),
            ("b-0", "", ""),
        ]
        for document in shards.documents:
            np.testing.assert_array_equal(shards.symbols(document), symbols(files[document.id[0]]))
        assert (out / "manifest.jsonl").read_text() == ""  # files are described there, not parts
        assert prepare(source, out, split="all:train").unchanged
        reasons = {item.source: item.reason for item in report.rejected}
        assert set(reasons) == ({"nan-0", "absent-0", "a-0.5"} if name == "bad" else set())
    assert reasons["nan-0"] == "the file has NaN or infinite samples"
    assert all(reasons[name].startswith("Lhotse cannot read it: ") for name in ("absent-0", "a-0.5"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"supervisions": [{"id": "s"}]}, "no Lhotse cut .*missing"),
        ({"type": "Cutlet"}, "no Lhotse cut .*Cutlet"),
        ({"recording": item(sources=[{"type": "command", "source": "ls"}])}, "of type 'command', expected"),
    ],
)
def test_bad_cuts_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    pytest.importorskip("lhotse")
    path = write(tmp_path / "cuts.jsonl", cut("a", 0.0, 1.0), cut("b", 0.0, 1.0) | changes)
    with pytest.raises(DataError, match=reason) as error:
        read_manifest(path)
    assert f"{path}:2: " in str(error.value)


def test_shar_that_does_not_fit_together(tmp_path: Path, sounds: dict[str, np.ndarray]) -> None:
    pytest.importorskip("lhotse")
    write(tmp_path / "cuts.000000.jsonl", cut("a", 0.0, 1.0))
    tar = tmp_path / "recording.000000.tar"
    with pytest.raises(DataError, match="1 files of cuts and 0 of sound"):
        find_recordings(tmp_path)
    tar.write_bytes(b"no tar")
    with pytest.raises(DataError, match="not readable as a tar of Shar"):
        find_recordings(tmp_path)
    for names, reason in ((["a-0.wav"], "has 1 files, expected two"), (["b.wav", "b.json"], "sound of 'b'")):
        with tarfile.open(tar, "w") as file:
            for name in names:
                file.add(tmp_path / "audio" / "a.wav", name)
        with pytest.raises(DataError, match=reason):
            find_recordings(tmp_path)
    with tarfile.open(tar, "w") as file:  # as Lhotse writes a cut without sound
        for name in ("a-0.nodata", "a-0.nometa"):
            file.addfile(tarfile.TarInfo(name))
    (silent,) = find_recordings(tmp_path)
    with pytest.raises(DataError, match="the cut has no sound"):
        silent.read()


def test_cuts_need_lhotse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lhotse.cut.set", None)
    with pytest.raises(DataError, match=r"pip install 'txl-audio\[lhotse\]'"):
        read_manifest(write(tmp_path / "cuts.jsonl", cut("a", 0.0, 1.0)))
