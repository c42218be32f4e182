"""Memory is a value; the decode state has one owner."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from tests.tiny import RELATIVE, core
from txl_audio.model.memory import Memory


def example() -> Memory:
    return Memory(tuple(torch.randn(3, 4, 2) for _ in range(2)), torch.tensor([4, 2, 0]))


def test_it_cannot_be_assigned_to() -> None:
    with pytest.raises(FrozenInstanceError):
        example().valid = torch.zeros(3)  # pyright: ignore[reportAttributeAccessIssue]


def test_reset_forgets_lanes_of_a_copy() -> None:
    memory = example()
    reset = memory.reset(torch.tensor([True, False, False]))
    assert reset.valid.tolist() == [0, 2, 0]
    assert memory.valid.tolist() == [4, 2, 0]


def test_select_takes_lanes_in_any_order_and_number() -> None:
    memory = example()
    chosen = memory.select(torch.tensor([2, 0, 0, 1]))
    assert chosen.lanes == 4 and chosen.valid.tolist() == [0, 4, 4, 2]
    for new, old in zip(chosen.hidden, memory.hidden, strict=True):
        assert torch.equal(new, old[[2, 0, 0, 1]])


def test_detach_cuts_the_graph() -> None:
    memory = Memory((torch.randn(1, 2, 2, requires_grad=True) * 2,), torch.tensor([2]))
    assert memory.hidden[0].requires_grad and not memory.detach().hidden[0].requires_grad


def test_select_then_continue_equals_continue_then_select() -> None:
    model = core()
    _, memory = model(torch.randn(3, 4, 12), model.first_memory(3))
    x, lanes = torch.randn(3, 4, 12), torch.tensor([2, 0])
    all_lanes, _ = model(x, memory)
    chosen, _ = model(x[lanes], memory.select(lanes))
    torch.testing.assert_close(chosen, all_lanes[lanes], rtol=0, atol=1e-6)


def test_reset_then_continue_equals_a_fresh_stream() -> None:
    model = core()
    _, memory = model(torch.randn(2, 4, 12), model.first_memory(2))
    x = torch.randn(2, 4, 12)
    again, _ = model(x, memory.reset(torch.tensor([True, False])))
    fresh, _ = model(x, model.first_memory(2))
    warm, _ = model(x, memory)
    torch.testing.assert_close(again[0], fresh[0], rtol=0, atol=1e-6)
    assert torch.equal(again[1], warm[1])


def test_a_fork_goes_its_own_way() -> None:
    model = core()
    state = model.decode_state(model.first_memory(1))
    for frame in torch.randn(9, 1, 12):
        model.step_(frame, state)
    fork, x = state.fork(), torch.randn(1, 12)
    keys = state.keys.clone()
    expected = model.step_(x, state.fork())
    for frame in torch.randn(5, 1, 12):
        model.step_(frame, fork)
    fork.reset_(torch.tensor([True]))
    assert torch.equal(state.keys, keys) and state.time + 5 == fork.time
    assert torch.equal(model.step_(x, state), expected)


def test_bytes_do_not_grow() -> None:
    model = core(window="segment")
    state = model.decode_state(model.first_memory(2))
    before = state.nbytes()
    for frame in torch.randn(50, 2, 12):
        model.step_(frame, state)
    assert state.nbytes() == before
    # Keys and values: 2 layers, 2 lanes, 2 heads, mem_len 6 + segment_len 4 slots, width 5, float32.
    # Position keys: the same for all lanes. Views of weights (u, v, projections) are not held twice.
    assert before == 2 * (2 * 2 * 2 * 10 * 5 * 4) + 2 * 2 * 10 * 5 * 4 + 2 * 8


def test_bytes_of_distance_biases_count() -> None:
    state = core(**RELATIVE["shaw"]).decode_state(core(**RELATIVE["shaw"]).first_memory(1))
    # 7 slots: keys, values and position keys of width 5, and one bias, per layer and head.
    assert state.nbytes() == 2 * 2 * 7 * (3 * 5 + 1) * 4 + 8
