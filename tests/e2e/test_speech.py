"""Recordings in, sound out: prepare, train, evaluate, score, sample and info, through the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.conftest import BAD, Workspace
from tests.e2e.harness import run, tree
from txl_audio import recipe
from txl_audio.checkpoint import RunFolder
from txl_audio.codecs.mulaw import mulaw_encode
from txl_audio.config import load
from txl_audio.data.shards import Shards
from txl_audio.evaluate import score_document
from txl_audio.sampling.sampler import FIRST_CHUNK_S, Sampler


def metrics(folder: Path, *, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Records of metrics.jsonl, without the fields that tell time."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in without} for record in records]


def codes_of(path: Path) -> np.ndarray:
    pcm, rate_hz = soundfile.read(path, dtype="float32")
    assert rate_hz == 16_000
    return mulaw_encode(pcm)


def val_files(workspace: Workspace) -> list[Path]:
    return [workspace.source / d.source for d in Shards.open(workspace.data).of_split("val")]


def test_prepare_uses_the_good_files_and_lists_the_bad_ones(workspace: Workspace) -> None:
    assert workspace.prepared.code == 1
    figures = json.loads(workspace.prepared.out)
    assert (figures["documents"], figures["clipped"], figures["unchanged"]) == (6, 0, False)
    assert figures["samples"] == sum(round((0.2 + 0.05 * i) * 16_000) for i in range(6))
    assert sum(figures["seconds"].values()) == pytest.approx(figures["samples"] / 16_000)
    assert {item["source"] for item in figures["rejected"]} == set(BAD)
    for name in BAD:
        assert f"left out {name}: " in workspace.prepared.err


def test_prepare_again_does_nothing(workspace: Workspace) -> None:
    before = tree(workspace.data)
    again = run("prepare", workspace.source, "--out", workspace.data, "--split", "every-3rd")
    assert again.code == 1  # the bad files are still there
    assert again.out.startswith("already prepared: 6 documents")
    assert tree(workspace.data) == before


def test_train_leaves_a_whole_run_folder(workspace: Workspace) -> None:
    assert (workspace.trained.code, workspace.trained.raw) == (0, b"")
    folder = workspace.run
    config = load(recipe.RunConfig, folder / "config.yaml")
    assert config == load(
        recipe.RunConfig,
        workspace.config,
        [
            f"out={folder}",
            "train.validate_every=2",
            "train.sample_every=2",
        ],
    )
    assert "positions:" in (folder / "config.yaml").read_text()  # defaults are written out
    names = set(tree(folder))
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert len(events) == 1
    samples = {f"samples/step_{step}.{kind}" for step in (2, 4) for kind in ("wav", "png")}
    files = {"config.yaml", "model.safetensors", "model.json", "metrics.jsonl", "lock"}
    checkpoint = {f"state/step_4/{name}" for name in ("state.safetensors", "state.json", "checksums.json")}
    assert names - events - samples - files == checkpoint | {"state/last"}
    assert json.loads((folder / "model.json").read_text())["step"] == 4
    for step in (2, 4):
        assert soundfile.info(folder / f"samples/step_{step}.wav").frames == 320
        assert (folder / f"samples/step_{step}.png").read_bytes()[:4] == b"\x89PNG"


def test_metrics_and_tensorboard_agree(workspace: Workspace) -> None:
    records = metrics(workspace.run)
    assert [(r["kind"], r["step"]) for r in records] == [
        ("train", 1),
        ("train", 2),
        ("validation", 2),
        ("train", 3),
        ("train", 4),
        ("validation", 4),
    ]
    assert [r["symbols"] for r in records if r["kind"] == "train"] == [128, 256, 384, 512]
    for record in records:
        assert 0 < record["bits_per_sample"] < 12
        if record["kind"] == "train":
            assert record["lr"] == 1e-2 and record["gradient_norm"] > 0
            assert record["symbols_per_s"] > 0 and record["share_of_matmul_rate"] > 0
    assert [r["whole_split"] for r in records if r["kind"] == "validation"] == [False, True]
    board = EventAccumulator(str(workspace.run)).Reload()
    shown = [(s.step, s.value) for s in board.Scalars("train/bits_per_sample")]
    expected = [(r["step"], r["bits_per_sample"]) for r in records if r["kind"] == "train"]
    assert shown == [(step, pytest.approx(bits, rel=1e-6)) for step, bits in expected]
    assert [a.step for a in board.Audio("sample")] == [2, 4]


def test_a_resumed_run_equals_an_uninterrupted_one(workspace: Workspace) -> None:
    # Records of 3 steps, one of which begins before the stop and ends after it.
    whole, result = workspace.train("whole", "train.steps=8", "train.log_every=3")
    assert result.code == 0
    parts, result = workspace.train("parts", "train.steps=5", "train.save_every=2", "train.log_every=3")
    assert result.code == 0
    _, result = workspace.train("parts", "train.steps=8", "train.log_every=3", "--resume")
    assert (result.code, result.raw) == (0, b"")
    expected = RunFolder(whole).load_state()[0]
    got = RunFolder(parts).load_state()[0]
    assert expected.keys() == got.keys() and any(name.startswith("optimiser.") for name in got)
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    time = ("seconds", "symbols_per_s", "share_of_matmul_rate")
    kept = [r for r in metrics(parts, without=time) if r["kind"] == "train"]
    assert [r["step"] for r in kept] == [3, 6]
    assert kept == [r for r in metrics(whole, without=time) if r["kind"] == "train"]


def test_a_run_keeps_the_precision_that_auto_stood_for(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faster(best: torch.dtype) -> None:
        def rate(_device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
            return 2.0 if dtype == best else 1.0

        monkeypatch.setattr("txl_audio.runtime.matmul_flops", rate)

    faster(torch.bfloat16)
    out, result = workspace.train("auto", "precision=auto", "train.steps=1")
    assert result.code == 0
    assert load(recipe.RunConfig, out / "config.yaml").precision == "bfloat16"
    faster(torch.float32)
    _, result = workspace.train("auto", "precision=auto", "train.steps=2", "--resume")
    assert result.code == 0
    assert load(recipe.RunConfig, out / "config.yaml").precision == "bfloat16"
    _, result = workspace.train("auto", "precision=auto", "train.steps=1", "--overwrite")
    assert load(recipe.RunConfig, out / "config.yaml").precision == "float32"


def test_a_moved_run_continues_where_it_lies(workspace: Workspace, tmp_path: Path) -> None:
    old, result = workspace.train("old_place", "train.steps=1")
    assert result.code == 0
    copy = shutil.copytree(old, tmp_path / "moved")
    before = tree(old)
    result = run("train", copy / "config.yaml", "train.steps=2", "--resume")
    assert result.code == 0 and result.err.endswith(f"done: {copy}\n")
    assert json.loads((copy / "model.json").read_text())["step"] == 2
    assert tree(old) == before
    # Whoever says where the run is, is believed.
    result = run("train", copy / "config.yaml", f"out={old}", "train.steps=2", "--resume")
    assert result.code == 0 and json.loads((old / "model.json").read_text())["step"] == 2


def test_evaluate_scores_every_sample_once(workspace: Workspace) -> None:
    shards = Shards.open(workspace.data)
    for split in shards.splits:
        figures = run("evaluate", workspace.run, workspace.data, "--split", split, "--json").json
        assert figures["count"] == sum(d.frames for d in shards.of_split(split))
        assert figures["bits_per_sample"] == pytest.approx(figures["nats"] / figures["count"] / math.log(2))
        assert (figures["split"], figures["documents"]) == (split, shards.splits[split])
        assert (figures["memory"], figures["precision"]) == ("cold", "float32")
        assert figures["preparation"] == shards.preparation


def test_evaluate_is_what_training_reported(workspace: Workspace) -> None:
    figures = run("evaluate", workspace.run, "--json").json  # the run knows its data
    last = metrics(workspace.run)[-1]
    assert (last["kind"], last["count"]) == ("validation", figures["count"])
    assert last["bits_per_sample"] == pytest.approx(figures["bits_per_sample"], rel=1e-6)


def test_evaluate_cold_does_not_depend_on_lanes_and_warm_differs(workspace: Workspace) -> None:
    cold = [run("evaluate", workspace.run, "--lanes", lanes, "--json").json for lanes in (1, 3)]
    assert cold[0]["nats"] == pytest.approx(cold[1]["nats"], rel=1e-6)
    warm = run("evaluate", workspace.run, "--lanes", 1, "--memory", "warm", "--json").json
    assert warm["count"] == cold[0]["count"]
    assert warm["nats"] != pytest.approx(cold[0]["nats"], rel=1e-9)


def test_score_of_the_files_adds_up_to_evaluate(workspace: Workspace) -> None:
    files = val_files(workspace)
    scored = run("score", workspace.run, *files, "--json").json["files"]
    assert [item["path"] for item in scored] == [str(path) for path in files]
    for item, path in zip(scored, files, strict=True):
        assert item["count"] == soundfile.info(path).frames
        assert item["bits_per_sample"] == pytest.approx(item["nats"] / item["count"] / math.log(2))
    total = run("evaluate", workspace.run, "--json").json
    assert sum(item["count"] for item in scored) == total["count"]
    assert sum(item["nats"] for item in scored) == pytest.approx(total["nats"], rel=1e-6)


def test_sample_reports_what_it_wrote(workspace: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "new" / "sound.wav"
    figures = run("sample", workspace.run, "--seconds", 0.05, "--seed", 3, "--out", out, "--json").json
    assert (figures["samples"], figures["seconds"], figures["seed"]) == (800, 0.05, 3)
    assert figures["backend"] == "compiled cpu" and figures["out"] == str(out)
    taken_s = figures["wall_s"] - figures["first_chunk_ms"] / 1000
    assert figures["rtf"] == pytest.approx(taken_s / (0.05 - FIRST_CHUNK_S)), "compiling is no part of it"
    assert 0 < figures["first_chunk_ms"] <= 1000 * figures["wall_s"]
    info = soundfile.info(out)
    assert (info.frames, info.samplerate, info.channels, info.subtype) == (800, 16_000, 1, "PCM_16")
    assert [path.name for path in out.parent.iterdir()] == ["sound.wav"]
    same = out.with_name("same.wav")
    how = ("--seconds", 0.05, "--seed", 3, "--backend", "torch", "--out", same, "--json")
    assert run("sample", workspace.run, *how).json["backend"] == "torch cpu"
    assert same.read_bytes() == out.read_bytes()


def test_raw_and_files_hold_the_same_samples(workspace: Workspace, tmp_path: Path) -> None:
    words = ("sample", workspace.run, "--seconds", 0.03, "--seed", 1)
    raw = run(*words, "--raw")
    assert (raw.code, len(raw.raw)) == (0, 2 * 480)
    assert run(*words, "--raw").raw == raw.raw  # the same seed
    assert run(*words[:-1], 2, "--raw").raw != raw.raw
    for name in ("a.wav", "a.flac"):
        assert run(*words, "--out", tmp_path / name).code == 0
        pcm, _ = soundfile.read(tmp_path / name, dtype="int16")
        assert pcm.astype("<i2").tobytes() == raw.raw


def test_no_seconds_are_no_samples(workspace: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "nothing.wav"
    assert run("sample", workspace.run, "--seconds", 0, "--out", out, "--json").json["samples"] == 0
    assert soundfile.info(out).frames == 0


def test_temperature_0_and_top_k_1_take_the_most_likely(workspace: Workspace) -> None:
    words = ("sample", workspace.run, "--seconds", 0.02, "--raw")
    greedy = run(*words, "--temperature", 0).raw
    assert run(*words, "--top-k", 1, "--seed", 7).raw == greedy
    assert run(*words, "--top-p", 1e-6, "--seed", 8).raw == greedy


def test_streamed_sound_has_the_score_that_the_sampler_gave_it(workspace: Workspace, tmp_path: Path) -> None:
    out, samples = tmp_path / "sound.wav", 803  # ends inside a frame
    run("sample", workspace.run, "--seconds", samples / 16_000, "--seed", 5, "--out", out)
    _, model = recipe.load_run(workspace.run)
    sampler = Sampler(model, seed=5)
    symbols: list[int] = []
    nats: list[float] = []
    while len(symbols) < samples:
        symbols += sampler.next_frame()[0].tolist()
        nats += sampler.nats[0].tolist()
    np.testing.assert_array_equal(codes_of(out), symbols[:samples])
    offline = score_document(model, codes_of(out))
    np.testing.assert_allclose(offline.numpy(), nats[:samples], rtol=0, atol=1e-4)
    scored = run("score", workspace.run, out, "--json").json["files"][0]
    assert scored["count"] == samples
    assert scored["nats"] == pytest.approx(sum(nats[:samples]), abs=1e-4 * samples)


@pytest.mark.parametrize("used", [1600, 1603], ids=["whole frames", "ends inside a frame"])
def test_a_continuation_has_the_score_of_the_whole(workspace: Workspace, tmp_path: Path, used: int) -> None:
    prompt, out, made = workspace.source / "5.wav", tmp_path / "out.wav", 400
    words = ("sample", workspace.run, "--prompt", prompt, "--prompt-seconds", used / 16_000, "--seed", 2)
    words += ("--seconds", made / 16_000)
    figures = run(*words, "--with-prompt", "--out", out, "--json").json
    assert figures["samples"] == made
    codes = codes_of(out)
    assert len(codes) == used + made
    np.testing.assert_array_equal(codes[:used], codes_of(prompt)[:used])
    assert run(*words, "--raw").raw == soundfile.read(out, dtype="int16")[0][used:].tobytes()

    _, model = recipe.load_run(workspace.run)
    sampler = Sampler(model, prompt=torch.from_numpy(codes[None, :used]), seed=2)
    nats: list[float] = []
    begun = used % 4
    while len(nats) < made + begun:
        sampler.next_frame()
        nats += sampler.nats[0].tolist()
    offline = score_document(model, codes)[used:].numpy()
    np.testing.assert_allclose(offline, nats[begun : begun + made], rtol=0, atol=1e-4)


def test_a_silent_prompt_is_a_prompt(workspace: Workspace, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silence.wav", np.zeros(1000), 16_000)
    result = run("sample", workspace.run, "--prompt", tmp_path / "silence.wav", "--seconds", 0.01, "--raw")
    assert (result.code, len(result.raw)) == (0, 320)


def test_a_prompt_at_another_rate_is_resampled(workspace: Workspace, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "p.wav", np.zeros((441, 2)), 44_100)
    words = ("--prompt", tmp_path / "p.wav", "--with-prompt", "--seconds", 0.01, "--raw")
    assert len(run("sample", workspace.run, *words).raw) == 2 * (160 + 160)


def test_info_of_a_config_and_of_its_run(workspace: Workspace) -> None:
    figures = run("info", workspace.config, "--json").json
    assert figures == run("info", workspace.run, "--json").json
    _, model = recipe.load_run(workspace.run)
    assert figures["parameters"] == sum(p.numel() for p in model.parameters())
    assert figures["parameters"] == sum(
        t.numel() for t in load_file(workspace.run / "model.safetensors").values()
    )
    assert (figures["frame_rate_hz"], figures["symbols_per_frame"]) == (4000.0, 4)
    assert (figures["mem_len_frames"], figures["memory_s"]) == (16, 16 / 4000)
    longer = run("info", workspace.config, "model.core.mem_len=32", "--json").json
    assert longer["memory_s"] == 2 * figures["memory_s"]
    # Per layer and frame, in float32: keys, values and position keys of 2 heads of 8; three products of 16.
    assert longer["decode_state_bytes"] - figures["decode_state_bytes"] == 16 * 2 * 3 * 16 * 4
    assert longer["macs_per_symbol"] - figures["macs_per_symbol"] == 16 * 2 * 3 * 16 / 4
