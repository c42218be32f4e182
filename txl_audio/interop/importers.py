"""Weights of the authors' PyTorch code and of Hugging Face's `TransfoXL`, renamed to ours.

Both keep the same tensors under almost the same names: Hugging Face prefixes the core with
`transformer.`, keeps u and v in every layer, and starts from a memory of zeros that is attended to.
Sources: kimiyoung/transformer-xl (pytorch/mem_transformer.py), transformers 4.37.2.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.positions import (
    AbsoluteConfig,
    AlRfouConfig,
    PositionsConfig,
    RelativeConfig,
    ShawConfig,
)
from txl_audio.model.transformer import CoreConfig
from txl_audio.tokens import CheckpointError, TokenSpec, settings_hash

# Inside a layer, ours -> theirs.
LAYER_NAMES = {
    "attention_norm.weight": "dec_attn.layer_norm.weight",
    "attention_norm.bias": "dec_attn.layer_norm.bias",
    "out.weight": "dec_attn.o_net.weight",
    "expand.weight": "pos_ff.CoreNet.0.weight",
    "expand.bias": "pos_ff.CoreNet.0.bias",
    "contract.weight": "pos_ff.CoreNet.3.weight",
    "contract.bias": "pos_ff.CoreNet.3.bias",
    "feed_forward_norm.weight": "pos_ff.layer_norm.weight",
    "feed_forward_norm.bias": "pos_ff.layer_norm.bias",
}

DEFAULT_SEGMENT_LEN = 128
"""Where a layout does not say its segment length (Hugging Face): the authors' for WikiText-103."""


@dataclass(frozen=True)
class Imported:
    """A foreign model in our terms; `weights` is the state dict of a `SequenceModel`."""

    spec: TokenSpec
    core: CoreConfig
    embedding: SymbolEmbeddingConfig
    head: SoftmaxHeadConfig
    weights: dict[str, Tensor]


def read_folder(folder: str | Path, *, segment_len: int | None = None) -> Imported:
    """Reads `config.json` and the weights beside it, in either layout.

    `segment_len` replaces the layout's own (the authors' `tgt_len`). Raises CheckpointError for
    files that are missing, damaged, incomplete or not yet supported, and for settings that contradict.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    weights = _read_weights(folder)
    hugging_face = config.get("model_type") == "transfo-xl"
    try:
        if hugging_face:
            config = {**config, "n_token": config["vocab_size"]}
            weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
        return _translate(config, weights, hugging_face=hugging_face, segment_len=segment_len)
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


def _translate(
    config: Mapping[str, Any], weights: dict[str, Tensor], *, hugging_face: bool, segment_len: int | None
) -> Imported:
    if config["cutoffs"]:
        raise CheckpointError(
            f"adaptive softmax (cutoffs {config['cutoffs']}) is not yet supported; expected cutoffs []"
        )
    if config.get("ext_len"):
        raise CheckpointError(f"ext_len {config['ext_len']} is not supported; expected ext_len 0")
    n_layer, n_head, d_head = config["n_layer"], config["n_head"], config["d_head"]
    d_model, d_embed = config["d_model"], config["d_embed"]
    if hugging_face and config.get("layer_norm_epsilon", 1e-5) != 1e-5:
        raise CheckpointError(f"layer_norm_epsilon is {config['layer_norm_epsilon']}, expected 1e-5")
    segment_len = int(segment_len or config.get("tgt_len") or DEFAULT_SEGMENT_LEN)
    scheme = config["attn_type"]
    taken: dict[str, Tensor] = {}
    used: set[str] = set()

    def take(ours: str, theirs: str) -> Tensor:
        used.add(theirs)
        taken[ours] = weights[theirs]
        return weights[theirs]

    take("embedding.weight", "word_emb.emb_layers.0.weight")
    if d_embed != d_model:
        take("embedding.projection.weight", "word_emb.emb_projs.0")
        # Theirs maps the embedding to the model; the head uses it the other way round.
        taken["head.projection.weight"] = weights["crit.out_projs.0"].T.contiguous()
        used.add("crit.out_projs.0")
    take("head.bias", "crit.out_layers.0.bias")
    tied = bool(config.get("tie_weight", config.get("tie_word_embeddings", True)))
    used.add("crit.out_layers.0.weight")
    if not tied:
        taken["head.weight"] = weights["crit.out_layers.0.weight"]
    for i in range(n_layer):
        for ours, theirs in LAYER_NAMES.items():
            take(f"core.layers.{i}.{ours}", f"layers.{i}.{theirs}")
        prefix = f"layers.{i}.dec_attn."
        parts = ("q_net", "kv_net") if scheme in (2, 3) else ("qkv_net",)
        names = [f"{prefix}{part}.weight" for part in parts]
        used.update(names)
        taken[f"core.layers.{i}.qkv.weight"] = torch.cat([weights[name] for name in names])
    positions = _positions(config, weights, taken, used, hugging_face=hugging_face, segment_len=segment_len)
    left = sorted(set(weights) - used - {"pos_emb.inv_freq"})
    if left:
        raise CheckpointError(f"tensors without a place in this model: {', '.join(left)}")
    core = CoreConfig(
        n_layer=n_layer,
        d_model=d_model,
        n_head=n_head,
        d_head=d_head,
        d_ff=config["d_inner"],
        mem_len=config["mem_len"],
        segment_len=segment_len,
        window="same_length" if config["same_length"] else "segment",
        positions=positions,
        norm="pre" if config["pre_lnorm"] else "post",
        first_memory="zeros" if hugging_face else "empty",
        dropout=config.get("dropout", 0.0),
        attention_dropout=config.get("dropatt", 0.0),
    )
    spec = TokenSpec("text", config["n_token"], 1, 0.0, 0, "ids", settings_hash({"size": config["n_token"]}))
    return Imported(spec, core, SymbolEmbeddingConfig(d_embed=d_embed), SoftmaxHeadConfig(tied=tied), taken)


def _positions(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    taken: dict[str, Tensor],
    used: set[str],
    *,
    hugging_face: bool,
    segment_len: int,
) -> PositionsConfig:
    """The position scheme of `attn_type`; its tensors go to `taken`, their names to `used`."""
    n_layer, scheme = config["n_layer"], config["attn_type"]
    clamp_len = config["clamp_len"] if config["clamp_len"] > 0 else None

    def put(ours: str, value: Tensor, *theirs: str) -> None:
        taken[f"core.positions.{ours}"] = value
        used.update(theirs)

    if scheme == 0:
        untie = bool(config.get("untie_r", False))
        for ours, theirs in (("u", "r_w_bias"), ("v", "r_r_bias")):
            names = [f"layers.{i}.dec_attn.{theirs}" for i in range(n_layer)]
            if theirs in weights:
                # Hugging Face lists the shared bias again under every layer.
                used.update(names)
                names = [theirs]
            per_layer = torch.stack([weights[name] for name in names])
            put(ours, per_layer if untie else per_layer[:1], *names)
        for i in range(n_layer):
            name = f"layers.{i}.dec_attn.r_net.weight"
            put(f"keys.{i}.weight", weights[name], name)
        return RelativeConfig(untie_r=untie, clamp_len=clamp_len)
    if clamp_len is not None:
        raise CheckpointError(f"clamp_len with attn_type {scheme} is not supported; expected attn_type 0")
    if scheme == 1:
        put("u", weights["r_w_bias"], "r_w_bias")
        # Their last row is distance 0, ours the first.
        put("r", weights["r_emb"].flip(1), "r_emb")
        put("b", weights["r_bias"].flip(1), "r_bias")
        return ShawConfig(kind="shaw", max_distance=weights["r_emb"].size(1))
    if scheme == 2:
        return AbsoluteConfig(kind="absolute", segment_len=segment_len)
    if scheme == 3:
        put("rows", weights["r_emb"].flatten(2), "r_emb")
        return AlRfouConfig(kind="alrfou", segment_len=weights["r_emb"].size(1))
    raise CheckpointError(f"attn_type {scheme} is not known; expected 0, 1, 2 or 3")


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
    for name in ("weights.safetensors", "model.safetensors"):
        if (folder / name).is_file():
            try:
                return load_file(folder / name)
            except SafetensorError as error:
                raise CheckpointError(f"{folder / name} is damaged: {error}") from error
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise CheckpointError(
            f"no weights in {folder}; expected weights.safetensors, model.safetensors or pytorch_model.bin"
        )
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} is not a plain state dict: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict) or not all(isinstance(v, Tensor) for v in value.values()):
        raise CheckpointError(f"{path} is not a state dict of tensors")
    return value
