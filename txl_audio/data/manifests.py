"""Lhotse's manifests of recordings and cuts, and its Shar folders.

Recordings need no package. Cuts are read by lhotse (extra `lhotse`): they may be pieces of files,
transformed or mixed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl_audio.data import audio
from txl_audio.data.recordings import Recording, Sound
from txl_audio.tokens import DataError

_FIELDS = "id, sources, sampling_rate, num_samples and duration"


def read_manifest(path: str | Path) -> list[Recording]:
    """Recordings of a Lhotse manifest: one JSON object a line, a recording or a cut.

    Sources are of type `file`; relative ones are looked up beside the manifest, then in the working
    directory. An extra field `split` (of cuts, a custom field) is the official split. Texts and speakers of a
    cut are those of its supervisions. Raises DataError naming the line for anything else, among it
    recordings with transforms that change what is heard (resampling is repeated from the file itself).
    """
    path = Path(path)

    def parse(item: dict[str, Any]) -> Recording:
        return _of_cut(item, path) if _is_cut(item) else _of_recording(item, path.parent)

    taken: set[str] = set()
    return [_parsed(path, number, line, parse, taken) for number, line in _lines(path)]


def is_shar(folder: Path) -> bool:
    return any(_is_shar_index(path) for path in folder.glob("cuts.*"))


def read_shar(folder: Path) -> list[Recording]:
    """Recordings of a Shar folder: cuts in files `cuts.*.jsonl[.gz]`, their sound in `recording.*.tar`.

    Sound is found by its place in the tar, so that recordings can be read in any order. Raises DataError
    where cuts and tars do not fit together.
    """
    indices = sorted(path for path in folder.glob("cuts.*") if _is_shar_index(path))
    tars = sorted(folder.glob("recording.*.tar"))
    if len(indices) != len(tars):
        raise DataError(
            f"{folder} has {len(indices)} files of cuts and {len(tars)} of sound (recording.*.tar); expected "
            "as many of both"
        )
    taken: set[str] = set()
    return [r for index, tar in zip(indices, tars, strict=True) for r in _shard(index, tar, taken)]


def _is_shar_index(path: Path) -> bool:
    return path.name.startswith("cuts.") and path.name.endswith((".jsonl", ".jsonl.gz"))


@dataclass(frozen=True)
class Cut:
    """What Lhotse makes of a cut, at the cut's rate.

    Attributes:
        line: the cut as JSON.
        place: where the encoded sound lies in the file (first byte, bytes); None where the cut names files.
    """

    line: str
    place: tuple[int, int] | None = None

    def read(self, path: Path) -> Sound:
        cut = _deserialized(json.loads(self.line))
        if not cut.has_recording:
            raise DataError("the cut has no sound")
        try:
            if self.place is not None:
                with open(path, "rb") as file:
                    file.seek(self.place[0])
                    source = cut.recording.sources[0]
                    source.type, source.source = "memory", file.read(self.place[1])
            pcm = cut.load_audio()  # [channels, N]
        except Exception as error:  # each of Lhotse's backends has its own
            raise DataError(f"Lhotse cannot read it: {_first_line(error)}") from error
        pcm = audio.to_mono(np.ascontiguousarray(pcm.T, dtype=np.float32))
        return Sound(pcm, int(cut.sampling_rate), hashlib.sha256(pcm.tobytes()).hexdigest())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable as a manifest: {error}") from error
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _parsed(
    path: Path, number: int, line: str, parse: Callable[[Any], Recording], taken: set[str]
) -> Recording:
    """The recording of a line; its id goes to those that are `taken`."""
    is_cut = False
    try:
        item = json.loads(line)
        is_cut = _is_cut(item)
        recording = parse(item)
        if recording.id in taken:
            raise DataError(f"a second recording is called {recording.id!r}")
        taken.add(recording.id)
        return recording
    except DataError as error:
        raise DataError(f"{path}:{number}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
        what, fields = ("cut", "that CutSet.to_file writes") if is_cut else ("recording", _FIELDS)
        raise DataError(
            f"{path}:{number}: no Lhotse {what} ({type(error).__name__}: {_first_line(error)}); expected the "
            f"fields {fields}"
        ) from error


def _of_recording(item: dict[str, Any], beside: Path) -> Recording:
    if len(item["sources"]) != 1 or item["sources"][0]["type"] != "file":
        kinds = [source["type"] for source in item["sources"]]
        raise DataError(f"recording {item['id']!r} has sources {kinds}, expected one of type 'file'")
    transforms = [transform["name"] for transform in item.get("transforms") or ()]
    if set(transforms) - {"Resample"}:
        raise DataError(f"recording {item['id']!r} has transforms {transforms}; store it as a file first")
    claim = (int(item["num_samples"]), int(item["sampling_rate"]))
    if abs(claim[0] / claim[1] - float(item["duration"])) > 1 / claim[1]:
        raise DataError(f"recording {item['id']!r}: duration and num_samples / sampling_rate differ")
    source = str(item["sources"][0]["source"])
    return Recording(
        id=str(item["id"]),
        path=_near(source, beside),
        source=source,
        split=item.get("split"),
        claim=claim,
    )


def _near(source: str, beside: Path) -> Path:
    near = beside / source
    return near if near.is_file() else Path(source)


def _is_cut(item: object) -> bool:
    return isinstance(item, dict) and "type" in item and "sources" not in item


def _of_cut(item: dict[str, Any], path: Path, place: tuple[int, int] | None = None) -> Recording:
    """A cut of the manifest, or with its `place` of the tar, at `path`."""
    if place is None:
        files = list(_files(item))
        for source in files:
            # Other types run commands or reach for URLs.
            if source["type"] != "file":
                raise DataError(
                    f"cut {item['id']!r} has a source of type {source['type']!r}, expected 'file'"
                )
            source["source"] = str(_near(str(source["source"]), path.parent))
        path = Path(files[0]["source"]) if files else path  # whose change is noticed
    line = json.dumps(item)
    cut = _deserialized(item)
    said = sorted(cut.supervisions, key=lambda supervision: supervision.start)
    speakers = {supervision.speaker for supervision in said}
    custom = getattr(cut, "custom", None) or {}
    return Recording(
        id=str(cut.id),
        path=path,
        source=str(cut.id),
        split=custom.get("split"),
        text=" ".join(text for s in said if (text := (s.text or "").strip())),
        speaker=(speakers.pop() or "") if len(speakers) == 1 else "",
        part=Cut(line, place),
    )


def _files(node: Any) -> Iterator[dict[str, Any]]:
    """The sources of all recordings in a cut, which may be a mix of cuts."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from value if key == "sources" else _files(value)
    elif isinstance(node, list):
        for value in node:
            yield from _files(value)


def _shard(index: Path, tar: Path, taken: set[str]) -> Iterator[Recording]:
    """Sound and its manifest follow each other in the tar, in the order of the cuts; `.nodata` is none."""
    try:
        with tarfile.open(tar, "r:") as file:
            members = file.getmembers()
            metas = [file.extractfile(meta).read() for meta in members[1::2]]  # pyright: ignore
    except (OSError, EOFError, AttributeError, tarfile.TarError) as error:
        raise DataError(f"{tar} is not readable as a tar of Shar: {error}") from error
    lines = list(_lines(index))
    if len(members) != 2 * len(lines):
        raise DataError(
            f"{tar} has {len(members)} files, expected two for each of the {len(lines)} cuts of {index}"
        )
    for (number, line), member, meta in zip(lines, members[::2], metas, strict=True):

        def parse(item: dict[str, Any], member: tarfile.TarInfo = member, meta: bytes = meta) -> Recording:
            name, _, suffix = member.name.rpartition(".")
            if name != item["id"]:
                raise DataError(f"cut {item['id']!r} stands where {tar} has the sound of {name!r}")
            item.pop("recording", None)
            if suffix == "nodata":
                return _of_cut(item, tar, (0, 0))
            item["recording"] = json.loads(meta)
            return _of_cut(item, tar, (member.offset_data, member.size))

        yield _parsed(index, number, line, parse, taken)


def _deserialized(item: dict[str, Any]) -> Any:
    try:
        from lhotse.cut.set import deserialize_cut
    except ImportError as error:
        raise DataError(f"cuts need the package lhotse ({error}); pip install 'txl-audio[lhotse]'") from error
    return deserialize_cut(item)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
