"""Audio of Hugging Face's `datasets` (extra `datasets`): saved folders, folders of files, names of the hub.

Rows with a file of their own become recordings of that file; of others the encoded bytes in the row are
read.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from txl_audio.data import audio
from txl_audio.data.recordings import Recording, Sound
from txl_audio.tokens import DataError

HUB = "hf:"
"""Before a name of the hub, or a folder that `datasets.load_dataset` understands."""

TEXT = ("text", "transcription", "sentence", "transcript")
SPEAKER = ("speaker_id", "speaker", "client_id")
"""Columns, the first of which that a set has is taken."""

_SPLITS = {"train": "train", "val": "val", "dev": "val", "test": "test"}
_ROWS = 1000


def is_saved(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    one = (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    return one or (folder / "dataset_dict.json").is_file()


def read_hub(name: str) -> list[Recording]:
    """Recordings of all splits of NAME or NAME:CONFIG.

    Where there are several, `train...`, `val...` or `dev...`, and `test...` are the official splits of these
    names; a set of one has none. Ids are SPLIT/FILE, or SPLIT/ROW where rows have no distinct names of files.
    Raises DataError where the package is missing, and where it loads nothing or nothing with audio.
    """
    _load.cache_clear()  # it may have been written anew
    splits = _load(name)
    several = len(splits) > 1
    return [
        recording
        for split, rows in splits.items()
        for recording in _rows(name, str(split), rows, _official(str(split)) if several else None)
    ]


@dataclass(frozen=True)
class Row:
    """The encoded bytes in one row."""

    name: str
    split: str
    column: str
    index: int

    def read(self, path: Path) -> Sound:
        content = _load(self.name)[self.split][self.index][self.column]
        encoded = content["bytes"] if content else None
        if not encoded:
            raise DataError("the row has no audio")
        pcm, rate_hz = audio.decode_audio(io.BytesIO(encoded))
        return Sound(audio.to_mono(pcm), rate_hz, hashlib.sha256(encoded).hexdigest())


@lru_cache(maxsize=1)
def _load(name: str) -> dict[str, Any]:
    """The splits, their audio as it is stored. Kept, for rows are read one after another."""
    try:
        # By name: type checkers without the package take the module beside this one for it.
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{name} needs the package datasets ({error}); pip install 'txl-audio[datasets]'"
        ) from error
    datasets.disable_progress_bars()
    place, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        if is_saved(Path(place)):
            loaded: Any = datasets.load_from_disk(place)
        else:
            loaded = datasets.load_dataset(place, config or None)
    except Exception as error:  # of the hub, its cache and every format
        raise DataError(
            f"datasets cannot load {name}: {_cause(error)}; expected NAME or NAME:CONFIG, of a folder or of "
            "the hub"
        ) from error
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "all"): loaded}
    found = {}
    for split, rows in splits.items():
        sound, *about = _columns(name, rows)
        rows = rows.select_columns([sound, *filter(None, about)])  # others may be costly to decode
        found[str(split)] = rows.cast_column(sound, datasets.Audio(decode=False))
    return found


def _cause(error: BaseException) -> str:
    """The first line of what an error began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _columns(name: str, rows: Any) -> tuple[str, str | None, str | None]:
    """The columns of audio, text and speaker."""
    text, speaker = (next((c for c in known if c in rows.features), None) for known in (TEXT, SPEAKER))
    return _audio_column(name, rows), text, speaker


def _audio_column(name: str, rows: Any) -> str:
    columns = [column for column, feature in rows.features.items() if type(feature).__name__ == "Audio"]
    if "audio" in columns or len(columns) == 1:
        return "audio" if "audio" in columns else columns[0]
    raise DataError(
        f"{name} has {len(columns)} columns of audio among {', '.join(rows.features)}; expected one, or one "
        "that is called audio"
    )


def _rows(name: str, split: str, rows: Any, official: str | None) -> Iterator[Recording]:
    column, text, speaker = _columns(name, rows)
    about = [c for c in (text, speaker) if c is not None]
    known = rows.select_columns(about) if about else None
    files = list(_files(rows.select_columns([column]), column))
    stems = [PurePosixPath(file).with_suffix("").name for file, _ in files]
    distinct = len(set(stems)) == len(stems) and all(stems)
    place = Path(rows.cache_files[0]["filename"]) if rows.cache_files else Path(name)
    for index, (file, embedded) in enumerate(files):
        own = known[index] if known is not None else {}
        recording = f"{split}/{stems[index] if distinct else f'{index:08d}'}"
        yield Recording(
            id=recording,
            path=place if embedded else Path(file),
            source=recording,
            split=official,
            text=_word(own.get(text)),
            speaker=_word(own.get(speaker)),
            part=Row(name, split, column, index) if embedded else None,
        )


def _files(rows: Any, column: str) -> Iterator[tuple[str, bool]]:
    """Of every row, the name of its file and whether its bytes are in the row; bytes are not copied."""
    for table in rows.with_format("arrow").iter(_ROWS):
        sounds = table.column(column).combine_chunks()
        names = sounds.field("path").to_pylist()
        empty = sounds.field("bytes").is_null().to_pylist()
        yield from ((name or "", not (none and name)) for name, none in zip(names, empty, strict=True))


def _official(split: str) -> str:
    return next((name for prefix, name in _SPLITS.items() if split.startswith(prefix)), split)


def _word(value: Any) -> str:
    return "" if value is None else str(value).strip()
