"""What the training of a codec tells people; as `txl_audio.report`, with losses and qualities for bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from txl_audio.codecs.rvq_model import SAMPLE_RATE_HZ
from txl_audio.model.sequence import SINGLE
from txl_audio.plots import plot_spectrograms
from txl_audio.report import Reporter, StreamFacts


class CodecReporter(Reporter):
    """Progress bar, lines, metrics.jsonl, TensorBoard and samples of a codec's training."""

    def __init__(self, folder: Path, *, resumed_at: int = 0) -> None:
        facts = StreamFacts("loss", 0.0)
        super().__init__(folder, streams={SINGLE: facts}, machine_flops=1.0, resumed_at=resumed_at)

    def progress(self, step: int, share: float, *, loudness: float, sound_per_s: float) -> None:
        """loudness: how far it is off; sound_per_s: seconds of sound trained on in a second."""
        shown = f"step {step}  loudness off by {loudness:.1%}  {sound_per_s:.1f} s of sound/s"
        self.bar.update(self.task, completed=min(1.0, share), rate=shown)

    def figures(self, kind: str, at: Mapping[str, float], values: Mapping[str, float]) -> None:
        """One record of `kind` train or validation; the bar stands for training lines on a terminal."""
        self._record(kind, SINGLE, at, values)
        if kind != "train" or not self.console.is_terminal:
            said = "  ".join(f"{name} {value:.4g}" for name, value in values.items() if "stage" not in name)
            name = {"train": "training"}.get(kind, kind)
            self.console.print(
                f"step {at['step']:>6}  {at['seconds']:>6.0f} s  {name} {said}", soft_wrap=True
            )

    def sample(self, step: int, original: Tensor, decoded: Tensor) -> None:
        """A recording [N] and what the codec makes of it: sound and spectrograms, also in TensorBoard."""
        folder = self.folder / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "original.wav").exists():
            soundfile.write(folder / "original.wav", original.numpy(), SAMPLE_RATE_HZ, subtype="PCM_16")
        soundfile.write(folder / f"step_{step}.wav", decoded.numpy(), SAMPLE_RATE_HZ, subtype="PCM_16")
        sounds = {"original": original, f"step {step}": decoded}
        figure = plot_spectrograms(sounds, SAMPLE_RATE_HZ, folder / f"step_{step}.png", columns=1)
        self.writer.add_audio("sample", torch.clamp(decoded, -1, 1), step, sample_rate=SAMPLE_RATE_HZ)
        self.writer.add_figure("sample", figure, step)
