"""Weights of the authors' PyTorch code and of Hugging Face's `TransfoXL`, renamed to ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl_audio.data.text import TextVocabulary
from txl_audio.interop.layouts import Layout, Settings, is_plain, missing_keys, parts_of, places
from txl_audio.interop.vocabulary import read_vocabulary
from txl_audio.model.embeddings import EmbeddingConfig
from txl_audio.model.heads import HeadConfig
from txl_audio.model.transformer import CoreConfig
from txl_audio.tokens import CheckpointError, TokenSpec, unnamed_text_spec

CONSTANT = "pos_emb.inv_freq"
"""A tensor of theirs that is no parameter: the sinusoids' frequencies."""

WEIGHT_FILES = ("weights.safetensors", "model.safetensors", "pytorch_model.bin", "model.pt")


@dataclass(frozen=True)
class Imported:
    """A foreign model in our terms; `weights` is the state dict of a `SequenceModel`.

    vocabulary: of the symbols, where one lies beside the weights.
    """

    spec: TokenSpec
    core: CoreConfig
    embedding: EmbeddingConfig
    head: HeadConfig
    weights: dict[str, Tensor]
    vocabulary: TextVocabulary | None = None


def read_folder(folder: str | Path, *, segment_len: int | None = None) -> Imported:
    """Reads `config.json` and the weights beside it, in either layout, and a vocabulary if there is one.

    `segment_len` replaces the layout's own (the authors' `tgt_len`). Raises CheckpointError for files
    that are missing, damaged or incomplete, and for settings that contradict.
    """
    folder = Path(folder)
    settings = _read_json(folder / "config.json")
    layout: Layout = "hf" if settings.get("model_type") == "transfo-xl" else "authors"
    missing, needed = missing_keys(settings, layout)
    if missing:
        raise CheckpointError(
            f"{folder / 'config.json'} lacks {', '.join(missing)}; expected the keys {', '.join(needed)}"
        )
    weights = _read_weights(folder)
    try:
        size = settings[needed[0]]
        core, embedding, head = parts_of(settings, layout, segment_len=segment_len)
        ours = _rename(settings, layout, weights)
    except KeyError as error:
        raise CheckpointError(
            f"{folder}: no {error.args[0]!r} found; expected the authors' layout (config.json, "
            "weights.safetensors) or Hugging Face's (config.json, pytorch_model.bin or model.safetensors)"
        ) from error
    except (TypeError, ValidationError) as error:
        said = (
            "; ".join(f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise CheckpointError(
            f"{folder / 'config.json'} describes no model that can be built: {said}"
        ) from error
    vocabulary = read_vocabulary(folder, size=size)
    spec = vocabulary.spec if vocabulary is not None else unnamed_text_spec(size)
    return Imported(spec, core, embedding, head, ours, vocabulary)


def _rename(settings: Settings, layout: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    theirs = {name.removeprefix("transformer."): value for name, value in weights.items()}
    ours: dict[str, Tensor] = {}
    used = {CONSTANT}
    for place in places(settings, layout, plain=is_plain(settings)):
        names = place.theirs
        if place.copies:
            names = tuple(name for name in (*names, *place.copies) if name in theirs)[:1] or names
        parts = [theirs[name] for name in names]
        ours[place.ours] = place.read(parts).float().contiguous()
        used.update(place.theirs, place.copies)
        for copy in place.copies:
            if copy in theirs and not torch.equal(theirs[copy], parts[0]):
                raise CheckpointError(
                    f"{copy} differs from {names[0]}, which config.json ties it to; correct "
                    "tie_weight, tie_word_embeddings or tie_projs"
                )
    left = sorted(set(theirs) - used)
    if left:
        raise CheckpointError(f"tensors without a place in this model: {', '.join(left)}")
    return ours


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"no {path.name} in {path.parent}; expected a folder with config.json and weights"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected an object")
    return value


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"no weights in {folder}; expected {', '.join(WEIGHT_FILES)}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        value = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        # PyTorch's own message is mostly about ways to run the file's code after all.
        found = str(error).rpartition("WeightsUnpickler error: ")[2]
        reason = found.split("\n")[0].partition(". Please use")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is not a plain state dict ({reason}); expected what "
            "torch.save(model.state_dict(), FILE) writes"
        ) from error
    if not isinstance(value, dict) or not all(isinstance(v, Tensor) for v in value.values()):
        raise CheckpointError(f"{path} is not a state dict of tensors")
    return value
