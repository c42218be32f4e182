"""Codes of one recording in a file: safetensors with `codes` [T, K], their spec and the exact length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from txl_audio.tokens import DataError, SpecError, TokenSpec


@dataclass(frozen=True)
class Codes:
    """codes [T, K] int64 of a recording of so many samples, at the spec's rate."""

    codes: torch.Tensor
    spec: TokenSpec
    samples: int


def write_codes(path: str | Path, codes: Codes) -> None:
    """Writes `path`, which appears, or replaces an older file, only when it is complete.

    Raises DataError where that is not possible.
    """
    path = Path(path)
    unfinished = path.with_name(path.name + ".new")
    small = torch.uint8 if codes.spec.vocab_size <= 1 << 8 else torch.int32
    metadata = {"spec": json.dumps(codes.spec.to_json()), "samples": str(codes.samples)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"codes": codes.codes.to(small).contiguous()}, unfinished, metadata=metadata)
        unfinished.replace(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):  # nothing was begun where there can be no such file
            unfinished.unlink()


def read_codes(path: str | Path) -> Codes:
    """What `write_codes` wrote. Raises DataError for another file, SpecError for another version's spec."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            fields, samples = json.loads(metadata["spec"]), int(metadata["samples"])
            codes = file.get_tensor("codes")
        if not isinstance(fields, Mapping):
            raise ValueError(f"spec {fields}")
        spec = TokenSpec.from_json(fields, origin=str(path))
        _check(codes, spec, samples)
    except SpecError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise DataError(
            f"{path} cannot be read as codes ({error}); expected a file of `txl-audio codec encode`"
        ) from error
    return Codes(codes.long(), spec, samples)


def _check(codes: torch.Tensor, spec: TokenSpec, samples: int) -> None:
    """Raises ValueError, TypeError or ArithmeticError where the three do not belong together."""
    frames, k = -(-samples // round(spec.sample_rate_hz / spec.frame_rate_hz)), spec.symbols_per_frame
    if samples < 0 or codes.shape != (frames, k) or codes.dtype not in (torch.uint8, torch.int32):
        raise ValueError(
            f"{codes.dtype} {list(codes.shape)}, expected {frames} frames of {k} codes for {samples} samples"
        )
