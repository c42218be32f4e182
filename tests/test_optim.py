"""The learning-rate schedule and what is decayed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.tiny import NUMBERED, RELATIVE, core, text_model, wave_model
from txl_audio.optim import Muon, OptimConfig
from txl_audio.runtime import Precision


def rates(config: OptimConfig, steps: int) -> list[float]:
    """Share of the peak at every step of a run of `steps`, as the trainer asks for it."""
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
    config = OptimConfig(warmup_steps=10, final_lr=0.1)
    assert config.rate(100, 1.0, 0.1) == pytest.approx(0.1)
    assert config.rate(150, 1.5, 0.1) == pytest.approx(0.1)
    assert config.rate(55, 0.55, 0.1) == pytest.approx(0.1 + 0.9 / 2)
    assert config.rate(30, 0.325, 0.1) == pytest.approx(0.1 + 0.9 * (0.5 + 0.5**1.5))


@pytest.mark.parametrize(("warmup_steps", "steps"), [(0, 10), (10, 10), (50, 10), (9, 10)])
def test_unusual_lengths(warmup_steps: int, steps: int) -> None:
    lr = rates(OptimConfig(lr=1.0, warmup_steps=warmup_steps), steps)
    assert all(0 < rate <= 1 for rate in lr)
    assert lr[0] == (1.0 if warmup_steps == 0 else 1 / (warmup_steps + 1))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = wave_model()
    decayed, free = OptimConfig(weight_decay=0.3).build(model).parts[0].param_groups
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
    groups = OptimConfig().build(model).parts[0].param_groups
    names = {id(p): name.removeprefix("core.positions.") for name, p in model.named_parameters()}
    decayed, left = ({names[id(p)] for p in group["params"]} for group in groups)
    assert free <= left and not free & decayed
    assert {f"keys.{i}.weight" for i in range(2)} <= decayed or scheme != "untied"


def test_frozen_parameters_are_left_out() -> None:
    model = wave_model()
    for parameter in model.core.parameters():
        parameter.requires_grad_(False)
    optimiser = OptimConfig().build(model)
    count = sum(len(group["params"]) for group in optimiser.parts[0].param_groups)
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


def test_muon_has_the_matrices_from_hidden_to_hidden() -> None:
    """Tables, outputs, vectors and stacked tensors stay with AdamW; every parameter has one owner."""
    model = wave_model()
    optimiser = OptimConfig(optimiser="muon", lr=0.01).build(model)
    adam, muon = ({id(p) for g in part.param_groups for p in g["params"]} for part in optimiser.parts)
    assert not adam & muon and adam | muon == {id(p) for p in model.parameters()}
    names = [n for n, p in model.named_parameters() if id(p) in muon]
    assert "core.layers.0.qkv.weight" in names and "core.positions.keys.1.weight" in names
    assert {"embedding.net.0.weight", "head.read.weight", "head.blocks.1.inner.weight"} <= set(names)
    assert not any(n.startswith(("head.output", "head.predict")) or n.endswith("bias") for n in names)
    text = text_model()
    muon = OptimConfig(optimiser="muon").build(text).parts[1].param_groups[0]["params"]
    assert not {id(p) for p in muon} & {id(text.embedding.weight), id(text.head.bias)}
    optimiser.set_rate(0.5)
    assert optimiser.lr == 0.005
    assert optimiser.parts[1].param_groups[0]["lr"] == 0.005


def test_a_step_of_muon_is_nearly_orthogonal() -> None:
    """The update has singular values near one another, whatever those of the gradient."""
    model = core(d_model=24, d_ff=16)
    weight = model.layers[0].expand.weight
    before = weight.detach().clone()
    optimiser = OptimConfig(optimiser="muon", lr=0.01, weight_decay=0.0).build(model)
    scales = torch.logspace(-2, 2, 16)
    weight.grad = scales[:, None] * torch.randn(16, 24)
    optimiser.step()
    update = torch.linalg.svdvals(weight.detach() - before)
    gradient = torch.linalg.svdvals(weight.grad)
    assert gradient.max() / gradient.min() > 1000
    # Root mean square of an update like Adam's: 0.2 of the rate (Liu et al. 2025).
    assert update.square().sum().sqrt() / (16 * 24) ** 0.5 == pytest.approx(0.01 * 0.2, rel=0.35)
    assert update.max() / update.median() < 2


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon to compare with")
def test_muon_is_that_of_pytorch() -> None:
    """Several steps, tall and wide: in bfloat16 to the bit, in float32 as close as its rounding allows."""

    def trained(precision: Precision | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = core(d_model=24, d_ff=16).layers
        matrices = [w for layer in blocks for w in layer.parameters() if w.dim() == 2]
        if precision is None:
            optimiser: Muon | torch.optim.Muon = torch.optim.Muon(
                matrices, lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
            )
        else:
            dtype = getattr(torch, precision)
            optimiser = Muon(matrices, lr=0.01, weight_decay=0.3, dtype=dtype)
        for _ in range(3):
            for matrix in matrices:
                matrix.grad = torch.randn_like(matrix)
            optimiser.step()
        return [matrix.detach() for matrix in matrices]

    theirs = trained(None)
    for own, other in zip(trained("bfloat16"), theirs, strict=True):
        assert torch.equal(own, other)
    for own, other in zip(trained("float32"), theirs, strict=True):
        assert not torch.equal(own, other)
        torch.testing.assert_close(own, other, rtol=0, atol=3 * 0.01 * 0.02)
