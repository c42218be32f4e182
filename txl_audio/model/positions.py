"""How a core knows order: the paper's relative sinusoids and the baselines it is compared with.

Every scheme answers two questions, so that one attention serves all of them:
`add` (what is added to a layer's input) and `terms` (what enters the attention score). With query i,
key j and distance d = i - j, the score before scaling is

    (q_i + u)·k_j + (q_i + v)·r_d + b_d

Sources: Transformer-XL (arXiv 1901.02860, section 3.3 and appendix B) and its ablations: Vaswani et
al. 2017, Shaw et al. 2018, Al-Rfou et al. 2018.

Shapes: B lanes, T frames, D model width, H heads, d head width, N distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from txl_audio.config import Config


class Terms(NamedTuple):
    """What a scheme adds to the attention score; None where it has no such term.

    u [H, d], v [H, d]: biases of the content and the position query; r [H, N, d]: key of each
    distance 0..N-1; b [H, N]: bias of each distance. `frequencies` [D/2] and `projection` [H, d, D]
    (W_kR) are given where r is their exact product with undropped sinusoids, which the shift-free
    form of the score needs.
    """

    u: Tensor
    v: Tensor | None
    r: Tensor
    b: Tensor | None
    frequencies: Tensor | None = None
    projection: Tensor | None = None
    far_first: Tensor | None = None

    def first(self, distances: int) -> Terms:
        """The terms of distances 0..N-1 only."""
        b = None if self.b is None else self.b[:, :distances]
        far_first = None if self.far_first is None else self.far_first[:, -aligned(distances + 1) :]
        return self._replace(r=self.r[:, :distances], b=b, far_first=far_first)

    def ordered(self) -> Terms:
        """With `far_first` [H, W, d]: r from the farthest distance to 0, behind zeros.

        W is more than N, and a number of rows that matrix products are fast with.
        """
        distances = self.r.size(1)
        return self._replace(far_first=F.pad(self.r.flip(1), (0, 0, aligned(distances + 1) - distances, 0)))


def aligned(rows: int) -> int:
    """The next multiple of 16."""
    return -(-rows // 16) * 16


class Shape(NamedTuple):
    """The sizes a scheme needs to know of its core."""

    n_layer: int
    d_model: int
    n_head: int
    d_head: int


def inverse_frequencies(d_model: int, device: torch.device | None = None) -> Tensor:
    """w_n = 10000^(-2n/D), [D/2] float32."""
    return 1.0 / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float32, device=device) / d_model)


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """positions [N] -> [N, D], all sines before all cosines (not interleaved), as the authors do."""
    angles = positions.float()[:, None] * inverse_frequencies(d_model, positions.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Positions(nn.Module):
    """The contract of a scheme; this base adds nothing anywhere."""

    #: Longest segment the scheme can number, None if any.
    max_segment: int | None = None

    def add(self, layer: int, x: Tensor, *, offset: int | Tensor) -> Tensor:
        """Layer input x [B, T, D] whose first frame stands `offset` frames into its segment."""
        return x

    def table(self, distances: int, device: torch.device) -> Tensor:
        """What all layers share in one pass over `distances` distances."""
        return torch.empty(0, device=device)

    def terms(self, layer: int, distances: int, table: Tensor) -> Terms | None:
        """Score terms of one layer for distances 0..N-1; `table` is from `table(distances)`."""
        return None


class RelativeConfig(Config):
    """The paper's encoding: fixed sinusoids of the distance, projected by each layer's W_kR."""

    kind: Literal["relative"] = "relative"
    untie_r: bool = False
    clamp_len: int | None = Field(default=None, ge=1)

    def build(self, shape: Shape, *, dropout: float) -> Relative:
        return Relative(shape, self, dropout=dropout)


class Relative(Positions):
    """Terms (a) to (d) of the paper: u, v, and r_d = W_kR R_d.

    `clamp_len`: all distances above it share its encoding; attention itself is not cut.
    `untie_r`: u and v of every layer's own.
    """

    def __init__(self, shape: Shape, config: RelativeConfig, *, dropout: float) -> None:
        super().__init__()
        self.shape, self.clamp_len = shape, config.clamp_len
        biases = shape.n_layer if config.untie_r else 1
        self.u = nn.Parameter(torch.zeros(biases, shape.n_head, shape.d_head))
        self.v = nn.Parameter(torch.zeros(biases, shape.n_head, shape.d_head))
        width = shape.n_head * shape.d_head
        keys = nn.ModuleList(nn.Linear(shape.d_model, width, bias=False) for _ in range(shape.n_layer))
        self.keys = cast("Sequence[nn.Linear]", keys)
        self.dropout = nn.Dropout(dropout)

    def table(self, distances: int, device: torch.device) -> Tensor:
        """R [N, D], dropped out once for all layers as in the authors' code."""
        d = torch.arange(distances, device=device)
        if self.clamp_len is not None:
            d = d.clamp(max=self.clamp_len)
        return self.dropout(sinusoids(d, self.shape.d_model))

    def terms(self, layer: int, distances: int, table: Tensor) -> Terms:
        bias = layer if self.u.size(0) > 1 else 0
        key = self.keys[layer]
        r = rearrange(key(table), "n (h d) -> h n d", h=self.shape.n_head)
        dropped = self.training and self.dropout.p > 0
        if self.clamp_len is not None or dropped:
            return Terms(self.u[bias], self.v[bias], r, None)
        projection = rearrange(key.weight, "(h d) m -> h d m", h=self.shape.n_head)
        frequencies = inverse_frequencies(self.shape.d_model, table.device)
        return Terms(self.u[bias], self.v[bias], r, None, frequencies, projection)


class ShawConfig(Config):
    """Learned key and bias per layer and distance (Shaw et al. 2018); `max_distance` rows."""

    kind: Literal["shaw"]
    max_distance: int = Field(ge=1)

    def build(self, shape: Shape, *, dropout: float) -> Shaw:
        return Shaw(shape, self)


class Shaw(Positions):
    """Distances beyond the table share its last row."""

    def __init__(self, shape: Shape, config: ShawConfig) -> None:
        super().__init__()
        rows = config.max_distance
        self.u = nn.Parameter(torch.zeros(shape.n_layer, shape.n_head, shape.d_head))
        self.r = nn.Parameter(torch.zeros(shape.n_layer, rows, shape.n_head, shape.d_head))
        self.b = nn.Parameter(torch.zeros(shape.n_layer, rows, shape.n_head))

    def terms(self, layer: int, distances: int, table: Tensor) -> Terms:
        d = torch.arange(distances, device=self.r.device).clamp(max=self.r.size(1) - 1)
        r = rearrange(self.r[layer, d], "n h d -> h n d")
        return Terms(self.u[layer], None, r, rearrange(self.b[layer, d], "n h -> h n"))


class AbsoluteConfig(Config):
    """Sinusoids added to the input (Vaswani et al. 2017), numbered inside segments of `segment_len`."""

    kind: Literal["absolute"]
    segment_len: int = Field(ge=1)

    def build(self, shape: Shape, *, dropout: float) -> Absolute:
        return Absolute(shape, self)


class Absolute(Positions):
    """The authors count backwards: the last frame of a segment gets position 0."""

    def __init__(self, shape: Shape, config: AbsoluteConfig) -> None:
        super().__init__()
        self.max_segment = config.segment_len
        self.d_model = shape.d_model

    def add(self, layer: int, x: Tensor, *, offset: int | Tensor) -> Tensor:
        if layer > 0:
            return x
        assert self.max_segment is not None
        positions = self.max_segment - 1 - offset - torch.arange(x.size(1), device=x.device)
        return x + sinusoids(positions, self.d_model).to(x.dtype)


class AlRfouConfig(Config):
    """Learned positions added to every layer's input (Al-Rfou et al. 2018)."""

    kind: Literal["alrfou"]
    segment_len: int = Field(ge=1)

    def build(self, shape: Shape, *, dropout: float) -> AlRfou:
        return AlRfou(shape, self)


class AlRfou(Positions):
    """One table of `segment_len` rows per layer."""

    def __init__(self, shape: Shape, config: AlRfouConfig) -> None:
        super().__init__()
        self.max_segment = config.segment_len
        self.rows = nn.Parameter(torch.zeros(shape.n_layer, config.segment_len, shape.d_model))

    def add(self, layer: int, x: Tensor, *, offset: int | Tensor) -> Tensor:
        index = torch.arange(x.size(1), device=x.device) + offset
        return x + self.rows[layer].index_select(0, index).to(x.dtype)


PositionsConfig: TypeAlias = Annotated[
    RelativeConfig | ShawConfig | AbsoluteConfig | AlRfouConfig, Field(discriminator="kind")
]
