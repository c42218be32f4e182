"""What is prepared: recordings, how each is read, and what is known of it.

Folders, manifests, data sets and hubs all become a list of these; from there on there is one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import numpy as np

from txl_audio.data import audio
from txl_audio.data.transcripts import read_transcripts
from txl_audio.tokens import DataError


class Sound(NamedTuple):
    """What a recording is when read: pcm [N] float32, its rate, and the SHA-256 of what it was read from."""

    pcm: np.ndarray
    rate_hz: int
    sha256: str


class Part(Protocol):
    """How a recording is read that is no file of its own. Goes to other processes, so it is small."""

    def read(self, path: Path) -> Sound:
        """Raises DataError with the reason where it cannot be read."""
        ...


@dataclass(frozen=True)
class Recording:
    """One recording to prepare.

    Attributes:
        id: unique among its recordings.
        path: the file that is read.
        source: the same, relative to the folder or manifest it was found with (POSIX).
        split: official split, or the assigned one after `assign_splits`; None where there is none.
        claim: (samples, rate_hz) that a manifest claims, checked when the file is read.
        text: what is said in it; empty where that is not known.
        speaker: who says it; empty where that is not known, or where there are several.
        part: what it is of the file; None for all of it.
        variant: 0 is the recording as it is; see `data.variants`.
    """

    id: str
    path: Path
    source: str
    split: str | None = None
    claim: tuple[int, int] | None = None
    text: str = ""
    speaker: str = ""
    part: Part | None = None
    variant: int = 0

    def read(self) -> Sound:
        """The mean of its channels. Raises DataError with the reason where it cannot be read."""
        if self.part is not None:
            return self.part.read(self.path)
        pcm, rate_hz = audio.read_audio(self.path)
        return Sound(pcm, rate_hz, audio.file_sha256(self.path))


def list_folder(folder: Path, keep: Callable[[PurePosixPath], bool]) -> list[Recording]:
    """Recordings below a folder. Ids are relative paths, without suffix where that names one file only."""
    paths = [
        path for path in audio.find_audio(folder) if keep(PurePosixPath(path.relative_to(folder).as_posix()))
    ]
    names = [PurePosixPath(path.relative_to(folder).as_posix()) for path in paths]
    stems = [str(name.with_suffix("")) for name in names]
    # A stem may also be another file's whole name: a.wav.wav beside a.wav and a.flac.
    count = Counter(stems) + Counter(map(str, names))
    return [
        Recording(id=stem if count[stem] == 1 else str(name), path=path, source=str(name))
        for path, name, stem in zip(paths, names, stems, strict=True)
    ]


def with_transcripts(recordings: list[Recording], path: str | Path) -> list[Recording]:
    """Recordings with what `path` says of them, by id or base name; see `read_transcripts`.

    Raises DataError where one is not there.
    """
    texts = read_transcripts(path)
    found = [texts.get(r.id) or texts.get(PurePosixPath(r.source).stem) for r in recordings]
    missing = [r.id for r, text in zip(recordings, found, strict=True) if text is None]
    if missing:
        raise DataError(
            f"{path} has no transcript of {len(missing)} of {len(recordings)} recordings (first: "
            f"{missing[0]}); add them, or take the files away"
        )
    return [replace(r, text=str(text)) for r, text in zip(recordings, found, strict=True)]
