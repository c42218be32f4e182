"""Shards behind a URL: the same symbols, batches and positions as on disk, in bounded reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from txl_audio import recipe
from txl_audio.codecs import MuLawCodec
from txl_audio.data import remote
from txl_audio.data.shard_writer import ShardWriter
from txl_audio.data.shards import Shards
from txl_audio.data.stream import TokenStream
from txl_audio.tokens import DataError

SPEC = MuLawCodec().spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path / "data", spec=SPEC, preparation={}, file_bytes=2000) as writer:
        for i, n in enumerate((700, 900, 1, 1500, 40, 333)):
            writer.append(rng.integers(0, 256, n), id=f"{i}", split="train", source="", sha256="")
    assert (tmp_path / "data" / "tokens-00001.bin").is_file()
    return tmp_path / "data"


@pytest.fixture(params=["memory", "file"])
def url(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "WINDOW_BYTES", 64)
    if request.param == "file":
        yield f"file://{folder}"
        return
    fs = fsspec.filesystem("memory")
    fs.put(str(folder), "/bucket/data", recursive=True)
    yield "memory://bucket/data"
    fs.rm("/bucket", recursive=True)


def batches(stream: TokenStream, n: int) -> list[torch.Tensor]:
    return [torch.cat([b.inputs, b.targets]) for _, b in zip(range(n), stream, strict=False)]


def stream_of(path: Any, seed: int | None = 3) -> TokenStream:
    documents = recipe.SplitDocuments(Shards.open(path), "train")
    return TokenStream(documents, SPEC.framed(4), lanes=3, segment_len=5, seed=seed, epochs=2)


def test_documents_are_those_on_disk(folder: Path, url: str) -> None:
    here, there = Shards.open(folder), Shards.open(url)
    assert (there.documents, there.spec) == (here.documents, here.spec)
    for document in here.documents:
        np.testing.assert_array_equal(there.symbols(document), here.symbols(document))


def test_batches_are_those_on_disk_and_resume(folder: Path, url: str) -> None:
    expected, found = batches(stream_of(folder), 60), batches(stream := stream_of(url), 20)
    again = stream_of(url)
    again.load_state_dict(stream.state_dict())
    found += batches(again, 40)
    assert len(found) == len(expected) == 60
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_reads_are_ahead_and_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    original = remote.RemoteFolder._read

    def spy(self: remote.RemoteFolder, name: str, begin: int, end: int) -> bytes:
        read.append((begin, end))
        return original(self, name, begin, end)

    monkeypatch.setattr(remote.RemoteFolder, "_read", spy)
    shards = Shards.open(url)
    stream = TokenStream(recipe.SplitDocuments(shards, "train"), SPEC, lanes=1, segment_len=7)
    assert read == [], "lengths come from the index"
    next(stream)
    line = stream._lines[0]
    assert isinstance(line, remote.RemoteLine)
    line._windows[1].result()
    assert sorted(read) == [(0, 64), (64, 128)], "the window that is used, and the next"
    for _ in range(60):
        next(stream)
        assert len(line._windows) <= 3
    assert len(set(read)) == len(read), "nothing is read twice"
    assert max(end - begin for begin, end in read) == 64


def test_what_is_wrong_behind_a_url_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no shards at memory://nowhere: index.json is missing"):
        Shards.open("memory://nowhere")
    with pytest.raises(DataError, match=r"nosuch://a cannot be read .*txl-audio\[remote\]"):
        Shards.open("nosuch://a")
    shards = Shards.open(f"file://{folder}")
    tokens = folder / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-600])
    with pytest.raises(DataError, match=r"tokens.bin ends \d+ bytes early"):
        shards.symbols(shards.documents[3])
    with pytest.raises(DataError, match=r"tokens.bin has \d+ bytes, its index needs"):
        Shards.open(f"file://{folder}")
    tokens.unlink()
    with pytest.raises(DataError, match=r"tokens.bin has no bytes"):
        Shards.open(f"file://{folder}")


@pytest.mark.parametrize("failures", [2, 9])
def test_a_server_that_fails_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    shards = Shards.open(f"file://{folder}")
    fs: Any = shards._files[0]._folder._fs  # pyright: ignore
    read, left, waits = fs.cat_file, [OSError("503 Service Unavailable")] * failures, []

    def cat_file(*args: Any, **options: Any) -> bytes:
        if left:
            raise left.pop()
        return read(*args, **options)

    monkeypatch.setattr(fs, "cat_file", cat_file)
    monkeypatch.setattr("time.sleep", waits.append)
    document = shards.documents[0]
    if failures > len(remote._WAITS_S):
        with pytest.raises(DataError, match=r"tokens.bin cannot be read: 503 Service Unavailable"):
            shards.symbols(document)
        return
    np.testing.assert_array_equal(shards.symbols(document), Shards.open(folder).symbols(document))
    assert waits == list(remote._WAITS_S[:failures])
