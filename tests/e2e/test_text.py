"""Text through the command line: prepared, trained, scored, sampled, compared."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.harness import TEXT, run, text_run, tree
from txl_audio import recipe
from txl_audio.checkpoint import RunFolder
from txl_audio.cli.evaluate import figures_of, first_figure, for_json
from txl_audio.config import load
from txl_audio.data.text import ByteVocabulary, CharacterVocabulary, WordVocabulary
from txl_audio.evaluate import Totals

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
    train = "{steps: 3, lanes: 2, lr: 1e-2, warmup_steps: 0, final_lr: 1.0, sample_every: 3}"
    config.write_text(f"{TEXT}train: {train}\n")
    data, runs = {}, {}
    for kind in METRICS:
        data[kind], runs[kind] = folder / kind, folder / f"run_{kind}"
        result = run("prepare", source, "--dataset", kind, "--split", "80/10/10", "--out", data[kind])
        assert result.code == 0, result.err
        result = run("train", config, f"data={data[kind]}", f"out={runs[kind]}")
        assert result.code == 0, result.err
    return Texts(source, data, runs)


def changed(source: Path, out: Path, *overrides: str) -> Path:
    """A copy of a run whose config says something else."""
    shutil.copytree(source, out)
    folder = RunFolder(out)
    folder.save_config(load(recipe.RunConfig, folder.config_path, overrides).to_yaml())
    return out


def validation_text(texts: Texts, kind: str) -> str:
    """The validation split as it was before it was symbols."""
    _, model = recipe.load_run(texts.runs[kind])
    documents = recipe.SplitDocuments(recipe.open_shards(texts.data[kind], model, origin="test"), "val")
    return recipe.vocabulary_of(texts.runs[kind]).decode(torch.from_numpy(documents[0].astype(np.int64)))


@pytest.mark.parametrize("kind", METRICS)
def test_samples_made_while_training(texts: Texts, kind: str) -> None:
    sample = (texts.runs[kind] / "samples" / "step_3.txt").read_text()
    before, text = validation_text(texts, kind), texts.source.read_text()
    assert before in text and sample[:20] == before[:20]
    if kind == "chars":
        assert len(sample) == 32 + 512 and sample[:32] == before[:32]
    (shown,) = EventAccumulator(str(texts.runs[kind])).Reload().Tensors("sample/text_summary")
    lines = shown.tensor_proto.string_val[0].decode().splitlines()
    assert shown.step == 3 and all(line.startswith("    ") for line in lines)


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


def test_dynamic_evaluation_has_lanes_of_its_own(texts: Texts, tmp_path: Path) -> None:
    """Those of the run are for scores without learning; what the call says counts."""
    folder = changed(texts.runs["chars"], tmp_path / "run", "evaluate.lanes=2")
    words = ("evaluate", folder, "--json")
    assert run(*words).json["lanes"] == 2
    assert run(*words, "--dynamic", "sgd").json["lanes"] == 1
    assert run(*words, "evaluate.dynamic.method=sgd").json["lanes"] == 1
    assert run(*words, "--dynamic", "sgd", "--lanes", 3).json["lanes"] == 3
    assert run(*words, "--dynamic", "sgd", "evaluate.lanes=3").json["lanes"] == 3


def test_dynamic_evaluation_that_runs_away(texts: Texts) -> None:
    words = ("--dynamic", "sgd", "evaluate.dynamic.lr=1e30", "--json")
    result = run("evaluate", texts.runs["words"], *words)
    assert result.code == 2 and "dynamic evaluation diverged after 4 symbols" in result.error


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    metrics = figures_of(WordVocabulary(["<eos>"]).spec, Totals(1e5, 1))
    assert metrics["perplexity"] == math.inf and first_figure(metrics) == "inf perplexity"
    assert for_json(metrics) == {"perplexity": None, "bits_per_word": metrics["bits_per_word"]}


def test_settings_that_cannot_be_used(texts: Texts) -> None:
    folder = texts.runs["chars"]
    for words, message in (
        (("train.lr=1",), "override 'train.lr=1' is not of the form evaluate.key=value"),
        (("evaluate.mem=1",), "unknown key 'evaluate.mem'; did you mean 'evaluate.mem_len'?"),
        (("evaluate.stride=1",), "stride is for models without memory"),
        (("evaluate.stride=1", "evaluate.mem_len=0", "--memory", "warm"), "so none can be warm"),
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
    (tmp_path / "val.txt").write_text(validation_text(texts, "bytes"))
    (scored,) = run("score", texts.runs["bytes"], tmp_path / "val.txt", "--json").json["files"]
    whole = run("evaluate", texts.runs["bytes"], "--json").json
    assert scored["count"] == whole["count"]
    assert scored["nats"] == pytest.approx(whole["nats"], rel=1e-6)


def test_score_heeds_the_runs_stride_and_says_that_it_does_not_learn(texts: Texts, tmp_path: Path) -> None:
    source, text = texts.runs["bytes"], tmp_path / "val.txt"
    text.write_text(validation_text(texts, "bytes"))
    windows = changed(source, tmp_path / "windows", "evaluate.mem_len=0", "evaluate.stride=1")
    (scored,) = run("score", windows, text, "--json").json["files"]
    whole = run("evaluate", windows, "--json").json
    assert (whole["stride"], whole["lanes"]) == (1, 16) and scored["count"] == whole["count"]
    assert scored["nats"] == pytest.approx(whole["nats"], rel=1e-6)
    learning = changed(source, tmp_path / "learning", "evaluate.dynamic.method=sgd")
    result = run("score", learning, text, "--json")
    assert "scored without learning: the run's evaluate.dynamic" in result.err
    assert result.json["files"] == run("score", source, text, "--json").json["files"]


def test_score_with_another_vocabulary_is_refused(texts: Texts, tmp_path: Path) -> None:
    folder = changed(texts.runs["chars"], tmp_path / "run")
    CharacterVocabulary(sorted(set(LINES), reverse=True)).save(folder / "vocabulary.json")
    result = run("score", folder, texts.source)
    assert result.code == 1 and "the model and the vocabulary hold different symbols" in result.error


def test_score_names_newlines_that_are_left_out(tmp_path: Path) -> None:
    vocabulary = ByteVocabulary(drop_newlines=True)
    folder, text = text_run(tmp_path / "run", vocabulary.spec), tmp_path / "a.txt"
    vocabulary.save(folder / "vocabulary.json")
    text.write_text("one\ntwo\n")
    figures = run("score", folder, text, "--json").json
    assert figures["newlines"] == "drop" and figures["files"][0]["count"] == 5
    assert f"bits per byte (newlines drop)  {text}" in run("score", folder, text).out


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
    assert (figures["symbols"], figures["seed"], figures["backend"]) == (20, 3, "compiled cpu")
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
    # Without --step in the hundreds of the published lengths.
    words = ("--longest", 200, "--positions", 3, "--split", "train")
    assert run("context", group[0], *words, "--json").json["contexts"] == [100, 200]


@pytest.mark.parametrize("name", ["context", "context.txt"])
def test_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    texts: Texts, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_audio.recipe.load_run", None)
    result = run("context", texts.runs["chars"], "--out", tmp_path / name)
    assert result.code == 2 and "expected the ending of a picture" in result.error


def test_figures_of_context_come_before_their_picture(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("txl_audio.plots.plot_context", full)
    words = ("--step", 4, "--longest", 12, "--positions", 30, "--out", tmp_path / "a.png")
    result = run("context", texts.runs["chars"], *words)
    assert result.code == 1 and result.err == "error: no space left on device\n"
    assert result.out.startswith("effective context by fraction")


def test_seeds_of_context_are_not_negative(texts: Texts) -> None:
    result = run("context", texts.runs["chars"], "--seed", -1)
    assert result.code == 2 and "--seed" in result.err and "Error" in result.err


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
