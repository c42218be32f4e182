"""YAML and overrides to frozen objects: what is accepted, and what an error says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from txl_audio.config import Config, load, parse
from txl_audio.tokens import ConfigError


class Sine(Config):
    kind: Literal["sine"] = "sine"
    freq_hz: float = 440.0


class Folder(Config):
    kind: Literal["folder"] = "folder"
    path: str
    trim: bool = False


class Train(Config):
    lr: float = 1e-3
    steps: Annotated[int, Field(ge=1)] = 100
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = None


class Run(Config):
    name: str
    train: Train = Train()
    data: Annotated[Sine | Folder, Field(discriminator="kind")] = Sine()


def test_defaults_and_nested_values() -> None:
    run = parse(Run, "name: a\ntrain: {steps: 7}\n")
    assert run == Run(name="a", train=Train(steps=7))
    assert (run.train.steps, run.train.lr, run.data.kind) == (7, 1e-3, "sine")


# YAML 1.1 reads 3e-4 (no point) as a string; whoever writes a learning rate means a number.
@pytest.mark.parametrize("written", ["3e-4", "3.0e-4", "0.0003", "3E-4"])
def test_exponents_are_numbers(written: str) -> None:
    assert parse(Run, f"name: a\ntrain: {{lr: {written}}}\n").train.lr == 3e-4
    assert parse(Run, "name: a", [f"train.lr={written}"]).train.lr == 3e-4


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("train.steps", "true"),
        ("train.steps", "'2'"),
        ("train.steps", "2.0"),
        ("train.steps", "1e3"),
        ("train.lr", "true"),
        ("train.lr", "'0.5'"),
        ("train.betas", "[0.5, false]"),
        ("name", "7"),
        ("data", "{kind: folder, path: x, trim: 1}"),
        ("data", "{kind: folder, path: x, trim: 'yes'}"),
    ],
)
def test_nothing_is_converted(key: str, written: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*: should be a valid"):
        parse(Run, "name: a", [f"{key}={written}"])
    section, _, name = key.rpartition(".")
    text = f"{section}: {{{name}: {written}}}" if section else f"{key}: {written}"
    with pytest.raises(ConfigError, match=f"{key}.*: should be a valid"):
        parse(Run, text)


def test_whole_numbers_stand_for_floats() -> None:
    run = parse(Run, "name: a\ntrain: {clip: 1, betas: [0, 1]}\n", ["train.lr=1"])
    assert (run.train.clip, run.train.betas, run.train.lr) == (1.0, (0.0, 1.0), 1.0)
    assert isinstance(run.train.lr, float)


def test_overrides_win_in_order() -> None:
    text = "name: a\ntrain: {lr: 0.5, steps: 3}\n"
    run = parse(
        Run, text, ["train.lr=0.1", "name=b", "train.lr=0.2", "train.clip=null", "train.betas=[0.5,0.6]"]
    )
    assert run == Run(name="b", train=Train(lr=0.2, steps=3, betas=(0.5, 0.6)))


def test_override_value_may_hold_an_equals_sign() -> None:
    assert parse(Run, "name: a", ["name=x=y"]).name == "x=y"


def test_discriminated_union_picks_the_class() -> None:
    run = parse(Run, "name: a\ndata: {kind: folder, path: speech}\n", ["data.trim=true"])
    assert run.data == Folder(path="speech", trim=True)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        pytest.param("name: a\ntrian: {}", [], "unknown key 'trian'; did you mean 'train'?", id="top"),
        pytest.param(
            "name: a\ntrain: {step: 1}", [], "'train.step'; did you mean 'train.steps'", id="nested"
        ),
        pytest.param("name: a", ["train.lrr=1"], "'train.lrr'; did you mean 'train.lr'?", id="override"),
        pytest.param("name: a\nzzzzzz: 1", [], "known keys here: data, name, train", id="nothing near"),
        pytest.param(
            "name: a\ndata: {kind: folder, path: x, trimm: 1}",
            [],
            "'data.trimm'; did you mean 'data.trim'?",
            id="in a union",
        ),
        pytest.param("train: {}", [], "missing key 'name'", id="missing"),
        pytest.param("name: a\ndata: {kind: folder}", [], "missing key 'data.path'", id="missing in a union"),
        pytest.param(
            "name: a\ntrain: {steps: many}",
            [],
            "train.steps: should be a valid integer, got 'many'",
            id="wrong type",
        ),
        pytest.param(
            "name: a\ntrain: {steps: 1.5}",
            [],
            "train.steps: should be a valid integer, got 1.5",
            id="not whole",
        ),
        pytest.param("name: a\ntrain: {steps: 0}", [], "greater than or equal to 1", id="out of range"),
        pytest.param(
            "name: a\ntrain: {lr: .nan}", [], "train.lr: should be a finite number, got nan", id="nan"
        ),
        pytest.param(
            "name: a\ntrain: {lr: .inf}", [], "train.lr: should be a finite number, got inf", id="inf"
        ),
        pytest.param(
            "name: a\ntrain: 3",
            [],
            "train: should be an object, got 3",
            id="value for a mapping",
        ),
        pytest.param("name: a\ndata: {kind: cosine}", [], "'sine', 'folder'", id="unknown kind"),
        pytest.param("name: a", ["train.lr"], "override 'train.lr' is not of the form", id="no equals"),
        pytest.param("name: a", ["=1"], "override '=1' is not of the form", id="no key"),
        pytest.param("- a\n- b", [], "expected a mapping", id="list"),
        pytest.param("", [], "missing key 'name'", id="empty"),
        pytest.param("name: [a", [], "not valid YAML", id="broken YAML"),
    ],
)
def test_errors_say_what_and_where(text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Run, text, overrides, origin="here.yaml")
    said = str(caught.value)
    assert message in said
    assert "\n" not in said
    assert said.startswith("override" if message.startswith("override") else "here.yaml: ")


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Run, "train: {steps: 0, lrr: 1}")
    assert all(part in str(caught.value) for part in ("'name'", "train.steps", "train.lrr"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file at .*absent.yaml"):
        load(Run, tmp_path / "absent.yaml")


def test_load_reads_a_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: ä\n", encoding="utf-8")
    assert load(Run, path, ["train.steps=2"]) == Run(name="ä", train=Train(steps=2))
    with pytest.raises(ConfigError, match="run.yaml: unknown key 'x'"):
        load(Run, path, ["x=1"])


def test_configs_are_frozen() -> None:
    run = Run(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        run.train.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "run",
    [
        Run(name="a"),
        Run(name="7", train=Train(lr=3e-7, clip=0.25), data=Folder(path="a: b", trim=True)),
        Run(name="null", train=Train(lr=1e22, steps=10**15)),
        Run(name="3e-4"),
    ],
)
def test_round_trip_through_yaml(run: Run) -> None:
    assert parse(Run, run.to_yaml()) == run


class Part(Config):
    rate: float = 1.0


class Parts(Config):
    parts: dict[str, Part] = Field(default_factory=dict)


def test_names_that_a_user_chose_stay_in_messages() -> None:
    assert parse(Parts, "parts: {mine: {rate: 2}}").parts["mine"].rate == 2.0
    with pytest.raises(ConfigError, match=r"unknown key 'parts.mine.rat'; did you mean 'parts.mine.rate'\?"):
        parse(Parts, "parts: {mine: {rat: 2}}")
    with pytest.raises(ConfigError, match=r"parts.mine.rate: .* got 'fast'"):
        parse(Parts, "parts: {mine: {rate: fast}}")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\xff\x00\x80")
    with pytest.raises(ConfigError, match="model.safetensors is no text .*; expected a YAML file"):
        load(Run, path)
