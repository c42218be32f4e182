"""SampleRNN of two tiers (Mehri et al. 2017, arXiv 1612.07837, section 2): a GRU over frames of samples
conditions a small network that predicts each sample from the `frame` samples before it.
"""

from __future__ import annotations

import torch
from peer import CODES, START, Peer, State, amplitudes
from torch import Tensor, nn


class SampleRNN(Peer):
    """A segment is whole frames."""

    lanes, segment_samples, lr = 16, 1024, 2e-3

    def __init__(self, frame: int = 16, width: int = 512, d_embed: int = 32) -> None:
        super().__init__()
        self.frame = frame
        self.frames_in = nn.Linear(frame, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.upsample = nn.Linear(width, frame * width)
        self.embedding = nn.Embedding(CODES + 1, d_embed)
        self.recent = nn.Linear(frame * d_embed, width, bias=False)
        self.output = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CODES))

    def initial_state(self, lanes: int) -> State:
        """The GRU's hidden value, and the samples before the newest."""
        return torch.zeros(lanes, self.gru.hidden_size), torch.full((lanes, self.frame - 1), START)

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, before = state
        line = torch.cat([before, inputs], dim=1)
        # The frame before each frame, and the `frame` samples before each sample.
        frames = self.frames_in(amplitudes(line).unfold(1, self.frame, self.frame))
        out, hidden = self.gru(frames, hidden[None])
        slow = self.upsample(out).view(*inputs.shape, -1)
        recent = self.embedding(line).unfold(1, self.frame, 1).flatten(2)
        return self.output(slow + self.recent(recent)), (hidden[0], line[:, 1 - self.frame :])
