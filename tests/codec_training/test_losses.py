"""Losses, figures and pieces: what they are 0 for, and what they see."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from txl_audio.codec_training.adversary import AdversarialConfig, Adversary
from txl_audio.codec_training.loop import quality
from txl_audio.codec_training.losses import SpectralLoss, spectrum
from txl_audio.codec_training.recordings import Recordings, read_recordings
from txl_audio.tokens import ConfigError, DataError

Speech = Callable[[float, int], NDArray[np.float32]]


def test_a_spectrum_reads_a_sine_at_its_place_and_height() -> None:
    sine = torch.sin(2 * torch.pi * 1000 * torch.arange(4096) / 16_000)
    middle = spectrum(sine[None], torch.hann_window(512)).abs()[0, 16]
    assert int(middle.argmax()) == 32  # 1000 Hz in steps of 31.25 Hz
    assert float(middle.max()) == pytest.approx(0.5, rel=1e-3)


def test_the_spectral_loss_is_of_levels_and_not_of_phases(speech_like: Speech) -> None:
    loss, pcm = SpectralLoss(16_000), torch.from_numpy(speech_like(1.0, 0))[None]
    assert [float(x) for x in loss(pcm, pcm)] == [0.0, 0.0]
    assert [float(x) for x in loss(-pcm, pcm)] == pytest.approx([0.0, 0.0], abs=1e-6)
    # Wherever there is sound a factor of 2 is 0.301 in log10, and 2^0.46 = 1.376 in loudness.
    assert [float(x) for x in loss(2 * pcm, pcm)] == pytest.approx([0.301, 0.376], abs=0.02)
    noise = torch.randn(pcm.shape, generator=torch.Generator().manual_seed(0))
    little, more = loss(pcm + 0.001 * noise, pcm), loss(pcm + 0.01 * noise, pcm)
    assert all(0 < float(a) < float(b) for a, b in zip(little, more, strict=True))


def test_loudness_hears_a_faint_band_less_than_a_strong_one() -> None:
    t = torch.arange(16_000) / 16_000
    strong = 0.3 * torch.sin(2 * torch.pi * 500 * t)[None]
    faint = 0.001 * torch.sin(2 * torch.pi * 4000 * t)[None]
    loss = SpectralLoss(16_000)
    (log_faint, loud_faint) = loss(strong + 2 * faint, strong + faint)
    (log_strong, loud_strong) = loss(2 * strong + faint, strong + faint)
    assert float(loud_strong) / float(loud_faint) > 2 * float(log_strong) / float(log_faint)


def test_figures_leave_out_what_is_not_known(speech_like: Speech) -> None:
    pcm = torch.from_numpy(speech_like(1.0, 0))
    same = quality(pcm, pcm)
    assert same["log_spectral_distance_db"] == 0.0
    assert ("pesq_wb" in same) == (find_spec("pesq") is not None)
    assert set(quality(torch.zeros(1000), torch.zeros(1000))) == {"log_spectral_distance_db"}


def test_pieces_lie_within_recordings_and_follow_the_seed() -> None:
    # Recording i holds the values i, so that a piece of two recordings would show.
    recordings = Recordings([np.full(n, (i + 1) / 16, np.float32) for i, n in enumerate((1000, 3000, 100))])
    pieces = recordings.pieces(200, samples=400, draws=np.random.default_rng(0))
    assert torch.equal(pieces, recordings.pieces(200, samples=400, draws=np.random.default_rng(0)))
    assert not torch.equal(pieces, recordings.pieces(200, samples=400, draws=np.random.default_rng(1)))
    values = pieces[:, 0]
    for piece, value in zip(pieces, values, strict=True):
        length = 100 if float(value) == 3 / 16 else 400
        assert torch.equal(piece[:length], value.expand(length)) and not piece[length:].any()
    counts = [int((values == v / 16).sum()) for v in (1, 2, 3)]
    assert counts[1] > 2 * counts[0] > 2 * counts[2] > 0


def test_recordings_are_split_as_prepare_splits_them(tmp_path: Path, speech_like: Speech) -> None:
    for i in range(6):
        soundfile.write(tmp_path / f"{i}.wav", speech_like(0.5, i), 16_000, subtype="PCM_16")
    found = read_recordings(tmp_path, "every-3rd")
    assert len(found["val"]) == 2 and len(found["train"]) == 2 and found["val"].seconds == 1.0
    stored, _ = soundfile.read(tmp_path / "3.wav", dtype="float32")
    assert np.array_equal(found["val"][1].numpy(), stored)
    with pytest.raises(DataError, match="no `train` recordings by all:val"):
        read_recordings(tmp_path, "all:val")
    with pytest.raises(ConfigError, match="no split rule"):
        read_recordings(tmp_path, "half")


def test_a_discriminator_learns_and_its_verdict_reaches_the_codec(speech_like: Speech) -> None:
    config = AdversarialConfig(channels=4, samples=2048, lr=5e-3)
    adversary, draws = Adversary(config, torch.device("cpu")), np.random.default_rng(0)
    pcm = torch.from_numpy(np.stack([speech_like(0.5, seed) for seed in range(4)]))
    figures = []
    for _ in range(40):
        decoded = (0.1 * torch.randn_like(pcm)).requires_grad_()
        loss, facts = adversary.losses(decoded, pcm, draws)
        figures.append(facts["discriminator"])
    loss.backward()
    assert decoded.grad is not None and float(decoded.grad.abs().sum()) > 0
    assert all(p.grad is None for p in adversary.discriminator.parameters())  # the codec's loss is not theirs
    assert figures[-1] < 0.3 < 0.7 < figures[0]
