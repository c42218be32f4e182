"""Trains several configs for the same time and puts their scores in one table.

    python scripts/compare.py out/shakespeare --minutes 10 --threads 1 --parallel 2 \\
        "paper=configs/text/shakespeare_char.yaml" "vanilla=configs/text/shakespeare_vanilla.yaml" \\
        "high rate=configs/text/shakespeare_char.yaml train.lr=4e-3"

Every variant is NAME=CONFIG, with overrides behind it. The score is that of the whole validation split at
the end of training, in the run's precision and with its `evaluate` settings. A variant whose run is
finished is not trained again. What runs side by side shares the machine, so compare only what ran with
the same --parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variant:
    name: str
    config: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variant:
        name, equals, rest = text.partition("=")
        if not equals or not rest.split():
            raise SystemExit(f"error: got {text!r}, expected NAME=CONFIG [key=value ...]")
        config, *overrides = rest.split()
        return cls(name, config, tuple(overrides))

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.+-]+", "_", self.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the runs, table.md and table.json")
    parser.add_argument("variants", nargs="+", type=Variant.parse)
    parser.add_argument("--minutes", type=float, required=True, help="training time of each")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--parallel", type=int, default=1, help="how many train side by side")
    given = parser.parse_args()
    with ThreadPoolExecutor(given.parallel) as pool:
        rows = list(pool.map(lambda variant: measure(variant, given), given.variants))
    table = markdown(rows)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "table.md").write_text(table)
    print(table, end="")


def measure(variant: Variant, given: argparse.Namespace) -> dict[str, Any]:
    run = given.out / variant.folder
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}

    def command(*words: object) -> str:
        line = [sys.executable, "-m", "txl_audio.cli", *map(str, words)]
        done = subprocess.run(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=log)
        if done.returncode:
            raise SystemExit(f"error: {' '.join(map(str, words))} failed; see {log.name}")
        return done.stdout

    given.out.mkdir(parents=True, exist_ok=True)
    with open(run.with_suffix(".log"), "a") as log:
        if not finished(run):
            minutes = f"train.minutes={given.minutes}"
            command("train", variant.config, f"out={run}", minutes, *variant.overrides, "--overwrite")
        size = json.loads(command("info", run, "--json"))
    last = last_record(run)
    metric = next(name for name in last if name.startswith("bits"))
    return {
        "name": variant.name,
        metric: last[metric],
        "parameters": size["parameters"],
        "steps": last["step"],
        "symbols": last["symbols"],
        "seconds": last["seconds"],
    }


def last_record(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def finished(run: Path) -> bool:
    """Whether a training came to its end, where it scores the whole validation split."""
    return (run / "metrics.jsonl").is_file() and last_record(run).get("whole_split", False)


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
