"""Transformer-XL recurrence over single samples, by the package x-transformers."""

from __future__ import annotations

import torch
from peer import CODES, Peer, State
from torch import Tensor

from txl_audio.tokens import ConfigError


class XTransformersXL(Peer):
    """Rotary positions; memory that a document has not filled yet is masked."""

    lanes, segment_samples, lr = 16, 256, 1e-3

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, memory: int = 256) -> None:
        super().__init__()
        try:
            from x_transformers import Decoder, TransformerWrapper
        except ImportError as error:
            raise ConfigError(
                f"the peer x-transformers needs the package of that name ({error}); "
                "`pip install -e '.[baselines]'`, or leave this peer out"
            ) from error
        self.width, self.depth, self.memory = width, layers, memory
        self.network = TransformerWrapper(
            num_tokens=CODES + 1,
            logits_dim=CODES,
            max_seq_len=self.segment_samples,
            max_mem_len=memory,
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=width,
                depth=layers,
                heads=heads,
                attn_dim_head=width // heads,
                attn_flash=True,
                rotary_pos_emb=True,
            ),
        )

    def initial_state(self, lanes: int) -> State:
        """Which memory is valid, then every layer's."""
        valid = torch.zeros(lanes, self.memory, dtype=torch.bool)
        return valid, *(torch.zeros(lanes, self.memory, self.width) for _ in range(self.depth))

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        valid, *memory = state
        logits, memory = self.network(inputs, mems=memory, mem_masks=[valid] * self.depth, return_mems=True)
        valid = torch.cat([valid, torch.ones_like(inputs, dtype=torch.bool)], dim=1)
        return logits, (valid[:, -self.memory :], *memory)
