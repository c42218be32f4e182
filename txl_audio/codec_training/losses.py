"""What a codec is trained for: spectra like the original's, and a discriminator that finds no difference.

Shapes: B lanes, N samples, F frequency bins, T frames.
"""

from __future__ import annotations

import librosa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST = 1e-5


class SpectralLoss(nn.Module):
    """Mean L1 distance of log10 mel spectra at several resolutions (DAC, arXiv 2306.06546, section 3.4).

    Args:
        windows: window lengths in samples, with steps of a quarter of them.
        mels: mel bands of each.
    """

    def __init__(
        self,
        sample_rate_hz: int,
        windows: tuple[int, ...] = (128, 256, 512, 1024, 2048),
        mels: tuple[int, ...] = (16, 32, 64, 96, 128),
    ) -> None:
        super().__init__()
        self.windows = windows
        for window, bands in zip(windows, mels, strict=True):
            bank = librosa.filters.mel(sr=sample_rate_hz, n_fft=window, n_mels=bands, norm="slaney")
            scale = bank.sum(axis=1, keepdims=True)
            bank = torch.from_numpy(bank / scale.clip(min=1e-9))
            self.register_buffer(f"bank_{window}", bank.T.contiguous(), persistent=False)
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)

    def forward(self, pcm: Tensor, target: Tensor) -> Tensor:
        """pcm, target [B, N] -> scalar."""
        losses: list[Tensor] = []
        for window in self.windows:
            with torch.no_grad():
                wanted = self._bands(target, window)
            losses.append(F.l1_loss(self._bands(pcm, window), wanted))
        return torch.stack(losses).mean()

    def _bands(self, pcm: Tensor, window: int) -> Tensor:
        size = spectrum(pcm, self.get_buffer(f"window_{window}")).abs()
        return (size @ self.get_buffer(f"bank_{window}")).clamp_min(_SMALLEST).log10()


def spectrum(pcm: Tensor, window: Tensor) -> Tensor:
    """pcm [B, N] -> short-time spectrum [B, T, F], complex; a sine of full scale has about size 1/2."""
    n = len(window)
    frames = F.pad(pcm, (n // 2, n // 2)).unfold(1, n, n // 4) * window
    return torch.fft.rfft(frames) * (2 / n)
