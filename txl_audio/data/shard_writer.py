"""Writing shard folders: in bounded memory, never half, and going on where an interruption stopped."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from txl_audio.data.shards import (
    INDEX_FILE,
    TOKENS_FILE,
    VERSION,
    Document,
    Shards,
    beside,
    file_name,
    symbol_dtype,
)
from txl_audio.runtime import sync_folder
from txl_audio.tokens import DataError, SpecError, TokenSpec, TxlError

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None

FILE_BYTES = 1 << 30
_JOURNAL_FILE = "documents.jsonl"


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
        may_be_empty: whether `close` accepts no documents, as part of a larger set may have.
        file_bytes: a file that has so many ends, and the next document begins another.

    Raises DataError where `out` is anything but a shard folder, an empty folder or nothing, where another
    process writes it, and where the disk is full.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        spec: TokenSpec,
        preparation: Mapping[str, Any],
        resume_key: str | None = None,
        may_be_empty: bool = False,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.out = Path(out)
        self.folder = beside(self.out, ".partial")
        self.spec = spec
        self.documents: list[Document] = []
        self._preparation = dict(preparation)
        self._resume_key = resume_key
        self._may_be_empty, self._file_bytes = may_be_empty, file_bytes
        self._dtype = symbol_dtype(spec.vocab_size)
        self._frame_bytes = spec.symbols_per_frame * self._dtype.itemsize
        self._files = [0]
        """Frames of every file."""
        finish_interrupted(self.out)
        _require_replaceable(self.out)
        header = {"key": resume_key, "spec": spec.to_json(), "preparation": self._preparation}
        header |= {"file_bytes": file_bytes}
        # Through JSON, so that tuples and lists compare equal.
        header = json.loads(json.dumps(header))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _hold(self.folder)
        try:
            with self._full_disk_named():
                self._begin(header)
        except BaseException:
            self._release()
            raise

    def _begin(self, header: dict[str, Any]) -> None:
        """Opens the files: after the documents of a partial folder that can be continued, else anew."""
        journal_bytes = 0
        if self._resume_key is not None:
            self.documents, journal_bytes = self._finished(header)
        if self.documents:
            # The journal follows the symbols, so symbols of an unfinished document may stand last.
            os.truncate(self.folder / file_name(len(self._files) - 1), self._files[-1] * self._frame_bytes)
            for path in self.folder.glob("tokens-*.bin"):
                if path.name >= file_name(len(self._files)):
                    path.unlink()
            os.truncate(self.folder / _JOURNAL_FILE, journal_bytes)
        else:
            for path in self.folder.iterdir():  # not the folder, which is held
                path.unlink()
        self._ids = {document.id for document in self.documents}
        self._tokens = self._open_last()
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
        speaker: str = "",
    ) -> Document:
        """Adds a document: symbols [frames, K], or [frames] where K is 1, of any integer type.

        A long document may come as an iterable of such arrays, its parts in order. Raises DataError
        for no frames, a symbol outside the vocabulary and an id used before, SpecError for another
        shape; then nothing was added.
        """
        if id in self._ids:
            raise DataError(f"two documents are called {id!r}; give each its own id")
        begin = self._frames()
        if self._is_full():
            self._tokens.close()
            self._files.append(0)
            self._tokens = self._open_last()
        try:
            frames = sum(self._write(part, id) for part in _parts(symbols))
            if frames == 0:
                raise DataError(f"document {id!r} has no symbols; leave it out")
        except BaseException:
            self._tokens.truncate(self._files[-1] * self._frame_bytes)
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
            speaker=speaker,
        )
        self._files[-1] += frames
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
        try:
            self._close_files()
            if not (self.documents or self._may_be_empty):
                shutil.rmtree(self.folder, ignore_errors=True)
                raise DataError(f"nothing to write to {self.out}: no documents")
            self._finish()
        finally:
            self._release()

    def _finish(self) -> None:
        index = {
            "version": VERSION,
            "spec": self.spec.to_json(),
            "preparation": self._preparation,
            "files": self._files,
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
        try:
            self._close_files()
        finally:
            self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None  # once: its number may be another file's by then
        _let_go(lock)

    def _close_files(self) -> None:
        try:
            self._tokens.close()
        finally:
            self._journal.close()

    @contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        """What the system says of a full disk names no file."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DataError(
                f"{self.folder} cannot be written: {error}; make room, then prepare again"
            ) from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._full_disk_named():
            if error is None:
                self.close()
                return
            with suppress(OSError):  # of what could not be written; complete documents have been
                self._close_files()
            if self._resume_key is None:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._release()
            if isinstance(error, OSError):
                raise error

    def _frames(self) -> int:
        return self.documents[-1].offset + self.documents[-1].frames if self.documents else 0

    def _is_full(self) -> bool:
        return self._files[-1] * self._frame_bytes >= self._file_bytes

    def _open_last(self) -> IO[bytes]:
        return open(self.folder / file_name(len(self._files) - 1), "ab")

    def _finished(self, header: dict[str, Any]) -> tuple[list[Document], int]:
        """Documents of the partial folder that are complete, and how many bytes of its journal they take.

        None where it is another's or damaged. Counts the frames of its files.
        """
        finished: list[Document] = []
        end = 0
        journal = self.folder / _JOURNAL_FILE
        if not journal.is_file():
            return finished, end
        lines = _json_lines(journal)
        if next(lines, (None, 0))[0] != header:
            return finished, end
        for line, line_end in lines:
            document = Document.from_json(line)
            if self._is_full():
                self._files.append(0)
            file = self.folder / file_name(len(self._files) - 1)
            needed = (self._files[-1] + document.frames) * self._frame_bytes
            if not file.is_file() or file.stat().st_size < needed:
                break
            self._files[-1] += document.frames
            finished.append(document)
            end = line_end
        if finished and self._files[-1] == 0:
            self._files.pop()
        return finished, end


def _parts(symbols: np.ndarray | Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    return [symbols] if isinstance(symbols, np.ndarray) else symbols


def finish_interrupted(out: Path) -> None:
    """Moves a complete `OUT.partial` to `out`, where a writer was stopped between its last steps.

    Does nothing where there is none. Raises DataError where `out` may not be replaced.
    """
    folder = beside(out, ".partial")
    if (folder / _JOURNAL_FILE).exists() or not (folder / INDEX_FILE).is_file():
        return
    lock = _hold(folder)
    try:
        Shards.open(folder)
    except TxlError:
        pass  # half deleted; a writer starts it anew
    else:
        _put_in_place(folder, out)
    finally:
        _let_go(lock)


def _hold(folder: Path) -> int | None:
    """Holds a folder for this process until `_let_go`, or until it ends; None where there are no locks.

    The folder itself is locked, so that nothing is left in it. Raises DataError where another holds it.
    """
    if fcntl is None:
        return None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = folder.exists() and os.path.samestat(os.fstat(lock), folder.stat())
    except BlockingIOError:
        held = False
    except OSError:
        os.close(lock)
        return None  # a file system without locks
    if not held:  # or it was put in place just now
        os.close(lock)
        raise DataError(
            f"{folder} is being written by another process; wait for it, stop it, or choose another --out"
        )
    return lock


def _let_go(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _put_in_place(folder: Path, out: Path) -> None:
    _require_replaceable(out)
    replaced = beside(out, ".replaced")
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
    folder.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


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
