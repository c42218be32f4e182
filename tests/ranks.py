"""Tiny trainings by several processes, for tests/test_distributed.py: `python -m tests.ranks FOLDER`.

All processes are forks of one, which has PyTorch loaded and has computed nothing. Every training leaves a run
folder, FOLDER/NAME, with losses.json and, by rank, the bytes of what training has learned.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # here for all forks, as the next two: they take seconds
import torch.distributed.checkpoint
import torch.distributed.fsdp

from tests.tiny import joint_model, text_model, wave_model
from txl_audio import distributed, parallel, runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.lanes import StreamData, StreamTrainConfig
from txl_audio.train import Trainer
from txl_audio.train_config import TrainConfig

STEPS = 4
JOINT = {"speech": StreamTrainConfig(lanes=4), "text": StreamTrainConfig(lanes=8, segment_len=5)}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "speech": (wave_model, {"ema": 0.9, "accumulate": 2}),
    "muon": (wave_model, {"optimiser": "muon"}),
    "text": (text_model, {}),
    "joint": (joint_model, {"streams": JOINT, "auxiliary": True}),
}
MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "ddp-ac": {"activation_checkpointing": True},
    "fsdp-ac": {"fsdp": True, "activation_checkpointing": True},
}
SHARED = [  # model, mode, processes
    ("speech", "ddp", 2),
    ("speech", "ddp-ac", 4),
    ("speech", "fsdp", 2),
    ("speech", "fsdp-ac", 4),
    ("muon", "ddp", 2),
    ("muon", "fsdp-ac", 4),
    ("text", "fsdp", 4),
    ("joint", "ddp", 4),
    ("joint", "fsdp-ac", 2),
]
MOVES = [("ddp", 1), ("fsdp", 4), ("fsdp-ac", 2), ("ddp", 2), ("fsdp", 2), ("ddp", 1)]
"""How one training is continued, a step each, by other numbers of processes and ways to share a model."""


def documents(symbols: int, seed: int) -> list[np.ndarray]:
    """Sines with noise, as symbols."""
    rng = np.random.default_rng(seed)
    waves = [0.5 + 0.3 * np.sin(0.3 * np.arange(n)) for n in rng.integers(20, 200, 12)]
    return [((w + rng.normal(0, 0.02, len(w))) * symbols).astype(np.uint8) for w in waves]


def trainer(path: Path, model: str, mode: str, dropout: float = 0.0) -> Trainer:
    build, changes = MODELS[model]
    built = build(dropout=dropout)
    data = {
        name: StreamData(documents(11 if name == "text" or model == "text" else 256, 0), documents(11, 1)[:2])
        for name in built.streams
    }
    values = {"steps": 100, "lanes": 4, "warmup_steps": 0, "lr": 3e-4, **changes, **MODES[mode]}
    config = TrainConfig(**values)
    runtime.seed_everything(runtime.rank())
    folder = RunFolder(path)
    return Trainer(built, config, data, folder=folder, seed=0, precision="float32")


def train(
    path: Path, model: str, mode: str, steps: int, *, resume: bool = False, dropout: float = 0.0
) -> None:
    t = trainer(path, model, mode, dropout)
    if resume:
        t.resume()
    path.mkdir(exist_ok=True)
    losses = [t.step()[1].bits for _ in range(steps)]
    t.save()
    held = sum(distributed.local(tensor).nbytes for tensor in t.learner.tensors().values())
    (path / f"bytes.{runtime.rank()}.json").write_text(json.dumps(held))
    if runtime.rank() == 0:
        before = json.loads((path / "losses.json").read_text()) if resume else []
        (path / "losses.json").write_text(json.dumps([*before, *losses]))


def ranks(processes: int, jobs: Sequence[Callable[[], None]]) -> None:
    """Runs jobs, one after another, in that many processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
                torch.set_num_threads(1)
                with parallel.joined(torch.device("cpu")):
                    for job in jobs:
                        job()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"processes ended with {codes}")


def main(folder: Path) -> None:
    def shared(processes: int) -> list[Callable[[], None]]:
        own = [(model, mode) for model, mode, n in SHARED if n == processes]
        return [partial(train, folder / f"{m}-{mode}-{processes}", m, mode, STEPS) for m, mode in own]

    def moved(*steps: int) -> list[Callable[[], None]]:
        return [partial(train, folder / "moved", "speech", MOVES[i][0], 1, resume=i > 0) for i in steps]

    alone = [partial(train, folder / f"{model}-ddp-1", model, "ddp", STEPS) for model in MODELS]
    alone.append(partial(train, folder / "stayed", "speech", "ddp", len(MOVES)))
    # With dropout every process has random numbers of its own.
    stopped = [
        partial(train, folder / f"{name}-{mode}", "speech", mode, steps, resume=resume, dropout=0.2)
        for mode in ("ddp", "fsdp-ac")
        for name, steps, resume in (("whole", 4, False), ("parts", 2, False), ("parts", 2, True))
    ]
    ranks(1, [*alone, *moved(0)])
    ranks(4, [*shared(4), *moved(1)])
    ranks(2, [*shared(2), *moved(2, 3, 4), *stopped])
    ranks(1, moved(5))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
