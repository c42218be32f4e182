"""The vocabulary beside weights, in every container that words come in; no file runs code."""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from txl_audio.data.text import CharacterVocabulary
from txl_audio.interop import vocabulary as reader
from txl_audio.interop.vocabulary import read_vocabulary
from txl_audio.tokens import CheckpointError

WORDS = ["<eos>", "<unk>", "the", "of"]

# The fields of the authors' Vocab, which Hugging Face saved, and what its later versions add.
FIELDS: dict[str, Any] = {
    "counter": Counter(WORDS),
    "special": ["<eos>"],
    "min_freq": 0,
    "max_size": None,
    "lower_case": False,
    "delimiter": None,
    "vocab_file": None,
    "idx2sym": WORDS,
    "sym2idx": OrderedDict((word, index) for index, word in enumerate(WORDS)),
    "eos_idx": 0,
    "unk_idx": 1,
    "punctuation_with_space_around_pattern": re.compile(r"(?=[.,])(?=[^\s])"),
}


def as_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def as_old_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=2))


def as_zip(value: Any, path: Path) -> None:
    torch.save(value, path)


def as_legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


Save = Callable[[Any, Path], None]
every_container = pytest.mark.parametrize("save", [as_pickle, as_old_pickle, as_zip, as_legacy])


@every_container
@pytest.mark.parametrize("name", ["vocab.pkl", "vocab.bin"])
def test_words_in_the_order_of_their_ids(save: Save, name: str, tmp_path: Path) -> None:
    save(FIELDS, tmp_path / name)
    vocabulary = read_vocabulary(tmp_path, size=4)
    assert vocabulary is not None
    assert list(vocabulary.symbols) == WORDS and vocabulary.spec.vocab_size == 4
    assert vocabulary.encode("the end of\n").tolist() == [2, 1, 3, 0]


def test_no_file_no_words(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path, size=4) is None


def test_our_own_vocabulary_goes_first(tmp_path: Path) -> None:
    as_pickle(FIELDS, tmp_path / "vocab.pkl")
    ours = CharacterVocabulary("abcd")
    ours.save(tmp_path / "vocabulary.json")
    found = read_vocabulary(tmp_path, size=4)
    assert found is not None and found.spec == ours.spec and found.symbols == ours.symbols
    with pytest.raises(CheckpointError, match="vocabulary.json has 4 symbols and the model 5"):
        read_vocabulary(tmp_path, size=5)
    (tmp_path / "vocabulary.json").write_text("{")
    with pytest.raises(CheckpointError, match="vocabulary.json is no vocabulary"):
        read_vocabulary(tmp_path, size=4)


class Payload:
    """What a hostile pickle would run."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@every_container
@pytest.mark.parametrize("key", ["idx2sym", "counter"])
def test_a_vocabulary_is_never_executed(key: str, save: Save, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    save({**FIELDS, key: Payload(eval, f"open({str(trace)!r}, 'w')")}, tmp_path / "vocab.pkl")
    with pytest.raises(CheckpointError, match="cannot be read as a vocabulary .*builtin.*eval"):
        read_vocabulary(tmp_path, size=4)
    assert not trace.exists()


def test_objects_that_words_do_not_need_are_not_made(tmp_path: Path) -> None:
    """Names below an allowed library give a stand-in, whatever they are called."""
    trace = tmp_path / "executed"
    code = (
        b"cre\n__builtins__.exec\n(X" + len(str(trace)).to_bytes(4, "little") + str(trace).encode() + b"tR."
    )
    (tmp_path / "vocab.pkl").write_bytes(code)
    with pytest.raises(CheckpointError, match="holds no list of words"):
        read_vocabulary(tmp_path, size=4)
    assert not trace.exists()


@pytest.mark.parametrize("name", [b"collections\nCounter", b"collections\nOrderedDict", b"re\ncompile"])
def test_no_class_is_changed(name: bytes, tmp_path: Path) -> None:
    """A pickle can set attributes of what it names: here `get` and `changed`, to 1."""
    state = b"(N(X\x03\x00\x00\x00getK\x01X\x07\x00\x00\x00changedK\x01dtb."
    (tmp_path / "vocab.pkl").write_bytes(b"\x80\x02c" + name + b"\n" + state)
    with pytest.raises(CheckpointError, match="vocab.pkl"):
        read_vocabulary(tmp_path, size=4)
    assert not any(hasattr(known, "changed") for known in (Counter, OrderedDict, reader._Inert))
    as_pickle(FIELDS, tmp_path / "vocab.pkl")
    assert read_vocabulary(tmp_path, size=4) is not None, "the next file is read as ever"


def test_a_zip_that_unpacks_to_more_than_a_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_zip(FIELDS, tmp_path / "vocab.bin")
    monkeypatch.setattr(reader, "MAX_PICKLE_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"data.pkl would take \d+ bytes, expected at most 100"):
        read_vocabulary(tmp_path, size=4)


@pytest.mark.parametrize(
    ("value", "size", "message"),
    [
        (FIELDS, 5, "has 4 symbols and the model 5; put the model's own beside it"),
        (WORDS, 4, "holds no list of words `idx2sym`"),
        ({"idx2sym": [1, 2, 3, 4]}, 4, "holds no list of words `idx2sym`"),
        ({"idx2sym": ["a", "a", "b", "<eos>"]}, 4, "vocab.pkl: .*all differ"),
        ({"idx2sym": ["a", "b"]}, 2, "vocab.pkl: .*lacks '<eos>'"),
    ],
    ids=["size", "list", "numbers", "twice", "no mark"],
)
def test_words_that_cannot_be_used(value: Any, size: int, message: str, tmp_path: Path) -> None:
    as_pickle(value, tmp_path / "vocab.pkl")
    with pytest.raises(CheckpointError, match=message):
        read_vocabulary(tmp_path, size=size)


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps(FIELDS)[:-20], b"PK\x05\x06" + bytes(18)]
)
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "vocab.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="vocab.bin cannot be read as a vocabulary .*; remove it"):
        read_vocabulary(tmp_path, size=4)
