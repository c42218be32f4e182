"""What codecs of `codes` check alike: sound on the way in, codes on the way back."""

from __future__ import annotations

import torch

from txl_audio.tokens import DataError, SpecError, TokenSpec


def checked_pcm(pcm: torch.Tensor) -> torch.Tensor:
    """pcm [B, N] as float32 on the CPU. Raises DataError for what is no sound of that shape."""
    if pcm.ndim != 2 or not pcm.is_floating_point():
        raise DataError(
            f"expected float audio of shape [lanes, samples], got {pcm.dtype} {list(pcm.shape)}; "
            "divide integers by their full scale"
        )
    if not torch.isfinite(pcm).all():
        raise DataError("audio has NaN or infinite samples, expected finite ones; repair or drop the file")
    return pcm.float().cpu()


def checked_codes(codes: torch.Tensor, spec: TokenSpec) -> torch.Tensor:
    """codes [B, T, K] as int64 on the CPU. Raises SpecError for another K, DataError for other values."""
    k, v = spec.symbols_per_frame, spec.vocab_size
    if codes.ndim != 3 or codes.shape[2] != k:
        raise SpecError(f"expected codes of shape [lanes, frames, {k}], got {list(codes.shape)}")
    if codes.is_floating_point() or codes.dtype == torch.bool:
        raise DataError(f"codes are integers, got {codes.dtype}; convert them first")
    codes = codes.long().cpu()
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < v:
        raise DataError(
            f"codes of {spec.name} lie in 0..{v - 1}, got {int(codes.min())}..{int(codes.max())}; "
            "padding and start symbols have to be removed before decoding"
        )
    return codes


def first_samples(pcm: torch.Tensor, samples: int | None) -> torch.Tensor:
    """The first `samples` of pcm [B, N], all where None. Raises SpecError where there are not so many."""
    if samples is not None and not 0 <= samples <= pcm.shape[1]:
        raise SpecError(f"{samples} samples were asked for, the codes hold {pcm.shape[1]}")
    return pcm[:, :samples]
