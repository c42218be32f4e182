"""Makes a finished run a model that ships with the package, under a name.

    python scripts/ship_model.py runs/kathleen --name kathleen --free-running out/kathleen/results.json

txl_audio/models/NAME gets config.yaml (without paths of this machine), model.safetensors, model.json,
figures.json (what was measured: the whole validation and test splits of the run's data, scored once, and the
limits of scripts/free_running.py) and README.md, the model card. Of a card that exists, only the tables
between the two marks are replaced: what people wrote stays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from txl_audio import recipe
from txl_audio.checkpoint import write_atomically
from txl_audio.evaluate import evaluate, score_document
from txl_audio.listening import verdict_table
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.sampler import Sampler
from txl_audio.tokens import CheckpointError, DataError, TxlError

MOST_BYTES = 12_000_000
"""Of all files of a shipped model together: the package stays small enough to install without a thought."""

INT8_S = 2.0
"""How much sound is drawn with int8 weights to see what they cost."""
BEGIN, END = "<!-- figures, by scripts/ship_model.py -->", "<!-- end of figures -->"
SPLITS = {"train": "training", "val": "validation", "test": "test"}
DRAWN = ("temperature", "top_k", "top_p", "tails", "weights", "seed")
LISTENING = ("prompts", "first", "prompt_seconds", "seconds", *DRAWN)
"""Settings of scripts/free_running.py that its figures depend on."""


def ship(run: Path, target: Path, *, results: Path | None = None) -> None:
    """Writes the shipped form of `run` to the folder `target`, whose name is the model's.

    results: results.json of scripts/free_running.py about the same run. Raises CheckpointError where the run
    or an existing card cannot be used or the model is too large, DataError for results of another run.
    """
    config, model = recipe.load_run(run)
    recipe.codec_for_sound(model.spec)  # a text model would need its vocabulary beside it
    record = _last_training(run)
    shards = recipe.open_shards(next(iter(config.data_folders.values())), model, origin=f"the run {run}")
    splits = {split: recipe.SplitDocuments(shards, split) for split in SPLITS if split in shards.splits}
    weights = (run / "model.safetensors").read_bytes()
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_bytes": len(weights),
        "trained": {name: record[name] for name in ("step", "symbols", "seconds")},
        "data": {name: {"documents": len(d), "samples": d.symbols} for name, d in splits.items()},
        "preparation": shards.preparation,
        recipe.bits_name(model.spec): {
            name: evaluate(model, documents, config.evaluate).bits
            for name, documents in splits.items()
            if name != "train"
        },
        "int8_bits": _int8_bits(model),
        "free_running": None if results is None else _listening(results, run),
    }
    # Paths and what precision was faster belong to the machine it was trained on.
    of_machine = {"data": None, "out": None, "precision": "auto"}
    shipped = config.model_copy(update={"name": target.name, **of_machine})
    files = {
        "config.yaml": shipped.to_yaml().encode(),
        "model.safetensors": weights,
        "model.json": (run / "model.json").read_bytes(),
        "figures.json": (json.dumps(figures, indent=1) + "\n").encode(),
        "README.md": _card(target / "README.md", tables(figures)).encode(),
    }
    size = sum(len(content) for content in files.values())
    if size > MOST_BYTES:
        raise CheckpointError(
            f"{run} makes a model of {size:,} bytes, expected at most {MOST_BYTES:,}; ship a smaller one"
        )
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(target / name, content)


def tables(figures: Mapping[str, Any]) -> str:
    """The part of a card that is made of figures.json, its marks included."""
    trained = figures["trained"]
    minutes, millions = trained["seconds"] / 60, trained["symbols"] / 1e6
    lines = [
        "| | |",
        "|---|---|",
        f"| trained | {minutes:.1f} minutes: {trained['step']:,} steps, {millions:.1f} M samples |",
        f"| parameters | {figures['parameters']:,} ({figures['weights_bytes'] / 1e6:.1f} MB) |",
        f"| int8 weights in sampling | {figures['int8_bits']:+.4f} bits per sample, on its own samples |",
    ]
    for split, size in figures["data"].items():
        lines.append(
            f"| {SPLITS[split]} data | {size['documents']:,} recordings, {size['samples']:,} samples |"
        )
    for split, bits in figures["bits_per_sample"].items():
        lines.append(f"| {SPLITS[split]} | **{bits:.4f}** bits per sample, every sample scored once |")
    prepared = ", ".join(f"{name} {value}" for name, value in figures["preparation"].items())
    lines += [f"| preparation | {prepared} |"] * bool(prepared)
    if figures["free_running"] is not None:
        lines += ["", *_listening_table(figures["free_running"])]
    return "\n".join([BEGIN, *lines, END])


def _listening_table(heard: Mapping[str, Any]) -> list[str]:
    drawn = ", ".join(f"{name} {heard[name]}" for name in DRAWN if heard[name] is not None)
    return [
        f"{heard['prompts']} held-out beginnings of {heard['prompt_seconds']:g} s, each continued for "
        f"{heard['seconds']:g} s ({drawn}), beside held-out real speech:",
        "",
        *verdict_table(heard["verdicts"]),
    ]


def _int8_bits(model: SequenceModel) -> float:
    """Bits per sample by which the model finds the samples drawn with int8 weights less likely than those
    weights do: the divergence of the two, on what is heard."""
    sampler = Sampler(model, seed=0, weights="int8")
    frames = round(INT8_S * model.spec.frame_rate_hz)
    pairs = [(sampler.next_frame(), sampler.nats) for _ in range(frames)]
    line, nats = (torch.cat(parts, dim=1)[0] for parts in zip(*pairs, strict=True))
    return float((score_document(model, line.numpy()) - nats).mean()) / math.log(2)


def _last_training(run: Path) -> dict[str, Any]:
    """The last record of training, which has to be of the weights that are there."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{run} has no metrics.jsonl, so how long it was trained is not known")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    step = json.loads((run / "model.json").read_text(encoding="utf-8"))["step"]
    last = [record for record in records if record["step"] == step]
    if not last:
        raise CheckpointError(
            f"{run} holds the weights of step {step}, of which metrics.jsonl tells nothing; finish it"
        )
    return last[-1]


def _listening(path: Path, run: Path) -> dict[str, Any]:
    """What a card says of results.json. Raises DataError where that is of another run."""
    results = json.loads(path.read_text(encoding="utf-8"))
    settings = results["settings"]
    if results.get("weights_sha256") != hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest():
        raise DataError(
            f"{path} is about other weights (of {settings['run']}) than {run} has; measure these by "
            "scripts/free_running.py"
        )
    return {**{name: settings[name] for name in LISTENING}, "verdicts": results["verdicts"]}


def _card(path: Path, figures: str) -> str:
    """The card at `path` with new figures; one of figures alone where there is none."""
    if not path.is_file():
        return f"# {path.parent.name}\n\n{figures}\n"
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise CheckpointError(
            f"{path} has no place for figures, expected the lines {BEGIN} and {END}; put them in"
        )
    return before + figures + after


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="finished run folder of a model of sound")
    parser.add_argument("--name", required=True, help="what people will call the model")
    parser.add_argument("--free-running", type=Path, help="results.json of scripts/free_running.py")
    given = parser.parse_args(arguments)
    target = recipe.SHIPPED / given.name
    try:
        ship(given.run, target, results=given.free_running)
    except (TxlError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{target}: {sum(path.stat().st_size for path in target.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
