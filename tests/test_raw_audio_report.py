"""scripts/raw_audio_report.py: what was measured is said, what was not is left out."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from safetensors.numpy import save_file

from tests.helpers import speech_like
from txl_audio import recipe
from txl_audio.codecs.mulaw import MuLawCodec, mulaw_encode
from txl_audio.config import load
from txl_audio.data.shard_writer import ShardWriter
from txl_audio.listening import describe
from txl_audio.model.sequence import SINGLE
from txl_audio.recipe.config import RunConfig

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import raw_audio_report as report
import raw_audio_study as study


def record(step: int, bits: float, *, whole: bool) -> dict[str, Any]:
    at = {"kind": "validation", "step": step, "symbols": 1000 * step, "seconds": 60.0 * step}
    return at | {"bits_per_sample": bits, "count": 5000 if whole else 400, "whole_split": whole}


def write_run(folder: Path, *records: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    train = {"kind": "train", "step": 1, "symbols": 9, "seconds": 1.0, "bits_per_sample": 9.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [train, *records]))
    (folder / "config.yaml").write_text("name: tiny\n")
    save_file({"a": np.zeros((20, 100), np.float32)}, folder / "model.safetensors")


def write_peer(folder: Path, bits: float) -> None:
    folder.mkdir(parents=True)
    facts = {"bits_per_sample": bits, "count": 5000, "parameters": 3_000_000}
    facts |= {"samples": 2_000_000, "seconds": 480.0, "threads": 1}
    (folder / "result.json").write_text(json.dumps(facts))


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [word for name in ("study", "data", "docs") for word in (f"--{name}", str(tmp_path / name))]


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


VERDICT = {"limit": "level", "value": 1.0, "worst": 2.0, "bound": 6.0, "below": True, "in_every": False}
VERDICT |= {"kept_by": 1, "excerpts": 1, "holds": True}


def write_heard(folder: Path, run: Path, **changes: Any) -> None:
    """What scripts/free_running.py leaves of a run's weights."""
    folder.mkdir(parents=True)
    own = {"prompts": 1, "first": 20, "prompt_seconds": 0.2, "split": "val", "seconds": 0.8, "seed": 1}
    own |= {"temperature": 1.0, "top_k": None, "top_p": None, "tails": 1e-4, "weights": "int8"}
    minute = {"real_time_factor": 0.25, "state_bytes": 1234, "peak_memory_bytes": 5e6}
    results = {
        "arguments": [],
        "weights_sha256": hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest(),
        "backend": "compiled",
        "settings": own,
        "verdicts": [VERDICT],
        "statistics": {"model": describe(speech_like(1.0, 0)).to_json()},
        "excerpts": [{"prompt": "book/a", "minute": 1}, {"prompt": "book/a", "minute": 2}],
        "minutes": [minute, minute | {"real_time_factor": 0.26}],
    }
    (folder / "results.json").write_text(json.dumps(results | changes))
    noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
    Image.fromarray(noise).save(folder / "spectrograms.png")  # larger than a report may hold
    Image.fromarray(noise[:8]).save(folder / "minutes.png")


def test_studies_and_sound_are_shown(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "study"
    sizes = {"parameters": 10_000, "steps": 7, "seconds": 480.0}
    for kind, bits in {
        "memory": {"0": 3.1, "0.5": 3.0},
        "ablation": {"this model": 3.0, "AdamW": 3.05, "10 mixtures": 2.99},
        "ablation_seed_1": {"this model": 3.002, "10 mixtures": 2.997},
    }.items():
        (folder / kind).mkdir(parents=True)
        rows = [{"name": name, "bits_per_sample": value, **sizes} for name, value in bits.items()]
        (folder / kind / "table.json").write_text(json.dumps(rows))
    run, free = folder / "models" / "this_model", folder / "free"
    write_run(run, record(8, 3.05, whole=True))
    write_heard(free, run)
    write_heard(folder / "hour", run)
    speech = speech_like(1.0, 0)
    (free / "book").mkdir()
    soundfile.write(free / "book" / "a.flac", speech, 16_000)
    with ShardWriter(tmp_path / "data", spec=MuLawCodec().spec, preparation={"gain": "none"}) as writer:
        writer.append(mulaw_encode(speech), id="book/a", split="val", source="a.wav", sha256="0" * 64)
    text = written(words)
    assert "Data: data. gain none." in text
    assert "| 0.5 | 3.0000 | 8.0 |" in text and "7 steps of equal samples" in text
    assert "| AdamW | 3.0500 | +0.0500 | - | 0.01 M | 7 |" in text
    assert "| 10 mixtures | 2.9900 | -0.0100 | -0.0050 | 0.01 M | 7 |" in text
    assert text.count("| level | 1 | 2 | under 6 | 1 of 1 | yes |") == 2 and "|  | model |" in text
    assert "(the first 20 in their order are passed over)" in text
    assert "tails 0.0001, weights int8, seed 1; backend compiled." in text
    assert "took 0.250 of its time, the last 0.260; the state had 1,234 bytes, then 1,234" in text
    pictures = {path.name: path.stat().st_size for path in (tmp_path / "docs").glob("*.png")}
    names = ("memory", "free_spectrograms", "free_minutes", "truth")
    assert set(pictures) == {f"raw_audio_{name}.png" for name in names}
    assert all(f"({name})" in text and size <= 150_000 for name, size in pictures.items())


def test_what_was_heard_of_other_weights_is_left_out(words: list[str], tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "study" / "models" / "this_model"
    write_run(run, record(8, 3.05, whole=True))
    write_heard(tmp_path / "study" / "free", run)
    assert "## Free-running" in written(words)
    save_file({"a": np.ones((20, 100), np.float32)}, run / "model.safetensors")
    assert "## Free-running" not in written(words)
    assert "is not of the weights of" in capsys.readouterr().err


def test_what_was_measured_earlier_stays_and_gives_way(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "study"
    write_peer(folder / "peers" / "lstm", 3.5)
    (folder / "memory").mkdir()
    row = {"name": "1", "bits_per_sample": 3.0, "parameters": 1, "steps": 7, "seconds": 60.0}
    (folder / "memory" / "table.json").write_text(json.dumps([row]))
    write_run(tmp_path / "model")
    write_heard(folder / "free", tmp_path / "model")
    first = written([*words, "--model", str(tmp_path / "model")])
    shutil.rmtree(folder)
    assert written([*words, "--model", str(tmp_path / "model")]) == first
    write_peer(folder / "peers" / "lstm", 3.4)
    write_peer(folder / "peers" / "wavenet", 3.6)
    text = written([*words, "--model", str(tmp_path / "model")])
    assert "| LSTM 512 | 3.400 |" in text and "| WaveNet, 2 x 10 layers | 3.600 |" in text
    assert "3.500" not in text and "| 1 | 3.0000 | 1.0 |" in text


class Asked:
    """Stands for subprocess.run; the trainings of the ablation leave a table."""

    def __init__(self, study: Path) -> None:
        self.study, self.lines = study, list[list[str]]()

    def __call__(self, line: list[str], **_: Any) -> argparse.Namespace:
        self.lines.append(line[1:])
        if Path(line[1]).name == "raw_audio_costs.py":
            costs = dict.fromkeys((word.partition("=")[0] for word in line if "=" in word), 0.5)
            costs |= {name: 0.25 * place for place, name in enumerate(study.PEERS, 1) if name in line}
            Path(line[2]).write_text(json.dumps(costs))
        if line[2] == str(self.study / "ablation"):
            names = [word.partition("=")[0] for word in line if "=" in word]
            rows = [{"name": name, "bits_per_sample": 3.0} for name in names]
            rows[-1]["bits_per_sample"] = 3.5
            (self.study / "ablation" / "table.json").write_text(json.dumps(rows))
        return argparse.Namespace(returncode=0)

    def of(self, script: str) -> list[list[str]]:
        return [line[1:] for line in self.lines if Path(line[0]).name == script]

    def variants(self, kind: str) -> dict[str, list[str]]:
        """Config and overrides by name."""
        line = next(words for words in self.of("compare.py") if words[0] == str(self.study / kind))
        return {word.partition("=")[0]: word.partition("=")[2].split() for word in line if "=" in word}


@pytest.fixture
def asked(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """After --run where nothing was measured but an LSTM, for other minutes."""
    stub = Asked(Path(words[1]))
    write_peer(stub.study / "peers" / "lstm", 3.5)
    monkeypatch.setattr(study.subprocess, "run", stub)
    monkeypatch.setattr(study.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(report, "write", lambda _: "written")
    assert report.main([*words, "--run", "--minutes", "2", "--steps", "9"]) == 0
    return stub


def test_all_is_asked_for(asked: Asked) -> None:
    assert all(Path(line[0]).is_file() for line in asked.lines)
    (costs,) = asked.of("raw_audio_costs.py")
    # Two minutes hold 240 steps of half a second.
    trained = {words[0]: words[1:3] for words in asked.of("train.py")}
    steps = {"lstm": "240", "wavenet": "160", "samplernn": "120", "sashimi": "96", "megabyte": "80"}
    assert trained == {name: ["--steps", count] for name, count in steps.items()}
    assert set(trained) < set(costs) and costs[-1].startswith("this model=configs/")
    budgets = {Path(words[0]).name: words[1:3] for words in asked.of("compare.py")}
    assert budgets == {
        "models": ["--steps", "240"],
        "memory": ["--equal-steps", "9"],
        "ablation": ["--steps", "9"],
        "ablation_seed_1": ["--steps", "9"],
    }
    free, hour = asked.of("free_running.py")
    for words in (free, hour):
        assert words[words.index("--first") + 1] == "20" and words[words.index("--seed") + 1] == "1"
    assert hour[hour.index("--seconds") + 1] == "3600" and "--no-audio" in hour


def test_parts_can_be_asked_for(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Asked(Path(words[1]))
    monkeypatch.setattr(study.subprocess, "run", stub)
    monkeypatch.setattr(report, "write", lambda _: "written")
    assert report.main([*words, "--run", "memory", "hour", "--steps", "9"]) == 0
    assert [Path(line[0]).name for line in stub.lines] == ["compare.py", "free_running.py"]
    assert "memory" in stub.lines[0][1] and "3600" in stub.lines[1]


# What is compared has to be alike in all but what is asked about, and no two trainings are the same.
def test_variants_are_models_of_equal_steps(asked: Asked) -> None:
    def loaded(kind: str) -> dict[str, RunConfig]:
        return {name: load(RunConfig, words[0], words[1:]) for name, words in asked.variants(kind).items()}

    def seconds(config: RunConfig) -> float:
        return config.model.core.mem_len * config.model.symbols_per_frame / 16_000

    kinds = {kind: loaded(kind) for kind in ("models", "memory", "ablation", "ablation_seed_1")}
    base = kinds["models"]["this model"]
    configs = [config for variants in kinds.values() for config in variants.values()]
    for config in configs:
        recipe.new_model(config, {SINGLE: MuLawCodec().spec})
        core, places = config.model.core, config.model.symbols_per_frame
        assert config.train.lanes * core.segment_len * places == 16_384
        assert config.data == base.data
    single = kinds["models"]["this model, P 1"]
    assert single.model.symbols_per_frame == 1 and seconds(single) == seconds(base)
    memories = kinds["memory"]
    assert {float(name) for name in memories} == {0, seconds(base), 0.25, 0.5, 1, 2}
    for name, config in memories.items():
        assert seconds(config) == float(name) and config.model.symbols_per_frame == 16
    parts = kinds["ablation"]
    assert next(iter(parts)) == "this model"
    assert {config.model.symbols_per_frame for config in parts.values()} == {2, 4, 8, 16}
    embeddings = [config.model.embedding for config in parts.values()]
    assert sum(embedding is not None and embedding.kind == "symbols" for embedding in embeddings) == 1
    for variants in (memories, parts):
        texts = [config.to_yaml() for config in variants.values()]
        assert len(set(texts)) == len(texts)
    again = kinds["ablation_seed_1"]  # all but the last, which was not close
    assert list(again) == list(parts)[:-1]
    assert all(c.to_yaml() == parts[n].to_yaml().replace("seed: 0", "seed: 1") for n, c in again.items())


def test_what_was_asked_for_is_not_done_again(
    asked: Asked, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asked.study / "models" / "this_model"
    write_run(run, record(8, 3.05, whole=True))
    lstm = next(line for line in asked.of("train.py") if line[0] == "lstm")
    (asked.study / "peers" / "lstm" / "result.json").write_text(json.dumps({"arguments": lstm}))
    free, hour = asked.of("free_running.py")
    write_heard(asked.study / "free", run, arguments=free)
    write_heard(asked.study / "hour", run, arguments=hour, weights_sha256="of others")

    def left(minutes: str) -> list[str]:
        asked.lines.clear()
        assert report.main([*words, "--run", "--minutes", minutes, "--steps", "9"]) == 0
        lines = [*asked.of("train.py"), *asked.of("free_running.py")]
        return [Path(line[line.index("--out") + 1]).name for line in lines]

    assert left("2") == ["wavenet", "samplernn", "sashimi", "megabyte", "hour"]
    assert left("3") == ["lstm", "wavenet", "samplernn", "sashimi", "megabyte", "hour"]
    save_file({"a": np.ones((20, 100), np.float32)}, run / "model.safetensors")
    assert left("2")[-2:] == ["free", "hour"]
