"""scripts/raw_audio_report.py: what was measured is said, what was not is left out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from safetensors.numpy import save_file

from tests.helpers import speech_like
from txl_audio.codecs.mulaw import MuLawCodec, mulaw_encode
from txl_audio.config import load
from txl_audio.data.shards import ShardWriter
from txl_audio.recipe.config import RunConfig

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import raw_audio_report as report


def record(step: int, bits: float, *, whole: bool) -> dict[str, Any]:
    at = {"kind": "validation", "step": step, "symbols": 1000 * step, "seconds": 60.0 * step}
    return at | {"bits_per_sample": bits, "count": 5000 if whole else 400, "whole_split": whole}


def write_run(folder: Path, *records: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    train = {"kind": "train", "step": 1, "symbols": 9, "seconds": 1.0, "bits_per_sample": 9.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [train, *records]))
    save_file({"a": np.zeros((20, 100), np.float32)}, folder / "model.safetensors")


def write_peer(folder: Path, bits: float) -> None:
    folder.mkdir(parents=True)
    facts = {"bits_per_sample": bits, "count": 5000, "parameters": 3_000_000}
    facts |= {"samples": 2_000_000, "seconds": 480.0, "threads": 1}
    (folder / "result.json").write_text(json.dumps(facts))


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    study, data, docs = (str(tmp_path / name) for name in ("study", "data", "docs"))
    return ["--study", study, "--data", data, "--docs", docs]


def written(words: list[str]) -> str:
    assert report.main(words) == 0
    return (Path(words[5]) / "raw_audio.md").read_text()


def test_nothing_measured_is_an_error(words: list[str], capsys: Any) -> None:
    assert report.main(words) == 1
    assert "nothing was measured" in capsys.readouterr().err


def test_models_are_compared_and_the_rest_is_left_out(words: list[str], tmp_path: Path) -> None:
    write_peer(tmp_path / "study" / "peers" / "lstm", 3.5333)
    write_run(
        tmp_path / "study" / "models" / "this_model", record(4, 3.9, whole=False), record(8, 3.05, whole=True)
    )
    write_run(tmp_path / "long", record(60, 2.999, whole=True))
    write_run(tmp_path / "begun", record(2, 4.2, whole=False))
    text = written([*words, f"an hour={tmp_path / 'long'}", f"begun={tmp_path / 'begun'}"])
    equal, more = text.split("## More runs")
    rows = [line for line in equal.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        "| this model | 3.050 | 0.00 M | 8.0 | 0.0 M | 17 |",
        "| LSTM 512 | 3.533 | 3.00 M | 8.0 | 2.0 M | 4,167 |",
    ]
    assert "(5,000 samples)" in equal and "on 1 thread(s)" in equal
    assert "| an hour | 2.999 |" in more and "| begun |" not in more
    assert "![" in more and (tmp_path / "docs" / "raw_audio_minutes.png").is_file()
    for title in ("Memory", "Part by part", "Free-running", "Data:"):
        assert title not in text


def test_studies_and_sound_are_shown(words: list[str], tmp_path: Path) -> None:
    study = tmp_path / "study"
    rows = [{"name": name, "bits_per_sample": 3.0, "steps": 7, "seconds": 480.0} for name in ("0", "0.5")]
    for kind in ("memory", "ablation"):
        (study / kind).mkdir(parents=True)
        (study / kind / "table.json").write_text(json.dumps(rows))
    (study / "ablation" / "table.md").write_text("| variant |\n|---|\n| without predictors |\n")
    free = study / "free"
    free.mkdir()
    settings = {"prompts": 1, "prompt_seconds": 0.2, "split": "val", "seconds": 0.8, "temperature": 1.0}
    (free / "results.json").write_text(json.dumps({"settings": settings | {"seed": 0}}))
    (free / "report.md").write_text("| limit |\n|---|\n\n| | model |\n|---|---|\n\n| prompt |\n|---|\n")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)).save(
        free / "spectrograms.png"
    )
    speech = speech_like(1.0, 0)
    soundfile.write(free / "a.flac", speech, 16_000)
    with ShardWriter(tmp_path / "data", spec=MuLawCodec().spec, preparation={"gain": "none"}) as writer:
        writer.append(mulaw_encode(speech), id="a", split="val", source="a.wav", sha256="0" * 64)
    text = written(words)
    assert "Data: data. gain none." in text
    assert "| 0.5 | 3.0000 | 7 |" in text and "| without predictors |" in text
    assert "| limit |" in text and "| | model |" in text and "| prompt |" not in text
    pictures = {path.name: path.stat().st_size for path in (tmp_path / "docs").glob("*.png")}
    assert set(pictures) == {f"raw_audio_{name}.png" for name in ("memory", "free_spectrograms", "truth")}
    assert all(f"({name})" in text and size <= 150_000 for name, size in pictures.items())


def test_only_what_is_missing_is_measured(words: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    write_peer(tmp_path / "study" / "peers" / "lstm", 3.5)
    called: list[list[str]] = []

    def run(line: list[str], **_: Any) -> argparse.Namespace:
        called.append(line[1:])
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(report.subprocess, "run", run)
    assert report.main([*words, "--run", "--minutes", "2"]) == 0
    scripts = [Path(line[0]).name for line in called]
    assert scripts.count("compare.py") == 3 and scripts.count("free_running.py") == 1
    trained = [line[1] for line in called if line[0].endswith("train.py")]
    assert "lstm" not in trained and {"wavenet", "samplernn", "sashimi", "megabyte"} <= set(trained)
    assert all(Path(line[0]).is_file() for line in called)
    memory = next(line for line in called if line[1].endswith("memory"))
    places = load(RunConfig, memory[-1].partition("=")[2].split()[0]).model.symbols_per_frame
    assert [word.split()[-1] for word in memory if "=" in word] == [
        f"model.core.mem_len={samples // places}" for samples in (0, 4000, 8000, 16_000, 32_000)
    ]
