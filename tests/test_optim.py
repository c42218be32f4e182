"""The learning-rate schedule and what is decayed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.tiny import NUMBERED, RELATIVE, text_model, wave_model
from txl_audio.optim import OptimConfig


def rates(config: OptimConfig, steps: int) -> list[float]:
    """Learning rate of every step of a run of `steps`, as the trainer asks for it."""
    ended = config.warmup_steps / steps
    return [
        config.rate(step, step / steps, ended if step >= config.warmup_steps else 0.0)
        for step in range(steps)
    ]


def test_m13_the_two_parts_meet() -> None:
    """Warm-up 40 of 100, peak 1."""
    lr = rates(OptimConfig(lr=1.0, warmup_steps=40, final_lr=0.0), 100)
    changes = [b - a for a, b in pairwise(lr)]
    assert max(lr) == lr[40] == 1.0
    assert lr[39] == pytest.approx(40 / 41)
    assert max(abs(change) for change in changes) < 0.03
    assert all(change > 0 for change in changes[:40]) and all(change < 0 for change in changes[40:])
    assert lr[0] > 0 and 0 < lr[99] < 0.002


def test_the_end_is_a_share_of_the_peak() -> None:
    config = OptimConfig(lr=2.0, warmup_steps=10, final_lr=0.1)
    assert config.rate(100, 1.0, 0.1) == pytest.approx(0.2)
    assert config.rate(150, 1.5, 0.1) == pytest.approx(0.2)
    assert config.rate(55, 0.55, 0.1) == pytest.approx(2.0 * (0.1 + 0.9 / 2))


@pytest.mark.parametrize(("warmup_steps", "steps"), [(0, 10), (10, 10), (50, 10), (9, 10)])
def test_unusual_lengths(warmup_steps: int, steps: int) -> None:
    lr = rates(OptimConfig(lr=1.0, warmup_steps=warmup_steps), steps)
    assert all(0 < rate <= 1 for rate in lr)
    assert lr[0] == (1.0 if warmup_steps == 0 else 1 / (warmup_steps + 1))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = wave_model()
    decayed, free = OptimConfig(weight_decay=0.3).build(model).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])
    together = {id(p) for group in (decayed, free) for p in group["params"]}
    assert together == {id(p) for p in model.parameters()}
    left = {id(p) for p in free["params"]}
    assert left == {
        id(p)
        for name, p in model.named_parameters()
        if p.dim() < 2 or name in ("core.positions.u", "core.positions.v")
    }


@pytest.mark.parametrize(
    ("scheme", "free"),
    [("untied", {"u", "v"}), ("shaw", {"u", "r", "b"}), ("alrfou", {"rows"}), ("absolute", set())],
)
def test_what_positions_learn_does_not_decay_unless_it_is_a_matrix(scheme: str, free: set[str]) -> None:
    model = text_model(**{**RELATIVE, **NUMBERED}[scheme])
    groups = OptimConfig().build(model).param_groups
    names = {id(p): name.removeprefix("core.positions.") for name, p in model.named_parameters()}
    decayed, left = ({names[id(p)] for p in group["params"]} for group in groups)
    assert free <= left and not free & decayed
    assert {f"keys.{i}.weight" for i in range(2)} <= decayed or scheme != "untied"


def test_frozen_parameters_are_left_out() -> None:
    model = wave_model()
    for parameter in model.core.parameters():
        parameter.requires_grad_(False)
    optimiser = OptimConfig().build(model)
    count = sum(len(group["params"]) for group in optimiser.param_groups)
    assert count == len(list(model.embedding.parameters())) + len(list(model.head.parameters()))


@pytest.mark.parametrize(
    "changes", [{"lr": 0.0}, {"final_lr": 1.5}, {"warmup_steps": -1}, {"clip": 0.0}, {"weight_decay": -1.0}]
)
def test_values_out_of_range(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        OptimConfig(**changes)  # pyright: ignore[reportArgumentType]


def test_a_step_moves_against_the_gradient() -> None:
    layer = torch.nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    optimiser = OptimConfig(lr=0.01, weight_decay=0.0).build(layer)
    layer.weight.grad, layer.bias.grad = torch.ones(2, 2), torch.zeros(2)
    optimiser.step()
    torch.testing.assert_close(layer.weight.detach(), before - 0.01)
