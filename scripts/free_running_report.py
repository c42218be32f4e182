"""Tables and pictures of scripts/free_running.py, from what its results.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from txl_audio.codecs.mulaw import SAMPLE_RATE_HZ
from txl_audio.listening import BAND_EDGES_HZ, verdict_table
from txl_audio.plots import plot_spectrograms, plot_stream

PICTURES = 20
ROWS = {
    "level (dBFS)": "level_dbfs",
    "frame levels, 10th percentile (dBFS)": "level_p10_dbfs",
    "frame levels, median (dBFS)": "level_p50_dbfs",
    "frame levels, 90th percentile (dBFS)": "level_p90_dbfs",
    "loud frames (share)": "loud",
    "clipped samples (share)": "clipped",
    "silent frames (share)": "silent",
    "voiced frames (share)": "voiced",
    "longest run without a pause (s)": "longest_run_s",
    "quietest 5 s (dBFS)": "lowest_window_dbfs",
    "least deviation of levels in 5 s (dB)": "steadiest_window_db",
    "most power in one bin in 5 s (share)": "purest_window",
    "bits per sample under the model": "bits",
    "DNSMOS, overall": "dnsmos",
}
OF_EXCERPTS = ("level_dbfs", "level_p10_dbfs", "loud", "clipped", "voiced", "longest_run_s", "bits")


def report(results: Mapping[str, Any]) -> str:
    """report.md: limits, statistics, excerpts."""
    tables = verdict_table(results["verdicts"]), statistics_table(results), excerpts_table(results)
    return "\n\n".join("\n".join(lines) for lines in tables) + "\n"


def statistics_table(results: Mapping[str, Any]) -> list[str]:
    columns = results["statistics"]
    lines = _head("", *columns)
    lines += [_row(title, [c.get(name) for c in columns.values()]) for title, name in ROWS.items()]
    for band, (low, high) in enumerate(pairwise(BAND_EDGES_HZ)):
        lines.append(_row(f"{low:g} to {high:g} Hz (dBFS)", [c["band_dbfs"][band] for c in columns.values()]))
    return lines


def excerpts_table(results: Mapping[str, Any]) -> list[str]:
    shown = {title: name for title, name in ROWS.items() if name in OF_EXCERPTS}
    rows = [_row(e["prompt"], [e["minute"], *(e[n] for n in shown.values())]) for e in results["excerpts"]]
    return [*_head("prompt", "minute", *shown), *rows]


def _row(title: str, values: Sequence[Any]) -> str:
    cells = [f"{v:.3g}" if isinstance(v, float) else "-" if v is None else str(v) for v in values]
    return f"| {title} | " + " | ".join(cells) + " |"


def _head(*titles: str) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]


def draw_sounds(
    real: np.ndarray, prompts: Mapping[str, np.ndarray], continued: Sequence[np.ndarray], path: Path
) -> None:
    """Spectrograms of real speech, then of prompts (pcm by name) and how each was continued."""
    pairs = list(zip(prompts.items(), continued, strict=True))[:PICTURES]
    sounds = {name: np.concatenate([prompt, pcm]) for (name, prompt), pcm in pairs}
    ends_s = {name: len(prompt) / SAMPLE_RATE_HZ for (name, prompt), _ in pairs}
    plot_spectrograms({"real speech": real, **sounds}, SAMPLE_RATE_HZ, path, boundaries_s=ends_s)


def draw_minutes(results: Mapping[str, Any], path: Path) -> None:
    """Speed, memory, level and bits as the run goes on."""
    minutes = results["minutes"]
    curves = {
        "real-time factor": [minute["real_time_factor"] for minute in minutes],
        "state (kB)": [minute["state_bytes"] / 1000 for minute in minutes],
        "peak memory (MB)": [minute["peak_memory_bytes"] / 1e6 for minute in minutes],
        "level (dBFS)": [minute["level_dbfs"] for minute in minutes],
        "bits per sample": [minute["bits"] for minute in minutes],
    }
    plot_stream([minute["samples"] / SAMPLE_RATE_HZ / 60 for minute in minutes], curves, path)
