"""What a codec is trained for: spectra like the original's, and a discriminator that finds no difference.

Shapes: B lanes, N samples, F frequency bins, T frames.
"""

from __future__ import annotations

import librosa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST = 1e-5
_LOUDNESS = 0.46  # of sizes, whose squares are power


class SpectralLoss(nn.Module):
    """How far mel spectra lie apart at several resolutions, in two ways, both mean L1 distances.

    Of log10 (DAC, arXiv 2306.06546, section 3.4): a band that nobody hears counts as much as any other.
    Of loudness, the power 0.23 of power (Zwicker; ITU-T P.862 has it too), in shares of the target's mean:
    what stands out counts.

    Args:
        windows: window lengths in samples, with steps of a quarter of them.
        mels: mel bands of each.
        heard: of these windows, those whose loudness is compared: about 32 and 64 ms, as long as an ear's.
    """

    def __init__(
        self,
        sample_rate_hz: int,
        windows: tuple[int, ...] = (128, 256, 512, 1024, 2048),
        mels: tuple[int, ...] = (16, 32, 64, 96, 128),
        heard: tuple[int, ...] = (512, 1024),
    ) -> None:
        super().__init__()
        self.windows, self.heard = windows, heard
        for window, bands in zip(windows, mels, strict=True):
            bank = librosa.filters.mel(sr=sample_rate_hz, n_fft=window, n_mels=bands, norm="slaney")
            scale = bank.sum(axis=1, keepdims=True)
            bank = torch.from_numpy(bank / scale.clip(min=1e-9))
            self.register_buffer(f"bank_{window}", bank.T.contiguous(), persistent=False)
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)

    def forward(self, pcm: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """pcm, target [B, N] -> distance of log spectra and of loudness, scalars."""
        logs: list[Tensor] = []
        louds: list[Tensor] = []
        for window in self.windows:
            with torch.no_grad():
                wanted = self._bands(target, window)
            given = self._bands(pcm, window)
            logs.append(F.l1_loss(given.log10(), wanted.log10()))
            if window in self.heard:
                loudness = wanted**_LOUDNESS
                louds.append(F.l1_loss(given**_LOUDNESS, loudness) / loudness.mean())
        return torch.stack(logs).mean(), torch.stack(louds).mean()

    def _bands(self, pcm: Tensor, window: int) -> Tensor:
        size = spectrum(pcm, self.get_buffer(f"window_{window}")).abs()
        return (size @ self.get_buffer(f"bank_{window}")).clamp_min(_SMALLEST)


def spectrum(pcm: Tensor, window: Tensor) -> Tensor:
    """pcm [B, N] -> short-time spectrum [B, T, F], complex; a sine of full scale has about size 1/2."""
    n = len(window)
    frames = F.pad(pcm, (n // 2, n // 2)).unfold(1, n, n // 4) * window
    return torch.fft.rfft(frames) * (2 / n)
