"""Two processes that share a training's lanes, against one that has them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import Workspace
from tests.e2e.harness import REPOSITORY, run
from txl_audio import parallel
from txl_audio.checkpoint import RunFolder
from txl_audio.tokens import ConfigError

SETTINGS = (
    "train.steps=6",
    "train.lr=1e-3",
    "train.lanes=4",
    "model.core.dropout=0.0",
    "train.ema=0.9",
    "train.save_every=3",
)


def torchrun(processes: int, *words: object) -> None:
    """`txl-audio WORDS` in several processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, "-m", "txl_audio.cli", *map(str, words)], cwd=REPOSITORY, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def test_m15_two_processes_are_one_training(workspace: Workspace, tmp_path: Path) -> None:
    """Losses, weights, averages and memory agree at equal global batch; batches are the same."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("train", workspace.config, f"out={one}", *SETTINGS).code == 0
    torchrun(2, "train", workspace.config, f"out={two}", *SETTINGS)
    for kind in ("train", "validation"):
        pairs = list(zip(records(one, kind), records(two, kind), strict=True))
        assert pairs
        for a, b in pairs:
            assert (a["step"], a["symbols"]) == (b["step"], b["symbols"])
            assert b["bits_per_sample"] == pytest.approx(a["bits_per_sample"], abs=1e-6)
    expected, got = (RunFolder(f).load_state()[0] for f in (one, two))
    carried = [name for name in expected if not name.startswith(("random.", "draws", "optimiser."))]
    assert any(name.endswith("memory.1") for name in carried)
    for name in carried:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-5 if "memory" in name else 1e-6)
    streams = [RunFolder(f).load_state()[1]["streams"] for f in (one, two)]
    assert streams[0]["main"]["batches"] == streams[1]["main"]["batches"]


def test_one_process_continues_what_two_with_shards_began(workspace: Workspace, tmp_path: Path) -> None:
    """The shards are gathered for validation, samples and the weights to use."""
    one, both = tmp_path / "one", tmp_path / "both"
    settings = (*SETTINGS, "train.sample_every=3")
    assert run("train", workspace.config, f"out={one}", *settings).code == 0
    shards = ("train.fsdp=true", "train.activation_checkpointing=true")
    torchrun(2, "train", workspace.config, f"out={both}", *settings, *shards, "train.steps=3")
    assert {path.name for path in (both / "samples").iterdir()} >= {"step_3.wav"}
    assert run("train", workspace.config, f"out={both}", *settings, "--resume").code == 0
    expected, got = (load_file(f / "model.safetensors") for f in (one, both))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)


def test_two_processes_continue_what_two_began(workspace: Workspace, tmp_path: Path) -> None:
    """To the bit, with dropout: every process has random numbers of its own."""
    settings = (workspace.config, *SETTINGS, "model.core.dropout=0.2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    torchrun(2, "train", *settings, f"out={whole}", "train.steps=4")
    torchrun(2, "train", *settings, f"out={parts}", "train.steps=2")
    torchrun(2, "train", *settings, f"out={parts}", "train.steps=4", "--resume")
    expected, got = (RunFolder(f).load_state()[0] for f in (whole, parts))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert not torch.equal(got["draws"][0], got["draws"][1])


def test_lanes_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert parallel.own_lanes(12, setting="train.lanes") == slice(6, 9)
    with pytest.raises(
        ConfigError, match=r"train.lanes is 6, which 4 processes cannot share evenly; choose a"
    ):
        parallel.own_lanes(6, setting="train.lanes")
