"""The peers of the speech model: causal, streaming, isolated, and scored to the last sample.

Wrong peers would make the comparison with them worthless, so they are held to what the model is held to.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import speech_like
from txl_audio.codecs.mulaw import MuLawCodec, mulaw_encode
from txl_audio.data.shard_writer import ShardWriter
from txl_audio.data.shards import Shards
from txl_audio.tokens import IGNORE, ConfigError

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "baselines"))

import floor
import peer as contract
import train
from sashimi import S4D

SPEC = MuLawCodec().spec

TINY: dict[str, dict[str, Any]] = {
    "lstm": {"width": 8, "d_embed": 4},
    "wavenet": {"stacks": 2, "layers": 3, "channels": 6, "skip": 5},
    "samplernn": {"frame": 4, "width": 8, "d_embed": 3},
    "sashimi": {"d_model": 4, "layers": 1},
    "megabyte": {
        "patch": 4,
        "context": 16,
        "width": 8,
        "local_width": 4,
        "layers": (1, 1),
        "heads": (2, 2),
    },
    "x-transformers": {"width": 64, "layers": 2, "heads": 2, "memory": 64},
}
STATEFUL = [name for name in train.PEERS if name != "megabyte"]  # that one has no memory


def tiny(name: str) -> contract.Peer:
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    model = train.PEERS[name](**TINY[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at zero would hide faults
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def small(model: contract.Peer, monkeypatch: pytest.MonkeyPatch) -> contract.Peer:
    """Lanes and segments for documents of a few hundred samples."""
    monkeypatch.setattr(type(model), "lanes", 2)
    monkeypatch.setattr(type(model), "segment_samples", 32)
    return model


def logits(model: contract.Peer, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs, model.initial_state(len(inputs)))[0]


@pytest.mark.parametrize("name", train.PEERS)
@pytest.mark.parametrize("at", [0, 15, 16, 31, 32, 63])
def test_an_input_changes_nothing_before_it(name: str, at: int) -> None:
    model, inputs = tiny(name), torch.randint(256, (1, 64))
    changed = inputs.clone()
    changed[0, at] = (changed[0, at] + 100) % 256
    moved = (logits(model, changed) != logits(model, inputs)).any(dim=-1)[0]
    assert not moved[:at].any()
    assert moved[at]


@pytest.mark.parametrize("name", STATEFUL)
def test_segments_with_the_state_between_them_equal_one_pass(name: str) -> None:
    model, inputs = tiny(name), torch.randint(256, (2, 64))
    state, parts = model.initial_state(2), []
    with torch.no_grad():
        for part in inputs.split(16, dim=1):
            out, state = model(part, state)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, inputs), rtol=1e-4, atol=2e-5)


def test_megabyte_sees_its_context_across_segments() -> None:
    model, inputs = tiny("megabyte"), torch.randint(256, (1, 64))
    with torch.no_grad():
        _, state = model(inputs[:, :32], model.initial_state(1))
        out, _ = model(inputs[:, 32:], state)
        # The context is the last 16 inputs and what is left of the patch before them; older ones are gone.
        for at, seen in ((31, True), (13, True), (12, False)):
            changed = inputs.clone()
            changed[0, at] = (changed[0, at] + 100) % 256
            _, other = model(changed[:, :32], model.initial_state(1))
            assert bool((model(changed[:, 32:], other)[0] != out).any()) is seen


@pytest.mark.parametrize("name", train.PEERS)
def test_a_lane_begins_anew_and_alone(name: str) -> None:
    model, inputs = tiny(name), torch.randint(256, (2, 64))
    with torch.no_grad():
        _, state = model(inputs[:, :32], model.initial_state(2))
        kept, _ = model(inputs[:, 32:], state)
        begun = contract.reset(state, model.initial_state(2), torch.tensor([True, False]))
        out, _ = model(inputs[:, 32:], begun)
    torch.testing.assert_close(out[1], kept[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:1], logits(model, inputs[:1, 32:]), rtol=1e-4, atol=1e-5)


def test_s4d_is_its_recurrence() -> None:
    layer, x = S4D(3, modes=4), torch.randn(2, 96, 3)
    state = torch.randn(2, 3, 4, dtype=torch.complex64)
    with torch.no_grad():
        y, after = layer(x, state)
        pole = torch.complex(-layer.log_decay.exp(), layer.frequency)
        step = layer.log_step.exp()[:, None] * pole
        c = torch.view_as_complex(layer.c) * torch.expm1(step) / pole
        expected = []
        for t in range(x.size(1)):
            state = step.exp() * state + x[:, t, :, None]
            expected.append(2 * (c * state).sum(-1).real + layer.d * x[:, t])
    torch.testing.assert_close(y, torch.stack(expected, dim=1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-4)


def documents(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(256, size=n).astype(np.uint8) for n in lengths]


# A11 and A12: padding is no code, and a document begins from an explicit start.
def test_segments_hold_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lines = small(tiny("lstm"), monkeypatch), documents(100, 1, 64, 7)
    found: list[list[int]] = []
    open_lanes: dict[int, list[int]] = {}
    for inputs, targets, begins in train.segments(lines, SPEC, model, seed=None):
        for lane in range(2):
            scored = targets[lane] != IGNORE
            if begins[lane]:
                open_lanes[lane] = []
                found.append(open_lanes[lane])
            if scored.any():
                line = [contract.START, *open_lanes[lane], *targets[lane][scored].tolist()]
                before = len(open_lanes[lane])
                assert inputs[lane][scored].tolist() == line[before:-1]
                open_lanes[lane] += targets[lane][scored].tolist()
    assert sorted(found) == sorted(line.tolist() for line in lines)


@pytest.mark.parametrize("name", ["lstm", "samplernn", "wavenet"])
def test_scores_are_of_whole_documents_from_a_cold_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lines = small(tiny(name), monkeypatch), documents(100, 30, 64)
    bits, count = train.evaluate(model, lines, SPEC, "float32")
    total = 0.0
    for line in lines:
        padded = np.pad(line.astype(np.int64), (1, -len(line) % 4), constant_values=contract.START)
        out = logits(model, torch.from_numpy(padded)[None, : -(-len(line) // 4) * 4])[0, : len(line)]
        chosen = out.log_softmax(dim=-1).gather(1, torch.from_numpy(line.astype(np.int64))[:, None])
        total -= chosen.sum().item()
    assert count == 194
    assert bits == pytest.approx(total / count / math.log(2), rel=1e-5)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "data", spec=SPEC, preparation={}) as writer:
        for index in range(4):
            codes = mulaw_encode(speech_like(0.1, index))
            split = "val" if index == 0 else "train"
            writer.append(codes, id=str(index), split=split, source=f"{index}.wav", sha256="0" * 64)
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["lstm", "megabyte"])
def test_training_writes_what_the_report_reads(name: str, shards: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        peer = train.PEERS[name]
        patch.setitem(train.PEERS, name, lambda: peer(**TINY[name]))
        patch.setattr(peer, "segment_samples", 64)
        words = [name, "--data", str(shards), "--out", str(tmp_path / "out"), "--steps", "12", "--lr", "0.5"]
        assert train.main([*words, "--precision", "float32"]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert result["name"] == name and result["steps"] == 12 and result["count"] == 1600
    assert result["samples"] > 0 and result["samples_per_s"] == result["samples"] / result["seconds"]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["whole_split"] for record in records] == [False] * train.VALIDATIONS + [True]
    assert [record["step"] for record in records] == [2, 4, 6, 7, 9, 11, 12]
    assert records[-1]["bits_per_sample"] == result["bits_per_sample"] < records[0]["bits_per_sample"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[baselines\]'"):
        train.PEERS["x-transformers"]()


def test_the_floor_is_a_causal_distribution(shards: Path) -> None:
    codes = Shards.open(shards).symbols(Shards.open(shards).documents[0]).reshape(-1)[:400].astype(np.int64)
    codec = MuLawCodec()
    levels = codec.levels.double().numpy()
    edges = np.concatenate([[-np.inf], codec.edges.numpy(), [np.inf]])
    centres = levels[np.concatenate([[128], codes[:-1]])]
    nats = floor.mixture_nats(codes, levels, edges, centres)
    for at in (0, 1, 250, 399):  # probabilities of all codes there sum to 1, and what came before stays
        total = 0.0
        for code in range(256):
            other = codes.copy()
            other[at] = code
            changed = floor.mixture_nats(other[: at + 1], levels, edges, centres[: at + 1])
            np.testing.assert_array_equal(changed[:at], nats[:at])
            total += math.exp(-changed[at])
        assert total == pytest.approx(1.0, abs=1e-9)


def test_the_floor_scores_a_split(shards: Path, tmp_path: Path) -> None:
    assert floor.main(["--data", str(shards), "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["count"] == 1600
    assert result["bits_per_sample"] < 7.0  # 1,600 samples from a cold start, of which half are noise
