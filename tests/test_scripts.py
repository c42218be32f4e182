"""The scripts that measure, at sizes of a few seconds."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.e2e.harness import TINY, text_run
from tests.e2e.harness import run as txl_audio
from tests.helpers import speech_like
from txl_audio import recipe
from txl_audio.codecs.mulaw import MuLawCodec, mulaw_decode, mulaw_encode
from txl_audio.codecs.predictors import PredictorsConfig
from txl_audio.config import load
from txl_audio.data.shard_writer import ShardWriter
from txl_audio.data.shards import Shards
from txl_audio.tokens import CheckpointError, DataError, SpecError

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))  # scripts import their neighbours


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


TEXT_RUN = """
name: tiny
device: cpu
precision: float32
model:
  embedding: {kind: symbols}
  core: {n_layer: 1, d_model: 16, n_head: 2, d_head: 8, d_ff: 32, mem_len: 4, segment_len: 8}
  head: {kind: softmax}
train: {lanes: 2, lr: 1e-2, warmup_steps: 0, log_every: 1}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a quick brown fox\n" * 60)
    done = txl_audio("prepare", tmp_path / "text.txt", "--dataset", "chars", "--out", tmp_path / "data")
    assert done.code == 0, done.err
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT_RUN + f"data: {tmp_path / 'data'}\n")
    return path


def test_compare_trains_each_variant_once(config: Path, tmp_path: Path, capsys: Any) -> None:
    compare, out = script("compare"), tmp_path / "out"
    words = [str(out), "--steps", "3", f"plain={config}", f"high rate={config} train.lr=0.1"]
    compare.main(words)
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["variant", "---", "plain", "high rate"]
    assert "bits per character" in table[0] and "+0.0000" in table[2]
    rows = json.loads((out / "table.json").read_text())
    assert rows[0]["steps"] == 3 and all(
        row["steps"] >= 1 and row["symbols"] == 16 * row["steps"] for row in rows
    )
    trained = {name: (out / name / "model.safetensors").stat().st_mtime_ns for name in ("plain", "high_rate")}
    # The same again trains nothing; another rate trains that variant alone.
    compare.main([*words[:-1], f"high rate={config} train.lr=0.05"])
    assert (out / "plain" / "model.safetensors").stat().st_mtime_ns == trained["plain"]
    assert (out / "high_rate" / "model.safetensors").stat().st_mtime_ns > trained["high_rate"]
    compare.main([str(out), "--equal-steps", "2", words[3]])
    assert json.loads((out / "table.json").read_text())[0]["steps"] == 2


def test_compare_refuses_what_it_cannot_tell_apart(tmp_path: Path, capsys: Any) -> None:
    compare = script("compare")
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=CONFIG"):
        compare.Variant.parse("nameless")
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), "--steps", "1", "a b=x.yaml", "a_b=x.yaml"])
    assert "need folders that differ" in capsys.readouterr().err
    assert compare.Variant.parse("a=b.yaml train.lr=1e-3").overrides == ("train.lr=1e-3",)


def test_evaluation_speed(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "16", "--heads", "2", "--d-ff", "32"]
    few = ["--segments", "8", "--batches", "1", "--windows", "1", "--segments-timed", "1", "--threads", "1"]
    script("evaluation_speed").main([*sizes, *few, "--lengths", "32", "64", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "evaluation_speed.json").read_text())
    assert [row["attention_length"] for row in result["rows"]] == [32, 64]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["vanilla_s_per_token"] / row["transformer_xl_s_per_token"])
    assert (tmp_path / "evaluation_speed.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run folder trained for one step, and its data: 4 documents of validation, one of them short."""
    folder = tmp_path_factory.mktemp("speech")
    with ShardWriter(folder / "data", spec=MuLawCodec().spec, preparation={}) as writer:
        for index, seconds in enumerate((1.0, 1.2, 1.1, 1.3, 0.2)):
            codes, split = mulaw_encode(speech_like(seconds, index)), "train" if index == 0 else "val"
            writer.append(codes, id=f"doc{index}", split=split, source="", sha256="")
    config = folder / "tiny.yaml"
    config.write_text(TINY + f"data: {folder / 'data'}\n")
    trained = txl_audio(
        "train", config, f"out={folder / 'run'}", "train.steps=1", "train.validate_symbols=100"
    )
    assert trained.code == 0, trained.err
    return folder / "run", folder / "data"


def free_running(speech: tuple[Path, Path], out: Path, *words: str) -> dict[str, Any]:
    run, data = speech
    few = ["--prompt-seconds", "0.25", "--seconds", "1", "--out", str(out), *words]
    script("free_running").main([str(run), "--data", str(data), *few])
    return json.loads((out / "results.json").read_text())


def test_free_running_compares_with_real_speech(speech: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "all"
    results = free_running(speech, out, "--prompts", "3")
    names = [excerpt["prompt"] for excerpt in results["excerpts"]]
    assert sorted(names) == ["doc1", "doc2", "doc3"]  # the document shorter than the prompt is none
    for name in names:
        sound = soundfile.info(out / f"{name}.flac")
        assert sound.frames == 16_000 + 4_000 and sound.samplerate == 16_000
    # Prompts are real: the file begins with the document.
    pcm, _ = soundfile.read(out / "doc1.flac", dtype="float32")
    assert (mulaw_encode(pcm[:4000]) == mulaw_encode(speech_like(1.2, 1))[:4000]).all()
    real, model = results["statistics"]["real speech"], results["statistics"]["model"]
    assert real["loud"] < 0.2 and real["silent"] > 0.05 and set(results["statistics"]) >= {"linear predictor"}
    assert 0 < model["bits"] < 12 and real["bits"] > 0
    assert [verdict["excerpts"] for verdict in results["verdicts"]] == [3] * 7
    assert (out / "report.md").read_text().count("| doc") == 3
    for picture in ("spectrograms.png", "minutes.png"):
        assert (out / picture).stat().st_size > 1000


# The results say whose they are.
def test_free_running_names_weights_and_what_was_asked(speech: tuple[Path, Path], tmp_path: Path) -> None:
    results = free_running(speech, tmp_path, "--prompts", "1", "--no-audio")
    weights = (speech[0] / "model.safetensors").read_bytes()
    assert results["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert results["arguments"][0] == str(speech[0]) and results["arguments"][-1] == "--no-audio"


def test_linear_predictors_continue_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    module, stage = script("linear_speech"), PredictorsConfig(peak_decay=0.999).build(MuLawCodec().levels)
    monkeypatch.setattr(module, "TELL_EVERY_S", 0.0)
    prompts, samples = np.stack([mulaw_encode(speech_like(0.2, seed)) for seed in range(2)]), 300
    told: list[str] = []
    pcm = module.linear_continuations(stage, prompts, samples, seed=3, tell=told.append)
    assert len(told) == 2

    def after(symbol: int, state: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        side, state = stage.observe(torch.tensor([[symbol]]), state)
        return side[0].numpy(), state

    half, levels = prompts.shape[1] // 2, mulaw_decode(np.arange(256))
    drawn = np.random.default_rng(3).integers(half, size=(2, samples))
    for prompt, own, continued in zip(prompts, drawn, pcm, strict=True):
        state, residuals = stage.initial_state(1), []
        side, state = after(256, state)
        for symbol in prompt:
            residuals.append((levels[symbol] - side[0]) / side[1])
            side, state = after(int(symbol), state)
        for at in range(samples):
            sample = side[:1] + side[1] * residuals[half + own[at]]
            symbol = mulaw_encode(sample.clip(-1, 1))[0]
            assert continued[at] == levels[symbol]
            side, state = after(int(symbol), state)
        assert continued.std() > 1e-4


def test_free_running_passes_over_the_prompts_of_tuning(speech: tuple[Path, Path], tmp_path: Path) -> None:
    choose = script("free_running").choose
    documents = recipe.SplitDocuments(Shards.open(speech[1]), "val")
    order = choose(documents, prompts=3, first=0, samples=4000)
    assert sorted(order) == [0, 1, 2]
    assert [choose(documents, prompts=1, first=n, samples=4000)[0] for n in range(3)] == order
    with pytest.raises(SystemExit, match=r"3 prompts after the first 1 .* the split has 3 documents"):
        free_running(speech, tmp_path, "--prompts", "3", "--first", "1")


# Row A8: a run is measured minute by minute, here a second of sound each; its state does not grow.
def test_free_running_long_run_reports_every_minute(
    speech: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("free_running")
    monkeypatch.setattr(module, "MINUTE_S", 1)
    given = ["--data", str(speech[1]), "--prompt-seconds", "0.25", "--prompts", "1", "--seconds", "2.5"]
    module.main([str(speech[0]), *given, "--no-audio", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    minutes = results["minutes"]
    assert [minute["samples"] for minute in minutes] == [16_000, 32_000, 40_000]
    assert len({minute["state_bytes"] for minute in minutes}) == 1
    for minute in minutes:
        assert minute["samples_per_s"] > 0 and 0 <= minute["clipped"] <= 1 and 0 < minute["bits"] < 12
    assert [excerpt["minute"] for excerpt in results["excerpts"]] == [1, 2]  # half a second is too short
    assert not list(tmp_path.glob("*.flac"))


SHIPPED_FILES = {"README.md", "config.yaml", "figures.json", "model.json", "model.safetensors"}


def test_shipping_a_run(
    speech: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run, ship_model, heard = speech[0], script("ship_model"), tmp_path / "heard"
    free_running(speech, heard, "--prompts", "2", "--temperature", "0.9", "--no-audio")
    for module in ("recipe", "recipe.runs"):
        monkeypatch.setattr(f"txl_audio.{module}.SHIPPED", tmp_path)
    words = [str(run), "--name", "tiny", "--free-running", str(heard / "results.json")]
    ship_model.main(words)
    target = tmp_path / "tiny"
    assert f"\n{target}: " in capsys.readouterr().out
    assert {path.name for path in target.iterdir()} == SHIPPED_FILES
    assert recipe.shipped_models() == ["tiny"]

    config, model = recipe.load_run("tiny")
    _, trained = recipe.load_run(run)
    for name, value in trained.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    own = load(recipe.RunConfig, run / "config.yaml")
    assert config == own.model_copy(update={"name": "tiny", "data": None, "out": None, "precision": "auto"})
    assert str(run.parent) not in "".join(p.read_text() for p in target.glob("*[!s]"))

    figures = json.loads((target / "figures.json").read_text())
    assert figures["trained"]["step"] == 1 and figures["trained"]["seconds"] > 0
    for split, bits in figures["bits_per_sample"].items():
        scored = txl_audio("evaluate", run, "--split", split, "--json").json
        assert bits == pytest.approx(scored["bits_per_sample"], abs=1e-9)
        assert figures["data"][split]["samples"] == scored["count"]
    assert set(figures["bits_per_sample"]) == {"val"} and set(figures["data"]) == {"train", "val"}
    card = (target / "README.md").read_text()
    assert "2 held-out beginnings of 0.25 s, each continued for 1 s (temperature 0.9, " in card
    verdicts = json.loads((heard / "results.json").read_text())["verdicts"]
    assert figures["free_running"]["verdicts"] == verdicts
    for verdict in verdicts:
        assert f"| {verdict['limit']} | {verdict['value']:.3g} | " in card

    # What people wrote stays; tables are replaced.
    (target / "README.md").write_text(f"# Ours\n\n{card.replace('bits', 'bytes')}\nOur words.\n")
    ship_model.main(words[:3])
    again = (target / "README.md").read_text()
    assert again.startswith("# Ours\n") and again.endswith("\nOur words.\n")
    assert verdicts[0]["limit"] not in again
    assert ship_model.tables(json.loads((target / "figures.json").read_text())) in again


def test_what_cannot_be_shipped(
    speech: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ship = speech[0], script("ship_model")
    target, heard = tmp_path / "new", tmp_path / "results.json"
    heard.write_text(json.dumps({"settings": {"run": "another"}, "verdicts": []}))
    with pytest.raises(DataError, match="is about other weights .of another. than"):
        ship.ship(run, target, results=heard)
    with pytest.raises(SpecError, match="writes text symbols, expected an audio model"):
        ship.ship(text_run(tmp_path / "text"), target)
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(CheckpointError, match="weights of step 1, of which metrics.jsonl tells nothing"):
        ship.ship(unfinished, target)
    monkeypatch.setattr(ship, "MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="expected at most 1,000; ship a smaller one"):
        ship.ship(run, target)
    assert not target.exists()
    target.mkdir()
    (target / "README.md").write_text("# Ours\n")
    with pytest.raises(CheckpointError, match="has no place for figures"):
        ship.ship(run, target)
    assert {path.name for path in target.iterdir()} == {"README.md"}
