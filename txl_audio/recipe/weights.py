"""Weights from elsewhere as run folders, and back."""

from __future__ import annotations

from pathlib import Path

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.interop import Layout, read_folder, write_folder
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.recipe.config import ModelConfig, RunConfig
from txl_audio.recipe.runs import load_run
from txl_audio.tokens import CheckpointError


def import_run(source: str | Path, out: str | Path, *, segment_len: int | None = None) -> SequenceModel:
    """Makes a run folder of weights from elsewhere; see `interop.read_folder`."""
    _require_new(out)
    folder = RunFolder(out)
    imported = read_folder(source, segment_len=segment_len)
    parts = ModelConfig(embedding=imported.embedding, core=imported.core, head=imported.head)
    config = RunConfig(name=Path(out).name, out=str(out), precision="float32", model=parts)
    with runtime.no_initialisation():
        model = parts.build({SINGLE: imported.spec})
    assert isinstance(model, SequenceModel)
    load_weights(model, imported.weights, origin=str(source))
    folder.create(config.to_yaml())
    if imported.vocabulary is not None:
        imported.vocabulary.save(folder.vocabulary_path())
    folder.save_model(model, {SINGLE: imported.spec}, step=0, origin=f"imported from {Path(source).name}")
    return model


def export_run(run: str | Path, out: str | Path, *, layout: Layout, stream: str | None = None) -> None:
    """Writes a run's weights in a layout of others; see `interop.write_folder`."""
    _require_new(out)
    _, model = load_run(run, device="cpu", stream=stream)
    write_folder(model, out, layout=layout)


def _require_new(out: str | Path) -> None:
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{out} exists already, expected a new folder; choose another --out")
