"""Weights from elsewhere, and for elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import RunPath, app, one_of, say


@app.command("import")
def import_weights(
    source: Annotated[
        Path, typer.Argument(help="Folder with config.json, weights and, of text, vocabulary.json.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    segment_len: Annotated[
        int | None, typer.Option(min=1, help="Frames per segment. [default: the source's own, else 128]")
    ] = None,
) -> None:
    """Read Transformer-XL weights of the authors' PyTorch code or of Hugging Face."""
    from txl_audio import recipe

    model = recipe.import_run(source, out, segment_len=segment_len)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"imported {parameters:,} parameters, segments of {model.core.config.segment_len}, in {out}")


@app.command("export")
def export_weights(
    run: RunPath,
    layout: Annotated[str, typer.Option(help="hf (Hugging Face) or authors.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    stream: Annotated[str | None, typer.Option(help="Which stream, where the run has several.")] = None,
) -> None:
    """Write a text model for the authors' PyTorch code or for Hugging Face."""
    from txl_audio import recipe

    one_of("--layout", layout, ("hf", "authors"))
    warnings = recipe.export_run(run, out, layout=layout, stream=stream)  # pyright: ignore[reportArgumentType]
    for warning in warnings:
        say(f"warning: {warning}")
    say(f"exported {run} in the layout {layout}, in {out}")
