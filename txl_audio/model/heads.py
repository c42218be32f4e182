"""From the core's output to the K symbols of the next frame, in nats.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width, W history symbols.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from txl_audio.config import Config
from txl_audio.model.adaptive import AdaptiveHeadConfig
from txl_audio.model.block import ResidualBlock
from txl_audio.model.contracts import Context, Embedding, Head, Waveform
from txl_audio.model.depth import DepthHeadConfig
from txl_audio.model.embeddings import SymbolEmbedding, View, sample_features
from txl_audio.tokens import IGNORE, ConfigError, TokenSpec


class SoftmaxHeadConfig(Config):
    """Full softmax for one symbol per frame; `tied` shares the embedding's weights (the paper)."""

    kind: Literal["softmax"] = "softmax"
    tied: bool = True

    def build(
        self, spec: TokenSpec, d_model: int, embedding: Embedding, waveform: Waveform | None = None
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
        self._tied: list[SymbolEmbedding] = (
            [embedding] if isinstance(embedding, SymbolEmbedding) and tied else []
        )
        self.weight = None if tied else nn.Parameter(torch.empty(spec.vocab_size, d_embed).normal_(std=0.02))
        self.projection = nn.Linear(d_model, d_embed, bias=False) if d_embed != d_model else None
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=0.01)
        self.bias = nn.Parameter(torch.zeros(spec.vocab_size))

    @property
    def vectors(self) -> Tensor:
        """Of every symbol, [V, E]."""
        return self._tied[0].weight[: self.vocab_size] if self.weight is None else self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32."""
        if self.projection is not None:
            hidden = self.projection(hidden)
        return F.linear(hidden, self.vectors).float() + self.bias

    def nll(self, hidden: Tensor, context: Context, targets: Tensor) -> Tensor:
        logits = self.logits(hidden)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return nats.view_as(targets)

    def log_probs(self, hidden: Tensor, window: Tensor, place: int, side: Tensor | None = None) -> Tensor:
        return self.logits(hidden).log_softmax(-1)


TAP_GAIN, OFFSET_GAIN = 1 / 16, 1 / 10
"""An optimiser moves every weight by about the learning rate; a prediction sharp to a few hundredths of
the level needs finer steps than that. Measured on speech: without the gains gradient norms are ten times
larger and results vary from seed to seed."""


UNIFORM_SHARE = 1e-7
"""How much of the logistic output is uniform; see `with_floor`."""


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
        self, spec: TokenSpec, d_model: int, embedding: Embedding, waveform: Waveform | None = None
    ) -> FrameHead:
        if waveform is None:
            raise ConfigError(f"head frame needs a waveform codec, got {spec.name} ({spec.modality})")
        return FrameHead(self, spec, d_model=d_model, waveform=waveform)


class FrameHead(Head):
    """Residual network over the last W samples, across frame boundaries, conditioned by the core.

    The core's output enters once per place in the frame. The logistic output predicts in the units of its
    features (`embeddings.View`): mean = center + unit (taps . basis + gates . deviations + offset),
    scale = unit exp(.). The core gives the taps, once per frame; the network gates, offsets and scales.
    Deviations are those of the codec's own predictions, where it has some.
    """

    inner = ("read", "condition", "blocks")

    def __init__(self, config: FrameHeadConfig, spec: TokenSpec, *, d_model: int, waveform: Waveform) -> None:
        super().__init__()
        self.history, self.mixtures = config.history_samples, config.mixtures
        self.symbols, self.stage = spec.vocab_size, waveform.stage
        self.features = sample_features(self.history, waveform)
        self.read = nn.Linear(self.features.width, config.width)
        # One matrix [width, D] for each place, stacked.
        self.condition = nn.Linear(d_model, spec.symbols_per_frame * config.width, bias=False)
        self.blocks = nn.ModuleList(ResidualBlock(config.width) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        if config.output == "softmax":
            self.output, self.predict = nn.Linear(config.width, spec.vocab_size), None
        else:
            gates = 0 if self.stage is None else self.stage.deviations.stop - self.stage.deviations.start
            self.output = nn.Linear(config.width, 3 * config.mixtures + gates)
            # Taps of a linear prediction from the basis: shared ones, plus the core's correction.
            self.predict = nn.Linear(d_model, self.features.taps, bias=False)
            self.shared = nn.Parameter(torch.zeros(self.features.taps))
            with torch.no_grad():
                self.predict.weight.zero_()
                if self.stage is None:
                    self.shared[-1] = 1 / TAP_GAIN  # begins by repeating the newest sample
                self.output.weight.mul_(0.1)
                self.output.bias.zero_()
                # Components start at different scales around the prediction.
                first = 2 * self.mixtures
                self.output.bias[first : first + self.mixtures] = torch.linspace(-3.0, 0.0, self.mixtures)
        # Bin c lies between edges c and c + 1. The outermost bins are open: their far edges are where
        # every logistic is saturated, but finite, because infinity has no gradient.
        self.edges: Tensor
        far = torch.tensor([1e4])
        self.register_buffer("edges", torch.cat([-far, waveform.edges.float(), far]), persistent=False)

    def parameters_of(
        self, hidden: Tensor, windows: Tensor, side: Tensor | None, first: int = 0
    ) -> tuple[Tensor, ...]:
        """Output of the network for places `first`, `first` + 1, ... of a frame.

        hidden [..., D]; windows [..., P, W]; side [..., P, S] -> logits [..., P, V] in a tuple of one, or
        mixture log-weights, means and scales, each [..., P, mixtures], float32.
        """
        view: View = self.features(windows, side)
        places = slice(first, first + windows.size(-2))
        z: Tensor = F.gelu(self.read(view.inputs) + self.conditions(hidden, places))
        for block in self.blocks:
            z = block(z)
        # Taps of a sharp prediction cancel each other: they need more than bfloat16's 8 bits.
        with torch.autocast(z.device.type, enabled=False):
            out: Tensor = self.output(self.norm(z.float()))
            if self.predict is None:
                return (out,)
            taps: Tensor = TAP_GAIN * (self.predict(hidden.float()) + self.shared)[..., None, :]
        prediction = (taps * view.basis).sum(-1, keepdim=True)
        m = self.mixtures
        weight, offset, log_scale = out[..., : 3 * m].chunk(3, dim=-1)
        if side is not None and self.stage is not None:
            gated = out[..., 3 * m :] * side[..., self.stage.deviations]
            prediction = prediction + gated.sum(-1, keepdim=True)
        mean = view.center + view.unit * (prediction + OFFSET_GAIN * offset)
        scale = view.unit * log_scale.clamp(-9, 2).exp()
        return weight.log_softmax(-1), mean, scale

    def conditions(self, hidden: Tensor, places: slice) -> Tensor:
        """hidden [..., D] -> what it adds at each of `places`, [..., places, width]."""
        width = self.read.out_features
        rows = self.condition.weight[places.start * width : places.stop * width]
        out = F.linear(hidden, rows)
        return out.reshape(*out.shape[:-1], -1, width)

    def nll(self, hidden: Tensor, context: Context, targets: Tensor) -> Tensor:
        known = targets.clamp(min=0)
        # Place p of a frame sees the history and the p samples before it in its own frame.
        own = context.frame[..., :-1].clamp(min=0)
        line = torch.cat([context.history[..., -self.history :], own], dim=-1)
        parameters = self.parameters_of(hidden, line.unfold(-1, self.history, 1), context.side)
        if self.predict is None:
            logits = parameters[0].flatten(0, -2)
            nats = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
            return nats.view_as(targets)
        weight, mean, scale = parameters
        lower, upper = self.edges[known, None], self.edges[known + 1, None]
        nats = -with_floor(mixture_log_mass(weight, mean, scale, lower, upper), self.symbols)
        return nats.masked_fill(targets == IGNORE, 0.0)

    def log_probs(self, hidden: Tensor, window: Tensor, place: int, side: Tensor | None = None) -> Tensor:
        at = None if side is None else side[:, None]
        parameters = self.parameters_of(hidden, window[:, None], at, place)
        if self.predict is None:
            return parameters[0][:, 0].log_softmax(-1)
        weight, mean, scale = (p[:, 0, None] for p in parameters)
        log_mass = mixture_log_mass(weight, mean, scale, self.edges[:-1, None], self.edges[1:, None])
        return with_floor(log_mass, self.symbols)


def mixture_log_mass(log_weight: Tensor, mean: Tensor, scale: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """log of the mass of a mixture of logistics between two edges, summed over the last dimension.

    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - e^(a-b)) is exact in the tails too, where
    the plain difference cancels to zero.
    """
    a, b = (lower - mean) / scale, (upper - mean) / scale
    log_mass = F.logsigmoid(b) + F.logsigmoid(-a) + torch.log(-torch.expm1((lower - upper) / scale))
    return torch.logsumexp(log_weight + log_mass, dim=-1)


def with_floor(log_mass: Tensor, symbols: int) -> Tensor:
    """The distribution mixed with a little of the uniform one over `symbols`; still sums to 1.

    A logistic far from a sample, as at the first sample after digital silence, costs hundreds of bits
    and its gradient drowns all others. With this no sample costs more than about 31 bits, and
    a random one is drawn once in ten million.
    """
    uniform = torch.full_like(log_mass, math.log(UNIFORM_SHARE / symbols))
    return torch.logaddexp(log_mass + math.log1p(-UNIFORM_SHARE), uniform)


HeadConfig: TypeAlias = Annotated[
    SoftmaxHeadConfig | AdaptiveHeadConfig | FrameHeadConfig | DepthHeadConfig, Field(discriminator="kind")
]
