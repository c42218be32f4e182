"""From the core's output to the K codes of a frame of a neural codec.

Shapes: B lanes, T frames, K symbols per frame, V vocabulary, D model width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from txl_audio.config import Config
from txl_audio.model.block import ResidualBlock
from txl_audio.model.contracts import Context, Embedding, Head, Waveform
from txl_audio.tokens import IGNORE, ConfigError, TokenSpec


class DepthHeadConfig(Config):
    """A small network that walks the codes of a frame.

    walk: whether a code depends on those before it in its frame (the depth form); without, they are drawn
    independently, which is meant for delayed frames (`delay_frames` of the stream).
    """

    kind: Literal["depth"]
    width: int = Field(default=256, ge=1)
    blocks: int = Field(default=2, ge=0)
    walk: bool = True

    def build(
        self, spec: TokenSpec, d_model: int, embedding: Embedding, waveform: Waveform | None = None
    ) -> DepthHead:
        if spec.modality != "codes":
            raise ConfigError(
                f"head depth is of neural codecs' codes, got {spec.name} ({spec.modality}); use head "
                f"{'frame' if waveform is not None else 'softmax'}"
            )
        return DepthHead(self, spec, d_model=d_model)


class DepthHead(Head):
    """Residual network over what the core says of a place and the sum of the codes before it.

    z_k = C_k hidden + sum over j < k of E_j[code j], then residual blocks that all places share, then a
    softmax of each place's own. Residual codebooks add up, so their codes enter as a sum too. (The depth
    form of a frame: Moshi's and RQ-Transformer's depth decoder, as an MLP.)
    """

    inner = ("condition", "blocks")

    def __init__(self, config: DepthHeadConfig, spec: TokenSpec, *, d_model: int) -> None:
        super().__init__()
        self.places, self.symbols, self.width = spec.symbols_per_frame, spec.vocab_size, config.width
        # One matrix [width, D] for each place, stacked.
        self.condition = nn.Linear(d_model, self.places * config.width, bias=False)
        self.earlier = None
        if config.walk:
            self.history = self.places - 1
            rows = self.history * self.symbols
            self.earlier = nn.Parameter(torch.empty(rows, config.width).normal_(std=0.02))
        self.blocks = nn.ModuleList(ResidualBlock(config.width) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Parameter(torch.empty(self.places, config.width, self.symbols).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(self.places, self.symbols))
        # Text stands in the first place only.
        mask = torch.zeros(self.places, self.symbols)
        mask[1:, spec.codes :] = float("-inf")
        self.mask: Tensor
        self.register_buffer("mask", mask, persistent=False)

    def logits(self, hidden: Tensor, codes: Tensor, places: slice) -> Tensor:
        """Of some places of frames: hidden [N, D], codes [N, places.stop - 1] before the last of them ->
        [N, places, V] float32."""
        rows = self.condition.weight[places.start * self.width : places.stop * self.width]
        z = F.linear(hidden, rows).view(len(hidden), -1, self.width)
        if self.earlier is not None:
            table = torch.arange(places.stop - 1, device=codes.device) * self.symbols
            sums = F.embedding(codes + table, self.earlier).cumsum(1)
            z = z + F.pad(sums, (0, 0, 1, 0))[:, places]
        for block in self.blocks:
            z = block(z)
        out = torch.einsum("nkw,kwv->nkv", self.norm(z), self.output[places])
        return out.float() + self.bias[places] + self.mask[places]

    def _known(self, codes: Tensor) -> Tensor:
        """What is not there (IGNORE in training, the start symbol in sampling) counts as the last symbol."""
        return codes.where(codes != IGNORE, self.symbols - 1).clamp(max=self.symbols - 1)

    def nll(self, hidden: Tensor, context: Context, targets: Tensor) -> Tensor:
        codes = self._known(context.frame[..., :-1]).flatten(0, 1)
        logits = self.logits(hidden.flatten(0, 1), codes, slice(0, self.places))
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return nats.view_as(targets)

    def log_probs(self, hidden: Tensor, window: Tensor, place: int, side: Tensor | None = None) -> Tensor:
        codes = self._known(window[:, window.size(1) - place :])
        return self.logits(hidden, codes, slice(place, place + 1))[:, 0].log_softmax(-1)
