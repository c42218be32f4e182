"""Codecs of streams: the components that a token spec names."""

from __future__ import annotations

from txl_audio.codecs import CODECS
from txl_audio.tokens import Codec, SpecError, TokenSpec


def codec_of(spec: TokenSpec) -> Codec:
    """The codec that made a stream's symbols. Raises SpecError for one that is not known."""
    if spec.name not in CODECS:
        raise SpecError(
            f"the model or data holds symbols of the codec {spec.name!r}, which is not known here; "
            f"known: {', '.join(sorted(CODECS))}"
        )
    codec = CODECS[spec.name]().build(frame_samples=spec.symbols_per_frame)
    codec.spec.require(spec.stored, here=f"the codec {spec.name}", there="the model or data")
    return codec


def codec_for_sound(spec: TokenSpec) -> Codec:
    """The codec that turns a stream's symbols into sound; SpecError where they are none."""
    if spec.modality == "text":
        raise SpecError("this model writes text symbols, expected an audio model; use one trained on audio")
    return codec_of(spec)
