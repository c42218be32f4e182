"""What a training is told: budget, batch, intervals."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from txl_audio.data.disturb import DisturbConfig
from txl_audio.lanes import StreamTrainConfig
from txl_audio.model.transformer import CoreConfig
from txl_audio.optim import OptimConfig
from txl_audio.tokens import ConfigError


class TrainConfig(OptimConfig):
    """Budget, batch and intervals. The budget is `steps`, or `minutes` of training time, or both
    (whichever ends first); intervals count steps, and validation time is not training time.

    ema: decay of an average of the weights, which is then what is validated, saved and sampled.
    accumulate: batches per optimiser step.
    disturb: of mu-law recordings: how they are disturbed, so that sampled sound stays what it should be, at
        some cost in likelihood.
    codebook_weights: of frames of a neural codec: how much the loss of each codebook counts in what is
        minimised, relative to their mean. Figures are without.
    fsdp: weights, gradients and what the optimiser keeps are divided among the processes (PyTorch's FSDP2)
        instead of being on each of them. Alone it does nothing.
    activation_checkpointing: backward computes what is inside a layer again instead of keeping it: less
        memory for about a third more arithmetic, and the same result.
    auxiliary: every layer predicts the targets too, layer l of n until l / 2n of the budget is used
    up (Al-Rfou et al. 2018, section 2.1). Figures are of the last layer alone.
    validate_symbols: how much of the validation split is scored on the way; the end scores all.
    save_every: steps between checkpoints, of which the newest `keep` stay.
    sample_every: a sample of `sample_seconds` of sound, or of some text, now and at the end; None: never.
    streams: with several streams over one core, how often each is trained on and in what batches.
    """

    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    lanes: int = Field(default=16, ge=1)
    segment_len: int | None = Field(default=None, ge=1)
    accumulate: int = Field(default=1, ge=1)
    disturb: DisturbConfig | None = None
    codebook_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    auxiliary: bool = False
    ema: float | None = Field(default=None, gt=0, lt=1)
    compile: bool = False
    fsdp: bool = False
    activation_checkpointing: bool = False
    log_every: int = Field(default=20, ge=1)
    validate_every: int = Field(default=500, ge=1)
    validate_symbols: int | None = Field(default=400_000, ge=1)
    save_every: int = Field(default=500, ge=1)
    keep: int = Field(default=2, ge=1)
    sample_every: int | None = Field(default=None, ge=1)
    sample_seconds: float = Field(default=2.0, gt=0)
    streams: dict[str, StreamTrainConfig] = Field(default_factory=dict)

    def setting(self, name: str, key: str) -> str:
        """The dotted key that `key` of stream `name` has its value from."""
        own = self.streams.get(name)
        return f"train.{key}" if own is None or getattr(own, key) is None else f"train.streams.{name}.{key}"

    def of_stream(self, name: str, core: CoreConfig) -> StreamTrainConfig:
        """What stream `name` is trained with; raises ConfigError where the core does not allow it."""
        own = self.streams.get(name, StreamTrainConfig())
        segment_len = own.segment_len or self.segment_len or core.segment_len
        if core.window == "segment" and segment_len != core.segment_len:
            setting = self.setting(name, "segment_len")
            raise ConfigError(
                f"{setting} {segment_len} differs from core.segment_len {core.segment_len}, and with window "
                f"segment the result depends on it; leave {setting} out"
            )
        return StreamTrainConfig(weight=own.weight, lanes=own.lanes or self.lanes, segment_len=segment_len)
