"""Causality and isolation of the core, by values and by gradients; what it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import BACKENDS, CORES, WINDOWS, core, core_config, run_core
from txl_audio.config import parse
from txl_audio.model.positions import AbsoluteConfig
from txl_audio.model.transformer import CoreConfig, frames_since_start
from txl_audio.tokens import ConfigError, TxlError


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CORES)
def test_causality(name: str, backend: str) -> None:
    model = core(**CORES[name], attention=backend)
    x = torch.randn(2, 8, 12, requires_grad=True)
    out = run_core(model, x, [4, 4])
    for t in range(8):
        (gradient,) = torch.autograd.grad(out[:, t].square().sum(), x, retain_graph=True)
        assert not gradient[:, t + 1 :].any()
        assert gradient[:, t].any()
        changed = x.detach().clone()
        changed[:, t] = 7.0
        assert torch.equal(run_core(model, changed, [4, 4])[:, :t], out[:, :t])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_lanes_do_not_see_each_other(window: str, backend: str) -> None:
    model = core(window=window, attention=backend)
    x = torch.randn(3, 8, 12, requires_grad=True)
    reset = torch.rand(3, 8) < 0.2
    out = run_core(model, x, [4, 4], reset)
    (gradient,) = torch.autograd.grad(out[1].square().sum(), x)
    assert not gradient[0].any() and not gradient[2].any() and gradient[1].any()
    changed = x.detach().clone()
    changed[[0, 2]] = 7.0
    assert torch.equal(run_core(model, changed, [4, 4], reset)[1], out[1])
    alone = run_core(model, x[1:2], [4, 4], reset[1:2])
    torch.testing.assert_close(alone, out[1:2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("at", [0, 2, 4, 5, 7])
def test_nothing_passes_a_reset(at: int, window: str, backend: str) -> None:
    """`at` lies at a segment's begin, inside it, and in a later segment."""
    model = core(window=window, attention=backend)
    reset = torch.zeros(2, 12, dtype=torch.bool)
    reset[0, at] = True
    x = torch.randn(2, 12, 12, requires_grad=True)
    out = run_core(model, x, [4, 4, 4], reset)
    (gradient,) = torch.autograd.grad(out[0, at:].square().sum(), x, retain_graph=True)
    assert not gradient[0, :at].any() and gradient[0, at:].any(-1).all()
    changed = x.detach().clone()
    changed[0, :at] = 7.0
    changed_out = run_core(model, changed, [4, 4, 4], reset)
    assert torch.equal(changed_out[0, at:], out[0, at:])
    assert torch.equal(changed_out[1], out[1])
    if at % 4:  # The other lane, without a reset, does look back (gradients end at the segment).
        (gradient,) = torch.autograd.grad(out[1, at].square().sum(), x)
        assert gradient[1, at - 1].any()


@pytest.mark.parametrize("window", ["sliding", "same_length"])
def test_a_reset_is_a_new_stream(window: str) -> None:
    model = core(window=window)
    x, reset = torch.randn(1, 12, 12), torch.zeros(1, 12, dtype=torch.bool)
    reset[0, 5] = True
    both = run_core(model, x, [4, 4, 4], reset)
    fresh = run_core(model, x[:, 5:], [7])
    torch.testing.assert_close(both[:, 5:], fresh, rtol=0, atol=1e-5)


def test_padding_behind_a_document_changes_nothing() -> None:
    model = core()
    x = torch.randn(1, 8, 12)
    short = run_core(model, x[:, :5], [5])
    torch.testing.assert_close(run_core(model, x, [8])[:, :5], short, rtol=0, atol=1e-6)


def test_frames_since_start() -> None:
    reset = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    ages = frames_since_start(torch.tensor([3, 3, 2]), 5, reset)
    assert ages.tolist() == [[3, 4, 0, 1, 2], [0, 1, 2, 0, 0], [2, 3, 4, 5, 6]]
    assert frames_since_start(torch.tensor([3]), 2, None).tolist() == [[3, 4]]


def test_valid_counts_follow_resets() -> None:
    model = core(mem_len=6)
    memory = model.first_memory(3)
    reset = torch.zeros(3, 4, dtype=torch.bool)
    reset[1, 2], reset[2, 3] = True, True
    _, memory = model(torch.randn(3, 4, 12), memory, reset)
    assert memory.valid.tolist() == [4, 2, 1]
    _, memory = model(torch.randn(3, 4, 12), memory, reset)
    assert memory.valid.tolist() == [6, 2, 1]
    _, memory = model(torch.randn(3, 4, 12), memory)
    assert memory.valid.tolist() == [6, 6, 5]


def test_the_memory_holds_the_newest_inputs_of_every_layer() -> None:
    model = core(mem_len=6, n_layer=2)
    x = torch.randn(1, 8, 12)
    _, memory = model(x[:, :4], model.first_memory(1))
    _, memory = model(x[:, 4:], memory)
    assert torch.equal(memory.hidden[0], x[:, -6:])
    assert not torch.allclose(memory.hidden[1], memory.hidden[0])
    assert all(h.shape == (1, 6, 12) and not h.requires_grad for h in memory.hidden)


def test_m6_a_call_changes_neither_memory_nor_result() -> None:
    model = core()
    _, memory = model(torch.randn(2, 4, 12), model.first_memory(2))
    kept = [h.clone() for h in (*memory.hidden, memory.valid)]
    x, reset = torch.randn(2, 4, 12), torch.rand(2, 4) < 0.3
    first, _ = model(x, memory, reset)
    second, _ = model(x, memory, reset)
    assert torch.equal(first, second)
    for before, after in zip(kept, (*memory.hidden, memory.valid), strict=True):
        assert torch.equal(before, after)


def test_m7_wrong_lanes_say_what_to_do() -> None:
    model = core()
    _, memory = model(torch.randn(2, 4, 12), model.first_memory(2))
    with pytest.raises(TxlError, match=r"memory holds 2 lanes and the input 1; continue with memory.select"):
        model(torch.randn(1, 4, 12), memory)
    hidden, _ = model(torch.randn(1, 4, 12), memory.select(torch.tensor([1])))
    assert hidden.shape == (1, 4, 12)


def test_other_misfits_are_named() -> None:
    model = core()
    with pytest.raises(TxlError, match="memory has 2 layers of 9 frames, this model 2 of 6"):
        model(torch.randn(1, 4, 12), core(mem_len=9).first_memory(1))
    with pytest.raises(TxlError, match="memory has 3 layers of 6 frames"):
        model(torch.randn(1, 4, 12), core(n_layer=3).first_memory(1))
    with pytest.raises(TxlError, match=r"reset has shape \(1, 3\), expected \(1, 4\)"):
        model(torch.randn(1, 4, 12), model.first_memory(1), torch.zeros(1, 3, dtype=torch.bool))
    for name in ("absolute", "alrfou"):
        numbered = core(**CORES[name])
        with pytest.raises(TxlError, match="a segment of 5 frames is longer than the 4 positions"):
            numbered(torch.randn(1, 5, 12), numbered.first_memory(1))


ABSOLUTE = AbsoluteConfig(kind="absolute", segment_len=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ABSOLUTE, "window": "segment"}, "expected mem_len 0, got 6"),
        ({"positions": ABSOLUTE, "mem_len": 0}, "positions absolute need window segment, got sliding"),
        (
            {"positions": ABSOLUTE, "mem_len": 0, "window": "segment", "segment_len": 5},
            "positions.segment_len is 4, expected segment_len 5",
        ),
        ({"mem_len": 0, "window": "same_length"}, "mem_len 0 would show none"),
        ({"d_model": 7}, "multiple of 2"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_configs_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core_config(**changes)


def test_a_scheme_that_is_not_known() -> None:
    text = core_config().to_yaml().replace("kind: relative", "kind: rotary")
    with pytest.raises(ConfigError, match="positions"):
        parse(CoreConfig, text)


@pytest.mark.parametrize("name", CORES)
def test_configs_survive_yaml(name: str) -> None:
    config = core_config(**CORES[name])
    assert parse(CoreConfig, config.to_yaml()) == config


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_every_parameter_learns(norm: str) -> None:
    model = core(norm=norm, final_norm=norm == "pre").train()
    _, memory = model(torch.randn(2, 4, 12), model.first_memory(2))
    hidden, _ = model(torch.randn(2, 4, 12), memory)
    (hidden * torch.randn_like(hidden)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_biases_of_the_score_are_shared_unless_untied() -> None:
    assert core().positions.u.shape == (1, 2, 5)
    assert core(**CORES["untied-sliding"]).positions.u.shape == (2, 2, 5)


def test_dropout_is_for_training_only() -> None:
    model = core(dropout=0.5, attention_dropout=0.5)
    x = torch.randn(1, 4, 12)
    assert torch.equal(run_core(model, x, [4]), run_core(model, x, [4]))
    model.train()
    assert not torch.equal(run_core(model, x, [4]), run_core(model, x, [4]))
