"""Codecs of streams: the components that a token spec names."""

from __future__ import annotations

from txl_audio.codecs import codec_of
from txl_audio.tokens import Codec, SpecError, TokenSpec


def codec_for_sound(spec: TokenSpec, weights: str | None = None) -> Codec:
    """The codec that turns a stream's symbols into sound, see `codec_of`; SpecError where they are none."""
    if spec.modality == "text":
        raise SpecError("this model writes text symbols, expected an audio model; use one trained on audio")
    return codec_of(spec, weights=weights)


__all__ = ["codec_for_sound", "codec_of"]
