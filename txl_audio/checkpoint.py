"""Run folders: what a training leaves behind and what it continues from.

    config.yaml         the resolved configuration
    model.safetensors   the weights to use (averaged ones where averaging is on)
    model.json          token spec of every stream, step, origin
    vocabulary*.json    of text streams
    state/              everything a resume needs: raw weights, optimiser, lanes, memory, random state
    metrics.jsonl       one record per line
    samples/            sound with its picture, or text, made while training; of several streams by name
    events.*            TensorBoard

Everything is written beside its place, synced, then renamed, so that a reader or a crash sees the old
or the new file, never half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from txl_audio.runtime import sync_folder
from txl_audio.tokens import CheckpointError, TokenSpec

VERSION = 2

_ENTRIES = (
    "config.yaml",
    "model.json",
    "model.safetensors",
    "vocabulary.json",
    "state",
    "state.old",
    "metrics.jsonl",
    "samples",
)
_ENTRY_PATTERNS = (*_ENTRIES, "vocabulary.*.json", "events.*", *(f"{name}.new" for name in _ENTRIES))


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    def create(self, config_yaml: str) -> None:
        """Makes the folder. Raises CheckpointError where a run already lives there."""
        if self.config_path.exists():
            raise CheckpointError(
                f"{self.path} already holds a run; continue it with --resume, replace it with "
                "--overwrite, or choose another folder with out=DIR"
            )
        if self.path.exists() and any(self.path.iterdir()):
            raise CheckpointError(f"{self.path} exists and is no run folder; choose another with out=DIR")
        self.path.mkdir(parents=True, exist_ok=True)
        self.save_config(config_yaml)

    def save_config(self, config_yaml: str) -> None:
        """Replaces the config, for a resume with another budget."""
        write_atomically(self.config_path, config_yaml.encode())

    def remove(self) -> None:
        """Deletes a run; a folder without one is left alone.

        Raises CheckpointError where something lies in it that no run writes.
        """
        if not self.config_path.exists():
            return
        names = sorted(path.name for path in self.path.iterdir())
        foreign = [name for name in names if not any(fnmatch(name, p) for p in _ENTRY_PATTERNS)]
        if foreign:
            raise CheckpointError(
                f"{self.path} is not replaced: it holds {', '.join(foreign[:3])}, which no run writes; "
                "move that away or choose another folder with out=DIR"
            )
        shutil.rmtree(self.path)

    def require_weights(self) -> None:
        """Raises CheckpointError where the run has none yet."""
        if not (self.path / "model.safetensors").is_file():
            raise CheckpointError(f"{self.path} has no weights yet (no model.safetensors); train it first")

    def vocabulary_path(self, stream: str | None = None) -> Path:
        """Where the vocabulary of a text stream lies; without a name, that of the only stream."""
        return self.path / (f"vocabulary.{stream}.json" if stream else "vocabulary.json")

    def save_model(self, model: nn.Module, specs: Mapping[str, TokenSpec], *, step: int, origin: str) -> None:
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        _save_tensors(self.path / "model.safetensors", weights)
        streams = {name: spec.to_json() for name, spec in specs.items()}
        record = {"version": VERSION, "streams": streams, "step": step, "origin": origin}
        write_atomically(self.path / "model.json", json.dumps(record, indent=1).encode())

    def specs(self) -> dict[str, TokenSpec]:
        """What every stream of the run's model reads and writes."""
        path = self.path / "model.json"
        record = _read_json(path)
        if record.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {record.get('version')}, expected {VERSION}; train or import it again"
            )
        return {n: TokenSpec.from_json(v, origin=str(path)) for n, v in record["streams"].items()}

    def load_model(self, model: nn.Module) -> None:
        """Puts the saved weights into `model`. Raises CheckpointError where names or shapes differ."""
        load_weights(model, _load_tensors(self.path / "model.safetensors"), origin=str(self.path))

    def save_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replaces `state/` as a whole."""
        new, now, old = (self.path / name for name in ("state.new", "state", "state.old"))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        _save_tensors(
            new / "state.safetensors", {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        )
        write_atomically(new / "state.json", json.dumps(dict(values)).encode())
        # A folder cannot replace a full one: between the two renames `state.old` is the one to read.
        if now.exists():
            shutil.rmtree(old, ignore_errors=True)
            now.rename(old)
        new.rename(now)
        sync_folder(self.path)
        shutil.rmtree(old, ignore_errors=True)

    def has_state(self) -> bool:
        """Whether there is something to resume."""
        return self._state_folder() is not None

    def _state_folder(self) -> Path | None:
        return next((self.path / n for n in ("state", "state.old") if (self.path / n).is_dir()), None)

    def load_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `save_state` was given. Raises CheckpointError where there is nothing to resume."""
        folder = self._state_folder()
        if folder is None:
            raise CheckpointError(
                f"{self.path} has no saved training state to resume; start it again with --overwrite"
            )
        return _load_tensors(folder / "state.safetensors"), _read_json(folder / "state.json")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, origin: str) -> None:
    """Strict loading with an error that names what differs."""
    expected = model.state_dict()
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    wrong = [
        f"{n} {tuple(weights[n].shape)} instead of {tuple(expected[n].shape)}"
        for n in expected
        if n in weights and weights[n].shape != expected[n].shape
    ]
    if missing or extra or wrong:
        parts = [
            f"missing {missing[:3]}" * bool(missing),
            f"unknown {extra[:3]}" * bool(extra),
            ", ".join(wrong[:3]),
        ]
        raise CheckpointError(
            f"the weights of {origin} do not fit its config: " + "; ".join(part for part in parts if part)
        )
    model.load_state_dict(dict(weights))


def write_atomically(path: Path, data: bytes) -> None:
    """Writes beside, syncs, renames."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    temporary = path.with_name(path.name + ".new")
    save_file(dict(tensors), temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"no {path.name} in {path.parent}; the run is incomplete")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"no {path.name} in {path.parent}; the run is incomplete")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
