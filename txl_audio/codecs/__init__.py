"""Codecs by name. A new codec is one file here and one line in `CODECS`."""

from __future__ import annotations

from txl_audio.codecs.mulaw import MuLawCodec, MuLawConfig
from txl_audio.config import validate
from txl_audio.tokens import Codec, ConfigError

CODECS = {"mulaw": MuLawConfig}
"""Configuration class of every codec; its `build()` gives the codec."""


def build_codec(kind: str, **settings: object) -> Codec:
    """The codec called `kind` with the fields of its configuration. Raises ConfigError."""
    if kind not in CODECS:
        raise ConfigError(f"no codec is called {kind!r}; known: {', '.join(sorted(CODECS))}")
    return validate(CODECS[kind], settings, origin=f"codec {kind}").build()


__all__ = ["CODECS", "MuLawCodec", "MuLawConfig", "build_codec"]
