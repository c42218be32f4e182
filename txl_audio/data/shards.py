"""Symbols on disk: a shard folder is `tokens.bin` (one memory-mapped array) and `index.json`.

Waveform shards hold the flat stream of samples, one symbol per frame; a model regroups it with
`TokenSpec.framed`. Codes and text are stored by the same two files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from txl_audio.runtime import sync_folder
from txl_audio.tokens import DataError, SpecError, TokenSpec, TxlError

VERSION = 1
TOKENS_FILE = "tokens.bin"
INDEX_FILE = "index.json"
_JOURNAL_FILE = "documents.jsonl"


@dataclass(frozen=True)
class Document:
    """One recording or text of a shard folder.

    Attributes:
        id: unique in the folder.
        offset: first frame in `tokens.bin`.
        frames: number of frames, at least 1.
        split: `train`, `val`, `test` or another name.
        source: path of the source file, relative to what was prepared.
        sha256: of the source file's bytes.
        sample_rate_hz: of the source file, 0 for text.
        gain: linear factor that was applied.
        trim: [start, end) samples that were kept, at the prepared rate; None where not trimmed.
        clipped: samples beyond [-1, 1] after the gain.
        text: what is said in a recording; empty where that is not known.
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

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Document:
        """Raises KeyError or TypeError where `value` is no document."""
        known = {f.name for f in fields(cls)}
        if set(value) | {"text"} != known:
            raise KeyError(f"document fields {sorted(value)}, expected {sorted(known)}")
        trim = value["trim"]
        return cls(**{**value, "trim": None if trim is None else (int(trim[0]), int(trim[1]))})


def symbol_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and uint32 (little-endian) that holds V symbols."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class Shards:
    """A shard folder, opened for reading. Made by `Shards.open`."""

    def __init__(
        self,
        *,
        path: Path,
        spec: TokenSpec,
        preparation: dict[str, Any],
        documents: tuple[Document, ...],
        symbols: np.ndarray,
    ) -> None:
        self.path = path
        self.spec = spec
        self.preparation = preparation
        self.documents = documents
        self._symbols = symbols

    @classmethod
    def open(cls, path: str | Path) -> Shards:
        """Opens a folder without reading its symbols.

        Raises DataError for a missing folder, a missing, damaged or newer index and a `tokens.bin`
        of the wrong size. Symbols are not scanned.
        """
        path = Path(path)
        index_path, tokens_path = path / INDEX_FILE, path / TOKENS_FILE
        for needed in (index_path, tokens_path):
            if not needed.is_file():
                partial = _beside(path, ".partial")
                advice = (
                    f"run prepare again to finish {partial}"
                    if partial.is_dir()
                    else "write them with prepare"
                )
                raise DataError(f"no shards at {path}: {needed.name} is missing; {advice}")
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
            frames = _contiguous(documents)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise DataError(f"{index_path} is damaged ({error}); prepare the data again") from error
        dtype = symbol_dtype(spec.vocab_size)
        expected = frames * spec.symbols_per_frame * dtype.itemsize
        size = tokens_path.stat().st_size
        if size != expected:
            raise DataError(
                f"{tokens_path} has {size} bytes, its index needs {expected}; prepare the data again"
            )
        symbols = np.memmap(tokens_path, dtype=dtype, mode="r", shape=(frames, spec.symbols_per_frame))
        return cls(path=path, spec=spec, preparation=preparation, documents=documents, symbols=symbols)

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
        """[frames, K] read-only view of the memory-mapped file."""
        return self._symbols[document.offset : document.offset + document.frames]


def _contiguous(documents: tuple[Document, ...]) -> int:
    """Total frames of documents that lie one after another; raises ValueError where they do not."""
    if not documents:
        raise ValueError("no documents")
    end = 0
    for document in documents:
        if document.offset != end or document.frames < 1:
            raise ValueError(f"document {document.id!r} lies at {document.offset}, expected {end}")
        end += document.frames
    return end


class ShardWriter:
    """Writes a shard folder, one document at a time, in bounded memory.

    Everything goes to a folder beside the target, `OUT.partial`; `close` syncs it and renames it.
    As a context manager it closes on success; after an exception it leaves the partial folder, where
    it can be continued, else removes it.
    What an interrupted `close` left behind is put in place by the next writer.

    Args:
        out: target folder; an older shard folder there is replaced on `close`.
        spec: what a symbol is.
        preparation: how the data were made, any JSON.
        resume_key: a partial folder left by a writer with the same key, spec and preparation is
            continued (see `documents`); without a key, or with another, it is started anew.

    Raises DataError where `out` is anything but a shard folder, an empty folder or nothing.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        spec: TokenSpec,
        preparation: Mapping[str, Any],
        resume_key: str | None = None,
    ) -> None:
        self.out = Path(out)
        self.folder = _beside(self.out, ".partial")
        self.spec = spec
        self.documents: list[Document] = []
        self._preparation = dict(preparation)
        self._resume_key = resume_key
        self._dtype = symbol_dtype(spec.vocab_size)
        finish_interrupted(self.out)
        _require_replaceable(self.out)
        header = {"key": resume_key, "spec": spec.to_json(), "preparation": self._preparation}
        # Through JSON, so that tuples and lists compare equal.
        header = json.loads(json.dumps(header))
        journal_bytes = 0
        if resume_key is not None:
            self.documents, journal_bytes = self._finished(header)
        frame_bytes = spec.symbols_per_frame * self._dtype.itemsize
        if self.documents:
            # The journal follows the symbols, so symbols of an unfinished document may stand last.
            os.truncate(self.folder / TOKENS_FILE, self._frames() * frame_bytes)
            os.truncate(self.folder / _JOURNAL_FILE, journal_bytes)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        self._ids = {document.id for document in self.documents}
        self._tokens = open(self.folder / TOKENS_FILE, "ab")  # noqa: SIM115 - closed by close()
        self._journal = open(self.folder / _JOURNAL_FILE, "a", encoding="utf-8")  # noqa: SIM115
        if not self.documents:
            self._journal.write(json.dumps(header) + "\n")
            self._journal.flush()

    def append(
        self,
        symbols: np.ndarray | Iterable[np.ndarray],
        *,
        id: str,
        split: str,
        source: str,
        sha256: str,
        sample_rate_hz: int = 0,
        gain: float = 1.0,
        trim: tuple[int, int] | None = None,
        clipped: int = 0,
        text: str = "",
    ) -> Document:
        """Adds a document: symbols [frames, K], or [frames] where K is 1, of any integer type.

        A long document may come as an iterable of such arrays, its parts in order. Raises DataError
        for no frames, a symbol outside the vocabulary and an id used before, SpecError for another
        shape; then nothing was added.
        """
        if id in self._ids:
            raise DataError(f"two documents are called {id!r}; give each its own id")
        begin = self._frames()
        try:
            frames = sum(self._write(part, id) for part in _parts(symbols))
            if frames == 0:
                raise DataError(f"document {id!r} has no symbols; leave it out")
        except BaseException:
            self._tokens.truncate(begin * self.spec.symbols_per_frame * self._dtype.itemsize)
            raise
        document = Document(
            id=id,
            offset=begin,
            frames=frames,
            split=split,
            source=source,
            sha256=sha256,
            sample_rate_hz=sample_rate_hz,
            gain=gain,
            trim=trim,
            clipped=clipped,
            text=text,
        )
        self._tokens.flush()
        self._journal.write(json.dumps(asdict(document)) + "\n")
        self._journal.flush()
        self.documents.append(document)
        self._ids.add(id)
        return document

    def _write(self, symbols: np.ndarray, id: str) -> int:
        """Writes a part of document `id`; returns its frames."""
        k = self.spec.symbols_per_frame
        symbols = np.asarray(symbols)
        if symbols.ndim == 1 and k == 1:
            symbols = symbols[:, None]
        if symbols.ndim != 2 or symbols.shape[1] != k or symbols.dtype.kind not in "iu":
            raise SpecError(
                f"document {id!r}: expected integers of shape [frames, {k}], "
                f"got {symbols.dtype} of shape {list(symbols.shape)}"
            )
        if len(symbols) == 0:
            return 0
        low, high = int(symbols.min()), int(symbols.max())
        if low < 0 or high >= self.spec.vocab_size:
            raise DataError(
                f"document {id!r} has symbols {low}..{high}, expected 0..{self.spec.vocab_size - 1}"
            )
        self._tokens.write(np.ascontiguousarray(symbols, dtype=self._dtype).data)
        return len(symbols)

    def close(self) -> None:
        """Finishes the folder and moves it to its place. Raises DataError where it has no documents."""
        if not self.documents:
            self.abandon()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(f"nothing to write to {self.out}: no documents")
        self.abandon()
        index = {
            "version": VERSION,
            "spec": self.spec.to_json(),
            "preparation": self._preparation,
            "documents": [asdict(document) for document in self.documents],
        }
        with open(self.folder / INDEX_FILE, "w", encoding="utf-8") as file:
            json.dump(index, file, indent=1)
            file.write("\n")
        for path in self.folder.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        # From here on the folder counts as complete: see finish_interrupted.
        (self.folder / _JOURNAL_FILE).unlink()
        sync_folder(self.folder)
        _put_in_place(self.folder, self.out)

    def abandon(self) -> None:
        """Closes the files and leaves the partial folder, to be continued or started anew."""
        self._tokens.close()
        self._journal.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self.abandon()
        if self._resume_key is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _frames(self) -> int:
        return self.documents[-1].offset + self.documents[-1].frames if self.documents else 0

    def _finished(self, header: dict[str, Any]) -> tuple[list[Document], int]:
        """Documents of the partial folder that are complete, and how many bytes of its journal they take.

        None where it is another's or damaged.
        """
        finished: list[Document] = []
        end = 0
        journal, tokens = self.folder / _JOURNAL_FILE, self.folder / TOKENS_FILE
        if not (journal.is_file() and tokens.is_file()):
            return finished, end
        lines = _json_lines(journal)
        if next(lines, (None, 0))[0] != header:
            return finished, end
        available = tokens.stat().st_size // (self.spec.symbols_per_frame * self._dtype.itemsize)
        for line, line_end in lines:
            document = Document.from_json(line)
            if document.offset + document.frames > available:
                break
            finished.append(document)
            end = line_end
        return finished, end


def _parts(symbols: np.ndarray | Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    return [symbols] if isinstance(symbols, np.ndarray) else symbols


def finish_interrupted(out: Path) -> None:
    """Moves a complete `OUT.partial` to `out`, where a writer was stopped between its last steps.

    Does nothing where there is none. Raises DataError where `out` may not be replaced.
    """
    folder = _beside(out, ".partial")
    if (folder / _JOURNAL_FILE).exists() or not (folder / INDEX_FILE).is_file():
        return
    try:
        Shards.open(folder)
    except TxlError:
        return  # half deleted; a writer starts it anew
    _put_in_place(folder, out)


def _put_in_place(folder: Path, out: Path) -> None:
    _require_replaceable(out)
    replaced = _beside(out, ".replaced")
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
    folder.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _beside(out: Path, suffix: str) -> Path:
    return out.parent / (out.name + suffix)


def _json_lines(path: Path) -> Iterator[tuple[Any, int]]:
    """Lines of a journal and the byte each ends at, up to the first that was cut off."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            try:
                value = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n"):
                return  # complete by chance, but nothing may be written after it
            yield value, end


def _require_replaceable(out: Path) -> None:
    if not out.exists():
        return
    is_shards = (out / INDEX_FILE).is_file() and (out / TOKENS_FILE).is_file()
    if not out.is_dir() or not (is_shards or not any(out.iterdir())):
        raise DataError(f"{out} exists and is not a shard folder; it is left alone, choose another target")
