"""Trains several configs for the same time and puts their scores in one table.

    python scripts/compare.py out/ablation --steps 600 --threads 1 --parallel 2 \\
        "paper=configs/text/enwiki_bytes.yaml" "modern=configs/text/enwiki_bytes_modern.yaml" \\
        "high rate=configs/text/enwiki_bytes.yaml train.lr=4e-3"

Every variant is NAME=CONFIG, with overrides behind it. The budget is --minutes of the wall clock, or, since
machines are noisy and their speed drifts, --steps of the first variant: all take turns in one process,
and each of the others then trains as many steps as cost the same. With --equal-steps all train so many,
whatever they cost. The score is that of the whole validation split at the end of training, in the run's
precision and with its `evaluate` settings. A variant that was finished with the same config and budget is
not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

TURNS, STEPS_OF_A_TURN = 9, 2


@dataclass(frozen=True)
class Variant:
    name: str
    config: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variant:
        name, equals, rest = text.partition("=")
        if not equals or not rest.split():
            raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=CONFIG [key=value ...]")
        config, *overrides = rest.split()
        return cls(name, config, tuple(overrides))

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w+-]+", "_", self.name)


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("out", type=Path, help="folder of the runs, table.md and table.json")
    parser.add_argument("variants", nargs="+", type=Variant.parse)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="training time of each, by the clock")
    budget.add_argument("--steps", type=int, help="of the first; as many of the others as cost the same")
    budget.add_argument("--equal-steps", type=int, help="of each, whatever they cost")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--parallel", type=int, default=1, help="how many train side by side")
    given = parser.parse_args(arguments)
    folders = [variant.folder for variant in given.variants]
    if len(set(folders)) < len(folders):
        parser.error(f"the names {[v.name for v in given.variants]} need folders that differ, got {folders}")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.minutes is not None:
        budgets = [f"train.minutes={given.minutes}"] * len(folders)
    elif given.equal_steps is not None:
        budgets = [f"train.minutes=null train.steps={given.equal_steps}"] * len(folders)
    else:
        costs = step_seconds([training_step(v) for v in given.variants], threads=given.threads)
        steps = [max(1, round(given.steps * costs[0] / cost)) for cost in costs]
        budgets = [f"train.minutes=null train.steps={count}" for count in steps]
    with ThreadPoolExecutor(given.parallel) as pool:
        rows = list(pool.map(lambda pair: measure(*pair, given), zip(given.variants, budgets, strict=True)))
    (given.out / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "table.md").write_text(markdown(rows))
    print(markdown(rows), end="")


def step_seconds(steps: Sequence[Callable[[], object]], *, threads: int) -> list[float]:
    """Median seconds of each training step, measured in turns."""
    import torch

    torch.set_num_threads(threads)
    for step in steps:
        step()
        step()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(TURNS):
        for step, own in zip(steps, times, strict=True):
            begun = time.perf_counter()
            for _ in range(STEPS_OF_A_TURN):
                step()
            own.append((time.perf_counter() - begun) / STEPS_OF_A_TURN)
    return [statistics.median(own) for own in times]


def training_step(variant: Variant) -> Callable[[], object]:
    """A function that does one training step of a variant on its own data."""
    from txl_audio import recipe, runtime
    from txl_audio.checkpoint import RunFolder
    from txl_audio.config import load
    from txl_audio.data.shards import Shards
    from txl_audio.lanes import StreamData
    from txl_audio.train import Trainer

    config = load(recipe.RunConfig, variant.config, [*variant.overrides, "train.steps=1000000"])
    shards = {name: Shards.open(path) for name, path in config.data_folders.items()}
    parts = config.model.parts()
    data = {
        n: StreamData(recipe.SplitDocuments(s, "train", parts[n].transcripts), []) for n, s in shards.items()
    }
    device = runtime.device(config.device)
    model = recipe.new_model(config, {n: recipe.spec_for(parts[n], s) for n, s in shards.items()}).to(device)
    precision = runtime.choose_precision(config.precision, device)
    folder = RunFolder(Path(tempfile.gettempdir()) / "never written")
    return Trainer(model, config.train, data, folder=folder, seed=config.seed, precision=precision).step


def measure(variant: Variant, budget: str, given: argparse.Namespace) -> dict[str, Any]:
    """Trains one variant, unless the same was done before; its row of the table."""
    run, done = (given.out / (variant.folder + ending) for ending in ("", ".done.json"))
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    request = {"config": Path(variant.config).read_text(), "overrides": list(variant.overrides)}
    request["budget"] = f"{given.minutes} minutes, {given.steps} steps, {given.threads} threads"
    if given.equal_steps is not None:
        request["budget"] = f"{given.equal_steps} steps of each, {given.threads} threads"
    if not done.is_file() or json.loads(done.read_text()) != request:
        done.unlink(missing_ok=True)
        words = ["train", variant.config, f"out={run}", *variant.overrides, *budget.split(), "--overwrite"]
        with open(given.out / (variant.folder + ".log"), "a") as log:
            line = [sys.executable, "-m", "txl_audio.cli", *words]
            if subprocess.run(line, env=environment, stderr=log, check=False).returncode:
                raise SystemExit(f"error: txl-audio {' '.join(words)} failed; see {log.name}")
        done.write_text(json.dumps(request))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    metric = next(name for name in last if name.startswith("bits"))
    return {
        "name": variant.name,
        metric: last[metric],
        "parameters": parameters(run),
        "steps": last["step"],
        "symbols": last["symbols"],
        "seconds": last["seconds"],
    }


def parameters(run: Path) -> int:
    with safe_open(run / "model.safetensors", framework="np") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def markdown(rows: list[dict[str, Any]]) -> str:
    metric = list(rows[0])[1]
    lines = [
        f"| variant | {metric.replace('_', ' ')} | against the first | parameters | steps | symbols seen |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        change = row[metric] - rows[0][metric]
        lines.append(
            f"| {row['name']} | {row[metric]:.4f} | {change:+.4f} | {row['parameters'] / 1e6:.2f} M "
            f"| {row['steps']:,} | {row['symbols'] / 1e6:.1f} M |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
