"""The training benchmark's bookkeeping, with a tiny model and a clock of its own."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from tests.tiny import text_model
from txl_audio.bench import peers
from txl_audio.bench import train as bench
from txl_audio.model.attention import Backend
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import TxlError


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()

    def model(attention: Backend) -> SequenceModel:
        return text_model(window="segment", attention=attention)

    monkeypatch.setattr(bench, "plain_text_model", model)
    monkeypatch.setattr(bench.shape, "SEGMENT_LEN", 4)
    monkeypatch.setattr(bench.shape, "LANES", 2)
    monkeypatch.setattr(bench.runtime, "matmul_flops", lambda *_: 1e6)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: 0.5 * next(ticks))


@pytest.mark.usefixtures("tiny")
def test_every_setting_is_measured_and_held_against_the_reference() -> None:
    said: list[str] = []
    figures = bench.train_throughput(seconds=1, device="cpu", tell=said.append)
    assert figures["device"] == "cpu" and len(said) == 3
    assert {"reference float32", "shifted bfloat16", "shift_free bfloat16"} <= figures["settings"].keys()
    for values in figures["settings"].values():
        # The clock moves half a second at every look: three steps of 8 tokens in two seconds.
        assert values["tokens_per_s"] == 3 * 8 / 2
        assert values["ratio"] == 1.0
        assert values["share_of_matmul_rate"] == pytest.approx(12 * figures["flops_per_token"] / 1e6)
    text = bench.table(figures).splitlines()
    assert len(text) == 1 + len(figures["settings"])
    assert len({len(line) for line in text}) == 1  # columns line up


class Neighbour:
    """A system of which one precision runs, at a third of the speed of ours."""

    closed = 0

    def __init__(self, system: str, precision: str, *, device: str, folder: Path) -> None:
        if precision == "bfloat16":
            raise TxlError("no bfloat16 here")

    def rate(self, seconds: float) -> float:
        return 4.0 if seconds else 0.0

    def close(self) -> None:
        Neighbour.closed += 1


@pytest.mark.usefixtures("tiny")
def test_other_systems_take_their_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench.peers, "Peer", Neighbour)
    figures = bench.train_throughput(seconds=1, device="cpu", tell=lambda line: None, beside=tmp_path)
    systems = len(bench.peers.SYSTEMS)
    assert Neighbour.closed == systems and len(figures["others"]) == systems
    assert figures["fastest_other"] in {f"{name} float32" for name in bench.peers.SYSTEMS}
    assert figures["against_others"] == {"of_medians": 3.0, "median_of_turns": 3.0}
    text = bench.table(figures)
    assert "Hugging Face bfloat16 cannot run: no bfloat16 here" in text and "3.00 times as fast" in text


def test_a_system_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(TxlError, match="bench_train.sh puts it there"):
        peers.Peer(peers.HUGGING_FACE, "float32", device="cpu", folder=tmp_path)
    # The process ends for the same reason that any import does.
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    with pytest.raises(TxlError, match="has no attribute 'TransfoXLConfig'"):
        peers.Peer(peers.HUGGING_FACE, "float32", device="cpu", folder=tmp_path)


def test_a_system_trains_when_it_is_its_turn(tmp_path: Path) -> None:
    """With a library of the same names, which its process finds in the folder."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(LIBRARY)
    peer = peers.Peer(peers.HUGGING_FACE, "float32", device="cpu", folder=tmp_path)
    assert peer.rate(0.0) > 0
    peer.close()


LIBRARY = """
from types import SimpleNamespace
from torch import nn

TransfoXLConfig = dict

class TransfoXLLMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config["vocab_size"], 4)

    def forward(self, tokens, mems, labels, return_dict):
        return SimpleNamespace(losses=self.table(tokens).square().mean(-1), mems=[tokens])
"""


def test_the_shape_is_the_one_that_is_documented() -> None:
    model = bench.plain_text_model("auto")
    c = model.core.config
    assert (c.n_layer, c.d_model, c.n_head, c.d_head, c.d_ff) == (6, 256, 4, 64, 1024)
    assert (c.segment_len, c.mem_len, model.spec.vocab_size, bench.shape.LANES) == (256, 256, 256, 8)
