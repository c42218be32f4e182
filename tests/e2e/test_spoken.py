"""Text beside sound, from recordings to a model that speaks and writes, by the command line."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import soundfile

from tests.codecs.tiny_codecs import codec_settings
from tests.e2e.harness import run
from tests.helpers import SAMPLE_RATE_HZ, speech_like
from txl_audio.data.shards import Shards
from txl_audio.serve import models
from txl_audio.serve.running import running
from txl_audio.serve.service import Service

CONFIG = """
name: spoken
device: cpu
precision: float32
model:
  delay_frames: 1
  transcripts: [speak, transcribe]
  embedding: {kind: symbols}
  core: {n_layer: 1, d_model: 16, n_head: 2, d_head: 8, d_ff: 32, mem_len: 32, segment_len: 16}
  head: {kind: depth, width: 16, blocks: 1, walk: false}
train: {steps: 3, lanes: 2, lr: 1e-2, warmup_steps: 0, sample_every: 3, sample_seconds: 0.1}
"""
TEXTS = ("yes", "no", "yes no", "no yes", "yes yes", "no no")


def test_from_recordings_to_words(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source, data, out = tmp_path / "wav", tmp_path / "data", tmp_path / "run"
    source.mkdir()
    for index in range(6):
        pcm = speech_like(0.2 + 0.05 * index, seed=index)
        soundfile.write(source / f"{index}.wav", pcm, SAMPLE_RATE_HZ)
    (tmp_path / "t.tsv").write_text("".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS)))
    (tmp_path / "codec").mkdir()
    weights = codec_settings("rvq", request, tmp_path / "codec")["weights"]
    words = ("prepare", source, "--codec", "rvq", "--weights", weights, "--split", "every-3rd", "--out", data)
    assert run(*words, "--transcripts", tmp_path / "t.tsv").code == 0
    assert [document.text for document in Shards.open(data).documents] == list(TEXTS)
    # Without them the shards would be others: the text is part of what was asked for.
    assert "made of other files or in another way" in run(*words).error
    (tmp_path / "spoken.yaml").write_text(CONFIG)
    trained = run(
        "train", tmp_path / "spoken.yaml", f"data={data}", f"out={out}", f"model.codec_weights={weights}"
    )
    assert trained.code == 0, trained.err
    assert soundfile.info(out / "samples" / "step_3.wav").frames > 0

    spoken = run("evaluate", out, "--order", "speak", "--json").json
    both = run("evaluate", out, "--json").json
    frames = sum(document.frames for document in Shards.open(data).of_split("val"))
    assert spoken["orders"] == ["speak"] and both["orders"] == ["speak", "transcribe"]
    text = sum(len(text) + 3 for text in (TEXTS[0], TEXTS[3]))
    assert spoken["count"] == 3 * frames + text and both["count"] == 2 * spoken["count"]
    stages = sum(spoken[f"bits_per_frame_stage_{stage}"] for stage in (1, 2, 3))
    assert spoken["bits_per_frame"] == pytest.approx(stages)
    assert spoken["bits_per_second"] == pytest.approx(50 * stages)
    assert 0 < spoken["bits_per_text_symbol"] < 8
    assert (
        "expected one that the run was trained with (speak, transcribe)"
        in run("evaluate", out, "--order", "sing").error
    )

    wav = tmp_path / "no.wav"
    told = run("sample", out, "--text", "no", "--seconds", "0.5", "--seed", "1", "--out", wav, "--json").json
    assert told["samples"] == soundfile.info(wav).frames <= 8_000
    assert (
        "'!' is not in the vocabulary"
        in run("sample", out, "--text", "no!", "--out", tmp_path / "x.wav").error
    )
    assert "text to say is empty" in run("sample", out, "--text", " ", "--out", tmp_path / "x.wav").error
    found = run("transcribe", out, source / "0.wav", source / "1.wav", "--json").json["files"]
    assert [item["path"] for item in found] == [str(source / "0.wav"), str(source / "1.wav")]
    assert all(set(item["text"]) <= set("yes no") for item in found)
    missing = run("transcribe", out, source / "0.wav", tmp_path / "missing.wav")
    assert missing.code == 1 and "missing.wav" in missing.err
    assert missing.out == f"{source / '0.wav'}\t{found[0]['text']}\n"  # what was done is not lost

    (served,) = models.load([str(out)])
    served.warm_up()
    with running(Service([served], slots=1)) as url:
        query = {"model": "run", "text": "no", "seconds": "0.5", "seed": "1", "format": "s16le"}
        heard = httpx.post(f"{url}/v1/generate", params=query, timeout=300)
    assert heard.content == soundfile.read(wav, dtype="int16")[0].astype("<i2").tobytes()


def test_who_cannot_speak_says_so(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    wav = tmp_path / "x.wav"
    assert "was not trained to speak" in run("sample", "kathleen", "--text", "no", "--out", wav).error
    soundfile.write(wav, speech_like(0.1, 0), SAMPLE_RATE_HZ)
    assert "was not trained to transcribe" in run("transcribe", "kathleen", wav).error
