"""WaveNet: stacks of gated convolutions of kernel 2 and doubling dilation (van den Oord et al. 2016,
arXiv 1609.03499, section 2), unconditioned.

The state holds the last `dilation` inputs of every layer, as in generation by caching (Le Paine et al.
2016, arXiv 1611.09482), so that no segment computes its receptive field again. Before a document they are
zeros, which no symbol gives.
"""

from __future__ import annotations

import torch
from peer import CODES, Peer, State
from torch import Tensor, nn


class Layer(nn.Module):
    """The convolution is a product with x at two times: with channels last twice as fast on a CPU."""

    def __init__(self, dilation: int, channels: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.gate = nn.Linear(2 * channels, 2 * channels)
        self.residual = nn.Linear(channels, channels)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C], before [B, dilation, C] -> x for the next layer, gated [B, T, C], the new `before`."""
        line = torch.cat([before, x], dim=1)
        value, gate = self.gate(torch.cat([line[:, : x.size(1)], x], dim=-1)).chunk(2, dim=-1)
        gated = value.tanh() * gate.sigmoid()
        return x + self.residual(gated), gated, line[:, -self.dilation :]


class WaveNet(Peer):
    lanes, segment_samples, lr = 8, 1024, 3e-3

    def __init__(self, stacks: int = 2, layers: int = 10, channels: int = 96, skip: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CODES + 1, channels)
        self.layers = nn.ModuleList(Layer(2**i, channels) for _ in range(stacks) for i in range(layers))
        # The sum of all layers' skip convolutions is one product with all their values.
        self.skip = nn.Linear(len(self.layers) * channels, skip)
        self.output = nn.Sequential(nn.ReLU(), nn.Linear(skip, skip), nn.ReLU(), nn.Linear(skip, CODES))

    def initial_state(self, lanes: int) -> State:
        channels = self.embedding.embedding_dim
        return tuple(torch.zeros(lanes, layer.dilation, channels) for layer in self.layers)

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        x, values, after = self.embedding(inputs), [], []
        for layer, before in zip(self.layers, state, strict=True):
            x, gated, kept = layer(x, before)
            values.append(gated)
            after.append(kept)
        return self.output(self.skip(torch.cat(values, dim=-1))), tuple(after)
