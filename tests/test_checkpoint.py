"""Run folders: what is written comes back, and no crash leaves less than the last save."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import tree
from tests.tiny import text_model, wave_model
from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.states import CHECKSUMS, TENSORS, VALUES, write_atomically
from txl_audio.tokens import CheckpointError, SpecError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create("name: test\n")
    return run


def state(number: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    return {"a": torch.full((2, 3), float(number)), "empty": torch.zeros(2, 0)}, {
        "step": number,
        "x": [0.1, None],
    }


def save(folder: RunFolder, step: int) -> None:
    folder.save_state(*state(step), step=step)


def loaded_step(folder: RunFolder) -> int:
    tensors, values = folder.load_state()
    assert (tensors["a"] == values["step"]).all()
    return values["step"]


def test_weights_and_spec_round_trip(folder: RunFolder) -> None:
    model = wave_model()
    folder.save_model(model, {"main": model.spec}, step=7, origin="trained")
    folder.require_weights()
    assert folder.specs() == {"main": model.spec}
    other = wave_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    folder.load_model(other)
    for (name, expected), got in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(got, expected), name
    record = json.loads((folder.path / "model.json").read_text())
    assert (record["step"], record["origin"]) == (7, "trained")


def test_state_round_trip(folder: RunFolder) -> None:
    tensors, values = state(3)
    folder.save_state(tensors, values, step=3)
    got, got_values = folder.load_state()
    assert got_values == values and set(got) == set(tensors)
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_views_are_saved_as_what_they_show(folder: RunFolder) -> None:
    """Memory is the end of a longer tensor."""
    whole = torch.arange(24.0).view(1, 12, 2)
    folder.save_state({"a": whole[:, -3:], "b": whole[:, :3].transpose(1, 2)}, {}, step=1)
    tensors, _ = folder.load_state()
    assert torch.equal(tensors["a"], whole[:, -3:]) and torch.equal(tensors["b"], whole[:, :3].mT)


def test_nothing_is_left_beside_what_was_saved(folder: RunFolder) -> None:
    model = wave_model()
    for step in range(3):
        folder.save_model(model, {"main": model.spec}, step=step, origin="trained")
        save(folder, step)
    names = {path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*")}
    assert names == {
        "config.yaml",
        "model.json",
        "model.safetensors",
        "state",
        "state/last",
        *(f"state/step_{step}" for step in (1, 2)),
        *(f"state/step_{step}/{file}" for step in (1, 2) for file in (TENSORS, VALUES, CHECKSUMS)),
    }
    assert loaded_step(folder) == 2


class CrashError(BaseException):
    """Stands for a power cut: nothing is tidied up after it."""


def crash_at(patch: pytest.MonkeyPatch, call: int) -> None:
    """Raises at the n-th rename, sync or deletion of a folder from now on, and at every later one."""
    left = call

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError
            return function(*arguments, **options)

        return counted

    patch.setattr(Path, "rename", before(Path.rename))
    patch.setattr(Path, "replace", before(Path.replace))
    patch.setattr(Path, "unlink", before(Path.unlink))
    patch.setattr(shutil, "rmtree", before(shutil.rmtree))
    patch.setattr(os, "fsync", before(lambda _: None))


CALLS = 30
"""More than a save has."""


@pytest.mark.parametrize("first", range(CALLS))
def test_crashes_leave_a_state_to_resume(
    first: int, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves, each cut off at its n-th rename, sync or deletion (the last of all never is)."""
    save(folder, 1)
    outcomes = set()
    for second in range(first % 3, CALLS, 3):
        for number, call in ((2 * second + 2, first), (2 * second + 3, second)):
            before, finished = loaded_step(folder), True
            with monkeypatch.context() as patch:
                crash_at(patch, call)
                try:
                    save(RunFolder(folder.path), number)
                except CrashError:
                    finished = False
            assert loaded_step(folder) in ({number} if finished else {before, number})
            outcomes.add(finished)
    assert outcomes == {True, False}
    save(folder, 99)
    assert loaded_step(folder) == 99
    assert {path.name for path in folder.states.path.iterdir()} >= {"last", "step_99"}
    assert not list(folder.states.path.glob("*.new"))


def test_the_newest_checkpoints_are_kept(folder: RunFolder) -> None:
    for step in range(5):
        folder.save_state(*state(step), step=step, keep=3)
    assert {path.name for path in folder.states.path.glob("step_*")} == {"step_2", "step_3", "step_4"}
    assert (folder.states.path / "last").read_text() == "step_4"
    folder.save_state(*state(5), step=5, keep=1)
    assert {path.name for path in folder.states.path.iterdir()} == {"last", "step_5"}


@pytest.mark.parametrize("file", [TENSORS, VALUES, CHECKSUMS])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    file: str, harm: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder, 10)
    save(folder, 20)
    damage(folder.states.path / "step_20" / file, harm)
    again = RunFolder(folder.path)
    assert loaded_step(again) == 10
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "step_20" in said and file in said
    assert said.endswith("continuing from step_10, the one before\n")
    save(again, 20)  # the training comes by there again
    assert loaded_step(RunFolder(folder.path)) == 20 and capsys.readouterr().err == ""


def test_when_every_checkpoint_is_damaged(folder: RunFolder) -> None:
    for step in (1, 2):
        save(folder, step)
        damage(folder.states.path / f"step_{step}" / TENSORS, "changed")
    with pytest.raises(CheckpointError, match=r"step_2.* damaged: got .*; .*step_1.* damaged: .*--overwrite"):
        folder.load_state()


def damage(path: Path, harm: str) -> None:
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:  # of numbers and brackets none is left as it was
        path.write_bytes(content[:-3] if harm == "cut" else content[:-3] + bytes(b ^ 1 for b in content[-3:]))


def test_a_step_is_saved_once(folder: RunFolder) -> None:
    save(folder, 1)
    before = (folder.states.path / "step_1" / TENSORS).stat().st_ino
    save(folder, 1)
    assert (folder.states.path / "step_1" / TENSORS).stat().st_ino == before


@pytest.mark.parametrize("name", ["state", "state.old"])
def test_a_run_with_a_single_state_is_continued(name: str, folder: RunFolder) -> None:
    """As runs were before checkpoints rotated."""
    save(folder, 1)
    old = folder.path / name
    (folder.states.path / "step_1").rename(folder.path / "single")
    shutil.rmtree(folder.states.path)
    (folder.path / "single").rename(old)
    (old / CHECKSUMS).unlink()
    again = RunFolder(folder.path)
    assert again.has_state() and loaded_step(again) == 1
    save(again, 2)
    assert loaded_step(again) == 2
    assert {p.name for p in folder.path.iterdir()} == {"config.yaml", "state"}
    assert {p.name for p in folder.states.path.iterdir()} == {"last", "step_2"}


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """As on a full disk: no file of this process can grow beyond the limit."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_last_checkpoint(folder: RunFolder) -> None:
    model = wave_model()
    save(folder, 1)
    folder.save_model(model, {"main": model.spec}, step=1, origin="trained")
    before = tree(folder.path)
    message = r"of step 2 cannot be written in .*File too large.*; see that there is room and that it may "
    with small_files(200):
        with pytest.raises(CheckpointError, match=f"the checkpoint {message}.*--resume: .*step_1 is"):
            save(folder, 2)
        with pytest.raises(CheckpointError, match=f"the weights {message}"):
            folder.save_model(model, {"main": model.spec}, step=2, origin="trained")
    assert tree(folder.path) == before
    save(folder, 2)
    assert loaded_step(RunFolder(folder.path)) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match=r"the config cannot be written in .*run: .*Not a directory"):
        folder.create("name: test\n")
    with (
        pytest.raises(CheckpointError, match=r"the lock cannot be written in .* then start again"),
        folder.locked(),
    ):
        pass


def test_a_run_has_one_writer(folder: RunFolder) -> None:
    with folder.locked():
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with (
            pytest.raises(CheckpointError, match=f"is being written by {holder}; wait for it, stop it, or"),
            RunFolder(folder.path).locked(),
        ):
            pass
        folder.remove()  # with --overwrite the lock stays
        assert [path.name for path in folder.path.iterdir()] == ["lock"]
        with pytest.raises(CheckpointError, match="is being written by"), RunFolder(folder.path).locked():
            pass
        folder.create("name: again\n")
    with RunFolder(folder.path).locked():
        pass


def test_a_file_system_without_locks_gets_a_warning(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with folder.locked():
        pass
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be locked" in said and "let no other process train in it" in said


def test_a_folder_of_something_else_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "cat.png").touch()
    with pytest.raises(CheckpointError, match="is no run folder"), RunFolder(tmp_path).locked():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["cat.png"]


def test_a_removal_that_was_cut_off_is_repeated(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in range(2):  # the states, the config
        save(RunFolder(folder.path), 1)
        with monkeypatch.context() as patch:
            crash_at(patch, call)
            with pytest.raises(CrashError):
                folder.remove()
        assert folder.config_path.exists() or not any(folder.path.iterdir())
        if not folder.config_path.exists():
            folder.create("name: test\n")


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_run_is_not_overwritten(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds a run; continue it with --resume, replace it"):
        folder.create("name: other\n")
    assert folder.config_path.read_text() == "name: test\n"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    photos = RunFolder(tmp_path / "photos")
    with pytest.raises(CheckpointError, match="exists and is no run folder"):
        photos.create("name: test\n")
    photos.remove()
    assert (tmp_path / "photos" / "cat.png").exists()
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_a_run_is_removed_with_all_that_runs_write_and_nothing_else(folder: RunFolder) -> None:
    model = wave_model()
    folder.save_model(model, {"main": model.spec}, step=0, origin="trained")
    save(folder, 1)
    for name in ("events.out.tfevents.1.host.2", "metrics.jsonl", "model.safetensors.new"):
        (folder.path / name).touch()
    for name in ("samples", "state.new", "state.old"):
        (folder.path / name).mkdir()
    for name in ("thesis.tex", "model.py", "state_of_the_art"):
        (folder.path / name).touch()
        with pytest.raises(CheckpointError, match=rf"is not replaced: it holds {name}, which no run writes"):
            folder.remove()
        (folder.path / name).unlink()
        assert folder.config_path.exists() and loaded_step(folder) == 1
    folder.remove()
    assert not folder.path.exists()


def test_folders_that_are_incomplete(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="has no weights yet"):
        folder.require_weights()
    with pytest.raises(CheckpointError, match="no saved training state to resume"):
        folder.load_state()
    with pytest.raises(CheckpointError, match=r"no model.json in .*; the run is incomplete"):
        folder.specs()
    with pytest.raises(CheckpointError, match=r"no model.safetensors in .*; the run is incomplete"):
        folder.load_model(wave_model())


def test_files_that_are_damaged(folder: RunFolder) -> None:
    model = wave_model()
    folder.save_model(model, {"main": model.spec}, step=0, origin="trained")
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        folder.load_model(model)
    (folder.path / "model.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model.json is damaged"):
        folder.specs()
    (folder.path / "model.json").write_text('{"version": 99}')
    with pytest.raises(CheckpointError, match=r"model.json has version 99, expected 2"):
        folder.specs()
    (folder.path / "model.json").write_text('{"version": 2, "streams": {"main": {"modality": "text"}}}')
    with pytest.raises(SpecError, match=r"model.json: token spec has fields \['modality'\]"):
        folder.specs()


def test_weights_of_another_model_are_named() -> None:
    model = wave_model()
    weights = wave_model(n_layer=1).state_dict()
    with pytest.raises(
        CheckpointError, match=r"weights of run do not fit its config: missing \['core.layers.1"
    ):
        load_weights(model, weights, origin="run")
    with pytest.raises(CheckpointError, match=r"unknown \['core.layers.2"):
        load_weights(model, wave_model(n_layer=3).state_dict(), origin="run")
    with pytest.raises(
        CheckpointError, match=r"core.layers.0.expand.weight \(20, 12\) instead of \(16, 12\)"
    ):
        load_weights(model, wave_model(d_ff=20).state_dict(), origin="run")
    before = text_model().state_dict()
    target = text_model()
    with pytest.raises(CheckpointError):
        load_weights(target, weights, origin="run")
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
