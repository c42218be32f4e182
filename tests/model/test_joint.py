"""Several streams over one core: one set of weights, and nothing else in common."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiny import audio_frames, joint_model, run_nll
from txl_audio.model.sequence import SINGLE, JointModel, SequenceModel


def test_every_weight_is_there_once() -> None:
    model = joint_model()
    speech, text = model.streams["speech"], model.streams["text"]
    assert {id(p) for p in speech.core.parameters()} == {id(p) for p in text.core.parameters()}
    assert not {id(p) for p in speech.head.parameters()} & {id(p) for p in text.parameters()}
    own = sum(
        p.numel() for s in model.streams.values() for part in (s.embedding, s.head) for p in part.parameters()
    )
    assert sum(p.numel() for p in model.parameters()) == own + sum(p.numel() for p in model.core.parameters())
    names = {name.partition(".")[0] for name in model.state_dict()}
    assert names == {"core", "parts"}
    assert (speech.core.config.mem_len, text.core.config.mem_len) == (6, 9)


def test_the_core_learns_from_both_streams_and_the_rest_from_its_own() -> None:
    model = joint_model()
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name, stream in model.streams.items():
        model.zero_grad(set_to_none=True)
        inputs, targets, reset = audio_frames(stream, 2, 5)
        stream.loss(inputs, targets, stream.initial_state(2), reset)[0].backward()
        gradients[name] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    core = {name for name, _ in model.named_parameters() if name.startswith("core.")}
    for name, got in gradients.items():
        assert core <= set(got) and all(got[n].abs().sum() > 0 for n in core)
        others = {n for n in got if n not in core}
        assert others and all(n.startswith(f"parts.{name}.") for n in others)


@pytest.mark.parametrize("name", ["speech", "text"])
@pytest.mark.parametrize("of", ["itself", "a copy"])
def test_a_stream_alone_is_a_model_of_one_stream(name: str, of: str) -> None:
    """The same weights in a model that knows of no other stream give the same nats, to the bit."""
    joint = joint_model() if of == "itself" else copy.deepcopy(joint_model())
    stream = joint.streams[name]
    config = stream.core.config
    alone = SequenceModel(
        stream.spec,
        embedding=copy.deepcopy(stream.embedding),
        core=config.build(),
        head=stream.head,
    ).eval()
    alone.core.load_state_dict(joint.core.state_dict())
    assert alone.streams == {SINGLE: alone}
    inputs, targets, reset = audio_frames(stream, 2, 23, begins=[(1, 11)])
    lengths = [config.segment_len] * (23 // config.segment_len) + [23 % config.segment_len]
    expected, state = run_nll(alone, inputs, targets, lengths, reset)
    got, joint_state = run_nll(stream, inputs, targets, lengths, reset)
    assert torch.equal(got, expected)
    assert all(map(torch.equal, state.memory.hidden, joint_state.memory.hidden))


def test_a_copy_is_independent_and_whole() -> None:
    model = joint_model()
    twin: JointModel = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    for name, stream in twin.streams.items():
        assert all(not p.any() for p in stream.parameters())
        assert all(p.any() for p in model.streams[name].parameters())


def test_modes_reach_every_view() -> None:
    model = joint_model(dropout=0.5)
    model.train()
    assert all(s.training and s.core.training and s.core.dropout.training for s in model.streams.values())
    model.eval()
    assert not any(s.training or s.core.training or s.core.dropout.training for s in model.streams.values())
