"""Models of ours as folders that the authors' code and Hugging Face's `TransfoXL` read."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from txl_audio.interop.importers import CONSTANT
from txl_audio.interop.layouts import Layout, places, settings_of
from txl_audio.model.positions import inverse_frequencies
from txl_audio.model.sequence import SequenceModel


def write_folder(model: SequenceModel, folder: str | Path, *, layout: Layout) -> None:
    """Writes `config.json` and the weights: `pytorch_model.bin` (hf) or `weights.safetensors` (authors).

    Importing the folder gives the same tensors, bit for bit. What a stream begins with is the layout's
    own: a memory of zeros in Hugging Face's, nothing in the authors'. Raises CheckpointError for a model
    that the layout cannot hold.
    """
    settings = settings_of(model, layout)
    state = model.state_dict()
    weights: OrderedDict[str, Tensor] = OrderedDict()
    for place in places(settings, layout):
        parts = place.write(state[place.ours].cpu())
        weights.update(zip(place.theirs, (part.contiguous() for part in parts), strict=True))
        weights.update((copy, weights[place.theirs[0]]) for copy in place.copies)
    if settings["attn_type"] in (0, 2):
        weights[CONSTANT] = inverse_frequencies(settings["d_model"])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if layout == "authors":
        # A file of safetensors holds no tensor twice; tied ones are written out.
        save_file({name: value.clone() for name, value in weights.items()}, folder / "weights.safetensors")
    else:
        prefixed = OrderedDict((_prefixed(name), value) for name, value in weights.items())
        torch.save(prefixed, folder / "pytorch_model.bin")


def _prefixed(name: str) -> str:
    return name if name.startswith("crit.") else f"transformer.{name}"
