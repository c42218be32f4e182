"""Laws of every codec in the registry: lengths, the spec, and pieces equal to the whole."""

from __future__ import annotations

import pytest
import torch

from txl_audio.codecs import CODECS, build_codec
from txl_audio.config import parse
from txl_audio.tokens import Codec, ConfigError


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return build_codec(request.param)


@pytest.fixture
def pcm() -> torch.Tensor:
    time_s = torch.arange(1003) / 16_000
    return torch.stack([0.4 * torch.sin(2 * torch.pi * f * time_s) for f in (220.0, 1000.0)])


def test_codes_have_the_shape_and_range_of_the_spec(codec: Codec, pcm: torch.Tensor) -> None:
    codes = codec.encode(pcm)
    spec = codec.spec
    frame_samples = spec.sample_rate_hz / spec.frame_rate_hz
    assert codes.shape == (2, -(-1003 // int(frame_samples)), spec.symbols_per_frame)
    assert codes.dtype == torch.int64
    assert int(codes.min()) >= 0 and int(codes.max()) < spec.vocab_size


def test_decoding_gives_the_asked_length(codec: Codec, pcm: torch.Tensor) -> None:
    out = codec.decode(codec.encode(pcm), samples=1003)
    assert out.shape == (2, 1003)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_streamed_equals_offline(codec: Codec, pcm: torch.Tensor, chunk: int) -> None:
    codes = codec.encode(pcm)
    decoder = codec.stream_decoder()
    pieces = [decoder.push(codes[:, i : i + chunk]) for i in range(0, codes.shape[1], chunk)]
    streamed = torch.cat([*pieces, decoder.flush()], dim=1)
    torch.testing.assert_close(streamed, codec.decode(codes), rtol=0, atol=1e-6)


def test_a_lane_does_not_depend_on_the_others(codec: Codec, pcm: torch.Tensor) -> None:
    assert torch.equal(codec.encode(pcm)[1:], codec.encode(pcm[1:]))


@pytest.mark.parametrize("kind", sorted(CODECS))
def test_the_config_builds_it(kind: str) -> None:
    config = parse(CODECS[kind], f"kind: {kind}")
    assert parse(CODECS[kind], config.to_yaml()) == config
    assert config.build().spec == build_codec(kind).spec


def test_unknown_codecs_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="no codec is called 'opus'; known: .*mulaw"):
        build_codec("opus")
    with pytest.raises(ConfigError, match="unknown key 'bits'"):
        build_codec("mulaw", bits=16)
