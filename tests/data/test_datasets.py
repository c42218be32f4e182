"""Listings of folders, manifests and data sets, and the split rules."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from txl_audio.data.datasets import (
    DATASETS,
    Recording,
    assign_splits,
    download,
    find_recordings,
    read_manifest,
)
from txl_audio.tokens import ConfigError, DataError


def tree(root: Path, *names: str) -> Path:
    """Empty files: listings decode nothing."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def splits(recordings: list[Recording]) -> dict[str, str | None]:
    return {recording.id: recording.split for recording in recordings}


def test_folders_give_relative_ids(tmp_path: Path) -> None:
    tree(tmp_path, "b/1.wav", "a.flac", "a.wav", "c.x.wav", "readme.txt")
    found = find_recordings(tmp_path)
    assert [(r.id, r.source) for r in found] == [
        ("a.flac", "a.flac"),  # two files of one name keep their suffix
        ("a.wav", "a.wav"),
        ("b/1", "b/1.wav"),
        ("c.x", "c.x.wav"),
    ]
    assert found[2].path == tmp_path / "b" / "1.wav"


@pytest.mark.parametrize("also", [(), ("a.flac",), ("a.wav.wav.wav",), ("a.flac", "a.flac.wav")])
def test_ids_never_collide(tmp_path: Path, also: tuple[str, ...]) -> None:
    tree(tmp_path, "a.wav", "a.wav.wav", *also)
    found = find_recordings(tmp_path)
    ids = [r.id for r in found]
    assert len(set(ids)) == len(found) == 2 + len(also)
    assert {r.id for r in found} >= {"a.wav.wav"}
    assert sum(r.split == "val" for r in assign_splits(found, None)[0]) == 1


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no audio in"):
        find_recordings(tmp_path)
    with pytest.raises(DataError, match="nothing to prepare at .*absent; expected a folder"):
        find_recordings(tmp_path / "absent")
    with pytest.raises(DataError, match="give its root"):
        find_recordings("ljspeech")
    with pytest.raises(DataError, match="no data set is called 'timit'; known: speechcommands"):
        find_recordings("timit", root=tmp_path)
    with pytest.raises(DataError, match="no folder at"):
        find_recordings("yesno", root=tmp_path / "absent")


COMMANDS = [
    "_background_noise_/hum.wav",
    "backward/00b01445_nohash_0.wav",
    "one/00176480_nohash_0.wav",
    "one/00176480_nohash_1.wav",
    "two/004ae714_nohash_0.wav",
    "two/xyz.wav",
]


@pytest.mark.parametrize("above", ["", "speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02"])
def test_speech_commands_uses_its_lists(tmp_path: Path, above: str) -> None:
    base = tree(tmp_path / above, *COMMANDS)
    (base / "validation_list.txt").write_text("one/00176480_nohash_1.wav\n")
    (base / "testing_list.txt").write_text("two/004ae714_nohash_0.wav\n")
    assert splits(find_recordings("speechcommands", root=tmp_path)) == {
        "backward/00b01445_nohash_0": "train",
        "one/00176480_nohash_0": "train",
        "one/00176480_nohash_1": "val",
        "two/004ae714_nohash_0": "test",
    }
    assert [r.id for r in find_recordings("sc09", root=tmp_path)] == [
        "one/00176480_nohash_0",
        "one/00176480_nohash_1",
        "two/004ae714_nohash_0",
    ]


def test_speech_commands_needs_its_lists(tmp_path: Path) -> None:
    tree(tmp_path, *COMMANDS)
    with pytest.raises(DataError, match=r"validation_list.txt is missing"):
        find_recordings("speechcommands", root=tmp_path)


def test_librispeech_goes_by_folder(tmp_path: Path) -> None:
    tree(
        tmp_path / "LibriSpeech",
        "train-clean-100/19/198/19-198-0000.flac",
        "dev-clean/84/121123/84-121123-0000.flac",
        "test-other/367/130732/367-130732-0000.flac",
        "test-other/367/130732/367-130732.trans.txt",
    )
    expected = {
        "dev-clean/84/121123/84-121123-0000": "val",
        "test-other/367/130732/367-130732-0000": "test",
        "train-clean-100/19/198/19-198-0000": "train",
    }
    assert splits(find_recordings("librispeech", root=tmp_path)) == expected
    assert splits(find_recordings("librispeech", root=tmp_path / "LibriSpeech")) == expected
    one = find_recordings("librispeech", root=tmp_path / "LibriSpeech" / "test-other")
    assert splits(one) == {"367/130732/367-130732-0000": "test"}
    tree(tmp_path / "other", "x/1.flac")
    with pytest.raises(DataError, match="no train-"):
        find_recordings("librispeech", root=tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "files", "ids"),
    [
        ("ljspeech", ["LJSpeech-1.1/wavs/LJ001-0001.wav", "LJSpeech-1.1/metadata.csv"], ["LJ001-0001"]),
        ("ljspeech", ["wavs/LJ001-0001.wav"], ["LJ001-0001"]),
        ("yesno", ["waves_yesno/0_0_0_0_1_1_1_1.wav", "waves_yesno/README"], ["0_0_0_0_1_1_1_1"]),
        ("yesno", ["0_0_0_0_1_1_1_1.wav"], ["0_0_0_0_1_1_1_1"]),
        (
            "vctk",
            [f"VCTK-Corpus-0.92/wav48_silence_trimmed/p225/p225_001_{mic}.flac" for mic in ("mic1", "mic2")],
            ["p225/p225_001_mic1"],
        ),
        ("vctk", ["VCTK-Corpus/wav48/p225/p225_001.wav"], ["p225/p225_001"]),
    ],
)
def test_data_sets_without_splits(tmp_path: Path, name: str, files: list[str], ids: list[str]) -> None:
    found = find_recordings(name, root=tree(tmp_path, *files))
    assert splits(found) == dict.fromkeys(ids)
    assert assign_splits(found, None)[1] == "every-20th"


@pytest.mark.parametrize("above", ["", "recordings", "flac"])
def test_fsdd_goes_by_take(tmp_path: Path, above: str) -> None:
    names = [f"{digit}_theo_{take}.wav" for digit in (0, 9) for take in (0, 4, 5, 9, 10, 49)]
    tree(tmp_path / above, *names, "noise.wav")
    found = splits(find_recordings("fsdd", root=tmp_path))
    expected = {"test": (0, 4), "val": (5, 9), "train": (10, 49)}
    assert found == {f"{d}_theo_{t}": name for name, takes in expected.items() for d in (0, 9) for t in takes}


def test_the_real_fsdd(shared: Path) -> None:
    found = find_recordings("fsdd", root=shared / "data" / "fsdd_8k")
    assert len(found) == 3000
    assert Counter(splits(found).values()) == {"test": 300, "val": 300, "train": 2400}


def test_every_nth_goes_by_base_name() -> None:
    names = [f"speaker{i % 3}/{i:03d}.wav" for i in range(100)]
    recordings = [Recording(id=n[:-4], path=Path(n), source=n) for n in sorted(names)]
    assigned, rule = assign_splits(recordings, None)
    assert rule == "every-20th"
    number = {r.id: int(r.id[-3:]) for r in assigned}
    assert sorted(number[r.id] for r in assigned if r.split == "val") == [0, 20, 40, 60, 80]
    assert sorted(number[r.id] for r in assigned if r.split == "test") == [10, 30, 50, 70, 90]
    assert sum(r.split == "train" for r in assigned) == 90
    assert [r.id for r in assigned] == [r.id for r in recordings]
    assert [r.split for r in assign_splits(recordings[:1], None)[0]] == ["val"]
    third = [r.split for r in assign_splits(recordings[:4], "every-3rd")[0]]
    assert sorted(map(str, third)) == ["test", "train", "val", "val"]


def test_lists_choose_by_id_or_path(tmp_path: Path) -> None:
    recordings = [Recording(id=i, path=Path(i), source=f"{i}.wav") for i in "abcd"]
    (tmp_path / "train.txt").write_text("a\nb.wav\n\n")
    (tmp_path / "val.txt").write_text("d\n")
    assigned, _ = assign_splits(recordings, f"lists:{tmp_path}")
    assert splits(assigned) == {"a": "train", "b": "train", "d": "val"}
    (tmp_path / "val.txt").write_text("b\n")
    with pytest.raises(DataError, match="'b' is listed in train and val"):
        assign_splits(recordings, f"lists:{tmp_path}")
    (tmp_path / "val.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"'a' is listed in train.txt and val.txt"):
        assign_splits(recordings, f"lists:{tmp_path}")
    (tmp_path / "val.txt").write_text("z\n")
    with pytest.raises(DataError, match=r"1 entries .* \(first: 'z'\)"):
        assign_splits(recordings, f"lists:{tmp_path}")
    with pytest.raises(DataError, match="no split lists in"):
        assign_splits(recordings, f"lists:{tmp_path / 'absent'}")


def test_official_and_one_split() -> None:
    known = [Recording(id="a", path=Path("a"), source="a", split="dev")]
    unknown = [Recording(id="b", path=Path("b"), source="b")]
    assert assign_splits(known, None) == (known, "official")
    assert splits(assign_splits(known + unknown, "all:test")[0]) == {"a": "test", "b": "test"}
    with pytest.raises(DataError, match=r"1 of 2 recordings \(first: b\)"):
        assign_splits(known + unknown, "official")


@pytest.mark.parametrize("rule", ["every-2nd", "every-20", "random", "all:", "lists:", ""])
def test_other_rules_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="expected every-20th"):
        assign_splits([Recording(id="a", path=Path("a"), source="a")], rule)


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


def test_downloads_go_through_torchaudio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Path, dict[str, Any]]] = []

    def fake(name: str) -> Any:
        def construct(root: Path, **settings: Any) -> None:
            calls.append((name, root, settings))
            if name == "YESNO":
                raise RuntimeError("HTTP 503")

        return construct

    torchaudio, datasets = ModuleType("torchaudio"), ModuleType("torchaudio.datasets")
    for name in {d.torchaudio for d in DATASETS.values()} - {None}:
        setattr(datasets, str(name), fake(str(name)))
    torchaudio.datasets = datasets  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchaudio", torchaudio)
    monkeypatch.setitem(sys.modules, "torchaudio.datasets", datasets)
    root = tmp_path / "new"
    assert download("librispeech", root) == root
    download("librispeech", root, subset="train-clean-360")
    download("librispeech", root, subset="dev-clean")
    download("sc09", root)
    assert calls == [
        *(
            ("LIBRISPEECH", root, {"download": True, "url": part})
            for part in ("train-clean-100", "dev-clean", "train-clean-360", "dev-clean", "dev-clean")
        ),
        ("SPEECHCOMMANDS", root, {"download": True}),
    ]
    with pytest.raises(ConfigError, match="ljspeech is downloaded whole, got the subset 'dev-clean'"):
        download("ljspeech", root, subset="dev-clean")
    assert root.is_dir()
    with pytest.raises(DataError, match=r"yesno could not be downloaded .*HTTP 503"):
        download("yesno", root)
    with pytest.raises(DataError, match="fsdd has no downloader"):
        download("fsdd", root)
    monkeypatch.setitem(sys.modules, "torchaudio.datasets", None)
    with pytest.raises(DataError, match="needs torchaudio"):
        download("ljspeech", root)


def test_torchaudio_has_the_classes_and_subsets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchaudio.datasets")
    for subset in DATASETS["librispeech"].subsets:
        with pytest.raises(RuntimeError, match="not found"):  # and not that the subset is unknown
            datasets.LIBRISPEECH(tmp_path, url=subset, download=False)
    for name, dataset in DATASETS.items():
        assert dataset.torchaudio is None or hasattr(datasets, dataset.torchaudio), name
