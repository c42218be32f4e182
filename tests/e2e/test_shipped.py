"""The model that ships with the package, and the script that makes a run into one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from omegaconf import OmegaConf

from tests.e2e.conftest import Workspace
from tests.e2e.harness import run, text_run, tree
from tests.helpers import speech_like
from tests.test_scripts import script
from txl_audio import recipe
from txl_audio.config import load
from txl_audio.tokens import CheckpointError, DataError, SpecError

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


def test_shipping_a_run(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ship_model, heard = script("ship_model"), tmp_path / "heard"
    few = [
        "--prompts",
        "2",
        "--prompt-seconds",
        "0.1",
        "--seconds",
        "1",
        "--temperature",
        "0.9",
        "--no-audio",
    ]
    script("free_running").main(
        [str(workspace.run), "--data", str(workspace.data), *few, "--out", str(heard)]
    )
    for module in (recipe, recipe.runs):
        monkeypatch.setattr(module, "SHIPPED", tmp_path)
    words = [str(workspace.run), "--name", "tiny", "--free-running", str(heard / "results.json")]
    ship_model.main(words)
    target = tmp_path / "tiny"
    assert f"\n{target}: " in capsys.readouterr().out
    assert set(tree(target)) == set(tree(KATHLEEN))
    assert recipe.shipped_models() == ["tiny"]

    config, model = recipe.load_run("tiny")
    _, trained = recipe.load_run(workspace.run)
    for name, value in trained.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    own = load(recipe.RunConfig, workspace.run / "config.yaml")
    assert config == own.model_copy(update={"name": "tiny", "data": None, "out": None})
    assert str(workspace.folder) not in "".join(p.read_text() for p in target.glob("*[!s]"))

    figures = json.loads((target / "figures.json").read_text())
    assert figures["trained"]["step"] == 4 and figures["trained"]["seconds"] > 0
    for split, bits in figures["bits_per_sample"].items():
        scored = run("evaluate", workspace.run, "--split", split, "--json").json
        assert bits == pytest.approx(scored["bits_per_sample"], abs=1e-9)
        assert figures["data"][split]["samples"] == scored["count"]
    assert figures["bits_per_sample"].keys() >= {"val"}
    card = (target / "README.md").read_text()
    assert "2 held-out beginnings of 0.1 s, each continued for 1 s (temperature 0.9, " in card
    verdicts = json.loads((heard / "results.json").read_text())["verdicts"]
    assert figures["free_running"]["verdicts"] == verdicts
    for verdict in verdicts:
        assert f"| {verdict['limit']} | {verdict['value']:.3g} | " in card

    # What people wrote stays; tables are replaced.
    (target / "README.md").write_text(f"# Ours\n\n{card.replace('bits', 'bytes')}\nOur words.\n")
    ship_model.main(words[:3])
    again = (target / "README.md").read_text()
    assert again.startswith("# Ours\n") and again.endswith("\nOur words.\n")
    assert verdicts[0]["limit"] not in again
    assert ship_model.tables(json.loads((target / "figures.json").read_text())) in again


def test_what_cannot_be_shipped(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship, target, heard = script("ship_model"), tmp_path / "new", tmp_path / "results.json"
    heard.write_text(json.dumps({"settings": {"run": "another"}, "verdicts": []}))
    with pytest.raises(DataError, match="is about the run another, expected"):
        ship.ship(workspace.run, target, results=heard)
    with pytest.raises(SpecError, match="writes text symbols, expected an audio model"):
        ship.ship(text_run(tmp_path / "text"), target)
    unfinished = shutil.copytree(workspace.run, tmp_path / "unfinished")
    record = (unfinished / "metrics.jsonl").read_text().splitlines()[0]
    (unfinished / "metrics.jsonl").write_text(record + "\n")
    with pytest.raises(CheckpointError, match="weights of step 4, of which metrics.jsonl tells nothing"):
        ship.ship(unfinished, target)
    monkeypatch.setattr(ship, "MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="expected at most 1,000; ship a smaller one"):
        ship.ship(workspace.run, target)
    assert not target.exists()
    target.mkdir()
    (target / "README.md").write_text("# Ours\n")
    with pytest.raises(CheckpointError, match="has no place for figures"):
        ship.ship(workspace.run, target)
    assert set(tree(target)) == {"README.md"}
