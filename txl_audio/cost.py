"""What a model costs: counted multiply-adds and bytes, not guesses."""

from __future__ import annotations

import copy

import torch
from torch.utils.flop_counter import FlopCounterMode

from txl_audio import runtime
from txl_audio.model.sequence import SequenceModel


def macs_per_symbol(model: SequenceModel) -> int:
    """Multiply-adds in matrix products to generate one symbol with a full memory."""
    model, device = model.eval(), next(model.parameters()).device
    places = model.spec.symbols_per_frame
    state = model.decode_state(model.initial_state(1))
    frame = torch.zeros(1, places, dtype=torch.int64, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = model.step_(frame, state)
        for place in range(places):
            model.log_probs(hidden, state, frame[:, :place])
    return counter.get_total_flops() // (2 * places)


def training_flops_per_symbol(
    model: SequenceModel, *, lanes: int, segment_len: int, precision: runtime.Precision = "float32"
) -> float:
    """Floating-point operations in matrix products of a training step, per symbol.

    Counted on a copy with reference attention: the counter misses in-place products and fused
    kernels. One and two lanes are run, since all further lanes cost the same again.
    """
    twin = copy.deepcopy(model).eval()
    for layer in twin.core.layers:
        layer.backend = "reference"
    device, places = next(twin.parameters()).device, twin.spec.symbols_per_frame

    def count(lanes: int) -> int:
        inputs = torch.zeros(lanes, segment_len, places, dtype=torch.int64, device=device)
        with FlopCounterMode(display=False) as counter:
            with runtime.autocast(device, precision):
                loss, _, _ = twin.loss(inputs, inputs, twin.initial_state(lanes))
            loss.backward()
        return counter.get_total_flops()

    one, two = count(1), count(2)
    return (one + (lanes - 1) * (two - one)) / (lanes * segment_len * places)


def decode_state_bytes(model: SequenceModel) -> int:
    """Bytes that one sampled stream holds, however long it runs."""
    return model.decode_state(model.initial_state(1)).nbytes()


def of_stream(model: SequenceModel) -> dict[str, float | int | None]:
    """Memory and cost of generating one stream, by the names that `info` reports; None where undefined."""
    spec, mem_len = model.spec, model.core.config.mem_len
    return {
        "frame_rate_hz": spec.frame_rate_hz or None,
        "symbols_per_frame": spec.symbols_per_frame,
        "mem_len_frames": mem_len,
        "memory_s": mem_len / spec.frame_rate_hz if spec.frame_rate_hz else None,
        "macs_per_symbol": macs_per_symbol(model),
        "decode_state_bytes": decode_state_bytes(model),
    }
