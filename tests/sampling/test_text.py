"""Text comes piece by piece, and is what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import text_model
from txl_audio.data.text import ByteVocabulary, CharacterVocabulary, WordVocabulary
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.text import continuation, text_writer
from txl_audio.tokens import ConfigError, DataError, SpecError, Vocabulary

BYTES = ByteVocabulary()
CHARACTERS = CharacterVocabulary("\n abcdé")
WORDS = WordVocabulary(["<eos>", "the", "sea", "and", "sky"])
GREEDY = Filters(temperature=0.0)


def pieces(
    vocabulary: Vocabulary,
    prompt: str | None,
    tokens: int = 12,
    *,
    model: SequenceModel | None = None,
    filters: Filters = GREEDY,
    seed: int = 0,
) -> list[tuple[str, bool]]:
    model = model or text_model(vocabulary.spec, mem_len=40)
    return list(continuation(model, vocabulary, tokens=tokens, prompt=prompt, filters=filters, seed=seed))


@pytest.mark.parametrize(
    ("vocabulary", "prompt"), [(BYTES, "sea é"), (CHARACTERS, "abé"), (WORDS, "the sea and")]
)
def test_m4_streamed_text_equals_recomputing_from_scratch(vocabulary: Vocabulary, prompt: str) -> None:
    model = text_model(vocabulary.spec, mem_len=40)
    ids = vocabulary.encode(prompt, complete=False)[None]
    for _ in range(12):
        hidden, *_ = model.encode(ids[..., None], ids[..., None], model.initial_state(1))
        best = model.head.log_probs(hidden[:, -1], ids[:, :0], 0).argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
    got = pieces(vocabulary, prompt, model=model)
    assert "".join(text for text, _ in got) == vocabulary.decode(ids[0])
    assert got[0] == (prompt, False) and all(generated for _, generated in got[1:])


def test_words_of_a_prompt_stand_between_white_space() -> None:
    assert pieces(WORDS, "  the\tsea ", 0) == [("the sea", False)]
    # The prompt's line goes on: no mark of its end comes between.
    (_, _), (first, _) = pieces(WORDS, "the sea", 1)
    assert first == "\n" or first.startswith(" ")


def test_a_character_appears_with_its_last_byte() -> None:
    model = text_model(BYTES.spec)
    with torch.no_grad():  # whatever stands before, the next symbol is the second byte of é
        model.head.bias[0xA9] = 1e4
    shown = continuation(model, BYTES, tokens=2, prompt="x", filters=GREEDY, seed=0)
    assert list(shown) == [
        ("x", False),
        ("\N{REPLACEMENT CHARACTER}", True),
        ("\N{REPLACEMENT CHARACTER}", True),
    ]
    with torch.no_grad():
        model.head.bias[0xC3] = 2e4  # the first byte, for ever: nothing is whole before the next
    assert pieces(BYTES, "x", 1, model=model) == [
        ("x", False),
        ("", True),
        ("\N{REPLACEMENT CHARACTER}", True),
    ]


def test_a_piece_comes_before_the_next_is_made() -> None:
    model = text_model(CHARACTERS.spec)
    endless = continuation(model, CHARACTERS, tokens=10**9, prompt="ab", filters=Filters(), seed=0)
    assert next(endless) == ("ab", False)
    assert all(len(next(endless)[0]) == 1 for _ in range(5))


@pytest.mark.parametrize("vocabulary", [BYTES, CHARACTERS, WORDS])
@pytest.mark.parametrize("prompt", [None, ""])
def test_without_a_prompt_text_begins_after_a_newline(vocabulary: Vocabulary, prompt: str | None) -> None:
    # A generated newline may follow; the one it begins from is not shown.
    begun = "".join(text for text, _ in pieces(vocabulary, "\n", 9))
    alone = pieces(vocabulary, prompt, 9)
    assert all(generated for _, generated in alone)
    assert "\n" + "".join(text for text, _ in alone) == begun


def test_the_seed_decides_and_filters_count() -> None:
    def text(**options: object) -> str:
        drawn = pieces(CHARACTERS, "a", 30, **options)  # pyright: ignore[reportArgumentType]
        return "".join(piece for piece, _ in drawn)

    assert text(filters=Filters(), seed=1) == text(filters=Filters(), seed=1)
    assert text(filters=Filters(), seed=1) != text(filters=Filters(), seed=2)
    assert text(filters=Filters(top_k=1), seed=3) == text()
    assert text(filters=Filters(top_p=1e-6), seed=4) == text()


def test_prompts_that_cannot_be_continued() -> None:
    with pytest.raises(ConfigError, match="has no newline from which a text could begin; give --prompt"):
        pieces(CharacterVocabulary("abc"), None)
    with pytest.raises(ConfigError, match="has no newline"):
        pieces(ByteVocabulary(drop_newlines=True), None)
    with pytest.raises(DataError, match="line 1: the word 'moon' is not in the vocabulary"):
        pieces(WORDS, "the moon")
    with pytest.raises(SpecError, match="hold different symbols"):
        pieces(WORDS, "the", model=text_model())


def test_symbols_are_a_prompt_too() -> None:
    model = text_model(CHARACTERS.spec)
    ids = CHARACTERS.encode("abc")
    drawn = list(continuation(model, CHARACTERS, tokens=9, prompt=ids, filters=GREEDY, seed=0))
    assert drawn == pieces(CHARACTERS, "abc", 9, model=model)


def test_a_text_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"

    def write(stops: bool) -> None:
        with text_writer(path) as write:
            write("a\n")
            if stops:
                raise KeyboardInterrupt
            write("é")

    write(stops=False)
    assert path.read_bytes() == "a\né".encode()
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write(stops=True)
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]
