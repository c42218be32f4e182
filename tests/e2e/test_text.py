"""Text through the command line: prepared, trained, scored, sampled, compared."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import TEXT, run, tree
from txl_audio import recipe

METRICS = {"bytes": "bits_per_byte", "chars": "bits_per_character", "words": "perplexity"}

LINES = "".join(
    f"the {size} cat sees a {colour} dog at {hour}\n"
    for hour in ("dawn", "noon", "dusk")
    for size in ("big", "small", "thin")
    for colour in ("red", "black", "white", "grey")
)


@dataclass(frozen=True)
class Texts:
    """One small text as bytes, characters and words, and a run of a few steps on each."""

    source: Path
    data: dict[str, Path]
    runs: dict[str, Path]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("text")
    source, config = folder / "cats.txt", folder / "text.yaml"
    source.write_text(LINES)
    config.write_text(TEXT + "train: {steps: 3, lanes: 2, lr: 1e-2, warmup_steps: 0, final_lr: 1.0}\n")
    data, runs = {}, {}
    for kind in METRICS:
        data[kind], runs[kind] = folder / kind, folder / f"run_{kind}"
        result = run("prepare", source, "--dataset", kind, "--split", "80/10/10", "--out", data[kind])
        assert result.code == 0, result.err
        result = run("train", config, f"data={data[kind]}", f"out={runs[kind]}")
        assert result.code == 0, result.err
    return Texts(source, data, runs)


@pytest.mark.parametrize("kind", METRICS)
def test_evaluate_reports_what_people_report(texts: Texts, kind: str) -> None:
    figures = run("evaluate", texts.runs[kind], "--json").json
    mean = figures["nats"] / figures["count"]
    expected = math.exp(mean) if kind == "words" else mean / math.log(2)
    assert figures[METRICS[kind]] == pytest.approx(expected)
    if kind == "words":
        assert figures["bits_per_word"] == pytest.approx(mean / math.log(2))
    shards = recipe.open_shards(texts.data[kind], recipe.load_run(texts.runs[kind])[1], origin="test")
    assert figures["count"] == recipe.SplitDocuments(shards, "val").symbols - 1
    used = {name: figures[name] for name in ("lanes", "segment_len", "mem_len", "window", "clamp_len")}
    assert used == {"lanes": 1, "segment_len": 4, "mem_len": 4, "window": "segment", "clamp_len": None}
    assert figures["stride"] is None and figures["dynamic"] is None


def test_evaluate_with_settings_of_its_own(texts: Texts) -> None:
    folder, settings = texts.runs["chars"], ("evaluate.mem_len=16", "evaluate.segment_len=8")
    before = tree(folder)
    words = (*settings, "evaluate.window=same_length", "evaluate.clamp_len=6")
    figures = run("evaluate", folder, texts.data["chars"], *words, "--split", "test", "--json").json
    assert (figures["mem_len"], figures["segment_len"], figures["clamp_len"]) == (16, 8, 6)
    assert (figures["window"], figures["split"]) == ("same_length", "test")
    usual = run("evaluate", folder, "--split", "test", "--json").json
    assert figures["count"] == usual["count"] and figures["nats"] != usual["nats"]
    # The order of words does not matter, and a run can carry its settings.
    again = run("evaluate", folder, words[0], texts.data["chars"], *words[1:], "--split", "test", "--json")
    assert again.json == figures
    windows = run("evaluate", folder, "evaluate.mem_len=0", "evaluate.stride=1", "--split", "test", "--json")
    assert windows.json["count"] == usual["count"] and windows.json["stride"] == 1
    assert tree(folder) == before


@pytest.mark.parametrize("method", ["sgd", "rms"])
def test_dynamic_evaluation(texts: Texts, method: str) -> None:
    folder = texts.runs["chars"]
    before = tree(folder)
    words = ("--dynamic", method, "evaluate.dynamic.collect=200", "--json")
    figures = run(
        "evaluate", folder, *words, f"evaluate.dynamic.lr={0.03 if method == 'sgd' else 0.001}"
    ).json
    static = run("evaluate", folder, "--json").json
    assert figures["dynamic"]["method"] == method and figures["count"] == static["count"]
    assert figures["bits_per_character"] < static["bits_per_character"] - 0.01
    still = run("evaluate", folder, *words, "evaluate.dynamic.lr=0").json
    assert still["nats"] == pytest.approx(static["nats"], rel=1e-6)
    assert tree(folder) == before


def test_settings_that_cannot_be_used(texts: Texts) -> None:
    folder = texts.runs["chars"]
    for words, message in (
        (("train.lr=1",), "override 'train.lr=1' is not of the form evaluate.key=value"),
        (("evaluate.mem=1",), "unknown key 'evaluate.mem'; did you mean 'evaluate.mem_len'?"),
        (("evaluate.stride=1",), "stride is for models without memory"),
        (("--dynamic", "adam"), "--dynamic is 'adam', expected sgd or rms"),
        (("a", "b"), "got the folders a, b, expected one"),
    ):
        result = run("evaluate", folder, *words)
        assert result.code == 2 and message in result.error


@pytest.mark.parametrize("kind", METRICS)
def test_score_gives_every_token_its_nats(texts: Texts, kind: str, tmp_path: Path) -> None:
    file, out = tmp_path / "new.txt", tmp_path / "deep" / "nll.tsv"
    file.write_text("the red cat\n")
    (scored,) = run("score", texts.runs[kind], file, "--out", out, "--json").json["files"]
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    tokens = ["red", "cat", "<eos>"] if kind == "words" else [*"he red cat", "\\n"]
    assert [token for token, _ in lines] == tokens
    assert scored["count"] == len(tokens) and scored["path"] == str(file)
    assert scored["nats"] == pytest.approx(sum(float(nats) for _, nats in lines), abs=1e-5 * len(tokens))
    assert scored[METRICS[kind]] > 0


def test_score_of_the_text_is_what_evaluate_gives(texts: Texts, tmp_path: Path) -> None:
    vocabulary = recipe.vocabulary_of(texts.runs["bytes"])
    _, model = recipe.load_run(texts.runs["bytes"])
    documents = recipe.SplitDocuments(recipe.open_shards(texts.data["bytes"], model, origin="test"), "val")
    (tmp_path / "val.txt").write_text(vocabulary.decode(documents[0]))
    (scored,) = run("score", texts.runs["bytes"], tmp_path / "val.txt", "--json").json["files"]
    whole = run("evaluate", texts.runs["bytes"], "--json").json
    assert scored["count"] == whole["count"]
    assert scored["nats"] == pytest.approx(whole["nats"], rel=1e-6)


def test_m11_and_m18_bytes_and_one_token(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "m11.txt").write_bytes(b"ab\n\ncd\n")
    (tmp_path / "m18.txt").write_bytes(b"a")
    files = run("score", texts.runs["bytes"], tmp_path / "m11.txt", tmp_path / "m18.txt", "--json").json
    # Of 7 bytes the first is context; of one byte nothing is left to predict.
    assert [item["count"] for item in files["files"]] == [6, 0]
    assert files["files"][1]["nats"] == 0


def test_bytes_beyond_ascii_have_names(texts: Texts, tmp_path: Path) -> None:
    file, out = tmp_path / "a.txt", tmp_path / "nll.tsv"
    file.write_bytes("x\\\t\r\né".encode())
    assert run("score", texts.runs["bytes"], file, "--out", out).code == 0
    names = [line.split("\t")[0] for line in out.read_text().splitlines()]
    assert names == [r"\\", r"\t", r"\r", r"\n", r"\xc3", r"\xa9"]


def test_m16_a_word_that_is_not_known(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "moon.txt").write_text("the cat\nthe moon\n")
    result = run("score", texts.runs["words"], tmp_path / "moon.txt")
    assert result.code == 1
    assert "moon.txt: line 2: the word 'moon' is not in the vocabulary" in result.error


@pytest.mark.parametrize("kind", METRICS)
def test_sample_streams_text_behind_its_prompt(texts: Texts, kind: str, tmp_path: Path) -> None:
    words = ("sample", texts.runs[kind], "--prompt", "the red cat", "--tokens", 20, "--seed", 3)
    figures = run(*words, "--json").json
    assert (figures["symbols"], figures["seed"], figures["backend"]) == (20, 3, "torch cpu")
    assert figures["symbols_per_s"] == pytest.approx(20 / figures["wall_s"])
    assert 0 < figures["first_chunk_ms"] <= 1000 * figures["wall_s"]
    assert figures["text"].startswith("the red cat")
    streamed = run(*words)
    assert streamed.out == figures["text"] + "\n" and "20 symbols in" in streamed.err
    written = run(*words, "--out", tmp_path / "new" / "text.txt")
    assert (tmp_path / "new" / "text.txt").read_text() == figures["text"]
    assert written.out.count("\n") == 1 and str(tmp_path) in written.out
    greedy = run(*words, "--temperature", 0).out
    assert run(*words, "--top-k", 1).out == greedy == run(*words, "--top-p", 1e-6).out


def test_sample_from_nothing(texts: Texts) -> None:
    figures: dict[str, Any] = run("sample", texts.runs["chars"], "--tokens", 5, "--json").json
    assert len(figures["text"]) == 5
    assert run("sample", texts.runs["chars"], "--tokens", 0, "--json").json["text"] == ""


def test_words_of_sound_and_text_do_not_mix(texts: Texts, tmp_path: Path) -> None:
    for words in (("--raw",), ("--seconds", 1), ("--with-prompt",), ("--prompt-seconds", 1)):
        result = run("sample", texts.runs["chars"], *words)
        assert result.code == 2 and "are for sound" in result.error
    (tmp_path / "a.txt").write_text("the cat")
    result = run("score", texts.runs["chars"], tmp_path / "a.txt", texts.source, "--out", tmp_path / "b.tsv")
    assert result.code == 2 and "--out takes the nats of one text file" in result.error


def test_context_of_a_group(texts: Texts, tmp_path: Path) -> None:
    group = (texts.runs["chars"], texts.runs["chars"])
    words = ("--step", 4, "--longest", 12, "--positions", 30, "--split", "train", "--r", 0.5, "--r", 1)
    out = tmp_path / "new" / "context.png"
    figures = run("context", *group, *words, "--out", out, "--json").json
    assert figures["contexts"][:2] == [4, 8] and figures["positions"] == 30
    first, second = figures["runs"]
    assert first == second and first["run"] == str(group[0])
    assert first["recl"].keys() == {"0.5", "1.0"} and first["recl"]["0.5"] in figures["contexts"]
    assert len(first["gains"]["0.5"]) == len(figures["contexts"]) - 1
    assert out.read_bytes()[:4] == b"\x89PNG"
    table = run("context", *group, *words).out.splitlines()
    assert len(table) == 3 and table[1].endswith(str(group[0]))
    result = run("context", texts.runs["chars"], texts.runs["words"], *words)
    assert result.code == 1 and "hold different symbols" in result.error


def test_a_run_without_a_vocabulary_says_so(texts: Texts, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name, content in tree(texts.runs["chars"]).items():
        if "/" not in name and not name.startswith("vocabulary"):
            (copy / name).write_bytes(content)
    for words in (("score", copy, texts.source), ("sample", copy, "--prompt", "a")):
        result = run(*words)
        assert result.code == 1 and "has no vocabulary (vocabulary.json)" in result.error
    assert json.loads(run("evaluate", copy, "--json").out)["count"] > 0
