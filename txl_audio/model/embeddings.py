"""Frames of symbols to the core's input vectors.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width, W history symbols.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from txl_audio.config import Config
from txl_audio.model.adaptive import AdaptiveEmbeddingConfig
from txl_audio.model.contracts import Embedding
from txl_audio.tokens import ConfigError, TokenSpec


class SymbolEmbeddingConfig(Config):
    """A learned vector per symbol, summed over a frame. `d_embed` narrower than the model is projected."""

    kind: Literal["symbols"] = "symbols"
    d_embed: int | None = Field(default=None, ge=1)

    def build(self, spec: TokenSpec, d_model: int, levels: Tensor | None) -> SymbolEmbedding:
        return SymbolEmbedding(spec, d_model=d_model, d_embed=self.d_embed or d_model)


class SymbolEmbedding(Embedding):
    """Embeddings times sqrt(D), as in the paper. One table per place in the frame.

    Streams that score their first symbol have one row more, the start symbol.
    """

    def __init__(self, spec: TokenSpec, *, d_model: int, d_embed: int) -> None:
        super().__init__()
        self.history, self.scale = spec.symbols_per_frame, d_model**0.5
        self.rows = spec.vocab_size + int(spec.scores_first)
        self.weight = nn.Parameter(torch.empty(spec.symbols_per_frame * self.rows, d_embed).normal_(std=0.02))
        self.projection = nn.Linear(d_embed, d_model, bias=False) if d_embed != d_model else None
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=0.01)

    def forward(self, history: Tensor) -> Tensor:
        table = torch.arange(self.history, device=history.device) * self.rows
        x = F.embedding(history + table, self.weight).sum(-2)
        if self.projection is not None:
            x = self.projection(x)
        return x * self.scale


class SampleEmbeddingConfig(Config):
    """For waveforms: the newest samples as real numbers through a small network."""

    kind: Literal["samples"]
    history_samples: int = Field(default=32, ge=1)
    width: int = Field(default=512, ge=1)

    def build(self, spec: TokenSpec, d_model: int, levels: Tensor | None) -> SampleEmbedding:
        if levels is None:
            raise ConfigError(f"embedding samples needs a waveform codec, got {spec.name} ({spec.modality})")
        return SampleEmbedding(self, d_model=d_model, levels=levels)


class SampleEmbedding(Embedding):
    """Linear-GELU-Linear over the newest `history_samples` samples; `levels` [V] are their amplitudes."""

    def __init__(self, config: SampleEmbeddingConfig, *, d_model: int, levels: Tensor) -> None:
        super().__init__()
        self.history = config.history_samples
        self.features = SampleFeatures(self.history, levels)
        self.net = nn.Sequential(
            nn.Linear(self.features.width, config.width), nn.GELU(), nn.Linear(config.width, d_model)
        )

    def forward(self, history: Tensor) -> Tensor:
        return self.net(self.features(history)[0])


class SampleFeatures(nn.Module):
    """The last W samples as a network likes them, and their level.

    Per sample: the companded value and the amplitude divided by the level; whether the sample exists
    (documents have a beginning, which is not silence). Per window: log level.
    """

    def __init__(self, samples: int, levels: Tensor) -> None:
        super().__init__()
        self.samples, self.width = samples, 3 * samples + 1
        ramp = torch.linspace(-1, 1, levels.numel())
        # The start symbol (id V) is no sample: every feature 0, and counted as missing.
        rows = torch.stack([ramp, levels.float(), torch.zeros_like(ramp)], dim=-1)
        table = torch.cat([rows, torch.tensor([[0.0, 0.0, 1.0]])])
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """history [..., W] -> features [..., 3W+1], level-normalised amplitudes [..., W], level [..., 1]."""
        companded, amplitude, missing = F.embedding(history, self.table).unbind(-1)
        level = amplitude.square().mean(-1, keepdim=True).add(1e-7).sqrt()
        normal = amplitude / level
        features = torch.cat([companded, normal, missing, level.log() * 0.3 + 1.0], dim=-1)
        return features, normal, level


EmbeddingConfig: TypeAlias = Annotated[
    SymbolEmbeddingConfig | AdaptiveEmbeddingConfig | SampleEmbeddingConfig, Field(discriminator="kind")
]
