"""From the core's output to the K symbols of the next frame, in nats.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width, W history symbols.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from txl_audio.config import Config
from txl_audio.model.embeddings import Embedding, SampleFeatures, SymbolEmbedding
from txl_audio.tokens import IGNORE, ConfigError, TokenSpec


class Head(nn.Module):
    """The contract of every head. `history` is how many symbols before a frame it looks at."""

    history: int = 0

    def nll(self, hidden: Tensor, history: Tensor, targets: Tensor) -> Tensor:
        """Nats of every symbol, float32 [B, T, K], 0 where a target is IGNORE.

        hidden [B, T, D]; history [B, T, W] symbols before each frame; targets [B, T, K].
        """
        raise NotImplementedError

    def log_probs(self, hidden: Tensor, window: Tensor, place: int) -> Tensor:
        """Log-probabilities of the symbol at `place` of the frame, float32 [B, V].

        hidden [B, D]; window [B, W]: the W symbols before it, those of its own frame included.
        """
        raise NotImplementedError


class SoftmaxHeadConfig(Config):
    """Full softmax for one symbol per frame; `tied` shares the embedding's weights (the paper)."""

    kind: Literal["softmax"] = "softmax"
    tied: bool = True

    def build(
        self, spec: TokenSpec, d_model: int, embedding: Embedding, levels: Tensor | None, edges: Tensor | None
    ) -> SoftmaxHead:
        return SoftmaxHead(spec, d_model=d_model, embedding=embedding, tied=self.tied)


class SoftmaxHead(Head):
    """Logits = (hidden projection) weight^T + bias. Where the embedding is narrower than the core,
    the head has a projection of its own, as in the authors' code."""

    def __init__(self, spec: TokenSpec, *, d_model: int, embedding: Embedding, tied: bool) -> None:
        super().__init__()
        if spec.symbols_per_frame != 1:
            raise ConfigError(
                f"head softmax predicts 1 symbol per frame, got {spec.symbols_per_frame}; use head frame"
            )
        d_embed = embedding.weight.size(1) if isinstance(embedding, SymbolEmbedding) else d_model
        if tied and not isinstance(embedding, SymbolEmbedding):
            raise ConfigError("head softmax with tied=true needs embedding symbols; set head.tied=false")
        self.vocab_size = spec.vocab_size
        # The embedding owns a tied weight; it may have one row more, the start symbol.
        self._tied = [embedding] if tied else []
        self.weight = None if tied else nn.Parameter(torch.empty(spec.vocab_size, d_embed).normal_(std=0.02))
        self.projection = nn.Linear(d_model, d_embed, bias=False) if d_embed != d_model else None
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=0.01)
        self.bias = nn.Parameter(torch.zeros(spec.vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32."""
        if self.projection is not None:
            hidden = self.projection(hidden)
        weight = self._tied[0].weight[: self.vocab_size] if self.weight is None else self.weight
        return F.linear(hidden, weight).float() + self.bias

    def nll(self, hidden: Tensor, history: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(hidden)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return nats.view_as(targets)

    def log_probs(self, hidden: Tensor, window: Tensor, place: int) -> Tensor:
        return self.logits(hidden).log_softmax(-1)


class FrameHeadConfig(Config):
    """A small autoregressive network that walks the samples of a frame.

    output: `logistic` (mixture of `mixtures` logistics over amplitude, integrated over the bins of
    the codec) or `softmax` over the V codes.
    """

    kind: Literal["frame"]
    history_samples: int = Field(default=32, ge=1)
    width: int = Field(default=192, ge=1)
    blocks: int = Field(default=2, ge=0)
    output: Literal["logistic", "softmax"] = "logistic"
    mixtures: int = Field(default=6, ge=1)

    def build(
        self, spec: TokenSpec, d_model: int, embedding: Embedding, levels: Tensor | None, edges: Tensor | None
    ) -> FrameHead:
        if levels is None or edges is None:
            raise ConfigError(f"head frame needs a waveform codec, got {spec.name} ({spec.modality})")
        return FrameHead(self, spec, d_model=d_model, levels=levels, edges=edges)


class FrameHead(Head):
    """Residual network over the last W samples, across frame boundaries, conditioned by the core.

    The core's output enters once per place in the frame. The logistic output predicts in units of
    the window's own level: mean = level (linear prediction from the window + offset), scale = level
    exp(.), so that quiet and loud speech are the same problem.
    """

    def __init__(
        self, config: FrameHeadConfig, spec: TokenSpec, *, d_model: int, levels: Tensor, edges: Tensor
    ) -> None:
        super().__init__()
        self.history, self.places, self.mixtures = (
            config.history_samples,
            spec.symbols_per_frame,
            config.mixtures,
        )
        self.features = SampleFeatures(self.history, levels)
        self.read = nn.Linear(self.features.width, config.width)
        self.condition = nn.Linear(d_model, self.places * config.width, bias=False)
        self.blocks = nn.ModuleList(ResidualBlock(config.width) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.logistic = config.output == "logistic"
        self.output = nn.Linear(config.width, 3 * config.mixtures if self.logistic else spec.vocab_size)
        if self.logistic:
            self.predict = nn.Linear(d_model, self.places * self.history, bias=False)
            with torch.no_grad():
                # Components start at different scales around the prediction from the window.
                self.output.weight.mul_(0.1)
                self.output.bias.zero_()
                self.output.bias[2 * self.mixtures :] = torch.linspace(-3.0, 0.0, self.mixtures)
                self.predict.weight.zero_()
            self.shared = nn.Parameter(torch.zeros(self.history))
            nn.init.constant_(self.shared[-1:], 1.0)
        # Bin c lies between edges c and c + 1. The outermost bins are open: their far edges are where
        # every logistic is saturated, but finite, because infinity has no gradient.
        self.register_buffer("edges", F.pad(F.pad(edges.float(), (1, 0), value=-1e4), (0, 1), value=1e4), persistent=False)
        self.edges: Tensor

    def parameters_of(self, hidden: Tensor, windows: Tensor, place: slice) -> tuple[Tensor, ...]:
        """Output of the network for some places of a frame.

        hidden [..., D]; windows [..., P, W] -> logits [..., P, V] in a tuple of one, or mixture
        log-weights, means and scales, each [..., P, mixtures], float32.
        """
        features, normal, level = self.features(windows)
        places = range(self.places)[place]
        width = self.read.out_features
        rows = slice(places[0] * width, (places[-1] + 1) * width)
        condition = F.linear(hidden, self.condition.weight[rows]).unflatten(-1, (len(places), width))
        z = F.gelu(self.read(features) + condition)
        for block in self.blocks:
            z = block(z)
        out = self.output(self.norm(z)).float()
        if not self.logistic:
            return (out,)
        rows = slice(places[0] * self.history, (places[-1] + 1) * self.history)
        taps = F.linear(hidden, self.predict.weight[rows]).unflatten(-1, (len(places), self.history)).float()
        prediction = ((taps + self.shared) * normal).sum(-1, keepdim=True)
        weight, offset, log_scale = out.chunk(3, dim=-1)
        mean = level * (prediction + offset)
        scale = level * log_scale.clamp(-9, 2).exp()
        return weight.log_softmax(-1), mean, scale

    def nll(self, hidden: Tensor, history: Tensor, targets: Tensor) -> Tensor:
        known = targets.clamp(min=0)
        # Place p of a frame sees the history and the p samples before it in its own frame.
        line = torch.cat([history[..., -self.history :], known[..., :-1]], dim=-1)
        windows = line.unfold(-1, self.history, 1)
        parameters = self.parameters_of(hidden, windows, slice(None))
        if not self.logistic:
            logits = parameters[0].flatten(0, -2)
            nats = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
            return nats.view_as(targets)
        nats = -mixture_log_mass(*parameters, self.edges[known, None], self.edges[known + 1, None])
        return nats.masked_fill(targets == IGNORE, 0.0)

    def log_probs(self, hidden: Tensor, window: Tensor, place: int) -> Tensor:
        parameters = self.parameters_of(hidden, window[:, None], slice(place, place + 1))
        if not self.logistic:
            return parameters[0][:, 0].log_softmax(-1)
        log_weight, mean, scale = (p[:, 0, None] for p in parameters)
        return mixture_log_mass(log_weight, mean, scale, self.edges[:-1, None], self.edges[1:, None])


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


def mixture_log_mass(log_weight: Tensor, mean: Tensor, scale: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """log of the mass of a mixture of logistics between two edges, summed over the last dimension.

    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - e^(a-b)) is exact in the tails too, where
    the plain difference cancels to zero.
    """
    a, b = (lower - mean) / scale, (upper - mean) / scale
    log_mass = F.logsigmoid(b) + F.logsigmoid(-a) + torch.log(-torch.expm1((lower - upper) / scale))
    return torch.logsumexp(log_weight + log_mass, dim=-1)


HeadConfig: TypeAlias = Annotated[SoftmaxHeadConfig | FrameHeadConfig, Field(discriminator="kind")]
