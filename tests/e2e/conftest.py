"""One small set of recordings, prepared once, and one model trained on it for four steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import soundfile

from tests.e2e.harness import TINY, Result, run, tree
from tests.helpers import SAMPLE_RATE_HZ, speech_like

BAD = {"corrupt.wav": b"RIFF but nothing else", "empty.wav": b"", "text.wav": b"hello\n"}


@dataclass(frozen=True)
class Workspace:
    """source: 6 good files of 0.2 s to 0.45 s and 3 bad ones; of the good ones 2 are for validation."""

    folder: Path
    source: Path
    data: Path
    config: Path
    run: Path
    prepared: Result
    trained: Result

    def train(self, name: str, *words: object) -> tuple[Path, Result]:
        """Trains into a new run folder, or an old one with --resume."""
        out = self.folder / name
        return out, run("train", self.config, f"out={out}", *words)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("e2e")
    source, data, config = folder / "wav", folder / "data", folder / "tiny.yaml"
    source.mkdir()
    for index in range(6):
        pcm = speech_like(0.2 + 0.05 * index, seed=index)
        soundfile.write(source / f"{index}.wav", pcm, SAMPLE_RATE_HZ)
    for name, content in BAD.items():
        (source / name).write_bytes(content)
    config.write_text(TINY + f"data: {data}\n")
    prepared = run("prepare", source, "--out", data, "--split", "every-3rd", "--json")
    trained = run(
        "train",
        config,
        f"out={folder / 'run'}",
        "train.validate_every=2",
        "train.sample_every=2",
    )
    return Workspace(folder, source, data, config, folder / "run", prepared, trained)


@pytest.fixture
def unchanged(workspace: Workspace) -> Callable[[], bool]:
    """Tells whether data and run are byte for byte what they were when the test began."""
    before = tree(workspace.data), tree(workspace.run)
    return lambda: (tree(workspace.data), tree(workspace.run)) == before
