"""Folders for the authors' code and for Hugging Face: what was read is written back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.test_golden import AUTHORS, HUGGING_FACE, build
from tests.tiny import NUMBERED, TEXT, core_config, randomised, run_nll, text_model, wave_model
from txl_audio.interop import Layout, read_folder, write_folder
from txl_audio.model.adaptive import AdaptiveEmbeddingConfig, AdaptiveHeadConfig
from txl_audio.model.embeddings import NgramConfig, SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.positions import RelativeConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.tokens import CheckpointError, TokenSpec

# Hugging Face's layout has relative positions only.
OTHER_POSITIONS = ("shaw_relative", "absolute_vaswani", "vanilla_alrfou")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    if (folder / "weights.safetensors").is_file():
        return load_file(folder / "weights.safetensors")
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.mark.parametrize("name", [*AUTHORS, *HUGGING_FACE])
def test_what_was_imported_is_written_back(name: str, shared: Path, tmp_path: Path) -> None:
    source = shared / "golden" / name
    write_folder(build(read_folder(source), "auto"), tmp_path, layout="hf" if name[:2] == "hf" else "authors")
    assert_same(tensors_of(tmp_path), tensors_of(source))
    told, written = settings_of(source), settings_of(tmp_path)
    assert {key: told[key] for key in written if key in told} == {
        k: v for k, v in written.items() if k in told
    }
    if name in AUTHORS:
        assert told.keys() <= written.keys()


@pytest.mark.parametrize("name", [name for name in AUTHORS if name not in OTHER_POSITIONS])
def test_by_way_of_the_other_layout(name: str, shared: Path, tmp_path: Path) -> None:
    source, there, back = shared / "golden" / name, tmp_path / "there", tmp_path / "back"
    write_folder(build(read_folder(source), "auto"), there, layout="hf")
    write_folder(build(read_folder(there), "auto"), back, layout="authors")
    assert_same(tensors_of(back), tensors_of(source))
    told = settings_of(source)
    assert told == {key: value for key, value in settings_of(back).items() if key in told}


def test_hugging_face_orders_the_clusters_upwards(shared: Path, tmp_path: Path) -> None:
    source = shared / "golden" / "word_wt103_layout"
    write_folder(build(read_folder(source), "auto"), tmp_path, layout="hf")
    theirs, written = tensors_of(source), tensors_of(tmp_path)
    assert torch.equal(written["crit.cluster_weight"], theirs["crit.cluster_weight"].flip(0))
    assert torch.equal(written["transformer.layers.2.dec_attn.r_w_bias"], theirs["r_w_bias"])


def adaptive_model(of_embedding: dict[str, Any], of_head: dict[str, Any]) -> SequenceModel:
    spec = TokenSpec("text", 11, 1, 0.0, 0, "ids", "0")

    def new() -> SequenceModel:
        core = core_config(window="same_length")
        embedding = AdaptiveEmbeddingConfig(kind="adaptive", **of_embedding).build(spec, core.d_model)
        head = AdaptiveHeadConfig(kind="adaptive", **of_head).build(spec, 12, embedding)
        return SequenceModel(spec, embedding=embedding, core=core.build(), head=head)

    return randomised(new)


@pytest.mark.parametrize("layout", ["authors", "hf"])
@pytest.mark.parametrize(
    ("of_embedding", "of_head"),
    [
        ({"cutoffs": (4, 7), "d_embed": 8}, {"tied": False, "tie_projs": (False, True)}),
        ({"cutoffs": (4,), "div_val": 2}, {"tied": False}),
        ({"cutoffs": (), "div_val": 2}, {"tie_projs": (True,)}),
        ({"cutoffs": (), "d_embed": 8}, {"tie_projs": (True,)}),
    ],
    ids=["one table, own projections", "untied", "one projected cluster", "one tied projection"],
)
def test_ties_that_no_reference_model_has(
    layout: Layout, of_embedding: dict[str, Any], of_head: dict[str, Any], tmp_path: Path
) -> None:
    model = adaptive_model(of_embedding, of_head)
    write_folder(model, tmp_path, layout=layout)
    assert_same(read_folder(tmp_path).weights, model.state_dict())


@pytest.mark.parametrize("layout", ["authors", "hf"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("d_embed", [None, 8])
def test_one_cluster_is_an_ordinary_softmax(
    layout: Layout, tied: bool, d_embed: int | None, tmp_path: Path
) -> None:
    model = adaptive_model({"cutoffs": (), "d_embed": d_embed}, {"tied": tied})
    write_folder(model, tmp_path, layout=layout)
    imported = read_folder(tmp_path)
    assert isinstance(imported.head, SoftmaxHeadConfig)
    line, reset = torch.randint(11, (2, 9, 1)), torch.zeros(2, 8, dtype=torch.bool)
    reset[:, 0] = True  # so that the layout's first memory does not matter
    (expected, _), (got, _) = (
        run_nll(m, line[:, :-1], line[:, 1:], [8], reset) for m in (model, build(imported, "auto"))
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("hf", {"window": "sliding"}, "the layout hf cannot hold this model's window 'sliding'"),
        ("authors", {"activation": "gelu"}, "the layout authors cannot hold this model's activation 'gelu'"),
        ("hf", {"final_norm": True, "norm": "pre"}, "cannot hold this model's final_norm True"),
        ("authors", {"positions": RelativeConfig(untie_r=True)}, "positions .*'untie_r': True"),
        ("hf", NUMBERED["absolute"], "Hugging Face's layout holds relative positions only .* got absolute"),
    ],
    ids=["window", "activation", "final norm", "u and v of every layer", "positions"],
)
def test_models_that_a_layout_cannot_hold(
    layout: Layout, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_folder(text_model(**{"window": "segment", **changes}), tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


# Every setting of a core but those that change no result of a trained model, and the first memory.
HELD: dict[str, Any] = {
    "n_layer": 1,
    "d_model": 16,
    "n_head": 3,
    "d_head": 6,
    "d_ff": 20,
    "mem_len": 5,
    "segment_len": 3,
    "window": "same_length",
    "positions": RelativeConfig(clamp_len=3),
    "norm": "pre",
    "dropout": 0.1,
    "attention_dropout": 0.2,
}
REFUSED: list[tuple[str, Any]] = [
    ("activation", "gelu"),
    ("final_norm", True),
    ("window", "sliding"),
]


def test_every_setting_is_held_or_refused() -> None:
    others = {"attention", "first_memory"}
    assert {*HELD, *(name for name, _ in REFUSED)} == CoreConfig.model_fields.keys() - others


@pytest.mark.parametrize("layout", ["authors", "hf"])
@pytest.mark.parametrize("name", HELD)
def test_settings_that_a_layout_holds(layout: Layout, name: str, tmp_path: Path) -> None:
    model = text_model(**{"window": "segment", name: HELD[name]})
    write_folder(model, tmp_path, layout=layout)
    told, wanted = read_folder(tmp_path).core, model.core.config
    assert told.model_copy(update={"first_memory": wanted.first_memory}) == wanted


@pytest.mark.parametrize("layout", ["authors", "hf"])
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_settings_that_a_layout_cannot_hold(layout: Layout, name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"cannot hold this model's {name} {value!r};"):
        write_folder(text_model(**{"window": "segment", name: value}), tmp_path / "out", layout=layout)


def test_ngrams_are_in_no_layout(tmp_path: Path) -> None:
    ngrams = NgramConfig(lengths=(2,), rows=7, width=4)
    embedding = SymbolEmbeddingConfig(ngrams=ngrams).build(TEXT, 12)
    head = SoftmaxHeadConfig().build(TEXT, 12, embedding)
    core = core_config(window="segment").build()
    model = SequenceModel(TEXT, embedding=embedding, core=core, head=head)
    with pytest.raises(CheckpointError, match="embedding symbols without ngrams"):
        write_folder(model, tmp_path / "out", layout="authors")


def test_audio_is_in_no_layout(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="the layout hf holds text models only, .* got a waveform model"
    ):
        write_folder(wave_model(), tmp_path, layout="hf")
