"""Samples kept while training: a WAV and its picture, or a text, and all of them in TensorBoard."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from txl_audio import runtime
from txl_audio.model.sequence import SequenceModel
from txl_audio.plots import plot_audio
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Sampler
from txl_audio.sampling.text import continuation
from txl_audio.tokens import Codec, Vocabulary


def keep_sound(
    model: SequenceModel,
    codec: Codec,
    *,
    step: int,
    seconds: float,
    folder: Path,
    tag: str,
    writer: Any,
    before: np.ndarray | None = None,
    filters: Filters | None = None,
    seed: int = 0,
) -> None:
    """Writes `step_N.wav` and `step_N.png` into `folder` and adds them to a TensorBoard writer under `tag`.

    before: frames [N, K] that stand before the sound, see `Transcripts`.
    The random state of a training is not touched: the sampler has its own.
    """
    rate = codec.spec.sample_rate_hz
    prompt = None if before is None else torch.from_numpy(before.reshape(1, -1))
    sampler = Sampler(model, prompt=prompt, filters=filters, seed=seed)
    with runtime.single_thread(sampler.device):
        chunks = list(sampler.pcm(codec, samples=round(seconds * rate)))
    # A model that has learned little may end at once.
    pcm = torch.cat(chunks or [torch.zeros(1, rate // 10)], dim=1)[0].cpu()
    folder.mkdir(parents=True, exist_ok=True)
    soundfile.write(folder / f"step_{step}.wav", pcm.numpy(), rate, subtype="PCM_16")
    figure = plot_audio(pcm, rate, folder / f"step_{step}.png", title=f"step {step}, from nothing")
    writer.add_audio(tag, pcm, step, sample_rate=rate)
    writer.add_figure(tag, figure, step)


def keep_text(
    model: SequenceModel,
    vocabulary: Vocabulary,
    prompt: torch.Tensor,
    *,
    step: int,
    folder: Path,
    tag: str,
    writer: Any,
    filters: Filters | None = None,
    symbols: int = 512,
    seed: int = 0,
) -> None:
    """As `keep_sound`: `step_N.txt`, of the symbols of `prompt` [N] and `symbols` that continue them."""
    with runtime.single_thread(next(model.parameters()).device):
        pieces = continuation(
            model, vocabulary, tokens=symbols, prompt=prompt, filters=filters or Filters(), seed=seed
        )
        text = "".join(piece for piece, _ in pieces)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step_{step}.txt").write_text(text, encoding="utf-8")
    writer.add_text(tag, textwrap.indent(text, "    ", lambda _: True), step)  # TensorBoard reads Markdown
