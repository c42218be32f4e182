"""Speech and text over one core, from files to sound and words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import soundfile

from tests.e2e.conftest import Workspace
from tests.e2e.harness import Result, run, tree
from txl_audio.checkpoint import RunFolder

JOINT = """
name: joint
device: cpu
precision: float32
model:
  core:
    {n_layer: 2, d_model: 16, n_head: 2, d_head: 8, d_ff: 32, mem_len: 16, segment_len: 16,
     window: sliding, dropout: 0.1}
  streams:
    speech:
      symbols_per_frame: 4
      embedding: {kind: samples, history_samples: 8, width: 16}
      head: {kind: frame, history_samples: 8, width: 16, blocks: 1, mixtures: 2}
    text:
      embedding: {kind: symbols}
      head: {kind: softmax}
      mem_len: 24
train:
  {steps: 6, lanes: 2, lr: 1e-2, warmup_steps: 0, final_lr: 1.0, log_every: 1, validate_symbols: 2000,
   sample_every: 6, sample_seconds: 0.02, streams: {speech: {weight: 2.0}, text: {lanes: 3}}}
"""


@dataclass(frozen=True)
class Joint:
    config: Path
    run: Path
    trained: Result


@pytest.fixture(scope="module")
def joint(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Joint:
    folder = tmp_path_factory.mktemp("joint")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    prepared = run("prepare", folder / "text.txt", "--dataset", "chars", "--out", folder / "text")
    assert prepared.code == 0, prepared.err
    config = folder / "joint.yaml"
    config.write_text(JOINT + f"data: {{speech: {workspace.data}, text: {folder / 'text'}}}\n")
    trained = run("train", config, f"out={folder / 'run'}")
    return Joint(config, folder / "run", trained)


def test_both_streams_are_trained_and_reported(joint: Joint) -> None:
    assert joint.trained.code == 0, joint.trained.err
    assert "validation speech" in joint.trained.err and "validation text" in joint.trained.err
    records = [json.loads(line) for line in (joint.run / "metrics.jsonl").read_text().splitlines()]
    trained = [r["stream"] for r in records if r["kind"] == "train"]
    assert trained.count("speech") == 4 and trained.count("text") == 2
    assert all(("bits_per_sample" in r) == (r["stream"] == "speech") for r in records)
    assert (joint.run / "vocabulary.text.json").is_file()
    samples = joint.run / "samples"
    assert soundfile.info(samples / "speech" / "step_6.wav").frames == 320
    # Of the prompt and of what continues it, a symbol each.
    assert len((samples / "text" / "step_6.txt").read_text()) == 32 + 512


def test_m14_resume(joint: Joint, tmp_path: Path) -> None:
    def train(*words: object) -> None:
        result = run("train", joint.config, f"out={tmp_path / 'run'}", *words)
        assert result.code == 0, result.err

    train("train.steps=3")
    train("train.steps=6", "--resume")
    expected, got = (RunFolder(p).load_state()[0] for p in (joint.run, tmp_path / "run"))
    assert expected.keys() == got.keys()
    assert all(bool((expected[name] == got[name]).all()) for name in expected)


def test_settings_that_streams_cannot_have_in_common(joint: Joint, tmp_path: Path) -> None:
    result = run("train", joint.config, f"out={tmp_path / 'run'}", "evaluate.mem_len=8", "evaluate.lanes=2")
    assert result.code == 2 and "evaluate.mem_len would be the same for speech, text" in result.error
    assert not (tmp_path / "run").exists()
    text = run("evaluate", joint.run, "--stream", "text", "evaluate.mem_len=8", "--json").json
    assert text["mem_len"] == 8


def test_each_stream_is_evaluated(joint: Joint) -> None:
    speech = run("evaluate", joint.run, "--stream", "speech", "--json").json
    text = run("evaluate", joint.run, "--stream", "text", "--json").json
    assert "bits_per_sample" in speech and "bits_per_character" in text
    records = [json.loads(line) for line in (joint.run / "metrics.jsonl").read_text().splitlines()]
    last = {r["stream"]: r for r in records if r["kind"] == "validation"}
    assert speech["bits_per_sample"] == pytest.approx(last["speech"]["bits_per_sample"], rel=1e-5)
    assert text["bits_per_character"] == pytest.approx(last["text"]["bits_per_character"], rel=1e-5)
    assert text["mem_len"] == 24 and speech["mem_len"] == 16


def test_each_stream_is_sampled(joint: Joint, tmp_path: Path) -> None:
    sound = run(
        "sample", joint.run, "--stream", "speech", "--seconds", 0.02, "--out", tmp_path / "a.wav", "--json"
    )
    assert sound.json["samples"] == 320
    text = run("sample", joint.run, "--stream", "text", "--prompt", "the ", "--tokens", 7, "--json").json
    assert text["symbols"] == 7 and len(text["text"]) == 11 and text["text"].startswith("the ")


def test_a_stream_has_to_be_named(joint: Joint) -> None:
    before = tree(joint.run)
    commands: list[Callable[[], Result]] = [
        lambda: run("evaluate", joint.run),
        lambda: run("sample", joint.run, "--seconds", 1, "--out", "x.wav"),
        lambda: run("score", joint.run, "x.wav"),
    ]
    for command in commands:
        result = command()
        assert result.code == 2
        assert "got no --stream, but the run" in result.error and "speech, text" in result.error
    assert "got --stream music" in run("evaluate", joint.run, "--stream", "music").error
    assert tree(joint.run) == before


def test_info_of_several_streams(joint: Joint) -> None:
    figures = run("info", joint.run, "--json").json
    assert set(figures) == {"parameters", "streams"}
    assert figures["streams"]["speech"]["symbols_per_frame"] == 4
    assert figures["streams"]["text"]["mem_len_frames"] == 24
    assert "speech" in run("info", joint.config).out
