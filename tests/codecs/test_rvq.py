"""The project's own codec: how far it looks ahead, its quantiser, and its run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from txl_audio.codecs import build_codec, codec_of
from txl_audio.codecs.rvq import WEIGHTS_VARIABLE, RvqCodec, load_codec
from txl_audio.codecs.rvq_model import EncoderState, RvqModel, RvqModelConfig
from txl_audio.tokens import CheckpointError, ConfigError, SpecError

TINY = RvqModelConfig(codebooks=3, codebook_size=16, latent=8, width=16, blocks=3)


@pytest.fixture
def model() -> RvqModel:
    return TINY.build().eval().requires_grad_(False)


def save(model: RvqModel, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"kind: codec\nname: x\nmodel: {model.config.model_dump_json()}\n")
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def test_the_encoder_looks_15_ms_ahead_and_no_further(model: RvqModel) -> None:
    pcm = 0.1 * torch.randn(1, 20 * 320)
    frame, known = 9, 10 * 320 + 240  # frame 9 ends with sample 10 * 320
    before = model.whole_latents(pcm)
    pcm[:, known:] = 0.1 * torch.randn(1, pcm.shape[1] - known)
    after = model.whole_latents(pcm)
    torch.testing.assert_close(after[:, : frame + 1], before[:, : frame + 1], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, frame + 1], before[:, frame + 1], atol=1e-3)


def test_a_frame_changes_no_sound_more_than_its_window_before_it(model: RvqModel) -> None:
    latents = torch.randn(1, 20, TINY.latent)
    before = model.whole_sound(latents)
    latents[:, 10] += 1.0
    changed = (model.whole_sound(latents) - before).abs()[0]
    assert float(changed[: 10 * 320 - 240].max()) == 0.0
    assert float(changed[10 * 320 - 240 : 10 * 320].max()) > 0.0


def test_what_a_stream_remembers_reaches_across_pieces(model: RvqModel) -> None:
    """States passed by hand give the whole; a state left out does not."""
    pcm = 0.1 * torch.randn(2, 12 * 320 + 240)
    whole, _ = model.latents(pcm, model.encoder_state(2))
    first, state = model.latents(pcm[:, :1000], model.encoder_state(2))
    second, _ = model.latents(pcm[:, 1000:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-5)
    sound, _ = model.sound(whole, model.decoder_state(2))
    first, state = model.sound(whole[:, :5], model.decoder_state(2))
    second, _ = model.sound(whole[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), sound, rtol=0, atol=1e-5)
    forgotten, _ = model.sound(whole[:, 5:], model.decoder_state(2))
    assert not torch.allclose(forgotten, second, atol=1e-3)


def test_long_recordings_are_coded_in_pieces(model: RvqModel, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, lengths = RvqCodec(model), []
    pcm = 0.1 * torch.randn(1, 70 * 16_000 + 5)
    latents = model.latents

    def noted(pcm: torch.Tensor, state: EncoderState) -> tuple[torch.Tensor, EncoderState]:
        lengths.append(pcm.shape[1])
        return latents(pcm, state)

    monkeypatch.setattr(model, "latents", noted)
    codes = codec.encode(pcm)
    assert max(lengths) <= 30 * 16_000 and codes.shape == (1, 3501, 3)
    monkeypatch.undo()
    whole = model.whole_latents(pcm)
    assert (codes == model.quantise(whole)).float().mean() > 0.999
    torch.testing.assert_close(
        codec.decode(codes), model.whole_sound(model.dequantise(codes)), rtol=0, atol=1e-4
    )


def test_every_stage_takes_the_row_nearest_to_what_is_left(model: RvqModel) -> None:
    latents = torch.randn(2, 5, TINY.latent)
    codes, rest = model.quantise(latents), latents
    for k, codebook in enumerate(model.codebooks):
        expected = torch.cdist(rest, codebook[None].expand(2, -1, -1)).argmin(-1)
        assert torch.equal(codes[..., k], expected)
        rest = rest - codebook[expected]
    torch.testing.assert_close(model.dequantise(codes), latents - rest, rtol=0, atol=1e-5)


def test_the_spec_is_of_these_weights(model: RvqModel, tmp_path: Path) -> None:
    codec = load_codec(save(model, tmp_path / "a"))
    assert codec.spec.frame_rate_hz == 50.0 and codec.spec.modality == "codes"
    assert codec.spec == RvqCodec(model).spec
    other = TINY.build()
    other.load_state_dict(model.state_dict())
    other.codebooks[0, 0, 0] += 1e-3
    folder = save(other, tmp_path / "b")
    assert load_codec(folder).spec.settings_hash != codec.spec.settings_hash
    with pytest.raises(SpecError, match="settings_hash"):
        codec_of(codec.spec, weights=str(folder))


def test_weights_come_from_the_environment_too(
    model: RvqModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WEIGHTS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="by the variable TXL_AUDIO_RVQ, with --weights RUN"):
        build_codec("rvq")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(save(model, tmp_path)))
    assert build_codec("rvq").spec == RvqCodec(model).spec


def test_folders_that_are_no_trained_codec_are_refused(model: RvqModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no trained codec in .*expected the run folder"):
        load_codec(tmp_path)
    folder = save(model, tmp_path / "run")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="damaged or of another model"):
        load_codec(folder)
    save_file({"codebooks": model.codebooks}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="damaged or of another model"):
        load_codec(folder)
    (folder / "config.yaml").write_text("name: speech\nmodel: {core: {}}\n")
    with pytest.raises(CheckpointError, match="no run of a codec"):
        load_codec(folder)
    (folder / "config.yaml").write_text("kind: codec\nmodel: {breadth: 3}\n")
    with pytest.raises(ConfigError, match="unknown key 'breadth'"):
        load_codec(folder)
