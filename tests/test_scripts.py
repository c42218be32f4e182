"""The scripts that measure, at sizes of a few seconds."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.e2e.harness import run as txl_audio

SCRIPTS = Path(__file__).parents[1] / "scripts"


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
