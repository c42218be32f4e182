"""The model that ships with the package, by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from omegaconf import OmegaConf

from tests.e2e.conftest import Workspace
from tests.e2e.harness import run, text_run, tree
from tests.helpers import speech_like
from tests.test_scripts import script
from txl_audio import recipe
from txl_audio.tokens import CheckpointError

KATHLEEN = recipe.SHIPPED / "kathleen"
FIGURES = json.loads((KATHLEEN / "figures.json").read_text())


def test_kathleen_speaks_by_name(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.wav", "again.wav", "other.wav")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        made = run("sample", "kathleen", "--seconds", 0.2, "--seed", seed, "--out", path, "--json").json
        assert made["samples"] == 3200 and made["clipped_samples"] == 0
    first, again, other = (soundfile.read(path, dtype="int16")[0] for path in paths)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len(np.unique(first)) > 10  # neither silence nor a click


def test_kathleen_scores_sound(tmp_path: Path) -> None:
    speech = speech_like(0.5, 0)
    noise = 0.3 * np.random.default_rng(0).uniform(-1, 1, speech.size).astype(np.float32)
    for name, pcm in (("speech", speech), ("noise", noise)):
        soundfile.write(tmp_path / f"{name}.wav", pcm, 16_000)
    scored = run("score", "kathleen", tmp_path / "speech.wav", tmp_path / "noise.wav", "--json").json["files"]
    like_speech, like_noise = (file["bits_per_sample"] for file in scored)
    assert scored[0]["count"] == 8000
    # Codes of uniform noise at this level carry about seven bits, and no model can tell them in fewer.
    assert 1 < like_speech < 6 < like_noise < 9


def test_kathleen_scores_what_its_card_says(shared: Path) -> None:
    files = sorted((shared / "data" / "kathleen_arctic_16k" / "flac").glob("*.flac"))[:41:20]
    scored = run("score", "kathleen", *files, "--json").json["files"]
    bits = sum(f["nats"] for f in scored) / sum(f["count"] for f in scored) / np.log(2)
    # Three of the 54 validation recordings: their mean is not that of all, but near.
    assert bits == pytest.approx(FIGURES["bits_per_sample"]["val"], abs=0.3)


def test_the_files_of_kathleen() -> None:
    ship_model = script("ship_model")
    files = tree(KATHLEEN)
    assert set(files) == {"README.md", "config.yaml", "figures.json", "model.json", "model.safetensors"}
    assert sum(map(len, files.values())) <= ship_model.MOST_BYTES
    config, model = recipe.load_run("kathleen", device="cpu")
    assert (config.name, config.data, config.out) == ("kathleen", None, None)
    assert model.stage is not None and model.spec.stage == model.stage.hash
    assert FIGURES["parameters"] == sum(p.numel() for p in model.parameters())
    card = files["README.md"].decode()
    assert ship_model.tables(FIGURES) in card
    assert f"**{FIGURES['bits_per_sample']['test']:.4f}** bits per sample" in card
    for word in ("CMU Arctic", "CC0", "Apache-2.0", "scripts/make_kathleen.sh", "minutes", "not for"):
        assert word in card
    info = run("info", "kathleen", "--json").json
    assert info["parameters"] == FIGURES["parameters"]


def test_predictors_other_than_those_of_training_are_refused(tmp_path: Path) -> None:
    changed = shutil.copytree(KATHLEEN, tmp_path / "changed")
    config = OmegaConf.load(changed / "config.yaml")
    config.model.predictors.peak_decay = 0.99
    OmegaConf.save(config, changed / "config.yaml")
    with pytest.raises(CheckpointError, match=r"changed were trained with other symbols or predictors"):
        recipe.load_run(changed)


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = r"no run folder at \S+ \(no config.yaml in it\); .* ships with the package: kathleen"
    for word in ("katheen", "./kathleen", "kathleen/", tmp_path / "kathleen"):
        with pytest.raises(CheckpointError, match=missing):
            recipe.run_folder(word)
    for verb in ("info", "sample"):
        failed = run(verb, "katheen")
        assert failed.code == 1 and "ships with the package: kathleen" in failed.error
    (tmp_path / "kathleen").mkdir()  # of recordings, say
    assert recipe.run_folder("kathleen").path == KATHLEEN
    (tmp_path / "kathleen").rmdir()
    text_run(tmp_path / "kathleen")
    assert recipe.run_folder("kathleen").path == Path("kathleen")
    failed = run("sample", "./kathleen", "--raw")
    assert failed.code == 2 and "./kathleen writes text" in failed.error


def test_evaluating_a_shipped_model_takes_data(workspace: Workspace) -> None:
    failed = run("evaluate", "kathleen")
    assert failed.code == 2 and "the run kathleen names no data; give the shard folder" in failed.error
    figures = run("evaluate", "kathleen", workspace.data, "--json").json
    assert 1 < figures["bits_per_sample"] < 8
