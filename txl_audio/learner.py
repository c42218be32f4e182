"""What learns in a training: the model, the average of its weights, the optimiser; by all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from txl_audio import distributed, parallel, runtime
from txl_audio.checkpoint import load_weights
from txl_audio.model.sequence import JointModel, SequenceModel
from txl_audio.train_config import TrainConfig


class Learner:
    """Model, average and optimiser as the config has them: whole on every rank, or in shards.

    Attributes:
        losses: the forward of training; see `distributed.Losses`.
    """

    def __init__(
        self, model: SequenceModel | JointModel, config: TrainConfig, precision: runtime.Precision
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.sharded = config.fsdp and runtime.world_size() > 1
        self.average = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema)) if config.ema else None
        )
        for core in (stream.core for stream in model.streams.values()):
            for layer in core.layers:
                layer.checkpointed = config.activation_checkpointing
            if config.compile:
                for part in core.layers if self.sharded else [core]:
                    part.compile()
        if self.sharded:
            self._outline = distributed.outline(model)
            averages = [] if self.average is None else [self.average.module]
            self.losses = distributed.sharded(model, averages, self.device)
        else:
            self.losses = distributed.replicated(model)
        self.optimiser = config.build(model, precision)  # of shards, where there are some

    @property
    def best_model(self) -> SequenceModel | JointModel:
        """The weights to use: averaged ones where averaging is on.

        Of shards a whole copy, on the first rank; every rank has to ask.
        """
        best = cast(SequenceModel, self.average.module) if self.average is not None else self.model
        return distributed.filled(self._outline, best) if self.sharded else best

    def gradient_norm(self, count: int, clip: float) -> Tensor:
        """Divides the summed gradients by `count`, once: symbols weigh the same however they were batched.

        Returns their norm, which is clipped then.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= max(1, count)
        return distributed.whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))

    def step(self) -> None:
        """Changes the weights by the gradients, which are used up."""
        self.optimiser.step()
        self.optimiser.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def is_finite(self) -> bool:
        """Whether all weights are; every rank has to ask."""
        own = all(bool(distributed.local(p).isfinite().all()) for p in self.model.parameters())
        return not parallel.highest(not own, device=self.device)

    def tensors(self) -> dict[str, Tensor]:
        """All that was learned, by name; of shards this rank's."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        return tensors | {f"optimiser.{n}": v for n, v in self.optimiser.state_tensors().items()}

    def place(self) -> distributed.Place | None:
        """Where to read saved tensors to: what belongs to a shard, as shards. None where there are none."""
        if not self.sharded:
            return None
        tensors = self.tensors()

        def place(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
            part, _, key = name.partition(".")
            like = self.optimiser.parameter_of(key) if part == "optimiser" else tensors.get(name)
            if like is None or like.shape != size:
                return torch.empty(size, dtype=dtype)
            return torch.empty_like(like, dtype=dtype)

        return place

    def load(self, saved: Mapping[str, Tensor], *, origin: str) -> None:
        """Continues where `tensors` was taken. Raises CheckpointError where they do not fit."""
        load_weights(self.model, under("model.", saved), origin=origin)
        if self.average is not None:
            self.average.load_state_dict(under("average.", saved))
        self.optimiser.load_state_tensors(under("optimiser.", saved))


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with `prefix`, which is taken off."""
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
