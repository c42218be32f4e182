"""Text corpora to shards: checksums, vocabulary and symbols, block by block.

Order of ids, unknown words and line marks are those of the authors' `data_utils.py` and `vocabulary.py`
(kimiyoung/transformer-xl), so that results can be compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from txl_audio.data.archives import OpenFile
from txl_audio.data.corpora import SPLITS, Corpus, Part, check_archive, choose_files, corpus_of, cut_parts
from txl_audio.data.shard_writer import ShardWriter, finish_interrupted
from txl_audio.data.shards import INDEX_FILE, Document, Shards
from txl_audio.data.text import (
    VOCABULARY_FILE,
    ByteVocabulary,
    CharacterVocabulary,
    TextVocabulary,
    WordVocabulary,
    load_vocabulary,
)
from txl_audio.tokens import DataError, TokenSpec, TxlError, settings_hash

CORPUS_FILE = "corpus.json"

Progress = Callable[[str, int, int], None]
"""Called after every block with (what is done, bytes done, bytes in all or 0 where not known yet)."""


@dataclass(frozen=True)
class TextReport:
    """What `prepare_text` did.

    Attributes:
        out: the shard folder.
        tokens: per split.
        documents: in all splits.
        vocabulary_size: symbols in the vocabulary.
        unknown: tokens that became the unknown word.
        preparation: as in the shards.
        warnings: what differs from the published corpus, or is missing.
        unchanged: the folder was already there, made from the same files in the same way.
    """

    out: Path
    tokens: dict[str, int]
    documents: int
    vocabulary_size: int
    unknown: int
    preparation: dict[str, Any]
    warnings: tuple[str, ...]
    unchanged: bool = False


def prepare_text(
    dataset: str,
    source: str | Path,
    out: str | Path,
    *,
    split: str | None = None,
    newlines: Literal["keep", "drop"] | None = None,
    strict: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> TextReport:
    """Encodes a corpus into the shard folder `out`, with its `vocabulary.json`.

    Files are read three times, for checksums, vocabulary and symbols; a compressed file that splits are cut
    out of once or twice more, for the places of the cuts. A call that would make what is already there
    returns after the checksums (`unchanged`). After an interruption `out` is as before.

    Args:
        dataset: a name of `CORPORA`.
        source: the archive, the folder it was extracted to, or one that holds either; for bytes, chars
            and words any text file, compressed or not, or a folder or archive of them.
        split: of bytes, chars and words: fractions of train, val and test, as `90/5/5`, cut by
            position in files sorted by name; without it, files named for train, valid and test are
            used where there are such.
        newlines: of enwik8: `drop` leaves out newline bytes and numbers the 204 others by frequency,
            as the authors do. Their bits are then per remaining byte.
        strict: raise where checksums or token counts are not the published ones, instead of warning.
        overwrite: replace shards that were made of other files or in another way.

    Raises ConfigError for wrong options, DataError for files that are missing or unfit, or shards in
    `out` that must not be replaced.
    """
    corpus = corpus_of(dataset, split, newlines)
    out, source = Path(out), Path(source)
    with ExitStack() as stack:
        path, chosen, warnings = choose_files(corpus, dataset, source, split, stack)
        warnings += check_archive(corpus, path)
        parts, how, differences = cut_parts(corpus, chosen, split, _counted("checking", 0, progress))
        missing = [name for name in SPLITS if all(part.split != name for part in parts)]
        warnings += differences + [f"there is no {name} in {source}" for name in missing]
        fixed = _fixed_vocabulary(corpus, dataset, path)
        preparation: dict[str, Any] = {"dataset": dataset, "split": how, "order": "ordered"}
        if dataset == "enwik8":
            preparation["newlines"] = newlines or "keep"
        if fixed is not None:
            preparation |= {"order": "sentences", "separator": fixed.line_end}
        facts = [(part.split, part.file.name, part.begin, part.end, part.sha256) for part in parts]
        fixed_hash = fixed.spec.settings_hash if fixed else None
        request = settings_hash({"preparation": preparation, "parts": facts, "vocabulary": fixed_hash})

        def report(documents: Sequence[Document], spec: TokenSpec, unknown: int) -> TextReport:
            tokens: Counter[str] = Counter()
            for document in documents:
                tokens[document.split] += document.frames
            found = (*warnings, *_differences(corpus, tokens, spec.vocab_size))
            if strict and found:
                raise DataError(found[0])
            size = spec.vocab_size
            return TextReport(out, dict(tokens), len(documents), size, unknown, preparation, found)

        if strict and warnings:
            raise DataError(warnings[0])
        finish_interrupted(out)
        made = _made(out)
        if made.get("request") == request and (shards := _finished(out)):
            return replace(report(shards.documents, shards.spec, made["unknown"]), unchanged=True)
        if (out / INDEX_FILE).is_file() and made.get("request") != request and not overwrite:
            raise DataError(
                f"{out} holds shards of {made.get('source', 'unknown origin')}, made of other files or in "
                f"another way than {source} now; choose another --out, or replace them with --overwrite"
            )
        vocabulary = fixed or _count(corpus, parts, newlines == "drop", progress)
        with ShardWriter(out, spec=vocabulary.spec, preparation=preparation) as writer:
            unknown = _write(writer, corpus, parts, vocabulary, progress)
            vocabulary.save(writer.folder / VOCABULARY_FILE)
            made = {"source": str(source), "request": request, "unknown": unknown}
            (writer.folder / CORPUS_FILE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            return report(writer.documents, writer.spec, unknown)


def _counted(what: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Progress that is told how much was done since."""
    done = 0

    def add(n: int) -> None:
        nonlocal done
        done += n
        progress(what, done, total)

    return add


def _whole_characters(data: bytes) -> int:
    """Bytes before the last character of UTF-8, which may go on."""
    last = (back for back in range(1, min(4, len(data)) + 1) if data[-back] & 0xC0 != 0x80)
    return len(data) - next(last, 0)


def _whole_words(data: bytes) -> int:
    """Bytes up to the last white space. After "\\r" a line may have "\\n" to come."""
    return 1 + max(data.rfind(space) for space in (b"\n", b" ", b"\t"))


_CUTS: dict[str, Callable[[bytes], int]] = {
    "bytes": len,
    "characters": _whole_characters,
    "words": _whole_words,
}


def _read(corpus: Corpus, parts: Sequence[Part]) -> Iterator[tuple[Part, Iterator[tuple[bytes, bool]]]]:
    """Every part with its blocks, as of `OpenFile.blocks`, which cut no symbol.

    To be read in this order: parts that follow each other in a file take one pass over it.
    """
    for file, of_file in groupby(parts, key=lambda part: part.file):
        with OpenFile(file) as opened:
            for part in of_file:
                yield part, opened.blocks(part.begin, part.end, _CUTS[corpus.symbols])


def _fixed_vocabulary(corpus: Corpus, dataset: str, path: Path) -> WordVocabulary | None:
    if corpus.vocabulary is None:
        return None
    name, origin = corpus.vocabulary
    for folder in (path, path.parent):
        if (folder / name).is_file():
            try:
                lines = (folder / name).read_text(encoding="utf-8").split("\n")
                words = dict.fromkeys(line.split()[0] for line in lines if line.strip())
                return WordVocabulary(words, line_end=corpus.sentence_mark or "<eos>", begins=True)
            except ValueError as error:  # among them DataError and what is no UTF-8
                raise DataError(f"{folder / name}: {error}; download it again from {origin}") from error
    raise DataError(
        f"{dataset} has a fixed vocabulary, {name}, which is not beside {path}; download it from {origin}"
    )


def _count(corpus: Corpus, parts: list[Part], drop_newlines: bool, progress: Progress) -> TextVocabulary:
    """The vocabulary of the counted splits: by frequency, then by first appearance."""
    if corpus.symbols == "bytes" and not drop_newlines:
        return ByteVocabulary()
    # Where there is no train, what there is has to do.
    counted = [part for part in parts if part.split in corpus.counted] or parts
    counts: Counter[Any] = Counter()
    add = _counted("counting", sum(part.end - part.begin for part in counted), progress)
    for _, blocks in _read(corpus, counted):
        for block, _ in blocks:
            if corpus.symbols == "bytes":
                counts.update(block.replace(b"\n", b""))
            else:
                # What is no UTF-8 is an error with its place when it is encoded.
                text = block.decode(errors="replace")
                folded = text.lower() if corpus.lower_case else text
                counts.update(folded if corpus.symbols == "characters" else folded.split())
            add(len(block))
    symbols = [symbol for symbol, _ in counts.most_common()]
    if corpus.symbols == "bytes":
        return ByteVocabulary(symbols, drop_newlines=True)
    if corpus.symbols == "characters":
        return CharacterVocabulary(symbols)
    return WordVocabulary(dict.fromkeys(["<eos>", *symbols]), lower_case=corpus.lower_case)


def _write(
    writer: ShardWriter, corpus: Corpus, parts: list[Part], vocabulary: TextVocabulary, progress: Progress
) -> int:
    """Appends every part as a document; returns how many tokens became the unknown word."""
    unknown = 0
    add = _counted("encoding", sum(part.end - part.begin for part in parts), progress)

    def symbols(part: Part, blocks: Iterator[tuple[bytes, bool]]) -> Iterator[np.ndarray]:
        nonlocal unknown
        encoder = vocabulary.stream_encoder()
        for block, last in blocks:
            try:
                ids = encoder.push(block, complete=last)
            except DataError as error:
                place = f"{part.file.name}, from byte {part.begin}" if part.begin else part.file.name
                raise DataError(f"{place}: {error}") from error
            yield ids
            add(len(block))
        unknown += encoder.unknown

    for part, blocks in _read(corpus, parts):
        id = f"{part.split}/{part.file.name}"
        writer.append(
            symbols(part, blocks), id=id, split=part.split, source=part.file.name, sha256=part.sha256
        )
    return unknown


def _made(out: Path) -> dict[str, Any]:
    """What an earlier call noted about `out`; empty where none did."""
    try:
        return dict(json.loads((out / CORPUS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _finished(out: Path) -> Shards | None:
    """The shards of `out`; None where they are damaged."""
    try:
        shards = Shards.open(out)
        vocabulary = load_vocabulary(out / VOCABULARY_FILE)
    except TxlError:
        return None
    return shards if vocabulary.spec == shards.spec else None


def _differences(corpus: Corpus, tokens: Mapping[str, int], types: int) -> list[str]:
    """What differs from the published counts."""
    found = [
        f"{name} has {count:,} tokens, published are {corpus.tokens[name]:,}; results are not comparable"
        for name, count in tokens.items()
        if corpus.tokens.get(name, count) != count
    ]
    # A vocabulary of other splits than the published one's has another size.
    if corpus.types not in (None, types) and all(name in tokens for name in corpus.counted):
        found.append(f"the vocabulary has {types:,} symbols, published are {corpus.types:,}")
    return found
