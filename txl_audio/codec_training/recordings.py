"""Recordings in memory, and random pieces of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl_audio.codecs.rvq_model import SAMPLE_RATE_HZ
from txl_audio.data.audio import resample
from txl_audio.data.datasets import find_recordings
from txl_audio.data.splits import assign_splits
from txl_audio.tokens import DataError

_FULL_SCALE = 32768


class Recordings:
    """Recordings at 16 kHz as 16-bit samples (115 MB an hour); item i is pcm [N] float32."""

    def __init__(self, pcm: list[np.ndarray]) -> None:
        self._pcm = [np.clip(np.rint(x * _FULL_SCALE), -32768, 32767).astype(np.int16) for x in pcm]
        self._ends = np.cumsum([len(x) for x in self._pcm])
        digest = hashlib.sha256()
        for samples in self._pcm:
            digest.update(samples.tobytes())
        self.data_id = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._pcm)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._pcm[index].astype(np.float32) / _FULL_SCALE)

    @property
    def seconds(self) -> float:
        return float(self._ends[-1]) / SAMPLE_RATE_HZ

    def pieces(self, count: int, *, samples: int, draws: np.random.Generator) -> Tensor:
        """Random pieces [count, samples] of recordings, each as often as it is long; silence after what is
        too short."""
        out = torch.zeros(count, samples)
        for row, at in zip(out, draws.integers(0, self._ends[-1], count), strict=True):
            pcm = self._pcm[np.searchsorted(self._ends, at, side="right")]
            start = int(draws.integers(0, max(1, len(pcm) - samples + 1)))
            piece = torch.from_numpy(pcm[start : start + samples].astype(np.float32) / _FULL_SCALE)
            row[: len(piece)] = piece
        return out


def read_recordings(source: str | Path, split: str) -> dict[str, Recordings]:
    """The splits `train` and `val` of a folder or manifest, as `txl-audio prepare --split` makes them.

    Raises DataError where a file cannot be read or a split is empty, ConfigError for another rule.
    """
    recordings, rule = assign_splits(find_recordings(source), split)
    found: dict[str, Recordings] = {}
    for name in ("train", "val"):
        chosen = [r for r in recordings if r.split == name]
        if not chosen:
            raise DataError(
                f"{source} has no `{name}` recordings by {rule}, which training needs; give more recordings "
                "or another split"
            )
        read = (recording.read() for recording in chosen)
        found[name] = Recordings([resample(r.pcm, from_hz=r.rate_hz, to_hz=SAMPLE_RATE_HZ) for r in read])
    return found
