"""The verb that turns files into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import Json, app, duration, progress_bar, say, tell
from txl_audio.tokens import ConfigError


@app.command()
def prepare(
    source: Annotated[str | None, typer.Argument(help="Folder of audio, or a manifest (.jsonl).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of shards to write.")] = ...,  # pyright: ignore
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Instead of SOURCE: speechcommands, sc09, librispeech, ljspeech, vctk, yesno, fsdd."
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Local copy of the known set.")] = None,
    download: Annotated[bool, typer.Option(help="Fetch the known set into --root first.")] = False,
    subset: Annotated[
        str | None,
        typer.Option(help="Part of librispeech to fetch, besides dev-clean. [default: train-clean-100]"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="every-Nth, lists:DIR, official or all:NAME. [default: official, else every-20th]"),
    ] = None,
    trim_db: Annotated[
        float | None, typer.Option(help="Cut silence this far below each clip's loudest part.")
    ] = None,
    gain: Annotated[str, typer.Option(help="none, rms:DBFS or peak:DBFS.")] = "none",
    workers: Annotated[int | None, typer.Option(help="Processes. [default: by cores and files]")] = None,
    strict: Annotated[bool, typer.Option(help="Stop at the first file that cannot be used.")] = False,
    overwrite: Annotated[
        bool, typer.Option(help="Replace shards in --out made of other files or with other settings.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn recordings into shards of symbols. Continues where an interrupted run stopped."""
    from txl_audio.data import datasets
    from txl_audio.data.prepare import prepare as prepare_shards

    if (source is None) == (dataset is None):
        raise ConfigError("give either SOURCE or --dataset NAME with --root DIR")
    if dataset is not None and root is None:
        raise ConfigError(f"--dataset {dataset} needs --root DIR, the folder of its local copy")
    if subset is not None and not download:
        raise ConfigError("--subset says what to fetch; give it with --download")
    if download:
        if dataset is None or root is None:
            raise ConfigError("--download needs --dataset NAME and --root DIR")
        say(f"downloading {dataset} into {root} ...")
        datasets.download(dataset, root, subset=subset)
    with progress_bar("preparing") as update:
        report = prepare_shards(
            dataset or source or "",
            out,
            root=root if dataset else None,
            split=split,
            trim_db=trim_db,
            gain=gain,
            workers=workers,
            strict=strict,
            overwrite=overwrite,
            progress=lambda done, total, seconds: update(done, total, f"{duration(seconds)} of audio"),
        )
    rejected = [{"source": item.source, "reason": item.reason} for item in report.rejected]
    for item in rejected:
        say(f"left out {item['source']}: {item['reason']}")
    for warning in report.warnings:
        say(f"warning: {warning}")
    figures = {
        "out": str(report.out),
        "documents": report.documents,
        "samples": report.samples,
        "seconds": report.seconds,
        "clipped": report.clipped,
        "rejected": rejected,
        "warnings": report.warnings,
        "unchanged": report.unchanged,
    }
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in report.seconds.items())
    already = "already prepared: " if report.unchanged else ""
    tell(
        figures,
        f"{already}{report.documents} documents ({parts}), {report.clipped} clipped samples, "
        f"{len(rejected)} files left out, in {report.out}",
        as_json,
    )
    if rejected:
        raise typer.Exit(1)
