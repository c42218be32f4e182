"""Lyra against what was derived from its models independently, and its quality on their authors' recordings.

Codes depend on the processor's rounding beyond the first stages, so none are compared with stored ones there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.codecs.tiny_codecs import lyra_weights
from tests.data.test_prepare import content
from tests.helpers import speech_like
from txl_audio.codecs import build_codec, codec_of
from txl_audio.codecs.lyra import WEIGHTS_VARIABLE, LyraCodec
from txl_audio.data.audio import load_audio
from txl_audio.data.prepare import prepare
from txl_audio.data.shards import Shards
from txl_audio.tokens import ConfigError, DataError, SpecError


@pytest.fixture(scope="module")
def weights(request: pytest.FixtureRequest) -> Path:
    return lyra_weights(request)


@pytest.fixture(scope="module")
def codec(weights: Path) -> LyraCodec:
    return LyraCodec(weights)


def sample(weights: Path, number: int) -> torch.Tensor:
    return torch.from_numpy(load_audio(weights / f"sample{number}_16kHz.flac"))[None]


def test_the_codebooks_are_read_out_of_the_model(weights: Path) -> None:
    expected = np.load(weights / "rvq_codebooks_f32_46x16x64.npy")
    codec = LyraCodec(weights, stages=46)
    assert (codec.spec.symbols_per_frame, codec.spec.bit_rate) == (23, 9200.0)
    stages = np.random.default_rng(0).integers(0, 16, (5, 46))
    symbols = stages[:, ::2] * 16 + stages[:, 1::2]
    latents = codec.dequantise(symbols)
    np.testing.assert_allclose(latents, expected[np.arange(46), stages].sum(1), atol=1e-5)
    # A vector far along one row of the first stage finds that row.
    nearest = ((latents[:, None] - expected[0]) ** 2).sum(-1).argmin(1)
    np.testing.assert_array_equal(codec.quantise(latents)[:, 0] // 16, nearest)


def test_codes_of_recordings_are_those_stored_with_them(
    shared: Path, codec: LyraCodec, weights: Path
) -> None:
    """The first stage of the stored codes (two stages a byte, the first one high), and most of all stages."""
    stored = np.load(weights / "kathleen_codes_nq16_u4packed.npz")
    flac = shared / "data" / "kathleen_arctic_16k" / "flac"
    name = str(stored["names"][0])
    pcm = load_audio(next(flac.rglob(f"{Path(name).stem}*.flac")))
    key = next(k for k in stored.files if stored[k].ndim == 2)
    expected = stored[key][: int(stored["lengths"][0])]
    codes = codec.encode(torch.from_numpy(pcm)[None])[0].numpy()
    assert codes.shape == expected.shape
    assert (codes[:, 0] >> 4 == expected[:, 0] >> 4).mean() > 0.99
    assert (codes == expected).mean() > 0.5


@pytest.mark.parametrize("number", [1, 2])
def test_quality_and_no_delay_on_the_authors_recordings(weights: Path, number: int) -> None:
    quality = pytest.importorskip("txl_audio.codec_quality")
    pytest.importorskip("pesq")
    pcm = sample(weights, number)
    for stages, least in ((16, 2.4), (46, 3.1)):
        codec = LyraCodec(weights, stages=stages)
        decoded = codec.decode(codec.encode(pcm), samples=pcm.shape[1])
        assert quality.pesq_wb(pcm[0].numpy(), decoded[0].numpy()) >= least
        n = 2 * pcm.shape[1]
        spectra = np.fft.rfft(decoded[0], n) * np.conj(np.fft.rfft(pcm[0], n))
        assert int(np.fft.irfft(spectra, n).argmax()) == 0


def test_silence_and_full_scale(codec: LyraCodec) -> None:
    for pcm in (torch.zeros(1, 3200), torch.ones(1, 3200), torch.tensor([[1.0, -1.0]]).repeat(1, 1600)):
        decoded = codec.decode(codec.encode(pcm))
        assert torch.isfinite(decoded).all() and decoded.abs().max() <= 1.0


def test_prepared_in_any_number_of_processes(codec: LyraCodec, tmp_path: Path) -> None:
    source = tmp_path / "wav"
    source.mkdir()
    for i in range(4):
        soundfile.write(source / f"{i}.wav", speech_like(0.3 + 0.1 * i, i), 16_000)
    for workers in (1, 2):
        prepare(source, tmp_path / f"{workers}", codec=codec, split="every-3rd", workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "2")
    shards = Shards.open(tmp_path / "1")
    assert shards.spec == codec.spec
    for document in shards.documents:
        expected = codec.encode(torch.from_numpy(load_audio(source / document.source))[None])[0]
        np.testing.assert_array_equal(shards.symbols(document), expected)


def test_the_folder_is_not_part_of_the_spec_its_files_are(
    weights: Path, codec: LyraCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in weights.glob("*.tflite"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path))
    assert build_codec("lyra").spec == codec.spec
    assert codec_of(codec.spec).spec == codec.spec
    assert LyraCodec(weights, stages=30).spec.settings_hash != codec.spec.settings_hash
    decoder = tmp_path / "lyragan.tflite"
    decoder.write_bytes(decoder.read_bytes() + b"\0")
    with pytest.raises(SpecError, match="settings_hash"):
        codec_of(codec.spec)


def test_weights_that_cannot_be_used(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEIGHTS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"github.com/google/lyra \(Apache-2.0.*--weights DIR"):
        build_codec("lyra")
    with pytest.raises(ConfigError, match=r"soundstream_encoder.tflite cannot be read .*google/lyra"):
        build_codec("lyra", weights=str(tmp_path))
    with pytest.raises(ConfigError, match="stages: should be 16, 30 or 46"):
        build_codec("lyra", stages=8)
    for name in ("soundstream_encoder.tflite", "quantizer.tflite", "lyragan.tflite"):
        (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is no TFLite model that can be used"):
        build_codec("lyra", weights=str(tmp_path))
    for name in ("soundstream_encoder.tflite", "quantizer.tflite", "lyragan.tflite"):
        (tmp_path / name).write_bytes((weights / "lyragan.tflite").read_bytes())
    with pytest.raises(ConfigError, match="is not Lyra's quantiser"):
        build_codec("lyra", weights=str(tmp_path))


def test_a_stream_keeps_its_lanes(codec: LyraCodec) -> None:
    decoder, encoder = codec.stream_decoder(), codec.stream_encoder()
    decoder.push(torch.zeros(2, 1, 8, dtype=torch.int64))
    encoder.push(torch.zeros(2, 10))
    with pytest.raises(DataError, match="has 2 lanes, got 1"):
        decoder.push(torch.zeros(1, 1, 8, dtype=torch.int64))
    with pytest.raises(DataError, match="has 2 lanes, got 1"):
        encoder.push(torch.zeros(1, 10))
