"""Scores of splits, files and token streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from txl_audio.cli.common import Device, Json, RunPath, app, one_of, preparation, progress_bar, say, tell
from txl_audio.tokens import ConfigError, DataError


@app.command()
def evaluate(
    run: RunPath,
    data: Annotated[Path | None, typer.Argument(help="Shard folder. [default: the run's own]")] = None,
    split: Annotated[str, typer.Option(help="Split to score.")] = "val",
    memory: Annotated[str, typer.Option(help="cold: forget at each document; warm: run on.")] = "cold",
    lanes: Annotated[int, typer.Option(min=1, help="Documents scored side by side.")] = 8,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score every symbol of a split, once."""
    from txl_audio import evaluate as evaluation
    from txl_audio import recipe

    one_of("--memory", memory, ("cold", "warm"))
    one_of("--precision", precision, ("float32", "bfloat16"))
    config, model = recipe.load_run(run, device=device)
    path = data or config.data
    if path is None:
        raise ConfigError(
            f"the run {run} names no data; give the shard folder: txl-audio evaluate {run} DATA"
        )
    shards = recipe.open_shards(path, model, origin=f"the run {run}")
    documents = recipe.SplitDocuments(shards, split)
    with progress_bar("scoring") as update:
        totals = evaluation.evaluate(
            model,
            documents,
            lanes=lanes,
            warm=memory == "warm",
            precision=precision,  # pyright: ignore[reportArgumentType]
            progress=lambda count: update(count, documents.symbols, "symbols"),
        )
    unit = recipe.BITS[model.spec.modality]
    figures = {
        unit: totals.bits,
        "nats": totals.nats,
        "count": totals.count,
        "split": split,
        "documents": len(documents),
        "memory": memory,
        "precision": precision,
        "preparation": shards.preparation,
    }
    tell(
        figures,
        f"{totals.bits:.4f} {unit.replace('_', ' ')} over {totals.count:,} symbols of {split}, "
        f"{memory} memory; {preparation(shards.preparation)}",
        as_json,
    )


@app.command()
def score(
    run: RunPath,
    files: Annotated[list[Path] | None, typer.Argument(help="Audio files.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="safetensors with `tokens` [N+1, B], instead of files.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --tokens: safetensors to write `nll` [N, B] to.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Nats and bits of audio files, or of token streams."""
    from txl_audio import evaluate as evaluation
    from txl_audio import recipe
    from txl_audio.sampling import sound

    if bool(files) == (tokens is not None) or (tokens is None) != (out is None):
        raise ConfigError("give audio FILES, or --tokens FILE.safetensors with --out OUT.safetensors")
    _, model = recipe.load_run(run, device=device)
    if tokens is not None and out is not None:
        nll = evaluation.score_tokens(model, recipe.read_tokens(tokens))
        recipe.write_tensors(out, {"nll": nll})
        totals = evaluation.Totals(nll.double().sum().item(), nll.numel())
        figures = {"path": str(tokens), "nats": totals.nats, "count": totals.count, "out": str(out)}
        tell(
            figures,
            f"{totals.nats / max(1, totals.count):.4f} nats per token over {totals.count:,}, in {out}",
            as_json,
        )
        return
    codec = recipe.codec_for_sound(model.spec)
    scored: list[dict[str, Any]] = []
    left_out: list[str] = []
    with progress_bar("scoring") as update:
        for done, path in enumerate(files or [], 1):
            try:
                symbols = sound.read_symbols(path, codec)
            except DataError as error:
                left_out.append(str(error) if str(path) in str(error) else f"{path}: {error}")
                continue
            nats = evaluation.score_document(model, symbols)
            totals = evaluation.Totals(nats.double().sum().item(), nats.numel())
            scored.append(
                {
                    "path": str(path),
                    "nats": totals.nats,
                    "count": totals.count,
                    "bits_per_sample": totals.bits,
                }
            )
            update(done, len(files or []), "")
    if not scored:
        raise DataError("no file can be scored: " + "; ".join(left_out))
    for reason in left_out:
        say(f"left out {reason}")
    lines = [f"{item['bits_per_sample']:.4f} bits per sample  {item['path']}" for item in scored]
    tell({"files": scored}, "\n".join(lines), as_json)
    if left_out:
        raise typer.Exit(1)
