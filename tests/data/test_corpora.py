"""Corpora to shards: the authors' splits, ids and line marks, from the files that people have."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.harness import run
from txl_audio.data import archives, prepare_text
from txl_audio.data.corpora import CORPORA
from txl_audio.data.prepare_text import TextReport
from txl_audio.data.shards import Shards
from txl_audio.data.stream import TokenStream
from txl_audio.data.text import WordVocabulary, load_vocabulary
from txl_audio.tokens import IGNORE, ConfigError, DataError

Prepare = Callable[..., TextReport]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a corpus expect stand-ins of another size, with nothing published about them."""

    def change(name: str, **changes: Any) -> None:
        changes = {"sha256": {}, "tokens": {}, "types": None, **changes}
        monkeypatch.setitem(CORPORA, name, replace(CORPORA[name], **changes))

    return change


def prepare(dataset: str, source: Path, out: Path, **options: Any) -> TextReport:
    return prepare_text.prepare_text(dataset, source, out, **options)


def documents(out: Path) -> dict[str, list[int]]:
    shards = Shards.open(out)
    return {d.id: shards.symbols(d).ravel().tolist() for d in shards.documents}


def texts(out: Path) -> list[str]:
    vocabulary = load_vocabulary(out / "vocabulary.json")
    return [vocabulary.decode(np.array(ids)) for ids in documents(out).values()]  # pyright: ignore


def by_frequency(symbols: Any) -> list[Any]:
    """Python's own order of a Counter, which the authors' ids follow."""
    return [symbol for symbol, _ in Counter(symbols).most_common()]


BYTES = b"<page>\n\nab\xc3\xa9b\n" * 9 + b"zz\nq"


def test_enwik8_keeps_every_byte(tmp_path: Path, small: Callable[..., None]) -> None:
    small("enwik8", held_out_bytes=30)
    (tmp_path / "enwik8").write_bytes(BYTES)
    report = prepare("enwik8", tmp_path / "enwik8", tmp_path / "out")
    assert report.tokens == {"train": len(BYTES) - 60, "val": 30, "test": 30}
    assert report.preparation == {
        "dataset": "enwik8",
        "split": "official",
        "order": "ordered",
        "newlines": "keep",
    }
    assert Shards.open(tmp_path / "out").spec.name == "bytes"
    assert bytes(sum(documents(tmp_path / "out").values(), [])) == BYTES  # noqa: RUF017
    assert list(documents(tmp_path / "out")) == ["train/enwik8", "val/enwik8", "test/enwik8"]


def test_enwik8_as_the_authors_have_it(tmp_path: Path, small: Callable[..., None]) -> None:
    """Cut first, then newlines are dropped; ids by frequency in all splits, then by first appearance."""
    small("enwik8", held_out_bytes=30)
    (tmp_path / "enwik8").write_bytes(BYTES)
    report = prepare("enwik8", tmp_path, tmp_path / "out", newlines="drop")
    parts = [part.replace(b"\n", b"") for part in (BYTES[:-60], BYTES[-60:-30], BYTES[-30:])]
    symbols = by_frequency(b"".join(parts))
    assert load_vocabulary(tmp_path / "out" / "vocabulary.json").symbols == tuple(symbols)
    assert list(documents(tmp_path / "out").values()) == [[symbols.index(b) for b in part] for part in parts]
    assert report.preparation["newlines"] == "drop", "the form is named in every result"


def test_text8_strips_its_parts(tmp_path: Path, small: Callable[..., None]) -> None:
    """As the authors number it, with "_" for the space."""
    small("text8", held_out_bytes=20)
    text = " anarchism originated as a term of abuse first used against early working class"
    with zipfile.ZipFile(tmp_path / "text8.zip", "w") as archive:
        archive.writestr("text8", text)
    prepare("text8", tmp_path / "text8.zip", tmp_path / "out")
    parts = [text[:-40].strip(), text[-40:-20].strip(), text[-20:].strip()]
    assert len(parts[0]) < len(text[:-40]) and texts(tmp_path / "out") == parts
    symbols = by_frequency("".join(parts).replace(" ", "_"))
    expected = [symbol.replace("_", " ") for symbol in symbols]
    assert list(load_vocabulary(tmp_path / "out" / "vocabulary.json").symbols) == expected


def word_folder(folder: Path, names: str = "wiki.{}.tokens") -> Path:
    folder.mkdir(parents=True)
    for split, text in {
        "train": " \n = A b = \n \n the cat <unk> the\n",
        "valid": " the dog the\n",
        "test": "cat cat cat",
    }.items():
        (folder / names.format(split)).write_text(text)
    return folder


@pytest.mark.parametrize("names", ["wiki.{}.tokens", "{}.txt"])
def test_wikitext(tmp_path: Path, small: Callable[..., None], names: str) -> None:
    small("wt2")
    word_folder(tmp_path / "wikitext-2", names)
    report = prepare("wt2", tmp_path, tmp_path / "out")
    assert report.tokens == {"train": 12, "val": 4, "test": 4} and report.warnings == ()
    vocabulary = load_vocabulary(tmp_path / "out" / "vocabulary.json")
    # By frequency in all splits; = and <unk> stand as they first appeared.
    assert vocabulary.symbols == ("<eos>", "the", "cat", "=", "A", "b", "<unk>", "dog")
    assert documents(tmp_path / "out").popitem()[1] == [2, 2, 2, 0]
    (tmp_path / "again").mkdir()
    word_folder(tmp_path / "again" / "copy", names)
    word_folder(tmp_path / "again" / "other", names)
    with pytest.raises(DataError, match="has several files for a split"):
        prepare("wt2", tmp_path / "again", tmp_path / "out2")


def test_wikitext103_counts_train_only(tmp_path: Path, small: Callable[..., None]) -> None:
    small("wt103")
    folder = word_folder(tmp_path / "wikitext-103")
    report = prepare("wt103", folder, tmp_path / "out")
    assert "dog" not in load_vocabulary(tmp_path / "out" / "vocabulary.json").symbols
    assert report.unknown == 1  # the <unk> of the text itself is a word like others
    # M16: without <unk> in train the word is named.
    (folder / "wiki.train.tokens").write_text("the cat\n")
    with pytest.raises(
        DataError, match=r"wiki.valid.tokens: line 1: the word 'dog' is not in the vocabulary"
    ):
        prepare("wt103", folder, tmp_path / "none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "wikitext-103"], "nothing half-written"


def test_ptb_is_lower_case(tmp_path: Path, small: Callable[..., None]) -> None:
    small("ptb")
    with tarfile.open(tmp_path / "simple-examples.tgz", "w:gz") as archive:
        for split in ("train", "valid", "test"):
            for name in (f"ptb.{split}.txt", f"ptb.char.{split}.txt"):
                data = b" N Years\n" if "char" not in name else b"a b c"
                member = tarfile.TarInfo(f"./simple-examples/data/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    prepare("ptb", tmp_path / "simple-examples.tgz", tmp_path / "out")
    vocabulary = load_vocabulary(tmp_path / "out" / "vocabulary.json")
    assert vocabulary.symbols == ("<eos>", "n", "years")
    assert vocabulary.encode("N years").tolist() == [1, 2, 0]


LM1B = "1-billion-word-language-modeling-benchmark-r13output"


def lm1b(folder: Path) -> Path:
    train, held_out = (folder / LM1B / f"{n}-monolingual.tokenized.shuffled" for n in ("training", "heldout"))
    train.mkdir(parents=True)
    held_out.mkdir()
    (train / "news.en-00001-of-00100").write_text("the cat sat\nthe dog\n")
    (train / "news.en-00002-of-00100").write_text("cat\n")
    (held_out / "news.en.heldout-00000-of-00050").write_text("a cat\n")
    (held_out / "news.en.heldout-00001-of-00050").write_text("the the the\n")
    (folder / "1b_word_vocab.txt").write_text("<S> 9\n<UNK> 8\nthe 7\ncat\nsat\n")
    return folder


@pytest.mark.parametrize("form", ["folder", "inner", "archive"])
def test_lm1b(tmp_path: Path, small: Callable[..., None], form: str) -> None:
    small("lm1b")
    folder = lm1b(tmp_path / "data")
    source = folder if form == "folder" else folder / LM1B
    if form == "archive":
        source = folder / f"{LM1B}.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(folder / LM1B, arcname=LM1B)
    report = prepare("lm1b", source, tmp_path / "out")
    assert report.preparation["order"] == "sentences" and report.preparation["separator"] == 0
    assert report.unknown == 3 and report.tokens == {"train": 11, "val": 4, "test": 4}
    assert sorted(documents(tmp_path / "out").values()) == sorted(
        [[0, 2, 3, 4, 0, 2, 1, 0], [0, 3, 0], [0, 1, 3, 0], [0, 1, 3, 0]]
    ), "the authors validate and test on the same part"
    vocabulary = load_vocabulary(tmp_path / "out" / "vocabulary.json")
    assert isinstance(vocabulary, WordVocabulary) and vocabulary.begins

    # What a lane reads is what the authors' LMShuffledIterator makes of the same sentences: of each,
    # with the mark at both ends, all but the last symbol as inputs and all but the first as targets.
    sentences = [[0, 2, 3, 4, 0], [0, 2, 1, 0]]
    shards = Shards.open(tmp_path / "out")
    first = next(d for d in shards.documents if d.id.endswith("news.en-00001-of-00100"))
    (batch,) = TokenStream([shards.symbols(first).ravel()], shards.spec, lanes=1, segment_len=7)
    assert batch.inputs.flatten().tolist() == [symbol for s in sentences for symbol in s[:-1]]
    assert batch.targets.flatten().tolist() == [symbol for s in sentences for symbol in s[1:]]
    assert (batch.targets != IGNORE).all()

    (folder / "1b_word_vocab.txt").write_text("the 7\n")
    with pytest.raises(DataError, match=r"1b_word_vocab.txt: the vocabulary lacks '<S>'.*download it again"):
        prepare("lm1b", source, tmp_path / "out2")
    (folder / "1b_word_vocab.txt").unlink()
    with pytest.raises(
        DataError, match=r"fixed vocabulary, 1b_word_vocab.txt, which is not beside .*download"
    ):
        prepare("lm1b", source, tmp_path / "out2")


def test_wikitext2_has_the_published_counts(tmp_path: Path, shared: Path) -> None:
    source = shared / "data" / "wikitext2_valid_test"
    report = prepare("wt2", source, tmp_path / "out")
    assert report.tokens == {"val": 217_646, "test": 245_569}
    assert report.warnings == (f"there is no train in {source}",), "checksums are the published ones"
    assert Shards.open(tmp_path / "out").spec.vocab_size == report.vocabulary_size
    with pytest.raises(DataError, match="there is no train"):
        prepare("wt2", source, tmp_path / "out", strict=True)


def test_what_is_not_the_published_corpus_is_said(tmp_path: Path) -> None:
    folder = word_folder(tmp_path / "wikitext-2")
    report = prepare("wt2", folder, tmp_path / "out")
    assert [w.split(" has ")[0] for w in report.warnings] == [
        "wiki.valid.tokens",
        "wiki.test.tokens",
        "train",
        "val",
        "test",
        "the vocabulary",
    ]
    assert "has 12 tokens, published are 2,088,628; results are not comparable" in report.warnings[2]
    assert prepare("wt2", folder, tmp_path / "out").warnings == report.warnings
    with pytest.raises(DataError, match=r"SHA-256 .* the published corpus f0737ed3"):
        prepare("wt2", folder, tmp_path / "strict", strict=True)
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"wikitext-103/{path.name}")
    warnings = prepare("wt103", tmp_path / "wikitext-103-v1.zip", tmp_path / "wt103").warnings
    assert "wikitext-103-v1.zip has SHA-256" in warnings[0]
    # PTB has no known checksums: the counts speak, and nothing is put in place.
    with pytest.raises(DataError, match="train has 12 tokens, published are 929,589"):
        prepare("ptb", word_folder(tmp_path / "ptb", "ptb.{}.txt"), tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists() and not (tmp_path / "strict.partial").exists()
    (tmp_path / "enwik8").write_bytes(b"abc")
    with pytest.raises(DataError, match="has 3 bytes, expected 100,000,000; it was cut off"):
        prepare("enwik8", tmp_path / "enwik8", tmp_path / "strict")


TEXT = "one two\nthree\n\nfour é five\nsix\n" * 5


def test_a_text_is_cut_by_position(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text(TEXT)
    size = path.stat().st_size
    report = prepare("bytes", path, tmp_path / "bytes")
    assert report.preparation == {"dataset": "bytes", "split": "90/5/5", "order": "ordered"}
    assert report.tokens == {"train": round(0.9 * size), "val": 8, "test": 8}
    assert "".join(texts(tmp_path / "bytes")) == TEXT
    report = prepare("chars", path, tmp_path / "chars", split="50/25/25")
    assert "".join(texts(tmp_path / "chars")) == TEXT and sum(report.tokens.values()) == len(TEXT)
    report = prepare("words", path, tmp_path / "words", split="1/1/1")
    assert sum(report.tokens.values()) == len(TEXT.split()) + TEXT.count("\n")
    for part in texts(tmp_path / "words"):
        assert part.endswith("\n") and part.removesuffix("\n") in TEXT, "whole lines"
    vocabulary = load_vocabulary(tmp_path / "words" / "vocabulary.json")
    assert vocabulary.symbols == ("<eos>", *by_frequency(TEXT.split()))


def test_a_cut_inside_a_character_moves_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("日本語")
    assert prepare("chars", tmp_path / "a.txt", tmp_path / "out", split="4/3/2").tokens == {
        "train": 2,
        "val": 1,
    }


@pytest.mark.parametrize(
    "form", ["gz", "bz2", "xz", "zip", "tar", "tar.gz", "folder", "GZ", "ZIP", "tbz2", "txz"]
)
def test_texts_come_in_many_forms(tmp_path: Path, form: str) -> None:
    text = TEXT.encode()
    path = tmp_path / f"input.txt.{form}"
    if form.lower() in ("gz", "bz2", "xz"):
        path.write_bytes({"gz": gzip, "bz2": bz2, "xz": lzma}[form.lower()].compress(text))  # pyright: ignore
    elif form.lower() == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("texts/input.txt", text)
            archive.writestr("__MACOSX/texts/._input.txt", b"junk")
    elif form.startswith("t"):
        (tmp_path / "input.txt").write_bytes(text)
        mode = {"tar.gz": "w:gz", "tbz2": "w:bz2", "txz": "w:xz"}.get(form, "w")
        with tarfile.open(path, mode) as archive:  # pyright: ignore
            archive.add(tmp_path / "input.txt", arcname="input.txt")
    else:
        path.mkdir()
        (path / "b.txt").write_bytes(text[60:])
        (path / "a.txt").write_bytes(text[:60])
        (path / "image.png").write_bytes(b"junk")
    report = prepare("bytes", path, tmp_path / "out")
    assert report.warnings == (("1 of 3 files are left out: image.png",) if form == "folder" else ())
    assert "".join(texts(tmp_path / "out")) == TEXT
    found = set(documents(tmp_path / "out"))
    if form == "folder":
        assert found == {"train/a.txt", "train/b.txt", "val/b.txt", "test/b.txt"}
    else:
        name = "texts/input.txt" if form.lower() == "zip" else "input.txt"
        assert found == {f"{split}/{name}" for split in ("train", "val", "test")}


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_files_in_an_archive_may_be_compressed(tmp_path: Path, form: str) -> None:
    parts = {"train.txt.gz": gzip.compress(b"the cat"), "valid.txt.xz": lzma.compress(b"a dog")}
    path = tmp_path / f"texts.{form}"
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w") as archive:
            for name, content in parts.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    prepare("bytes", path, tmp_path / "out")
    assert texts(tmp_path / "out") == ["the cat", "a dog"]


@pytest.mark.parametrize(
    "content",
    [
        b"\x28\xb5\x2f\xfd\x04\x00",
        b"7z\xbc\xaf\x27\x1c",
        b"PK\x03\x04\x14\x00",
        b"Rar!\x1a\x07",
        gzip.compress(TEXT.encode()),
        bz2.compress(TEXT.encode()),
        lzma.compress(TEXT.encode()),
        gzip.compress(gzip.compress(TEXT.encode())),
    ],
    ids=["zstd", "7z", "zip", "rar", "gz", "bz2", "xz", "twice"],
)
def test_what_stays_compressed_is_refused(tmp_path: Path, content: bytes) -> None:
    twice = content[:2] == b"\x1f\x8b" and gzip.decompress(content)[:2] == b"\x1f\x8b"
    path = tmp_path / ("input.txt.gz" if twice else "input.txt.zst")
    path.write_bytes(content)
    with pytest.raises(DataError, match="input.txt.* is compressed, expected text; unpack it"):
        prepare("bytes", path, tmp_path / "out")


def test_a_compressed_file_is_read_once_for_each_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksum, cuts, vocabulary, symbols: however many splits are cut out of it, and never back."""
    size, made = len(TEXT.encode()), []

    class Counting(bz2.BZ2File):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def seek(self, offset: int, whence: int = 0) -> int:
            assert offset >= self.tell(), "going back reads a compressed file anew"
            return super().seek(offset, whence)

    (tmp_path / "input.txt.bz2").write_bytes(bz2.compress(TEXT.encode()))
    monkeypatch.setitem(archives._COMPRESSED, ".bz2", Counting)
    monkeypatch.setattr(archives, "BLOCK_BYTES", 16)
    passed: list[tuple[str, int]] = []
    prepare(
        "chars",
        tmp_path / "input.txt.bz2",
        tmp_path / "out",
        progress=lambda what, done, total: passed.append((what, done)),
    )
    assert len(made) == 4 and "".join(texts(tmp_path / "out")) == TEXT
    checking = max(done for what, done in passed if what == "checking")
    assert 1.7 * size < checking < 2 * size, "the way to the cuts is progress too"


@pytest.mark.parametrize("kind", ["encrypted", "packed otherwise"])
def test_a_zip_that_python_cannot_unpack(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "texts.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("input.txt", TEXT)
    content = bytearray(path.read_bytes())
    local, central = 0, content.index(b"PK\x01\x02")
    if kind == "encrypted":
        content[local + 6] |= 1
        content[central + 8] |= 1
    else:
        content[local + 8] = content[central + 10] = 99
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"input.txt cannot be read \(.*\); unpack it and give the folder"):
        prepare("chars", path, tmp_path / "out")


def test_a_text_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(b"train.txt"))
    for options in ({}, {"split": "8/1/1"}):
        with pytest.raises(DataError, match=r"has train.txt and train.txt.gz, which would count twice"):
            prepare("chars", tmp_path, tmp_path / "out", **options)


def test_blocks_are_small_whatever_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text without a line or a space is cut all the same, but for words, which it has none of."""
    monkeypatch.setattr(archives, "BLOCK_BYTES", 8)
    monkeypatch.setattr(archives, "MAX_WORD_BYTES", 50)
    text = "日本語é" * 20
    (tmp_path / "input.txt").write_text(text)
    longest: dict[str, int] = {}
    real = prepare_text._read

    def measured(*arguments: Any) -> Any:
        for part, blocks in real(*arguments):
            yield (
                part,
                (longest.update(n=max(longest.get("n", 0), len(b))) or (b, last) for b, last in blocks),
            )

    monkeypatch.setattr(prepare_text, "_read", measured)
    for dataset in ("bytes", "chars"):
        longest.clear()
        prepare(dataset, tmp_path / "input.txt", tmp_path / dataset)
        assert "".join(texts(tmp_path / dataset)) == text
        assert 0 < longest["n"] <= 8 + 3
    with pytest.raises(DataError, match="input.txt has no white space for .* bytes, so it has no words"):
        prepare("words", tmp_path / "input.txt", tmp_path / "words")


def test_files_named_for_splits_are_used(tmp_path: Path) -> None:
    for name in ("corpus.train.txt", "valid.txt", "test.txt", "training_notes.txt"):
        (tmp_path / name).write_text(name)
    report = prepare("chars", tmp_path, tmp_path / "out")
    assert report.preparation["split"] == "by file name"
    assert report.warnings == ("1 of 4 files are left out: training_notes.txt",)
    assert texts(tmp_path / "out") == ["corpus.train.txt", "valid.txt", "test.txt"]
    report = prepare("chars", tmp_path, tmp_path / "cut", split="8/1/1")
    assert report.preparation["split"] == "8/1/1" and sum(report.tokens.values()) == 51


@given(
    text=st.text(alphabet="ab é日\n", min_size=1, max_size=60),
    block=st.integers(1, 12),
    dataset=st.sampled_from(["bytes", "chars", "words"]),
)
def test_blocks_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int, dataset: str
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "train.txt").write_text(text)
    (folder / "valid.txt").write_text("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archives, "BLOCK_BYTES", block)
        prepare(dataset, folder, folder / "out")
    whole = load_vocabulary(folder / "out" / "vocabulary.json").encode(text).tolist()
    assert documents(folder / "out")["train/train.txt"] == whole


def test_the_same_call_again_does_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "input.txt", tmp_path / "out"
    path.write_text(TEXT)
    first = prepare("chars", path, out)
    before = (out / "tokens.bin").stat().st_mtime_ns
    assert prepare("chars", path, out) == replace(first, unchanged=True)
    assert (out / "tokens.bin").stat().st_mtime_ns == before
    for dataset, options in (("words", {}), ("chars", {"split": "8/1/1"})):
        with pytest.raises(
            DataError, match=r"holds shards of .*input.txt, made of other files or in another"
        ):
            prepare(dataset, path, out, **options)
    assert prepare("words", path, out, overwrite=True).unchanged is False
    assert Shards.open(out).spec.name == "words"
    (out / "tokens.bin").write_bytes(b"")
    assert prepare("words", path, out).unchanged is False, "damage is mended"
    path.write_text(TEXT + "more")
    with pytest.raises(DataError, match="made of other files"):
        prepare("words", path, out)


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    path, out = tmp_path / "input.txt", tmp_path / "out"
    path.write_text(TEXT)
    prepare("chars", path, out)

    def stop(what: str, done: int, total: int) -> None:
        if what == "encoding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("words", path, out, overwrite=True, progress=stop)
    assert Shards.open(out).spec.name == "characters"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input.txt", "out"]


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text(TEXT)
    seen: list[tuple[str, int, int]] = []
    prepare("words", tmp_path / "input.txt", tmp_path / "out", progress=lambda *step: seen.append(step))
    size = len(TEXT.encode())
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["checking", "counting", "encoding"]
    assert seen[-1] == ("encoding", size, size)


def test_errors(tmp_path: Path) -> None:
    path, out = tmp_path / "input.txt", tmp_path / "out"
    path.write_bytes(b"abc\n\xff\n")
    for options, error, reason in [
        ({"dataset": "bible"}, ConfigError, "no text corpus 'bible'; there are enwik8, text8"),
        (
            {"dataset": "wt2", "split": "8/1/1"},
            ConfigError,
            "wt2 has official splits; leave --split 8/1/1 out",
        ),
        (
            {"dataset": "chars", "split": "official"},
            ConfigError,
            "expected train/val/test fractions like 90/5/5",
        ),
        ({"dataset": "chars", "split": "0/1/1"}, ConfigError, "expected train/val/test fractions"),
        ({"dataset": "chars", "split": "1/inf/1"}, ConfigError, "expected train/val/test fractions"),
        ({"dataset": "chars", "split": "1/1/nan"}, ConfigError, "expected train/val/test fractions"),
        ({"dataset": "bytes", "newlines": "drop"}, ConfigError, "--newlines is keep or drop, and for enwik8"),
        ({"dataset": "enwik8", "newlines": "maybe"}, ConfigError, "got 'maybe'"),
        ({"dataset": "chars", "source": tmp_path / "absent"}, DataError, "nothing at .*absent"),
        (
            {"dataset": "wt103"},
            DataError,
            r"no files of wt103 in .*input.txt; expected names like wiki.train.tokens, ",
        ),
        ({"dataset": "chars"}, DataError, "input.txt: line 2 is not UTF-8"),
    ]:
        given_options: dict[str, Any] = {"source": path, "out": out, **options}
        with pytest.raises(error, match=reason):
            prepare(**given_options)
    assert not out.exists()
    (tmp_path / "text8.zip").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match="text8.zip cannot be read .*copy or download it again"):
        prepare("text8", tmp_path / "text8.zip", out)
    whole = gzip.compress(TEXT.encode() * 100)
    (tmp_path / "cut.txt.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cut.txt cannot be read"):
        prepare("bytes", tmp_path / "cut.txt.gz", out)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="empty.txt: there is no text in it"):
        prepare("chars", tmp_path / "empty.txt", out)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="nothing has 0 files"):
        prepare("chars", tmp_path / "nothing", out)


@pytest.mark.parametrize("name", [name for name, corpus in CORPORA.items() if corpus.files])
def test_expected_names_are_ones_that_are_found(name: str) -> None:
    corpus = CORPORA[name]
    *files, archive = re.split(", | and | or ", corpus.expected)
    assert re.fullmatch(corpus.archive, archive)
    for file in files:
        assert any(re.search(f"(^|/)({pattern})$", file) for pattern in corpus.files.values())


def test_the_verb(tmp_path: Path) -> None:
    path, out = tmp_path / "input.txt", tmp_path / "out"
    path.write_text(TEXT)
    result = run("prepare", path, "--dataset", "chars", "--out", out, "--json")
    assert result.code == 0
    figures = json.loads(result.out)
    assert list(figures["tokens"]) == ["train", "val", "test"]
    assert sum(figures["tokens"].values()) == len(TEXT)
    assert figures["preparation"] == {"dataset": "chars", "split": "90/5/5", "order": "ordered"}
    assert (figures["documents"], figures["unknown"], figures["unchanged"]) == (3, 0, False)
    result = run("prepare", "--root", path, "--dataset", "chars", "--out", out)
    assert result.code == 0 and result.out.startswith("already prepared: train ")
    for words, reason in [
        (("--dataset", "chars"), "--dataset chars needs SOURCE, its archive, folder or file"),
        ((path, "--dataset", "chars", "--gain", "peak:-1"), "are for audio, chars is a text"),
        ((path, "--newlines", "drop"), "--newlines drop is for --dataset enwik8"),
        ((path, "--dataset", "ljspeech"), "give either SOURCE or --dataset NAME with --root DIR"),
    ]:
        result = run("prepare", *words, "--out", tmp_path / "other")
        assert result.code == 2 and reason in result.err, result.err
