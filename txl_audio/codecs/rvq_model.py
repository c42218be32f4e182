"""The network of the project's own neural codec: encoder, codebooks, decoder, and their state.

Encoder and decoder are causal convolutions over frames of a short-time Fourier transform, as in Vocos (arXiv
2306.00547): nothing runs at the rate of samples but Fourier transforms and sums. Between them every frame is
the sum of one row of each codebook (residual vector quantisation, SoundStream, arXiv 2107.03312, section
III-C). Both ends hold back what their windows need, 15 ms, and nothing else looks ahead.

Shapes: B lanes, N samples, T frames of 320 samples, K codebooks, V rows of each, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from txl_audio.config import Config

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 320
# Windows of 40 ms every 10 ms, each around the 10 ms that it stands for: long enough to tell the harmonics of
# a voice apart, so that the decoder draws them as levels of bins and need not place every pulse.
_WINDOW, _HOP = 640, 160
SIDE = (_WINDOW - _HOP) // 2
"""Samples of a window on either side of its own, which both ends hold back."""
_OVERLAP = _WINDOW // _HOP
_KERNEL = 3


@dataclass
class EncoderState:
    """Where a stream's encoder stands: samples [B, n] for windows to come, past frames of each layer."""

    samples: Tensor
    layers: list[Tensor]


@dataclass
class DecoderState:
    """Where a stream's decoder stands: unfinished sound [B, 3, 160], past frames of each layer."""

    sound: Tensor
    layers: list[Tensor]


class CausalBlock(nn.Module):
    """x + W GELU(convolution(norm(x))): kernel 3, causal, over frames [B, T, D].

    The convolution is one matrix product with the frames side by side, which CPUs are fastest with.
    """

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.past = (_KERNEL - 1) * dilation
        self.dilation = dilation
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Linear(_KERNEL * width, width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.bias)
        with torch.no_grad():
            self.out.weight *= 0.5

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D], normed frames before it [B, past, D] -> output and the newest normed frames."""
        seen = torch.cat([past, self.norm(x)], dim=1)
        t = x.shape[1]
        taps = [seen[:, i * self.dilation : i * self.dilation + t] for i in range(_KERNEL)]
        y = self.out(F.gelu(self.convolution(torch.cat(taps, dim=-1))))
        return x + y, seen[:, t:]


class CausalStack(nn.Module):
    """Blocks with dilations 1, 2, 4, 1, ..."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CausalBlock(width, 2 ** (i % 3)) for i in range(blocks))
        self.width = width

    def start(self, lanes: int, like: Tensor) -> list[Tensor]:
        """Silence before the beginning."""
        pasts = [cast(CausalBlock, block).past for block in self.blocks]
        return [like.new_zeros(lanes, past, self.width) for past in pasts]

    def forward(self, x: Tensor, pasts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        new: list[Tensor] = []
        for block, past in zip(self.blocks, pasts, strict=True):
            x, kept = block(x, past)
            new.append(kept)
        return x, new


class RvqModelConfig(Config):
    """Sizes. width: D of layers at 100 frames a second; those at 50 are twice as wide."""

    codebooks: int = Field(default=8, ge=1)
    codebook_size: int = Field(default=256, ge=2, le=65536)
    latent: int = Field(default=64, ge=1)
    width: int = Field(default=256, ge=1)
    blocks: int = Field(default=3, ge=1)

    def build(self) -> RvqModel:
        return RvqModel(self)


class RvqModel(nn.Module):
    """Encoder, codebooks and decoder; all state is passed in and out."""

    inner = ("encoder_fast", "encoder", "decoder", "decoder_fast")
    """Submodules whose matrices are neither inputs nor outputs, for Muon."""

    codebooks: Tensor
    window: Tensor

    def __init__(self, config: RvqModelConfig) -> None:
        super().__init__()
        self.config = config
        width, wide = config.width, 2 * config.width
        self.from_samples = nn.Linear(_WINDOW, width, bias=False)
        self.from_levels = nn.Linear(_WINDOW // 2 + 1, width)
        self.encoder_fast = CausalStack(width, config.blocks)
        self.to_frames = nn.Linear(2 * width, wide)
        self.encoder = CausalStack(wide, config.blocks)
        self.to_latent = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, config.latent))
        self.from_latent = nn.Linear(config.latent, wide)
        self.decoder = CausalStack(wide, config.blocks)
        self.from_frames = nn.Linear(wide, FRAME_SAMPLES // _HOP * width)
        self.decoder_fast = CausalStack(width, config.blocks)
        self.to_spectrum = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _WINDOW + 2))
        self.register_buffer(
            "codebooks", torch.randn(config.codebooks, config.codebook_size, config.latent) * 0.1
        )
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)

    def encoder_state(self, lanes: int) -> EncoderState:
        """The beginning of streams; silence before it."""
        like = self.codebooks
        layers = [*self.encoder_fast.start(lanes, like), *self.encoder.start(lanes, like)]
        return EncoderState(like.new_zeros(lanes, SIDE), layers)

    def latents(self, pcm: Tensor, state: EncoderState) -> tuple[Tensor, EncoderState]:
        """pcm [B, n] -> latents [B, T, C] of the frames whose windows are complete, and the state.

        After n samples in all these are floor((n - 240) / 320) frames: the rest waits in the state.
        """
        samples = torch.cat([state.samples, pcm], dim=1)
        t = max(0, (samples.shape[1] - 2 * SIDE) // FRAME_SAMPLES)
        kept = samples[:, t * FRAME_SAMPLES :]
        if t == 0:
            return pcm.new_zeros(pcm.shape[0], 0, self.config.latent), EncoderState(kept, state.layers)
        windows = samples[:, : t * FRAME_SAMPLES + 2 * SIDE].unfold(1, _WINDOW, _HOP)
        windows = windows * self.window
        levels = torch.fft.rfft(windows).abs().clamp_min(1e-4).log()
        x = self.from_samples(10 * windows) + self.from_levels(levels)
        n = self.config.blocks
        x, fast = self.encoder_fast(x, state.layers[:n])
        x, slow = self.encoder(self.to_frames(x.reshape(x.shape[0], t, -1)), state.layers[n:])
        return self.to_latent(x), EncoderState(kept, fast + slow)

    def quantise(self, latents: Tensor) -> Tensor:
        """latents [B, T, C] -> codes [B, T, K]: of each codebook the row nearest to what is left over."""
        rest, codes = latents, []
        for codebook in self.codebooks:
            distance = codebook.square().sum(-1) - 2 * rest @ codebook.T
            nearest = distance.argmin(-1)
            rest = rest - codebook[nearest]
            codes.append(nearest)
        return torch.stack(codes, dim=-1)

    def dequantise(self, codes: Tensor) -> Tensor:
        """codes [B, T, K] -> latents [B, T, C]: the sum of their rows."""
        return sum(
            (codebook[codes[..., k]] for k, codebook in enumerate(self.codebooks)),
            start=self.codebooks.new_zeros(()),
        )

    def decoder_state(self, lanes: int) -> DecoderState:
        """The beginning of streams."""
        like = self.codebooks
        layers = [*self.decoder.start(lanes, like), *self.decoder_fast.start(lanes, like)]
        return DecoderState(like.new_zeros(lanes, _OVERLAP - 1, _HOP), layers)

    def sound(self, latents: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """latents [B, T, C] -> the next T * 320 samples of a stream that is 240 samples late, and the state.

        The 240 samples that the last frame still owes are the first ones of `state.sound`.
        """
        lanes, t = latents.shape[:2]
        n = self.config.blocks
        x, slow = self.decoder(self.from_latent(latents), state.layers[:n])
        x = self.from_frames(x).reshape(lanes, t * FRAME_SAMPLES // _HOP, -1)
        x, fast = self.decoder_fast(x, state.layers[n:])
        # Level and phase of every bin; the exponential spans the range of levels that speech has.
        level, phase = self.to_spectrum(x).float().chunk(2, dim=-1)
        spectrum = torch.polar(level.clamp(max=6.0).exp(), phase)
        # Squared windows at a quarter of their length add up to 1.5.
        windows = torch.fft.irfft(spectrum) * (self.window / 1.5)
        parts = windows.reshape(lanes, -1, _OVERLAP, _HOP)
        hops = parts.shape[1]
        sound = F.pad(state.sound, (0, 0, 0, hops))
        for i in range(_OVERLAP):
            sound = sound + F.pad(parts[:, :, i], (0, 0, i, _OVERLAP - 1 - i))
        return sound[:, :hops].reshape(lanes, -1), DecoderState(sound[:, hops:], slow + fast)

    def whole_latents(self, pcm: Tensor) -> Tensor:
        """pcm [B, N] -> latents [B, ceil(N / 320), C]: a whole stream, with silence after it."""
        pcm = F.pad(pcm, (0, -pcm.shape[1] % FRAME_SAMPLES + SIDE))
        return self.latents(pcm, self.encoder_state(pcm.shape[0]))[0]

    def whole_sound(self, latents: Tensor) -> Tensor:
        """latents [B, T, C] -> pcm [B, T * 320]: a whole stream, where sample i is sample i again."""
        pcm, state = self.sound(latents, self.decoder_state(latents.shape[0]))
        return torch.cat([pcm, state.sound.flatten(1)[:, :SIDE]], dim=1)[:, SIDE:]
