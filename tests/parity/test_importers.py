"""Foreign weights that cannot be read say why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from txl_audio.interop import read_folder
from txl_audio.model.adaptive import AdaptiveHeadConfig
from txl_audio.tokens import CheckpointError


@pytest.fixture
def folder(shared: Path, tmp_path: Path) -> Path:
    """A copy of the plain model's folder, to damage."""
    return Path(shutil.copytree(shared / "golden" / "char", tmp_path / "char"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json in .*absent; expected a folder with"):
        read_folder(tmp_path / "absent")


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{n_layer: 2")
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        read_folder(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="config.json holds list, expected an object"):
        read_folder(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights in .*pytorch_model.bin"):
        read_folder(folder)


def test_damaged_weights(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="weights.safetensors is damaged"):
        read_folder(folder)


class Payload:
    """What a hostile pickle would run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('the pickle was executed')",)


def test_a_pickle_is_never_executed(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    torch.save({"a": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin is not a plain state dict"):
        read_folder(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    weights = load_file(folder / "weights.safetensors")
    del weights["layers.1.dec_attn.o_net.weight"]
    save_file(weights, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"no 'layers.1.dec_attn.o_net.weight' found"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("attn_type", "keys", "message"),
    [
        (
            0,
            ("n_token", "d_inner"),
            "config.json lacks n_token, d_inner; expected the keys n_token, n_layer, ",
        ),
        (3, ("tgt_len",), "config.json lacks tgt_len; expected the keys .*, tgt_len$"),
    ],
)
def test_missing_settings_are_named_among_all(
    folder: Path, attn_type: int, keys: tuple[str, ...], message: str
) -> None:
    edit_config(folder, attn_type=attn_type)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
    with pytest.raises(CheckpointError, match=message):
        read_folder(folder)


def test_a_tensor_too_many_is_named(folder: Path) -> None:
    weights = load_file(folder / "weights.safetensors")
    save_file({**weights, "layers.7.extra": torch.zeros(1)}, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match="tensors without a place in this model: .*layers.7.extra"):
        read_folder(folder)


def test_tied_tensors_that_differ_are_named(folder: Path) -> None:
    weights = load_file(folder / "weights.safetensors")
    weights["crit.out_layers.0.weight"] += 1
    save_file(weights, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match="crit.out_layers.0.weight differs from word_emb.emb_layers.0"):
        read_folder(folder)
    edit_config(folder, tie_weight=False)
    assert "head.weight" in read_folder(folder).weights


@pytest.mark.parametrize("left_out", ["crit.out_layers.0.weight", "word_emb.emb_layers.0.weight"])
def test_one_of_tied_tensors_is_enough(folder: Path, left_out: str) -> None:
    expected, weights = read_folder(folder).weights, load_file(folder / "weights.safetensors")
    del weights[left_out], weights["pos_emb.inv_freq"]
    save_file(weights, folder / "weights.safetensors")
    got = read_folder(folder).weights
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_an_extracted_state_dict_of_the_authors(folder: Path, legacy: bool) -> None:
    expected = read_folder(folder).weights
    weights = load_file(folder / "weights.safetensors")
    (folder / "weights.safetensors").unlink()
    torch.save(weights, folder / "model.pt", _use_new_zipfile_serialization=not legacy)
    got = read_folder(folder).weights
    assert got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got)


def test_half_precision_is_read_as_float32(folder: Path) -> None:
    weights = {name: value.half() for name, value in load_file(folder / "weights.safetensors").items()}
    save_file(weights, folder / "weights.safetensors")
    assert {value.dtype for value in read_folder(folder).weights.values()} == {torch.float32}


def test_the_first_released_config_of_hugging_face(shared: Path, tmp_path: Path) -> None:
    """It says tie_weight and tgt_len, and nothing of tie_projs."""
    folder = Path(shutil.copytree(shared / "golden" / "hf_wt103_layout", tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("tie_projs", "tie_word_embeddings"):
        del config[name]
    config |= {"tie_weight": True, "tgt_len": 10, "ext_len": 0}
    (folder / "config.json").write_text(json.dumps(config))
    imported = read_folder(folder)
    assert imported.core.segment_len == 10
    assert imported.head == AdaptiveHeadConfig(kind="adaptive", tie_projs=(False, True, True, True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ext_len": 4}, "ext_len 4 is not supported; expected ext_len 0"),
        (
            {"same_length": True, "mem_len": 0},
            "config.json describes no model that can be built: .*mem_len 0",
        ),
        ({"dropout": 1.5}, "config.json describes no model that can be built: dropout: .*less than 1"),
        ({"n_layer": "2"}, "config.json describes no model that can be built"),
    ],
)
def test_settings_that_cannot_be_built(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_folder(folder)


def test_settings_that_are_not_known(folder: Path) -> None:
    edit_config(folder, attn_type=5)
    with pytest.raises(CheckpointError, match="attn_type 5 is not known; expected 0, 1, 2 or 3"):
        read_folder(folder)
    edit_config(folder, attn_type=1, clamp_len=4)
    with pytest.raises(CheckpointError, match="clamp_len with attn_type 1 is not supported"):
        read_folder(folder)
