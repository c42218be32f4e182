"""Several processes that train together (`torchrun`): what they tell each other, and who has which lanes.

Every rank draws the same batches of all lanes and keeps its own rows, so the batches of a training do not
depend on how many ranks share them. Alone, all of this is nothing. How they share a model: `distributed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn

from txl_audio.runtime import rank, world_size
from txl_audio.tokens import ConfigError, TxlError

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long ranks wait for one another; the first one scores the validation split while they do.

One whose process has ended is missed at once on CPUs: its connections close.
"""


class LostProcessError(TxlError):
    """Another process of this training has ended, or cannot be reached."""


@contextmanager
def together() -> Iterator[None]:
    """For what every rank has to do: LostProcessError where one of them no longer does.

    Also a decorator: `@together()`.
    """
    try:
        yield
    except RuntimeError as error:
        broken = isinstance(error, distributed.DistError) or "gloo" in str(error)
        if world_size() == 1 or not broken:
            raise
        why = str(error).partition(". ")[0]
        raise LostProcessError(
            f"process {rank()} of {world_size()} has lost another one ({why}); see what that one said, "
            "then start all again with --resume"
        ) from error


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Joins the processes that `torchrun` started, and leaves them at the end.

    A GPU becomes the current one: what is said to `cuda` without a number, by NCCL and by random
    states too, is said to it.
    """
    gpu = device if device.type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if world_size() == 1:
        yield
        return
    distributed.init_process_group("gloo" if gpu is None else "nccl", timeout=PATIENCE, device_id=gpu)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def own_lanes(lanes: int, *, setting: str) -> slice:
    """Which of all lanes are this rank's. Raises ConfigError where they cannot be dealt out evenly."""
    if lanes % world_size():
        raise ConfigError(
            f"{setting} is {lanes}, which {world_size()} processes cannot share evenly; "
            f"choose a multiple of {world_size()}"
        )
    each = lanes // world_size()
    return slice(rank() * each, (rank() + 1) * each)


@together()
def gathered(own: Tensor) -> Tensor:
    """Rows of all ranks, in their order, on every rank: [n, ...] -> [ranks n, ...]."""
    if world_size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def summed(*values: float, device: torch.device) -> list[float]:
    """Sums over all ranks."""
    return _reduced(values, device, distributed.ReduceOp.SUM)


def highest(value: float, *, device: torch.device) -> float:
    """The highest of all ranks: what they have to agree on."""
    return _reduced((value,), device, distributed.ReduceOp.MAX)[0]


@together()
def _reduced(
    values: tuple[float, ...], device: torch.device, operation: distributed.ReduceOp.RedOpType
) -> list[float]:
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor, operation)
    return tensor.tolist()


def draws(device: torch.device) -> dict[str, Tensor]:
    """Random states of all ranks, [ranks, n]: `draws` of the CPU and, in use, `draws.cuda` of the GPU.

    For `continue_draws`. Every rank has to ask.
    """
    own = {"draws": torch.get_rng_state()}
    if device.type == "cuda":
        own["draws.cuda"] = torch.cuda.get_rng_state(device)
    return {name: gathered(state[None].to(device)) for name, state in own.items()}


def continue_draws(saved: Mapping[str, Tensor], *, seed: int) -> None:
    """Gives every rank but the first, which has all of `runtime.rng_state`, its own state back.

    A rank that was not there is seeded from `seed`: it would else drop the same units as the first.
    """
    own = rank()
    if own >= len(saved["draws"]):
        torch.manual_seed(seed + own)
    elif own > 0:
        # Copies: PyTorch crashes on a state that does not begin its storage.
        torch.set_rng_state(saved["draws"][own].cpu().clone())
        if "draws.cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["draws.cuda"][own].cpu().clone())


@together()
def share_weights(model: nn.Module) -> None:
    """Gives every rank the weights of the first."""
    if world_size() > 1:
        for tensor in model.state_dict().values():
            distributed.broadcast(tensor, src=0)


@together()
def shared(value: T) -> T:
    """What the first rank has."""
    if world_size() == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


@together()
def collected(value: T) -> list[T]:
    """What all ranks have, in their order."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    distributed.all_gather_object(values, value)
    return values


@together()
def wait() -> None:
    """Goes on when all ranks are here."""
    if world_size() > 1:
        distributed.barrier()
