"""LSTM over samples (Hochreiter and Schmidhuber 1997), the plainest stateful model."""

from __future__ import annotations

import torch
from peer import CODES, Peer, State
from torch import Tensor, nn


class LSTM(Peer):
    lanes, segment_samples, lr = 32, 512, 3e-3

    def __init__(self, width: int = 512, d_embed: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CODES + 1, d_embed)
        self.lstm = nn.LSTM(d_embed, width, batch_first=True)
        self.output = nn.Linear(width, CODES)

    def initial_state(self, lanes: int) -> State:
        return torch.zeros(lanes, self.lstm.hidden_size), torch.zeros(lanes, self.lstm.hidden_size)

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cell = (part[None] for part in state)
        out, (hidden, cell) = self.lstm(self.embedding(inputs), (hidden, cell))
        return self.output(out), (hidden[0], cell[0])
