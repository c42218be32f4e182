"""Laws of every codec in the registry: lengths, the spec, and pieces equal to the whole (A9, A10)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.codecs.tiny_codecs import codec_settings
from txl_audio.codecs import CODECS, build_codec, codec_of, parse_codec
from txl_audio.config import parse
from txl_audio.tokens import Codec, ConfigError, DataError, SpecError

Kinds = Callable[[str], tuple[Codec, dict[str, Any]]]


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Gives a codec by kind, and its settings; each is built once."""
    made: dict[str, tuple[Codec, dict[str, Any]]] = {}

    def get(kind: str) -> tuple[Codec, dict[str, Any]]:
        if kind not in made:
            settings = codec_settings(kind, request, tmp_path_factory.mktemp(kind))
            made[kind] = build_codec(kind, **settings), settings
        return made[kind]

    return get


@pytest.fixture(params=sorted(CODECS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def codec(kind: str, kinds: Kinds) -> Codec:
    return kinds(kind)[0]


@pytest.fixture
def pcm() -> torch.Tensor:
    time_s = torch.arange(1003) / 16_000
    return torch.stack([0.4 * torch.sin(2 * torch.pi * f * time_s) for f in (220.0, 1000.0)])


def frame_samples(codec: Codec) -> int:
    return round(codec.spec.sample_rate_hz / codec.spec.frame_rate_hz)


@pytest.mark.parametrize("samples", [0, 1, 319, 320, 321, 16_000, 32_000])
def test_any_length_comes_back_exactly(codec: Codec, samples: int) -> None:
    pcm = 0.1 * torch.randn(1, samples)
    codes = codec.encode(pcm)
    assert codes.shape == (1, -(-samples // frame_samples(codec)), codec.spec.symbols_per_frame)
    assert codec.decode(codes, samples=samples).shape == (1, samples)
    assert codec.decode(codes).shape == (1, codes.shape[1] * frame_samples(codec))


def test_codes_have_the_shape_and_range_of_the_spec(codec: Codec, pcm: torch.Tensor) -> None:
    codes = codec.encode(pcm)
    spec = codec.spec
    assert codes.shape == (2, -(-1003 // frame_samples(codec)), spec.symbols_per_frame)
    assert codes.dtype == torch.int64
    assert int(codes.min()) >= 0 and int(codes.max()) < spec.vocab_size
    out = codec.decode(codes, samples=1003)
    assert out.shape == (2, 1003) and out.dtype == torch.float32 and torch.isfinite(out).all()


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_streamed_decoding_equals_offline(codec: Codec, chunk: int) -> None:
    frames = 27 if codec.spec.modality == "codes" else 1003
    codes = torch.randint(codec.spec.vocab_size, (2, frames, codec.spec.symbols_per_frame))
    decoder = codec.stream_decoder()
    pieces = [decoder.push(codes[:, i : i + chunk]) for i in range(0, frames, chunk)]
    streamed = torch.cat([*pieces, decoder.flush()], dim=1)
    offline = codec.decode(codes)
    # Mimi's stream has a bounded view of the past; here it covers all but the first second.
    tolerance = 1e-4 if codec.spec.name == "mimi" else 1e-6
    torch.testing.assert_close(
        streamed, offline, rtol=0, atol=tolerance * max(1.0, float(offline.abs().max()))
    )


@pytest.mark.parametrize("chunk", [1, 319, 320, 10_000])
def test_streamed_encoding_equals_offline(codec: Codec, pcm: torch.Tensor, chunk: int) -> None:
    if not hasattr(codec, "stream_encoder"):
        pytest.skip(f"{codec.spec.name} encodes whole recordings only")
    encoder = codec.stream_encoder()  # pyright: ignore[reportAttributeAccessIssue]
    pieces = [encoder.push(pcm[:, i : i + chunk]) for i in range(0, pcm.shape[1], chunk)]
    assert torch.equal(torch.cat([*pieces, encoder.flush()], dim=1), codec.encode(pcm))


def test_a_lane_does_not_depend_on_the_others(codec: Codec, pcm: torch.Tensor) -> None:
    codes = codec.encode(pcm)
    assert torch.equal(codes[1:], codec.encode(pcm[1:]))
    torch.testing.assert_close(codec.decode(codes)[1:], codec.decode(codes[1:]), rtol=0, atol=1e-5)


def test_coding_again_gives_the_same(codec: Codec, pcm: torch.Tensor) -> None:
    """A codec has no memory of the streams before, and neither has its copy in another process."""
    codes = codec.encode(pcm)
    copy: Codec = pickle.loads(pickle.dumps(codec))  # noqa: S301
    for one in (codec, copy):
        assert one.spec == codec.spec
        assert torch.equal(one.encode(pcm), codes)
        assert torch.equal(one.decode(codes), codec.decode(codes))


def test_codes_and_sound_that_are_none_are_refused(codec: Codec) -> None:
    spec = codec.spec
    with pytest.raises(SpecError, match=r"expected codes of shape \[lanes, frames"):
        codec.decode(torch.zeros(1, 4, spec.symbols_per_frame + 1, dtype=torch.int64))
    for bad in (-1, spec.vocab_size):
        with pytest.raises(DataError, match="have to be removed before decoding"):
            codec.decode(torch.full((1, 4, spec.symbols_per_frame), bad))
    with pytest.raises(SpecError, match="1000000 samples were asked for"):
        codec.decode(torch.zeros(1, 4, spec.symbols_per_frame, dtype=torch.int64), samples=1_000_000)
    with pytest.raises(DataError, match=r"\[lanes, samples\]"):
        codec.encode(torch.zeros(400))
    with pytest.raises(DataError, match="NaN or infinite"):
        codec.encode(torch.full((1, 400), torch.nan))


def test_the_config_builds_it(kind: str, kinds: Kinds) -> None:
    codec, settings = kinds(kind)
    config = parse(CODECS[kind], f"kind: {kind}", [f"{key}={value}" for key, value in settings.items()])
    assert parse(CODECS[kind], config.to_yaml()) == config
    assert codec_of(codec.spec, weights=settings.get("weights")).spec == codec.spec
    word = ",".join(f"{key}={value}" for key, value in settings.items())
    assert parse_codec(f"{kind}:{word}").spec == codec.spec


def test_unknown_codecs_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="no codec is called 'opus'; known: .*mulaw"):
        build_codec("opus")
    with pytest.raises(ConfigError, match="no codec is called 'opus'"):
        parse_codec("opus:stages=3")
    with pytest.raises(ConfigError, match="unknown key 'bits'"):
        build_codec("mulaw", bits=16)
    with pytest.raises(ConfigError, match="unknown key 'weights'"):
        parse_codec("mulaw", weights="somewhere")
    with pytest.raises(ConfigError, match="override 'stages' is not of the form"):
        parse_codec("lyra:stages")
