"""Run folders: what is written comes back, and no crash leaves less than the last save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import text_model, wave_model
from txl_audio.checkpoint import RunFolder, load_weights, write_atomically
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
    folder.save_state(tensors, values)
    got, got_values = folder.load_state()
    assert got_values == values and set(got) == set(tensors)
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_views_are_saved_as_what_they_show(folder: RunFolder) -> None:
    """Memory is the end of a longer tensor."""
    whole = torch.arange(24.0).view(1, 12, 2)
    folder.save_state({"a": whole[:, -3:], "b": whole[:, :3].transpose(1, 2)}, {})
    tensors, _ = folder.load_state()
    assert torch.equal(tensors["a"], whole[:, -3:]) and torch.equal(tensors["b"], whole[:, :3].mT)


def test_nothing_is_left_beside_what_was_saved(folder: RunFolder) -> None:
    model = wave_model()
    for step in range(3):
        folder.save_model(model, {"main": model.spec}, step=step, origin="trained")
        folder.save_state(*state(step))
    names = {path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*")}
    assert names == {
        "config.yaml",
        "model.json",
        "model.safetensors",
        "state",
        "state/state.json",
        "state/state.safetensors",
    }
    assert loaded_step(folder) == 2


class CrashError(Exception):
    """Stands for a power cut."""


def crash_at(patch: pytest.MonkeyPatch, call: int) -> None:
    """Raises at the n-th rename or deletion of a folder from now on."""
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
    patch.setattr(shutil, "rmtree", before(shutil.rmtree))


@pytest.mark.parametrize("second", range(7))
@pytest.mark.parametrize("first", range(7))
def test_crashes_leave_a_state_to_resume(
    first: int, second: int, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves, each cut off at its n-th rename or deletion (the last of seven never is)."""
    folder.save_state(*state(1))
    for number, call in ((2, first), (3, second)):
        before, finished = loaded_step(folder), True
        with monkeypatch.context() as patch:
            crash_at(patch, call)
            try:
                folder.save_state(*state(number))
            except CrashError:
                finished = False
        assert loaded_step(folder) in ({number} if finished else {before, number})
    folder.save_state(*state(99))
    assert loaded_step(folder) == 99


def test_between_the_two_renames_the_old_state_is_read(folder: RunFolder) -> None:
    folder.save_state(*state(1))
    (folder.path / "state").rename(folder.path / "state.old")
    assert loaded_step(folder) == 1
    folder.save_state(*state(2))
    assert loaded_step(folder) == 2 and not (folder.path / "state.old").exists()


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
    folder.save_state(*state(1))
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
