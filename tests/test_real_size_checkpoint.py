"""The script that measures a checkpoint of the released size, on one of a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "real_size_checkpoint.py"


def test_it_imports_scores_and_generates(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--small"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    said = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert list(said) == ["step", "make", "import", "score", "generate", "weights:"]
    assert '"count": 999' in said["score"]
    assert "word7 word8 " in said["generate"]
