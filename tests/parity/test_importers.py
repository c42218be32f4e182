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


def test_a_tensor_too_many_is_named(folder: Path) -> None:
    weights = load_file(folder / "weights.safetensors")
    save_file({**weights, "layers.7.extra": torch.zeros(1)}, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match="tensors without a place in this model: .*layers.7.extra"):
        read_folder(folder)


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
