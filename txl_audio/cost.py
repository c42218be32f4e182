"""What a model costs: counted multiply-adds and bytes, not guesses."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

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


def training_flops_per_symbol(model: SequenceModel, *, lanes: int, segment_len: int) -> float:
    """Floating-point operations in matrix products of a training step, per symbol; leaves no gradients."""
    device, places = next(model.parameters()).device, model.spec.symbols_per_frame
    inputs = torch.zeros(lanes, segment_len, places, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter:
        loss, _, _ = model.loss(inputs, inputs, model.initial_state(lanes))
        loss.backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / inputs.numel()


def decode_state_bytes(model: SequenceModel) -> int:
    """Bytes that one sampled stream holds, however long it runs."""
    return model.decode_state(model.initial_state(1)).nbytes()
