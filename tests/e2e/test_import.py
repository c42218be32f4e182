"""Transformer-XL weights from elsewhere, through the command line."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.harness import run, text_run, tree
from txl_audio import recipe


def test_imported_weights_score_as_their_authors_did(shared: Path, tmp_path: Path) -> None:
    golden, out, nll = shared / "golden" / "char", tmp_path / "run", tmp_path / "new" / "nll.safetensors"
    result = run("import", golden, "--out", out)
    assert (result.code, result.raw) == (0, b"")
    assert "imported 26,221 parameters, segments of 16" in result.err
    figures = run("score", out, "--tokens", golden / "io.safetensors", "--out", nll, "--json").json
    expected, got = load_file(golden / "io.safetensors")["nll"], load_file(nll)
    assert got.keys() == {"nll"} and got["nll"].dtype == torch.float32
    torch.testing.assert_close(got["nll"], expected, rtol=0, atol=1e-5)
    assert figures["count"] == expected.numel() and figures["out"] == str(nll)
    assert figures["nats"] == pytest.approx(expected.double().sum().item(), abs=1e-5 * expected.numel())
    info = run("info", out, "--json").json
    assert (info["parameters"], info["mem_len_frames"]) == (26_221, 24)
    assert info["memory_s"] is None and info["frame_rate_hz"] is None


def test_hugging_faces_layout(shared: Path, tmp_path: Path) -> None:
    golden, out, nll = shared / "golden" / "hf_char_layout", tmp_path / "run", tmp_path / "nll.safetensors"
    assert run("import", golden, "--out", out, "--segment-len", 12).code == 0
    io = load_file(golden / "io.safetensors")
    ids = io["input_ids"].long()
    save_file({"tokens": ids.T.contiguous()}, tmp_path / "tokens.safetensors")
    assert run("score", out, "--tokens", tmp_path / "tokens.safetensors", "--out", nll).code == 0
    expected = -io["log_probs"][:, :-1].gather(-1, ids[:, 1:, None])[..., 0].T
    torch.testing.assert_close(load_file(nll)["nll"], expected, rtol=0, atol=1e-5)


def test_there_and_back(shared: Path, tmp_path: Path) -> None:
    golden, mine = shared / "golden" / "word_wt103_layout", tmp_path / "mine"
    assert run("import", golden, "--out", mine).code == 0
    there = run("export", mine, "--layout", "hf", "--out", tmp_path / "hf")
    assert (there.code, there.raw) == (0, b"") and "in the layout hf" in there.err
    assert sorted(tree(tmp_path / "hf")) == ["config.json", "pytorch_model.bin"]
    assert run("import", tmp_path / "hf", "--out", tmp_path / "again").code == 0
    assert run("export", tmp_path / "again", "--layout", "authors", "--out", tmp_path / "back").code == 0
    got, expected = (load_file(f / "weights.safetensors") for f in (tmp_path / "back", golden))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_words_beside_a_checkpoint(shared: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(shared / "golden" / "hf_wt103_layout", tmp_path / "hf"))
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(298))]
    (source / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": words}))
    out = tmp_path / "run"
    assert run("import", source, "--out", out).code == 0
    vocabulary = recipe.vocabulary_of(out)
    assert list(vocabulary.symbols) == words
    _, model = recipe.load_run(out, device="cpu")
    assert model.spec == vocabulary.spec and model.spec.name == "words"
    # They go along: out again, and in again.
    assert run("export", out, "--layout", "hf", "--out", tmp_path / "exported").code == 0
    assert run("import", tmp_path / "exported", "--out", tmp_path / "again").code == 0
    again = recipe.vocabulary_of(tmp_path / "again")
    assert list(again.symbols) == words and again.spec == vocabulary.spec


def test_an_imported_model_is_evaluated_on_a_prepared_text(shared: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(shared / "golden" / "char", tmp_path / "char"))
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("the quick brown fox jumps over the lazy dog. \n" * 20)
    assert run("prepare", text, "--dataset", "chars", "--split", "80/10/10", "--out", data).code == 0
    assert run("import", source, "--out", tmp_path / "ids").code == 0
    result = run("evaluate", tmp_path / "ids", data)
    assert (
        result.code == 1
        and "put the vocabulary.json of that folder beside the model's config.json" in result.error
    )
    shutil.copy(data / "vocabulary.json", source)
    assert run("import", source, "--out", tmp_path / "run").code == 0
    assert run("evaluate", tmp_path / "run", data, "--json").json["bits_per_character"] > 0
    assert run("sample", tmp_path / "run", "--tokens", 3, "--json").json["symbols"] == 3


def test_nothing_is_left_of_an_import_or_export_that_fails(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    golden, mine = shared / "golden" / "char", tmp_path / "mine"
    mine.mkdir()
    assert run("import", golden, "--out", mine).code == 0, "an empty folder may be there"
    with monkeypatch.context() as patch:
        patch.setattr("txl_audio.checkpoint.save_tensors", full)
        result = run("import", golden, "--out", tmp_path / "new")
        assert result.code == 1 and "no space left" in result.error
        patch.setattr("txl_audio.interop.exporters.save_file", full)
        assert run("export", mine, "--layout", "authors", "--out", tmp_path / "new").code == 1
    assert list(tmp_path.iterdir()) == [mine]
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "rest").write_text("of one that was killed")
    assert run("export", mine, "--layout", "authors", "--out", tmp_path / "new").code == 0
    assert sorted(tree(tmp_path / "new")) == ["config.json", "weights.safetensors"]
    assert not (tmp_path / "new.partial").exists()


def test_export_says_where_a_text_begins_otherwise(shared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    assert run("import", shared / "golden" / "hf_char_layout", "--out", mine).code == 0
    other = run("export", mine, "--layout", "authors", "--out", tmp_path / "authors")
    assert other.code == 0
    assert (
        "warning: this model begins a text with first_memory zeros, code for the layout authors" in other.err
    )
    assert "warning" not in run("export", mine, "--layout", "hf", "--out", tmp_path / "hf").err


def test_exports_that_cannot_be(tmp_path: Path) -> None:
    model = text_run(tmp_path / "run")
    for words, code, message in (
        ((model, "--layout", "tf"), 2, "--layout is 'tf', expected hf or authors"),
        ((tmp_path / "absent", "--layout", "hf"), 1, "no run folder at"),
    ):
        result = run("export", *words, "--out", tmp_path / "new")
        assert result.code == code and message in result.error
        assert not (tmp_path / "new").exists()
    result = run("export", model, "--layout", "hf", "--out", model)
    assert result.code == 1 and "choose another --out" in result.error


def test_importing_into_a_folder_with_content_is_refused(tmp_path: Path) -> None:
    out = text_run(tmp_path / "run")
    before = tree(out)
    result = run("import", tmp_path / "weights", "--out", out)
    assert result.code == 1 and "choose another --out" in result.error
    assert tree(out) == before


def test_importing_from_nothing(tmp_path: Path) -> None:
    result = run("import", tmp_path / "absent", "--out", tmp_path / "run")
    assert result.code == 1 and "no config.json in" in result.error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), "expected tokens of shape [N + 1, B]"),
        (torch.zeros(1, 2, dtype=torch.int64), "expected tokens of shape [N + 1, B]"),
        (torch.full((5, 1), 11), "tokens must be integers in 0..10"),
        (torch.zeros(5, 1), "tokens must be integers in 0..10"),
        (None, "expected a tensor `tokens`"),
    ],
    ids=["one dimension", "too short", "outside the vocabulary", "floats", "absent"],
)
def test_tokens_that_cannot_be_scored(tmp_path: Path, tokens: torch.Tensor | None, message: str) -> None:
    model, path, out = text_run(tmp_path / "run"), tmp_path / "t.safetensors", tmp_path / "nll.safetensors"
    save_file({"other": torch.zeros(1)} if tokens is None else {"tokens": tokens}, path)
    result = run("score", model, "--tokens", path, "--out", out)
    assert result.code == 1 and message in result.error
    assert not out.exists()


def test_score_needs_files_or_tokens(tmp_path: Path) -> None:
    model = text_run(tmp_path / "run")
    for words in ((), ("--tokens", "a"), ("--out", "b"), ("x.wav", "--tokens", "a", "--out", "b")):
        result = run("score", model, *words)
        assert result.code == 2 and "give FILES, or --tokens" in result.error
