"""The parts of the modern recipe against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tiny import core, core_config
from txl_audio.model.block import Block, swiglu


def feed_forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the feed-forward part of a layer adds, by its weights."""
    return layer.contract(layer.activation(layer.expand(x)))


def test_squared_relu() -> None:
    layer, x = core(activation="relu2").layers[0], torch.randn(3, 12)
    inner = (x @ layer.expand.weight.T + layer.expand.bias).clamp(min=0) ** 2
    expected = inner @ layer.contract.weight.T + layer.contract.bias
    torch.testing.assert_close(feed_forward(layer, x), expected)


def test_swiglu_has_as_many_weights() -> None:
    gated, plain = (core(activation=a, d_ff=48).layers[0] for a in ("swiglu", "relu"))
    x = torch.randn(3, 12)
    value, gate = (x @ gated.expand.weight.T + gated.expand.bias).split(32, dim=-1)
    expected = (value * gate * torch.sigmoid(gate)) @ gated.contract.weight.T + gated.contract.bias
    torch.testing.assert_close(feed_forward(gated, x), expected)
    assert swiglu(torch.zeros(2, 6)).shape == (2, 3)
    matrices = [layer.expand.weight.numel() + layer.contract.weight.numel() for layer in (gated, plain)]
    assert matrices[0] == matrices[1]


def test_queries_and_keys_of_unit_size() -> None:
    """Scaling what a layer reads changes no attention weight, so only the values."""
    model = core(qk_norm=True, norm="post", n_layer=1)
    layer, x = model.layers[0], torch.randn(2, 4, 12)
    k, v = layer.keys_values(x)
    torch.testing.assert_close(k.square().mean(-1), torch.ones(k.shape[:-1]), rtol=1e-4, atol=0)
    k_again, v_again = layer.keys_values(3 * x)
    torch.testing.assert_close(k_again, k, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(v_again, 3 * v)


def test_rms_norm_neither_centres_nor_shifts() -> None:
    norm, x = core(norm_kind="rms").layers[0].attention_norm, torch.randn(5, 12) + 3
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    expected = x / x.square().mean(-1, keepdim=True).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_layers_that_begin_by_adding_nothing(activation: str) -> None:
    config = core_config(norm="pre", final_norm=True, zero_init=True, activation=activation)
    model, x = config.build().eval(), torch.randn(2, 4, 12)
    hidden, _ = model(x, model.first_memory(2))
    norm = model.final_norm
    torch.testing.assert_close(hidden, F.layer_norm(x, (12,), norm.weight, norm.bias))


@pytest.mark.parametrize(("d_ff", "inner"), [(1, 8), (6, 8), (18, 16), (1024, 680)])
def test_a_gated_layer_has_a_width(d_ff: int, inner: int) -> None:
    block = Block(core_config(activation="swiglu", d_ff=d_ff))
    assert block.expand.weight.shape == (2 * inner, 12) and block.contract.weight.shape == (12, inner)
