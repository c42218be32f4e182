"""Adversarial training: a discriminator over short-time spectra tells decoded sound from recordings.

Least-squares losses (arXiv 1611.04076) and feature matching over spectra at several resolutions, as in
EnCodec (arXiv 2210.13438, section 3.4). Shapes: B lanes, N samples, C channels, T frames, F frequency bins.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from txl_audio.codec_training.losses import spectrum
from txl_audio.config import Config
from txl_audio.optim import Optimiser


class AdversarialConfig(Config):
    """How decoded sound is trained against a discriminator.

    start: share of the budget after which it takes part.
    weight: of its verdict.
    features: of the distance between what its layers give for decoded sound and for recordings.
    samples: length of the pieces that it sees, one of every piece in the batch: it costs more than the codec.
    """

    start: float = Field(default=0.5, ge=0, lt=1)
    weight: float = Field(default=0.1, gt=0)
    features: float = Field(default=0.2, ge=0)
    samples: int = Field(default=8000, ge=2048)
    channels: int = Field(default=16, ge=1)
    lr: float = Field(default=5e-4, gt=0)


class SpectrumDiscriminator(nn.Module):
    """Convolutions over one short-time spectrum; strides in frequency only."""

    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        sizes = [2, channels, channels, channels, channels]
        self.layers = nn.ModuleList(
            nn.Conv2d(n, m, (3, 7), stride=(1, 3), padding=(1, 3)) for n, m in pairwise(sizes)
        )
        self.out = nn.Conv2d(channels, 1, (3, 3), padding=(1, 1))

    def forward(self, pcm: Tensor) -> tuple[Tensor, list[Tensor]]:
        """pcm [B, N] -> verdicts [B, 1, T, F'], about 1 for recordings, and the features of every layer."""
        bins = spectrum(pcm, cast(Tensor, self.window))
        # Speech has most bins near 0: the square root brings them up to where convolutions see them.
        size = bins.abs().clamp_min(1e-5)
        bins = bins / size.sqrt()
        x, features = torch.stack([bins.real, bins.imag], dim=1), []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return self.out(x), features


class Adversary:
    """The discriminators, their optimiser and the losses of both sides."""

    def __init__(self, config: AdversarialConfig, device: torch.device) -> None:
        self.config = config
        self.discriminator = nn.ModuleList(
            SpectrumDiscriminator(window, config.channels) for window in (256, 512, 1024)
        ).to(device)
        parameters = self.discriminator.parameters()
        self.optimiser = Optimiser([torch.optim.AdamW(parameters, lr=config.lr, betas=(0.5, 0.9))])

    def losses(
        self, decoded: Tensor, pcm: Tensor, draws: np.random.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        """Trains the discriminator one step; then the codec's loss, and the figures of both.

        decoded, pcm [B, N].
        """
        length = min(self.config.samples, pcm.shape[1])
        start = int(draws.integers(0, pcm.shape[1] - length + 1))
        decoded, pcm = decoded[:, start : start + length], pcm[:, start : start + length]
        own = torch.stack(
            [
                (1 - real).square().mean() + fake.square().mean()
                for real, fake in ((d(pcm)[0], d(decoded.detach())[0]) for d in self.discriminator)
            ]
        ).mean()
        own.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.discriminator.requires_grad_(False)
        verdicts, distances = [], []
        for d in self.discriminator:
            with torch.no_grad():
                _, real = d(pcm)
            verdict, fake = d(decoded)
            verdicts.append((1 - verdict).square().mean())
            distances += [
                F.l1_loss(a, b) / b.abs().mean().clamp_min(1e-5) for a, b in zip(fake, real, strict=True)
            ]
        self.discriminator.requires_grad_(True)
        fooling, features = torch.stack(verdicts).mean(), torch.stack(distances).mean()
        loss = self.config.weight * fooling + self.config.features * features
        facts = {"discriminator": own.item(), "fooling": fooling.item(), "features": features.item()}
        return loss, facts
