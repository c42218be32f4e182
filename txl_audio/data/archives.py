"""Files as people have them: in folders, archives or compressed; read block by block."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from txl_audio.tokens import DataError

BLOCK_BYTES = 1 << 22
MAX_WORD_BYTES = 1 << 26
"""A text without white space for so long has no words."""

_COMPRESSED: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # pyright: ignore
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)
# What gzip, compress, bzip2, xz, Zstandard, LZ4, 7-Zip, zip and RAR begin with.
_STILL_COMPRESSED = re.compile(
    rb"\x1f[\x8b\x9d]|BZh[1-9]1AY&SY|\xfd7zXZ\x00|\x28\xb5\x2f\xfd|\x04\x22M\x18|7z\xbc\xaf|PK\x03\x04|Rar!\x1a"
)


@dataclass(frozen=True)
class SourceFile:
    """One file to read, decompressed. `name` is its path relative to its folder or archive (POSIX)."""

    name: str
    open: Callable[[], IO[bytes]]


def list_files(path: Path, stack: ExitStack) -> list[SourceFile]:
    """Files below a folder or in an archive, or the one that `path` is, decompressed.

    Sorted by name, but in the order of a tar archive, where going back would read it anew. Archives
    stay open until `stack` is closed. Raises DataError where there is nothing to read.
    """
    with _named(path):
        if path.is_dir():
            names = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
            return [SourceFile(name, _opener(names[name])) for name in sorted(names) if _visible(name)]
        if not path.is_file():
            raise DataError(f"nothing at {path}; expected a folder, an archive or a text file")
        if path.suffix.lower() == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(path))
            names = sorted(name for name in archive.namelist() if not name.endswith("/") and _visible(name))
            return [SourceFile(n, lambda n=n: _member(n, archive.open(n))) for n in names]
        if re.search(r"\.(tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz))$", path.name, re.IGNORECASE):
            tar = stack.enter_context(tarfile.open(path))  # noqa: SIM115 - the stack closes it
            members = [member for member in tar.getmembers() if member.isfile() and _visible(member.name)]
            return [SourceFile(m.name, lambda m=m: _member(m.name, tar.extractfile(m))) for m in members]
        name = path.stem if path.suffix.lower() in _COMPRESSED else path.name
        return [SourceFile(name, _opener(path))]


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: _COMPRESSED.get(path.suffix.lower(), open)(path, "rb")


def _member(name: str, stream: IO[bytes] | None) -> IO[bytes]:
    """A file in an archive, which may be compressed itself."""
    assert stream is not None  # what `extractfile` returns for a folder
    opener = _COMPRESSED.get(PurePosixPath(name).suffix.lower())
    return stream if opener is None else opener(stream, "rb")


def _visible(name: str) -> bool:
    # __MACOSX/._name is what macOS leaves in archives.
    return not any(part.startswith(".") or part == "__MACOSX" for part in name.removeprefix("./").split("/"))


class OpenFile:
    """A SourceFile that is open: reading on from where it is costs nothing, even where it is compressed.

    `progress` gets the bytes of every block that is passed over on the way to another place.
    """

    def __init__(self, file: SourceFile, progress: Callable[[int], None] = lambda size: None) -> None:
        self.name, self._progress = file.name, progress
        with _named(self.name):
            self._stream = file.open()

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end), fewer where the file ends before."""
        with _named(self.name):
            # A compressed file has to read all that lies between.
            for place in range(self._stream.tell() + BLOCK_BYTES, begin, BLOCK_BYTES):
                self._stream.seek(place)
                self._progress(BLOCK_BYTES)
            self._stream.seek(begin)
            return self._stream.read(end - begin)

    def blocks(self, begin: int, end: int, cut: Callable[[bytes], int]) -> Iterator[tuple[bytes, bool]]:
        """Bytes [begin, end) as (block, whether it is the last); no block is empty.

        `cut` says how many of the bytes read so far may end a block, 0 for none. Memory holds about two
        blocks, or MAX_WORD_BYTES where there is no place to cut.
        """
        at, rest = begin, b""
        while at < end:
            read = self.read(at, min(at + BLOCK_BYTES, end))
            if not read:
                raise DataError(f"{self.name} ends {end - at} bytes early; it changed while it was read")
            at += len(read)
            rest += read
            whole = cut(rest)
            # At the end all that is left is the last block.
            if at < end and whole > 0:
                yield rest[:whole], False
                rest = rest[whole:]
            elif len(rest) > MAX_WORD_BYTES:
                raise DataError(
                    f"{self.name} has no white space for {len(rest):,} bytes, so it has no words; prepare it "
                    "as bytes or chars"
                )
        if rest:
            yield rest, True


def measure(file: SourceFile, progress: Callable[[int], None]) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file. `progress` gets the bytes of every block.

    Raises DataError where what is read is compressed still.
    """
    digest, size = hashlib.sha256(), 0
    with _named(file.name), file.open() as stream:
        while block := stream.read(BLOCK_BYTES):
            if size == 0 and _STILL_COMPRESSED.match(block):
                raise DataError(
                    f"{file.name} is compressed, expected text; unpack it, or give the archive itself where "
                    "its name ends in .gz, .bz2, .xz, .zip or .tar"
                )
            digest.update(block)
            size += len(block)
            progress(len(block))
    return size, digest.hexdigest()


@contextmanager
def _named(name: str | Path) -> Iterator[None]:
    """Says which file cannot be read."""
    try:
        yield
    except _DAMAGE as error:
        raise DataError(f"{name} cannot be read ({error}); copy or download it again") from error
    except RuntimeError as error:  # a zip that is encrypted or packed in a way that Python lacks
        raise DataError(f"{name} cannot be read ({error}); unpack it and give the folder") from error
