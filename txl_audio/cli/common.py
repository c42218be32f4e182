"""What every verb shares: where figures, words and progress go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from txl_audio.tokens import ConfigError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
console = Console(stderr=True, highlight=False, markup=False)

# PyTorch takes seconds to import, so every verb imports what it needs: `--help` stays immediate.

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Stream = Annotated[str | None, typer.Option(help="Which stream, where the run has several.")]
# Words, not paths: ./kathleen is a folder, kathleen may be a model's name.
RunPath = Annotated[
    str, typer.Argument(help="Run folder, or kathleen: the model that ships with the package.")
]


def say(line: str) -> None:
    """To standard error, never wrapped: paths stay whole."""
    console.print(line, soft_wrap=True)


def tell(figures: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(figures) if as_json else text)


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, expected {' or '.join(known)}")


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def preparation(preparation: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in preparation.items())


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error: call with (done, total, unit)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, unit="")
        yield lambda done, total, unit: progress.update(task, completed=done, total=total, unit=unit)
