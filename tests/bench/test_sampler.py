"""The sampling benchmark's bookkeeping: which figures there are, and that they belong together."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import TINY, run
from tests.tiny import text_model, wave_model
from txl_audio import cost
from txl_audio.bench import sampler as bench
from txl_audio.bench.sampler_table import table
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.model.sequence import SequenceModel

BACKENDS = ["torch", "compiled float32", "compiled int8"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TURNS", 2)
    monkeypatch.setattr(bench, "PROMPT_S", 0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves half a second at every look."""
    ticks = count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: 0.5 * next(ticks))


def measure(model: SequenceModel, codec: MuLawCodec | None = None) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    figures = bench.sampler_speed(model, codec=codec, seconds=0.002, tell=said.append)
    assert figures == json.loads(json.dumps(figures))
    return figures, said


def test_figures_of_sound_belong_together() -> None:
    model = wave_model("staged-p4", d_head=4)
    figures, said = measure(model, MuLawCodec(4))
    assert "turn 2 of 2" in said and torch.get_num_threads() == 1
    assert (figures["symbol_rate_hz"], figures["symbols_per_frame"]) == (16_000, 4)
    assert (figures["prompt_symbols"], figures["first_chunk_symbols"]) == (160, 320)
    assert figures["macs_per_symbol"] == cost.macs_per_symbol(model)
    assert list(figures["backends"]) == BACKENDS
    reference = figures["backends"]["torch"]
    for row in figures["backends"].values():
        assert (row["mem_len"], row["lanes"]) == (6, 1)
        assert row["ratio"] == row["frames_per_s"] / reference["frames_per_s"]
        assert row["flops"] == 2 * figures["macs_per_symbol"] * row["symbols_per_s"]
        assert row["flops_share"] == row["flops"] / figures["matmul_flops"]
        assert row["bytes_per_s"] == row["bytes_per_frame"] * row["frames_per_s"]
        assert row["read_share"] == row["bytes_per_s"] / row["read_bytes_per_s"]
        assert row["first_chunk_s"] > 0
    assert reference["decode_state_bytes"] == cost.decode_state_bytes(model)
    # 2 layers, keys and values of 7 frames of 2 heads of 4: 2 bytes less each.
    whole, half = (figures["backends"][name]["decode_state_bytes"] for name in BACKENDS[1:])
    assert whole - half == 2 * 2 * 7 * 8 * 2
    settings = {
        "mem_len": [(m, 1) for m in (3, 6, 12, 24)],
        "lanes": [(6, n) for n in (1, 2, 4, 8, 16)],
    }
    for key, expected in settings.items():
        rows = figures[key]
        found = [(row["mem_len"], row["lanes"], row["backend"]) for row in rows]
        assert found == [(*setting, name) for setting in expected for name in BACKENDS]
        for row in rows:
            assert row["symbols_per_s"] == row["lanes"] * 4 * row["frames_per_s"]
            assert row["us_per_symbol"] == 1e6 / row["symbols_per_s"]
            each = row["symbols_per_s"] / row["lanes"]
            assert row["real_time_factor"] == pytest.approx(1 / (each / figures["symbol_rate_hz"]))
    held, decoder = figures["held"], figures["decoder_real_time_factor"]
    assert held == {
        "sampled": bench._held(figures["lanes"], 0.0),
        "decoded": bench._held(figures["lanes"], decoder),
    }
    assert decoder > 0
    assert figures["run"]["backend"] in BACKENDS and len(figures["run"]["us_per_symbol"]) == 3
    text = table(figures).splitlines()
    assert len({len(line) for line in text[:4]}) == 1  # columns line up
    assert max(map(len, text[:4])) <= 120
    (head,) = (line for line in text if line.startswith("streams that one thread holds"))
    assert head.split()[-2:] == ["sampled", "decoded"]


def test_text_has_no_real_time_and_what_is_unsupported_is_named() -> None:
    figures, _ = measure(text_model())  # heads of 5
    assert figures["symbol_rate_hz"] is None
    assert (figures["prompt_symbols"], figures["first_chunk_symbols"]) == (128, 1)
    assert figures["backends"]["compiled int8"] == {"unsupported": "int8 weights need an even d_head, got 5"}
    rows = [*figures["mem_len"], *figures["lanes"]]
    assert {row["backend"] for row in rows} == {"torch", "compiled float32"}
    assert {row["real_time_factor"] for row in rows} == {None}
    assert figures["held"] == {"sampled": None, "decoded": None}
    assert "unsupported: int8 weights need an even d_head" in table(figures)


def test_a_model_without_memory_is_measured_without_lengths() -> None:
    figures, _ = measure(text_model(mem_len=0, window="segment"))
    assert figures["mem_len"] == [] and len(figures["lanes"]) == 10
    assert "memory" not in table(figures)


def test_bytes_that_a_step_reads() -> None:
    # tests/tiny.py with heads of 4: 2 layers, D 12, d_ff 16, 7 keys of 2 heads; 11 symbols.
    ring = 2 * 2 * 7 * 8
    weights = 2 * (12 * 3 * 8 + 8 * 12 + 2 * 12 * 16) + 12 * 11
    positions = 2 * 7 * 8
    model = text_model(d_head=4)
    macs = cost.macs_per_symbol(model)
    assert macs == ring + weights + positions
    for name, (weight_bytes, ring_bytes) in zip(BACKENDS, [(4, 4), (4, 4), (1, 2)], strict=True):
        traffic = bench._traffic(bench._sampler(model, name), macs, bench.BACKENDS[name][1])
        assert traffic == (weights + positions) * weight_bytes + ring * ring_bytes


@pytest.mark.parametrize("window", ["segment", "same_length", "sliding"])
def test_a_full_memory_is_seen_whole(window: str) -> None:
    """A step then depends on what lies in the farthest slot that its window ever reaches."""
    model = text_model(window=window)
    phase = 1
    changed = []
    for value in (0.0, 1.0):
        sampler = bench._full(bench._sampler(model, "torch"))
        sampler.next_frames(phase)
        core = sampler.state.core
        reach = {"segment": 6 + phase, "same_length": 5, "sliding": 6}[window]
        assert core.segment_phase == (core.time - 6) % 4 == phase
        core.values[:, :, :, (core.time - reach) % core.capacity] = value
        changed.append(model.step_(torch.tensor([[3]]), sampler.state))
    assert not torch.equal(*changed)


def test_best_of_turns() -> None:
    values = {"a": iter([2.0, 3.0]), "b": iter([5.0, 4.0])}
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return next(values[name])

    best = bench._best({"a": lambda: measure("a"), "b": lambda: measure("b")})
    assert (best, order) == ({"a": 3.0, "b": 5.0}, ["a", "b", "a", "b"])


def test_streams_that_are_held() -> None:
    """Whole passes only, and the number of lanes with which most streams fit."""
    factors = {1: 0.3, 2: 0.45, 4: 1.1}
    rows: list[dict[str, Any]] = [
        {"backend": "a", "lanes": n, "real_time_factor": factor} for n, factor in factors.items()
    ]
    rows.append({"backend": "b", "lanes": 1, "real_time_factor": 1.5})
    assert bench._held(rows, 0.0) == {"a": {"streams": 4, "lanes": 2}, "b": {"streams": 0, "lanes": 1}}
    assert bench._held(rows, 0.03)["a"] == {"streams": 3, "lanes": 1}


@pytest.mark.usefixtures("clock")
def test_rates_by_a_clock() -> None:
    model = wave_model()
    # Three calls, each before a look at which two seconds have not passed yet.
    assert bench._frames_per_s(bench._sampler(model, "torch"), 2.0)() == 3 / 2
    assert bench._frames_per_s(bench._sampler(model, "compiled float32"), 2.0)() == 3 * 64 / 2
    assert bench._read_rate(1000, 2.0) == 3 * 1000 / 2
    # 20 ms of sound at a time.
    assert bench._decoded_s(MuLawCodec(4), 2.0)() == 3 * 0.02 / 2
    # A call takes from one look to the next, and every round has two of them.
    along = bench._along(bench._sampler(model, "compiled float32"), 3.0)
    assert along == {"symbols": 3 * 256, "us_per_symbol": [0.5e6 / 256] * 3}


def test_the_command(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    result = run("bench", "sampler", config, "model.core.mem_len=8", "--seconds", 0.1, "--json")
    assert [row["mem_len"] for row in result.json["mem_len"]][::3] == [4, 8, 16, 32]
    assert "turn 2 of 2" in result.err
    missing = run("bench", "sampler", tmp_path / "nothing.yaml")
    assert missing.code == 2 and "nothing.yaml" in missing.error
