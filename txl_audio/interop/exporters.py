"""Models of ours in the layouts of the authors' code and of Hugging Face's `TransfoXL`.

Hugging Face's `from_pretrained` reads the folder as it is. The authors' code, which pickles whole models,
reads neither file by itself: the keys of `config.json` are the arguments of its `MemTransformerLM`, and
`load_state_dict(safetensors.torch.load_file("weights.safetensors"))` then gives it the weights.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from txl_audio.data.text import VOCABULARY_FILE
from txl_audio.interop.importers import CONSTANT
from txl_audio.interop.layouts import Layout, places, settings_of
from txl_audio.model.heads import SoftmaxHead
from txl_audio.model.positions import inverse_frequencies
from txl_audio.model.sequence import SequenceModel
from txl_audio.tokens import Vocabulary


def write_folder(
    model: SequenceModel, folder: str | Path, *, layout: Layout, vocabulary: Vocabulary | None = None
) -> None:
    """Writes `config.json`, the weights, `pytorch_model.bin` (hf) or `weights.safetensors` (authors), and
    the vocabulary where it is known, as our `vocabulary.json`.

    Importing the folder gives the same tensors, bit for bit, and the same vocabulary; an adaptive softmax
    of one cluster comes back as the ordinary one that it is. What a stream begins with is the layout's own:
    see FIRST_MEMORY. Raises CheckpointError for a model that the layout cannot hold.
    """
    settings = settings_of(model, layout)
    state = model.state_dict()
    weights: OrderedDict[str, Tensor] = OrderedDict()
    for place in places(settings, layout, plain=isinstance(model.head, SoftmaxHead)):
        parts = place.write(state[place.ours].cpu())
        weights.update(zip(place.theirs, (part.contiguous() for part in parts), strict=True))
        weights.update((copy, weights[place.theirs[0]]) for copy in place.copies)
    if settings["attn_type"] in (0, 2):
        weights[CONSTANT] = inverse_frequencies(settings["d_model"])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if vocabulary is not None:
        vocabulary.save(folder / VOCABULARY_FILE)
    if layout == "authors":
        # A file of safetensors holds no tensor twice; tied ones are written out.
        save_file({name: value.clone() for name, value in weights.items()}, folder / "weights.safetensors")
    else:
        prefixed = OrderedDict((_prefixed(name), value) for name, value in weights.items())
        torch.save(prefixed, folder / "pytorch_model.bin")


def _prefixed(name: str) -> str:
    return name if name.startswith("crit.") else f"transformer.{name}"
