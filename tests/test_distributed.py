"""2 and 4 processes against 1, by DDP and by FSDP2: the same training. What they run is in tests/ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tests.e2e.harness import REPOSITORY
from tests.ranks import MOVES, SHARED, STEPS, trainer
from tests.tiny import audio_frames, text_model, wave_model
from txl_audio.checkpoint import RunFolder
from txl_audio.distributed import SHARDS
from txl_audio.evaluate import evaluate
from txl_audio.states import CHECKSUMS
from txl_audio.tokens import CheckpointError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders of all trainings."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def losses(run: Path) -> list[float]:
    return json.loads((run / "losses.json").read_text())


def assert_same(run: Path, reference: Path) -> None:
    """Losses within 1e-6, and within 1e-5 the weights to use and all that the training goes on with.

    Of losses above 4 bits float32 sums do not have as many digits: of those two of its last places.
    """
    assert losses(run) == pytest.approx(losses(reference), abs=1e-6, rel=2.4e-7)
    expected, got = (load_file(path / "model.safetensors") for path in (reference, run))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5, msg=name)
    expected, got = (RunFolder(path).load_state()[0] for path in (reference, run))
    expected, got = (
        {n: v for n, v in x.items() if not n.startswith(("draws", "random"))} for x in (expected, got)
    )
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("model", "mode", "processes"), SHARED, ids=lambda value: str(value))
def test_m15_processes_are_one_training(runs: Path, model: str, mode: str, processes: int) -> None:
    reference = runs / f"{model}-ddp-1"
    assert len(losses(reference)) == STEPS and len(set(losses(reference))) == STEPS
    assert_same(runs / f"{model}-{mode}-{processes}", reference)


def test_m15_a_training_moves_between_numbers_of_processes(runs: Path) -> None:
    """Alone, then 4 ranks with shards, 2, 2 that are whole, 2 with shards, alone again: a step each."""
    assert len(losses(runs / "moved")) == len(MOVES)
    assert_same(runs / "moved", runs / "stayed")


@pytest.mark.parametrize("mode", ["ddp", "fsdp-ac"])
def test_m14_as_many_processes_continue_to_the_bit(runs: Path, mode: str) -> None:
    """With dropout, of which every process has its own; also inside what is computed twice."""
    whole, parts = runs / f"whole-{mode}", runs / f"parts-{mode}"
    assert losses(whole) == losses(parts)
    expected, got = (RunFolder(path).load_state()[0] for path in (whole, parts))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert not torch.equal(got["draws"][0], got["draws"][1])


def test_shards_are_a_share_of_all(runs: Path) -> None:
    """Weights, average and optimiser, in bytes; tensors with few rows are not divided evenly."""
    one = json.loads((runs / "speech-ddp-1" / "bytes.0.json").read_text())
    for name, processes in (("speech-fsdp-2", 2), ("speech-fsdp-ac-4", 4)):
        held = [json.loads((runs / name / f"bytes.{rank}.json").read_text()) for rank in range(processes)]
        assert max(held) < 1.3 * one / processes
    assert json.loads((runs / "speech-ddp-2" / "bytes.1.json").read_text()) == one


def test_a_run_with_shards_is_a_run_like_any_other(runs: Path) -> None:
    """Its weights load without any other process; its checkpoint has a file of every rank, and no pickle."""
    run = RunFolder(runs / "speech-fsdp-ac-4")
    model = wave_model()
    run.load_model(model)
    assert evaluate(model, trainer(run.path, "speech", "ddp").streams["main"].data.valid).count > 0
    state = run.states.last
    assert state is not None and len(list(state.glob(SHARDS))) == 4
    assert all(path.suffix in (".safetensors", ".json") for path in state.iterdir())
    assert len(json.loads((state / CHECKSUMS).read_text())) == 6


def test_a_damaged_shard_is_named(runs: Path, tmp_path: Path) -> None:
    state = RunFolder(runs / "speech-fsdp-2").states.last
    assert state is not None
    copy = tmp_path / "state" / state.name
    copy.mkdir(parents=True)
    for path in state.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damaged = sorted(copy.glob(SHARDS))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{damaged.name} is damaged: got .* was written"):
        RunFolder(tmp_path).load_state()


# Activation checkpointing.


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = True
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


def test_what_is_computed_again_is_not_kept() -> None:
    """8 layers: the same loss and gradients to the bit, with dropout; and a third of the bytes at most."""
    bytes_held, results = [], []
    for checkpointed in (False, True):
        model = text_model(n_layer=8, dropout=0.1, attention_dropout=0.1, segment_len=64, mem_len=64).train()
        for layer in model.core.layers:
            layer.checkpointed = checkpointed
        inputs, targets, _ = audio_frames(model, 8, 64)
        torch.manual_seed(0)
        with LiveBytes() as live:
            loss, _, _ = model.loss(inputs * 0, targets * 0, model.initial_state(8))
            loss.backward()
        bytes_held.append(live.most)
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert 3 * bytes_held[1] < bytes_held[0]
