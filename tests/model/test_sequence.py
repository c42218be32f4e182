"""The laws for whole streams of symbols: chunks, causality inside frames, documents, lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import (
    CODE_STREAMS,
    STREAMS,
    TEXT,
    WINDOWS,
    audio_frames,
    lengths_of,
    run_nll,
    stream_model,
    text_model,
    wave_model,
)
from txl_audio.model.contracts import Context
from txl_audio.tokens import IGNORE, TxlError

ALL = [*STREAMS, *CODE_STREAMS, "text"]


@pytest.mark.parametrize("lengths", [[1] * 24, [10, 14], [3, 1, 9, 11]], ids=str)
@pytest.mark.parametrize("stream", ALL)
def test_chunks_change_nothing(stream: str, lengths: list[int]) -> None:
    """Frames of 4 samples, heads and embeddings that look back over several frames, documents anywhere."""
    model = stream_model(stream)
    inputs, targets, reset = audio_frames(model, 2, 24, [(0, 3), (0, 4), (1, 10), (1, 23)])
    expected, end = run_nll(model, inputs, targets, [24], reset)
    nats, state = run_nll(model, inputs, targets, lengths, reset)
    torch.testing.assert_close(nats, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(state.recent, end.recent)
    assert torch.equal(state.memory.valid, end.memory.valid)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("stream", ALL)
def test_m17_a_symbol_changes_nothing_before_it_is_read(stream: str, window: str) -> None:
    """Bit for bit, every place of every frame, as target and as the input that follows from it."""
    model = stream_model(stream, window=window)
    inputs, targets, _ = audio_frames(model, 1, 8)
    inputs[:, 0], places = 0, model.spec.symbols_per_frame
    inputs[:, 1:] = targets[:, :-1]
    before, _ = run_nll(model, inputs, targets, [4, 4])
    for symbol in range(8 * places):
        line = targets.flatten(1).clone()
        line[:, symbol] = (line[:, symbol] + 5) % model.spec.vocab_size
        changed = line.view_as(targets)
        changed_inputs = torch.cat([inputs[:, :1], changed[:, :-1]], dim=1)
        after, _ = run_nll(model, changed_inputs, changed, [4, 4])
        assert torch.equal(after.flatten()[:symbol], before.flatten()[:symbol])
        assert after.flatten()[symbol] != before.flatten()[symbol]
        # And it is read: by the next place, unless places are independent, or the next frame.
        if symbol < 7 * places or (symbol + 1 < 8 * places and stream != "codes-delay"):
            assert not torch.equal(after.flatten()[symbol + 1 :], before.flatten()[symbol + 1 :])


@pytest.mark.parametrize("stream", ALL)
def test_gradients_reach_back_only(stream: str) -> None:
    """d nats_t / d (what the core reads at a later frame) is exactly zero."""
    model = stream_model(stream)
    inputs, targets, _ = audio_frames(model, 2, 8)
    kept: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    handle = model.embedding.register_forward_hook(keep)
    nats, _ = model.nll(inputs, targets, model.initial_state(2))
    handle.remove()
    for t in range(8):
        (gradient,) = torch.autograd.grad(nats[:, t].sum(), kept, retain_graph=True)
        assert not gradient[:, t + 1 :].any() and gradient[:, t].any()


@pytest.mark.parametrize("stream", [name for name in STREAMS if name.startswith("p4")])
def test_a_place_does_not_depend_on_later_places(stream: str) -> None:
    """Log-probabilities at place p are the same whatever stands at p and after."""
    model = wave_model(stream)
    hidden, history = torch.randn(1, 1, 12), torch.randint(256, (1, 1, model.history))
    frames = torch.randint(256, (6, 1, 1, 4))
    for place in range(4):
        frames[:, ..., :place] = frames[0, ..., :place]
        expected = torch.stack([model.head.nll(hidden, Context(history, f), f)[0, 0, :place] for f in frames])
        assert (expected == expected[0]).all()
        frames = torch.randint(256, (6, 1, 1, 4))


@pytest.mark.parametrize("stream", ALL)
@pytest.mark.parametrize("at", [2, 4, 7])
def test_nothing_of_before_passes_a_documents_begin(stream: str, at: int) -> None:
    """Neither through the memory nor through the samples that head and embedding look back on."""
    model = stream_model(stream)
    inputs, targets, reset = audio_frames(model, 2, 10, [(0, at)])
    before, _ = run_nll(model, inputs, targets, [4, 4, 2], reset)
    changed = inputs.clone()
    changed[0, :at] = (changed[0, :at] + 3) % model.spec.vocab_size
    after, _ = run_nll(model, changed, targets, [4, 4, 2], reset)
    assert torch.equal(after[0, at:], before[0, at:])
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0, :at], before[0, :at])


@pytest.mark.parametrize("stream", ALL)
def test_a_document_after_another_equals_one_alone(stream: str) -> None:
    model = stream_model(stream)
    inputs, targets, reset = audio_frames(model, 1, 10, [(0, 3)])
    both, _ = run_nll(model, inputs, targets, [4, 4, 2], reset)
    alone, _ = run_nll(model, inputs[:, 3:], targets[:, 3:], [7])
    torch.testing.assert_close(both[:, 3:], alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stream", ALL)
def test_a_lane_alone_equals_itself_among_others(stream: str) -> None:
    model = stream_model(stream)
    inputs, targets, reset = audio_frames(model, 3, 8, [(0, 2), (1, 5)])
    together, _ = run_nll(model, inputs, targets, [4, 4], reset)
    for lane in range(3):
        one = slice(lane, lane + 1)
        alone, _ = run_nll(model, inputs[one], targets[one], [4, 4], reset[one])
        torch.testing.assert_close(alone, together[one], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stream", ALL)
def test_ignored_targets_cost_nothing_and_change_nothing(stream: str) -> None:
    model = stream_model(stream)
    inputs, targets, _ = audio_frames(model, 2, 6)
    full, _ = run_nll(model, inputs, targets, [6])
    partial = targets.clone()
    partial[0, 4:], partial[1, 5, -1:] = IGNORE, IGNORE
    nats, count, _ = model.loss(inputs, partial, model.initial_state(2))
    cost, _ = run_nll(model, inputs, partial, [6])
    assert not cost[partial == IGNORE].any()
    assert torch.equal(cost[partial >= 0], full[partial >= 0])
    assert int(count) == int((partial >= 0).sum())
    torch.testing.assert_close(nats, full[partial >= 0].sum())


def test_resetting_and_selecting_the_state() -> None:
    model = wave_model()
    inputs, targets, _ = audio_frames(model, 2, 8)
    _, state = run_nll(model, inputs[:, :4], targets[:, :4], [4])
    inputs = inputs.clone()
    inputs[0, 4] = model.spec.start_symbol
    reset = torch.zeros(2, 4, dtype=torch.bool)
    reset[0, 0] = True
    again, _ = model.nll(inputs[:, 4:], targets[:, 4:], state, reset)
    fresh, _ = model.nll(inputs[:, 4:], targets[:, 4:], model.initial_state(2))
    warm, _ = model.nll(inputs[:, 4:], targets[:, 4:], state)
    torch.testing.assert_close(again[0], fresh[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(again[1], warm[1])
    chosen, _ = model.nll(inputs[1:, 4:], targets[1:, 4:], state.select(torch.tensor([1])))
    torch.testing.assert_close(chosen, warm[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stream", "least"), [("p4-logistic", 1e-5), ("staged-p4", 0.1)])
def test_a12_a_beginning_is_not_silence(stream: str, least: float) -> None:
    """Start symbols stand before a document; real silence (code 128) before it is something else."""
    model = wave_model(stream)
    targets = torch.randint(256, (1, 1, 4))
    start, silence = torch.full((1, 1, 4), 256), torch.full((1, 1, 4), 128)
    begun, _ = model.nll(start, targets, model.initial_state(1))
    _, after_silence = model.nll(silence, silence, model.initial_state(1))
    silent, _ = model.nll(silence, targets, after_silence)
    assert (begun - silent).abs().min() > least and (begun - silent).abs().max() > 0.01
    assert (model.initial_state(1).recent == 256).all()


def test_shapes_that_do_not_fit_are_named() -> None:
    model = wave_model()
    inputs, targets, _ = audio_frames(model, 1, 4)
    with pytest.raises(TxlError, match=r"targets \(1, 3, 4\) differ in shape from inputs \(1, 4, 4\)"):
        model.nll(inputs, targets[:, :3], model.initial_state(1))
    for wrong in (inputs[..., :2], inputs[0]):
        with pytest.raises(TxlError, match=r"expected \[lanes, frames, 4\]"):
            model.nll(wrong, wrong, model.initial_state(1))


def test_text_has_no_start_symbol_to_embed() -> None:
    model = text_model()
    assert model.embedding.weight.size(0) == TEXT.vocab_size
    assert wave_model("p1-softmax").embedding.weight.size(0) == 257


@pytest.mark.parametrize("stream", ALL)
def test_every_parameter_learns(stream: str) -> None:
    model = stream_model(stream).train()
    inputs, targets, reset = audio_frames(model, 2, 8, [(0, 3)])
    nats, state = run_nll(model, inputs, targets, lengths_of(8, 4), reset)
    nats.sum().backward()
    assert state.memory.lanes == 2
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_layer_outputs_are_kept_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = text_model(), []
    encode = model.encode

    def spied(*words: Any, layer_outputs: list[torch.Tensor] | None = None) -> Any:
        asked.append(layer_outputs is not None)
        return encode(*words, layer_outputs=layer_outputs)

    monkeypatch.setattr(model, "encode", spied)
    inputs, targets, reset = audio_frames(model, 2, 4)
    for layers in ((), range(0), range(1)):
        model.losses(inputs, targets, model.initial_state(2), reset, layers=layers)
    assert asked == [False, False, True]


@pytest.mark.parametrize("stream", ["p4-logistic", "staged-p4"])
def test_what_is_heard_is_what_later_predictions_see(stream: str) -> None:
    """Another symbol heard changes what comes after it only; another target only its own nats."""
    model = wave_model(stream)
    inputs, targets, reset = audio_frames(model, 1, 6)

    def nats(targets: torch.Tensor, heard: torch.Tensor) -> torch.Tensor:
        rows = [torch.full_like(targets, IGNORE) for _ in range(targets.numel())]
        for index, row in enumerate(rows):
            row.view(-1)[index] = targets.view(-1)[index]
        later = torch.cat([inputs[:, :1], heard[:, :-1]], dim=1)
        return torch.stack(
            [model.losses(later, row, model.initial_state(1), reset, heard=heard)[0] for row in rows]
        )

    plain, at = nats(targets, targets), 2 * 4 + 1
    torch.testing.assert_close(plain, run_nll(model, inputs, targets, [6], reset)[0].flatten())
    other = targets.clone()
    other.view(-1)[at] = (other.view(-1)[at] + 90) % 256
    by_heard, by_target = nats(targets, other), nats(other, targets)
    assert torch.equal(by_heard[: at + 1], plain[: at + 1])
    assert not torch.equal(by_heard[at + 1 :], plain[at + 1 :]) and by_heard[at + 1] != plain[at + 1]
    assert by_target[at] != plain[at]
    assert torch.equal(by_target[torch.arange(24) != at], plain[torch.arange(24) != at])
