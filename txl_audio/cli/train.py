"""Training, the size of a model, and the speed of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import Device, Json, app, say, tell
from txl_audio.tokens import ConfigError


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Config file, or a run's config.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run exactly where it was saved.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the run folder.")] = False,
) -> None:
    """Train a model. Ctrl-C saves and stops; --resume continues."""
    from txl_audio import recipe

    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it; give one of them")
    run = recipe.config_of_run(config, overrides or [], resume=resume)
    done = recipe.train(run, resume=resume, overwrite=overwrite)
    if not done:
        say(f"saved; continue with: txl-audio train {run.folder}/config.yaml --resume")
        raise typer.Exit(1)
    say(f"done: {run.folder}")


@app.command()
def info(
    target: Annotated[Path, typer.Argument(help="Config file or run folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    as_json: Json = False,
) -> None:
    """Size, memory and cost of a model."""
    from txl_audio import cost, recipe

    model = recipe.describe(target, overrides or [])
    spec, core = model.spec, model.core.config
    memory_s = core.mem_len / spec.frame_rate_hz if spec.frame_rate_hz else None
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "frame_rate_hz": spec.frame_rate_hz or None,
        "symbols_per_frame": spec.symbols_per_frame,
        "mem_len_frames": core.mem_len,
        "memory_s": memory_s,
        "macs_per_symbol": cost.macs_per_symbol(model),
        "decode_state_bytes": cost.decode_state_bytes(model),
    }
    lines = [
        f"{name.replace('_', ' '):<20} {value:,}" for name, value in figures.items() if value is not None
    ]
    tell(figures, "\n".join(lines), as_json)


bench = typer.Typer(
    no_args_is_help=True, help="Speed, as ratios against a reference measured in the same run."
)
app.add_typer(bench, name="bench")


@bench.command("train")
def bench_train(
    seconds: Annotated[float, typer.Option(min=1, help="Measured time per setting.")] = 20.0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Training throughput of the plain text shape: 6 layers, d_model 256, segment and memory 256, batch 8."""
    from txl_audio import bench as benchmarks

    figures = benchmarks.train_throughput(seconds=seconds, device=device, tell=say)
    tell(figures, benchmarks.table(figures), as_json)
