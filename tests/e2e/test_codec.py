"""The verbs of codecs: a file there and back, preparing with a neural codec, the table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.codecs.tiny_codecs import lyra_weights, save_tiny
from tests.e2e.harness import run
from tests.helpers import speech_like
from txl_audio.codecs import files
from txl_audio.codecs.files import Codes, read_codes, write_codes
from txl_audio.codecs.mulaw import MuLawCodec, mulaw_decode, mulaw_encode
from txl_audio.data.shards import Shards
from txl_audio.tokens import DataError


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


def test_a_recording_is_not_written_over(wav: Path) -> None:
    before = wav.read_bytes()
    refused = run(
        "codec", "encode", wav, "--codec", "mulaw", "--out", wav.parent / ".." / wav.parent.name / "in.wav"
    )
    assert "itself, which would be lost" in refused.error and wav.read_bytes() == before


def test_what_is_clipped_is_said(wav: Path, tmp_path: Path) -> None:
    pcm = np.array([0.5, 1.5, -2.0, 0.0] * 100, np.float32)
    soundfile.write(tmp_path / "loud.wav", pcm, 16_000, subtype="FLOAT")
    words = ("codec", "encode", tmp_path / "loud.wav", "--codec", "mulaw", "--out", tmp_path / "c", "--json")
    told = run(*words)
    assert told.json["clipped"] == 200 and "200 of 400 samples lie beyond full scale" in told.err


def test_codes_that_were_changed_are_refused(wav: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "codes.safetensors", tmp_path / "out.wav"
    run("codec", "encode", wav, "--codec", "mulaw", "--out", file)
    with safe_open(file, framework="pt") as opened:
        metadata, codes = opened.metadata(), opened.get_tensor("codes")
    spec = json.loads(metadata["spec"])
    for changed, tensor in (
        ({"samples": "99999"}, codes),
        ({"samples": "-5"}, codes),
        ({"spec": "3"}, codes),
        ({"spec": json.dumps(spec | {"vocab_size": None, "frame_rate_hz": 0.0})}, codes),
        ({}, codes.float()),
        ({}, codes[:-1].contiguous()),
    ):
        save_file({"codes": tensor}, file, metadata=metadata | changed)
        refused = run("codec", "decode", file, "--out", out)
        assert "codes.safetensors cannot be read as codes" in refused.error, changed
    assert not out.exists()


def test_a_file_of_codes_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = MuLawCodec()
    codes = Codes(torch.zeros(8, 1, dtype=torch.int64), codec.spec.framed(1), 8)
    file = tmp_path / "codes.safetensors"
    write_codes(file, codes)

    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(DataError, match="no space left"):
        write_codes(file, codes)
    assert read_codes(file).samples == 8 and os.listdir(tmp_path) == [file.name]


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
    assert "by other weights" in refused.error and "name the weights that encoded it" in refused.error
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
        (
            ("evaluate", "in.wav", "--codec", "rvq", "--codec", "lyra", "--weights", "w"),
            "give each its own, as --codec rvq:weights=w",
        ),
        (("evaluate", "in.wav", "--codec", "mulaw", "--plot", "p"), "expected a file that ends with .png"),
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
    refused = run(*words).error
    assert "--codec, --weights" in refused and "are for audio, chars is a text" in refused
