"""Costs are counted, so they equal what one counts by hand."""

from __future__ import annotations

import pytest

from tests.tiny import BACKENDS, text_model, wave_model
from txl_audio import cost, runtime

# tests/tiny.py: 2 layers, D 12, 2 heads of 5, d_ff 16, memory 6; 11 symbols of text.
LAYERS, D, HD, D_FF, M, V = 2, 12, 2 * 5, 16, 6, 11
PROJECTIONS = D * 3 * HD + HD * D + 2 * D * D_FF


@pytest.mark.parametrize(("window", "keys"), [("sliding", M + 1), ("same_length", M), ("segment", M + 4)])
def test_multiply_adds_of_a_generated_symbol(window: str, keys: int) -> None:
    # Content scores, position scores and the mixture of values; the ring has the positions ready.
    per_layer = PROJECTIONS + 3 * keys * HD
    assert cost.macs_per_symbol(text_model(window=window)) == LAYERS * per_layer + D * V


def test_a_frame_is_shared_by_its_symbols() -> None:
    # P 4; embedding 9 samples (3 features each and the level) -> 12 -> D; head width 8 over 7 samples.
    core = LAYERS * (PROJECTIONS + 3 * (M + 1) * HD)
    embedding = (3 * 9 + 1) * 12 + 12 * D
    place = (3 * 7 + 1) * 8 + D * 8 + 2 * 2 * 8 * 8 + 8 * 3 * 2 + D * 7
    assert cost.macs_per_symbol(wave_model("p4-logistic")) == (core + embedding + 4 * place) // 4


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(("lanes", "precision"), [(1, "float32"), (5, "float32"), (5, "bfloat16")])
def test_operations_of_a_training_step(lanes: int, precision: runtime.Precision, attention: str) -> None:
    """Whatever path attention takes, and though the counter misses products in place."""
    frames = 4
    keys, macs = M + frames, 0.0
    for _ in range(LAYERS):
        scores = 3 * keys * HD
        memory = M * D * 2 * HD / frames
        positions = keys * D * HD / (lanes * frames)
        # Backward costs twice the forward pass, but memory and sinusoids get no gradients.
        macs += 3 * (PROJECTIONS + scores) + 2 * (memory + positions)
    macs += 3 * D * V
    model = text_model(window="sliding", attention=attention)
    counted = cost.training_flops_per_symbol(model, lanes=lanes, segment_len=frames, precision=precision)
    assert counted == pytest.approx(2 * macs)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(layer.backend == attention for layer in model.core.layers)


def test_bytes_of_a_stream() -> None:
    # In float32 keys, values and the position keys of every distance; one start, one newest symbol.
    assert cost.decode_state_bytes(text_model()) == LAYERS * 3 * (M + 1) * HD * 4 + 8 + 8
