"""The figures of `bench.sampler` for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def table(figures: Mapping[str, Any]) -> str:
    """Of `sampler_speed`."""
    sound, backends = figures["symbol_rate_hz"] is not None, figures["backends"]
    lines = [
        f"{'backend':<18}{'frames/s':>10}{'symbols/s':>11}{'real time':>11}{'ratio':>8}{'first chunk':>13}"
        f"{'state':>11}{'GFLOP/s':>14}{'GB/s':>14}"
    ]
    reads = []
    for name, row in backends.items():
        if "unsupported" in row:
            lines.append(f"{name:<18}  unsupported: {row['unsupported']}")
            continue
        first, state = f"{1e3 * row['first_chunk_s']:,.0f} ms", f"{row['decode_state_bytes'] / 2**20:.2f} MiB"
        flops = _share(row["flops"], row["flops_share"])
        read = _share(row["bytes_per_s"], row["read_share"])
        lines.append(
            f"{name:<18}{row['frames_per_s']:>10,.0f}{row['symbols_per_s']:>11,.0f}{_factor(row):>11}"
            f"{row['ratio']:>8.1f}{first:>13}{state:>11}{flops:>14}{read:>14}"
        )
        reads.append(f"{name} {row['read_bytes_per_s'] / 1e9:.1f}")
    lines += [
        f"One thread. A symbol takes {figures['macs_per_symbol']:,} multiply-adds. First chunk: after "
        f"{figures['prompt_symbols']:,} symbols of prompt the next {figures['first_chunk_symbols']:,}.",
        f"100 %: {figures['matmul_flops'] / 1e9:.1f} GFLOP/s, large float32 matrix products; and reading as "
        f"many bytes as weights and state have, in GB/s: {', '.join(reads)}.",
    ]
    unit = "seconds per second of every stream" if sound else "us per symbol"
    if figures["mem_len"]:
        lines += ["", *_sweep(figures["mem_len"], "mem_len", f"memory: {unit}")]
    lines += ["", *_sweep(figures["lanes"], "lanes", f"streams: {unit}")]
    if figures["held"]["sampled"]:
        lines += ["", *_streams(figures["held"], figures["decoder_real_time_factor"])]
    run = figures["run"]
    length = f"{run['symbols']:,} symbols"
    if sound:
        length += f", {run['symbols'] / figures['symbol_rate_hz']:.1f} s"
    thirds = ", ".join(f"{us:.2f}" for us in run["us_per_symbol"])
    lines += ["", f"{run['backend']}, us per symbol in each third of {length}: {thirds}"]
    return "\n".join(lines)


def _sweep(rows: Iterable[Mapping[str, Any]], key: str, title: str) -> list[str]:
    """A line for every backend, a column for every value of `key`."""
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        text = f"{row['us_per_symbol']:.1f}" if row["real_time_factor"] is None else _factor(row)
        cells.setdefault(row["backend"], {})[row[key]] = text
    values = list(next(iter(cells.values())))
    return [f"{title:<46}" + "".join(f"{value:>10,}" for value in values)] + [
        f"{name:<46}" + "".join(f"{line[value]:>10}" for value in values) for name, line in cells.items()
    ]


def _streams(held: Mapping[str, Any], decoder: float | None) -> list[str]:
    """A line for every backend."""
    columns = {title: held[title] for title in ("sampled", "decoded") if held[title]}
    lines = [
        f"{'streams that one thread holds in real time':<46}" + "".join(f"{title:>10}" for title in columns)
    ]
    for name in held["sampled"]:
        lines.append(f"{name:<46}" + "".join(f"{found[name]['streams']:>10}" for found in columns.values()))
    if decoder is not None:
        lines.append(f"The codec's decoder takes {decoder:.4f} s for a second of one stream.")
    return lines


def _factor(row: Mapping[str, Any]) -> str:
    return "-" if row["real_time_factor"] is None else f"{row['real_time_factor']:.3f}"


def _share(rate: float, share: float) -> str:
    return f"{rate / 1e9:.1f} ({share:.0%})"
