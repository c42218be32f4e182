"""What runs make of context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import Device, Json, Stream, app, progress_bar, tell
from txl_audio.cli.evaluate import shards_to_score
from txl_audio.tokens import ConfigError


@app.command()
def context(
    runs: Annotated[list[str], typer.Argument(help="Run folders of the group to compare.")],
    data: Annotated[str | None, typer.Option(help="Shards. [default: the first run's own]")] = None,
    split: Annotated[str, typer.Option(help="Split to sample positions from.")] = "val",
    r: Annotated[
        list[float] | None, typer.Option(help="Fraction of hardest positions; may be repeated. [0.1, 0.5, 1]")
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="Frames by which the context grows.")] = 100,
    longest: Annotated[int, typer.Option(min=1, help="Frames at which to stop at the latest.")] = 1000,
    positions: Annotated[int, typer.Option(min=1, help="How many positions to sample.")] = 1000,
    lanes: Annotated[int, typer.Option(min=1, help="Positions side by side.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="The same seed samples the same positions.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Picture of the gains to write.")] = None,
    stream: Stream = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Relative effective context length of a group of runs (Dai et al. 2019).

    The context grows until a step gains less than 1 %; lengths are comparable at the same --step.
    """
    from txl_audio import recipe
    from txl_audio.context import measure
    from txl_audio.plots import plot_context

    if out is not None:
        _require_picture(out)
    fractions = r or [0.1, 0.5, 1.0]
    loaded = [recipe.load_run(run, device=device, stream=stream) for run in runs]
    first, model = loaded[0]
    shards = shards_to_score(runs[0], first, model, stream, data)
    steps = measure(
        [model for _, model in loaded],
        [config.evaluate for config, _ in loaded],
        recipe.SplitDocuments(shards, split),
        fractions=fractions,
        step=step,
        longest=longest,
        positions=positions,
        lanes=lanes,
        seed=seed,
    )
    with progress_bar("measuring") as update:
        for result in steps:
            update(result.contexts[-1], longest, "frames of context")
    reach = {str(fraction): result.reach[fraction] for fraction in fractions}
    measured = [
        {
            "run": run,
            "recl": {name: group[i].length for name, group in reach.items()},
            "at_least": {name: not group[i].whole for name, group in reach.items()},
            "gains": {name: group[i].gains for name, group in reach.items()},
            "mean_nats": result.nats[i].mean(axis=1).tolist(),
        }
        for i, run in enumerate(runs)
    ]
    figures = {
        "runs": measured,
        "contexts": result.contexts,
        "positions": result.nats.shape[2],
        "split": split,
        "step": step,
        "preparation": shards.preparation,
        "out": str(out) if out else None,
    }
    lines = ["effective context by fraction of hardest positions: " + ", ".join(reach)]
    for i, run in enumerate(runs):
        lengths = (f"{'' if group[i].whole else '>= '}{group[i].length}" for group in reach.values())
        lines.append("  ".join(f"{length:>8}" for length in lengths) + f"  {run}")
    tell(figures, "\n".join(lines), as_json)
    if out is not None:  # last, so that no fault of a file costs what was measured
        hardest = str(fractions[0])
        gains = {item["run"]: item["gains"][hardest] for item in measured}
        plot_context(result.contexts, gains, out, title=f"the hardest {fractions[0]:.0%} of positions")


def _require_picture(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"--out is {path}, expected the ending of a picture: {', '.join(sorted(kinds))}")
