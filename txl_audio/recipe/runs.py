"""Run folders and shards to objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.codecs import MuLawCodec
from txl_audio.config import load
from txl_audio.data.shards import Document, Shards
from txl_audio.model.sequence import SequenceModel
from txl_audio.recipe.config import RunConfig
from txl_audio.tokens import ConfigError, DataError, TokenSpec


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
