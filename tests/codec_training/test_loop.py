"""Training a codec: a run folder that is a codec, exact resume, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from txl_audio.cli import main
from txl_audio.codec_training import CodecRunConfig, describes_codec, loop, train_codec
from txl_audio.codecs import build_codec
from txl_audio.codecs.rvq import load_codec
from txl_audio.codecs.rvq_model import RvqModelConfig
from txl_audio.config import load, parse, validate
from txl_audio.data.prepare import prepare
from txl_audio.data.shards import Shards
from txl_audio.model.sequence import SINGLE
from txl_audio.optim import hidden_matrices
from txl_audio.tokens import CheckpointError, ConfigError, TokenSpec

pytest.importorskip("vector_quantize_pytorch")

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs" / "codec").glob("*.yaml"))
MODEL = {"codebooks": 2, "codebook_size": 16, "latent": 8, "width": 24, "blocks": 1}
TRAIN = {"batch": 3, "seconds": 0.4, "warmup_steps": 2, "lr": 3e-3, "log_every": 3, "validate_recordings": 1}


@pytest.fixture(scope="module")
def speech(
    tmp_path_factory: pytest.TempPathFactory, speech_like: Callable[[float, int], NDArray[np.float32]]
) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    for i in range(5):
        soundfile.write(folder / f"{i}.wav", speech_like(1.0, i), 16_000, subtype="PCM_16")
    return folder


def config(speech: Path, out: Path, **train: Any) -> CodecRunConfig:
    value = {"kind": "codec", "name": "tiny", "data": str(speech), "out": str(out), "split": "every-3rd"}
    value |= {"device": "cpu", "precision": "float32", "model": MODEL, "train": TRAIN | {"steps": 6} | train}
    return validate(CodecRunConfig, value, origin="test")


def records(run: Path, kind: str) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def test_a_run_learns_and_is_a_codec(speech: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_codec(config(speech, run, steps=40, validate_every=20))
    training, validation = records(run, "train"), records(run, "validation")
    for loss in ("log_spectra", "loudness"):
        assert training[-1][loss] < 0.7 * training[0][loss]
    assert [r["step"] for r in validation] == [20, 40]
    assert [r["recordings"] for r in validation] == [1, 2]  # the end measures all
    assert validation[1]["log_spectral_distance_db"] > 0
    assert 1 <= training[-1]["stage_2_perplexity"] <= 16 and training[-1]["sound_s_per_s"] > 0
    names = {path.name for path in (run / "samples").iterdir()}
    assert names == {"original.wav", "step_20.wav", "step_20.png", "step_40.wav", "step_40.png"}
    codec = load_codec(run)
    stored = json.loads((run / "model.json").read_text())["streams"][SINGLE]
    assert TokenSpec.from_json(stored, origin="test") == codec.spec
    # The sample is what the saved codec makes of the original, so the saved codebooks are the trained ones.
    original, _ = soundfile.read(run / "samples" / "original.wav", dtype="float32")
    sample, _ = soundfile.read(run / "samples" / "step_40.wav", dtype="float32")
    again = codec.decode(codec.encode(torch.from_numpy(original)[None]), samples=len(original))[0]
    assert np.abs(again.clamp(-1, 1).numpy() - sample).max() < 1e-3


@pytest.mark.parametrize(
    "train", [{}, {"optimiser": "muon", "adversarial": {"start": 0.4, "channels": 2, "samples": 2048}}]
)
def test_a_resumed_run_is_the_run_without_a_break(
    speech: Path, tmp_path: Path, train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train_codec(config(speech, whole, **train))
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert not train_codec(config(speech, broken, **train))
    torch.manual_seed(99)  # what a new process would have
    assert train_codec(config(speech, broken, **train), resume=True)
    for name in ("model.safetensors", "state/step_6/state.safetensors"):
        one, other = load_file(whole / name), load_file(broken / name)
        assert set(one) == set(other)
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert ("discriminator" in records(whole, "train")[-1]) == ("adversarial" in train)
    assert [r["step"] for r in records(broken, "train")] == [3, 6]


def stop_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C during that step."""
    own = loop.CodecTrainer.step

    def interrupted(self: loop.CodecTrainer) -> dict[str, float]:
        losses = own(self)
        if self.at.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return losses

    patch.setattr(loop.CodecTrainer, "step", interrupted)


def test_what_fails_in_judging_costs_no_training(
    speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(pcm: torch.Tensor, decoded: torch.Tensor) -> dict[str, float]:
        raise RuntimeError("PESQ fell over")

    monkeypatch.setattr(loop, "quality", failing)
    with pytest.raises(RuntimeError, match="fell over"):
        train_codec(config(speech, tmp_path / "run", validate_every=3, save_every=3))
    assert (tmp_path / "run" / "state" / "step_3").is_dir()


def test_what_cannot_be_trained_or_resumed_is_refused(
    speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, good = tmp_path / "run", config(speech, tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="set data=DIR"):
        train_codec(good.model_copy(update={"data": None}))
    with pytest.raises(ConfigError, match="needs a budget"):
        train_codec(config(speech, run, steps=None))
    with pytest.raises(CheckpointError, match="no run to resume"):
        train_codec(good, resume=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vector_quantize_pytorch", None)
        with pytest.raises(ConfigError, match="codec-training"):
            train_codec(good)
    assert not run.exists()  # all of these come before anything is written
    assert train_codec(good)
    with pytest.raises(CheckpointError, match="already holds a run"):
        train_codec(good)
    with pytest.raises(CheckpointError, match=r"train\.batch=3, got 4"):
        train_codec(config(speech, run, batch=4), resume=True)
    (run / "config.yaml").write_text("name: speech\n")
    with pytest.raises(CheckpointError, match="is no codec"):
        train_codec(good, overwrite=True)


def test_the_command_line_trains_a_codec_that_prepares_data(speech: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "codec.yaml"
    file.write_text(config(speech, run, steps=2).to_yaml())
    assert describes_codec(file) and not describes_codec(tmp_path / "none.yaml")
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(file), "train.steps=1"])
    codec = build_codec("rvq", weights=str(run))
    prepare(speech, tmp_path / "shards", codec=codec, split="every-3rd", workers=1)
    shards = Shards.open(tmp_path / "shards")
    assert shards.spec == codec.spec
    assert [d.frames for d in shards.of_split("val")] == [50, 50]
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(run / "config.yaml"), "train.steps=2", "--resume"])
    assert build_codec("rvq", weights=str(run)).spec != codec.spec  # other weights, other symbols


def test_muon_has_the_matrices_inside_the_codec() -> None:
    model = validate(RvqModelConfig, MODEL, origin="test").build()
    names = {n for n, p in model.named_parameters() if id(p) in hidden_matrices(model)}
    stacks = ("encoder_fast", "encoder", "decoder", "decoder_fast")
    assert names == {f"{s}.blocks.0.{m}.weight" for s in stacks for m in ("convolution", "out")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_is_of_3200_bits_a_second(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load(CodecRunConfig, path)
    assert run.name == path.stem and run.train.minutes is not None
    assert parse(CodecRunConfig, run.to_yaml()) == run
    with pytest.raises(SystemExit, match="0"):
        main(["info", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["bits_per_second"] == 3200
