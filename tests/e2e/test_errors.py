"""What goes wrong is one line that says why, the right exit code, and nothing lost or half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.e2e.conftest import Workspace
from tests.e2e.harness import run, text_run, tree
from txl_audio.cli import main
from txl_audio.tokens import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key 'train.lrr'; did you mean 'train.lr'?"),
        ("model.core.memlen=4", "unknown key 'model.core.memlen'; did you mean 'model.core.mem_len'?"),
        ("train.steps=many", "train.steps: should be a valid integer"),
        ("model.head.kind=soft", "model.head"),
        ("device=tpu", "device 'tpu' is not known"),
        ("train.steps=null", "a training needs a budget; set train.steps, train.minutes or both"),
        ("data=null", "training needs data; set data=DIR"),
        ("evaluate.stride=1", "stride is for models without memory"),
        ("steps", "override 'steps' is not of the form key.sub=value"),
    ],
)
def test_a_config_that_cannot_be_used(workspace: Workspace, override: str, message: str) -> None:
    out, result = workspace.train("refused", override)
    assert message in result.error and result.code == 2
    assert not out.exists()


def test_resume_and_overwrite_exclude_each_other(workspace: Workspace, unchanged: Callable[[], bool]) -> None:
    _, result = workspace.train("run", "--resume", "--overwrite")
    assert result.code == 2 and "give one of them" in result.error
    assert unchanged()


def test_missing_files_are_named(workspace: Workspace, tmp_path: Path) -> None:
    result = run("train", tmp_path / "absent.yaml")
    assert result.code == 2 and "no config file at" in result.error
    out, result = workspace.train("refused", f"data={tmp_path / 'absent'}")
    assert result.code == 1 and "index.json is missing" in result.error
    assert not out.exists()
    for words in (("evaluate",), ("score", tmp_path / "a.wav"), ("sample", "--raw")):
        result = run(words[0], tmp_path / "absent", *words[1:])
        assert result.code == 1 and "no run folder at" in result.error
    out, result = workspace.train("absent", "--resume")
    assert result.code == 1 and "no run to resume at" in result.error
    assert not out.exists()


def test_a_run_is_not_overwritten_by_accident(workspace: Workspace, unchanged: Callable[[], bool]) -> None:
    _, result = workspace.train("run")
    assert result.code == 1
    assert "already holds a run" in result.error and "--resume" in result.error
    assert unchanged()


def test_overwriting_replaces_the_run(workspace: Workspace) -> None:
    out, first = workspace.train("twice", "train.steps=1", "train.sample_every=1")
    (out / "samples" / "old.wav").write_bytes(b"")
    _, second = workspace.train("twice", "train.steps=2", "train.sample_every=2", "--overwrite")
    assert (first.code, second.code) == (0, 0)
    assert "samples/old.wav" not in tree(out) and "samples/step_2.wav" in tree(out)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", "site: my homepage\n", "its config.yaml is of no run"),
        ("thesis.tex", "precious", "it holds thesis.tex, which no run writes"),
    ],
)
def test_overwriting_spares_what_is_no_run(
    workspace: Workspace, tmp_path: Path, name: str, content: str, message: str
) -> None:
    out = shutil.copytree(workspace.run, tmp_path / "out")
    (out / name).write_text(content)
    before = tree(out)
    _, result = workspace.train("refused", f"out={out}", "--overwrite")
    assert result.code == 1 and message in result.error
    assert tree(out) == before


def test_a_precision_that_cannot_be_had_deletes_nothing(
    workspace: Workspace, unchanged: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("precision bfloat16 was asked for, but this GPU has none")

    monkeypatch.setattr("txl_audio.runtime.autocast", refuse)
    _, result = workspace.train("run", "precision=bfloat16", "--overwrite")
    assert result.code == 2 and "this GPU has none" in result.error
    assert unchanged()


def test_resuming_with_other_data(
    workspace: Workspace, tmp_path: Path, unchanged: Callable[[], bool]
) -> None:
    """The same number of documents, of the same lengths, with other sound."""
    source = shutil.copytree(workspace.source, tmp_path / "wav")
    for path in source.glob("?.wav"):
        soundfile.write(path, -soundfile.read(path)[0], 16_000)
    run("prepare", source, "--out", tmp_path / "data", "--split", "every-3rd")
    _, result = workspace.train("run", f"data={tmp_path / 'data'}", "train.sample_every=2", "--resume")
    assert result.code == 1 and "was trained with data=" in result.error
    assert unchanged()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.core.n_layer=1", "holds another model than the config describes"),
        ("train.lanes=3", "was trained with train.lanes=2, got 3"),
        ("seed=1", "was trained with seed=0, got 1"),
    ],
)
def test_resuming_something_else(
    workspace: Workspace, unchanged: Callable[[], bool], override: str, message: str
) -> None:
    _, result = workspace.train("run", override, "--resume")
    assert result.code == 1 and message in result.error
    assert unchanged()


def test_a_split_that_is_not_there(workspace: Workspace) -> None:
    result = run("evaluate", workspace.run, "--split", "dev")
    assert result.code == 1 and "no split 'dev'; it has val (2), test (2), train (2)" in result.error


@pytest.mark.parametrize(
    "words", [("--memory", "hot"), ("--precision", "float16"), ("--device", "tpu")], ids=lambda w: w[0]
)
def test_a_value_that_is_not_known(workspace: Workspace, words: tuple[str, str]) -> None:
    result = run("evaluate", workspace.run, *words)
    assert result.code == 2 and repr(words[1]) in result.error and "expected" in result.error


@pytest.mark.parametrize("words", [("sample", "--outt", "x.wav"), ("sing",), ("sample", "--seconds", "-1")])
def test_bad_usage(workspace: Workspace, words: tuple[str, ...]) -> None:
    result = run(words[0], workspace.run, *words[1:])
    assert result.code == 2 and result.raw == b""
    assert "Error: " in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either --out FILE or --raw"),
        (("--raw", "--out", "x.wav"), "give either --out FILE or --raw"),
        (("--raw", "--json"), "give one of them"),
        (("--raw", "--with-prompt"), "need --prompt FILE"),
        (("--raw", "--prompt-seconds", 1), "need --prompt FILE"),
        (("--raw", "--temperature", -1), "temperature is -1.0"),
        (("--raw", "--top-k", 0), "top_k is 0"),
        (("--raw", "--top-p", 1.5), "top_p is 1.5"),
        (("--raw", "--seconds", "inf"), "finite"),
    ],
)
def test_sample_options_that_make_no_sense(
    workspace: Workspace, words: tuple[object, ...], message: str
) -> None:
    result = run("sample", workspace.run, *words)
    assert result.code == 2 and message in result.error


@pytest.mark.parametrize("name", ["sound.xyz", "sound", "sound.ogg"])
def test_an_ending_that_names_no_format(workspace: Workspace, tmp_path: Path, name: str) -> None:
    result = run("sample", workspace.run, "--out", tmp_path / "new" / name)
    assert result.code == 1 and "use .wav or .flac" in result.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["absent", "broken", "empty", "nan"])
def test_a_prompt_that_cannot_be_used(workspace: Workspace, tmp_path: Path, kind: str) -> None:
    prompt, out = tmp_path / f"{kind}.wav", tmp_path / "out.wav"
    if kind == "broken":
        prompt.write_bytes(b"RIFF but nothing else")
    elif kind == "empty":
        prompt.write_bytes(b"")
    elif kind == "nan":
        soundfile.write(prompt, np.array([0.1, np.nan]), 16_000, subtype="FLOAT")
    out.write_bytes(b"precious")
    result = run("sample", workspace.run, "--prompt", prompt, "--out", out)
    assert result.code == 1 and str(prompt) in result.error
    assert out.read_bytes() == b"precious"
    assert {p.name for p in tmp_path.iterdir()} <= {"out.wav", prompt.name}
    assert str(prompt) in run("score", workspace.run, prompt).error
    # Beside a good file it is named, and the good one is scored.
    result = run("score", workspace.run, prompt, workspace.source / "0.wav", "--json")
    assert result.code == 1 and result.err.startswith("left out ") and str(prompt) in result.err
    assert [item["path"] for item in json.loads(result.out)["files"]] == [str(workspace.source / "0.wav")]


def test_a_text_model_has_no_sound(workspace: Workspace, tmp_path: Path) -> None:
    text, out = text_run(tmp_path / "text"), tmp_path / "out.wav"
    for words in (("sample", text, "--out", out), ("score", text, workspace.source / "0.wav")):
        result = run(*words)
        assert result.code == 1 and "has no vocabulary (vocabulary.json)" in result.error
    assert not out.exists()
    result = run("evaluate", text)
    assert result.code == 2 and "names no data" in result.error


def test_model_and_data_that_disagree(workspace: Workspace, tmp_path: Path) -> None:
    text = text_run(tmp_path / "text")
    result = run("evaluate", text, workspace.data)
    assert result.code == 1
    assert str(workspace.data) in result.error and str(text) in result.error
    assert "modality: 'waveform' != 'text'" in result.error


def test_damaged_weights(workspace: Workspace, tmp_path: Path) -> None:
    run_folder = text_run(tmp_path / "text")
    path = run_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    result = run("info", run_folder)
    assert result.code == 1 and "model.safetensors is damaged" in result.error


def test_strict_preparing_stops_and_keeps_what_was_there(
    workspace: Workspace, tmp_path: Path, unchanged: Callable[[], bool]
) -> None:
    words = ("prepare", workspace.source, "--strict", "--out")
    result = run(*words, tmp_path / "data")
    assert result.code == 1 and "corrupt.wav" in result.error
    assert not (tmp_path / "data").exists()
    assert run(*words, workspace.data, "--split", "every-3rd").code == 1
    assert unchanged()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "give either SOURCE or --dataset NAME"),
        (("--dataset", "yesno"), 2, "needs --root DIR"),
        (
            ("--dataset", "libri-speech"),
            2,
            "--dataset is 'libri-speech', which is no set of speech or text; did you mean librispeech?",
        ),
        (("{folder}/wav", "--dataset", "wt3"), 2, "did you mean wt"),
        (("{folder}/wav", "--dataset", "bible"), 2, "known: speechcommands, "),
        (("{folder}/absent",), 1, "nothing to prepare at"),
        (("{folder}/wav", "--split", "sometimes"), 2, "no split rule 'sometimes'"),
        (("{folder}/wav", "--gain", "loud"), 2, "no gain rule 'loud'"),
        (("{folder}/wav", "--trim-db", "-3"), 2, "positive number of dB"),
        (("{folder}/wav", "--download"), 2, "--download needs --dataset"),
    ],
)
def test_preparing_something_wrong(
    workspace: Workspace, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    filled = [word.format(folder=workspace.folder) for word in words]
    result = run("prepare", *filled, "--out", tmp_path / "data")
    assert result.code == code and message in result.error
    assert list(tmp_path.iterdir()) == []


def test_preparing_into_something_else(workspace: Workspace, unchanged: Callable[[], bool]) -> None:
    result = run("prepare", workspace.source, "--out", workspace.run)
    assert result.code == 1 and "it is left alone" in result.error
    assert unchanged()


def test_paths_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    name = tmp_path / "[bold]x[/bold]"
    assert str(name) in run("evaluate", name).error


def test_debug_gives_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run folder at"):
        main(["evaluate", str(tmp_path / "absent"), "--debug"])


def test_a_fault_of_the_program_is_one_line_too(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("something\nunforeseen")

    monkeypatch.setattr("txl_audio.recipe.load_run", broken)
    result = run("evaluate", workspace.run)
    assert result.code == 1
    assert result.error == "RuntimeError: something unforeseen; --debug shows where"
