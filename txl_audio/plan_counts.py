"""What one training step computes, moves and holds: counted, on tensors that have sizes and no contents.

The step is the real one (the model's own modules and attention path, clipping, optimiser), run under
PyTorch's FakeTensorMode, where nothing is computed or allocated; so a model of a billion parameters is
counted in seconds on any machine. See docs/scaling.md.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from txl_audio import runtime
from txl_audio.model import shifted
from txl_audio.model.contracts import SideStage
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.tokens import ConfigError
from txl_audio.train_config import TrainConfig

CPU = torch.device("cpu")
# Of a product the operand whose last dimension is summed over.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
# What only makes a tensor, or another look at one.
_FREE = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
)


@dataclass(frozen=True)
class StepCounts:
    """One training step of one process.

    Attributes:
        parameters: of the model.
        symbols: that are targets.
        flops: in matrix products; what the gradient computes again is counted again.
        moved_bytes: read and written by all operations, one by one: nothing fused, nothing cached.
        work: (flops, bytes) of an operation and how many there are like it.
        fixed_bytes: weights, gradients, what the optimiser keeps, the average of the weights if there is one.
        held_bytes: the most that is held at once, `fixed_bytes` and the memory of the lanes included.
    """

    parameters: int
    symbols: int
    flops: int
    moved_bytes: int
    work: dict[tuple[int, int], int]
    fixed_bytes: int
    held_bytes: int

    def floor_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Seconds that the step cannot be faster than on a machine of these rates, operation by operation.

        An operation takes the longer of its arithmetic and its bytes (Williams et al. 2009, Roofline).
        """
        return sum(n * max(f / flops_per_s, b / bytes_per_s) for (f, b), n in self.work.items())


def count_step(
    model: SequenceModel,
    config: TrainConfig,
    *,
    lanes: int,
    precision: runtime.Precision,
    device: Literal["cpu", "cuda"] = "cpu",
) -> StepCounts:
    """Counts one optimiser step of `lanes` lanes with a full memory. The model loses its weights.

    device: how much of attention is done at a time, which matters for memory.
    Raises ConfigError for a model whose work depends on the data (adaptive softmax).
    """
    segment_len = config.of_stream(SINGLE, model.core.config).segment_len
    assert segment_len is not None
    ledger = _Ledger()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _parts_as_on(device):
            model.to_empty(device="cpu").train()
            if model.stage is not None:
                model.stage = _Silent(model.stage)
            for layer in model.core.layers:
                layer.checkpointed = config.activation_checkpointing
            optimiser, state = config.build(model, precision), model.initial_state(lanes)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimiser.step()  # in which it makes its state
            optimiser.zero_grad()
            ledger.know(tree_leaves([list(model.parameters()), list(model.buffers()), vars(state.memory)]))
            averaged = [torch.empty_like(parameter) for parameter in model.parameters() if config.ema]
            ledger.know([*optimiser.state_tensors().values(), *averaged])
            symbols = torch.zeros(lanes, segment_len, model.spec.symbols_per_frame, dtype=torch.int64)

            with ledger:
                for _ in range(config.accumulate):
                    with runtime.autocast(CPU, precision):
                        loss, count, state = model.loss(symbols, symbols, state)
                    loss.backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= count
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                optimiser.step()
            weights = sum(map(_size, model.parameters()))
            kept = sum(map(_size, (*optimiser.state_tensors().values(), *averaged)))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"the work of this model depends on its data ({error}), as that of an adaptive softmax does, so "
            "it cannot be counted; use head softmax"
        ) from error
    return StepCounts(
        parameters=sum(p.numel() for p in model.parameters()),
        symbols=symbols.numel() * config.accumulate,
        flops=sum(flops * n for (flops, _), n in ledger.work.items()),
        moved_bytes=sum(size * n for (_, size), n in ledger.work.items()),
        work=dict(ledger.work),
        fixed_bytes=2 * weights + kept,
        held_bytes=ledger.peak,
    )


@contextmanager
def _parts_as_on(device: str) -> Iterator[None]:
    """Attention in parts as large as on `device`, though the tensors say cpu."""
    sizes = shifted.WHOLE, shifted.PART
    before = [size["cpu"] for size in sizes]
    for size in sizes:
        size["cpu"] = size[device]
    try:
        yield
    finally:
        for size, value in zip(sizes, before, strict=True):
            size["cpu"] = value


class _Ledger(TorchDispatchMode):
    """Writes down every operation inside it: its arithmetic, its bytes, and what is held after it."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[tuple[int, int]] = Counter()
        self.held = self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def know(self, values: list[Any]) -> None:
        """Counts the memory behind the tensors among `values` for as long as it is there."""
        for value in values:
            if isinstance(value, Tensor) and (storage := value.untyped_storage()) not in self._known:
                self._known[storage] = True
                self.held += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.held)

    def _freed(self, size: int) -> None:
        self.held -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = tree_leaves(out)
        self.know(made)
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in _FREE:
            touched = [t for t in (*tree_leaves((args, kwargs)), *made) if isinstance(t, Tensor)]
            self.work[_flops(name, args, out), sum(map(_size, touched))] += 1
        return out


class _Silent:
    """A codec's stage that says nothing: what it computes is no tensor operation."""

    def __init__(self, stage: SideStage) -> None:
        self.width, self.hash, self.deviations = stage.width, stage.hash, stage.deviations

    def initial_state(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, 1)

    def run(self, inputs: Tensor, targets: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(*targets.shape, self.width), state

    def observe(self, symbols: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(symbols), self.width), state


def _size(tensor: Tensor) -> int:
    """Bytes that reading it takes; what is repeated by a stride of 0 is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(name: str, args: Any, out: Any) -> int:
    """Of a product, 2 for every multiply-add; 0 for everything else."""
    if name in _PRODUCTS:
        return 2 * out.numel() * args[_PRODUCTS[name]].size(-1)
    if name.startswith("_scaled_dot_product"):
        backward = "backward" in name  # where the first argument is the gradient, and scores are made again
        q, k, v = args[1:4] if backward else args[:3]
        pairs = q.numel() // q.size(-1) * k.size(-2)
        return 2 * pairs * (3 * q.size(-1) + 2 * v.size(-1) if backward else q.size(-1) + v.size(-1))
    return 0
