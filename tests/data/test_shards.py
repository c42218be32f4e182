"""Shard folders: what is written comes back, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_audio.codecs import MuLawCodec
from txl_audio.data.shard_writer import ShardWriter, finish_interrupted
from txl_audio.data.shards import Shards, symbol_dtype
from txl_audio.tokens import DataError, SpecError, TokenSpec

SPEC = MuLawCodec().spec


def write(out: Path, *lengths: int, spec: TokenSpec = SPEC, split: str = "train") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, spec.vocab_size, (n, spec.symbols_per_frame)) for n in lengths]
    with ShardWriter(out, spec=spec, preparation={"gain": "none"}) as writer:
        for i, symbols in enumerate(arrays):
            writer.append(symbols, id=f"d{i}", split=split, source=f"d{i}.wav", sha256="0" * 64)
    return arrays


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    k=st.integers(1, 4),
    vocab_size=st.sampled_from([2, 256, 257, 65_536, 65_537, 267_735]),
)
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], k: int, vocab_size: int
) -> None:
    out = tmp_path_factory.mktemp("shards") / "out"
    spec = replace(SPEC, modality="codes", vocab_size=vocab_size, symbols_per_frame=k, name="any")
    arrays = write(out, *lengths, spec=spec)
    shards = Shards.open(out)
    assert shards.spec == spec
    assert shards.preparation == {"gain": "none"}
    assert [d.frames for d in shards.documents] == lengths
    for document, symbols in zip(shards.documents, arrays, strict=True):
        np.testing.assert_array_equal(shards.symbols(document), symbols)


def test_the_smallest_type_is_used() -> None:
    names = [symbol_dtype(v).name for v in (256, 257, 65_536, 65_537)]
    assert names == ["uint8", "uint16", "uint16", "uint32"]


def test_documents_keep_what_was_said_about_them(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", spec=SPEC, preparation={}) as writer:
        said = writer.append(
            np.zeros(3, np.uint8),
            id="a/b",
            split="val",
            source="a/b.wav",
            sha256="ab",
            sample_rate_hz=44_100,
            gain=0.5,
            trim=(10, 13),
            clipped=2,
        )
    assert Shards.open(tmp_path / "out").documents == (said,)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.json", "tokens.bin"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_code_0_is_an_ordinary_symbol(tmp_path: Path) -> None:  # A11
    with ShardWriter(tmp_path / "out", spec=SPEC, preparation={}) as writer:
        writer.append(np.zeros(1000, np.int64), id="a", split="train", source="a", sha256="")
    shards = Shards.open(tmp_path / "out")
    symbols = shards.symbols(shards.documents[0])
    assert symbols.shape == (1000, 1) and not symbols.any()
    assert shards.spec.start_symbol == 256


def test_symbols_are_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "out", 5)
    shards = Shards.open(tmp_path / "out")
    view = shards.symbols(shards.documents[0])
    assert isinstance(view, np.memmap) and not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_splits_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "out", 1, 2, 3)
    shards = Shards.open(tmp_path / "out")
    assert shards.splits == {"train": 3}
    assert shards.of_split("train") == shards.documents
    with pytest.raises(DataError, match=r"no split 'valid'; it has train \(3\)"):
        shards.of_split("valid")


def edit(out: Path, **changes: Any) -> None:
    index = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps(index | changes))


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index.json is missing; write them with prepare"):
        Shards.open(tmp_path / "absent")
    out = tmp_path / "out"
    write(out, 4, 5)
    tokens = (out / "tokens.bin").read_bytes()
    (out / "tokens.bin").write_bytes(tokens[:-1])
    with pytest.raises(DataError, match="has 8 bytes, its index needs 9"):
        Shards.open(out)
    (out / "tokens.bin").unlink()
    with pytest.raises(DataError, match=r"tokens.bin is missing"):
        Shards.open(out)
    (out / "tokens.bin").write_bytes(tokens)
    documents = json.loads((out / "index.json").read_text())["documents"]
    for changes, reason in [
        ({"version": 2}, "version 2, expected 1"),
        ({"documents": []}, "damaged .no documents"),
        ({"documents": documents[1:]}, "lies at 4, expected 0"),
        ({"documents": [{"id": "d0"}]}, "damaged"),
        ({"documents": 3}, "damaged"),
        ({"preparation": None}, "damaged"),
    ]:
        write(out, 4, 5)
        edit(out, **changes)
        with pytest.raises(DataError, match=reason):
            Shards.open(out)
    write(out, 4, 5)
    edit(out, spec={"name": "mulaw"})
    with pytest.raises(SpecError, match="written by another version"):
        Shards.open(out)
    for text in ("", "{", "[]", "{}"):
        (out / "index.json").write_text(text)
        with pytest.raises(DataError, match="damaged"):
            Shards.open(out)


def test_wrong_documents_are_refused(tmp_path: Path) -> None:
    about: dict[str, Any] = {"split": "train", "source": "a", "sha256": ""}
    with ShardWriter(tmp_path / "out", spec=SPEC, preparation={}) as writer:
        writer.append(np.array([0, 255]), id="a", **about)
        with pytest.raises(DataError, match="two documents are called 'a'"):
            writer.append(np.array([1]), id="a", **about)
        with pytest.raises(DataError, match="'b' has no symbols"):
            writer.append(np.zeros(0, np.int64), id="b", **about)
        for symbols in ([256], [-1]):
            with pytest.raises(DataError, match=r"expected 0\.\.255"):
                writer.append(np.array(symbols), id="b", **about)
        for symbols in (np.zeros((2, 2), int), np.zeros((2, 1)), np.zeros((1, 1, 1), int)):
            with pytest.raises(SpecError, match=r"integers of shape \[frames, 1\]"):
                writer.append(symbols, id="b", **about)
    shards = Shards.open(tmp_path / "out")
    assert shards.symbols(shards.documents[0]).ravel().tolist() == [0, 255]


def test_a_long_document_comes_in_parts(tmp_path: Path) -> None:
    about: dict[str, Any] = {"split": "train", "source": "a", "sha256": ""}
    with ShardWriter(tmp_path / "out", spec=SPEC, preparation={}) as writer:
        parts = ([1, 2], [], [3])
        whole = writer.append((np.array(p, dtype=np.int64) for p in parts), id="a", **about)
        with pytest.raises(DataError, match=r"'b' has symbols 5\.\.256, expected 0\.\.255"):
            writer.append(iter([np.array([4]), np.array([5, 256])]), id="b", **about)
        with pytest.raises(DataError, match="'b' has no symbols"):
            writer.append(iter(()), id="b", **about)
        writer.append(np.array([6]), id="c", **about)
    shards = Shards.open(tmp_path / "out")
    assert whole.frames == 3
    assert [shards.symbols(d).ravel().tolist() for d in shards.documents] == [[1, 2, 3], [6]]


def test_only_shard_folders_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out, 3)  # an empty folder may be filled
    write(out, 7)  # and shards may be replaced
    assert Shards.open(out).documents[0].frames == 7
    for other in (tmp_path / "photos", tmp_path / "file"):
        other.mkdir() if other.name == "photos" else other.write_text("mine")
        if other.is_dir():
            (other / "a.jpg").write_text("mine")
        with pytest.raises(DataError, match="not a shard folder; it is left alone"):
            write(other, 3)
    assert (tmp_path / "photos" / "a.jpg").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"


def interrupted(out: Path, key: str | None) -> None:
    """Leaves a partial folder with the documents a = [1, 2] and b = [3]."""
    with ShardWriter(out, spec=SPEC, preparation={}, resume_key=key) as writer:
        writer.append(np.array([1, 2]), id="a", split="train", source="a", sha256="", trim=(0, 2))
        writer.append(np.array([3]), id="b", split="train", source="b", sha256="")
        raise KeyboardInterrupt


def test_nothing_appears_before_everything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 9)
    with pytest.raises(KeyboardInterrupt):
        interrupted(out, None)
    assert Shards.open(out).documents[0].frames == 9
    assert not (tmp_path / "out.partial").exists(), "what cannot be continued is not kept"
    with pytest.raises(DataError, match="no documents"):
        write(tmp_path / "none")
    assert not (tmp_path / "none").exists() and not (tmp_path / "none.partial").exists()


@pytest.mark.parametrize("cut", ["nothing", "journal line", "journal newline", "symbols", "extra symbols"])
def test_an_interrupted_write_continues(tmp_path: Path, cut: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        interrupted(out, "same")
    journal, tokens = (tmp_path / "out.partial" / name for name in ("documents.jsonl", "tokens.bin"))
    if cut == "journal line":
        journal.write_bytes(journal.read_bytes()[:-9])
    elif cut == "journal newline":
        journal.write_bytes(journal.read_bytes()[:-1])
    elif cut == "symbols":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif cut == "extra symbols":
        tokens.write_bytes(tokens.read_bytes() + b"\7\7")
    with ShardWriter(out, spec=SPEC, preparation={}, resume_key="same") as writer:
        done = [document.id for document in writer.documents]
        assert done == (["a", "b"] if cut in ("nothing", "extra symbols") else ["a"])
        if "b" not in done:
            writer.append(np.array([3]), id="b", split="train", source="b", sha256="")
        writer.append(np.array([4]), id="c", split="train", source="c", sha256="")
    shards = Shards.open(out)
    assert [shards.symbols(d).ravel().tolist() for d in shards.documents] == [[1, 2], [3], [4]]
    assert shards.documents[0].trim == (0, 2)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), (None, "a"), ("a", None), (None, None)])
def test_another_write_starts_anew(tmp_path: Path, first: str | None, second: str | None) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "out", first)
    with ShardWriter(tmp_path / "out", spec=SPEC, preparation={}, resume_key=second) as writer:
        assert writer.documents == []
        writer.append(np.array([9]), id="a", split="train", source="a", sha256="")
    shards = Shards.open(tmp_path / "out")
    assert [shards.symbols(d).ravel().tolist() for d in shards.documents] == [[9]]


def test_continuing_never_leaves_less_than_was_there(tmp_path: Path) -> None:
    """Killed again right after it began to continue: the journal still has every document."""
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "out", "same")
    journal = tmp_path / "out.partial" / "documents.jsonl"
    before = journal.read_bytes()
    inode = journal.stat().st_ino
    for _ in range(3):
        writer = ShardWriter(tmp_path / "out", spec=SPEC, preparation={}, resume_key="same")
        assert journal.read_bytes() == before and journal.stat().st_ino == inode
        assert len(writer.documents) == 2
        writer.abandon()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    """A second one says so and changes nothing, whether it would continue or start anew."""
    pytest.importorskip("fcntl")
    writer = ShardWriter(tmp_path / "out", spec=SPEC, preparation={}, resume_key="same")
    about: dict[str, Any] = {"split": "train", "source": "", "sha256": ""}
    writer.append(np.array([1, 2]), id="a", **about)
    for key in ("same", "other", None):
        with pytest.raises(DataError, match=r"out\.partial is being written by another process; wait"):
            ShardWriter(tmp_path / "out", spec=SPEC, preparation={}, resume_key=key)
    writer.append(np.array([3]), id="b", **about)
    writer.close()
    shards = Shards.open(tmp_path / "out")
    assert [shards.symbols(d).ravel().tolist() for d in shards.documents] == [[1, 2], [3]]
    write(tmp_path / "out", 5)  # nothing holds it any more


@pytest.mark.parametrize("limit", [0, 350, 850, 950])
def test_a_full_disk_is_named_and_continued_after(tmp_path: Path, limit: int) -> None:
    """Full at the head of the journal, at its lines, at symbols and at the index: never half a folder."""
    resource = pytest.importorskip("resource")
    arrays = [np.full(n, n % 256) for n in (300, 700, 900)]

    def fill(out: Path, key: str | None) -> None:
        with ShardWriter(out, spec=SPEC, preparation={}, resume_key=key) as writer:
            for n, symbols in list(enumerate(arrays))[len(writer.documents) :]:
                writer.append(symbols, id=f"{n}", split="train", source="", sha256="")

    for key in ("same", None):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        out = tmp_path / f"out-{key}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(DataError, match=r"partial cannot be written: .*; make room, then prepare"):
                fill(out, key)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not out.exists()
        fill(out, key)
        fill(tmp_path / "whole", key)
        for path in (tmp_path / "whole").iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes()


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("older", "renames"), [(False, 0), (True, 0), (True, 1)])
def test_an_interrupted_close_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool, renames: int
) -> None:
    """Killed before or between its renames: the finished symbols are put in place by the next writer."""
    out = tmp_path / "out"
    if older:
        write(out, 9)
    rename, done = Path.rename, []

    def stop(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(Killed):
        write(out, 7)
    monkeypatch.undo()
    assert out.exists() == (older and renames == 0)
    if not out.exists():
        with pytest.raises(DataError, match=r"run prepare again to finish .*out\.partial"):
            Shards.open(out)
    with pytest.raises(KeyboardInterrupt):
        interrupted(out, None)
    assert Shards.open(out).documents[0].frames == 7
    write(out, 5)
    assert Shards.open(out).documents[0].frames == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_deleted_by_half_is_not_put_in_place(tmp_path: Path) -> None:
    write(tmp_path / "out", 9)
    write(tmp_path / "out.partial", 7)
    (tmp_path / "out.partial" / "tokens.bin").write_bytes(b"")
    finish_interrupted(tmp_path / "out")
    assert Shards.open(tmp_path / "out").documents[0].frames == 9


def files(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(out.glob("tokens*"))}


@pytest.mark.parametrize("stop", [None, 1, 2, 3, 4, 5])
def test_symbols_lie_in_files_that_end_with_documents(tmp_path: Path, stop: int | None) -> None:
    """Written at once, or interrupted after `stop` documents and continued."""
    spec = replace(SPEC, modality="codes", vocab_size=300, symbols_per_frame=2, name="any")
    arrays = [np.full((n, 2), n) for n in (1, 2, 9, 1, 1, 5)]

    def append(writer: ShardWriter, end: int | None) -> None:
        for n, symbols in list(enumerate(arrays))[len(writer.documents) : end]:
            writer.append(symbols, id=f"{n}", split="train", source="", sha256="")

    def writer() -> ShardWriter:
        # Two frames a file: 4 bytes each.
        return ShardWriter(tmp_path / "out", spec=spec, preparation={}, resume_key="same", file_bytes=8)

    if stop is not None:
        first = writer()
        append(first, stop)
        first.abandon()
        last = max(first.folder.glob("tokens*"), key=lambda path: (len(path.name), path.name))
        last.write_bytes(last.read_bytes() + b"\7")  # of a document that was not finished
    with writer() as whole:
        append(whole, None)
    assert files(tmp_path / "out") == {
        "tokens-00001.bin": 36,
        "tokens-00002.bin": 8,
        "tokens-00003.bin": 20,
        "tokens.bin": 12,
    }
    shards = Shards.open(tmp_path / "out")
    for document, symbols in zip(shards.documents, arrays, strict=True):
        np.testing.assert_array_equal(shards.symbols(document), symbols)
        assert isinstance(shards.symbols(document), np.memmap)


def test_a_lost_file_of_many_is_named(tmp_path: Path) -> None:
    about: dict[str, Any] = {"split": "train", "source": "", "sha256": ""}
    with ShardWriter(tmp_path / "out", spec=SPEC, preparation={}, file_bytes=1) as writer:
        writer.append(np.array([1, 2]), id="a", **about)
        writer.append(np.array([3]), id="b", **about)
    edit(tmp_path / "out", files=[1, 2])
    with pytest.raises(DataError, match="damaged .its files do not end with documents"):
        Shards.open(tmp_path / "out")
    edit(tmp_path / "out", files=[2, 1])
    (tmp_path / "out" / "tokens-00001.bin").unlink()
    with pytest.raises(DataError, match=r"tokens-00001.bin has no bytes, its index needs 1"):
        Shards.open(tmp_path / "out")


def test_folders_of_one_file_and_an_older_index_open(tmp_path: Path) -> None:
    arrays = write(tmp_path / "out", 4, 5)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index.pop("files") == [9]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    shards = Shards.open(tmp_path / "out")
    np.testing.assert_array_equal(shards.symbols(shards.documents[1]), arrays[1])
