"""Frames of symbols to the core's input vectors.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width, W history symbols.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from txl_audio.config import Config
from txl_audio.model.adaptive import AdaptiveEmbeddingConfig
from txl_audio.model.contracts import Embedding, SideStage, Waveform
from txl_audio.tokens import ConfigError, TokenSpec


class NgramConfig(Config):
    """What NgramEmbedding has: the lengths of n-grams, rows of the table of each, width of a row."""

    lengths: tuple[int, ...] = (2, 3, 4)
    rows: int = Field(default=8191, ge=1)
    width: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _check(self) -> NgramConfig:
        if not self.lengths or not all(2 <= n <= 7 for n in self.lengths):
            raise ValueError(f"lengths are {list(self.lengths)}, expected some of 2 to 7")
        return self


class NgramEmbedding(nn.Module):
    """A learned vector for the last n symbols, for several n: [..., W] symbols -> [..., D].

    n-grams are numbered exactly and hashed to `rows` by the remainder, so different ones may share a row
    (hash n-gram embeddings of Pagnoni et al. 2024, arXiv 2412.09871, section 3.2.1).
    """

    def __init__(self, config: NgramConfig, spec: TokenSpec, *, d_model: int) -> None:
        super().__init__()
        # The start symbol, id V, stands for what was before a document. Powers of V + 1 fit 63 bits.
        self.config, self.base = config, spec.vocab_size + 1
        if self.base ** max(config.lengths) >= 2**63:
            raise ConfigError(
                f"embedding.ngrams of {max(config.lengths)} of {spec.vocab_size} symbols are too many to "
                "number; use shorter ones"
            )
        rows = len(config.lengths) * config.rows
        self.table = nn.Parameter(torch.empty(rows, config.width).normal_(std=0.02))
        self.projection = nn.Linear(config.width, d_model, bias=False)
        nn.init.normal_(self.projection.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for index, n in enumerate(self.config.lengths):
            number = torch.zeros_like(symbols[..., 0])
            for symbol in symbols[..., symbols.size(-1) - n :].unbind(-1):
                number = number * self.base + symbol
            rows.append(number % self.config.rows + index * self.config.rows)
        return self.projection(F.embedding(torch.stack(rows, dim=-1), self.table).sum(-2))


class SymbolEmbeddingConfig(Config):
    """A learned vector per symbol, summed over a frame. `d_embed` narrower than the model is projected."""

    kind: Literal["symbols"] = "symbols"
    d_embed: int | None = Field(default=None, ge=1)
    ngrams: NgramConfig | None = None

    def build(self, spec: TokenSpec, d_model: int, waveform: Waveform | None = None) -> SymbolEmbedding:
        if self.ngrams is not None and spec.symbols_per_frame != 1:
            raise ConfigError(
                f"embedding.ngrams are of frames of 1 symbol, got {spec.symbols_per_frame}; leave them out"
            )
        ngrams = None if self.ngrams is None else NgramEmbedding(self.ngrams, spec, d_model=d_model)
        return SymbolEmbedding(spec, d_model=d_model, d_embed=self.d_embed or d_model, ngrams=ngrams)


class SymbolEmbedding(Embedding):
    """Embeddings times sqrt(D), as in the paper. One table per place in the frame.

    Streams that score their first symbol have one row more, the start symbol. What `ngrams` give is added.
    """

    def __init__(
        self, spec: TokenSpec, *, d_model: int, d_embed: int, ngrams: NgramEmbedding | None = None
    ) -> None:
        super().__init__()
        self.places, self.scale, self.ngrams = spec.symbols_per_frame, d_model**0.5, ngrams
        self.history = max([self.places, *(ngrams.config.lengths if ngrams is not None else ())])
        self.rows = spec.vocab_size + int(spec.scores_first)
        self.weight = nn.Parameter(torch.empty(spec.symbols_per_frame * self.rows, d_embed).normal_(std=0.02))
        self.projection = nn.Linear(d_embed, d_model, bias=False) if d_embed != d_model else None
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=0.01)

    def forward(self, history: Tensor, side: Tensor | None = None) -> Tensor:
        table = torch.arange(self.places, device=history.device) * self.rows
        x = F.embedding(history[..., self.history - self.places :] + table, self.weight).sum(-2)
        if self.projection is not None:
            x = self.projection(x)
        if self.ngrams is not None:
            x = x + self.ngrams(history)
        return x * self.scale


class SampleEmbeddingConfig(Config):
    """For waveforms: the newest samples as real numbers through a small network."""

    kind: Literal["samples"]
    history_samples: int = Field(default=32, ge=1)
    width: int = Field(default=512, ge=1)

    def build(self, spec: TokenSpec, d_model: int, waveform: Waveform | None = None) -> SampleEmbedding:
        if waveform is None:
            raise ConfigError(f"embedding samples needs a waveform codec, got {spec.name} ({spec.modality})")
        return SampleEmbedding(self, d_model=d_model, waveform=waveform)


class SampleEmbedding(Embedding):
    """Linear-GELU-Linear over what is known of the newest `history_samples` samples."""

    inner = ("net",)

    def __init__(self, config: SampleEmbeddingConfig, *, d_model: int, waveform: Waveform) -> None:
        super().__init__()
        self.history = config.history_samples
        self.features = sample_features(self.history, waveform)
        self.net = nn.Sequential(
            nn.Linear(self.features.width, config.width), nn.GELU(), nn.Linear(config.width, d_model)
        )

    def forward(self, history: Tensor, side: Tensor | None = None) -> Tensor:
        return self.net(self.features(history, side).inputs)


class View(NamedTuple):
    """The past of a sample as a network reads it, and the units to predict it in.

    inputs [..., I]; basis [..., J]: numbers whose weighted sum is a prediction; center, unit [..., 1]: a
    prediction of x means the amplitude center + x unit.
    """

    inputs: Tensor
    basis: Tensor
    center: Tensor | float
    unit: Tensor


class SampleFeatures(nn.Module):
    """The last W samples as a network likes them, and their level.

    Per sample: the companded value and the amplitude divided by the level; whether the sample exists
    (documents have a beginning, which is not silence). Per window: log level. Predictions are in units of the
    window's own level, so that quiet and loud speech are the same problem.
    """

    def __init__(self, samples: int, levels: Tensor) -> None:
        super().__init__()
        self.samples, self.width, self.taps = samples, 3 * samples + 1, samples
        ramp = torch.linspace(-1, 1, levels.numel())
        # The start symbol (id V) is no sample: every feature 0, and counted as missing.
        rows = torch.stack([ramp, levels.float(), torch.zeros_like(ramp)], dim=-1)
        table = torch.cat([rows, torch.tensor([[0.0, 0.0, 1.0]])])
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def forward(self, history: Tensor, side: Tensor | None) -> View:
        """history [..., W] symbols."""
        companded, amplitude, missing = F.embedding(history, self.table).unbind(-1)
        level = amplitude.square().mean(-1, keepdim=True).add(1e-7).sqrt()
        normal = amplitude / level
        features = torch.cat([companded, normal, missing, level.log() * 0.3 + 1.0], dim=-1)
        return View(features, normal, 0.0, level)


class StageFeatures(nn.Module):
    """The last W samples, companded, and what the codec's stage gives; predictions are in its units."""

    def __init__(self, samples: int, levels: Tensor, stage: SideStage) -> None:
        super().__init__()
        self.samples, self.width = samples, samples + stage.width - 2
        self.taps = self.width
        table = torch.cat([torch.linspace(-1, 1, levels.numel()), torch.zeros(1)])
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def forward(self, history: Tensor, side: Tensor | None) -> View:
        """history [..., W] symbols; side [..., S]."""
        assert side is not None
        inputs = torch.cat([self.table[history], side[..., 2:]], dim=-1)
        return View(inputs, inputs, center=side[..., :1], unit=side[..., 1:2])


def sample_features(samples: int, waveform: Waveform) -> SampleFeatures | StageFeatures:
    """What embedding and head see of the last `samples` samples."""
    if waveform.stage is None:
        return SampleFeatures(samples, waveform.levels)
    return StageFeatures(samples, waveform.levels, waveform.stage)


EmbeddingConfig: TypeAlias = Annotated[
    SymbolEmbeddingConfig | AdaptiveEmbeddingConfig | SampleEmbeddingConfig, Field(discriminator="kind")
]
