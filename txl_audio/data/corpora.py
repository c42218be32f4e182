"""Text corpora and their splits: the benchmarks of the paper, and anybody's text.

Splits are those of the authors' `getdata.sh` and `prep_text8.py` (kimiyoung/transformer-xl) and of
`prep_enwik8.py` (salesforce/awd-lstm-lm). A new corpus is one entry of `CORPORA`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from txl_audio.data.archives import OpenFile, SourceFile, list_files, measure
from txl_audio.data.audio import file_sha256
from txl_audio.tokens import ConfigError, DataError

DEFAULT_FRACTIONS = "90/5/5"
SPLITS = ("train", "val", "test")
Chosen: TypeAlias = list[tuple[str, SourceFile]]
"""Files with the split that each belongs to, `all` where it holds all of them."""


@dataclass(frozen=True)
class Corpus:
    """How one data set is found and read.

    Attributes:
        symbols: what a token is.
        files: pattern of file names per split, matched at the end of the path; where one file holds
            all splits its key is `all`.
        expected: the names of files and archives in words, for messages.
        held_out_bytes: of a file with all splits, the bytes of each of val and test, which stand last.
        strip: whether white space at the ends of a split is left out.
        archive: pattern of the archive that the files come in.
        counted: splits from which the vocabulary is made.
        lower_case: whether words are folded.
        sentence_mark: where lines are sentences without an order, the word that ends each.
        vocabulary: name of the fixed vocabulary, a file beside the data, with where to get it.
        sha256: of files and archives, by name.
        tokens, types: published tokens per split and size of the vocabulary.
    """

    symbols: Literal["bytes", "characters", "words"]
    files: Mapping[str, str] = field(default_factory=dict)
    expected: str = ""
    held_out_bytes: int = 0
    strip: bool = False
    archive: str = "(?!)"
    counted: Sequence[str] = SPLITS
    lower_case: bool = False
    sentence_mark: str | None = None
    vocabulary: tuple[str, str] | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    types: int | None = None


def _named_splits(*patterns: str) -> dict[str, str]:
    """File patterns per split, with SPLIT in place of its name."""
    names = {"train": "train", "val": "(valid|validation|val|dev)", "test": "test"}
    return {split: "|".join(p.replace("SPLIT", name) for p in patterns) for split, name in names.items()}


_WIKITEXT = _named_splits(r"wiki\.SPLIT\.tokens", r"SPLIT\.txt")
_WIKITEXT_NAMES = "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens"
_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
_LM1B_HELD_OUT = r"heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-00000-of-00050"

CORPORA: dict[str, Corpus] = {
    "enwik8": Corpus(
        symbols="bytes",
        files={"all": "enwik8"},
        expected="enwik8 or enwik8.zip",
        held_out_bytes=5_000_000,
        archive=r"enwik8\.zip",
        sha256={"enwik8": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
        tokens={"train": 90_000_000, "val": 5_000_000, "test": 5_000_000},
        types=256,
    ),
    "text8": Corpus(
        symbols="characters",
        files={"all": "text8"},
        expected="text8 or text8.zip",
        held_out_bytes=5_000_000,
        strip=True,
        archive=r"text8\.zip",
        sha256={"text8": "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7"},
        types=27,
    ),
    "wt103": Corpus(
        symbols="words",
        files=_WIKITEXT,
        expected=f"{_WIKITEXT_NAMES} or wikitext-103-v1.zip",
        archive=r"wikitext-103-v1\.zip",
        counted=("train",),
        sha256={"wikitext-103-v1.zip": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"},
        tokens={"train": 103_227_021, "val": 217_646, "test": 245_569},
        types=267_735,
    ),
    "wt2": Corpus(
        symbols="words",
        files=_WIKITEXT,
        expected=f"{_WIKITEXT_NAMES} or wikitext-2-v1.zip",
        archive=r"wikitext-2-v1\.zip",
        sha256={
            "wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
        tokens={"train": 2_088_628, "val": 217_646, "test": 245_569},
        types=33_278,
    ),
    "ptb": Corpus(
        symbols="words",
        files=_named_splits(r"ptb\.SPLIT\.txt", r"SPLIT\.txt"),
        expected="ptb.train.txt, ptb.valid.txt and ptb.test.txt or simple-examples.tgz",
        archive=r"simple-examples\.(tgz|tar\.gz)",
        lower_case=True,
        tokens={"train": 929_589, "val": 73_760, "test": 82_430},
        types=10_000,
    ),
    "lm1b": Corpus(
        symbols="words",
        files={
            "train": r"training-monolingual\.tokenized\.shuffled/news\.en-\d{5}-of-00100",
            # The authors validate and test on the same part.
            "val": _LM1B_HELD_OUT,
            "test": _LM1B_HELD_OUT,
        },
        expected=f"training-monolingual.tokenized.shuffled/news.en-00001-of-00100 or {_LM1B}.tar.gz",
        archive=re.escape(_LM1B) + r"\.tar(\.gz)?",
        sentence_mark="<S>",
        vocabulary=("1b_word_vocab.txt", "https://github.com/rafaljozefowicz/lm"),
        sha256={f"{_LM1B}.tar.gz": "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"},
        # Words, one end for each sentence, and the mark that each file begins with.
        tokens={"train": 768_648_884 + 30_301_028 + 99, "val": 159_658 + 1, "test": 159_658 + 1},
        types=793_471,
    ),
    "bytes": Corpus(symbols="bytes"),
    "chars": Corpus(symbols="characters"),
    "words": Corpus(symbols="words"),
}

_ANY_NAMED = _named_splits(r"([^/]*[._-])?SPLIT(\.(txt|text|tokens|raw))?(\.(gz|bz2|xz))?")


@dataclass(frozen=True)
class Part:
    """Bytes [begin, end) of a file, which become one document. `sha256` is the whole file's."""

    split: str
    file: SourceFile
    begin: int
    end: int
    sha256: str


def corpus_of(dataset: str, split: str | None, newlines: str | None) -> Corpus:
    """The corpus of that name in the asked form. Raises ConfigError for options that do not fit."""
    if dataset not in CORPORA:
        raise ConfigError(f"no text corpus {dataset!r}; there are {', '.join(CORPORA)}")
    corpus = CORPORA[dataset]
    if split is not None and corpus.files:
        raise ConfigError(f"{dataset} has official splits; leave --split {split} out")
    if newlines not in (None, "keep", "drop") or (newlines and dataset != "enwik8"):
        raise ConfigError(f"--newlines is keep or drop, and for enwik8; got {newlines!r} for {dataset}")
    if newlines == "drop":
        return replace(corpus, tokens={"train": 88_982_818, "val": 4_945_742}, types=204)
    return corpus


def choose_files(
    corpus: Corpus, dataset: str, source: Path, split: str | None, stack: ExitStack
) -> tuple[Path, Chosen, list[str]]:
    """Files with their split (`all` where they hold several), the archive or folder they are in, warnings."""
    files = list_files(source, stack)
    if not corpus.files:
        chosen = _any_text(files, source, split)
        return source, chosen, _left_out(files, chosen)
    chosen = _matching(files, corpus.files)
    if not chosen and source.is_dir():
        archives = [file.name for file in files if re.fullmatch(corpus.archive, Path(file.name).name)]
        if archives:
            source = source / archives[0]
            chosen = _matching(list_files(source, stack), corpus.files)
    if not chosen:
        raise DataError(f"no files of {dataset} in {source}; expected names like {corpus.expected}")
    counts = Counter(name for name, _ in chosen)
    if corpus.sentence_mark is None and max(counts.values()) > 1:
        names = ", ".join(file.name for _, file in chosen)
        raise DataError(f"{source} has several files for a split ({names}); give the folder of one corpus")
    return source, chosen, []


def _any_text(files: list[SourceFile], source: Path, split: str | None) -> Chosen:
    """Files named for splits, else those that are called texts, else the only one."""
    chosen = [] if split is not None else _matching(files, _ANY_NAMED)
    if not {"train", "val"} <= {name for name, _ in chosen}:
        texts = [file for file in files if re.search(r"\.txt(\.(gz|bz2|xz))?$", file.name)]
        if not texts and len(files) != 1:
            raise DataError(f"{source} has {len(files)} files, none of them .txt; give one file or rename")
        chosen = [("all", file) for file in texts or files]
    names: dict[str, str] = {}
    for _, file in chosen:
        unpacked = re.sub(r"\.(gz|bz2|xz)$", "", file.name)
        if unpacked in names:
            raise DataError(
                f"{source} has {names[unpacked]} and {file.name}, which would count twice; remove one"
            )
        names[unpacked] = file.name
    return chosen


def _left_out(files: list[SourceFile], chosen: Chosen) -> list[str]:
    used = {file.name for _, file in chosen}
    names = [file.name for file in files if file.name not in used]
    shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
    return [f"{len(names)} of {len(files)} files are left out: {shown}"] if names else []


def _matching(files: list[SourceFile], patterns: Mapping[str, str]) -> Chosen:
    return [
        (split, file)
        for split, pattern in patterns.items()
        for file in files
        if re.search(f"(^|/)({pattern})$", file.name)
    ]


def check_archive(corpus: Corpus, path: Path) -> list[str]:
    """Warnings about the archive that is read."""
    expected = corpus.sha256.get(path.name) if path.is_file() else None
    return _differs(path.name, file_sha256(path), expected) if expected else []


def _differs(name: str, found: str, expected: str | None) -> list[str]:
    if expected is None or found == expected:
        return []
    return [f"{name} has SHA-256 {found}, the published corpus {expected}; results are not comparable"]


def cut_parts(
    corpus: Corpus,
    chosen: Chosen,
    split: str | None,
    read: Callable[[int], None],
) -> tuple[list[Part], str, list[str]]:
    """Parts in the order of the splits, how they were cut, and warnings about their content.

    `read` gets the bytes of every block that was read, for size and checksum or on the way to a cut.
    Raises DataError where all files are empty.
    """
    facts: dict[str, tuple[int, str]] = {}
    warnings: list[str] = []
    for _, file in chosen:
        if file.name not in facts:
            facts[file.name] = measure(file, read)
            name = Path(file.name).name
            warnings += _differs(name, facts[file.name][1], corpus.sha256.get(name))
    total = sum(size for size, _ in facts.values())
    if total == 0:
        raise DataError(f"{', '.join(facts)}: there is no text in it; expected at least one symbol")
    if chosen[0][0] != "all":
        parts = [Part(name, file, 0, *facts[file.name]) for name, file in chosen]
        how = "official" if corpus.files else "by file name"
        return [part for part in parts if part.end], how, warnings
    if corpus.files:
        held_out, how = corpus.held_out_bytes, "official"
        cuts = [0, total - 2 * held_out, total - held_out, total]
        if cuts[1] <= 0:
            raise DataError(f"{chosen[0][1].name} has {total:,} bytes, expected 100,000,000; it was cut off")
    else:
        how = split or DEFAULT_FRACTIONS
        a, b, c = _fractions(how)
        cuts = [0, round(total * a / (a + b + c)), round(total * (a + b) / (a + b + c)), total]
    parts: list[Part] = []
    at = 0
    for _, file in chosen:
        size, sha256 = facts[file.name]
        with OpenFile(file, read) as opened:
            places = [_boundary(corpus, opened, min(max(0, cut - at), size), size) for cut in cuts]
            for name, (begin, end) in zip(SPLITS, pairwise(places), strict=True):
                if begin < end:
                    part = Part(name, file, begin, end, sha256)
                    parts.append(_stripped(part, opened) if corpus.strip else part)
        at += size
    return sorted(parts, key=lambda part: SPLITS.index(part.split)), how, warnings


def _fractions(split: str) -> list[float]:
    try:
        fractions = [float(part) for part in split.split("/")]
    except ValueError:
        fractions = []
    # The last also tells infinity and "nan".
    if len(fractions) != 3 or min(fractions) < 0 or fractions[0] == 0 or not sum(fractions) < 1e9:
        raise ConfigError(f"--split is {split!r}, expected train/val/test fractions like {DEFAULT_FRACTIONS}")
    return fractions


def _boundary(corpus: Corpus, file: OpenFile, at: int, size: int) -> int:
    """The first place from `at` on where a text may be cut: after a line of words, before a character."""
    if corpus.symbols == "bytes" or at in (0, size):
        return at
    if corpus.symbols == "characters":
        data = file.read(at, at + 4)
        return at + next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
    data = file.read(at - 1, at + (1 << 20))
    return at - 1 + (data.find(b"\n") + 1 or data.find(b" ") + 1 or len(data))


def _stripped(part: Part, file: OpenFile) -> Part:
    head = file.read(part.begin, min(part.end, part.begin + 64))
    tail = file.read(max(part.begin, part.end - 64), part.end)
    begin = part.begin + len(head) - len(head.lstrip())
    return replace(part, begin=begin, end=part.end - (len(tail) - len(tail.rstrip())))
