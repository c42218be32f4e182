"""The project's own neural codec: 16 kHz, 50 frames a second, residual vector quantisation.

`txl-audio train` of a config with `kind: codec` makes one; its network is in `rvq_model.py`. Encoding and
decoding are equal in pieces and as a whole, up to the rounding of sums.

Shapes: B lanes, N samples, T frames of 320 samples, K codebooks.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from yaml import YAMLError

from txl_audio.codecs.checks import checked_codes, checked_pcm, first_samples
from txl_audio.codecs.rvq_model import (
    FRAME_SAMPLES,
    SAMPLE_RATE_HZ,
    SIDE,
    DecoderState,
    EncoderState,
    RvqModel,
    RvqModelConfig,
)
from txl_audio.config import Config, validate
from txl_audio.tokens import CheckpointError, ConfigError, TokenSpec, settings_hash

# What is encoded or decoded at once: 30 s, so that hours of sound need little memory.
_PIECE_FRAMES = 1500

WEIGHTS_VARIABLE = "TXL_AUDIO_RVQ"
"""Environment variable with the run folder to use where none is given."""


class RvqCodec:
    """A trained model as `tokens.Codec`; runs in float32 on the CPU.

    Args:
        model: with trained codebooks. A hash of its weights is part of the spec's settings hash.
    """

    def __init__(self, model: RvqModel) -> None:
        config = model.config
        digest = hashlib.sha256()
        for name, value in sorted(model.state_dict().items()):
            digest.update(name.encode() + value.numpy().tobytes())
        weights = digest.hexdigest()[:16]
        self.model = model.eval().requires_grad_(False)
        self.spec = TokenSpec(
            modality="codes",
            vocab_size=config.codebook_size,
            symbols_per_frame=config.codebooks,
            frame_rate_hz=SAMPLE_RATE_HZ / FRAME_SAMPLES,
            sample_rate_hz=SAMPLE_RATE_HZ,
            name="rvq",
            settings_hash=settings_hash({"model": config.model_dump(), "weights": weights}),
        )
        self.description = f"{config.codebooks} codebooks of {config.codebook_size}, weights {weights}"

    @torch.inference_mode()
    def encode(self, pcm: Tensor) -> Tensor:
        """pcm [B, N] float -> codes [B, ceil(N / 320), K] int64; DataError for other shapes or types."""
        pcm = checked_pcm(pcm)
        pcm = F.pad(pcm, (0, -pcm.shape[1] % FRAME_SAMPLES + SIDE))
        state, codes = self.model.encoder_state(len(pcm)), list[Tensor]()
        for piece in pcm.split(_PIECE_FRAMES * FRAME_SAMPLES, dim=1):
            latents, state = self.model.latents(piece, state)
            codes.append(self.model.quantise(latents))
        return torch.cat(codes, dim=1)

    @torch.inference_mode()
    def decode(self, codes: Tensor, *, samples: int | None = None) -> Tensor:
        """codes [B, T, K] -> pcm [B, T * 320] float32, or the first `samples` of them.

        Raises SpecError for another shape or more samples than the codes hold, DataError for codes outside
        the codebooks.
        """
        codes = checked_codes(codes, self.spec)
        if codes.numel() == 0:
            return first_samples(torch.zeros(codes.shape[0], codes.shape[1] * FRAME_SAMPLES), samples)
        decoder = self.stream_decoder()
        pieces = [decoder.push(piece) for piece in codes.split(_PIECE_FRAMES, dim=1)]
        return first_samples(torch.cat([*pieces, decoder.flush()], dim=1), samples)

    def stream_encoder(self) -> RvqStreamEncoder:
        """Encoder for one stream; a frame's codes come when 15 ms after it are known."""
        return RvqStreamEncoder(self)

    def stream_decoder(self) -> RvqStreamDecoder:
        """Decoder for one stream; it holds back 240 samples (15 ms)."""
        return RvqStreamDecoder(self)


class RvqStreamEncoder:
    """Turns samples into codes as they come; equal to `RvqCodec.encode` up to rounding."""

    def __init__(self, codec: RvqCodec) -> None:
        self._model = codec.model
        self._state: EncoderState | None = None
        self._samples = 0

    @torch.inference_mode()
    def push(self, pcm: Tensor) -> Tensor:
        """pcm [B, n] -> codes [B, T, K] of the frames that are final, T >= 0."""
        pcm = checked_pcm(pcm)
        self._samples += pcm.shape[1]
        state = self._model.encoder_state(pcm.shape[0]) if self._state is None else self._state
        latents, self._state = self._model.latents(pcm, state)
        return self._model.quantise(latents)

    def flush(self) -> Tensor:
        """Codes of the frames that are left, the last one filled with silence."""
        lanes = 1 if self._state is None else self._state.samples.shape[0]
        return self.push(torch.zeros(lanes, -self._samples % FRAME_SAMPLES + SIDE))


class RvqStreamDecoder:
    """`tokens.StreamDecoder` of the codec; equal to `RvqCodec.decode` up to rounding."""

    def __init__(self, codec: RvqCodec) -> None:
        self._codec = codec
        self._state: DecoderState | None = None

    @torch.inference_mode()
    def push(self, codes: Tensor) -> Tensor:
        """codes [B, T, K] -> pcm [B, n] float32: T * 320 samples, 240 fewer the first time."""
        model, codes = self._codec.model, checked_codes(codes, self._codec.spec)
        if codes.shape[1] == 0:
            return torch.empty(codes.shape[0], 0)
        first = self._state is None
        state = model.decoder_state(codes.shape[0]) if self._state is None else self._state
        pcm, self._state = model.sound(model.dequantise(codes), state)
        return pcm[:, SIDE:] if first else pcm

    def flush(self) -> Tensor:
        """The last 240 samples, pcm [B, 240]; none where nothing was pushed."""
        if self._state is None:
            return torch.empty(1, 0)
        return self._state.sound.flatten(1)[:, :SIDE]


class RvqConfig(Config):
    """`codec: {kind: rvq, weights: RUN}`.

    weights: run folder of a codec training; without it, what the environment variable TXL_AUDIO_RVQ names.
    """

    kind: Literal["rvq"] = "rvq"
    weights: str | None = None

    @classmethod
    def for_spec(cls, spec: TokenSpec, weights: str | None = None) -> RvqCodec:
        """The codec of `weights`; its caller compares the specs. Raises as `build`."""
        return cls(weights=weights).build()

    def build(self) -> RvqCodec:
        """Raises ConfigError where no weights are named, CheckpointError where they cannot be used."""
        named = self.weights or os.environ.get(WEIGHTS_VARIABLE)
        if not named:
            raise ConfigError(
                "the codec rvq needs the run folder of a codec training, as `txl-audio train "
                "configs/codec/kathleen_rvq.yaml` makes one: name it by the variable "
                f"{WEIGHTS_VARIABLE}, with --weights RUN beside --codec, or as model.codec_weights in "
                "a run's config"
            )
        return load_codec(named)


def load_codec(folder: str | Path) -> RvqCodec:
    """The codec of a run folder (config.yaml and model.safetensors). Raises CheckpointError, ConfigError."""
    config_path, weights_path = Path(folder) / "config.yaml", Path(folder) / "model.safetensors"
    if not (config_path.is_file() and weights_path.is_file()):
        raise CheckpointError(
            f"no trained codec in {folder} (config.yaml and model.safetensors); expected the run folder of "
            "`txl-audio train configs/codec/kathleen_rvq.yaml`"
        )
    try:
        run = OmegaConf.to_container(OmegaConf.load(config_path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(run, dict) or run.get("kind") != "codec":
        raise CheckpointError(
            f"{folder} is no run of a codec; expected one whose config.yaml has kind: codec"
        )
    model = validate(RvqModelConfig, run.get("model"), origin=f"{config_path}, model").build()
    try:
        model.load_state_dict(load_file(weights_path))
    except (SafetensorError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{weights_path} is damaged or of another model ({said}); train it again"
        ) from error
    return RvqCodec(model)
