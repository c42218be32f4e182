"""Codecs of `transformers`: the models' own functions give the same, and how far streams are from offline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.codecs.tiny_codecs import save_tiny
from txl_audio.codecs import build_codec, codec_of
from txl_audio.codecs.pretrained import CONTEXT_S, PretrainedCodec
from txl_audio.tokens import ConfigError

KINDS = ("encodec", "dac", "mimi")


@pytest.fixture(params=KINDS)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> PretrainedCodec:
    codec = build_codec(request.param, weights=str(save_tiny(request.param, tmp_path)), codebooks=4)
    assert isinstance(codec, PretrainedCodec)
    return codec


def test_codes_and_sound_are_those_of_the_model(codec: PretrainedCodec, tmp_path: Path) -> None:
    import transformers

    name = {"encodec": "Encodec", "dac": "Dac", "mimi": "Mimi"}[codec.kind]
    model = getattr(transformers, f"{name}Model").from_pretrained(tmp_path).eval()
    frames = 6
    pcm = 0.1 * torch.randn(1, frames * codec.frame_samples)
    with torch.no_grad():
        if codec.kind == "encodec":
            theirs = model.encode(pcm[None], bandwidth=0.8).audio_codes
            sound = model.decode(theirs, [None]).audio_values
            theirs = theirs[0]
        else:
            theirs = model.encode(pcm[None]).audio_codes
            sound = model.decode(audio_codes=theirs).audio_values
    codes = codec.encode(pcm)
    assert torch.equal(codes, theirs.transpose(1, 2))
    expected = sound.flatten()
    # DAC leaves out the last samples, which are silent here.
    assert frames * codec.frame_samples - 8 <= len(expected) <= frames * codec.frame_samples
    decoded = codec.decode(codes)[0]
    torch.testing.assert_close(decoded[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    assert (decoded[len(expected) :] == 0).all()


def test_fewer_codebooks_are_the_first_ones(codec: PretrainedCodec, tmp_path: Path) -> None:
    fewer = build_codec(codec.kind, weights=str(tmp_path), codebooks=2)
    pcm = 0.1 * torch.randn(1, 3 * codec.frame_samples)
    assert torch.equal(fewer.encode(pcm), codec.encode(pcm)[..., :2])
    assert fewer.spec.bit_rate == codec.spec.bit_rate / 2
    assert fewer.spec.settings_hash == codec.spec.settings_hash


def test_a_stream_longer_than_its_context_stays_close(codec: PretrainedCodec) -> None:
    frames = round(2.5 * CONTEXT_S * codec.spec.frame_rate_hz)
    codes = torch.randint(16, (1, frames, 4))
    decoder, chunk = codec.stream_decoder(), frames // 9
    pieces, held = [], 0
    for i in range(0, frames, chunk):
        pieces.append(decoder.push(codes[:, i : i + chunk]))
        held = max(held, decoder._codes.shape[1])
    streamed, offline = torch.cat([*pieces, decoder.flush()], dim=1), codec.decode(codes)
    before, after, first = codec.decoder_reach
    assert held <= before + after + chunk + first  # memory is bounded
    # The tiny DAC reaches as far as the real one. Of the others this says how it is with random weights.
    tolerance = 1e-6 if codec.kind == "dac" else 1e-4
    assert (streamed - offline).abs().max() <= tolerance * offline.abs().max().clamp(min=1e-2)


def test_the_reach_of_dac_is_what_a_changed_frame_changes(tmp_path: Path) -> None:
    codec = build_codec("dac", weights=str(save_tiny("dac", tmp_path)), codebooks=4)
    assert isinstance(codec, PretrainedCodec)
    before, after, _ = codec.decoder_reach
    codes = torch.randint(16, (1, 61, 4))
    other = codes.clone()
    other[0, 30] = (other[0, 30] + 8) % 16
    changed = (codec.decode(codes) != codec.decode(other))[0].nonzero().flatten() // codec.frame_samples
    assert 30 - after <= int(changed.min()) < 30 < int(changed.max()) <= 30 + before
    assert before == after == 11


def test_weights_that_the_environment_names(
    codec: PretrainedCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TXL_AUDIO_{codec.kind.upper()}", str(tmp_path))
    assert codec_of(codec.spec).spec == codec.spec


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    dac = save_tiny("dac", tmp_path / "dac")
    with pytest.raises(ConfigError, match="holds the model dac, expected mimi"):
        build_codec("mimi", weights=str(dac))
    with pytest.raises(ConfigError, match="codebooks is 12, .* has 4; use at most"):
        build_codec("dac", weights=str(dac))
    with pytest.raises(ConfigError, match="dac cannot be loaded from .*absent"):
        build_codec("dac", weights=str(tmp_path / "absent"))
    stereo = save_tiny("encodec", tmp_path / "stereo", audio_channels=2, normalize=True)
    with pytest.raises(ConfigError, match="expected one channel"):
        build_codec("encodec", weights=str(stereo), codebooks=2)
