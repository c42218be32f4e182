"""SaShiMi, reduced (Goel et al. 2022, arXiv 2202.09729): a causal U-net of pooled resolutions, whose
layers are diagonal state-space models (S4D, Gu et al. 2022, arXiv 2206.11893). As in the paper the layers
stand in the middle and on the way up.

A layer runs its recurrence in chunks: inside a chunk as a matrix product, from chunk to chunk by its state.
That equals the convolution over the whole line, and needs no start anew for each segment.
"""

from __future__ import annotations

import math

import torch
from peer import CODES, Peer, State
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 32


class S4D(nn.Module):
    """h_t = A h_{t-1} + x_t, y_t = 2 Re(C h_t) + D x_t for every channel, A diagonal and complex.

    Initialised as S4D-Lin; C includes the input matrix and the factor of the zero-order hold.
    """

    def __init__(self, channels: int, modes: int = 32) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)))
        self.log_decay = nn.Parameter(torch.full((channels, modes), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(modes).float().repeat(channels, 1))
        self.c = nn.Parameter(torch.randn(channels, modes, 2) * math.sqrt(0.5))
        self.d = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H], state [B, H, N] complex -> y [B, T, H], the state after it."""
        lanes, samples, channels = x.shape
        size = math.gcd(samples, CHUNK)
        continuous = torch.complex(-self.log_decay.exp(), self.frequency)
        step = self.log_step.exp()[:, None] * continuous
        powers = (step[..., None] * torch.arange(size + 1)).exp()  # [H, N, size + 1]
        c = 2 * torch.view_as_complex(self.c) * torch.expm1(step) / continuous
        # x to state at the chunk's end, state to y, and x to y inside the chunk (Toeplitz).
        entering = _pairs(powers[..., :-1].flip(-1).mT).flatten(2)  # [H, size, 2N]
        leaving = _pairs((c[..., None] * powers[..., 1:]).conj().mT).flatten(2).mT  # [H, 2N, size]
        kernel = torch.einsum("hn,hnt->ht", c, powers[..., :-1]).real
        within = F.pad(kernel, (size - 1, 0)).unfold(1, size, 1).flip(1)  # [H, size, size]

        chunks = x.view(lanes, -1, size, channels).permute(3, 0, 1, 2)  # [H, B, chunks, size]
        added = torch.matmul(chunks, entering[:, None]).float()
        added = torch.view_as_complex(added.unflatten(-1, (-1, 2)))  # [H, B, chunks, N]
        state, before = state.transpose(0, 1), []
        for more in added.unbind(2):
            before.append(state)
            state = powers[:, None, :, -1] * state + more
        known = torch.view_as_real(torch.stack(before, dim=2)).flatten(-2)
        y = torch.matmul(torch.cat([chunks, known], dim=-1), torch.cat([within, leaving], dim=1)[:, None])
        return y.permute(1, 2, 3, 0).reshape(x.shape) + self.d * x, state.transpose(0, 1)


def _pairs(values: Tensor) -> Tensor:
    """Complex values as (real, imaginary) in a last dimension, in whatever order they lie in memory."""
    return torch.stack([values.real, values.imag], dim=-1)


class Layer(nn.Module):
    """A state-space model and a feed-forward network, each behind a norm and beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.s4d = S4D(channels)
        self.mix = nn.Linear(channels, 2 * channels)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 2 * channels),
            nn.GELU(),
            nn.Linear(2 * channels, channels),
        )

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.s4d(self.norm(x), state)
        x = x + F.glu(self.mix(F.gelu(y)))
        return x + self.feed_forward(x), state


class SaShiMi(Peer):
    """A segment is a multiple of 16 samples: the product of the pools."""

    lanes, segment_samples, lr = 8, 1024, 4e-3

    def __init__(self, d_model: int = 64, layers: int = 2, pools: tuple[int, ...] = (4, 4)) -> None:
        super().__init__()
        self.pools = pools
        self.widths = [d_model * 2**stage for stage in range(len(pools) + 1)]
        self.embedding = nn.Embedding(CODES + 1, d_model)
        steps = list(zip(pools, self.widths, self.widths[1:], strict=False))
        self.down = nn.ModuleList(nn.Linear(pool * narrow, wide) for pool, narrow, wide in steps)
        self.up = nn.ModuleList(nn.Linear(wide, pool * narrow) for pool, narrow, wide in steps)
        self.stages = nn.ModuleList(
            nn.ModuleList(Layer(width) for _ in range(layers)) for width in self.widths
        )
        self.norm = nn.LayerNorm(d_model)
        self.output = nn.Linear(d_model, CODES)

    def initial_state(self, lanes: int) -> State:
        """In the order of the way up: every layer's, then the last pooled vector."""
        state: list[Tensor] = []
        for stage in reversed(range(len(self.widths))):
            for layer in self.stages[stage]:
                modes = layer.s4d.log_decay.shape
                state.append(torch.zeros(lanes, *modes, dtype=torch.complex64))
            if stage > 0:
                state.append(torch.zeros(lanes, 1, self.widths[stage]))
        return tuple(state)

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        x, skips, after, states = self.embedding(inputs), [], [], iter(state)
        for pool, down in zip(self.pools, self.down, strict=True):
            skips.append(x)
            x = down(x.unflatten(1, (-1, pool)).flatten(2))
        for stage in reversed(range(len(self.widths))):
            for layer in self.stages[stage]:
                x, kept = layer(x, next(states))
                after.append(kept)
            if stage > 0:
                # A pooled vector has seen all samples of its pool: it may serve the next one only.
                line = torch.cat([next(states), x], dim=1)
                after.append(line[:, -1:])
                x = self.up[stage - 1](line[:, :-1]).unflatten(-1, (self.pools[stage - 1], -1)).flatten(1, 2)
                x = x + skips[stage - 1]
        return self.output(self.norm(x)), tuple(after)
