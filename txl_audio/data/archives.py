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
from pathlib import Path
from typing import IO

from txl_audio.tokens import DataError

BLOCK_BYTES = 1 << 22
_COMPRESSED: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # pyright: ignore
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `name` is its path relative to the folder or archive it is in (POSIX)."""

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
        if path.suffix == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(path))
            names = sorted(name for name in archive.namelist() if not name.endswith("/") and _visible(name))
            return [SourceFile(name, lambda name=name: archive.open(name)) for name in names]
        if is_tar(path):
            tar = stack.enter_context(tarfile.open(path))  # noqa: SIM115 - the stack closes it
            members = [member for member in tar.getmembers() if member.isfile() and _visible(member.name)]
            return [SourceFile(m.name, lambda m=m: tar.extractfile(m)) for m in members]  # pyright: ignore
        name = path.stem if path.suffix in _COMPRESSED else path.name
        return [SourceFile(name, _opener(path))]


def is_tar(path: Path) -> bool:
    return re.search(r"\.(tar|tgz|tar\.(gz|bz2|xz))$", path.name) is not None


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: _COMPRESSED.get(path.suffix, open)(path, "rb")


def _visible(name: str) -> bool:
    # __MACOSX/._name is what macOS leaves in archives.
    return not any(part.startswith(".") or part == "__MACOSX" for part in name.removeprefix("./").split("/"))


def read_range(file: SourceFile, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a file, fewer where it ends before."""
    with _named(file.name), file.open() as stream:
        stream.seek(begin)
        return stream.read(end - begin)


def read_blocks(file: SourceFile, begin: int, end: int) -> Iterator[tuple[bytes, bool]]:
    """Bytes [begin, end) of a file as (block, whether it is the last); no block is empty.

    Blocks end after a line, or where one is too long for that after a space, so that no word and no
    character is cut. Memory holds about two blocks, or the longest run without either.
    """
    with _named(file.name), file.open() as stream:
        stream.seek(begin)
        left, rest = end - begin, b""
        while left > 0:
            read = stream.read(min(BLOCK_BYTES, left))
            if not read:
                raise DataError(f"{file.name} ends {left} bytes early; it changed while it was read")
            left -= len(read)
            rest += read
            cut = rest.rfind(b"\n") + 1 or rest.rfind(b" ") + 1
            # The end is held back: the last block is known only when nothing follows.
            if left > 0 and 0 < cut < len(rest):
                yield rest[:cut], False
                rest = rest[cut:]
        if rest:
            yield rest, True


def measure(file: SourceFile, progress: Callable[[int], None]) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file. `progress` gets the bytes of every block."""
    digest, size = hashlib.sha256(), 0
    with _named(file.name), file.open() as stream:
        while block := stream.read(BLOCK_BYTES):
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
