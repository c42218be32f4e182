"""Where the time of a training step goes on this machine, beside what the machine can do.

    python scripts/profile_training.py                                     # the shape of `bench train`
    python scripts/profile_training.py configs/audio/kathleen_mulaw.yaml   # on its data; or KEY=VALUE ...

Prints the machine's rates; the step and the parts of it that are not the network (reading a batch, adaptive
predictors); the operations that take most of it, by torch.profiler; and the floor of its counted arithmetic
and bytes at those rates. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from txl_audio import recipe, runtime
from txl_audio.bench import floors, shape
from txl_audio.bench.train import plain_text_model, training_step
from txl_audio.checkpoint import RunFolder
from txl_audio.config import load
from txl_audio.lanes import StreamData
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.plan_counts import count_step
from txl_audio.recipe.runs import open_data
from txl_audio.train import Trainer
from txl_audio.train_config import TrainConfig

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
    "normalisation and softmax": ("layer_norm", "softmax", "logsumexp"),
    "copies and changes of type": ("copy", "to_copy", "cat", "clone", "contiguous", "fill", "zero", "flip"),
    "tables": ("embedding", "index", "gather", "scatter"),
    "optimiser": ("adam", "foreach", "norm"),
}


def kind(name: str) -> str:
    """What an operation is for reading."""
    plain = name.removeprefix("aten::").strip("_")
    return next(
        (k for k, words in KINDS.items() if any(word in plain for word in words)), "other elementwise"
    )


def median_s(run: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, over about `seconds` and at least three calls."""
    run()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return median(times)


def training(words: list[str], precision: runtime.Precision) -> tuple[SequenceModel, TrainConfig, Trainer]:
    """The training of a config, on its data."""
    config = load(recipe.RunConfig, words[0], words[1:])
    shards = open_data(next(iter(config.data_folders.values())))
    part = config.part()
    documents = recipe.SplitDocuments(shards, "train", part.transcripts)
    model = recipe.new_model(config, {SINGLE: recipe.spec_for(part, shards)})
    assert isinstance(model, SequenceModel)
    data = {SINGLE: StreamData(documents, [])}
    trainer = Trainer(
        model, config.train, data, folder=RunFolder(Path("unused")), seed=config.seed, precision=precision
    )
    return model, config.train, trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", nargs="*", help="config file and overrides [default: the shape of bench train]"
    )
    parser.add_argument(
        "--precision", choices=["auto", "float32", "bfloat16"], default="auto", help="[auto: the faster]"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps; the rates take a tenth each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=12, help="operations that are listed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    runtime.keep_freed_memory()
    cpu, tenth = torch.device("cpu"), given.seconds / 10
    precision = runtime.choose_precision(given.precision, cpu)

    rates = {d: runtime.matmul_flops(cpu, getattr(torch, d), tenth) for d in ("float32", "bfloat16")}
    near, far = (floors.copy_bytes_per_s(cpu, size, tenth) for size in (floors.NEAR, floors.FAR))
    print(f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}, {precision}")
    print("products of 768 x 768: " + ", ".join(f"{d} {r / 1e9:,.0f} GFLOP/s" for d, r in rates.items()))
    print(f"copies, read and written: {near / 1e9:.1f} GB/s of 16 MiB, {far / 1e9:.1f} GB/s of 1 GiB")

    if given.config:
        model, config, trainer = training(given.config, precision)
        step: Callable[[], object] = trainer.step
        batches = trainer.streams[SINGLE].batches
    else:
        model, config, batches = plain_text_model("auto"), TrainConfig(lanes=shape.LANES), None
        step = training_step(
            model, config, lanes=shape.LANES, segment_len=shape.SEGMENT_LEN, precision=precision
        )
    for _ in range(3):
        step()
    whole = median_s(step, given.seconds)
    print(f"step: {1000 * whole:,.1f} ms")
    if batches is not None:
        reading = median_s(lambda: next(batches), tenth)
        print(f"  reading a batch: {1000 * reading:,.2f} ms, {reading / whole:.1%}")
        if model.stage is not None:
            batch, state = next(batches), model.stage.initial_state(config.lanes)
            stage = model.stage
            following = median_s(lambda: stage.run(batch.inputs, batch.targets, state), tenth)
            print(f"  adaptive predictors: {1000 * following:,.1f} ms, {following / whole:.1%}")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
    rows = [row for row in profile.key_averages() if row.self_cpu_time_total > 0]
    total = sum(row.self_cpu_time_total for row in rows)
    kinds: dict[str, float] = {}
    for row in rows:
        kinds[kind(row.key)] = kinds.get(kind(row.key), 0.0) + row.self_cpu_time_total / total
    print("by kind: " + ", ".join(f"{k} {v:.0%}" for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])))
    for row in sorted(rows, key=lambda row: -row.self_cpu_time_total)[: given.rows]:
        print(f"  {row.key[:46]:<46}{row.self_cpu_time_total / total:>7.1%}{row.count // 3:>7} calls a step")

    counts = count_step(model, config, lanes=config.lanes, precision=precision)
    floor = counts.floor_s(rates[precision], near)
    print(
        f"counted: {counts.flops / 1e9:,.1f} GFLOP, {counts.moved_bytes / 1e9:,.2f} GB moved; arithmetic "
        f"alone {1000 * counts.flops / rates[precision]:,.1f} ms, floor {1000 * floor:,.1f} ms: "
        f"the step runs at {floor / whole:.0%} of it"
    )


if __name__ == "__main__":
    main()
