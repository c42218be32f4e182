"""The training benchmark's bookkeeping, with a tiny model and a clock of its own."""

from __future__ import annotations

from itertools import count

import pytest

from tests.tiny import text_model
from txl_audio.bench import train as bench
from txl_audio.model.attention import Backend
from txl_audio.model.sequence import SequenceModel


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()

    def model(attention: Backend) -> SequenceModel:
        return text_model(window="segment", attention=attention)

    monkeypatch.setattr(bench, "plain_text_model", model)
    monkeypatch.setattr(bench, "VOCAB_SIZE", 11)
    monkeypatch.setattr(bench, "SEGMENT_LEN", 4)
    monkeypatch.setattr(bench, "LANES", 2)
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


def test_the_shape_is_the_one_that_is_documented() -> None:
    model = bench.plain_text_model("auto")
    c = model.core.config
    assert (c.n_layer, c.d_model, c.n_head, c.d_head, c.d_ff) == (6, 256, 4, 64, 1024)
    assert (c.segment_len, c.mem_len, model.spec.vocab_size, bench.LANES) == (256, 256, 256, 8)
