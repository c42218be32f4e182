"""Codes of one recording in a file: safetensors with `codes` [T, K], their spec and the exact length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from txl_audio.tokens import DataError, TokenSpec


@dataclass(frozen=True)
class Codes:
    """codes [T, K] int64 of a recording of so many samples, at the spec's rate."""

    codes: torch.Tensor
    spec: TokenSpec
    samples: int


def write_codes(path: str | Path, codes: Codes) -> None:
    """Writes `path`. Raises DataError where that is not possible."""
    path = Path(path)
    small = torch.uint8 if codes.spec.vocab_size <= 1 << 8 else torch.int32
    metadata = {"spec": json.dumps(codes.spec.to_json()), "samples": str(codes.samples)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"codes": codes.codes.to(small).contiguous()}, path, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot write {path}: {error}") from error


def read_codes(path: str | Path) -> Codes:
    """What `write_codes` wrote. Raises DataError for another file, SpecError for another version's spec."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            spec, samples = json.loads(metadata["spec"]), int(metadata["samples"])
            codes = file.get_tensor("codes").long()
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as codes ({error}); expected a file of `txl-audio codec encode`"
        ) from error
    return Codes(codes, TokenSpec.from_json(spec, origin=str(path)), samples)
