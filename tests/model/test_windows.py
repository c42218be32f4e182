"""Which frames a query sees, and what a split of the stream changes: nothing, where it should not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import BACKENDS, RELATIVE, core, lengths_of, run_core

# Reference matrices for mem_len 2, 2 queries, full memory: [query][key], oldest key first.
MATRICES = {
    "same_length": [[0, 1, 1, 0], [0, 0, 1, 1]],
    "sliding": [[1, 1, 1, 0], [0, 1, 1, 1]],
    "segment": [[1, 1, 1, 0], [1, 1, 1, 1]],
}


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", MATRICES)
def test_definition(window: str, backend: str, norm: str) -> None:
    model = core(n_layer=1, mem_len=2, segment_len=2, window=window, attention=backend, norm=norm)
    stream = torch.randn(1, 4, 12)

    def second_segment(x: torch.Tensor) -> torch.Tensor:
        return run_core(model, x, [2, 2])[0, 2:].detach()

    before, seen = second_segment(stream), []
    for key in range(4):
        changed = stream.clone()
        changed[:, key] += torch.randn(12)
        seen.append((second_segment(changed) != before).any(-1).int())
    assert torch.stack(seen, dim=1).tolist() == MATRICES[window]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sliding_sees_itself_and_exactly_mem_len_before(backend: str) -> None:
    model = core(n_layer=1, mem_len=5, window="sliding", attention=backend)
    x = torch.randn(1, 12, 12, requires_grad=True)
    hidden, _ = model(x, model.first_memory(1))
    for query in range(12):
        (gradient,) = torch.autograd.grad(hidden[0, query].sum(), x, retain_graph=True)
        seen = gradient[0].abs().sum(-1).nonzero().flatten().tolist()
        assert seen == list(range(max(0, query - 5), query + 1))


@pytest.mark.parametrize("window", ["sliding", "same_length"])
@pytest.mark.parametrize("scheme", RELATIVE)
@pytest.mark.parametrize("lengths", [[10, 14], [1] * 24, [24], [5, 1, 1, 17]], ids=str)
def test_m2_chunks_change_nothing(lengths: list[int], scheme: str, window: str) -> None:
    changes: dict[str, Any] = {**RELATIVE[scheme], "window": window}
    x = torch.randn(2, 24, 12)
    for mem_len in (3, 24):
        model = core(mem_len=mem_len, **changes)
        expected = run_core(model, x, [24])
        torch.testing.assert_close(run_core(model, x, lengths), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_m2_for_every_path_and_norm(backend: str, norm: str) -> None:
    model = core(mem_len=24, attention=backend, norm=norm, final_norm=norm == "pre")
    x = torch.randn(2, 24, 12)
    expected = run_core(model, x, [24])
    for lengths in ([10, 14], [1] * 24):
        torch.testing.assert_close(run_core(model, x, lengths), expected, rtol=0, atol=1e-5)


def test_the_papers_window_does_depend_on_the_segment() -> None:
    """Why `sliding` exists: later queries of a segment see more."""
    model = core(window="segment", mem_len=4, segment_len=8)
    x = torch.randn(1, 16, 12)
    difference = run_core(model, x, [8, 8]) - run_core(model, x, [1] * 16)
    assert difference.abs().max() > 1e-2


def test_a_segment_longer_than_the_memory_sees_all_of_itself() -> None:
    model = core(n_layer=1, window="segment", mem_len=2, segment_len=8)
    x = torch.randn(1, 8, 12, requires_grad=True)
    hidden, _ = model(x, model.first_memory(1))
    (gradient,) = torch.autograd.grad(hidden[0, -1].sum(), x)
    assert (gradient.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("window", ["segment", "sliding"])
def test_m1_no_memory_means_fresh_segments(window: str) -> None:
    model = core(mem_len=0, window=window)
    x = torch.randn(2, 8, 12)
    twice = run_core(model, x, [4, 4])
    fresh = torch.cat([run_core(model, part, [4]) for part in x.split(4, dim=1)], dim=1)
    assert torch.equal(twice, fresh)


@pytest.mark.parametrize("first_memory", ["empty", "zeros"])
def test_first_memory(first_memory: str) -> None:
    model = core(first_memory=first_memory, window="segment", segment_len=4)
    memory = model.first_memory(2)
    assert memory.valid.tolist() == ([6, 6] if first_memory == "zeros" else [0, 0])
    assert all(not h.any() for h in memory.hidden)
    x = torch.randn(2, 4, 12)
    empty = core(window="segment", segment_len=4)
    same = torch.equal(run_core(model, x, [4]), run_core(empty, x, [4]))
    assert same == (first_memory == "empty")


def test_zeros_in_the_first_memory_leave_it_as_frames_arrive() -> None:
    model, empty = core(first_memory="zeros", mem_len=3), core(mem_len=3)
    x = torch.randn(1, 20, 12)
    difference = (run_core(model, x, lengths_of(20, 4)) - run_core(empty, x, lengths_of(20, 4))).abs()
    # Two layers of 3 frames of memory: from frame 6 on nothing of the zeros can be felt.
    assert difference[0, :3].amin() > 0
    assert not difference[0, 6:].any()
