"""Encoding on a Ray of this machine: the bytes of the local path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.codecs.tiny_codecs import codec_settings
from tests.data.test_audio import bad_files
from tests.data.test_merge import content
from txl_audio.codecs import build_codec
from txl_audio.data.prepare import prepare
from txl_audio.tokens import DataError


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    pytest.importorskip("ray.data", reason="the extra ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files of different lengths and bad ones among them: some blocks of Ray's."""
    folder = tmp_path / "source"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for i in range(40):
        soundfile.write(folder / f"{i:02d}.flac", noise.normal(0, 0.1, 900 + 37 * i), 16_000)
    bad_files(folder)
    return folder


def test_ray_gives_the_bytes_of_one_process(
    folder: Path, tmp_path: Path, local_ray: Any, request: pytest.FixtureRequest
) -> None:
    codec = build_codec("rvq", **codec_settings("rvq", request, tmp_path))
    expected = prepare(folder, tmp_path / "expected", codec=codec, variants=2)
    report = prepare(folder, tmp_path / "out", codec=codec, variants=2, ray=True)
    assert local_ray.is_initialized()  # who started it ends it
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert report.rejected == expected.rejected and report.documents == expected.documents


def test_ray_that_is_not_installed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"pip install 'txl-audio\[ray\]'"):
        prepare(folder, tmp_path / "out", ray=True)
