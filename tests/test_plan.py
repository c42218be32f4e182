"""What is planned is counted, and what is counted is what a real step does."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.e2e.harness import TEXT, TINY
from tests.e2e.harness import run as txl_audio
from tests.tiny import TEXT as TEXT_SPEC
from tests.tiny import codes_model, core_config, text_model, wave_model
from txl_audio import cost, plan, plan_counts, recipe
from txl_audio.bench.attention import peak_bytes
from txl_audio.bench.train import training_step
from txl_audio.config import load
from txl_audio.model.adaptive import AdaptiveEmbeddingConfig, AdaptiveHeadConfig
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.plan_counts import count_step
from txl_audio.tokens import ConfigError
from txl_audio.train_config import TrainConfig

SCALE = sorted((Path(__file__).parents[1] / "configs" / "scale").glob("*.yaml"))
CPU = torch.device("cpu")


def sized(model: SequenceModel) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("attention", ["reference", "shifted", "shift_free"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_counted_arithmetic_is_that_of_pytorchs_counter(attention: Any, precision: Any) -> None:
    """`shift_free` has arithmetic of its own, which is more."""
    model, lanes = text_model(attention=attention), 3
    counted = count_step(model, TrainConfig(), lanes=lanes, precision=precision)
    expected = cost.training_flops_per_symbol(text_model(), lanes=lanes, segment_len=4) * counted.symbols
    assert counted.symbols == lanes * 4 and counted.parameters == sized(text_model())
    if attention in ("reference", "shifted"):
        assert counted.flops == pytest.approx(expected)
    elif attention == "shift_free":
        assert counted.flops > expected


def test_batches_of_a_step_add_up() -> None:
    one, three = (
        count_step(text_model(), TrainConfig(accumulate=n), lanes=2, precision="float32") for n in (1, 3)
    )
    assert (three.flops, three.symbols) == (3 * one.flops, 3 * one.symbols)
    tensors = len(list(text_model().parameters()))
    # Weights, gradients and the two averages of AdamW, and how many steps each tensor has taken.
    assert three.fixed_bytes == one.fixed_bytes == sized(text_model()) * 4 * 4 + 4 * tensors


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [text_model, wave_model, codes_model])
def test_held_bytes_are_those_that_a_real_step_holds(make: Any, precision: Any) -> None:
    """Within a tenth: kernels have scratch of their own, and the counter sees tensors."""
    sizes = {"d_model": 64, "n_head": 2, "d_head": 32, "d_ff": 256, "mem_len": 64, "segment_len": 64}
    config = TrainConfig(lanes=4)
    step = training_step(make(**sizes).train(), config, lanes=4, segment_len=64, precision=precision)
    step()
    step()
    beside = peak_bytes(step, CPU)
    counts = count_step(make(**sizes), config, lanes=4, precision=precision)
    kept = counts.fixed_bytes - 4 * counts.parameters  # gradients are made in the step
    memory = make(**sizes).initial_state(4).memory
    before = kept + sum(hidden.nbytes for hidden in memory.hidden)
    assert counts.held_bytes == pytest.approx(before + beside, rel=0.1)


def test_the_floor_is_the_longer_of_arithmetic_and_bytes() -> None:
    counts = count_step(text_model(), TrainConfig(), lanes=2, precision="float32")
    assert counts.floor_s(1e9, 1e30) == pytest.approx(counts.flops / 1e9)
    assert counts.floor_s(1e30, 1e9) == pytest.approx(counts.moved_bytes / 1e9)
    assert counts.floor_s(1e9, 1e9) > max(counts.flops, counts.moved_bytes) / 1e9


def test_bytes_are_those_that_operations_read_and_write() -> None:
    ledger = plan_counts._Ledger()
    with FakeTensorMode(), ledger:
        x, row = torch.ones(8, 4), torch.ones(4)
        before = sum(size * n for (_, size), n in ledger.work.items())
        held = ledger.held
        assert before == held == (32 + 4) * 4
        y = x + row.expand(8, 4)  # x, four numbers of the row, y
        assert y.device.type == "cpu" and y.view(32)[:3].numel() == 3  # no work
    assert sum(size * n for (_, size), n in ledger.work.items()) - before == (32 + 4 + 32) * 4
    assert ledger.held == held + 32 * 4
    del y
    assert ledger.held == held


def test_models_that_cannot_be_counted() -> None:
    words, core = replace(TEXT_SPEC, vocab_size=20), core_config()
    embedding = AdaptiveEmbeddingConfig(kind="adaptive", cutoffs=(5, 12)).build(words, core.d_model)
    head = AdaptiveHeadConfig(kind="adaptive").build(words, core.d_model, embedding)
    model = SequenceModel(words, embedding=embedding, core=core.build(), head=head)
    with pytest.raises(ConfigError, match="depends on its data"):
        count_step(model, TrainConfig(), lanes=1, precision="float32")


def planned(**given: Any) -> dict[str, Any]:
    options = {"device": "h100", "gpus": 1, "hours": None} | given
    return plan.plan(wave_model(), TrainConfig(lanes=4, steps=10), **options)


def test_time_memory_and_money_follow_the_formulas() -> None:
    f = planned(gpus=2, hours=10.0, utilisation=0.25, price=2.0)
    symbols = 10 * 3600 * 16_000
    assert f["lanes_per_gpu"] == 2 and f["symbols_per_step"] == 4 * 4 * 4
    assert f["steps"] == ceil(symbols / f["symbols_per_step"])
    exchange = 2 * (1 / 2) * 4 * f["parameters"] / 450e9
    assert f["step_s"] == pytest.approx(f["floor_s"] / 0.25 + exchange)
    assert f["days"] == pytest.approx(f["steps"] * f["step_s"] / 86400)
    assert f["money"] == pytest.approx(2.0 * 2 * f["days"] * 24) and f["gpu_hours"] == f["money"] / 2
    assert f["held_bytes"] > f["fixed_bytes"] > 4 * 4 * f["parameters"]
    assert planned(price=None)["money"] is None and planned()["steps"] == 10


def test_what_this_machine_does_is_measured() -> None:
    f = planned(device="here", seconds=0.05)
    assert f["utilisation_is_measured"] and f["exchange_s"] == 0
    assert f["step_s"] == pytest.approx(f["floor_s"] / f["utilisation"])
    assert "(measured)" in plan.table(f)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "abacus"}, "expected here or a100"),
        ({"gpus": 5}, "set train.lanes higher"),
        ({"device": "here", "gpus": 2}, "it has one device"),
    ],
)
def test_plans_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**given)


def test_hours_are_of_sound() -> None:
    with pytest.raises(ConfigError, match="this stream is text"):
        plan.plan(text_model(), TrainConfig(), device="h100", hours=1.0)
    with pytest.raises(ConfigError, match="set train.steps"):
        plan.plan(text_model(), TrainConfig(), device="h100")
    for text in ("8x256", "0x256@50", "eight"):
        with pytest.raises(ConfigError, match="such as 8x256@50"):
            plan.code_spec(text)


@pytest.mark.parametrize("path", SCALE, ids=lambda path: path.stem)
def test_configs_for_scale_have_the_size_of_their_name(path: Path) -> None:
    config = load(recipe.RunConfig, path)
    assert config.name == path.stem
    spec = plan.code_spec("8x256@50") if "codes" in path.stem else None
    with torch.device("meta"):
        core = config.model.core.build()
    inside = sum(p.numel() for p in core.parameters())
    model = recipe.describe(path, codes=spec).streams[SINGLE]
    whole = {"100m": 100e6, "1b": 1e9}[path.stem.rpartition("_")[2]]
    assert 0.9 * whole < sized(model) < 1.1 * whole and inside < sized(model)
    # Once through 60,000 hours.
    frames = config.train.lanes * config.model.core.segment_len * (config.train.steps or 0)
    assert frames / model.spec.frame_rate_hz == pytest.approx(60_000 * 3600, rel=1e-3)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ("plan", tmp_path / "tiny.yaml", "--hours", "1", "--gpus", "2", "--price", "3")
    done = txl_audio(*words, "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures["gpus"] == 2 and figures["money"] > 0
    said = txl_audio(*words).out
    assert "1 h of sound" in said and "assumed" in said and "fits" in said
    (tmp_path / "codes.yaml").write_text(TEXT.replace("softmax", "depth"))
    codes = txl_audio("plan", tmp_path / "codes.yaml", "--codes", "8x256@50", "--hours", "1", "--json")
    assert codes.code == 0 and json.loads(codes.out)["symbols_per_step"] == 16 * 4 * 8
    assert "are not prepared" in txl_audio("plan", tmp_path / "codes.yaml").err
