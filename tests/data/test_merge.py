"""Shards made apart and merged: the bytes of one call."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.data.test_audio import bad_files, sine
from txl_audio import cli
from txl_audio.data.merge import merge
from txl_audio.data.prepare import prepare
from txl_audio.data.shards import Shards
from txl_audio.tokens import ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten short files with what is said in them, and bad ones among them."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(10):
        soundfile.write(folder / f"{i:02d}.wav", sine(400 + 37 * i, hz=200.0 + 50 * i), 16_000)
    bad_files(folder)
    names = [path.stem for path in folder.iterdir()]
    (tmp_path / "texts.tsv").write_text("".join(f"{name}\tword {name[-1]}\n" for name in sorted(names)))
    return folder


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def prepare_shards(folder: Path, out: Path, n: int, **settings: Any) -> None:
    for i in range(n, 0, -1):  # in any order
        prepare(folder, out, shard=(i, n), **settings)


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_merged_shards_are_the_bytes_of_one_call(folder: Path, tmp_path: Path, shards: int) -> None:
    settings: dict[str, Any] = {"transcripts": tmp_path / "texts.tsv", "split": "every-5th"}
    whole = prepare(folder, tmp_path / "whole", **settings)
    prepare_shards(folder, tmp_path / "out", shards, **settings)
    assert not (tmp_path / "out").exists()
    merged = merge(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert "vocabulary.json" in content(tmp_path / "out")
    assert (merged.seconds, merged.clipped, merged.rejected) == (whole.seconds, whole.clipped, whole.rejected)
    assert whole.rejected and merge(tmp_path / "out").unchanged
    assert prepare(folder, tmp_path / "out", **settings).unchanged


def test_any_number_of_workers_gives_the_bytes_of_three_shards(folder: Path, tmp_path: Path) -> None:
    prepare_shards(folder, tmp_path / "shards", 3)
    merge(tmp_path / "shards")
    for workers in (1, 2, 4):
        assert prepare(folder, tmp_path / f"{workers}", workers=workers).rejected
        assert content(tmp_path / f"{workers}") == content(tmp_path / "shards")


def test_a_shard_continues_and_is_not_made_twice(folder: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, seconds: float) -> None:
        assert total < 10
        if done == 2:
            raise KeyboardInterrupt

    prepare(folder, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out", shard=(2, 2), progress=stop)
    with pytest.raises(DataError, match=r"2 of 2 shards of .* are missing: out.shard-1-of-2, out.shard-2"):
        merge(tmp_path / "out")
    prepare_shards(folder, tmp_path / "out", 2)
    assert prepare(folder, tmp_path / "out", shard=(2, 2)).unchanged
    merge(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_shard_of_bad_files_only(folder: Path, tmp_path: Path) -> None:
    keep = next(path for path in folder.iterdir() if path.stem == "00")
    for path in folder.glob("0[1-9].wav"):
        path.unlink()
    files = len(list(folder.iterdir()))
    prepare(folder, tmp_path / "whole")
    prepare_shards(folder, tmp_path / "out", files)
    assert merge(tmp_path / "out").documents == 1
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    keep.unlink()
    prepare_shards(folder, tmp_path / "none", files - 1)
    with pytest.raises(DataError, match=f"none of the {files - 1} files of .* can be used"):
        merge(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_missing_and_foreign_shards_are_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no shards of .*out beside it"):
        merge(out)
    prepare_shards(folder, out, 3)
    shutil.rmtree(tmp_path / "out.shard-2-of-3")
    with pytest.raises(DataError, match=r"1 of 3 shards of .* missing: out.shard-2-of-3; prepare them"):
        merge(out)
    prepare(folder, out, shard=(2, 3), gain="peak:-1")
    with pytest.raises(DataError, match=r"^out.shard-2-of-3 beside .* in another way than out.shard-1-of-3"):
        merge(out)
    with pytest.raises(DataError, match="holds shards of .*--overwrite"):
        prepare(folder, out, shard=(2, 3))
    prepare(folder, out, shard=(2, 3), overwrite=True)
    prepare(folder, out, shard=(1, 2))
    with pytest.raises(DataError, match=r"different numbers: out.shard-1-of-2, out.shard-1-of-3"):
        merge(out)
    shutil.rmtree(tmp_path / "out.shard-1-of-2")
    prepare(folder, out, trim_db=40)
    with pytest.raises(DataError, match="holds shards of .*--overwrite"):
        merge(out)
    assert merge(out, overwrite=True).documents == 10
    with pytest.raises(DataError, match=r"\.\w+: "):
        merge(out, strict=True)
    for shard in ((0, 3), (4, 3), (1, 1000)):
        with pytest.raises(ConfigError, match=f"shard {shard[0]}/{shard[1]} of"):
            prepare(folder, out, shard=shard)


def test_the_verb_prepares_shards_and_merges(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["prepare", "--out", str(tmp_path / "out"), "--json", *map(str, words)])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    assert verb(folder, "--shard", "1/2")[0] in (0, 1)  # 1 where files were left out
    code, _, err = verb("--merge")
    assert code == 1 and "out.shard-2-of-2" in err
    verb(folder, "--shard", "2/2")
    code, out, err = verb("--merge")
    figures = json.loads(out)
    assert code == 1 and figures["documents"] == 10 and figures["rejected"] and "left out" in err
    assert len(Shards.open(tmp_path / "out").documents) == 10
    assert verb(folder, "--shard", "half")[0] == 2 and verb(folder, "--merge")[0] == 2
