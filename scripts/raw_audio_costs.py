"""What a training step of every peer and of the speech model costs, for scripts/raw_audio_study.py.

    python scripts/raw_audio_costs.py out/raw_audio/costs.json --data data/kathleen --threads 1 \\
        lstm wavenet "this model=configs/audio/kathleen_mulaw.yaml"

A budget of minutes by the clock is only fair on an idle machine. Step times are taken in turns, in a few
minutes; the trainings themselves get as many steps as the minutes hold, and may run beside other work.
Writes {NAME: seconds of a step}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "baselines"))

from compare import Variant, step_seconds, training_step
from train import PEERS, Training

from txl_audio import runtime
from txl_audio.data.shards import Shards


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("out", type=Path)
    parser.add_argument("systems", nargs="+", help=f"of {', '.join(PEERS)}, or NAME=CONFIG [key=value ...]")
    parser.add_argument("--data", type=Path, required=True, help="shards made by `txl-audio prepare`")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    runtime.keep_freed_memory()
    shards, steps = Shards.open(given.data), dict[str, Callable[[], object]]()
    for system in given.systems:
        if system in PEERS:
            steps[system] = Training(PEERS[system](), shards, lr=None, seed=0, precision="auto").step
        else:
            variant = Variant.parse(system)
            steps[variant.name] = training_step(variant)
    costs = step_seconds(list(steps.values()), threads=given.threads)
    given.out.write_text(json.dumps(dict(zip(steps, costs, strict=True)), indent=1) + "\n")


if __name__ == "__main__":
    main()
