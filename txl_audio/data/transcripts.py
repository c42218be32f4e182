"""What is said in recordings: read from files, and put beside codes as documents of two kinds of frames.

Shapes: N frames, K symbols per frame, V codes, C characters.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import numpy as np
import torch

from txl_audio.data.text import TextVocabulary
from txl_audio.tokens import DataError, TokenSpec

Order: TypeAlias = Literal["speak", "transcribe"]

MARKS = 3
"""END after what is to be made; SPEAK before sound; WRITE before text."""


class Transcripts:
    """Codes with text beside them, in one stream.

    `speak` is WRITE text SPEAK codes END: a model that goes on after SPEAK says the text. `transcribe` is
    SPEAK codes WRITE text END. Symbols: V codes, END, C characters, SPEAK, WRITE; so what sound may go on
    with, and what text may, are one range each. Text and marks stand in the first place of a frame, whose
    other places hold the start symbol, V + C + 3.

    Args:
        sound: spec of the codes alone.
    """

    def __init__(self, vocabulary: TextVocabulary, sound: TokenSpec) -> None:
        self.vocabulary = vocabulary
        characters = len(vocabulary.symbols)
        self.spec = sound.with_text(characters + MARKS, vocabulary.spec.settings_hash)
        self.end = sound.vocab_size
        self.speak = self.end + 1 + characters
        self.write = self.speak + 1

    def document(self, order: Order, codes: np.ndarray, text: str) -> np.ndarray:
        """codes [N, K] and what is said in them -> frames [M, K] int64."""
        if order == "speak":
            return np.concatenate([self.speak_prompt(text), codes, self._frames([self.end])])
        return np.concatenate([self.transcribe_prompt(codes), self._frames([*self._ids(text), self.end])])

    def speak_prompt(self, text: str) -> np.ndarray:
        """Frames [M, K] after which a model says `text`. Raises DataError for characters it does not know."""
        return self._frames([self.write, *self._ids(text), self.speak])

    @property
    def speaks(self) -> np.ndarray:
        """Frame [1, K] after which a model that was trained to transcribe makes sound of its own."""
        return self._frames([self.speak])

    def transcribe_prompt(self, codes: np.ndarray) -> np.ndarray:
        """Frames [M, K] after which a model writes what is said in codes [N, K]."""
        return np.concatenate([self.speaks, codes, self._frames([self.write])])

    def text_of(self, symbols: np.ndarray) -> str:
        """The text of first symbols [M] up to END, or all of them."""
        ends = np.flatnonzero(symbols == self.end)
        ids = symbols[: ends[0] if len(ends) else None] - self.end - 1
        return self.vocabulary.decode(torch.from_numpy(ids))

    def _ids(self, text: str) -> list[int]:
        return (self.vocabulary.encode(text, complete=False) + self.end + 1).tolist()

    def _frames(self, symbols: list[int]) -> np.ndarray:
        frames = np.full((len(symbols), self.spec.symbols_per_frame), self.spec.start_symbol, dtype=np.int64)
        frames[:, 0] = symbols
        return frames


def read_transcripts(path: str | Path) -> dict[str, str]:
    """What is said in recordings, by id: lines of id, tab (or `|`, as in LJSpeech), text.

    Columns between the first and the last are passed over. Or a Lhotse manifest of supervisions (.jsonl,
    .jsonl.gz): the texts of a recording in order of time. Raises DataError where it is no such file.
    """
    path = Path(path)
    if re.search(r"\.jsonl(\.gz)?$", path.name):
        return _read_supervisions(path)
    try:
        # With the mark that some programs put before UTF-8; other separators of lines are part of a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable as transcripts: {error}") from error
    texts: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = line.split("\t" if "\t" in line else "|")
        id, text = parts[0].strip(), parts[-1].strip()
        if len(parts) < 2 or not id or not text:
            raise DataError(f"{path}:{number}: {line[:60]!r} is no id, tab and text of a recording")
        if texts.setdefault(id, text) != text:
            raise DataError(f"{path}:{number}: a second transcript of {id!r}")
    return texts


def _read_supervisions(path: Path) -> dict[str, str]:
    segments: dict[str, list[tuple[float, str]]] = {}
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable as supervisions: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            start, text = float(item["start"]), str(item["text"] or "").strip()
            segments.setdefault(str(item["recording_id"]), []).append((start, text))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}:{number}: no Lhotse supervision ({type(error).__name__}: {error}); expected the "
                "fields recording_id, start and text"
            ) from error
    texts = {id: " ".join(text for _, text in sorted(said) if text) for id, said in segments.items()}
    return {id: text for id, text in texts.items() if text}


def ljspeech_text(base: Path) -> Callable[[PurePosixPath], str]:
    """The sentence with numbers and abbreviations written out."""
    path = base.parent / "metadata.csv"
    texts = read_transcripts(path) if path.is_file() else {}
    return lambda path: texts.get(path.stem, "")


def librispeech_text(base: Path) -> Callable[[PurePosixPath], str]:
    """Every chapter's folder has one file of lines: utterance, blank, text."""
    texts: dict[str, str] = {}
    for file in sorted(base.rglob("*.trans.txt")):
        for line in file.read_text(encoding="utf-8").split("\n"):
            id, _, text = line.partition(" ")
            texts[id] = text.strip()
    return lambda path: texts.get(path.stem, "")


def libritts_text(base: Path) -> Callable[[PurePosixPath], str]:
    """A file beside each recording, with numbers and abbreviations written out."""

    def text(path: PurePosixPath) -> str:
        file = (base / path).with_suffix(".normalized.txt")
        return file.read_text(encoding="utf-8").strip() if file.is_file() else ""

    return text


def arctic_text(base: Path) -> Callable[[PurePosixPath], str]:
    """Every speaker has one file of lines: ( name "text" ), which stands beside the folder of sound."""
    texts: dict[tuple[Path, str], str] = {}
    for file in sorted(base.rglob("etc/txt.done.data")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := re.fullmatch(r'\(\s*(\S+)\s+"(.*)"\s*\)', line.strip()):
                texts[file.parent.parent, match[1]] = match[2].replace('\\"', '"').strip()
    return lambda path: texts.get(((base / path).parent.parent, path.stem), "")


def folder_name(base: Path) -> Callable[[PurePosixPath], str]:
    """The word that is said is the folder's name."""
    return lambda path: path.parts[0]
