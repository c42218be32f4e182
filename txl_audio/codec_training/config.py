"""What a codec's training is: its configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from yaml import YAMLError

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.codec_training.adversary import AdversarialConfig
from txl_audio.codecs.rvq_model import FRAME_SAMPLES, SAMPLE_RATE_HZ, RvqModelConfig
from txl_audio.config import Config, load
from txl_audio.optim import OptimConfig


class CodecTrainConfig(OptimConfig):
    """Budget, batch and intervals, as of `train.TrainConfig`.

    batch: pieces of `seconds` of sound in a step.
    log_spectra, loudness, commitment: weights of the distances of log spectra, of loudness, and between
        latents and their codes.
    adversarial: a discriminator trained against the codec; None: spectral loss alone.
    validate_recordings: how many recordings of the validation split are measured on the way; the end measures
        all.
    """

    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    batch: int = Field(default=12, ge=1)
    seconds: float = Field(default=1.0, ge=0.2)
    log_spectra: float = Field(default=0.3, ge=0)
    loudness: float = Field(default=3.0, ge=0)
    commitment: float = Field(default=0.25, ge=0)
    log_every: int = Field(default=50, ge=1)
    validate_every: int = Field(default=1000, ge=1)
    validate_recordings: int = Field(default=8, ge=1)
    save_every: int = Field(default=1000, ge=1)
    adversarial: AdversarialConfig | None = None


class CodecRunConfig(Config):
    """A whole run. `data` is a folder of audio files, `split` the rule of `txl-audio prepare --split`."""

    kind: Literal["codec"]
    name: str
    out: str | None = None
    data: str | None = None
    split: str = "every-20th"
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: str = "auto"
    precision: Literal["auto"] | runtime.Precision = "auto"
    model: RvqModelConfig = RvqModelConfig()
    train: CodecTrainConfig = CodecTrainConfig()

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / self.name


def describes_codec(path: str | Path) -> bool:
    """Whether a config file is of a codec's training: its first key level has `kind: codec`."""
    try:
        content = OmegaConf.load(path) if Path(path).is_file() else None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError):
        return False  # whoever reads it says what is wrong
    return isinstance(content, DictConfig) and content.get("kind") == "codec"


def codec_config_of_run(path: str | Path, overrides: Sequence[str], *, resume: bool) -> CodecRunConfig:
    """As `recipe.config_of_run`: a run's own config continues the run that it lies in."""
    config, folder = load(CodecRunConfig, path, overrides), RunFolder(Path(path).parent)
    own = resume and folder.config_path == Path(path) and folder.has_state()
    if own and not any(override.startswith("out=") for override in overrides):
        return config.model_copy(update={"out": str(folder.path)})
    return config


def size(path: str | Path, overrides: Sequence[str]) -> dict[str, int]:
    """Figures of the codec that a config file describes."""
    model = load(CodecRunConfig, path, overrides).model
    bits = model.codebooks * math.log2(model.codebook_size)
    parameters = sum(p.numel() for p in model.build().parameters())
    return {"parameters": parameters, "bits_per_second": round(bits * SAMPLE_RATE_HZ / FRAME_SAMPLES)}
