"""Weights from elsewhere as run folders, and back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.interop import FIRST_MEMORY, Layout, read_folder, write_folder
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.recipe.config import ModelConfig, RunConfig
from txl_audio.recipe.runs import load_run, vocabulary_of
from txl_audio.tokens import CheckpointError


def import_run(source: str | Path, out: str | Path, *, segment_len: int | None = None) -> SequenceModel:
    """Makes a run folder of weights from elsewhere; see `interop.read_folder`."""
    with _new_folder(out) as path:
        imported = read_folder(source, segment_len=segment_len)
        parts = ModelConfig(embedding=imported.embedding, core=imported.core, head=imported.head)
        config = RunConfig(name=Path(out).name, out=str(out), precision="float32", model=parts)
        with runtime.no_initialisation():
            model = parts.build({SINGLE: imported.spec})
        assert isinstance(model, SequenceModel)
        load_weights(model, imported.weights, origin=str(source))
        folder = RunFolder(path)
        folder.create(config.to_yaml())
        if imported.vocabulary is not None:
            imported.vocabulary.save(folder.vocabulary_path())
        folder.save_model(model, {SINGLE: imported.spec}, step=0, origin=f"imported from {Path(source).name}")
    return model


def export_run(run: str | Path, out: str | Path, *, layout: Layout, stream: str | None = None) -> list[str]:
    """Writes a run's weights in a layout of others; see `interop.write_folder`.

    Returns warnings: what the layout's own code will do otherwise.
    """
    with _new_folder(out) as path:
        _, model = load_run(run, device="cpu", stream=stream)
        try:
            vocabulary = vocabulary_of(run, stream)
        except CheckpointError:  # it has none
            vocabulary = None
        write_folder(model, path, layout=layout, vocabulary=vocabulary)
    ours, theirs = model.core.config.first_memory, FIRST_MEMORY[layout]
    if ours == theirs:
        return []
    return [
        f"this model begins a text with first_memory {ours}, code for the layout {layout} with {theirs}, "
        "so there the first symbols of a text score differently"
    ]


@contextmanager
def _new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when all is written; CheckpointError where that has content."""
    place = Path(out).resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{out} exists already, expected a new folder; choose another --out")
    partial = place.with_name(place.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        runtime.sync_folder(partial)
        if place.exists():
            place.rmdir()
        partial.rename(place)
        runtime.sync_folder(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
