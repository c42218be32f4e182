"""Samples kept while training: a WAV, its picture, and both in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import soundfile
import torch

from txl_audio import runtime
from txl_audio.model.sequence import SequenceModel
from txl_audio.plots import plot_audio
from txl_audio.sampling.sampler import Sampler
from txl_audio.tokens import Codec


def keep_sample(
    model: SequenceModel, codec: Codec, *, step: int, seconds: float, folder: Path, writer: Any, seed: int = 0
) -> None:
    """Writes `step_N.wav` and `step_N.png` into `folder` and adds them to a TensorBoard writer.

    The random state of a training is not touched: the sampler has its own.
    """
    rate = codec.spec.sample_rate_hz
    sampler = Sampler(model, seed=seed)
    with runtime.single_thread(sampler.device):
        pcm = torch.cat(list(sampler.pcm(codec, samples=round(seconds * rate))), dim=1)[0].cpu()
    folder.mkdir(parents=True, exist_ok=True)
    soundfile.write(folder / f"step_{step}.wav", pcm.numpy(), rate, subtype="PCM_16")
    figure = plot_audio(pcm, rate, folder / f"step_{step}.png", title=f"step {step}, from nothing")
    writer.add_audio("sample", pcm, step, sample_rate=rate)
    writer.add_figure("sample", figure, step)
