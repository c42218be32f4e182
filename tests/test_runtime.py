"""Device names, precision, random state and the measured matrix-product rate."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from txl_audio import runtime
from txl_audio.tokens import CheckpointError, ConfigError


def draws() -> tuple[object, ...]:
    """One draw from each generator, the normal ones twice: they keep a second value back."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.randint(1 << 30),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_cpu_is_cpu() -> None:
    assert runtime.device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cpu:0", "auto:1", "cuda:", "cuda:-1", "cuda:x"])
def test_unknown_device_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device .* is not known; expected auto, cpu, cuda or cuda:N"):
        runtime.device(name)


def test_auto_without_cuda_is_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="use device auto or cpu"):
        runtime.device("cuda")


def test_cuda_follows_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runtime.device("auto") == runtime.device("cuda") == torch.device("cuda", 1)
    assert runtime.device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="cuda:2 was asked for, but there are 2 GPUs"):
        runtime.device("cuda:2")


def test_autocast_sets_the_precision_of_products() -> None:
    cpu = torch.device("cpu")
    a = torch.ones(2, 2)
    with runtime.autocast(cpu, "bfloat16"):
        assert (a @ a).dtype == torch.bfloat16
        with runtime.autocast(cpu, "float32"):
            assert (a @ a).dtype == torch.float32
    with pytest.raises(ConfigError, match="expected float32 or bfloat16"):
        runtime.autocast(cpu, "float16")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("bfloat16", "expected"), [(2.0, "bfloat16"), (1.0, "float32"), (0.1, "float32")])
def test_auto_precision_is_what_a_cpu_is_faster_with(
    bfloat16: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
        assert device.type == "cpu" and seconds <= 0.1
        return {torch.bfloat16: bfloat16, torch.float32: 1.0}[dtype]

    monkeypatch.setattr(runtime, "matmul_flops", rate)
    assert runtime.choose_precision("auto", torch.device("cpu")) == expected
    assert runtime.choose_precision("bfloat16", torch.device("cpu")) == "bfloat16"
    assert runtime.choose_precision("float32", torch.device("cpu")) == "float32"


def test_auto_precision_asks_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, has = torch.device("cuda", 0), True
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: has)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    assert runtime.choose_precision("auto", gpu) == "bfloat16"
    has = False
    assert runtime.choose_precision("auto", gpu) == "float32"
    with pytest.raises(
        ConfigError, match="bfloat16 was asked for, but Old GPU has none; use precision float32"
    ):
        runtime.choose_precision("bfloat16", gpu)


def test_seed_repeats_every_generator() -> None:
    runtime.seed_everything(7)
    first = draws()
    runtime.seed_everything(7)
    assert draws() == first
    runtime.seed_everything(8)
    assert draws() != first


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ConfigError, match="expected 0 to 4294967295"):
        runtime.seed_everything(seed)


def test_rng_state_survives_json_and_safetensors(tmp_path: Path) -> None:
    runtime.seed_everything(3)
    draws()  # leaves a second Gaussian waiting in Python's and in NumPy's generator
    state = runtime.rng_state()
    expected = [draws() for _ in range(3)]

    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in state.items() if key not in tensors}
    safetensors.torch.save_file(tensors, tmp_path / "rng.safetensors")
    text = json.dumps(values)

    runtime.seed_everything(99)
    runtime.set_rng_state({**json.loads(text), **safetensors.torch.load_file(tmp_path / "rng.safetensors")})
    assert [draws() for _ in range(3)] == expected


def test_reading_the_rng_state_draws_nothing() -> None:
    runtime.seed_everything(3)
    expected = draws()
    runtime.seed_everything(3)
    runtime.rng_state()
    assert draws() == expected


def test_building_without_initialisation_draws_nothing() -> None:
    state = torch.get_rng_state()
    with runtime.no_initialisation():
        layer = torch.nn.Linear(3, 2)
        torch.nn.init.normal_(layer.weight, std=0.02)
        torch.nn.Embedding(4, 2).weight.data.uniform_()
        torch.nn.init.zeros_(layer.bias)
    assert torch.equal(torch.get_rng_state(), state)
    assert not layer.bias.any()


def test_bad_rng_state_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="lacks \\['numpy', 'torch'\\]"):
        runtime.set_rng_state({"python": []})
    with pytest.raises(CheckpointError, match="damaged"):
        runtime.set_rng_state({**runtime.rng_state(), "numpy": ["MT19937", [1, 2], 0, 0, 0.0]})


def test_rank_and_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (runtime.rank(), runtime.world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (runtime.rank(), runtime.world_size()) == (3, 4)


def test_matmul_rate_is_plausible() -> None:
    rate = runtime.matmul_flops(torch.device("cpu"), torch.float32, seconds=0.05)
    assert 1e8 < rate < 1e15  # any computer of this century


def test_an_interrupt_waits_for_what_compiles() -> None:
    done: list[str] = []

    def compile_something() -> None:
        with runtime.interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("compiled")

    # Test processes side by side ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_something()
        assert done == ["compiled"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
