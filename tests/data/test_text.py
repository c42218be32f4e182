"""Vocabularies: text and symbols, each the inverse of the other, and what is said where they are not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from txl_audio.data.text import (
    ByteVocabulary,
    CharacterVocabulary,
    TextVocabulary,
    WordVocabulary,
    load_vocabulary,
    text_metrics,
)
from txl_audio.tokens import DataError, SpecError, TokenSpec, Vocabulary

BYTES = ByteVocabulary()
AUTHORS = ByteVocabulary(b"abcd", drop_newlines=True)
CHARACTERS = CharacterVocabulary(" \nabcé日😀")
WORDS = WordVocabulary(["<eos>", "the", "<unk>", "cat", "sat"])
SENTENCES = WordVocabulary(["<S>", "<UNK>", "the", "cat"], line_end="<S>", begins=True)
ALL: dict[str, TextVocabulary] = {
    "bytes": BYTES,
    "authors": AUTHORS,
    "characters": CHARACTERS,
    "words": WORDS,
    "sentences": SENTENCES,
}


def ids(vocabulary: TextVocabulary, text: str | bytes, *, complete: bool = True) -> list[int]:
    return vocabulary.encode(text, complete=complete).tolist()


def test_m11_every_byte_is_a_token() -> None:
    """The authors' preparation loses the newlines, so its bits are per remaining byte."""
    assert BYTES.encode(b"ab\n\ncd\n").tolist() == [97, 98, 10, 10, 99, 100, 10]
    assert ids(AUTHORS, b"ab\n\ncd\n") == [0, 1, 2, 3]
    assert BYTES.encode(bytes(range(256))).tolist() == list(range(256))
    assert BYTES.encode("é").dtype == torch.int64


def test_m16_an_unknown_word_is_unk_or_an_error() -> None:
    assert ids(WORDS, "the dog sat\n") == [1, 2, 4, 0]
    assert ids(SENTENCES, "the dog\n") == [0, 2, 1, 0]
    without = WordVocabulary(["<eos>", "the", "cat"])
    with pytest.raises(DataError, match=r"line 3: the word 'dog' is not in the vocabulary and has no <unk>"):
        without.encode("the cat\n\nthe dog dog\n")
    encoder = without.stream_encoder()
    encoder.push("the\nthe\n")
    with pytest.raises(DataError, match="line 4: the word 'a'"):
        encoder.push("cat\na\n")
    encoder = WORDS.stream_encoder()
    encoder.push("a b the <unk>\n")
    encoder.push("c\n")
    assert encoder.unknown == 3  # the word <unk> of the text itself is known


@pytest.mark.parametrize(
    ("vocabulary", "text", "reason"),
    [
        (CHARACTERS, "ab\nca€b", "line 2: the character '€' is not in"),
        (CHARACTERS, "abd", "line 1: the character 'd' is not in"),
        (CHARACTERS, "ab\U0010ffff", "line 1: the character"),
        (AUTHORS, b"ab\nca\x80", "line 2: the byte 0x80 is not in"),
        (WORDS, b"the\ncat \xff", "line 2 is not UTF-8"),
    ],
)
def test_what_cannot_be_encoded_is_named(vocabulary: TextVocabulary, text: str | bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        vocabulary.encode(text)


def test_every_line_of_words_ends_with_its_mark() -> None:
    assert ids(WORDS, "the cat\n\n  sat \n") == [1, 3, 0, 0, 4, 0]
    assert ids(WORDS, "the cat") == [1, 3, 0]
    assert ids(WORDS, "") == []
    # Of a file: "\r\n" and "\r" end lines, the separators of Unicode are only white space.
    assert ids(WORDS, "the\r\ncat\rsat\u2028the\x0ccat\n") == [1, 0, 3, 0, 4, 1, 3, 0]
    assert ids(SENTENCES, "the cat\nthe\n") == [0, 2, 3, 0, 2, 0]
    assert ids(WordVocabulary(["<eos>", "n"], lower_case=True), "N n\n") == [1, 1, 0]


def test_a_prompt_is_left_open() -> None:
    assert ids(WORDS, "the cat", complete=False) == [1, 3]
    assert ids(WORDS, "the\ncat", complete=False) == [1, 0, 3]
    assert ids(WORDS, "the cat\n", complete=False) == [1, 3, 0]
    assert ids(SENTENCES, "the", complete=False) == [0, 2]
    assert ids(SENTENCES, "", complete=False) == [0]


text_of_characters = st.text(alphabet=" \nabcé日😀")


@given(text=st.text(), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_bytes_come_back(text: str, cuts: list[int]) -> None:
    encoded = BYTES.encode(text)
    assert encoded.tolist() == list(text.encode())
    assert BYTES.decode(encoded) == text
    decoder = BYTES.stream_decoder()
    parts = np.split(encoded.numpy(), sorted(min(c, len(encoded)) for c in cuts))
    assert "".join(decoder.push(torch.from_numpy(part)) for part in parts) + decoder.flush() == text


@given(text=text_of_characters)
def test_characters_come_back(text: str) -> None:
    encoded = CHARACTERS.encode(text)
    assert [CHARACTERS.symbols[i] for i in encoded.tolist()] == list(text)
    assert CHARACTERS.decode(encoded) == text


@given(ids=st.lists(st.integers(0, 4)), cut=st.integers(0, 20))
def test_words_come_back(ids: list[int], cut: int) -> None:
    line = torch.tensor(ids, dtype=torch.int64)
    text = WORDS.decode(line)
    assert torch.equal(WORDS.encode(text, complete=False), line)
    decoder = WORDS.stream_decoder()
    assert decoder.push(line[:cut]) + decoder.push(line[cut:]) + decoder.flush() == text
    # A text of sentences begins with the mark, which is no line of its own.
    line = torch.tensor([0, *(i % 4 for i in ids)])
    assert torch.equal(SENTENCES.encode(SENTENCES.decode(line), complete=False), line)


def test_half_a_character_is_held_back() -> None:
    decoder = BYTES.stream_decoder()
    first, *rest = "é".encode()
    assert decoder.push(torch.tensor([first])) == ""
    assert decoder.push(torch.tensor(rest)) == "é"
    assert decoder.push(torch.tensor([first])) == ""
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"
    assert WORDS.decode(torch.tensor([[1, 3, 0, 4, 1]])) == "the cat\nsat the"


@pytest.mark.parametrize("name", ALL)
def test_a_vocabulary_is_kept_in_a_file(name: str, tmp_path: Path) -> None:
    vocabulary, path = ALL[name], tmp_path / "vocabulary.json"
    assert isinstance(vocabulary, Vocabulary)
    vocabulary.save(path)
    again = load_vocabulary(path)
    assert type(again) is type(vocabulary) and again.symbols == vocabulary.symbols
    assert again.spec == vocabulary.spec
    text = "the cat\n" if vocabulary.spec.name == "words" else "ab\nc"
    assert torch.equal(again.encode(text), vocabulary.encode(text))
    assert vocabulary.spec.modality == "text" and vocabulary.spec.symbols_per_frame == 1
    assert vocabulary.spec.vocab_size == len(vocabulary.symbols)


def test_everything_that_changes_the_meaning_changes_the_spec() -> None:
    others = [
        *ALL.values(),
        ByteVocabulary(b"abdc", drop_newlines=True),
        ByteVocabulary(b"abcd"),
        WordVocabulary(SENTENCES.symbols, line_end="<S>"),
        WordVocabulary(WORDS.symbols, line_end="the"),
        WordVocabulary(WORDS.symbols, lower_case=True),
    ]
    assert len({vocabulary.spec for vocabulary in others}) == len(others)
    with pytest.raises(SpecError, match="settings_hash"):
        AUTHORS.spec.require(others[5].spec, here="a", there="b")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    with pytest.raises(DataError, match="no vocabulary at"):
        load_vocabulary(path)
    WORDS.save(path)
    content = json.loads(path.read_text())
    for changes, reason in [
        ({"symbols": ["<eos>", "cat"]}, r"has the hash .*, expected .* was changed after"),
        ({"kind": "syllables"}, "is no vocabulary"),
        ({"settings": {"upper_case": True}}, "is no vocabulary"),
        ({"symbols": None}, "is no vocabulary"),
    ]:
        path.write_text(json.dumps(content | changes))
        with pytest.raises(DataError, match=reason):
            load_vocabulary(path)
    path.write_text("{")
    with pytest.raises(DataError, match="is no vocabulary"):
        load_vocabulary(path)


def test_impossible_vocabularies_are_refused() -> None:
    with pytest.raises(DataError, match="got 3, of which 2 differ"):
        CharacterVocabulary("aba")
    with pytest.raises(DataError, match="got 0, of which 0"):
        ByteVocabulary([])
    with pytest.raises(DataError, match=r"bytes are 0\.\.255, got 1\.\.256"):
        ByteVocabulary([1, 256])
    with pytest.raises(DataError, match="characters are single, got 'ab'"):
        CharacterVocabulary(["a", "ab"])
    with pytest.raises(DataError, match="lacks '<eos>', the mark at the end of a line"):
        WordVocabulary(["a", "b"])
    with pytest.raises(DataError, match=r"got ids 1\.\.5, expected 0\.\.4"):
        WORDS.decode(torch.tensor([1, 5]))


def test_figures_have_the_names_people_use() -> None:
    nats, count = 3 * math.log(2), 2
    assert text_metrics(BYTES.spec, nats=nats, count=count) == pytest.approx({"bits_per_byte": 1.5})
    assert text_metrics(CHARACTERS.spec, nats=nats, count=count) == pytest.approx({"bits_per_character": 1.5})
    words = text_metrics(WORDS.spec, nats=nats, count=count)
    assert words == pytest.approx({"perplexity": 2**1.5, "bits_per_word": 1.5})
    assert next(iter(words)) == "perplexity"
    imported = TokenSpec("text", 9, 1, 0.0, 0, "ids", "0")
    assert text_metrics(imported, nats=nats, count=count) == pytest.approx({"bits_per_symbol": 1.5})
