"""What attention holds at long memories, by the allocator's own records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from txl_audio.bench import attention as bench

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_long_memory_takes_at_most_a_quarter_of_the_reference(precision: Any) -> None:
    """Segment 512 and memory 8192, forward and backward."""

    def peak(path: Any) -> int:
        run = bench.attention_pass(512, 8192, 1, 4, path=path, precision=precision, device=CPU)
        return bench.peak_bytes(run, CPU)

    reference = peak("reference")
    assert reference > 3 * 4 * 4 * 512 * (512 + 8192)  # it does keep T x K matrices
    assert peak("auto") <= reference / 4


def test_peak_bytes_are_of_what_is_there_at_once() -> None:
    def run() -> None:
        for _ in range(3):
            first = torch.zeros(1000, 250)
            second = first + 1
            del first, second

    assert bench.peak_bytes(run, CPU) == pytest.approx(2 * 10**6, rel=0.01)


def test_figures_and_table() -> None:
    figures = bench.attention_cost(segment_len=8, mem_len=16, lanes=2, heads=2, turns=2, device="cpu")
    of = figures["bfloat16"]
    assert of["memory_ratio"] == of["peak_bytes"]["auto"] / of["peak_bytes"]["reference"]
    assert of["time_ratio"] == of["seconds"]["auto"] / of["seconds"]["reference"]
    assert len(bench.table(figures).splitlines()) == 7
