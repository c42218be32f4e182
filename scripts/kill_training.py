"""Kills a training again and again, continues it, and compares it with one that nobody killed.

    python scripts/kill_training.py --kills 20

Trains a tiny model on noise that it makes itself, on the CPU. Every process is ended by SIGKILL, in turn at a
random moment and at a random rename, sync or deletion of what it writes; the next one continues with
--resume, or begins where nothing was there yet. Weights, optimiser, memory, random states and position at the
end have to be those of the training without a kill, to the bit; where a training ends before all kills are
done, another begins. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

import txl_audio.recipe  # noqa: F401 - processes are forked: PyTorch is imported once
from txl_audio.checkpoint import RunFolder
from txl_audio.cli import main as txl_audio_main

CONFIG = """
name: tiny
device: cpu
precision: float32
model:
  symbols_per_frame: 4
  embedding: {kind: samples, history_samples: 8, width: 8}
  core:
    {n_layer: 2, d_model: 16, n_head: 2, d_head: 8, d_ff: 32, mem_len: 16, segment_len: 16,
     window: sliding, dropout: 0.1}
  head: {kind: frame, history_samples: 8, width: 8, blocks: 1, mixtures: 2}
train: {steps: 24, lanes: 2, lr: 1e-2, ema: 0.9, log_every: 1, validate_every: 10, validate_symbols: 500,
        save_every: 2}
"""
WRITES = 60
"""Renames, syncs and deletions of about three checkpoints."""


def die_at_write(left: int) -> None:
    """Lets this process kill itself before its n-th rename, sync or deletion of a folder."""

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        setattr(module, name, before(getattr(module, name)))


def command(words: list[str], log: Path, die_at: int | None) -> None:
    """`txl-audio WORDS` in a process of its own."""
    torch.set_num_threads(1)
    if die_at is not None:
        die_at_write(die_at)
    with open(log, "a") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(file):
        txl_audio_main(words)


def run(words: list[str], log: Path, *, die_at: int | None = None, kill_after_s: float | None = None) -> int:
    """Exit code of `txl-audio WORDS`, -9 where it was killed."""
    process = multiprocessing.get_context("fork").Process(target=command, args=(words, log, die_at))
    process.start()
    process.join(kill_after_s)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same, to the bit, at the end of two runs; times aside, which no two runs share."""
    (a, values_a), (b, values_b) = (RunFolder(path).load_state() for path in (one, other))
    names = [name for name in sorted(a.keys() | b.keys()) if name not in a or name not in b]
    names += [name for name in a.keys() & b.keys() if not a[name].equal(b[name])]
    for values in (values_a, values_b):
        values["at"].pop("seconds")
    names += [name for name in values_a if values_a[name] != values_b[name]]
    weights = "model.safetensors"
    return names + [weights] * ((one / weights).read_bytes() != (other / weights).read_bytes())


def survive(folder: Path, *, kills: int, seed: int) -> bool:
    """Whether trainings that are killed so often end as one that is not; says how it goes."""
    draws, log = random.Random(seed), folder / "log.txt"
    (folder / "wav").mkdir()
    noise = np.random.default_rng(0)
    for i in range(6):
        soundfile.write(folder / "wav" / f"{i}.wav", 0.1 * noise.standard_normal(4000), 16_000)
    config, data = folder / "tiny.yaml", folder / "data"
    config.write_text(CONFIG)
    words = ["prepare", str(folder / "wav"), "--out", str(data), "--split", "every-3rd", "--workers", "1"]
    train = ["train", str(config), f"data={data}"]
    prepared, begun = run(words, log), time.perf_counter()
    if prepared or run([*train, f"out={folder / 'whole'}"], log):
        raise SystemExit(log.read_text())
    whole_s, killed, runs = time.perf_counter() - begun, 0, 0
    while killed < kills:
        out, runs, code = folder / f"run_{runs}", runs + 1, -9
        while code == -9:
            resume = ["--resume"] if (out / "config.yaml").exists() else []
            how: dict[str, Any] = {}
            if killed < kills:
                moments = (
                    {"kill_after_s": draws.uniform(0, 0.6 * whole_s)},
                    {"die_at": draws.randint(1, WRITES)},
                )
                how = moments[killed % 2]
            code = run([*train, f"out={out}", *resume], log, **how)
            if code == -9:
                killed += 1
                last = RunFolder(out).states.last
                how_killed = "while writing" if "die_at" in how else f"after {how['kill_after_s']:.2f} s"
                print(f"kill {killed:>3} {how_killed}, left {last.name if last else 'nothing'}", flush=True)
        if code != 0:
            print(log.read_text(), file=sys.stderr)
            return False
        if wrong := differences(folder / "whole", out):
            print(f"run {runs} differs in {', '.join(wrong)}", file=sys.stderr)
            return False
    print(f"{killed} kills in {runs} trainings: the same to the bit as without")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if survive(Path(folder), kills=given.kills, seed=given.seed) else 1)


if __name__ == "__main__":
    main()
