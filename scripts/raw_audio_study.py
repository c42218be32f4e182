"""What scripts/raw_audio_report.py --run measures, in folders of --study.

costs.json: what a step of each costs, in turns; measure it where nothing else runs;
peers/NAME (scripts/baselines) and models: as many steps as equal minutes hold, by those costs;
memory: equal steps of equal samples, since a long memory costs time and the question is what it gives;
ablation: equal cost, seed 0; ablation_seed_1: once more with another seed, what came close to the model;
free, hour: scripts/free_running.py, with prompts and a seed that no setting was chosen by.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from compare import Variant

from txl_audio import recipe
from txl_audio.codecs.mulaw import SAMPLE_RATE_HZ
from txl_audio.config import load
from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.recipe.config import RunConfig
from txl_audio.tokens import CheckpointError, ConfigError

SCRIPTS = Path(__file__).parent
KINDS = ("models", "peers", "memory", "free", "hour", "ablation")
PEERS = ("floor", "lstm", "wavenet", "samplernn", "sashimi", "megabyte", "x-transformers")
MODEL = "this model"
ONE_SAMPLE = f"{MODEL}, P 1"
MEMORIES_S = (0, 0.25, 0.5, 1, 2)
SIZES = {16: (256, 4, 64), 8: (192, 4, 128), 4: (128, 2, 128), 2: (96, 2, 256)}
"""By samples per frame: width and heads of the core, frames of memory, which a segment has too."""
MEMORY_FRAME = 16
"""Samples per frame in the memory study, so that 2 s are 2,000 frames; its segments are longer, too."""
MEMORY_SEGMENT = 256
DISTURBED = '{"noise":0.25,"codes":1.5,"bursts":0.15}'
"""As in kathleen_mulaw.yaml."""
CLOSE_BITS = 0.02
"""Differences up to this are measured with a second seed."""
HELD_OUT = ("--first", "20", "--seed", "1")
"""The first 20 prompts and seed 0 were there for choosing settings."""


def models(config: RunConfig) -> dict[str, str]:
    """Overrides by name: the model, and with frames of one sample; memory and segment are as many samples."""
    places, core = config.model.symbols_per_frame, config.model.core
    lengths = f"model.core.mem_len={core.mem_len * places} model.core.segment_len={core.segment_len * places}"
    return {MODEL: "", ONE_SAMPLE: f"model.symbols_per_frame=1 {lengths}"}


def sized(config: RunConfig, places: int, *, mem_len: int, segment_len: int) -> str:
    """Overrides for frames of `places` samples, with as many samples in a step as the config has."""
    core, (width, heads, _) = config.model.core, SIZES[places]
    step = config.train.lanes * core.segment_len * config.model.symbols_per_frame
    changes = {
        "symbols_per_frame": places,
        "embedding.width": 2 * width,
        "core.d_model": width,
        "core.n_head": heads,
        "core.d_head": width // heads,
        "core.d_ff": 4 * width,
        "core.mem_len": mem_len,
        "core.segment_len": segment_len,
    }
    lanes = f"train.lanes={step // (places * segment_len)}"
    return " ".join([lanes, *(f"model.{name}={value}" for name, value in changes.items())])


def memories(config: RunConfig) -> dict[str, str]:
    """Overrides by seconds of memory, the model's own length among them."""
    own_s = config.model.core.mem_len * config.model.symbols_per_frame / SAMPLE_RATE_HZ
    lengths = {s: round(s * SAMPLE_RATE_HZ / MEMORY_FRAME) for s in sorted({*MEMORIES_S, own_s})}
    return {
        f"{s:g}": sized(config, MEMORY_FRAME, segment_len=MEMORY_SEGMENT, mem_len=frames)
        for s, frames in lengths.items()
    }


def ablation(config: RunConfig) -> dict[str, str]:
    """Overrides by name, the model first; all but the one that needs another config, see `codes_config`.

    Raises ConfigError for a config without predictors.
    """
    if config.model.predictors is None:
        raise ConfigError(
            "the config has no predictors, and parts of the study take them away; choose another"
        )
    filters = [rls.model_dump() for rls in config.model.predictors.filters[:2]]
    two = json.dumps(filters, separators=(",", ":"))  # compare.py splits overrides at spaces
    sizes = {
        f"P {places}, d {width}, memory {frames}": sized(config, places, mem_len=frames, segment_len=frames)
        for places, (width, _, frames) in SIZES.items()
        if places != config.model.symbols_per_frame
    }
    return {
        MODEL: "",
        **sizes,
        "without predictors": "model.predictors=null",
        "two filters instead of three": f"model.predictors.filters={two}",
        "whole bandwidth, no limit": "model.predictors.expansion=1 model.predictors.peak_decay=1",
        "softmax over the 256 codes": "model.head.output=softmax",
        "10 mixtures": "model.head.mixtures=10",
        "head of width 128": "model.head.width=128",
        "head of width 256": "model.head.width=256",
        "disturbed recordings": f"train.disturb={DISTURBED}",
        "AdamW": "train.optimiser=adamw train.lr=2e-3",
        "averaged weights": "train.ema=0.999",
    }


def codes_config(config: RunConfig) -> str:
    """YAML of the config with learned vectors of codes as embedding: overrides cannot change a kind."""
    model = config.model.model_copy(update={"embedding": SymbolEmbeddingConfig()})
    return config.model_copy(update={"model": model}).to_yaml()


def rows_of(study: Path, kind: str) -> list[dict[str, Any]]:
    path = study / kind / "table.json"
    return json.loads(path.read_text()) if path.is_file() else []


def folder_of(model: str, study: Path) -> Path:
    return study / "models" / Variant(model, "", ()).folder


def heard_run(given: argparse.Namespace) -> Path:
    """The run that free-running judges."""
    return given.model or folder_of(MODEL, given.study)


def heard(path: Path, run: Path) -> dict[str, Any] | None:
    """Results of scripts/free_running.py, where they are of the weights that the run has now."""
    results = json.loads(path.read_text()) if path.is_file() else None
    return results if of_weights(results, run) else None


def of_weights(results: Mapping[str, Any] | None, run: Path) -> bool:
    """Whether results are of the weights that the run has now."""
    if results is None:
        return False
    try:
        weights = recipe.run_folder(run).path / "model.safetensors"
    except CheckpointError:
        return False
    if not weights.is_file():
        return False
    return results.get("weights_sha256") == hashlib.sha256(weights.read_bytes()).hexdigest()


def commands(given: argparse.Namespace) -> Iterator[list[str]]:
    """The commands still to be run, each made when those before are done: they decide what is left to do.

    Results are kept where they say that just this was asked; compare.py looks after its own.
    """
    kinds, study, config = given.run or KINDS, given.study, load(RunConfig, given.config)
    study.mkdir(parents=True, exist_ok=True)
    threads = ["--threads", str(given.threads)]
    steps = [str(given.steps), *threads]
    if "models" in kinds or "peers" in kinds:
        yield from equal_minutes(given, config, kinds)
    if "memory" in kinds:
        yield compare(given, "memory", variants(given, memories(config)), ["--equal-steps", *steps])
    yield from listening(given, kinds)
    if "ablation" in kinds:
        (study / "ablation").mkdir(parents=True, exist_ok=True)
        (study / "ablation" / "codes.yaml").write_text(codes_config(config))
        parts = variants(given, ablation(config))
        parts["plain embeddings of codes"] = f"{study / 'ablation' / 'codes.yaml'} data={given.data}"
        yield compare(given, "ablation", parts, ["--steps", *steps])
        if close := close_ones(study):
            again = {name: f"{parts[name]} seed=1" for name in (MODEL, *close)}
            yield compare(given, "ablation_seed_1", again, ["--steps", *steps])


def equal_minutes(
    given: argparse.Namespace, config: RunConfig, kinds: Collection[str]
) -> Iterator[list[str]]:
    """Peers and models, trained for as many steps as the minutes hold."""
    study, threads = given.study, ["--threads", str(given.threads)]
    own = variants(given, models(config))
    if not (study / "costs.json").is_file():
        systems = [*(name for name in present_peers() if name != "floor"), f"{MODEL}={own[MODEL]}"]
        costs = ["raw_audio_costs.py", str(study / "costs.json")]
        yield [*costs, "--data", str(given.data), *threads, *systems]
    costs_s = json.loads((study / "costs.json").read_text())
    held = {name: str(max(1, round(60 * given.minutes / cost_s))) for name, cost_s in costs_s.items()}
    if "models" in kinds:
        yield compare(given, "models", own, ["--steps", held[MODEL], *threads])
    for name in present_peers() if "peers" in kinds else ():
        out = ["--data", str(given.data), "--out", str(study / "peers" / name)]
        training = ["baselines/train.py", name, "--steps", held.get(name, ""), *threads, *out]
        command = ["baselines/floor.py", *out] if name == "floor" else training
        result = study / "peers" / name / "result.json"
        if not result.is_file() or json.loads(result.read_text()).get("arguments") != command[1:]:
            yield command


def present_peers() -> list[str]:
    """Those whose packages are installed."""
    if importlib.util.find_spec("x_transformers") is not None:
        return list(PEERS)
    note = "x-transformers is not installed (pip install -e '.[baselines]'): that peer is left out"
    print(note, file=sys.stderr)
    return [name for name in PEERS if name != "x-transformers"]


def variants(given: argparse.Namespace, changes: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{given.config} data={given.data} {change}".rstrip() for name, change in changes.items()}


def compare(given: argparse.Namespace, kind: str, trained: Mapping[str, str], budget: list[str]) -> list[str]:
    words = [f"{name}={change}" for name, change in trained.items()]
    return ["compare.py", str(given.study / kind), *budget, *words]


def close_ones(study: Path) -> list[str]:
    """Which rows of the ablation are too close to the first to be told from it by one seed."""
    rows = rows_of(study, "ablation")
    return [
        row["name"]
        for row in rows[1:]
        if abs(row["bits_per_sample"] - rows[0]["bits_per_sample"]) < CLOSE_BITS
    ]


def listening(given: argparse.Namespace, kinds: Collection[str]) -> Iterator[list[str]]:
    run = heard_run(given)
    for kind, what in (
        ("free", ["--prompts", "20"]),
        ("hour", ["--prompts", "1", "--seconds", "3600", "--no-audio"]),
    ):
        if kind not in kinds:
            continue
        out = given.study / kind
        words = [str(run), "--data", str(given.data), "--out", str(out), *HELD_OUT, *what]
        results = heard(out / "results.json", run)
        if results is None or results["arguments"] != words:
            yield ["free_running.py", *words]


def measure(given: argparse.Namespace) -> None:
    """Runs what is missing. Raises SystemExit where a command fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    for script, *words in commands(given):
        line = [sys.executable, str(SCRIPTS / script), *words]
        print(f"$ {shlex.join(line)}", file=sys.stderr, flush=True)
        if subprocess.run(line, env=environment, check=False, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"error: {script} failed; see above. What is finished is not done again")
