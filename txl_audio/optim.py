"""Optimisers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from txl_audio.codecs.rvq_model import RvqModel
from txl_audio.config import Config
from txl_audio.distributed import is_sharded, shard_like, whole
from txl_audio.model.contracts import Embedding, Head
from txl_audio.model.transformer import TransformerXL
from txl_audio.runtime import Precision
from txl_audio.tokens import CheckpointError


class OptimConfig(Config):
    """AdamW, or Muon for the matrices of the core; linear warm-up, then a cosine to `final_lr` of the peak.

    optimiser: `muon` orthogonalises the momentum of every matrix inside the core and
    inside embeddings and heads, where they say so, and leaves tables, outputs and vectors to AdamW.
    clip: largest norm of the whole gradient.
    """

    optimiser: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    final_lr: float = Field(default=0.02, ge=0, le=1)
    warmup_steps: int = Field(default=100, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0)

    def build(self, model: nn.Module, precision: Precision = "float32") -> Optimiser:
        """Decays matrices; biases, norms and what positions learn beside matrices stay as they are.

        precision: of Muon's matrix products; weights and what is kept of gradients stay float32.
        """
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        hidden = hidden_matrices(model)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # u, v, r, b and rows of the position schemes are vectors, stacked by layer and head.
            matrix = parameter.dim() >= 2 and not name.rpartition(".")[0].endswith("positions")
            if matrix and id(parameter) in hidden and self.optimiser == "muon":
                matrices.append(parameter)
            else:
                (decayed if matrix else free).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": free, "weight_decay": 0.0},
        ]
        parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
        ]
        if matrices:
            dtype = getattr(torch, precision)
            parts.append(Muon(matrices, lr=self.lr, weight_decay=self.weight_decay, dtype=dtype))
        return Optimiser(parts)

    def rate(self, step: int, progress: float, warmup_progress: float) -> float:
        """Share of the peak learning rate at step `step` (from 0).

        progress: share of the training budget that is used up, 0 to 1; warmup_progress: that share
        when the warm-up ended. Continuous where the two parts meet.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        share = (progress - warmup_progress) / max(1e-9, 1 - warmup_progress)
        share = min(1.0, max(0.0, share))
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return self.final_lr + (1 - self.final_lr) * cosine


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the matrices inside core, embeddings, heads and a codec; see `Embedding.inner`."""
    inside: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, TransformerXL):
            inside.append(module)
        elif isinstance(module, Embedding | Head | RvqModel):
            inside += [module.get_submodule(name) for name in module.inner]
    return {id(p) for module in inside for p in module.parameters() if p.dim() == 2}


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024), of whole or sharded matrices.

    With `dtype` bfloat16 to the bit what `torch.optim.Muon` does with `adjust_lr_fn="match_rms_adamw"`
    (Liu et al. 2025). That one always iterates in bfloat16, which took half of a training step on a CPU
    without instructions for it. Only a whole matrix can be orthogonalised: of shards the momentum is
    gathered, one matrix at a time.
    """

    MOMENTUM = 0.95
    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    ITERATIONS = 5

    def __init__(
        self, matrices: list[nn.Parameter], *, lr: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - self.MOMENTUM)
                update = self.orthogonal(whole(matrix.grad.lerp(momentum, self.MOMENTUM)))
                if is_sharded(matrix):
                    update = shard_like(update, matrix)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * math.sqrt(max(matrix.shape)) * group["lr"])

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """About the nearest matrix with singular values of 1, by Newton-Schulz iteration."""
        tall = matrix.size(0) > matrix.size(1)
        x = (matrix.T if tall else matrix).to(self.dtype)
        x = x / x.norm().clamp(min=1e-7)
        a, b, c = self.COEFFICIENTS
        for _ in range(self.ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x


class Optimiser:
    """Optimisers of disjoint parameters that step together."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._peaks = [group["lr"] for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        # Asked for anew each time: loading a state replaces them.
        return [group for part in self.parts for group in part.param_groups]

    @property
    def lr(self) -> float:
        """The present rate of the first group."""
        return float(self._groups()[0]["lr"])

    def set_rate(self, share: float) -> None:
        """Sets every group to this share of its peak."""
        for group, peak in zip(self._groups(), self._peaks, strict=True):
            group["lr"] = peak * share

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything but rates, by names `part.parameter.entry`."""
        return {
            f"{number}.{index}.{name}": value
            for number, part in enumerate(self.parts)
            for index, entries in part.state_dict()["state"].items()
            for name, value in entries.items()
        }

    def parameter_of(self, key: str) -> nn.Parameter | None:
        """The parameter that an entry of `state_tensors` is of."""
        number, index, _ = key.split(".", 2)
        parts = self.parts[int(number) : int(number) + 1]
        own = [p for part in parts for group in part.param_groups for p in group["params"]]
        return own[int(index)] if int(index) < len(own) else None

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues where `state_tensors` was taken of optimisers built alike."""
        states: list[dict[int, dict[str, Any]]] = [{} for _ in self.parts]
        for key, value in tensors.items():
            number, index, name = key.split(".", 2)
            parameter = self.parameter_of(key)
            if parameter is None or (value.dim() and value.shape != parameter.shape):
                raise CheckpointError(
                    f"the saved optimiser's {name} of parameter {index} has shape "
                    f"{list(value.shape)}, not the parameter's; another version saved it: start anew"
                )
            states[int(number)].setdefault(int(index), {})[name] = value
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})
