"""From a RunConfig to objects; the only place that knows every component."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from txl_audio import cost, runtime
from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.codecs import CODECS, MuLawCodec, WaveformCodec
from txl_audio.config import Config, load
from txl_audio.data.shards import Document, Shards
from txl_audio.interop import read_folder
from txl_audio.model.embeddings import EmbeddingConfig, SampleEmbeddingConfig
from txl_audio.model.heads import HeadConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.report import Reporter
from txl_audio.sampling.gallery import keep_sample
from txl_audio.tokens import CheckpointError, Codec, ConfigError, DataError, SpecError, TokenSpec
from txl_audio.train import TrainConfig, Trainer


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


class SplitDocuments:
    """The documents of one split of a shard folder, as flat symbol arrays."""

    def __init__(self, shards: Shards, split: str) -> None:
        self.shards = shards
        self.documents: Sequence[Document] = shards.of_split(split)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int, /) -> np.ndarray:
        return self.shards.symbols(self.documents[index]).reshape(-1)

    @property
    def symbols(self) -> int:
        """Symbols in the split."""
        return sum(d.frames for d in self.documents) * self.shards.spec.symbols_per_frame

    @property
    def data_id(self) -> str:
        """Hash of which symbols these are and of their order, from the index."""
        facts = [(d.id, d.frames, d.sha256, d.gain, d.trim) for d in self.documents]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def codec_of(spec: TokenSpec) -> Codec:
    """The codec that made a stream's symbols. Raises SpecError for one that is not known."""
    if spec.name not in CODECS:
        raise SpecError(
            f"the model or data holds symbols of the codec {spec.name!r}, which is not known here; "
            f"known: {', '.join(sorted(CODECS))}"
        )
    codec = CODECS[spec.name]().build(frame_samples=spec.symbols_per_frame)
    codec.spec.require(spec, here=f"the codec {spec.name}", there="the model or data")
    return codec


def codec_for_sound(spec: TokenSpec) -> Codec:
    """The codec that turns a stream's symbols into sound; SpecError where they are none."""
    if spec.modality == "text":
        raise SpecError("this model writes text symbols, expected an audio model; use one trained on audio")
    return codec_of(spec)


def open_shards(path: str | Path, model: SequenceModel, *, origin: str) -> Shards:
    """Shards that hold the symbols of the model of `origin`; SpecError otherwise."""
    shards = Shards.open(path)
    framed = shards.spec.framed(model.spec.symbols_per_frame)
    framed.require(model.spec, here=f"the data {path}", there=origin)
    return shards


def load_run(path: str | Path, *, device: str = "auto") -> tuple[RunConfig, SequenceModel]:
    """Config and trained model of a run folder, in eval mode. Raises CheckpointError, ConfigError."""
    folder = RunFolder(path)
    folder.require()
    config = load(RunConfig, folder.config_path)
    model = config.model.build(folder.spec())
    folder.load_model(model)
    return config, model.to(runtime.device(device)).eval()


def new_model(config: RunConfig, spec: TokenSpec) -> SequenceModel:
    """A freshly initialised model, the same for the same seed."""
    runtime.seed_everything(config.seed)
    return config.model.build(spec)


BITS = {"waveform": "bits_per_sample", "codes": "bits_per_code", "text": "bits_per_symbol"}
"""Name of the bits figure of a modality."""


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False) -> bool:
    """Trains the run that `config` describes; false where it was interrupted, saved.

    Raises ConfigError, DataError, SpecError or CheckpointError before anything is written where the
    config, the data or the run folder cannot be used.
    """
    if config.data is None:
        raise ConfigError("training needs data; set data=DIR to a folder made by `txl-audio prepare`")
    shards = Shards.open(config.data)
    device = runtime.device(config.device)
    runtime.keep_freed_memory()
    folder = RunFolder(config.folder)
    saved = _run_to_resume(folder, config) if resume else None
    wanted = saved.precision if saved and config.precision == "auto" else config.precision
    precision = runtime.choose_precision(wanted, device)
    config = config.model_copy(update={"precision": precision})
    model = new_model(config, shards.spec).to(device)
    documents = SplitDocuments(shards, "train")
    trainer = Trainer(
        model,
        config.train,
        train=documents,
        valid=SplitDocuments(shards, "val"),
        folder=folder,
        seed=config.seed,
        precision=precision,
        data_id=documents.data_id,
    )
    # Both draw random numbers, so they come before the random state is restored.
    flops = cost.training_flops_per_symbol(
        model, lanes=config.train.lanes, segment_len=trainer.segment_len, precision=precision
    )
    machine_flops = runtime.matmul_flops(device, getattr(torch, precision))
    if resume:
        trainer.resume()
        model.spec.require(folder.spec(), here=f"the data {config.data}", there=f"the run {folder.path}")
        folder.save_config(config.to_yaml())
    else:
        if overwrite:
            _remove_run(folder)
        folder.create(config.to_yaml())
    with Reporter(
        folder.path,
        unit=BITS[model.spec.modality],
        flops_per_symbol=flops,
        machine_flops=machine_flops,
        resumed_at=trainer.at.step,
    ) as reporter:
        if model.spec.modality != "text":
            trainer.sample = partial(
                keep_sample,
                codec=codec_for_sound(model.spec),
                seconds=config.train.sample_seconds,
                folder=folder.path / "samples",
                writer=reporter.writer,
            )
        return trainer.run(reporter)


def config_of_run(path: str | Path, overrides: Sequence[str], *, resume: bool) -> RunConfig:
    """The config that `train` is called with. Raises ConfigError.

    A run's own config continues the run that it lies in, wherever that was moved to.
    """
    config, folder = load(RunConfig, path, overrides), RunFolder(Path(path).parent)
    if resume and folder.config_path == Path(path) and folder.has_state():
        moved = folder.path.resolve() != config.folder.resolve()
        if moved and not any(override.startswith("out=") for override in overrides):
            return config.model_copy(update={"out": str(folder.path)})
    return config


def _run_to_resume(folder: RunFolder, config: RunConfig) -> RunConfig:
    """The config of the run in `folder`; CheckpointError where `config` is of another model."""
    if not folder.config_path.is_file():
        raise CheckpointError(f"no run to resume at {folder.path}; train it without --resume, or set out=DIR")
    saved = load(RunConfig, folder.config_path)
    if saved.model != config.model:
        raise CheckpointError(
            f"{folder.path} holds another model than the config describes; resume with "
            f"`txl-audio train {folder.config_path} --resume`"
        )
    return saved


def _remove_run(folder: RunFolder) -> None:
    """Deletes a run; CheckpointError where the folder is anything else."""
    try:
        if folder.config_path.exists():
            load(RunConfig, folder.config_path)
    except ConfigError as error:
        raise CheckpointError(
            f"{folder.path} is not replaced: its config.yaml is of no run ({error}); move the folder away "
            "or choose another with out=DIR"
        ) from error
    folder.remove()


def describe(target: str | Path, overrides: Sequence[str] = ()) -> SequenceModel:
    """The model of a run folder, or a fresh one of a config file.

    A config whose data is not prepared yet is taken for mu-law speech.
    """
    if Path(target).is_dir():
        if overrides:
            raise ConfigError("overrides change a config file, not a trained run; give the config file")
        return load_run(target, device="cpu")[1]
    config = load(RunConfig, target, overrides)
    known = config.data is not None and (Path(config.data) / "index.json").is_file()
    spec = Shards.open(str(config.data)).spec if known else MuLawCodec().spec
    return new_model(config, spec)


def import_run(source: str | Path, out: str | Path, *, segment_len: int | None = None) -> SequenceModel:
    """Makes a run folder of weights from elsewhere; see `interop.read_folder`."""
    folder = RunFolder(out)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise CheckpointError(f"{out} exists already, expected a new folder; choose another --out")
    imported = read_folder(source, segment_len=segment_len)
    parts = ModelConfig(embedding=imported.embedding, core=imported.core, head=imported.head)
    config = RunConfig(name=Path(out).name, out=str(out), precision="float32", model=parts)
    model = config.model.build(imported.spec)
    load_weights(model, imported.weights, origin=str(source))
    folder.create(config.to_yaml())
    folder.save_model(model, model.spec, step=0, origin=f"imported from {Path(source).name}")
    return model


def read_tokens(path: str | Path) -> torch.Tensor:
    """The tensor `tokens` of a safetensors file; DataError where there is none."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from error
    if "tokens" not in tensors:
        raise DataError(f"{path} holds {sorted(tensors)}, expected a tensor `tokens` [N + 1, B]")
    return tensors["tokens"]


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file; DataError where that is not possible."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    except SafetensorError as error:
        raise DataError(f"cannot write {path}: {error}") from error
