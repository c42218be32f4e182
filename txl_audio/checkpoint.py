"""Run folders: what a training leaves behind and what it continues from.

    config.yaml         the resolved configuration
    model.safetensors   the weights to use (averaged ones where averaging is on)
    model.json          token spec of every stream, step, origin
    vocabulary*.json    of text streams
    state/              checkpoints (see `states`): raw weights, optimiser, lanes, memory, random state
    metrics.jsonl       one record per line
    samples/            sound with its picture, or text, made while training; of several streams by name
    diverged_*          the batches whose loss was not finite
    events.*            TensorBoard
    lock                held by the process that trains

Everything is written beside its place, synced, then renamed, so that a reader or a crash sees the old
or the new file, never half of one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from txl_audio.distributed import Place
from txl_audio.lock import LOCK_FILE, locked
from txl_audio.states import States, load_tensors, read_json, save_tensors, write_atomically
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
    LOCK_FILE,
)
_ENTRY_PATTERNS = (
    *_ENTRIES,
    "vocabulary.*.json",
    "events.*",
    "diverged_*.safetensors",
    *(f"{name}.new" for name in _ENTRIES),
)
_BEFORE_CREATION = {LOCK_FILE, "config.yaml.new"}
"""What a process that was killed before a run began may have left."""


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.states = States(self.path / "state")

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
        self._require_own()
        with self._writing("the config"):
            self.path.mkdir(parents=True, exist_ok=True)
            self.save_config(config_yaml)

    def _require_own(self) -> None:
        """Raises CheckpointError where the folder is neither new, nor empty, nor a run's."""
        if self.config_path.exists() or not self.path.exists():
            return
        if any(path.name not in _BEFORE_CREATION for path in self.path.iterdir()):
            raise CheckpointError(f"{self.path} exists and is no run folder; choose another with out=DIR")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder, which is made where there is none, against other processes that train.

        Raises CheckpointError where one of them holds it, or where it is no run folder or cannot be written.
        """
        self._require_own()
        with ExitStack() as held:
            with self._writing("the lock"):
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(self.path))
            yield

    def save_config(self, config_yaml: str) -> None:
        """Replaces the config, for a resume with another budget."""
        write_atomically(self.config_path, config_yaml.encode())

    def remove(self) -> None:
        """Empties a run folder; a folder without a run is left alone.

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
        # The config last: a removal that was cut off can be repeated. The lock stays, with who holds it.
        for path in sorted(self.path.iterdir(), key=lambda path: path == self.config_path):
            if path.name != LOCK_FILE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def require_weights(self) -> None:
        """Raises CheckpointError where the run has none yet."""
        if not (self.path / "model.safetensors").is_file():
            raise CheckpointError(f"{self.path} has no weights yet (no model.safetensors); train it first")

    def vocabulary_path(self, stream: str | None = None) -> Path:
        """Where the vocabulary of a text stream lies; without a name, that of the only stream."""
        return self.path / (f"vocabulary.{stream}.json" if stream else "vocabulary.json")

    def save_model(self, model: nn.Module, specs: Mapping[str, TokenSpec], *, step: int, origin: str) -> None:
        """Replaces the weights to use. Raises CheckpointError where they cannot be written."""
        streams = {name: spec.to_json() for name, spec in specs.items()}
        record = {"version": VERSION, "streams": streams, "step": step, "origin": origin}
        with self._writing(f"the weights of step {step}"):
            save_tensors(self.path / "model.safetensors", model.state_dict())
            write_atomically(self.path / "model.json", json.dumps(record, indent=1).encode())

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        """A safetensors file of its own. Raises CheckpointError where it cannot be written."""
        with self._writing(name):
            save_tensors(self.path / name, tensors, metadata)

    def specs(self) -> dict[str, TokenSpec]:
        """What every stream of the run's model reads and writes."""
        path = self.path / "model.json"
        record = read_json(path)
        if record.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {record.get('version')}, expected {VERSION}; train or import it again"
            )
        return {n: TokenSpec.from_json(v, origin=str(path)) for n, v in record["streams"].items()}

    def load_model(self, model: nn.Module) -> None:
        """Puts the saved weights into `model`. Raises CheckpointError where names or shapes differ."""
        load_weights(model, load_tensors(self.path / "model.safetensors"), origin=str(self.path))

    def save_state(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        *,
        step: int,
        keep: int = 2,
        shards: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds a checkpoint; see `States.save`. Raises CheckpointError where it cannot be written."""
        with self._writing(f"the checkpoint of step {step}"):
            self.states.save(tensors, values, step=step, keep=keep, shards=shards)

    def has_state(self) -> bool:
        """Whether there is something to resume."""
        return self.states.last is not None

    def has_begun(self) -> bool:
        """Whether there is anything that a training has saved."""
        return self.has_state() or (self.path / "model.safetensors").exists()

    def load_state(self, place: Place | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `save_state` was given last, shards among it; see `States.load`. Raises CheckpointError."""
        return self.states.load(place)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Says of what cannot be written what is lost and what to do."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            last = self.states.last
            then = "start again" if last is None else f"continue with --resume: {last} is as it was"
            raise CheckpointError(
                f"{what} cannot be written in {self.path}: {error}; see that there is room and that it may "
                f"be written, then {then}"
            ) from error


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
