"""Audio of Hugging Face's `datasets`, from folders: saved ones, and files it makes a set of."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.data.test_audio import sine
from txl_audio.data.audio import read_audio
from txl_audio.data.datasets import find_recordings
from txl_audio.data.prepare import prepare
from txl_audio.data.shards import Shards
from txl_audio.tokens import DataError


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, and what `load_dataset` makes of files stays here."""
    hf = pytest.importorskip("datasets")
    monkeypatch.setattr(hf.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hf.disable_progress_bars()
    yield
    hf.enable_progress_bars()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "files").mkdir()
    paths = [tmp_path / "files" / f"{i}.wav" for i in range(5)]
    for i, path in enumerate(paths):
        soundfile.write(path, sine(500 + i, hz=200.0 + 50 * i), 16_000)
    return paths


def rows(paths: Sequence[Path], **columns: Any) -> Any:
    """A set with the encoded bytes in its rows, as those of the hub have them."""
    import datasets as hf

    sounds = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    return hf.Dataset.from_dict({"audio": sounds} | columns).cast_column("audio", hf.Audio())


def parquet(folder: Path, sounds: list[dict[str, Any]], column: str = "audio") -> str:
    """A folder with these rows as they are, where `save_to_disk` would read the files that rows name."""
    import datasets as hf
    import pyarrow
    from pyarrow.parquet import write_table

    schema = hf.Features({column: hf.Audio()}).arrow_schema
    folder.mkdir()
    write_table(
        pyarrow.Table.from_pylist([{column: sound} for sound in sounds], schema), folder / "all.parquet"
    )
    return f"hf:{folder}"


def test_a_saved_set_gives_the_symbols_of_its_files(files: list[Path], tmp_path: Path) -> None:
    import datasets as hf

    texts = [f"Word {i}" for i in range(5)]
    parts = {"train": slice(3), "validation.clean": slice(3, 4), "test": slice(4, 5)}
    saved = hf.DatasetDict(
        {
            split: rows(files[part], sentence=texts[part], speaker_id=[7] * len(files[part]))
            for split, part in parts.items()
        }
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    prepare(tmp_path / "saved", tmp_path / "out")
    prepare(tmp_path / "files", tmp_path / "expected")
    shards, expected = Shards.open(tmp_path / "out"), Shards.open(tmp_path / "expected")
    assert shards.preparation["split"] == "official"
    assert [(d.id, d.split, d.text, d.speaker) for d in shards.documents] == [
        *((f"train/{i}", "train", f"Word {i}", "7") for i in range(3)),
        ("validation.clean/3", "val", "Word 3", "7"),
        ("test/4", "test", "Word 4", "7"),
    ]
    for document, file in zip(shards.documents, expected.documents, strict=True):
        assert document.sha256 == file.sha256
        np.testing.assert_array_equal(shards.symbols(document), expected.symbols(file))
    assert prepare(tmp_path / "saved", tmp_path / "out").unchanged


def test_rows_in_another_order_and_without_names(files: list[Path], tmp_path: Path) -> None:
    rows(files).select([3, 1]).save_to_disk(str(tmp_path / "saved"))
    found = find_recordings(tmp_path / "saved")
    assert [(r.id, r.split, r.text, r.speaker) for r in found] == [
        ("all/3", None, "", ""),  # the authors made no splits
        ("all/1", None, "", ""),
    ]
    for recording, file in zip(found, (files[3], files[1]), strict=True):
        np.testing.assert_array_equal(recording.read().pcm, read_audio(file)[0])
    rows([files[0], files[0]], text=["a", None]).save_to_disk(str(tmp_path / "saved"))
    found = find_recordings(tmp_path / "saved")
    assert [(r.id, r.text) for r in found] == [("all/00000000", "a"), ("all/00000001", "")]


def test_a_folder_of_parquet_is_loaded(files: list[Path], tmp_path: Path) -> None:
    for split, part in (("train", files[:2]), ("test", files[2:3])):
        rows(part).to_parquet(str(tmp_path / "set" / f"{split}-00000-of-00001.parquet"))
    found = find_recordings(f"hf:{tmp_path / 'set'}")
    assert [(r.id, r.split) for r in found] == [
        ("train/0", "train"),
        ("train/1", "train"),
        ("test/2", "test"),
    ]
    np.testing.assert_array_equal(found[2].read().pcm, read_audio(files[2])[0])


def test_rows_that_name_files_are_those_files(files: list[Path], tmp_path: Path) -> None:
    named: list[dict[str, Any]] = [{"bytes": None, "path": str(path)} for path in files]
    found = find_recordings(parquet(tmp_path / "set", named, column="speech"))
    assert [(r.path, r.part) for r in found] == [(path, None) for path in files]


def test_bad_rows_are_listed_with_reasons(files: list[Path], tmp_path: Path) -> None:
    broken = io.BytesIO()
    soundfile.write(broken, np.full(100, np.nan), 16_000, format="WAV", subtype="FLOAT")
    sounds = [
        {"bytes": files[0].read_bytes(), "path": "good"},
        {"bytes": broken.getvalue(), "path": "nan"},
        {"bytes": b"this is no audio", "path": "text"},
        {"bytes": None, "path": "absent.wav"},
        {"bytes": b"", "path": "empty"},
    ]
    report = prepare(parquet(tmp_path / "set", sounds), tmp_path / "out", split="all:test")
    assert report.documents == 1
    assert {item.source: item.reason for item in report.rejected} == {
        "train/nan": "the file has NaN or infinite samples",
        "train/text": "not readable as audio: Format not recognised.",
        "train/absent": "no audio file at absent.wav",
        "train/empty": "the row has no audio",
    }


def test_sets_that_cannot_be_used_are_named(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets as hf

    hf.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "texts"))
    with pytest.raises(DataError, match="has 0 columns of audio among text; expected one"):
        find_recordings(tmp_path / "texts")
    with pytest.raises(DataError, match="datasets cannot load nobody/nothing: .*; expected NAME"):
        find_recordings("hf:nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'txl-audio\[datasets\]'"):
        find_recordings(tmp_path / "texts")
