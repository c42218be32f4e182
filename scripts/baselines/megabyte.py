"""MEGABYTE (Yu et al. 2023, arXiv 2305.07185, section 2): a transformer over patches of samples
conditions a small one that predicts the samples of a patch.

It has no memory: the state holds the samples of the context, which every segment computes again. The first
sample of a patch sees the one before it, where the paper has a padding.
"""

from __future__ import annotations

import torch
from peer import CODES, START, Peer, State
from torch import Tensor, nn


class MEGABYTE(Peer):
    """Segment and context are whole patches; the positions are numbered over both."""

    lanes, segment_samples, lr = 4, 2048, 2e-3

    def __init__(
        self,
        patch: int = 8,
        context: int = 1024,
        width: int = 256,
        local_width: int = 128,
        layers: tuple[int, int] = (4, 3),
        heads: tuple[int, int] = (4, 2),
    ) -> None:
        super().__init__()
        self.patch, self.context = patch, context
        self.embedding = nn.Embedding(CODES + 1, local_width)
        self.patches_in = nn.Linear(patch * local_width, width)
        self.positions = nn.Embedding((context + self.segment_samples) // patch, width)
        self.places = nn.Embedding(patch, local_width)
        self.patches = _transformer(width, layers[0], heads[0])
        self.upsample = nn.Linear(width, patch * local_width)
        self.samples = _transformer(local_width, layers[1], heads[1])
        self.output = nn.Linear(local_width, CODES)

    def initial_state(self, lanes: int) -> State:
        """The samples before the newest: of the context, and the rest of the patch before it."""
        return (torch.full((lanes, self.context + self.patch - 1), START),)

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        line = torch.cat([state[0], inputs], dim=1)
        symbols = self.embedding(line)
        # [B, patches, D]: the patch before each patch.
        known = symbols.unfold(1, self.patch, self.patch).transpose(2, 3).flatten(2)
        x = self.patches_in(known) + self.positions.weight[: known.size(1)]
        x = self.upsample(_causal(self.patches, x)).unflatten(-1, (self.patch, -1))
        # The local network is needed for the new samples only: [B * patches, P, D].
        new = inputs.size(1) // self.patch
        local = symbols[:, -inputs.size(1) :].unflatten(1, (new, self.patch))
        y = _causal(self.samples, (x[:, -new:] + local + self.places.weight).flatten(0, 1))
        return self.output(y).view(*inputs.shape, -1), (line[:, -state[0].size(1) :],)


def _transformer(width: int, layers: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)


def _causal(network: nn.TransformerEncoder, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
    return network(x, mask=mask, is_causal=True)
