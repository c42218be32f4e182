"""Layers: of the core, attention over memory and segment, then a feed-forward network; of heads, residual.

Shapes: B lanes, T frames, D model width, H heads, d head width, M memory frames, C ring slots.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from txl_audio.config import Config
from txl_audio.model.attention import Backend, attend
from txl_audio.model.positions import Terms


class BlockConfig(Config):
    """A layer. Defaults are the paper's; `norm` stands after what a layer adds, or before."""

    d_model: int = Field(ge=2, multiple_of=2)
    n_head: int = Field(ge=1)
    d_head: int = Field(ge=1)
    d_ff: int = Field(ge=1)
    norm: Literal["post", "pre"] = "post"
    activation: Literal["relu", "gelu"] = "relu"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention: Backend = "auto"


class Block(nn.Module):
    """Attention and feed-forward layer with residuals, normalised after (the paper) or before.

    checkpointed: whether backward computes again what is inside instead of keeping it (Chen et al. 2016).
    """

    checkpointed = False

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c, width = config, config.n_head * config.d_head
        self.n_head, self.pre, self.p = c.n_head, c.norm == "pre", c.attention_dropout
        self.backend: Backend = c.attention
        self.qkv = nn.Linear(c.d_model, 3 * width, bias=False)
        self.out = nn.Linear(width, c.d_model, bias=False)
        self.attention_norm = nn.LayerNorm(c.d_model)
        self.expand = nn.Linear(c.d_model, c.d_ff)
        self.activation = nn.ReLU() if c.activation == "relu" else nn.GELU()
        self.contract = nn.Linear(c.d_ff, c.d_model)
        self.feed_forward_norm = nn.LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        self.apply(initialise)

    def forward(
        self, x: Tensor, past: Tensor | tuple[Tensor, Tensor] | None, terms: Terms | None, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] after a memory of layer inputs [B, M, D], or of their keys and values [H, B, M, d].

        seen [B, T, M + T] as in `attend`. Returns the layer's output [B, T, D] and all keys and values
        [H, B, M + T, d].
        """
        if self.checkpointed and torch.is_grad_enabled():
            return cast(Any, checkpoint(self._forward, x, past, terms, seen, use_reentrant=False))
        return self._forward(x, past, terms, seen)

    def _forward(
        self, x: Tensor, past: Tensor | tuple[Tensor, Tensor] | None, terms: Terms | None, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inner = self.attention_norm(x) if self.pre else x
        q, k, v = self._heads(self.qkv(inner), parts=3)
        if past is not None:
            keys, values = self.keys_values(past) if isinstance(past, Tensor) else past
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        dropout = self.p if self.training else 0.0
        mixed = attend(q, k, v, terms, seen, dropout=dropout, backend=self.backend)
        return self._finish(x, rearrange(mixed, "h b t d -> b t (h d)")), k, v

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Layer inputs [B, M, D] -> their keys and values [H, B, M, d]."""
        inner = self.attention_norm(memory) if self.pre else memory
        width = self.qkv.weight.size(0) // 3
        k, v = self._heads(F.linear(inner, self.qkv.weight[width:]), parts=2)
        return k, v

    def step_(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        slot: Tensor,
        terms: Terms | None,
        behind: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """x [B, 1, D] against a ring [B, H, C, d], into which it is written at `slot` [] int64."""
        inner = self.attention_norm(x) if self.pre else x
        q, k, v = (part.transpose(0, 1) for part in self._heads(self.qkv(inner), parts=3))
        keys.index_copy_(2, slot, k)
        values.index_copy_(2, slot, v)
        content = q if terms is None else q + terms.u[:, None]
        score = torch.matmul(content, keys.mT)
        if terms is not None:
            position = q if terms.v is None else q + terms.v[:, None]
            by_distance = torch.matmul(position, terms.r.mT)
            if terms.b is not None:
                by_distance = by_distance + terms.b[:, None]
            score = score + by_distance[..., behind]
        score = score.float() / q.size(-1) ** 0.5
        weight = score.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1).to(values.dtype)
        return self._finish(x, rearrange(torch.matmul(weight, values), "b h t d -> b t (h d)"))

    def _heads(self, projected: Tensor, *, parts: int) -> tuple[Tensor, ...]:
        return tuple(rearrange(projected, "b t (p h d) -> p h b t d", p=parts, h=self.n_head).unbind(0))

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.dropout(self.out(mixed))
        if not self.pre:
            x = self.attention_norm(x)
        inner = self.feed_forward_norm(x) if self.pre else x
        x = x + self.dropout(self.contract(self.dropout(self.activation(self.expand(inner)))))
        return x if self.pre else self.feed_forward_norm(x)


class ResidualBlock(nn.Module):
    """x + W2 GELU(W1 LayerNorm(x)), W2 starting at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


def initialise(module: nn.Module) -> None:
    """The authors' initialisation: N(0, .02), biases 0, LayerNorm weight N(1, .02)."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)
        nn.init.zeros_(module.bias)
