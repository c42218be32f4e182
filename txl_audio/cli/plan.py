"""What a training will take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import Json, app, say, tell
from txl_audio.tokens import ConfigError


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="Config file; its data need not exist.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Devices that share the lanes of every batch.")] = 1,
    hours: Annotated[
        float | None, typer.Option(min=0, help="Hours of sound, read once. [default: train.steps]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="a100, h100, h200, l40s: by data sheet; here: this machine, measured.")
    ] = "h100",
    utilisation: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="Share of the floor's speed that is reached; assumed. [default: 0.5]"
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a device for an hour.")] = None,
    codes: Annotated[
        str | None,
        typer.Option(
            metavar="KxV@RATE", help="Frames of a codec whose data are not prepared: 8x256@50 is Lyra's."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time, memory and money of a training: counted, on stated or measured rates; see docs/scaling.md."""
    from txl_audio import plan as plans
    from txl_audio import recipe
    from txl_audio.config import load
    from txl_audio.model.sequence import SINGLE

    run = load(recipe.RunConfig, config, overrides or [])
    if run.model.streams:
        raise ConfigError(
            f"{config} has several streams, whose steps differ; plan one of them in its own config"
        )
    spec = None if codes is None else plans.code_spec(codes)
    model = recipe.describe(config, overrides or [], draw=device == plans.HERE, codes=spec).streams[SINGLE]
    figures = plans.plan(
        model,
        run.train,
        device=device,
        gpus=gpus,
        hours=hours,
        utilisation=utilisation,
        price=price,
        tell=say,
    )
    tell(figures, plans.table(figures), as_json)
