"""Training, and the size of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from txl_audio.cli.common import Json, app, say, tell
from txl_audio.tokens import ConfigError


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Config file, or a run's config.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run exactly where it was saved.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the run folder.")] = False,
) -> None:
    """Train a model, or a codec (kind: codec). Ctrl-C saves and stops; --resume continues."""
    from txl_audio import codec_training, recipe

    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it; give one of them")
    if codec_training.describes_codec(config):
        run = codec_training.codec_config_of_run(config, overrides or [], resume=resume)
        done = codec_training.train_codec(run, resume=resume, overwrite=overwrite)
    else:
        run = recipe.config_of_run(config, overrides or [], resume=resume)
        done = recipe.train(run, resume=resume, overwrite=overwrite)
    if not done:
        say(f"saved; continue with: txl-audio train {run.folder}/config.yaml --resume")
        raise typer.Exit(1)
    say(f"done: {run.folder}")


@app.command()
def info(
    target: Annotated[
        str, typer.Argument(help="Config file, run folder, or kathleen: the model that ships.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    as_json: Json = False,
) -> None:
    """Size, memory and cost of a model; size and bit rate of a codec."""
    from txl_audio import codec_training, cost, recipe

    file = Path(target) / "config.yaml" if Path(target).is_dir() else Path(target)
    if codec_training.describes_codec(file):
        figures = codec_training.size(file, overrides or [])
        tell(figures, _lines(figures), as_json)
        return
    model = recipe.describe(target, overrides or [])
    size = {"parameters": sum(p.numel() for p in model.parameters())}
    streams = {name: cost.of_stream(stream) for name, stream in model.streams.items()}
    if len(streams) == 1:
        figures = {**size, **next(iter(streams.values()))}
        text = _lines(figures)
    else:
        figures = {**size, "streams": streams}
        text = "\n".join([_lines(size), *(f"{name}\n{_lines(facts)}" for name, facts in streams.items())])
    tell(figures, text, as_json)


def _lines(figures: Mapping[str, Any]) -> str:
    return "\n".join(f"{name.replace('_', ' '):<20} {v:,}" for name, v in figures.items() if v is not None)
