"""Time and memory of one layer's attention: the product's path beside the readable reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from txl_audio import runtime
from txl_audio.model.attention import Backend, attend, visible
from txl_audio.model.positions import RelativeConfig, Shape

PATHS: tuple[Backend, ...] = ("reference", "auto")


def attention_cost(
    *,
    segment_len: int,
    mem_len: int,
    lanes: int,
    heads: int,
    turns: int,
    device: str,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Seconds and peak bytes of a forward and a backward pass, by precision and path, and their ratios.

    Heads are 64 wide, positions the paper's, the window `sliding`. Peak bytes are held beside the inputs.
    Paths take turns and the median counts. `time_ratio` and `memory_ratio` are of `auto` to the reference.
    """
    place = runtime.device(device)
    runtime.keep_freed_memory()
    given = (segment_len, mem_len, lanes, heads)
    figures: dict[str, Any] = {"device": str(place), "threads": torch.get_num_threads()}
    figures |= dict(zip(("segment_len", "mem_len", "lanes", "heads"), given, strict=True))
    for precision in ("float32", "bfloat16"):
        runs = {path: attention_pass(*given, path=path, precision=precision, device=place) for path in PATHS}
        peaks = {path: peak_bytes(run, place) for path, run in runs.items()}
        times: dict[str, list[float]] = {path: [] for path in PATHS}
        for turn in range(turns):
            for path, run in runs.items():
                begun = time.perf_counter()
                run()
                times[path].append(time.perf_counter() - begun)
            now = ", ".join(f"{path} {1000 * t[-1]:,.0f} ms" for path, t in times.items())
            tell(f"{precision}, turn {turn + 1} of {turns}: {now}")
        seconds = {path: median(t) for path, t in times.items()}
        figures[precision] = {
            "seconds": seconds,
            "peak_bytes": peaks,
            "time_ratio": seconds["auto"] / seconds["reference"],
            "memory_ratio": peaks["auto"] / peaks["reference"],
        }
    return figures


def attention_pass(
    segment_len: int,
    mem_len: int,
    lanes: int,
    heads: int,
    *,
    path: Backend,
    precision: runtime.Precision,
    device: torch.device,
) -> Callable[[], None]:
    """A function that does a forward and a backward pass of one layer's attention on random numbers."""
    torch.manual_seed(0)
    d_head, keys = 64, mem_len + segment_len
    scheme = RelativeConfig().build(Shape(1, heads * d_head, heads, d_head), dropout=0.0).to(device)
    q, k, v = (
        torch.randn(heads, lanes, frames, d_head, device=device, requires_grad=True)
        for frames in (segment_len, keys, keys)
    )
    limit = torch.full((1, segment_len), mem_len, device=device)
    seen = visible(limit, keys)

    def run() -> None:
        with runtime.autocast(device, precision):
            terms = scheme.terms(0, keys, scheme.table(keys, device))
            out: Tensor = attend(q, k, v, terms, seen, dropout=0.0, backend=path)
        del terms
        out.float().square().sum().backward()
        for leaf in (q, k, v, *scheme.parameters()):
            leaf.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that `run` holds at once, beside what was there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        run()
    recorded: Any = profile.profiler
    changes = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `attention_cost` for reading."""
    lines = [f"{'precision, path':<24}{'ms':>10}{'peak MB':>10}"]
    for precision in ("float32", "bfloat16"):
        of = figures[precision]
        for path in PATHS:
            ms, mb = 1000 * of["seconds"][path], of["peak_bytes"][path] / 1e6
            lines.append(f"{precision + ' ' + path:<24}{ms:>10,.1f}{mb:>10,.1f}")
        lines.append(f"{'  auto / reference':<24}{of['time_ratio']:>10.2f}{of['memory_ratio']:>10.3f}")
    return "\n".join(lines)
