"""Streaming equals offline: one step at a time gives what the training path gives."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import (
    CODE_STREAMS,
    CORES,
    STREAMS,
    WINDOWS,
    audio_frames,
    core,
    lengths_of,
    run_core,
    run_nll,
    stream_model,
    wave_model,
)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("prompt", [0, 4, 8])
@pytest.mark.parametrize("name", CORES)
def test_steps_equal_the_forward_pass(name: str, prompt: int, norm: str) -> None:
    """30 steps go round a ring of 6 to 10 slots several times."""
    model = core(**CORES[name], norm=norm, final_norm=norm == "pre")
    x = torch.randn(2, 38, 12)
    offline = run_core(model, x, lengths_of(38, 4))
    memory = model.first_memory(2)
    for at in range(0, prompt, 4):
        _, memory = model(x[:, at : at + 4], memory)
    state = model.decode_state(memory)
    steps = [model.step_(frame, state) for frame in x[:, prompt:].unbind(1)]
    torch.testing.assert_close(torch.stack(steps, dim=1), offline[:, prompt:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "mem_len"),
    [(window, m) for window in WINDOWS for m in (0, 1, 3, 4, 5, 9) if (window, m) != ("same_length", 0)],
)
def test_every_proportion_of_memory_and_segment(window: str, mem_len: int) -> None:
    model = core(window=window, mem_len=mem_len, n_layer=3)
    x = torch.randn(1, 21, 12)
    state = model.decode_state(model.first_memory(1))
    steps = torch.stack([model.step_(frame, state) for frame in x.unbind(1)], dim=1)
    torch.testing.assert_close(steps, run_core(model, x, lengths_of(21, 4)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_resets_while_streaming(window: str) -> None:
    model = core(window=window)
    x, reset = torch.randn(3, 22, 12), torch.zeros(3, 22, dtype=torch.bool)
    for lane, frame in [(0, 3), (0, 4), (1, 9), (1, 17), (0, 20)]:
        reset[lane, frame] = True
    offline = run_core(model, x, lengths_of(22, 4), reset)
    state, steps = model.decode_state(model.first_memory(3)), []
    for t in range(22):
        state.reset_(reset[:, t])
        steps.append(model.step_(x[:, t], state))
    torch.testing.assert_close(torch.stack(steps, dim=1), offline, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_first_memory_of_zeros(window: str) -> None:
    model = core(window=window, first_memory="zeros")
    x = torch.randn(1, 14, 12)
    state = model.decode_state(model.first_memory(1))
    steps = torch.stack([model.step_(frame, state) for frame in x.unbind(1)], dim=1)
    torch.testing.assert_close(steps, run_core(model, x, lengths_of(14, 4)), rtol=0, atol=1e-5)


def test_lanes_that_are_reset_in_the_memory_stay_so_while_streaming() -> None:
    model = core()
    _, memory = model(torch.randn(2, 4, 12), model.first_memory(2))
    memory = memory.reset(torch.tensor([True, False]))
    x = torch.randn(2, 4, 12)
    offline, _ = model(x, memory)
    state = model.decode_state(memory)
    steps = torch.stack([model.step_(frame, state) for frame in x.unbind(1)], dim=1)
    torch.testing.assert_close(steps, offline, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("stream", [*STREAMS, *CODE_STREAMS, "text"])
def test_log_probs_of_steps_equal_offline_nats(stream: str, window: str) -> None:
    """Every embedding and head, 8 frames in bulk and then 13 one by one."""
    model = stream_model(stream, window=window)
    inputs, targets, _ = audio_frames(model, 2, 21)
    offline, _ = run_nll(model, inputs, targets, lengths_of(21, 4))
    _, state = run_nll(model, inputs[:, :8], targets[:, :8], [4, 4])
    decode, nats = model.decode_state(state), []
    for t in range(8, 21):
        hidden = model.step_(inputs[:, t], decode)
        places = []
        for place in range(model.spec.symbols_per_frame):
            log_probs = model.log_probs(hidden, decode, targets[:, t, :place])
            places.append(-log_probs.gather(1, targets[:, t, place, None])[:, 0])
        nats.append(torch.stack(places, dim=1))
    torch.testing.assert_close(torch.stack(nats, dim=1), offline[:, 8:], rtol=1e-4, atol=1e-4)


def test_a_fork_of_the_whole_stream_is_independent() -> None:
    model = wave_model()
    inputs, _, _ = audio_frames(model, 1, 12)
    decode = model.decode_state(model.initial_state(1))
    for t in range(6):
        model.step_(inputs[:, t], decode)
    fork = decode.fork()
    expected = [model.step_(inputs[:, t], fork) for t in range(6, 12)]
    other = decode.fork()
    for t in range(6):
        model.step_(inputs[:, t], other)
    got = [model.step_(inputs[:, t], decode) for t in range(6, 12)]
    assert torch.equal(torch.stack(got), torch.stack(expected))
