"""Codecs by name. A new codec is one file here and one line in `CODECS`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from txl_audio.codecs.lyra import LyraConfig
from txl_audio.codecs.mulaw import MuLawCodec, MuLawConfig
from txl_audio.codecs.pretrained import DacConfig, EncodecConfig, MimiConfig
from txl_audio.codecs.rvq import RvqConfig
from txl_audio.config import parse, validate
from txl_audio.tokens import Codec, ConfigError, SpecError, TokenSpec

CODECS: dict[str, Any] = {
    "mulaw": MuLawConfig,
    "lyra": LyraConfig,
    "encodec": EncodecConfig,
    "dac": DacConfig,
    "mimi": MimiConfig,
    "rvq": RvqConfig,
}
"""Configuration class of every codec: `build()` gives it, `for_spec(spec, weights)` the one of a spec."""


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
    return validate(_config(kind), settings, origin=f"codec {kind}").build()


def parse_codec(text: str, *, weights: str | None = None) -> Codec:
    """The codec of a word such as `mulaw` or `lyra:stages=46`, with its folder of weights where one is given.

    Raises ConfigError for a codec or setting that is not known, and where its weights cannot be used.
    """
    kind, _, settings = text.partition(":")
    words = [word for word in settings.split(",") if word]
    words += [f"weights={weights}"] * (weights is not None)
    return parse(_config(kind), f"kind: {kind}", words, origin=f"codec {kind}").build()


def codec_of(spec: TokenSpec, *, weights: str | None = None) -> Codec:
    """The codec that made a stream's symbols.

    Weights that are not given are looked for where the codec's config says. Raises SpecError for a codec
    that is not known or has other weights, ConfigError where weights cannot be used.
    """
    if spec.name not in CODECS:
        raise SpecError(
            f"the model or data holds symbols of the codec {spec.name!r}, which is not known here; "
            f"known: {', '.join(sorted(CODECS))}"
        )
    codec: Codec = CODECS[spec.name].for_spec(spec.sound, weights)
    codec.spec.require(spec.sound, here=f"the codec {spec.name}", there="the model or data")
    return codec


def _config(kind: str) -> Any:
    if kind not in CODECS:
        raise ConfigError(f"no codec is called {kind!r}; known: {', '.join(sorted(CODECS))}")
    return CODECS[kind]


__all__ = ["CODECS", "MuLawCodec", "MuLawConfig", "WaveformCodec", "build_codec", "codec_of", "parse_codec"]
