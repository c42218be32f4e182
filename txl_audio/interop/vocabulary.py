"""The vocabulary beside weights: ours, or the words of a released checkpoint, read without running code.

Ours is `vocabulary.json`. `vocab.pkl` and `vocab.bin` are the fields of a tokenizer, its list of words
`idx2sym` among them, as a pickle: alone, or inside one of the two formats of `torch.save`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from txl_audio.data.text import VOCABULARY_FILE, TextVocabulary, WordVocabulary, load_vocabulary
from txl_audio.tokens import CheckpointError, DataError

PICKLES = ("vocab.pkl", "vocab.bin")

LEGACY_HEADERS = 3
"""Pickles before the content in the old format of `torch.save`: magic number, protocol, system."""

MAX_PICKLE_BYTES = 1 << 28
"""Of one that is unpacked: a small zip may hold more than fits the memory. The 267,735 words of
WikiText-103 with their counts take 9 MB."""


class _Inert:
    """Stands for an object of a library that the words do not need: takes any state, does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Knows two containers. Nothing is imported, so nothing that a file names can run."""

    _CONTAINERS = (("collections", "OrderedDict"), ("collections", "Counter"))
    # What Hugging Face's tokenizer keeps beside its words.
    _UNUSED = ("re", "sacremoses", "tokenizers", "transformers")

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # A pickle can set attributes of a class that it is given: it gets classes that nobody else has.
        self._mapping = type("_Mapping", (dict,), {})
        self._inert = type("_Inert", (_Inert,), {})

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in self._CONTAINERS:
            return self._mapping
        if module.partition(".")[0] in self._UNUSED:
            return self._inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of words needs")


def read_vocabulary(folder: Path, *, size: int) -> TextVocabulary | None:
    """The vocabulary in `folder`, None where there is none. A `vocabulary.json` goes before pickles.

    Raises CheckpointError for a file that holds anything but the `size` symbols of the model.
    """
    paths = [folder / name for name in (VOCABULARY_FILE, *PICKLES) if (folder / name).is_file()]
    if not paths:
        return None
    path = paths[0]
    try:
        vocabulary = load_vocabulary(path) if path.name == VOCABULARY_FILE else _pickled(path)
    except DataError as error:
        said = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise CheckpointError(said) from error
    if len(vocabulary.symbols) != size:
        raise CheckpointError(
            f"{path} has {len(vocabulary.symbols)} symbols and the model {size}; put the model's own beside "
            "it, or remove it to import without a vocabulary"
        )
    return vocabulary


def _pickled(path: Path) -> WordVocabulary:
    fields = _fields(path)
    words = fields.get("idx2sym") if isinstance(fields, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"{path} holds no list of words `idx2sym`; remove it to import without words")
    return WordVocabulary(words, lower_case=fields.get("lower_case") is True)


def _fields(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                item = next(item for item in archive.infolist() if item.filename.endswith("/data.pkl"))
                if item.file_size > MAX_PICKLE_BYTES:
                    raise pickle.UnpicklingError(
                        f"{item.filename} would take {item.file_size:,} bytes, expected at most "
                        f"{MAX_PICKLE_BYTES:,}"
                    )
                return _Unpickler(io.BytesIO(archive.read(item))).load()
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
