"""Trainings that end badly: killed at any moment, without one of their processes, held by another."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import Workspace
from tests.e2e.harness import REPOSITORY, run
from txl_audio.checkpoint import RunFolder

ENDLESS = ("train.steps=1000000", "train.save_every=1", "train.validate_every=1000000")


def until(true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Waits for something that a process does."""
    deadline = time.monotonic() + 120
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_training_that_is_killed_ends_as_one_that_is_not() -> None:
    """Two kills at random moments and one while a checkpoint is written; the script does it 20 times."""
    command = [sys.executable, REPOSITORY / "scripts" / "kill_training.py", "--kills", "3"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 kills in" in done.stdout and "the same to the bit as without" in done.stdout
    assert done.stdout.count("while writing") == 1


# The second process is a fork of the first, which has PyTorch loaded already.
TWO = """
import os, sys
import txl_audio.recipe
from txl_audio.cli import main
second = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if second else "1"
if second:
    print(second, flush=True)
main(sys.argv[1:])
"""


def test_a_lost_process_ends_the_others_and_a_restart_continues(workspace: Workspace) -> None:
    out = workspace.folder / "lost"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", TWO, "train", str(workspace.config), f"out={out}", *ENDLESS]
    first = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    atexit.register(first.kill)
    assert first.stdout is not None
    second, folder = int(first.stdout.readline()), RunFolder(out)
    until(folder.has_state, first)
    os.kill(second, signal.SIGKILL)
    said = first.communicate(timeout=300)[1].decode()
    assert first.returncode == 1 and "Traceback" not in said
    assert "error: process 0 of 2 has lost another one (" in said
    assert "; see what that one said, then start all again with --resume" in said
    step = folder.load_state()[1]["at"]["step"]
    _, result = workspace.train("lost", f"train.steps={step + 2}", "--resume")
    assert result.code == 0, result.err
    assert folder.load_state()[1]["at"]["step"] == step + 2


def test_a_run_that_is_being_trained_is_left_alone(workspace: Workspace) -> None:
    out, result = workspace.train("held", "train.steps=1")
    assert result.code == 0
    holder = os.fork()
    if holder == 0:
        with RunFolder(out).locked():
            (out.parent / "held.now").touch()
            signal.pause()
    try:
        while not (out.parent / "held.now").exists():
            time.sleep(0.01)
        for word in ("--resume", "--overwrite"):
            _, refused = workspace.train("held", "train.steps=2", word)
            who = f"process {holder} on {socket.gethostname()}"
            assert refused.code == 1 and f"{out} is being written by {who}; wait for it" in refused.error
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert RunFolder(out).load_state()[1]["at"]["step"] == 1
    _, result = workspace.train("held", "train.steps=2", "--resume")
    assert result.code == 0, result.err  # a lock does not outlive its process


def test_a_run_that_saved_nothing_begins_anew(workspace: Workspace) -> None:
    whole, result = workspace.train("never_killed")
    assert result.code == 0
    out = workspace.folder / "killed_at_once"
    RunFolder(out).create((whole / "config.yaml").read_text())
    (out / "metrics.jsonl").write_text("{}\n")
    _, result = workspace.train(out.name, "--resume")
    assert result.code == 0 and "has saved nothing yet; it begins anew" in result.err
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_weights_without_a_checkpoint_are_not_replaced(workspace: Workspace) -> None:
    """They are imported ones, or all that was kept of a training."""
    out, result = workspace.train("weights_alone", "train.steps=1")
    assert result.code == 0
    (out / "state").rename(workspace.folder / "elsewhere")
    before = (out / "model.safetensors").read_bytes()
    _, result = workspace.train(out.name, "--resume")
    assert "has no saved training state to resume" in result.error
    assert (out / "model.safetensors").read_bytes() == before


def test_an_unwritable_folder_is_one_line(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("train", workspace.config, f"out={tmp_path / 'file' / 'run'}")
    assert result.code == 1
    assert "cannot be written in" in result.error and "then start again" in result.error


def test_a_training_that_diverges_says_so_in_one_line(workspace: Workspace) -> None:
    words = ("train.lr=1e30", "train.clip=1e30", "train.steps=50", "train.save_every=1")
    out, result = workspace.train("diverged", *words)
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.code == 1 and len(lines) == 1
    assert "not finite" in lines[0] and "lower train.lr" in lines[0]
    RunFolder(out).load_state()
