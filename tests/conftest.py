"""Fixtures for every test: one thread, fixed seeds, the shared reference data."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numba start their pools

from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests import helpers
from txl_audio import runtime

torch.set_num_threads(1)

# No deadline: a busy machine is no failure. Derandomised: a red run is red again.
hypothesis.settings.register_profile("txl_audio", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("txl_audio")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    runtime.seed_everything(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference data: $TXL_AUDIO_SHARED, else `shared` beside the repository.

    Without it the test is skipped, or fails where TXL_AUDIO_REQUIRE_SHARED=1.
    """
    named = os.environ.get("TXL_AUDIO_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "golden").is_dir() or not (folder / "data").is_dir():
        why = f"no reference data at {folder} (expected its folders golden and data); set TXL_AUDIO_SHARED"
        if os.environ.get("TXL_AUDIO_REQUIRE_SHARED") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return folder


@pytest.fixture(scope="session")
def speech_like() -> Callable[[float, int], NDArray[np.float32]]:
    """`speech_like(seconds, seed)`: float32 [N] at 16 kHz; see tests/helpers.py."""
    return helpers.speech_like
