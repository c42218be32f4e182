"""The same weights with other settings, and the memory projected once: nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import (
    CORES,
    NUMBERED,
    RELATIVE,
    STREAMS,
    audio_frames,
    core,
    lengths_of,
    run_core,
    run_nll,
    text_model,
    wave_model,
)
from txl_audio.model.memory import ProjectedMemory
from txl_audio.model.positions import RelativeConfig
from txl_audio.model.transformer import TransformerXL
from txl_audio.tokens import ConfigError, TxlError


@torch.no_grad()
def run_projected(model: TransformerXL, x: Tensor, length: int, reset: Tensor | None) -> Tensor:
    memory, out = model.project(model.first_memory(x.size(0))), []
    for at in range(0, x.size(1), length):
        part = slice(at, at + length)
        hidden, memory = model(x[:, part], memory, None if reset is None else reset[:, part])
        assert isinstance(memory, ProjectedMemory)
        out.append(hidden)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", CORES)
def test_projected_memory_gives_the_same(name: str, norm: str) -> None:
    x, reset = torch.randn(3, 26, 12), torch.zeros(3, 26, dtype=torch.bool)
    reset[0, 9] = reset[1, 16] = reset[1, 18] = True
    model = core(**CORES[name], norm=norm)
    for begins in (None, reset):
        expected = run_core(model, x, lengths_of(26, 4), begins)
        got = run_projected(model, x, 4, begins)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [{"first_memory": "zeros"}, {"mem_len": 0}], ids=str)
def test_projected_memory_of_every_kind_of_core(changes: dict[str, Any]) -> None:
    model, x = core(**changes), torch.randn(2, 15, 12)
    expected = run_core(model, x, lengths_of(15, 4))
    torch.testing.assert_close(run_projected(model, x, 4, None), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_projected_memory_is_a_value() -> None:
    """M6: the same call twice gives the same, and a memory that was passed in is what it was."""
    model, x = core(), torch.randn(3, 4, 12)
    _, memory = model(torch.randn(3, 4, 12), model.project(model.first_memory(3)))
    before = copy.deepcopy(memory)
    once, after = model(x, memory)
    again, _ = model(x, memory)
    assert torch.equal(once, again)
    for old, new in zip(before.keys + before.values, memory.keys + memory.values, strict=True):
        assert torch.equal(old, new)
    lanes = torch.tensor([2, 0])
    chosen, _ = model(x[lanes], memory.select(lanes))
    torch.testing.assert_close(chosen, once[lanes], rtol=0, atol=1e-6)
    fresh, _ = model(x, model.first_memory(3))
    forgotten, _ = model(x, memory.reset(torch.tensor([True, False, False])))
    torch.testing.assert_close(forgotten[0], fresh[0], rtol=0, atol=1e-6)
    assert torch.equal(forgotten[1:], once[1:])
    assert after.valid.tolist() == [6, 6, 6]


@torch.no_grad()
def test_frames_are_projected_once() -> None:
    """What it is for: products do not grow with the memory, but for the scores themselves."""
    model, x = core(mem_len=512), torch.randn(1, 4, 12)
    seen: list[int] = []
    linear = torch.nn.functional.linear
    memory = model.project(model.first_memory(1))
    for _ in range(3):

        def watched(value: Tensor, *rest: Any) -> Tensor:
            seen.append(value.size(-2))
            return linear(value, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", watched)
            _, memory = model(x, memory)
    assert set(seen) == {4}


def test_projected_memory_that_cannot_be_used() -> None:
    model, x = core(), torch.randn(1, 4, 12)
    memory = model.project(model.first_memory(1))
    with pytest.raises(TxlError, match="has no gradient"):
        model(x, memory)
    with torch.no_grad(), pytest.raises(TxlError, match="segments of up to 4 frames, got 5"):
        model(torch.randn(1, 5, 12), memory)
    with torch.no_grad(), pytest.raises(TxlError, match="holds 1 lanes and the input 2"):
        model(torch.randn(2, 4, 12), memory)


@pytest.mark.parametrize("stream", STREAMS)
def test_projected_state_of_a_stream(stream: str) -> None:
    model = wave_model(stream)
    inputs, targets, reset = audio_frames(model, 2, 14, begins=[(1, 5)])
    expected, _ = run_nll(model, inputs, targets, [4, 4, 4, 2], reset)
    with torch.no_grad():
        state, out = model.projected(model.initial_state(2)), []
        for at in range(0, 14, 4):
            part = slice(at, at + 4)
            nats, state = model.nll(inputs[:, part], targets[:, part], state, reset[:, part])
            out.append(nats)
    torch.testing.assert_close(torch.cat(out, dim=1), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(TxlError, match="sampling continues after a plain memory"):
        model.decode_state(state)


@pytest.mark.parametrize(
    "changes", [{"mem_len": 3}, {"segment_len": 9}, {"window": "same_length"}, {"mem_len": 0}], ids=str
)
@pytest.mark.parametrize("scheme", RELATIVE)
def test_a_view_equals_a_model_built_so(scheme: str, changes: dict[str, Any]) -> None:
    model, built = core(**RELATIVE[scheme]), core(**{**RELATIVE[scheme], **changes})
    viewed, x = model.view(**changes), torch.randn(2, 20, 12)
    assert viewed.config == built.config
    lengths = lengths_of(20, viewed.config.segment_len)
    assert torch.equal(run_core(viewed, x, lengths), run_core(built, x, lengths))
    assert model.config == core(**RELATIVE[scheme]).config


def test_clamping_in_a_view() -> None:
    model, x = core(), torch.randn(2, 20, 12)
    before = run_core(model, x, [20])
    clamped = run_core(model.view(clamp_len=3), x, [20])
    assert torch.equal(clamped, run_core(core(positions=RelativeConfig(clamp_len=3)), x, [20]))
    assert not torch.equal(clamped, before) and torch.equal(run_core(model, x, [20]), before)


def test_a_view_shares_every_weight() -> None:
    model = text_model()
    viewed = model.view(mem_len=2, clamp_len=3)
    mine, theirs = dict(model.named_parameters()), dict(viewed.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)
    inputs = torch.randint(11, (1, 4, 1))
    loss, _, _ = viewed.loss(inputs, inputs, viewed.initial_state(1))
    loss.backward()
    assert all(p.grad is not None for p in model.core.layers.parameters())


def test_settings_that_a_scheme_does_not_have() -> None:
    for scheme, changes in NUMBERED.items():
        with pytest.raises(
            ConfigError, match=f"positions {scheme} number frames .* expected mem_len 0, got 4"
        ):
            core(**changes).view(mem_len=4)
        with pytest.raises(ConfigError, match=f"positions {scheme} have no distances to clamp"):
            core(**changes).view(clamp_len=4)
    with pytest.raises(ConfigError, match="positions shaw have no distances to clamp"):
        core(**RELATIVE["shaw"]).view(clamp_len=4)
