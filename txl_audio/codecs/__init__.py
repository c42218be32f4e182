"""Codecs by name. A new codec is one file here and one line in `CODECS`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from txl_audio.codecs.mulaw import MuLawCodec, MuLawConfig
from txl_audio.config import validate
from txl_audio.tokens import Codec, ConfigError

CODECS = {"mulaw": MuLawConfig}
"""Configuration class of every codec; its `build()` gives the codec."""


@runtime_checkable
class WaveformCodec(Codec, Protocol):
    """A codec whose symbols are samples: what sample embeddings and heads need to know of it."""

    @property
    def levels(self) -> torch.Tensor:
        """Amplitude of every symbol, [V] float32."""
        ...

    @property
    def edges(self) -> torch.Tensor:
        """Smallest amplitude of symbols 1 to V - 1, [V - 1] float64."""
        ...


def build_codec(kind: str, **settings: object) -> Codec:
    """The codec called `kind` with the fields of its configuration. Raises ConfigError."""
    if kind not in CODECS:
        raise ConfigError(f"no codec is called {kind!r}; known: {', '.join(sorted(CODECS))}")
    return validate(CODECS[kind], settings, origin=f"codec {kind}").build()


__all__ = ["CODECS", "MuLawCodec", "MuLawConfig", "WaveformCodec", "build_codec"]
