"""The checkpoints that a training continues from: the last few, and which of them is good.

    step_N/             one checkpoint: state.safetensors, state.json and the checksums of all its files;
                        of sharded weights also shard-*.safetensors, one of each process
    last                the name of the newest that is whole

A checkpoint is written beside its place, synced and renamed; then `last` names it; then older ones go. So at
every moment, a power cut included, `last` names a whole one. Reading checks sizes and checksums, and goes
back to the checkpoint before where a disk has lost what was written.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from txl_audio import parallel, runtime
from txl_audio.data.audio import file_sha256
from txl_audio.distributed import SHARDS, Place, read_shards, write_shards
from txl_audio.tokens import CheckpointError

TENSORS, VALUES, CHECKSUMS, LAST = "state.safetensors", "state.json", "checksums.json", "last"


class States:
    """The rotating checkpoints in `path`, the folder `state` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: int | None = None  # the step that this object has written, or read as whole

    @property
    def last(self) -> Path | None:
        """Folder of the newest checkpoint; None where there is none."""
        return next(iter(self._candidates()), None)

    def save(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        *,
        step: int,
        keep: int = 2,
        shards: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds the checkpoint of `step` and deletes all but the newest `keep`.

        Tensors and values are the first rank's. Of `shards` every rank writes its own: then all have to call.
        Raises OSError or SafetensorError, with the checkpoints of before as they were.
        """
        if step == self._known:
            return  # the same training at the same step
        name = f"step_{step}"
        new = self.path / f"{name}.new"
        if runtime.rank() == 0:
            self.path.mkdir(exist_ok=True)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
        try:
            if shards is not None:
                parallel.wait()
                write_shards(new, shards)
            self._known = step
            if runtime.rank() > 0:
                return
            save_tensors(new / TENSORS, tensors)
            write_atomically(new / VALUES, json.dumps(dict(values)).encode())
            files = [TENSORS, VALUES, *sorted(path.name for path in new.glob(SHARDS))]
            checksums = {file: _checksum(new / file) for file in files}
            write_atomically(new / CHECKSUMS, json.dumps(checksums).encode())
            # What has this name is no good: its writer ended before `last` named it, or it was damaged.
            shutil.rmtree(self.path / name, ignore_errors=True)
            new.rename(self.path / name)
            runtime.sync_folder(self.path)
            write_atomically(self.path / LAST, name.encode())
        except BaseException:
            self._known = None
            if runtime.rank() == 0:
                shutil.rmtree(new, ignore_errors=True)  # its room is needed
            raise
        self._tidy(keep)

    def load(self, place: Place | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest checkpoint that is whole, of any number of processes; a line names each that is not.

        place: where to read tensors to, for processes with shards: then all have to call. Raises
        CheckpointError where there is none.
        """
        reasons: list[str] = []
        for folder in self._candidates():
            try:
                _verify(folder)
                content = _read(folder, place)
            except (CheckpointError, OSError) as error:
                reasons.append(str(error))
                continue
            if runtime.rank() == 0:
                for reason in reasons:
                    sys.stderr.write(f"warning: {reason}; continuing from {folder.name}, the one before\n")
            self._known = _step(folder)
            return content
        if reasons:
            raise CheckpointError(f"{'; '.join(reasons)}; no checkpoint is left, start with --overwrite")
        raise CheckpointError(
            f"{self.path.parent} has no saved training state to resume; start it again with --overwrite"
        )

    def _candidates(self) -> list[Path]:
        """Newest first. Not what is newer than `last`: its writer did not get to the end."""
        steps = {n: folder for folder in self.path.glob("step_*") if (n := _step(folder)) is not None}
        last = self.path / LAST
        named = _step(self.path / last.read_text(encoding="utf-8").strip()) if last.is_file() else None
        found = [steps[n] for n in sorted(steps, reverse=True) if named is None or n <= named]
        # Before there were several, the one lay here and, between two renames, in `state.old`.
        return found + [f for f in (self.path, self.path.with_name("state.old")) if (f / VALUES).is_file()]

    def _tidy(self, keep: int) -> None:
        kept = {LAST, *(folder.name for folder in self._candidates()[:keep])}
        for path in self.path.iterdir():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for name in ("state.old", "state.new"):
            shutil.rmtree(self.path.with_name(name), ignore_errors=True)


def _step(folder: Path) -> int | None:
    """Of a folder called `step_N`, N."""
    number = folder.name.removeprefix("step_")
    return int(number) if number != folder.name and number.isdecimal() else None


def _verify(folder: Path) -> None:
    """CheckpointError, on every rank, where a checkpoint is not what was written. Ranks share the reading."""
    wrong: str | None = None
    try:
        # The one of before had no checksums.
        written = read_json(folder / CHECKSUMS) if _step(folder) is not None else {}
        for file, expected in list(written.items())[runtime.rank() :: runtime.world_size()]:
            path = folder / file
            got = _checksum(path) if path.is_file() else "no file"
            if got != expected:
                raise CheckpointError(f"{path} is damaged: got {got}, {expected} was written")
    except (CheckpointError, OSError) as error:
        wrong = str(error)
    found = [reason for reason in parallel.collected(wrong) if reason is not None]
    if found:
        raise CheckpointError(found[0])


def _read(folder: Path, place: Place | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint; CheckpointError where something of it is missing."""
    values = read_json(folder / VALUES)
    if place is None and not any(folder.glob(SHARDS)):
        return load_tensors(folder / TENSORS), values
    return read_shards(folder, place), values


def _checksum(path: Path) -> str:
    return f"{path.stat().st_size} bytes with sha256 {file_sha256(path)}"


def write_atomically(path: Path, data: bytes) -> None:
    """Writes beside, syncs, renames. What cannot be written leaves nothing behind."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    runtime.sync_folder(path.parent)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """As `write_atomically`, a safetensors file."""
    temporary = path.with_name(path.name + ".new")
    try:
        own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(own, temporary, metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    runtime.sync_folder(path.parent)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Raises CheckpointError where the file is missing or no safetensors file."""
    if not path.is_file():
        raise CheckpointError(f"no {path.name} in {path.parent}; the run is incomplete")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is missing or no JSON."""
    if not path.is_file():
        raise CheckpointError(f"no {path.name} in {path.parent}; the run is incomplete")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
