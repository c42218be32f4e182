"""mu-law: every sample of a 16 kHz stream becomes one of 256 codes, and back.

The quantiser is F(x) = sign(x) ln(1 + 255 |x|) / ln(256), code = floor((F(x) + 1) / 2 * 255 + 0.5)
(ITU-T G.711's curve in continuous form; WaveNet, arXiv 1609.03499, section 2.2). Codes 127 and 128
meet at zero, so digital silence is code 128.

Both directions go through tables computed once in float64. A logarithm taken per sample would put
samples at a boundary into different codes in NumPy, in PyTorch and on a GPU; a table cannot.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, overload

import numpy as np
import torch

from txl_audio.config import Config
from txl_audio.tokens import ConfigError, DataError, SpecError, TokenSpec, settings_hash

MU = 255
CODES = MU + 1
SILENCE = 128
SAMPLE_RATE_HZ = 16_000


def _expand(f: np.ndarray) -> np.ndarray:
    """Inverse of F: companded value in [-1, 1] -> amplitude in [-1, 1], float64."""
    return np.sign(f) * np.expm1(np.abs(f) * math.log(CODES)) / MU


_LEVELS = _expand(2 * np.arange(CODES) / MU - 1).astype(np.float32)
# The smallest amplitude of codes 1 to 255: F(x) = (2c - 1) / 255 - 1. A sample has as many codes
# below it as there are edges at or below it.
_EDGES = _expand((2 * np.arange(1, CODES) - 1) / MU - 1)
# Rounded up to float32, so that x >= edge says the same about a float32 x as with the float64 edge.
_EDGES_FLOAT32 = _EDGES.astype(np.float32)
_EDGES_FLOAT32 = np.where(
    _EDGES_FLOAT32 < _EDGES, np.nextafter(_EDGES_FLOAT32, np.float32(2)), _EDGES_FLOAT32
).astype(np.float32)

# Zero and step of each integer type of PCM. Wider integers say nothing about their full scale.
_INTEGER_PCM = {"uint8": (128, 128), "int8": (0, 128), "int16": (0, 1 << 15), "int32": (0, 1 << 31)}


@overload
def mulaw_encode(pcm: np.ndarray) -> np.ndarray: ...
@overload
def mulaw_encode(pcm: torch.Tensor) -> torch.Tensor: ...
def mulaw_encode(pcm: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """Samples of any shape -> int64 codes of the same shape, equal for NumPy and PyTorch.

    Floats are amplitudes, clipped to [-1, 1]; uint8 (zero at 128), int8, int16 and int32 are scaled
    by their type. Raises DataError for samples that are not finite and for other types.
    """
    pcm = _amplitudes(pcm)
    if isinstance(pcm, np.ndarray):
        edges = _EDGES if pcm.dtype == np.float64 else _EDGES_FLOAT32
        return np.searchsorted(edges, pcm, side="right").astype(np.int64, copy=False)
    return torch.bucketize(pcm.contiguous(), _edges_on(pcm.device, pcm.dtype), right=True)


@overload
def mulaw_decode(codes: np.ndarray) -> np.ndarray: ...
@overload
def mulaw_decode(codes: torch.Tensor) -> torch.Tensor: ...
def mulaw_decode(codes: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """Codes of any integer type and shape -> float32 amplitudes in [-1, 1] of the same shape.

    Raises DataError for codes outside 0..255 and for types that are not integers.
    """
    if isinstance(codes, np.ndarray):
        if codes.dtype.kind not in "iu":
            raise DataError(f"mu-law codes are integers, got {codes.dtype}; convert them first")
    elif codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise DataError(f"mu-law codes are integers, got {codes.dtype}; convert them first")
    else:
        codes = codes.long()  # uint8 tensors index as masks
    if math.prod(codes.shape):
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= CODES:
            raise DataError(
                f"mu-law codes lie in 0..{CODES - 1}, got {low}..{high}; "
                "padding and start symbols have to be removed before decoding"
            )
    if isinstance(codes, np.ndarray):
        return _LEVELS[codes]
    return _levels_on(codes.device)[codes]


def clipped_count(pcm: np.ndarray | torch.Tensor) -> int:
    """How many samples `mulaw_encode` has to clip: those beyond [-1, 1]. Integer PCM has none."""
    if isinstance(pcm, np.ndarray):
        return int(np.count_nonzero(np.abs(pcm) > 1)) if pcm.dtype.kind == "f" else 0
    return int((pcm.abs() > 1).sum()) if pcm.is_floating_point() else 0


def _amplitudes(pcm: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """PCM of a supported type as floats; float64 only where it came as float64 or int32."""
    name = pcm.dtype.name if isinstance(pcm, np.ndarray) else str(pcm.dtype).removeprefix("torch.")
    if name in _INTEGER_PCM:
        zero, scale = _INTEGER_PCM[name]
        # float32 has 24 bits: enough for 16-bit PCM, not for 32-bit.
        if isinstance(pcm, np.ndarray):
            return (pcm.astype(np.float64 if name == "int32" else np.float32) - zero) / scale
        return (pcm.to(torch.float64 if name == "int32" else torch.float32) - zero) / scale
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise DataError(
            f"audio samples of type {name} have no known scale; give floats in [-1, 1], or integers "
            f"as one of {', '.join(_INTEGER_PCM)}"
        )
    if isinstance(pcm, np.ndarray):
        finite = bool(np.isfinite(pcm).all())
        pcm = pcm if name == "float64" else pcm.astype(np.float32, copy=False)
    else:
        finite = bool(torch.isfinite(pcm).all())
        pcm = pcm if name == "float64" else pcm.float()
    if not finite:
        raise DataError("audio has NaN or infinite samples, expected finite ones; repair or drop the file")
    return pcm


@lru_cache(maxsize=16)
def _edges_on(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(_EDGES if dtype == torch.float64 else _EDGES_FLOAT32).to(device)


@lru_cache(maxsize=16)
def _levels_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_LEVELS).to(device)


class MuLawCodec:
    """The 16 kHz mu-law codec; implements `tokens.Codec`.

    Args:
        frame_samples: P, consecutive samples per frame. It only groups samples: streams of
            different P hold the same symbols (`TokenSpec.framed`).

    Raises SpecError where P < 1.
    """

    description = f"mu-law {MU}, {CODES} codes"

    def __init__(self, frame_samples: int = 1) -> None:
        self.spec = TokenSpec(
            modality="waveform",
            vocab_size=CODES,
            symbols_per_frame=1,
            frame_rate_hz=float(SAMPLE_RATE_HZ),
            sample_rate_hz=SAMPLE_RATE_HZ,
            name="mulaw",
            settings_hash=settings_hash({"codes": CODES, "mu": MU, "sample_rate_hz": SAMPLE_RATE_HZ}),
        ).framed(frame_samples)

    @property
    def levels(self) -> torch.Tensor:
        """Amplitude of every code, [V] float32."""
        return torch.from_numpy(_LEVELS.copy())

    @property
    def edges(self) -> torch.Tensor:
        """Smallest amplitude of codes 1 to V - 1, [V - 1] float64: the bins of the quantiser."""
        return torch.from_numpy(_EDGES.copy())

    def encode(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [B, N] -> codes [B, ceil(N / P), P] int64.

        Where N is no multiple of P the last frame is filled with silence, code 128; `decode` with
        `samples=N` takes it off again. Types and faults as `mulaw_encode`.
        """
        if pcm.ndim != 2:
            raise DataError(f"expected audio of shape [lanes, samples], got {list(pcm.shape)}")
        p = self.spec.symbols_per_frame
        codes = mulaw_encode(pcm)
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % p), value=SILENCE)
        return codes.reshape(codes.shape[0], codes.shape[1] // p, p)

    def decode(self, codes: torch.Tensor, *, samples: int | None = None) -> torch.Tensor:
        """codes [B, T, P] -> pcm [B, N] float32 with N = T * P, or the first `samples` of them.

        Raises SpecError for another frame size or more samples than the codes hold, DataError as
        `mulaw_decode`.
        """
        p = self.spec.symbols_per_frame
        if codes.ndim != 3 or codes.shape[2] != p:
            raise SpecError(f"expected codes of shape [lanes, frames, {p}], got {list(codes.shape)}")
        pcm = mulaw_decode(codes).reshape(codes.shape[0], codes.shape[1] * p)
        if samples is None:
            return pcm
        if not 0 <= samples <= pcm.shape[1]:
            raise SpecError(f"{samples} samples were asked for, {codes.shape[1]} frames hold {pcm.shape[1]}")
        return pcm[:, :samples]

    def stream_decoder(self) -> MuLawStreamDecoder:
        """Decoder for one stream. mu-law has no memory, so every push returns all its samples."""
        return MuLawStreamDecoder(self)


class MuLawStreamDecoder:
    """`tokens.StreamDecoder` of mu-law: what is pushed is final at once."""

    def __init__(self, codec: MuLawCodec) -> None:
        self._codec = codec
        self._lanes = 1

    def push(self, codes: torch.Tensor) -> torch.Tensor:
        """codes [B, T, P] -> pcm [B, T * P] float32."""
        self._lanes = codes.shape[0]
        return self._codec.decode(codes)

    def flush(self) -> torch.Tensor:
        """pcm [B, 0]: nothing is ever held back."""
        return torch.empty(self._lanes, 0)


class MuLawConfig(Config):
    """`codec: {kind: mulaw}`. How many samples make a frame is the model's setting, not the codec's."""

    kind: Literal["mulaw"] = "mulaw"

    @classmethod
    def for_spec(cls, spec: TokenSpec, weights: str | None = None) -> MuLawCodec:
        """The codec in frames of the spec's size."""
        if weights is not None:
            raise ConfigError(f"mu-law has no weights, got {weights}; leave them out")
        return cls().build(frame_samples=spec.symbols_per_frame)

    def build(self, *, frame_samples: int = 1) -> MuLawCodec:
        return MuLawCodec(frame_samples)
