"""The command line as a user sees it: exit code, standard output, standard error."""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl_audio.checkpoint import RunFolder
from txl_audio.cli import main
from txl_audio.config import parse
from txl_audio.model.sequence import SINGLE
from txl_audio.recipe import RunConfig, new_model
from txl_audio.tokens import TokenSpec

REPOSITORY = Path(__file__).resolve().parents[2]

# A constant learning rate, so that a training of 4 steps is the beginning of one of 8.
TINY = """
name: tiny
device: cpu
precision: float32
model:
  symbols_per_frame: 4
  embedding: {kind: samples, history_samples: 8, width: 16}
  core:
    {n_layer: 2, d_model: 16, n_head: 2, d_head: 8, d_ff: 32, mem_len: 16, segment_len: 16,
     window: sliding, dropout: 0.1}
  head: {kind: frame, history_samples: 8, width: 16, blocks: 1, mixtures: 2}
train:
  {steps: 4, lanes: 2, lr: 1e-2, warmup_steps: 0, final_lr: 1.0, log_every: 1,
   validate_symbols: 2000, sample_seconds: 0.02}
"""

TEXT = """
name: text
device: cpu
precision: float32
model:
  embedding: {kind: symbols}
  core: {n_layer: 1, d_model: 16, n_head: 2, d_head: 8, d_ff: 32, mem_len: 4, segment_len: 4}
  head: {kind: softmax}
"""


IDS = TokenSpec("text", 11, 1, 0.0, 0, "ids", "0")


@dataclass(frozen=True)
class Result:
    """What one command left."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def json(self) -> Any:
        """Standard output, which has to be one JSON object and nothing else."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of a failed command's standard error."""
        lines = self.err.strip().splitlines()
        assert self.code in (1, 2) and self.raw == b"", (self.code, self.err)
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        return lines[0].removeprefix("error: ")


def run(*words: object) -> Result:
    """`txl-audio WORDS` in this process, which has PyTorch loaded already."""
    out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Result(code, out.buffer.getvalue(), err.getvalue())  # pyright: ignore[reportAttributeAccessIssue]


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*words: object, cwd: Path) -> subprocess.Popen[bytes]:
    """`txl-audio WORDS` as a process of its own."""
    command = [sys.executable, "-m", "txl_audio.cli", *(str(word) for word in words)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    # Started from a background job, tests inherit an ignored SIGINT, and so would this process.
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_heed_interrupts,
    )
    atexit.register(process.kill)  # a test that fails must not leave it running
    return process


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def text_run(path: Path, spec: TokenSpec = IDS) -> Path:
    """A run folder of an untrained text model, by default over 11 symbols."""
    config = parse(RunConfig, TEXT)
    model = new_model(config, {SINGLE: spec})
    folder = RunFolder(path)
    folder.create(config.to_yaml())
    folder.save_model(model, {SINGLE: spec}, step=0, origin="test")
    return path
