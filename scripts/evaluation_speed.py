"""The paper's claim about evaluation speed (section 4.5), measured in one run on this machine.

    python scripts/evaluation_speed.py --out out/evaluation_speed

Every token is predicted from an attention length of L frames, itself included, at the same width and depth:

- vanilla (Al-Rfou et al. 2018): positions are numbered inside a window, so that every token costs a forward
  pass over a window of L frames; only the last frame's softmax is computed. Windows go side by side in the
  batch size that is fastest.
- Transformer-XL: window same_length with a memory of L frames, keys and values projected once, one stream,
  in the segment length that is fastest.

Both have random weights, run without gradients in the same precision through the same fused attention
kernel, and are timed as the median of a few repeats, after one that is not counted. As in the paper the
vanilla model computes all pairs of its window and masks those of the future; `halved` is the same model as
`txl-audio evaluate` runs it, where the kernel leaves that half out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from txl_audio import runtime
from txl_audio.model.attention import Backend
from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.positions import AlRfouConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.tokens import TokenSpec

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Attention length -> how many times slower the vanilla model is, on the authors' GPU."""

BYTES = TokenSpec("text", 256, 1, 0.0, 0, "bytes", "")


def build(core: CoreConfig) -> SequenceModel:
    embedding = SymbolEmbeddingConfig().build(BYTES, core.d_model)
    head = SoftmaxHeadConfig().build(BYTES, core.d_model, embedding)
    return SequenceModel(BYTES, embedding=embedding, core=core.build(), head=head).eval()


def median_s(step: Callable[[], None], repeats: int) -> float:
    """Median seconds of `repeats`, after one that is not counted."""
    step()
    times: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def vanilla_s(
    sizes: dict[str, int], length: int, batch: int, attention: Backend, given: argparse.Namespace
) -> float:
    """Seconds per token of the sliding window with stride 1."""
    positions = AlRfouConfig(kind="alrfou", segment_len=length)
    core = CoreConfig(**sizes, mem_len=0, segment_len=length, positions=positions, attention=attention)
    model = build(core)
    symbols = torch.randint(256, (batch, length + 1, 1))

    def step() -> None:
        with runtime.autocast(torch.device("cpu"), given.precision):
            inputs, targets = symbols[:, :-1], symbols[:, 1:]
            hidden, context, _ = model.encode(inputs, targets, model.initial_state(batch))
            model.head.nll(hidden[:, -1:], context.last(1), symbols[:, -1:])

    return median_s(step, given.windows) / batch


def transformer_xl_s(sizes: dict[str, int], length: int, segment: int, given: argparse.Namespace) -> float:
    """Seconds per token with a memory of `length` frames, once it is full."""
    model = build(CoreConfig(**sizes, mem_len=length, segment_len=segment, window="same_length"))
    symbols = torch.randint(256, (1, segment + 1, 1))
    with runtime.autocast(torch.device("cpu"), given.precision):
        state = model.projected(model.initial_state(1))

    def step() -> None:
        nonlocal state
        with runtime.autocast(torch.device("cpu"), given.precision):
            _, state = model.nll(symbols[:, :-1], symbols[:, 1:], state)

    for _ in range(-(-length // segment)):
        step()
    return median_s(step, given.segments_timed) / segment


@torch.no_grad()
def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = {
        "n_layer": given.layers,
        "d_model": given.width,
        "n_head": given.heads,
        "d_head": given.width // given.heads,
        "d_ff": given.d_ff,
    }
    rows: list[dict[str, Any]] = []
    columns = ("attention", "vanilla s", "halved s", "Transformer-XL ms", "ratio", "paper", "ratio of halved")
    print("  ".join(columns))
    for length in given.lengths:
        # Without a position term `shift_free` is the kernel with a full mask.
        batches = {batch: vanilla_s(sizes, length, batch, "shift_free", given) for batch in given.batches}
        halved = min(vanilla_s(sizes, length, batch, "auto", given) for batch in given.batches)
        segments = {segment: transformer_xl_s(sizes, length, segment, given) for segment in given.segments}
        batch, segment = min(batches, key=batches.__getitem__), min(segments, key=segments.__getitem__)
        row = {
            "attention_length": length,
            "vanilla_s_per_token": batches[batch],
            "vanilla_halved_s_per_token": halved,
            "vanilla_batch": batch,
            "transformer_xl_s_per_token": segments[segment],
            "transformer_xl_segment": segment,
            "ratio": batches[batch] / segments[segment],
            "ratio_of_halved": halved / segments[segment],
            "paper": PAPER.get(length),
        }
        rows.append(row)
        figures = (f"{batches[batch]:.3f}", f"{halved:.3f}", f"{1000 * segments[segment]:.3f}")
        figures += (f"{row['ratio']:.0f}", str(row["paper"] or "-"), f"{row['ratio_of_halved']:.0f}")
        cells = zip(columns, (str(length), *figures), strict=True)
        print("  ".join(f"{cell:>{len(name)}}" for name, cell in cells), flush=True)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    lengths = [row["attention_length"] for row in rows]
    axes.plot(lengths, [row["ratio"] for row in rows], marker="o", label="this machine")
    axes.plot(
        lengths, [row["ratio_of_halved"] for row in rows], marker=".", label="half of the pairs left out"
    )
    axes.plot(list(PAPER), list(PAPER.values()), marker="s", linestyle="--", label="the paper's GPU")
    axes.set(xlabel="attention length (frames)", ylabel="vanilla time / Transformer-XL time, per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(PAPER), help="attention lengths")
    parser.add_argument("--layers", type=int, default=12, help="default: the 12 of enwik8_base")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--d-ff", type=int, default=2048)
    parser.add_argument("--segments", type=int, nargs="+", default=[128, 192, 256], help="tried, best counts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2], help="tried, best counts")
    parser.add_argument("--windows", type=int, default=3, help="repeats of the vanilla model")
    parser.add_argument("--segments-timed", type=int, default=10, help="repeats of Transformer-XL")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("out/evaluation_speed"), help="folder of results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    runtime.keep_freed_memory()
    rows = measure(given)
    given.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    (given.out / "evaluation_speed.json").write_text(json.dumps({"rows": rows, **settings}, indent=1) + "\n")
    plot(rows, given.out / "evaluation_speed.png")
    print(f"in {given.out}")


if __name__ == "__main__":
    main()
