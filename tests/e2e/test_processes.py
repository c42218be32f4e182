"""What only a process of its own shows: signals and pipes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Workspace
from tests.e2e.harness import TEXT, start
from txl_audio.checkpoint import RunFolder
from txl_audio.config import parse
from txl_audio.data.text import CharacterVocabulary
from txl_audio.model.sequence import SINGLE
from txl_audio.recipe import RunConfig, new_model


def first_records(path: Path, process: subprocess.Popen[bytes], *, seconds: float = 300) -> None:
    """Waits until a training has written something to metrics.jsonl."""
    deadline = time.monotonic() + seconds
    while not (path.is_file() and path.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_training_saves_and_continues(workspace: Workspace, number: signal.Signals) -> None:
    out = workspace.folder / f"stopped_{number.name}"
    endless = (
        "train.steps=1000000",
        f"out={out}",
        "train.validate_every=1000000",
        "train.save_every=1000000",
    )
    process = start("train", workspace.config, *endless, cwd=workspace.folder)
    first_records(out / "metrics.jsonl", process)
    process.send_signal(number)
    printed, said = process.communicate(timeout=300)
    assert (process.returncode, printed) == (1, b"")
    assert b"Traceback" not in said
    assert f"saved; continue with: txl-audio train {out}/config.yaml --resume" in said.decode()
    step = json.loads((out / "model.json").read_text())["step"]
    assert step >= 3 and RunFolder(out).load_state()[1]["at"]["step"] == step

    _, resumed = workspace.train(out.name, f"train.steps={step + 2}", "--resume")
    assert resumed.code == 0
    whole, result = workspace.train(f"whole_{number.name}", f"train.steps={step + 2}")
    assert result.code == 0
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert RunFolder(out).load_state()[0].keys() == RunFolder(whole).load_state()[0].keys()
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in steps if r["kind"] == "train"] == list(range(1, step + 3))


def test_a_player_that_stops_listening_ends_the_sampling(workspace: Workspace) -> None:
    process = start("sample", workspace.run, "--seconds", 600, "--raw", cwd=workspace.folder)
    assert process.stdout is not None and process.stderr is not None
    assert len(process.stdout.read(3200)) == 3200  # streamed: this is here long before the end
    process.stdout.close()
    assert process.wait(timeout=300) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_ctrl_c_ends_other_commands_in_one_line(workspace: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "long.wav"
    process = start("sample", workspace.run, "--seconds", 600, "--out", out, cwd=workspace.folder)
    deadline = time.monotonic() + 300
    while not list(tmp_path.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=300)
    assert (process.returncode, printed, said) == (1, b"", b"interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_verb(workspace: Workspace) -> None:
    process = start("--help", cwd=workspace.folder)
    printed, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (0, b"")
    for verb in ("prepare", "train", "evaluate", "score", "sample", "import", "info", "bench"):
        assert f"\n  {verb} ".encode() in printed


def test_a_reader_that_has_enough_ends_the_text(tmp_path: Path) -> None:
    """As `sample RUN | head -c 1`."""
    vocabulary, config, folder = (
        CharacterVocabulary("abcdefghij\n"),
        parse(RunConfig, TEXT),
        RunFolder(tmp_path / "run"),
    )
    folder.create(config.to_yaml())
    specs = {SINGLE: vocabulary.spec}
    folder.save_model(new_model(config, specs), specs, step=0, origin="test")
    vocabulary.save(folder.vocabulary_path())
    process = start("sample", folder.path, "--tokens", 10_000_000, cwd=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=300) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
