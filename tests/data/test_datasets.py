"""Listings of folders and data sets, and their downloads."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from txl_audio.data.datasets import DATASETS, download, find_recordings
from txl_audio.data.recordings import Recording
from txl_audio.data.splits import assign_splits
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


def test_libritts_and_cmu_arctic_say_what_is_said(tmp_path: Path) -> None:
    """The layouts in which torchaudio extracts their archives."""
    tts = tree(tmp_path / "tts", *(f"LibriTTS/{part}/84/1/84_1_000_0.wav" for part in ("train-x", "dev-x")))
    for part in ("train-x", "dev-x"):
        (tts / f"LibriTTS/{part}/84/1/84_1_000_0.normalized.txt").write_text(f"It was {part}.\n")
    found = find_recordings("libritts", root=tts)
    assert [(r.split, r.text) for r in found] == [("val", "It was dev-x."), ("train", "It was train-x.")]
    arctic = tree(
        tmp_path / "arctic",
        *(f"ARCTIC/cmu_us_{who}_arctic/wav/arctic_a0001.wav" for who in ("aew", "slt")),
        "ARCTIC/cmu_us_slt_arctic/orig/arctic_a0001.wav",
    )
    for who in ("aew", "slt"):
        texts = arctic / f"ARCTIC/cmu_us_{who}_arctic/etc/txt.done.data"
        texts.parent.mkdir()
        texts.write_text(f'( arctic_a0001 "Author of \\"{who}\\", etc." )\n( arctic_a0002 "No." )\n')
    found = find_recordings("cmuarctic", root=arctic)
    assert [(r.id, r.text) for r in found] == [
        (f"cmu_us_{who}_arctic/wav/arctic_a0001", f'Author of "{who}", etc.') for who in ("aew", "slt")
    ]
    light = tree(tmp_path / "light", "librispeech_finetuning/1h/0/clean/84/1/84-1-0.flac")
    (light / "librispeech_finetuning/1h/0/clean/84/1/84-1.trans.txt").write_text("84-1-0 GO\n")
    assert [r.text for r in find_recordings("librilight", root=light)] == ["GO"]


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
