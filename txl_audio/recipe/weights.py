"""Weights from elsewhere, as run folders."""

from __future__ import annotations

from pathlib import Path

from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.interop import read_folder
from txl_audio.model.sequence import SequenceModel
from txl_audio.recipe.config import ModelConfig, RunConfig
from txl_audio.tokens import CheckpointError


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
