"""A model that several processes train: whole on each of them (DDP), or in shards (FSDP2, `train.fsdp`).

Alone, all of this is nothing. Sharded tensors are PyTorch's `DTensor`: they know the whole shape, and every
rank holds some of the rows.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from txl_audio.data.stream import Batch
from txl_audio.model.block import Block
from txl_audio.model.sequence import JointModel, SequenceModel, SequenceState
from txl_audio.parallel import together
from txl_audio.runtime import rank, world_size
from txl_audio.tokens import ConfigError

M = TypeVar("M", bound=nn.Module)

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Gives the tensor that a saved one of this name, shape and type is read into."""


class Losses(nn.Module):
    """`SequenceModel.losses` as the forward of one module, which is what DDP and FSDP2 act on."""

    def __init__(self, model: SequenceModel | JointModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, stream: str, batch: Batch, state: SequenceState, layers: Sequence[int], weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, SequenceState]:
        return self.model.streams[stream].losses(
            batch.inputs,
            batch.targets,
            state,
            batch.reset,
            layers=layers,
            heard=batch.heard,
            weights=weights,
        )


def replicated(model: SequenceModel | JointModel) -> nn.Module:
    """The model's losses, whose gradients backward sums over all ranks (alone: as they are)."""
    losses = Losses(model)
    if world_size() == 1:
        return losses
    several = len(model.streams) > 1  # a step of one stream leaves the others' parameters out
    known = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False, "gradient_as_bucket_view": True}  # buffers are constants
    wrapped = DistributedDataParallel(losses, find_unused_parameters=several, **options)
    wrapped.register_comm_hook(None, _sum_gradients)
    return wrapped


# Without annotations: DDP compares them with types, and here they are strings.
def _sum_gradients(_, bucket):
    """A sum where DDP takes the mean: ranks have different numbers of symbols."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def sharded(
    model: SequenceModel | JointModel, others: Sequence[nn.Module], device: torch.device
) -> nn.Module:
    """The model's losses, with weights and gradients divided among the ranks; so are those of `others`.

    Every block is gathered when it is used; what is outside of blocks, from the first to the last use.
    Raises ConfigError where this PyTorch is too old.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(
            f"train.fsdp needs PyTorch 2.9 or newer, here is {torch.__version__}; upgrade it, or leave "
            "train.fsdp out"
        )
    mesh = init_device_mesh(device.type, (world_size(),))
    losses = Losses(model)
    for root in (losses, *others):
        for module in [m for m in root.modules() if isinstance(m, Block)]:
            fully_shard(module, mesh=mesh)
        fully_shard(root, mesh=mesh)
    for module in losses.modules():
        if isinstance(module, FSDPModule):  # sums, as in `_sum_gradients`
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return losses


@contextmanager
def accumulating(losses: nn.Module, *, last: bool) -> Iterator[None]:
    """For forward and backward of one batch of a step: only those of the last one exchange gradients."""
    with together():
        if isinstance(losses, DistributedDataParallel) and not last:
            with losses.no_sync():
                yield
            return
        if is_sharded(next(losses.parameters())):
            losses.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        yield


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # without importing DTensor, which takes a while


def local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore


def whole(tensor: Tensor) -> Tensor:
    """All rows; every rank has to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have whole, divided as `parameter` is."""
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def outline(model: M) -> M:
    """A copy of a model without its weights, for `filled`. To be made before the model is sharded."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


@together()
def filled(outline: M, model: nn.Module) -> M:
    """The whole model on the first rank; the others get no weights, and have to ask too."""
    out, weights = copy.deepcopy(outline), {}
    for name, value in model.state_dict().items():  # one at a time: a device may not have room for all twice
        value = whole(value)
        if rank() == 0:
            weights[name] = value
    if rank() == 0:
        out.load_state_dict(weights, assign=True)
    return out


# Files of sharded tensors: safetensors of torch.distributed.checkpoint, one a rank.

SHARDS = "shard-*.safetensors"


@together()
def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every rank writes its shards into `folder`, synced. Raises OSError, on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise _cause(error) from error


@together()
def read_shards(folder: Path, place: Place | None) -> dict[str, Tensor]:
    """All tensors of the safetensors files in `folder`, by whatever number of ranks they were written.

    place: where to read each to; None: whole, on the CPU. Raises OSError, on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    saved = cast(Mapping[str, Any], reader.read_metadata().state_dict_metadata)
    place = place or (lambda _, size, dtype: torch.empty(size, dtype=dtype))
    tensors = {name: place(name, about.size, about.properties.dtype) for name, about in saved.items()}
    with warnings.catch_warnings():  # of there being one process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(tensors, storage_reader=reader)
        except CheckpointException as error:
            raise _cause(error) from error
    return tensors


def _cause(error: BaseException) -> OSError:
    """What the first rank that failed said; PyTorch's own has a traceback of each."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    number, (cause, _) = min(failures.items())
    return OSError(f"process {number}: {cause}")
