"""What a run is: its configuration, and the model that follows from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from torch import nn

from txl_audio import runtime
from txl_audio.codecs import WaveformCodec
from txl_audio.codecs.predictors import PredictorsConfig
from txl_audio.config import Config
from txl_audio.data.transcripts import Order
from txl_audio.evaluate import EvaluateConfig
from txl_audio.model.contracts import Waveform
from txl_audio.model.embeddings import EmbeddingConfig, SampleEmbeddingConfig
from txl_audio.model.heads import HeadConfig
from txl_audio.model.sequence import SINGLE, JointModel, SequenceModel
from txl_audio.model.transformer import CoreConfig, TransformerXL
from txl_audio.recipe.parts import codec_of
from txl_audio.sampling.compiled import Weights, unsupported
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Backend
from txl_audio.tokens import ConfigError, SpecError, TokenSpec
from txl_audio.train_config import TrainConfig


class StreamSettings(Config):
    """How the symbols of one stream are read.

    symbols_per_frame: groups the samples of a waveform into frames.
    delay_frames: reads every place of a neural codec's frame so many steps later than the place before it.
    predictors: adaptive linear predictors, whose predictions embedding and head get; for waveforms.
    transcripts: trains on what is said beside the sound of a neural codec, in these orders: `speak` has the
    text before the sound, `transcribe` after it; see `data.transcripts`.
    codec_weights: folder of a neural codec's weights; null looks where the codec does.
    vocab_size: of the data; only needed to build the model (`txl-audio info`) before they are prepared.
    """

    symbols_per_frame: int = Field(default=1, ge=1)
    delay_frames: int = Field(default=0, ge=0)
    transcripts: tuple[Order, ...] = ()
    codec_weights: str | None = None
    vocab_size: int | None = Field(default=None, ge=1)
    predictors: PredictorsConfig | None = None


class StreamConfig(StreamSettings):
    """How one stream of symbols enters and leaves the core.

    mem_len, segment_len: for one of several streams over a core, instead of the core's.
    """

    embedding: EmbeddingConfig
    head: HeadConfig
    mem_len: int | None = Field(default=None, ge=0)
    segment_len: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> StreamConfig:
        seen = self.embedding.history_samples if isinstance(self.embedding, SampleEmbeddingConfig) else None
        if seen is not None and seen < self.symbols_per_frame:
            raise ValueError(
                f"embedding.history_samples is {seen}, so the model would miss samples of its frames; "
                f"expected at least symbols_per_frame, {self.symbols_per_frame}"
            )
        return self

    def build(self, spec: TokenSpec, core: TransformerXL) -> SequenceModel:
        """The model for symbols of `spec` (of any frame size, where it is a waveform).

        Raises ConfigError or SpecError where parts do not fit the symbols.
        """
        if self.vocab_size not in (None, spec.vocab_size):
            raise ConfigError(
                f"the config says vocab_size {self.vocab_size}, the data have {spec.vocab_size} symbols "
                f"({spec.name}); prepare them as the config expects, or leave vocab_size out"
            )
        if spec.modality != "codes" or self.symbols_per_frame != 1:
            spec = spec.framed(self.symbols_per_frame)
        spec = spec.delayed(self.delay_frames)
        stage = waveform = None
        if spec.modality == "waveform" and isinstance(codec := codec_of(spec), WaveformCodec):
            if self.predictors is not None:
                if self.embedding.kind != "samples" and self.head.kind != "frame":
                    raise ConfigError(
                        "predictors are read by embedding samples and head frame, got "
                        f"{self.embedding.kind} and {self.head.kind}; use one of them or leave them out"
                    )
                stage = self.predictors.build(codec.levels)
                spec = spec.staged(stage.hash)
            waveform = Waveform(codec.levels, codec.edges, stage)
        elif self.predictors is not None:
            raise ConfigError(
                f"predictors are of waveforms, got {spec.name} ({spec.modality}); leave predictors out"
            )
        d_model = core.config.d_model
        embedding = self.embedding.build(spec, d_model, waveform)
        head = self.head.build(spec, d_model, embedding, waveform)
        if self.mem_len is not None or self.segment_len is not None:
            core = core.view(mem_len=self.mem_len, segment_len=self.segment_len)
        return SequenceModel(spec, embedding=embedding, core=core, head=head, stage=stage)


class ModelConfig(StreamSettings):
    """A core with one stream (`embedding`, `head` and what else StreamConfig has), or several `streams`."""

    embedding: EmbeddingConfig | None = None
    core: CoreConfig
    head: HeadConfig | None = None
    streams: dict[str, StreamConfig] = Field(default_factory=dict)

    @field_validator("streams")
    @classmethod
    def _names(cls, streams: dict[str, StreamConfig]) -> dict[str, StreamConfig]:
        # Weights are found by these names, as attributes of a module.
        for name in streams:
            if not re.fullmatch("[a-z][a-z0-9_]*", name):
                raise ValueError(
                    f"a stream is called {name!r}, expected lower-case letters, digits and _, a letter first"
                )
            if hasattr(nn.ModuleDict(), name):
                raise ValueError(f"a stream is called {name!r}, which a PyTorch module needs; choose another")
        return streams

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if bool(self.streams) == (self.embedding is not None or self.head is not None):
            raise ValueError("give embedding and head for one stream, or streams for several")
        own = [n for n, f in StreamSettings.model_fields.items() if getattr(self, n) != f.default]
        if self.streams and own:
            raise ValueError(f"{', '.join(own)}: of one stream, but there are several; move it into streams")
        self.parts()
        return self

    def parts(self) -> dict[str, StreamConfig]:
        """Every stream by name; a single one is called SINGLE."""
        if self.streams:
            return dict(self.streams)
        if self.embedding is None or self.head is None:
            raise ValueError("a model needs an embedding and a head")
        settings = {name: getattr(self, name) for name in StreamSettings.model_fields}
        return {SINGLE: StreamConfig(**settings, embedding=self.embedding, head=self.head)}

    def build(self, specs: Mapping[str, TokenSpec]) -> SequenceModel | JointModel:
        """The model for streams of these symbols. Raises ConfigError or SpecError where they do not fit."""
        parts, core = self.parts(), self.core.build()
        if set(specs) != set(parts):
            raise SpecError(
                f"the data are of the streams {', '.join(specs)}, the model's are {', '.join(parts)}"
            )
        streams = {name: part.build(specs[name], core) for name, part in parts.items()}
        return JointModel(core, streams) if self.streams else streams[SINGLE]


class SampleConfig(Config):
    """How a run is sampled unless one says otherwise; the fields are those of `sampling.filters.Filters`.

    tails: of the streams that are waveforms. weights: of the compiled backend, where it is what runs.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    tails: float = 0.0
    weights: Weights = "float32"

    @model_validator(mode="after")
    def _check(self) -> SampleConfig:
        Filters(self.temperature, self.top_k, self.top_p, self.tails)
        return self

    def filters(self, spec: TokenSpec, **given: Any) -> Filters:
        """Filters for a stream, with what is `given` (not None) instead. Raises ConfigError."""
        own = self.model_dump(exclude={"weights"})
        if spec.modality != "waveform":
            own["tails"] = 0.0
        return Filters(**own | {name: value for name, value in given.items() if value is not None})

    def weights_for(self, model: SequenceModel, backend: Backend = "auto") -> Weights:
        """`weights` where the compiled backend runs with them, else the model's own."""
        compiled = backend in ("auto", "compiled") and unsupported(model, self.weights) is None
        return self.weights if compiled else "float32"


class SetConfig(Config):
    """One set of a mix: its folder or URL, and the share of frames that training reads of it."""

    path: str
    weight: float = Field(default=1.0, gt=0)


class MixConfig(Config):
    """Several sets of the same symbols, read in one stream by weights; see `data.stream.TokenStream`."""

    mix: tuple[SetConfig, ...] = Field(min_length=1)


class RunConfig(Config):
    """A whole run. `data` is a folder of shards, its URL or a mix of such, or one for each stream; `out` the
    run folder (default runs/NAME).

    precision: of matrix products; `auto` is what this machine is faster with, and a run keeps it.
    evaluate: how the run is scored, and by the end of its training too, which does not do it dynamically.
    sample: how it is sampled.
    """

    name: str
    out: str | None = None
    data: str | MixConfig | dict[str, str | MixConfig] | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: str = "auto"
    precision: Literal["auto"] | runtime.Precision = "auto"
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if isinstance(self.data, dict) and set(self.data) != set(self.model.parts()):
            raise ValueError(
                f"data names {', '.join(self.data)}, expected the model's streams, "
                f"{', '.join(self.model.parts())}"
            )
        unknown = sorted(set(self.train.streams) - set(self.model.streams))
        if unknown:
            raise ValueError(
                f"train.streams names {', '.join(unknown)}, expected of the model's streams: "
                f"{', '.join(self.model.streams) or 'it has none'}"
            )
        if isinstance(self.data, str | MixConfig) and self.model.streams:
            raise ValueError(f"data is one folder, expected one for each of {', '.join(self.model.streams)}")
        return self

    def part(self, stream: str | None = None) -> StreamConfig:
        """Of a stream of the model; without a name, of the only one."""
        parts = self.model.parts()
        return parts[stream or next(iter(parts))]

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / self.name

    @property
    def data_folders(self) -> dict[str, str | MixConfig]:
        """Shard folder, URL or mix of every stream; empty where the config names none."""
        if self.data is None:
            return {}
        return self.data if isinstance(self.data, dict) else {SINGLE: self.data}
