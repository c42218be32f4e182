"""Two layouts of Transformer-XL weights: which settings and which tensor names stand for ours.

Both keep the same tensors under almost the same names. Hugging Face prefixes the core with
`transformer.`, lists u and v under every layer, orders the clusters of the first softmax upwards (the
authors downwards), and starts from a memory of zeros that is attended to. One table, `places`, serves
reading and writing.
Sources: kimiyoung/transformer-xl (pytorch/mem_transformer.py), transformers 4.37.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from txl_audio.model.adaptive import (
    AdaptiveEmbedding,
    AdaptiveEmbeddingConfig,
    AdaptiveHead,
    AdaptiveHeadConfig,
)
from txl_audio.model.embeddings import EmbeddingConfig, SymbolEmbedding, SymbolEmbeddingConfig
from txl_audio.model.heads import HeadConfig, SoftmaxHead, SoftmaxHeadConfig
from txl_audio.model.positions import (
    AbsoluteConfig,
    AlRfouConfig,
    PositionsConfig,
    RelativeConfig,
    ShawConfig,
)
from txl_audio.model.sequence import SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.tokens import CheckpointError

Layout: TypeAlias = Literal["authors", "hf"]
Settings: TypeAlias = Mapping[str, Any]
Parts: TypeAlias = tuple[CoreConfig, EmbeddingConfig, HeadConfig]

DEFAULT_SEGMENT_LEN = 128
"""Where a layout does not say its segment length (Hugging Face): the authors' for WikiText-103."""

SCHEMES = ("relative", "shaw", "absolute", "alrfou")
"""Our names of `attn_type` 0, 1, 2, 3."""

_LAYER = {
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

FIRST_MEMORY: dict[Layout, Literal["empty", "zeros"]] = {"authors": "empty", "hf": "zeros"}
"""What a stream begins with in each layout's own code. No file says so."""

_NOT_STORED = {"attention", "first_memory"}
"""Settings of a core that are not looked for in a layout: they change no result of a trained model, but
`first_memory`, which changes that of a stream's beginning (FIRST_MEMORY)."""

_NEEDED = (
    "n_layer",
    "n_head",
    "d_model",
    "d_head",
    "d_inner",
    "d_embed",
    "cutoffs",
    "pre_lnorm",
    "mem_len",
    "same_length",
    "attn_type",
    "clamp_len",
)


@dataclass(frozen=True)
class Place:
    """One tensor of ours and where it stands in theirs (without the prefix `transformer.`).

    copies: further names of theirs for the same tensor (tied weights); a file may have any one of them.
    """

    ours: str
    theirs: tuple[str, ...]
    copies: tuple[str, ...] = ()
    read: Callable[[Sequence[Tensor]], Tensor] = lambda theirs: theirs[0]
    write: Callable[[Tensor], Sequence[Tensor]] = lambda ours: [ours]


def missing_keys(settings: Settings, layout: Layout) -> tuple[list[str], tuple[str, ...]]:
    """Keys of theirs that `settings` lack, and all that are needed, that of the vocabulary's size first."""
    needed = ("vocab_size" if layout == "hf" else "n_token", *_NEEDED)
    if settings.get("attn_type") in (1, 3):  # their tables have a row for each distance of a segment
        needed += ("tgt_len",)
    return [key for key in needed if key not in settings], needed


def is_plain(settings: Settings) -> bool:
    """Whether the settings are those of an ordinary softmax, which theirs is a special case of."""
    tied = settings["d_embed"] != settings["d_model"] and any(settings.get("tie_projs") or ())
    return not settings["cutoffs"] and settings.get("div_val", 1) == 1 and not tied


def tied_projections(settings: Settings) -> tuple[bool, ...]:
    """Of every cluster, whether input and softmax share its projection."""
    clusters = len(settings["cutoffs"]) + 1
    default = [False] + [True] * (clusters - 1)  # Hugging Face's, where older files say nothing
    given = settings.get("tie_projs")
    return (*(default if given is None else given), *[False] * clusters)[:clusters]


def is_tied(settings: Settings) -> bool:
    return bool(settings.get("tie_weight", settings.get("tie_word_embeddings", True)))


def parts_of(settings: Settings, layout: Layout, *, segment_len: int | None = None) -> Parts:
    """Our configs for their settings. `segment_len` replaces their `tgt_len`.

    Raises CheckpointError for settings that have no counterpart here.
    """
    if settings.get("ext_len"):
        raise CheckpointError(f"ext_len {settings['ext_len']} is not supported; expected ext_len 0")
    if settings.get("layer_norm_epsilon", 1e-5) != 1e-5:
        raise CheckpointError(f"layer_norm_epsilon is {settings['layer_norm_epsilon']}, expected 1e-5")
    segment_len = int(segment_len or settings.get("tgt_len") or DEFAULT_SEGMENT_LEN)
    core = CoreConfig(
        n_layer=settings["n_layer"],
        d_model=settings["d_model"],
        n_head=settings["n_head"],
        d_head=settings["d_head"],
        d_ff=settings["d_inner"],
        mem_len=settings["mem_len"],
        segment_len=segment_len,
        window="same_length" if settings["same_length"] else "segment",
        positions=_positions_of(settings, layout, segment_len),
        norm="pre" if settings["pre_lnorm"] else "post",
        first_memory=FIRST_MEMORY[layout],
        dropout=settings.get("dropout", 0.0),
        attention_dropout=settings.get("dropatt", 0.0),
    )
    tied, d_embed = is_tied(settings), settings["d_embed"]
    if is_plain(settings):
        return core, SymbolEmbeddingConfig(d_embed=d_embed), SoftmaxHeadConfig(tied=tied)
    embedding = AdaptiveEmbeddingConfig(
        kind="adaptive",
        cutoffs=tuple(settings["cutoffs"]),
        div_val=settings.get("div_val", 1),
        d_embed=d_embed,
    )
    head = AdaptiveHeadConfig(kind="adaptive", tied=tied, tie_projs=tied_projections(settings))
    return core, embedding, head


def _positions_of(settings: Settings, layout: Layout, segment_len: int) -> PositionsConfig:
    scheme = settings["attn_type"]
    clamp_len = settings["clamp_len"] if settings["clamp_len"] > 0 else None
    if scheme not in range(len(SCHEMES)):
        raise CheckpointError(f"attn_type {scheme} is not known; expected 0, 1, 2 or 3")
    if layout == "hf" and scheme != 0:
        raise CheckpointError(
            f"Hugging Face's layout holds relative positions only (attn_type 0), got {SCHEMES[scheme]} "
            f"(attn_type {scheme}); use the authors' layout"
        )
    if scheme == 0:
        untie_r = layout == "hf" and bool(settings.get("untie_r", False))
        return RelativeConfig(untie_r=untie_r, clamp_len=clamp_len)
    if clamp_len is not None:
        raise CheckpointError(f"clamp_len with attn_type {scheme} is not supported; expected attn_type 0")
    if scheme == 1:
        return ShawConfig(kind="shaw", max_distance=settings["tgt_len"] + settings["mem_len"])
    if scheme == 2:
        return AbsoluteConfig(kind="absolute", segment_len=segment_len)
    return AlRfouConfig(kind="alrfou", segment_len=settings["tgt_len"])


def settings_of(model: SequenceModel, layout: Layout) -> dict[str, Any]:
    """Their settings for a model of ours; CheckpointError where the layout cannot hold it."""
    core, embedding, head = model.core.config, model.embedding, model.head
    if isinstance(embedding, AdaptiveEmbedding) and isinstance(head, AdaptiveHead):
        cutoffs, div_val = list(embedding.config.cutoffs), embedding.config.div_val
        d_embed, tied = embedding.d_embed, head.config.tied
        tie_projs = [*head.config.tie_projs, *[False] * embedding.clusters][: embedding.clusters]
    elif (
        isinstance(embedding, SymbolEmbedding)
        and embedding.ngrams is None
        and isinstance(head, SoftmaxHead)
        and model.spec.modality == "text"
    ):
        cutoffs, div_val, tie_projs = [], 1, [False]
        d_embed, tied = embedding.weight.size(1), head.weight is None
    else:
        raise CheckpointError(
            f"the layout {layout} holds text models only, with embedding symbols without ngrams and head "
            f"softmax, or both adaptive; got a {model.spec.modality} model of {type(embedding).__name__} and "
            f"{type(head).__name__}"
        )
    at = core.positions
    relative = isinstance(at, RelativeConfig)
    shared = {
        "n_layer": core.n_layer,
        "n_head": core.n_head,
        "d_model": core.d_model,
        "d_head": core.d_head,
        "d_inner": core.d_ff,
        "d_embed": d_embed,
        "dropout": core.dropout,
        "dropatt": core.attention_dropout,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "tie_projs": tie_projs,
        "pre_lnorm": core.norm == "pre",
        "tgt_len": core.segment_len,
        "ext_len": 0,
        "mem_len": core.mem_len,
        "same_length": core.window == "same_length",
        "attn_type": SCHEMES.index(at.kind),
        "clamp_len": (at.clamp_len if relative else None) or -1,
    }
    if layout == "authors":
        settings = {"n_token": model.spec.vocab_size, "tie_weight": tied, **shared}
    else:
        settings = {
            "model_type": "transfo-xl",
            "architectures": ["TransfoXLLMHeadModel"],
            "vocab_size": model.spec.vocab_size,
            "tie_word_embeddings": tied,
            "untie_r": relative and at.untie_r,
            "adaptive": True,
            "layer_norm_epsilon": 1e-5,
            **shared,
        }
    # What reading it again would not give back, the layout cannot say.
    wanted, told = core.model_dump(), parts_of(settings, layout)[0].model_dump()
    lost = [f"{n} {wanted[n]!r}" for n in wanted if n not in _NOT_STORED and wanted[n] != told[n]]
    if lost:
        raise CheckpointError(
            f"the layout {layout} cannot hold this model's {', '.join(lost)}; it has places for the paper's "
            "architecture only"
        )
    return settings


def places(settings: Settings, layout: Layout, *, plain: bool) -> list[Place]:
    """Every tensor of the model that `settings` describe, ours and theirs.

    plain: ours has an ordinary softmax, not an adaptive one (which may have one cluster only).
    """
    softmax = _plain_places(settings) if plain else _adaptive_places(settings, layout)
    return [*softmax, *_core_places(settings), *_position_places(settings, layout)]


def _plain_places(settings: Settings) -> list[Place]:
    tied = is_tied(settings)
    found = [
        Place(
            "embedding.weight",
            ("word_emb.emb_layers.0.weight",),
            copies=("crit.out_layers.0.weight",) if tied else (),
        ),
        Place("head.bias", ("crit.out_layers.0.bias",)),
    ]
    if not tied:
        found.append(Place("head.weight", ("crit.out_layers.0.weight",)))
    if settings["d_embed"] != settings["d_model"]:
        found += [
            Place("embedding.projection.weight", ("word_emb.emb_projs.0",)),
            # Theirs maps the embedding to the model; the head uses it the other way round.
            Place(
                "head.projection.weight",
                ("crit.out_projs.0",),
                read=lambda theirs: theirs[0].T,
                write=lambda ours: [ours.T],
            ),
        ]
    return found


def _adaptive_places(settings: Settings, layout: Layout) -> list[Place]:
    tied, tie_projs, clusters = is_tied(settings), tied_projections(settings), len(settings["cutoffs"]) + 1
    one_table = settings.get("div_val", 1) == 1
    projected = not one_table or settings["d_embed"] != settings["d_model"]
    found: list[Place] = []
    for i in range(1 if one_table else clusters):
        output = f"crit.out_layers.{i}.weight"
        table = f"word_emb.emb_layers.{i}.weight"
        found += [
            Place(f"embedding.tables.{i}", (table,), copies=(output,) if tied else ()),
            Place(f"head.biases.{i}", (f"crit.out_layers.{i}.bias",)),
        ]
        if not tied:
            found.append(Place(f"head.tables.{i}", (output,)))
        if projected:
            users = range(clusters) if one_table else (i,)
            copies = tuple(f"crit.out_projs.{user}" for user in users if tie_projs[user])
            found.append(Place(f"embedding.projections.{i}", (f"word_emb.emb_projs.{i}",), copies))
    if projected:
        own = [i for i in range(clusters) if not tie_projs[i]]
        found += [Place(f"head.projections.{i}", (f"crit.out_projs.{i}",)) for i in own]
    for part, shape in (("weight", (0, settings["d_embed"])), ("bias", (0,))):
        ours = f"head.cluster_{part}"
        if clusters == 1:  # nothing to choose between: ours is empty, theirs has none
            found.append(Place(ours, (), read=lambda _, s=shape: torch.zeros(s), write=lambda _: []))
        elif layout == "hf":
            found.append(Place(ours, (f"crit.cluster_{part}",)))
        else:  # the authors read them from the last column back
            theirs = (f"crit.cluster_{part}",)
            found.append(Place(ours, theirs, read=lambda t: t[0].flip(0), write=lambda o: [o.flip(0)]))
    return found


def _core_places(settings: Settings) -> list[Place]:
    found: list[Place] = []
    for i in range(settings["n_layer"]):
        ours, theirs = f"core.layers.{i}.", f"layers.{i}."
        found += [Place(ours + mine, (theirs + their,)) for mine, their in _LAYER.items()]
        if settings["attn_type"] in (0, 1):
            found.append(Place(f"{ours}qkv.weight", (f"{theirs}dec_attn.qkv_net.weight",)))
        else:
            parts = (f"{theirs}dec_attn.q_net.weight", f"{theirs}dec_attn.kv_net.weight")
            width = settings["n_head"] * settings["d_head"]
            found.append(
                Place(
                    f"{ours}qkv.weight",
                    parts,
                    read=lambda t: torch.cat(tuple(t)),
                    write=lambda o, w=width: o.split([w, 2 * w]),
                )
            )
    return found


def _position_places(settings: Settings, layout: Layout) -> list[Place]:
    scheme, at = settings["attn_type"], "core.positions."
    if scheme == 0:
        layers = [f"layers.{i}.dec_attn." for i in range(settings["n_layer"])]
        found = [Place(f"{at}keys.{i}.weight", (f"{layer}r_net.weight",)) for i, layer in enumerate(layers)]
        for ours, theirs in (("u", "r_w_bias"), ("v", "r_r_bias")):
            per_layer = tuple(layer + theirs for layer in layers)
            if layout == "hf" and settings.get("untie_r", False):
                place = Place(
                    at + ours, per_layer, read=lambda t: torch.stack(tuple(t)), write=lambda o: o.unbind()
                )
            else:
                copies = per_layer if layout == "hf" else ()
                place = Place(at + ours, (theirs,), copies, read=lambda t: t[0][None], write=lambda o: [o[0]])
            found.append(place)
        return found
    if scheme == 1:  # their last row is distance 0, ours the first
        flipped = [
            Place(at + ours, (theirs,), read=lambda t: t[0].flip(1), write=lambda o: [o.flip(1)])
            for ours, theirs in (("r", "r_emb"), ("b", "r_bias"))
        ]
        return [Place(f"{at}u", ("r_w_bias",)), *flipped]
    if scheme == 2:
        return []
    heads = (settings["n_head"], settings["d_head"])
    return [
        Place(
            f"{at}rows",
            ("r_emb",),
            read=lambda t: t[0].flatten(2),
            write=lambda o: [o.unflatten(2, heads)],
        )
    ]
