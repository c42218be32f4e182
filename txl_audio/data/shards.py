"""Symbols on disk: a shard folder is `index.json` and memory-mapped files of symbols, in order.

The first file is `tokens.bin`; the next, `tokens-00001.bin` and so on, begin where the one before has
reached about 1 GiB. No document lies in two files.

Waveform shards hold the flat stream of samples, one symbol per frame; a model regroups it with
`TokenSpec.framed`. Codes and text are stored in the same way.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_audio.data.remote import RemoteFolder, RemoteLine, is_url
from txl_audio.data.text import VOCABULARY_FILE
from txl_audio.tokens import DataError, SpecError, TokenSpec

VERSION = 1
TOKENS_FILE = "tokens.bin"
INDEX_FILE = "index.json"


def file_name(number: int) -> str:
    """Name of a folder's file of symbols, counted from 0."""
    return f"tokens-{number:05d}.bin" if number else TOKENS_FILE


def beside(out: Path, suffix: str) -> Path:
    """A folder next to `out` that belongs to it."""
    return out.parent / (out.name + suffix)


@dataclass(frozen=True)
class Document:
    """One recording or text of a shard folder.

    Attributes:
        id: unique in the folder.
        offset: first frame, counted over all files of the folder.
        frames: number of frames, at least 1.
        split: `train`, `val`, `test` or another name.
        source: path of the source file, relative to what was prepared.
        sha256: of the source file's bytes, or those of its part; of a cut, of its samples.
        sample_rate_hz: of the source file, 0 for text.
        gain: linear factor that was applied.
        trim: [start, end) samples that were kept, at the prepared rate; None where not trimmed.
        clipped: samples beyond [-1, 1] after the gain.
        text: what is said in a recording; empty where that is not known.
        speaker: who says it; empty where that is not known.
    """

    id: str
    offset: int
    frames: int
    split: str
    source: str
    sha256: str
    sample_rate_hz: int = 0
    gain: float = 1.0
    trim: tuple[int, int] | None = None
    clipped: int = 0
    text: str = ""
    speaker: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Document:
        """Raises KeyError or TypeError where `value` is no document."""
        known = {f.name for f in fields(cls)}
        if set(value) | {"text", "speaker"} != known:
            raise KeyError(f"document fields {sorted(value)}, expected {sorted(known)}")
        trim = value["trim"]
        return cls(**{**value, "trim": None if trim is None else (int(trim[0]), int(trim[1]))})


def symbol_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and uint32 (little-endian) that holds V symbols."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class Share(NamedTuple):
    """One folder of a mix: its frames, counted over all of them, and how much is read of it."""

    begin: int
    end: int
    weight: float
    path: str


class Shards:
    """A shard folder, opened for reading. Made by `Shards.open`."""

    def __init__(
        self,
        *,
        path: Path,
        spec: TokenSpec,
        preparation: dict[str, Any],
        documents: tuple[Document, ...],
        files: Sequence[np.ndarray | RemoteLine],
        mix: Sequence[Share] = (),
    ) -> None:
        self.path = path
        self.spec = spec
        self.preparation = preparation
        self.documents = documents
        self.mix = mix
        """Where this is several folders: what belongs to each, in order."""
        self._files = files
        # Arrays [frames, K] of files on disk, lines [frames x K] of those behind a URL.
        symbols = [f.size if isinstance(f, np.ndarray) else len(f) for f in files]
        self._begins = [0, *accumulate(n // spec.symbols_per_frame for n in symbols)]

    @classmethod
    def open(cls, path: str | Path) -> Shards:
        """Opens a folder on disk or behind a URL (see `data.remote`) without reading its symbols.

        Of a URL, `path` is a temporary folder with the small files.

        Raises DataError for a missing folder, a missing, damaged or newer index and a file of symbols
        that is missing or of the wrong size. Symbols are not scanned.
        """
        remote, origin = None, str(path)
        if is_url(path):
            remote = RemoteFolder(str(path).rstrip("/"), (INDEX_FILE, VOCABULARY_FILE))
            path = remote.small_files
        path = Path(path)
        index_path = path / INDEX_FILE
        for needed in (index_path, path / TOKENS_FILE):
            if not needed.is_file() and (remote is None or needed == index_path):
                partial = beside(path, ".partial")
                advice = (
                    f"run prepare again to finish {partial}"
                    if partial.is_dir()
                    else "write them with prepare"
                )
                raise DataError(f"no shards at {origin}: {needed.name} is missing; {advice}")
        try:
            index = json.loads(index_path.read_text(encoding="utf-8"))
            version = index["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{index_path} is damaged ({error}); prepare the data again") from error
        if version != VERSION:
            raise DataError(
                f"{index_path} has version {version!r}, expected {VERSION}; prepare the data again"
            )
        try:
            spec = TokenSpec.from_json(index["spec"], origin=str(index_path))
            preparation = dict(index["preparation"])
            documents = tuple(Document.from_json(item) for item in index["documents"])
            files = index.get("files")
            frames = _contiguous(documents, may_be_empty=files == [0])
            files = [frames] if files is None else [int(n) for n in files]
            if not {0, *accumulate(files)} <= {0, *(d.offset + d.frames for d in documents)}:
                raise ValueError("its files do not end with documents")
            if sum(files) != frames:
                raise ValueError(f"its files have {sum(files)} frames, its documents {frames}")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise DataError(f"{index_path} is damaged ({error}); prepare the data again") from error
        symbols = [
            _mapped(path / file_name(i), spec, n) if remote is None else _line(remote, file_name(i), spec, n)
            for i, n in enumerate(files)
        ]
        return cls(path=path, spec=spec, preparation=preparation, documents=documents, files=symbols)

    @classmethod
    def mixed(cls, folders: Sequence[tuple[str | Path, float]]) -> Shards:
        """Several folders, with how much is read of each (see `TokenStream`), as one.

        `preparation` has what they have in common. Raises as `open`; SpecError naming two folders whose
        symbols differ, DataError where their vocabularies do.
        """
        opened = [cls.open(path) for path, _ in folders]
        first, documents, shares = opened[0], [], []
        begin = 0
        for (path, weight), shards in zip(folders, opened, strict=True):
            shards.spec.require(first.spec, here=f"the data {path}", there=f"the data {folders[0][0]}")
            names = [shards.path / VOCABULARY_FILE, first.path / VOCABULARY_FILE]
            said = [name.read_bytes() if name.is_file() else b"" for name in names]
            if said[0] != said[1]:
                raise DataError(
                    f"{path} and {folders[0][0]} have different {VOCABULARY_FILE}; prepare them as one set, "
                    "so that a symbol means the same in both"
                )
            documents += [replace(d, offset=d.offset + begin) for d in shards.documents]
            end = begin + shards._begins[-1]
            shares.append(Share(begin, end, weight, str(path)))
            begin = end
        common = {
            key: value
            for key, value in first.preparation.items()
            if all(shards.preparation.get(key) == value for shards in opened)
        }
        return cls(
            path=first.path,
            spec=first.spec,
            preparation=common | {"mix": [[share.path, share.weight] for share in shares]},
            documents=tuple(documents),
            files=[file for shards in opened for file in shards._files],
            mix=shares,
        )

    @property
    def splits(self) -> dict[str, int]:
        """Documents per split, in order of appearance."""
        counts: dict[str, int] = {}
        for document in self.documents:
            counts[document.split] = counts.get(document.split, 0) + 1
        return counts

    def of_split(self, name: str) -> tuple[Document, ...]:
        """Documents of one split, in order. Raises DataError listing the splits there are."""
        found = tuple(document for document in self.documents if document.split == name)
        if not found:
            known = ", ".join(f"{split} ({count})" for split, count in self.splits.items())
            raise DataError(f"{self.path} has no split {name!r}; it has {known}")
        return found

    def symbols(self, document: Document) -> np.ndarray:
        """[frames, K]: a read-only view of a memory-mapped file, or all of it read from its URL."""
        line = self.line(document)
        symbols = line if isinstance(line, np.ndarray) else line[:]
        return symbols.reshape(-1, self.spec.symbols_per_frame)

    def line(self, document: Document) -> np.ndarray | RemoteLine:
        """The same as one line [frames x K] to be read by slices."""
        number = bisect_right(self._begins, document.offset) - 1
        begin, k, file = (
            document.offset - self._begins[number],
            self.spec.symbols_per_frame,
            self._files[number],
        )
        if isinstance(file, RemoteLine):
            return file.part(begin * k, document.frames * k)
        return file[begin : begin + document.frames].reshape(-1)


def _mapped(path: Path, spec: TokenSpec, frames: int) -> np.ndarray:
    """The symbols [frames, K] of one file, not read. Raises DataError for a missing or another file."""
    dtype = symbol_dtype(spec.vocab_size)
    expected = frames * spec.symbols_per_frame * dtype.itemsize
    size = path.stat().st_size if path.is_file() else "no"
    if size != expected:
        raise DataError(f"{path} has {size} bytes, its index needs {expected}; prepare the data again")
    shape = (frames, spec.symbols_per_frame)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape) if frames else np.empty(shape, dtype)


def _line(remote: RemoteFolder, name: str, spec: TokenSpec, frames: int) -> RemoteLine:
    """The same of a file behind a URL."""
    dtype = symbol_dtype(spec.vocab_size)
    line = remote.line(name, 0, frames * spec.symbols_per_frame, dtype)
    size = remote.size(name)
    if size != len(line) * dtype.itemsize:
        raise DataError(
            f"{remote.url}/{name} has {'no' if size is None else size} bytes, its index needs "
            f"{len(line) * dtype.itemsize}; copy the folder there again"
        )
    return line


def _contiguous(documents: tuple[Document, ...], *, may_be_empty: bool) -> int:
    """Total frames of documents that lie one after another; raises ValueError where they do not."""
    if not (documents or may_be_empty):
        raise ValueError("no documents")
    end = 0
    for document in documents:
        if document.offset != end or document.frames < 1:
            raise ValueError(f"document {document.id!r} lies at {document.offset}, expected {end}")
        end += document.frames
    return end
