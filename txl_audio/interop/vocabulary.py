"""The words beside a released checkpoint: `vocab.pkl` or `vocab.bin`, read without running their code.

Both are the fields of a tokenizer, its list of words `idx2sym` among them, as a pickle: alone, or inside
one of the two formats of `torch.save`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from txl_audio.data.text import WordVocabulary
from txl_audio.tokens import CheckpointError, DataError

VOCABULARY_FILES = ("vocab.pkl", "vocab.bin")

LEGACY_HEADERS = 3
"""Pickles before the content in the old format of `torch.save`: magic number, protocol, system."""


class _Inert:
    """Stands for an object of a library that the words do not need: takes any state, does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Knows two containers. Nothing is imported, so nothing that a file names can run."""

    _KNOWN: ClassVar = {("collections", "OrderedDict"): OrderedDict, ("collections", "Counter"): Counter}
    # What Hugging Face's tokenizer keeps beside its words.
    _UNUSED = ("re", "sacremoses", "tokenizers", "transformers")

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module.partition(".")[0] in self._UNUSED:
            return _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of words needs")


def read_vocabulary(folder: Path, *, size: int) -> WordVocabulary | None:
    """The vocabulary in `folder`, None where there is none.

    Raises CheckpointError for a file that holds anything but the `size` words of the model.
    """
    path = next((folder / name for name in VOCABULARY_FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    fields = _fields(path)
    words = fields.get("idx2sym") if isinstance(fields, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"{path} holds no list of words `idx2sym`; remove it to import without words")
    if len(words) != size:
        raise CheckpointError(
            f"{path} has {len(words)} words and the model {size}; put the model's own beside it, or "
            "remove it to import without words"
        )
    try:
        return WordVocabulary(words, lower_case=fields.get("lower_case") is True)
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _fields(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                return _Unpickler(io.BytesIO(archive.read(name))).load()
        with open(path, "rb") as file:
            return _first_mapping(file)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} cannot be read as a vocabulary ({' '.join(str(error).split())}); remove it to import "
            "without words"
        ) from error


def _first_mapping(file: BinaryIO) -> Any:
    value = _Unpickler(file).load()
    if isinstance(value, int):
        for _ in range(LEGACY_HEADERS):
            value = _Unpickler(file).load()
    return value
