"""The verbs of codecs: a file there and back, preparing with a neural codec, the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.codecs.tiny_codecs import lyra_weights, save_tiny
from tests.e2e.harness import run
from tests.helpers import speech_like
from txl_audio.codecs.files import read_codes
from txl_audio.codecs.mulaw import mulaw_decode, mulaw_encode
from txl_audio.data.shards import Shards


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    path = tmp_path / "in.wav"
    soundfile.write(path, speech_like(1.0, 3)[:15_999], 16_000)
    return path


def test_there_and_back(wav: Path, tmp_path: Path) -> None:
    codes, out = tmp_path / "made" / "codes.safetensors", tmp_path / "out.wav"
    told = run("codec", "encode", wav, "--codec", "mulaw", "--out", codes, "--json").json
    assert (told["frames"], told["samples"], told["bit_rate"]) == (15_999, 15_999, 128_000)
    run("codec", "decode", codes, "--out", out)
    pcm = soundfile.read(wav, dtype="float32")[0]
    decoded = soundfile.read(out, dtype="float32")[0]
    assert np.abs(decoded - mulaw_decode(mulaw_encode(pcm))).max() < 1e-4


def test_a_codec_of_another_rate(wav: Path, tmp_path: Path) -> None:
    mimi = save_tiny("mimi", tmp_path / "mimi")
    codes, out = tmp_path / "codes.safetensors", tmp_path / "out.flac"
    word = "mimi:codebooks=2"
    told = run("codec", "encode", wav, "--codec", word, "--weights", mimi, "--out", codes, "--json").json
    assert (told["sample_rate_hz"], told["samples"], told["frames"]) == (24_000, 23_999, 13)
    assert run("codec", "decode", codes, "--weights", mimi, "--out", out).code == 0
    assert (soundfile.info(out).samplerate, soundfile.info(out).frames) == (24_000, 23_999)
    other = save_tiny("mimi", tmp_path / "other", num_filters=2)
    refused = run("codec", "decode", codes, "--weights", other, "--out", tmp_path / "x.wav")
    assert "hold different symbols (settings_hash" in refused.error
    assert not (tmp_path / "x.wav").exists()


def test_preparing_with_lyra(request: pytest.FixtureRequest, wav: Path, tmp_path: Path) -> None:
    weights = lyra_weights(request)
    words = ("prepare", wav.parent, "--codec", "lyra:stages=30", "--weights", weights, "--split", "all:train")
    told = run(*words, "--out", tmp_path / "data", "--json")
    assert told.json["documents"] == 1 and told.json["seconds"] == {"train": 1.0}
    shards = Shards.open(tmp_path / "data")
    assert (shards.spec.name, shards.spec.symbols_per_frame, shards.spec.frame_rate_hz) == ("lyra", 15, 50.0)
    codes = tmp_path / "codes.safetensors"
    run("codec", "encode", wav, "--codec", "lyra:stages=30", "--weights", weights, "--out", codes)
    assert torch.equal(
        read_codes(codes).codes, torch.from_numpy(shards.symbols(shards.documents[0]).astype(int))
    )
    assert run(*words, "--out", tmp_path / "data", "--json").json["unchanged"]


def test_the_table(wav: Path, tmp_path: Path) -> None:
    for package in ("pesq", "pystoi", "jiwer", "pocketsphinx"):
        pytest.importorskip(package)
    told = run(
        "codec",
        "evaluate",
        wav.parent,
        "--codec",
        "mulaw",
        "--no-words",
        "--plot",
        tmp_path / "p.png",
        "--json",
    ).json
    assert [row["codec"] for row in told["codecs"]] == ["original", "mulaw"]
    assert told["codecs"][1]["pesq_wb"] > 3 and told["codecs"][1]["word_error_rate"] is None
    assert told["words"] == "none" and (tmp_path / "p.png").stat().st_size > 1000
    (tmp_path / "said.tsv").write_text("in\tsome words\n")
    shown = run("codec", "evaluate", wav, "--codec", "mulaw", "--transcripts", tmp_path / "said.tsv").out
    assert (
        "PESQ-wb" in shown and "1 files, 1.0 s; word errors by PocketSphinx against the transcripts" in shown
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("encode", "in.wav", "--codec", "opus", "--out", "x"), "no codec is called 'opus'"),
        (("encode", "in.wav", "--codec", "mulaw", "--weights", "w", "--out", "x"), "unknown key 'weights'"),
        (("decode", "in.wav", "--out", "x.wav"), "cannot be read as codes"),
        (("evaluate", "in.wav", "--codec", "mulaw", "--codec", "mulaw"), "expected each once"),
        (
            ("evaluate", "in.wav", "--codec", "mulaw", "--no-words", "--transcripts", "t"),
            "leave out --no-words",
        ),
    ],
)
def test_what_cannot_be_done(
    wav: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(wav.parent)
    assert message in run("codec", *words).error


def test_a_text_has_no_codec(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc\n")
    words = ("prepare", tmp_path / "a.txt", "--dataset", "chars", "--codec", "lyra", "--out", tmp_path / "o")
    assert "--weights, --workers and --shard are for audio, chars is a text" in run(*words).error
