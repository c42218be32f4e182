"""Processes that train together, as far as one can show it; the rest is in e2e/test_parallel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from txl_audio import parallel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of CUDA and of PyTorch's process group."""
    asked: list[Any] = []

    def join(backend: str, *, device_id: torch.device | None, **_: object) -> None:
        asked.append((backend, device_id))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("current", device)))
    monkeypatch.setattr(parallel.distributed, "init_process_group", join)
    monkeypatch.setattr(parallel.distributed, "destroy_process_group", lambda: asked.append("left"))
    return asked


def test_every_process_has_a_gpu_of_its_own(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with parallel.joined(gpu):
        assert calls == [("current", gpu), ("nccl", gpu)]
    assert calls.pop() == "left"


def test_a_gpu_that_was_chosen_is_the_current_one_alone_too(calls: list[Any]) -> None:
    with parallel.joined(torch.device("cuda", 1)):
        pass
    with parallel.joined(torch.device("cpu")):
        pass
    assert calls == [("current", torch.device("cuda", 1))]


def test_processes_on_cpus(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with parallel.joined(torch.device("cpu")):
        pass
    assert calls == [("gloo", None), "left"]


def test_every_rank_goes_on_with_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    states, expected = [], []
    for seed in (5, 6):
        torch.manual_seed(seed)
        states.append(parallel.draws(torch.device("cpu"))["draws"])
        expected.append(torch.rand(4))
    saved = {"draws": torch.cat(states)}
    assert saved["draws"].shape[0] == 2

    def drawn(rank: int, seed: int = 7) -> torch.Tensor:
        torch.set_rng_state(states[0][0])  # what all ranks have from the first
        monkeypatch.setenv("RANK", str(rank))
        parallel.continue_draws(saved, seed=seed)
        return torch.rand(4)

    assert torch.equal(drawn(0), expected[0]) and torch.equal(drawn(1), expected[1])
    # Ranks that were not there: unlike the first and one another, and the same when asked again.
    new = [drawn(2), drawn(3), drawn(2, seed=8), *expected]
    assert all(not torch.equal(a, b) for i, a in enumerate(new) for b in new[:i] if i != 2)
    assert torch.equal(drawn(2), new[0])
