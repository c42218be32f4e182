"""The authors' and Hugging Face's Transformer-XL, to the last digits: nats, memory and gradients."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import BACKENDS, lengths_of
from txl_audio.evaluate import score_tokens
from txl_audio.interop import Imported, read_folder
from txl_audio.model.attention import Backend
from txl_audio.model.sequence import SequenceModel

AUTHORS = (
    "char",
    "char_same_length",
    "char_clamp",
    "char_prenorm",
    "char_no_memory",
    "char_embed_projection",
    "char_odd_heads",
    "shaw_relative",
    "absolute_vaswani",
    "vanilla_alrfou",
    "word_adaptive_div1",
    "word_adaptive_div2",
    "word_wt103_layout",
)
HUGGING_FACE = ("hf_char_layout", "hf_wt103_layout")


def build(imported: Imported, backend: Backend) -> SequenceModel:
    core = imported.core.model_copy(update={"attention": backend}).build()
    embedding = imported.embedding.build(imported.spec, imported.core.d_model)
    head = imported.head.build(imported.spec, imported.core.d_model, embedding)
    model = SequenceModel(imported.spec, embedding=embedding, core=core, head=head)
    model.load_state_dict(imported.weights)
    return model.eval()


def test_every_folder_is_tested(shared: Path) -> None:
    found = {path.name for path in (shared / "golden").iterdir() if path.is_dir()}
    assert found == {*AUTHORS, *HUGGING_FACE}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", AUTHORS)
def test_authors(name: str, backend: Backend, shared: Path, tmp_path: Path) -> None:
    folder = shared / "golden" / name
    imported = read_folder(folder)
    model = build(imported, backend)
    io = load_file(folder / "io.safetensors")
    tokens = io["tokens"].T.long()[..., None]

    state, at, nats, loss = model.initial_state(tokens.size(0)), 0, [], torch.zeros(())
    for n in lengths_of(tokens.size(1) - 1, imported.core.segment_len):
        out, state = model.nll(tokens[:, at : at + n], tokens[:, at + 1 : at + n + 1], state)
        nats.append(out[..., 0])
        loss, at = loss + out.mean(), at + n
    loss.backward()

    torch.testing.assert_close(torch.cat(nats, dim=1).T, io["nll"], rtol=0, atol=1e-5)
    if imported.core.mem_len:
        for index, hidden in enumerate(state.memory.hidden):
            expected = io[f"mems.{index}"].transpose(0, 1)
            torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)

    # Gradients have the shapes of weights, so the importer can rename them.
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "grads.safetensors", tmp_path / "weights.safetensors")
    expected_gradients = read_folder(tmp_path).weights
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        expected = expected_gradients[parameter_name]
        error = (parameter.grad - expected).norm()
        assert error <= 1e-4 * expected.norm() + 1e-9, parameter_name


@pytest.mark.parametrize("name", AUTHORS)
def test_scoring_tokens(name: str, shared: Path) -> None:
    folder = shared / "golden" / name
    io = load_file(folder / "io.safetensors")
    nats = score_tokens(build(read_folder(folder), "auto"), io["tokens"])
    torch.testing.assert_close(nats, io["nll"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name: str, backend: Backend, shared: Path) -> None:
    folder = shared / "golden" / name
    imported = read_folder(folder, segment_len=12)
    model = build(imported, backend)
    io = load_file(folder / "io.safetensors")
    ids = io["input_ids"].long()[..., None]
    state, log_probs = model.initial_state(ids.size(0)), []
    with torch.no_grad():
        for at in range(0, ids.size(1), 12):
            part = ids[:, at : at + 12]
            hidden, *_, state = model.encode(part, part, state)
            log_probs += [model.head.log_probs(h, ids[:, :0, 0], 0) for h in hidden.unbind(1)]
    torch.testing.assert_close(torch.stack(log_probs, dim=1), io["log_probs"], rtol=0, atol=1e-5)
    for index, hidden in enumerate(state.memory.hidden):
        torch.testing.assert_close(hidden, io[f"mems.{index}"].transpose(0, 1), rtol=0, atol=1e-5)
