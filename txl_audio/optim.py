"""Optimiser and learning-rate schedule."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import nn

from txl_audio.config import Config


class OptimConfig(Config):
    """AdamW with linear warm-up and a cosine to `final_lr` of the peak."""

    lr: float = Field(default=1e-3, gt=0)
    final_lr: float = Field(default=0.02, ge=0, le=1)
    warmup_steps: int = Field(default=100, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0)

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Decays matrices; biases, norms and what positions learn beside matrices stay as they are."""
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # u, v, r, b and rows of the position schemes are vectors, stacked by layer and head.
                matrix = parameter.dim() >= 2 and not name.rpartition(".")[0].endswith("positions")
                (decayed if matrix else free).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": free, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)

    def rate(self, step: int, progress: float, warmup_progress: float) -> float:
        """Learning rate of step `step` (from 0).

        progress: share of the training budget that is used up, 0 to 1; warmup_progress: that share
        when the warm-up ended. Continuous where the two parts meet.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        share = (progress - warmup_progress) / max(1e-9, 1 - warmup_progress)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share))))
        return self.lr * (self.final_lr + (1 - self.final_lr) * cosine)
