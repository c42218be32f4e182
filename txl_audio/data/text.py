"""Vocabularies: text to symbols and back, of bytes, characters or words.

A vocabulary is saved as one JSON file, `vocabulary.json`, beside the shards made with it and in the
run folders trained on them. The hash of its content is the `settings_hash` of its TokenSpec.
"""

from __future__ import annotations

import codecs
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from txl_audio.tokens import DataError, TextDecoder, TextEncoder, TokenSpec, settings_hash

VOCABULARY_FILE = "vocabulary.json"
UNKNOWN_WORDS = ("<unk>", "<UNK>")
"""Words that stand for any other, where a vocabulary has one of them."""

S = TypeVar("S", int, str)


class _SymbolVocabulary(ABC, Generic[S]):
    """What the kinds share: symbols in id order, their spec, the file. `settings` are arguments by name."""

    kind: ClassVar[str]

    def __init__(self, symbols: Iterable[S], settings: dict[str, Any]) -> None:
        self.symbols: tuple[S, ...] = tuple(symbols)
        if not self.symbols or len(set(self.symbols)) != len(self.symbols):
            raise DataError(
                f"a vocabulary of {self.kind} needs symbols that all differ, got {len(self.symbols)}, of "
                f"which {len(set(self.symbols))} differ"
            )
        self._settings = settings
        content = {"kind": self.kind, "symbols": self.symbols, "settings": settings}
        self.spec = TokenSpec("text", len(self.symbols), 1, 0.0, 0, self.kind, settings_hash(content))

    def encode(self, text: str | bytes, *, complete: bool = True) -> torch.Tensor:
        """text -> ids [N] int64; bytes are UTF-8. See `Vocabulary.encode` in tokens.py.

        Raises DataError naming the symbol and its line where the vocabulary lacks it.
        """
        return torch.from_numpy(self.stream_encoder().push(text, complete=complete).astype(np.int64))

    def decode(self, ids: torch.Tensor) -> str:
        """ids [N] -> text. Raises DataError for an id outside the vocabulary."""
        decoder = self.stream_decoder()
        return decoder.push(ids) + decoder.flush()

    @abstractmethod
    def stream_encoder(self) -> TextEncoder: ...

    @abstractmethod
    def stream_decoder(self) -> TextDecoder: ...

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `load_vocabulary` reads."""
        content = {"kind": self.kind, "settings_hash": self.spec.settings_hash, "settings": self._settings}
        Path(path).write_text(json.dumps({**content, "symbols": self.symbols}) + "\n", encoding="utf-8")

    def checked(self, ids: torch.Tensor) -> np.ndarray:
        """ids of any shape -> [N] int64; DataError for one outside the vocabulary."""
        line = np.asarray(ids).reshape(-1).astype(np.int64)
        if len(line) and not 0 <= line.min() <= line.max() < len(self.symbols):
            raise DataError(f"got ids {line.min()}..{line.max()}, expected 0..{len(self.symbols) - 1}")
        return line


class ByteVocabulary(_SymbolVocabulary[int]):
    """One symbol per byte.

    Args:
        symbols: byte values in id order.
        drop_newlines: leave newline bytes out of the text, as the authors' enwik8 does.
    """

    kind = "bytes"

    def __init__(self, symbols: Iterable[int] = range(256), *, drop_newlines: bool = False) -> None:
        super().__init__(symbols, {"drop_newlines": drop_newlines})
        if not all(0 <= value < 256 for value in self.symbols):
            raise DataError(f"bytes are 0..255, got {min(self.symbols)}..{max(self.symbols)}")
        self.drop_newlines = drop_newlines
        self.table = np.full(256, -1, dtype=np.int32)
        self.table[list(self.symbols)] = np.arange(len(self.symbols))

    def stream_encoder(self) -> TextEncoder:
        return _ByteEncoder(self)

    def stream_decoder(self) -> TextDecoder:
        return _ByteDecoder(self)


class CharacterVocabulary(_SymbolVocabulary[str]):
    """One symbol per Unicode character; `symbols` are the characters in id order."""

    kind = "characters"

    def __init__(self, symbols: Iterable[str]) -> None:
        super().__init__(symbols, {})
        if any(len(symbol) != 1 for symbol in self.symbols):
            wrong = next(symbol for symbol in self.symbols if len(symbol) != 1)
            raise DataError(f"characters are single, got {wrong!r}; use a vocabulary of words")
        codes = [ord(symbol) for symbol in self.symbols]
        # By code point. The last place stands for every larger one.
        self.table = np.full(max(codes) + 2, -1, dtype=np.int32)
        self.table[codes] = np.arange(len(codes))

    def stream_encoder(self) -> TextEncoder:
        return _CharacterEncoder(self)

    def stream_decoder(self) -> TextDecoder:
        return _CharacterDecoder(self)


class WordVocabulary(_SymbolVocabulary[str]):
    """Words between white space, and a mark at the end of every line, as in the authors' code.

    A word that is not in the vocabulary becomes its `<unk>` or `<UNK>`, where there is one.

    Args:
        symbols: words in id order, the mark among them.
        line_end: the mark; decoded as a newline.
        begins: whether a text begins with the mark too (the lm1b rule).
        lower_case: fold the text to lower case (the PTB rule).
    """

    kind = "words"

    def __init__(
        self,
        symbols: Iterable[str],
        *,
        line_end: str = "<eos>",
        begins: bool = False,
        lower_case: bool = False,
    ) -> None:
        super().__init__(symbols, {"line_end": line_end, "begins": begins, "lower_case": lower_case})
        self.table = {word: id for id, word in enumerate(self.symbols)}
        if line_end not in self.table:
            raise DataError(f"the vocabulary lacks {line_end!r}, the mark at the end of a line; add it")
        self.line_end, self.begins, self.lower_case = self.table[line_end], begins, lower_case
        self.unknown = next((self.table[word] for word in UNKNOWN_WORDS if word in self.table), None)

    def stream_encoder(self) -> TextEncoder:
        return _WordEncoder(self)

    def stream_decoder(self) -> TextDecoder:
        return _WordDecoder(self)


TextVocabulary = ByteVocabulary | CharacterVocabulary | WordVocabulary

_KINDS: dict[str, type[ByteVocabulary] | type[CharacterVocabulary] | type[WordVocabulary]] = {
    kind.kind: kind for kind in (ByteVocabulary, CharacterVocabulary, WordVocabulary)
}


def load_vocabulary(path: str | Path) -> TextVocabulary:
    """Reads a `vocabulary.json`. Raises DataError where it is missing, damaged or was edited."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no vocabulary at {path}; prepare writes one beside the shards of a text")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = _KINDS[value["kind"]](value["symbols"], **value["settings"])
        expected = value["settings_hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no vocabulary ({error}); prepare the data again") from error
    if vocabulary.spec.settings_hash != expected:
        raise DataError(
            f"{path} has the hash {vocabulary.spec.settings_hash}, expected {expected}: it was changed after "
            "it was written; copy it again from where the data or the run was made"
        )
    return vocabulary


def unit(spec: TokenSpec) -> str:
    """What one symbol of a text stream is: byte, character, word, or symbol where that is not known."""
    return {"bytes": "byte", "characters": "character", "words": "word"}.get(spec.name, "symbol")


def text_metrics(spec: TokenSpec, *, nats: float, count: int) -> dict[str, float]:
    """Figures of `nats` over `count` symbols by name, first the one that people report: bits_per_byte,
    bits_per_character, perplexity (of words, which have bits_per_word too) or bits_per_symbol."""
    mean = nats / max(1, count)
    bits = {f"bits_per_{unit(spec)}": mean / math.log(2)}
    if spec.name != "words":
        return bits
    return {"perplexity": math.inf if mean > 700 else math.exp(mean), **bits}  # 1e304 is a number still


class _ByteEncoder:
    unknown = 0

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary, self._lines = vocabulary, 0

    def push(self, text: str | bytes, *, complete: bool = True) -> np.ndarray:
        data = np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)
        newlines = data == ord("\n")
        ids = self._vocabulary.table[data]
        wanted = ~newlines if self._vocabulary.drop_newlines else np.ones(len(data), dtype=bool)
        (missing,) = np.nonzero((ids < 0) & wanted)
        if len(missing):
            line = self._lines + int(newlines[: missing[0]].sum()) + 1
            raise DataError(_missing("byte", f"0x{data[missing[0]]:02x}", line))
        self._lines += int(newlines.sum())
        return ids[wanted]


class _CharacterEncoder:
    unknown = 0

    def __init__(self, vocabulary: CharacterVocabulary) -> None:
        self._vocabulary, self._lines = vocabulary, 0

    def push(self, text: str | bytes, *, complete: bool = True) -> np.ndarray:
        text, table = _text(text, self._lines), self._vocabulary.table
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = table[np.minimum(codes, len(table) - 1)]
        (missing,) = np.nonzero(ids < 0)
        if len(missing):
            at = int(missing[0])
            line = self._lines + text.count("\n", 0, at) + 1
            raise DataError(_missing("character", repr(text[at]), line))
        self._lines += text.count("\n")
        return ids


class _WordEncoder:
    def __init__(self, vocabulary: WordVocabulary) -> None:
        self.unknown = 0
        self._vocabulary, self._lines, self._begun = vocabulary, 0, not vocabulary.begins

    def push(self, text: str | bytes, *, complete: bool = True) -> np.ndarray:
        vocabulary = self._vocabulary
        text = _text(text, self._lines)
        if vocabulary.lower_case:
            text = text.lower()
        find, ids = vocabulary.table.get, [] if self._begun else [vocabulary.line_end]
        self._begun = True
        # The lines of a file opened as text: "\r" ends one too, the other separators of Unicode do not.
        lines = io.StringIO(text, newline=None).readlines()
        for line in lines:
            ids += [find(word, -1) for word in line.split()]
            ids.append(vocabulary.line_end)
        if lines and not complete and not lines[-1].endswith("\n"):
            ids.pop()
        line_ids = np.array(ids, dtype=np.int32)
        missing = line_ids < 0
        if missing.any():
            if vocabulary.unknown is None:
                raise DataError(self._first_missing(lines))
            line_ids[missing] = vocabulary.unknown
            self.unknown += int(missing.sum())
        # The next piece goes on with a line that has not ended.
        self._lines += len(lines) - int(bool(lines) and not lines[-1].endswith("\n"))
        return line_ids

    def _first_missing(self, lines: list[str]) -> str:
        table = self._vocabulary.table
        number, word = next(
            (number, word) for number, line in enumerate(lines) for word in line.split() if word not in table
        )
        return _missing("word", repr(word), self._lines + number + 1)


def _missing(what: str, symbol: str, line: int) -> str:
    advice = " and has no <unk>" if what == "word" else ""
    return (
        f"line {line}: the {what} {symbol} is not in the vocabulary{advice}; "
        "use a model whose vocabulary has it, or change the text"
    )


def _text(text: str | bytes, lines: int) -> str:
    """The text of bytes that follow `lines` lines."""
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line = lines + text.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"line {line} is not UTF-8 ({error.reason}); convert the text, or use a vocabulary of bytes"
        ) from error


class _ByteDecoder:
    """UTF-8 as it comes: a character appears when its last byte has."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes = np.array(vocabulary.symbols, dtype=np.uint8)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: torch.Tensor) -> str:
        return self._utf8.decode(self._bytes[self._vocabulary.checked(ids)].tobytes())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _CharacterDecoder:
    def __init__(self, vocabulary: CharacterVocabulary) -> None:
        self._vocabulary = vocabulary

    def push(self, ids: torch.Tensor) -> str:
        symbols = self._vocabulary.symbols
        return "".join(symbols[id] for id in self._vocabulary.checked(ids).tolist())

    def flush(self) -> str:
        return ""


class _WordDecoder:
    """A space before every word but the first of a line, a newline for the mark at its end."""

    def __init__(self, vocabulary: WordVocabulary) -> None:
        self._vocabulary = vocabulary
        self._before, self._begun = "", not vocabulary.begins

    def push(self, ids: torch.Tensor) -> str:
        pieces, vocabulary = [], self._vocabulary
        for id in vocabulary.checked(ids).tolist():
            if id != vocabulary.line_end:
                pieces += [self._before, vocabulary.symbols[id]]
                self._before = " "
            else:
                # The mark that a text begins with ends no line.
                pieces.append("\n" if self._begun else "")
                self._before = ""
            self._begun = True
        return "".join(pieces)

    def flush(self) -> str:
        return ""
