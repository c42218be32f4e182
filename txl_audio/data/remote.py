"""Shard folders that lie behind a URL, read through fsspec: s3://, gs://, http://, memory:// and others.

Small files are copied when a folder is opened. Symbols are read in windows: while one is used, the next of
the same document is on its way, so that memory is bounded by a few windows for every lane.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from txl_audio.tokens import DataError

WINDOW_BYTES = 1 << 20
_KEPT = 2
"""Windows behind the newest: a frame begins before the place that a segment goes on at."""

_WAITS_S = (1.0, 4.0, 16.0)
"""Before each further try of a read that failed: servers restart, and a training has read for days."""


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


class RemoteFolder:
    """A folder behind a URL. `small_files` is a temporary copy of those that are not symbols.

    Raises DataError where fsspec, or its package for this kind of URL, is missing, or nothing can be read.
    """

    def __init__(self, url: str, names: tuple[str, ...]) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{url} cannot be read ({error}); pip install 'txl-audio[remote]' and what fsspec needs for "
                "such URLs, such as s3fs"
            ) from error
        self.url, self._copy = url, TemporaryDirectory(prefix="txl_audio-")
        self.small_files = Path(self._copy.name)
        self._readers = ThreadPoolExecutor(8, thread_name_prefix="remote-shards")
        for name in names:
            try:
                (self.small_files / name).write_bytes(self._fs.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                continue  # which are needed is for the caller to say
            except Exception as error:  # each file system has its own
                raise DataError(f"{url}/{name} cannot be read: {error}") from error

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        try:
            return int(self._fs.size(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise DataError(f"{self.url}/{name} cannot be read: {error}") from error

    def line(self, name: str, begin: int, length: int, dtype: np.dtype) -> RemoteLine:
        """Symbols [begin, begin + length) of a file, none of them read yet."""
        return RemoteLine(self, name, begin, length, dtype)

    def fetch(self, name: str, begin: int, end: int) -> Future[bytes]:
        """Bytes [begin, end) of a file, on their way."""
        return self._readers.submit(self._read, name, begin, end)

    def _read(self, name: str, begin: int, end: int) -> bytes:
        data = self._tried(name, begin, end)
        if len(data) != end - begin:
            raise DataError(
                f"{self.url}/{name} ends {end - begin - len(data)} bytes early; was it "
                "replaced while it is read?"
            )
        return data

    def _tried(self, name: str, begin: int, end: int) -> bytes:
        waits = iter(_WAITS_S)
        while True:
            try:
                return self._fs.cat_file(f"{self._root}/{name}", start=begin, end=end)
            except Exception as error:
                wait = next(waits, None)
                if wait is None or isinstance(error, (FileNotFoundError, PermissionError)):
                    raise DataError(f"{self.url}/{name} cannot be read: {error}") from error
            time.sleep(wait)


class RemoteLine:
    """Symbols [N] behind a URL, read by slices. What is read in order has been fetched before."""

    def __init__(self, folder: RemoteFolder, name: str, begin: int, length: int, dtype: np.dtype) -> None:
        self._folder, self._name = folder, name
        self._begin, self._length, self.dtype = begin, length, dtype
        self._window = max(1, WINDOW_BYTES // dtype.itemsize)
        self._windows: dict[int, Future[bytes]] = {}

    def part(self, begin: int, length: int) -> RemoteLine:
        """A line of `length` symbols of this one, with windows of its own."""
        return RemoteLine(self._folder, self._name, self._begin + begin, length, self.dtype)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice, /) -> np.ndarray:
        start, stop, _ = where.indices(self._length)
        if stop <= start:
            return np.empty(0, self.dtype)
        parts = []
        for number in range(start // self._window, (stop - 1) // self._window + 1):
            at = number * self._window
            parts.append(self._read(number)[max(0, start - at) : stop - at])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _read(self, number: int) -> np.ndarray:
        for wanted in (number, number + 1):
            begin, end = (min(self._length, (wanted + i) * self._window) for i in (0, 1))
            if wanted not in self._windows and begin < end:
                size = self.dtype.itemsize
                place = ((self._begin + begin) * size, (self._begin + end) * size)
                self._windows[wanted] = self._folder.fetch(self._name, *place)
        data = self._windows[number].result()
        for old in [n for n in self._windows if not number - _KEPT < n <= number + 1]:
            del self._windows[old]
        return np.frombuffer(data, self.dtype)
