"""YAML and dotted overrides to validated, frozen objects. Knows no component."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml import YAMLError

from txl_audio.tokens import ConfigError

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Base of every configuration class: frozen, unknown keys are errors, no silent conversions.

    A whole number may stand for a float; true, "2" and 2.0 are no integers.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; `parse` of it gives an equal object."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump(mode="json")))


def load(cls: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Reads a YAML file and `key.sub=value` overrides into `cls`.

    Raises ConfigError for a missing file, bad YAML, an unknown key (with the nearest known one) or
    a wrong value; the message names the file and the dotted key.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"no config file at {path}; expected a YAML file such as configs/audio/quickstart.yaml"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text ({error.reason}); expected a YAML file in UTF-8") from error
    return parse(cls, text, overrides, origin=str(path))


def parse(cls: type[C], text: str, overrides: Sequence[str] = (), *, origin: str = "config") -> C:
    """As `load`, from YAML text."""
    try:
        base: Any = OmegaConf.create(text)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(base):
        raise ConfigError(f"{origin}: expected a mapping of keys to values at the top level")
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {item!r} is not of the form key.sub=value")
    try:
        merged: Any = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        value: Any = OmegaConf.to_container(merged, resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: {' '.join(str(error).split())}") from error
    return validate(cls, value, origin=origin)


def validate(cls: type[C], value: object, *, origin: str) -> C:
    """Builds `cls` from a plain mapping; raises ConfigError with one readable line per fault."""
    try:
        # By way of JSON, where a strict model still takes a list for a tuple.
        return cls.model_validate_json(json.dumps(value))
    except ValidationError as error:
        lines = [_explain(cls, dict(detail)) for detail in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(dict.fromkeys(lines))) from error


def _explain(cls: type[BaseModel], detail: dict[str, Any]) -> str:
    location: tuple[Any, ...] = detail["loc"]
    known = {key for key, _ in _keys(cls)}
    # Pydantic adds the tag of a discriminated union to the location; it is no key of the file.
    path = [str(part) for part in location if not _is_union_tag(cls, part)]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        general, names = _without_names(known, path)
        prefix = general.rpartition(".")[0]
        siblings = [k for k in known if k.rpartition(".")[0] == prefix]
        near = difflib.get_close_matches(general, siblings, n=1, cutoff=0.5) or difflib.get_close_matches(
            general, sorted(known), n=1, cutoff=0.6
        )
        options = ", ".join(sorted(k.rpartition(".")[2] for k in siblings))
        hint = f"known keys here: {options or 'none'}"
        if near:
            meant = near[0]
            for name in names:
                meant = meant.replace(ANY, name, 1)
            hint = f"did you mean {meant!r}?"
        return f"unknown key {key!r}; {hint}"
    if detail["type"] == "missing":
        return f"missing key {key!r}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    got: object = detail.get("input")
    # A fault of a whole section shows what is wrong itself; its mapping would only be noise.
    shown = "" if isinstance(got, dict) else f", got {got!r}"
    return f"{key or 'config'}: {message}{shown}"


ANY = "*"
"""Stands in a dotted key for the keys that a user chooses in a mapping."""


def _without_names(known: set[str], path: Sequence[str]) -> tuple[str, list[str]]:
    """A key with ANY for the names that a user chose, and those names."""
    general: list[str] = []
    names: list[str] = []
    for part in path:
        if any(key.startswith(".".join([*general, ANY, ""])) for key in known):
            names.append(part)
            general.append(ANY)
        else:
            general.append(part)
    return ".".join(general), names


def _is_union_tag(cls: type[BaseModel], part: object) -> bool:
    return (
        isinstance(part, str)
        and part in set(_tags(cls))
        and part not in {name for key, _ in _keys(cls) for name in key.split(".")}
    )


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, dict, list, tuple):
        for argument in get_args(annotation):
            yield from _models(argument)


def _keys(cls: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, type[BaseModel]]]:
    """Every dotted key of a config class, through unions."""
    for name, info in cls.model_fields.items():
        yield prefix + name, cls
        named = f"{ANY}." if get_origin(info.annotation) is dict else ""
        for model in _models(info.annotation):
            yield from _keys(model, f"{prefix}{name}.{named}")


def _tags(cls: type[BaseModel]) -> Iterator[str]:
    for _, owner in _keys(cls):
        kind = owner.model_fields.get("kind")
        if kind is not None:
            yield from (str(value) for value in get_args(kind.annotation))
