"""mu-law: the formula, its 256 codes, and the faults other implementations had (rows A1 to A4, A10)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from txl_audio.codecs.mulaw import CODES, MU, SILENCE, MuLawCodec, clipped_count, mulaw_decode, mulaw_encode
from txl_audio.tokens import Codec, DataError, SpecError

ALL_CODES = np.arange(CODES)
waves = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1.5, 1.5, width=32))


def formula(x: np.ndarray) -> np.ndarray:
    """The definition, sample by sample in float64."""
    companded = np.sign(x) * np.log1p(MU * np.abs(x)) / math.log(256)
    return np.clip(np.floor((companded + 1) / 2 * 255 + 0.5), 0, 255).astype(np.int64)


def test_every_code_survives_a_round_trip() -> None:  # A1, A3
    assert CODES == 256 and MU == 255
    np.testing.assert_array_equal(mulaw_encode(mulaw_decode(ALL_CODES)), ALL_CODES)
    codes = torch.arange(256)
    assert torch.equal(mulaw_encode(mulaw_decode(codes)), codes)
    assert MuLawCodec().spec.vocab_size == 256


def test_symmetric_noise_has_no_mean_error() -> None:  # A1
    half = np.random.default_rng(0).normal(0, 0.1, 20_000)
    noise = np.concatenate([half, -half])
    error = mulaw_decode(mulaw_encode(noise)) - noise
    assert abs(error.mean()) < 1e-6 < error.std()


def test_samples_beyond_full_scale_are_clipped_and_counted() -> None:  # A2
    for pcm in (np.array([1.05, -1.2, 1.0, -1.0]), torch.tensor([1.05, -1.2, 1.0, -1.0])):
        assert mulaw_encode(pcm).tolist() == [255, 0, 255, 0]
        assert clipped_count(pcm) == 2
    assert clipped_count(np.array([-32768, 32767], np.int16)) == 0


INTEGER_TYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_decoding_does_not_depend_on_the_integer_type(dtype: torch.dtype) -> None:  # A4
    reference = mulaw_decode(torch.arange(256))
    codes = torch.arange(256).to(dtype)
    assert torch.equal(mulaw_decode(codes), reference)
    np.testing.assert_array_equal(mulaw_decode(codes.numpy()), reference.numpy())
    assert reference.dtype == torch.float32
    assert reference[0] == -1 and reference[-1] == 1 and reference.abs().max() <= 1


def test_silence_is_code_128() -> None:
    assert mulaw_encode(np.array([0.0, -0.0, 1e-9, -1e-9])).tolist() == [SILENCE, SILENCE, 128, 127]


def test_encoding_is_the_formula() -> None:
    x = np.random.default_rng(1).uniform(-1.1, 1.1, 200_000)
    np.testing.assert_array_equal(mulaw_encode(x), formula(np.clip(x, -1, 1)))
    pcm16 = np.arange(-32768, 32768) / 32768
    np.testing.assert_array_equal(mulaw_encode(pcm16), formula(pcm16))


def test_integer_pcm_is_scaled_by_its_type() -> None:
    for dtype, scale in ((np.int8, 128), (np.int16, 32768), (np.int32, 2**31)):
        pcm = np.linspace(-scale, scale - 1, 1001).astype(dtype)
        np.testing.assert_array_equal(mulaw_encode(pcm), mulaw_encode(pcm / scale))
        np.testing.assert_array_equal(mulaw_encode(torch.from_numpy(pcm)).numpy(), mulaw_encode(pcm))
    unsigned = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(mulaw_encode(unsigned), mulaw_encode((unsigned / 128) - 1))


def test_torchaudio_agrees() -> None:
    """Equal codes for 16-bit PCM and equal levels within float32 rounding.

    torchaudio takes the logarithm in float32, so a sample on the edge of two codes may differ by
    one; no value of 16-bit PCM does.
    """
    functional = pytest.importorskip("torchaudio.functional")
    pcm16 = torch.arange(-32768, 32768) / 32768
    theirs = functional.mu_law_encoding(pcm16, 256)
    different = (theirs - mulaw_encode(pcm16)).abs()
    assert int(different.max()) <= 1 and int(different.sum()) <= 2
    codes = torch.arange(256)
    torch.testing.assert_close(
        functional.mu_law_decoding(codes, 256), mulaw_decode(codes), rtol=2e-6, atol=1e-7
    )


@given(waves)
def test_numpy_and_torch_give_equal_codes(wave: np.ndarray) -> None:
    expected = mulaw_encode(wave)
    assert expected.dtype == np.int64
    np.testing.assert_array_equal(mulaw_encode(torch.from_numpy(wave)).numpy(), expected)
    # A float32 sample is the same number in float64, so it is the same code.
    np.testing.assert_array_equal(mulaw_encode(wave.astype(np.float64)), expected)
    np.testing.assert_array_equal(mulaw_encode(torch.from_numpy(wave).double()).numpy(), expected)


def test_edges_are_equal_in_float32_and_float64() -> None:
    companded = (2 * np.arange(1, 256) - 1) / 255 - 1
    edge = (np.sign(companded) * (256 ** np.abs(companded) - 1) / 255).astype(np.float32)
    near = np.concatenate([np.nextafter(edge, np.float32(-2)), edge, np.nextafter(edge, np.float32(2))])
    np.testing.assert_array_equal(mulaw_encode(near), mulaw_encode(near.astype(np.float64)))


@given(waves)
def test_louder_is_never_a_lower_code(wave: np.ndarray) -> None:
    codes = mulaw_encode(np.sort(wave))
    assert (np.diff(codes) >= 0).all()
    assert codes.min() >= 0 and codes.max() <= 255


@given(waves)
def test_coding_twice_changes_nothing(wave: np.ndarray) -> None:
    once = mulaw_decode(mulaw_encode(wave))
    np.testing.assert_array_equal(mulaw_decode(mulaw_encode(once)), once)


@given(waves, st.integers(1, 9), st.data())
def test_frames_and_chunks_regroup_the_same_symbols(wave: np.ndarray, p: int, data: st.DataObject) -> None:
    codec = MuLawCodec(p)
    pcm = torch.from_numpy(wave)[None]
    codes = codec.encode(pcm)
    n = len(wave)
    assert codes.shape == (1, math.ceil(n / p), p)
    flat = codes.reshape(-1)
    assert torch.equal(flat[:n], mulaw_encode(pcm[0]))
    assert (flat[n:] == SILENCE).all()
    offline = codec.decode(codes, samples=n)
    assert torch.equal(offline[0], mulaw_decode(flat)[:n])
    cut = data.draw(st.integers(0, codes.shape[1]))
    decoder = codec.stream_decoder()
    parts = [decoder.push(codes[:, :cut]), decoder.push(codes[:, cut:]), decoder.flush()]
    assert torch.equal(torch.cat(parts, dim=1)[:, :n], offline)


@pytest.mark.parametrize("chunk", [1, 7, 320, 16_000])
def test_a_sine_in_chunks_is_exact_and_has_no_clicks(chunk: int) -> None:  # A10
    sine = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)[None]
    codec = MuLawCodec()
    codes = codec.encode(sine)
    offline = codec.decode(codes)
    decoder = codec.stream_decoder()
    parts = [decoder.push(codes[:, i : i + chunk]) for i in range(0, 16_000, chunk)]
    streamed = torch.cat([*parts, decoder.flush()], dim=1)
    assert streamed.shape == (1, 16_000)
    assert streamed.diff().abs().max() <= offline.diff().abs().max()
    assert torch.equal(streamed, offline)


def test_the_spec_names_everything_but_the_grouping() -> None:
    one, four = MuLawCodec().spec, MuLawCodec(4).spec
    assert one.framed(4) == four and four.framed(1) == one
    assert (four.symbols_per_frame, four.frame_rate_hz, four.symbol_rate_hz) == (4, 4000.0, 16_000.0)
    assert one.settings_hash == four.settings_hash
    assert isinstance(MuLawCodec(), Codec)
    with pytest.raises(SpecError, match="at least 1"):
        MuLawCodec(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_refused(bad: float) -> None:
    for pcm in (np.array([0.0, bad]), torch.tensor([0.0, bad])):
        with pytest.raises(DataError, match="NaN or infinite"):
            mulaw_encode(pcm)


def test_other_types_values_and_shapes_are_refused() -> None:
    codec = MuLawCodec(2)
    for pcm in (np.array([1], np.int64), torch.tensor([1]), torch.tensor([True])):
        with pytest.raises(DataError, match="no known scale"):
            mulaw_encode(pcm)
    for codes in (np.array([0.5]), torch.tensor([0.5]), torch.tensor([True])):
        with pytest.raises(DataError, match="are integers"):
            mulaw_decode(codes)
    for codes in (np.array([-1, 3]), torch.tensor([256])):
        with pytest.raises(DataError, match=r"lie in 0\.\.255"):
            mulaw_decode(codes)
    with pytest.raises(DataError, match="lanes, samples"):
        codec.encode(torch.zeros(4))
    with pytest.raises(SpecError, match=r"\[lanes, frames, 2\]"):
        codec.decode(torch.zeros(1, 4, 1, dtype=torch.int64))
    with pytest.raises(SpecError, match="frames hold 8"):
        codec.decode(torch.zeros(1, 4, 2, dtype=torch.int64), samples=9)


def test_empty_audio_has_no_frames() -> None:
    codec = MuLawCodec(4)
    codes = codec.encode(torch.zeros(2, 0))
    assert codes.shape == (2, 0, 4)
    assert codec.decode(codes).shape == (2, 0)
