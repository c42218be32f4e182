"""What a run is: its configuration, and the model that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from txl_audio import runtime
from txl_audio.codecs import WaveformCodec
from txl_audio.config import Config
from txl_audio.model.embeddings import EmbeddingConfig, SampleEmbeddingConfig
from txl_audio.model.heads import HeadConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.recipe.parts import codec_of
from txl_audio.tokens import TokenSpec
from txl_audio.train import TrainConfig


class ModelConfig(Config):
    """One stream over a core. `symbols_per_frame` groups the samples of a waveform into frames."""

    symbols_per_frame: int = Field(default=1, ge=1)
    embedding: EmbeddingConfig
    core: CoreConfig
    head: HeadConfig

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        seen = self.embedding.history_samples if isinstance(self.embedding, SampleEmbeddingConfig) else None
        if seen is not None and seen < self.symbols_per_frame:
            raise ValueError(
                f"embedding.history_samples is {seen}, so the model would miss samples of its frames; "
                f"expected at least symbols_per_frame, {self.symbols_per_frame}"
            )
        return self

    def build(self, spec: TokenSpec) -> SequenceModel:
        """The model for symbols of `spec` (of any frame size, where it is a waveform)."""
        spec = spec.framed(self.symbols_per_frame)
        levels = edges = None
        if spec.modality == "waveform" and isinstance(codec := codec_of(spec), WaveformCodec):
            levels, edges = codec.levels, codec.edges
        embedding = self.embedding.build(spec, self.core.d_model, levels)
        head = self.head.build(spec, self.core.d_model, embedding, levels, edges)
        return SequenceModel(spec, embedding=embedding, core=self.core.build(), head=head)


class RunConfig(Config):
    """A whole run. `data` is a folder of shards; `out` the run folder (default runs/NAME).

    precision: of matrix products; `auto` is what this machine is faster with, and a run keeps it.
    """

    name: str
    out: str | None = None
    data: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: str = "auto"
    precision: Literal["auto"] | runtime.Precision = "auto"
    model: ModelConfig
    train: TrainConfig = TrainConfig()

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / self.name
