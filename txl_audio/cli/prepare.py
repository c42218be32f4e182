"""The verb that turns files into shards: recordings and texts."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txl_audio.cli.common import Json, app, duration, preparation, progress_bar, say, tell
from txl_audio.tokens import ConfigError

if TYPE_CHECKING:
    from txl_audio.data.prepared import PrepareReport


@app.command()
def prepare(
    source: Annotated[
        str | None,
        typer.Argument(
            help="Folder of audio or Shar, a manifest (.jsonl), hf:NAME of Hugging Face's hub, or a text."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of shards to write.")] = ...,  # pyright: ignore
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Speech, with --root instead of SOURCE: speechcommands, sc09, librispeech, libritts, "
            "librilight, cmuarctic, ljspeech, vctk, yesno, fsdd. Text: enwik8, text8, wt103, wt2, lm1b, ptb, "
            "bytes, chars, words."
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Local copy of the known set.")] = None,
    download: Annotated[bool, typer.Option(help="Fetch the known speech set into --root first.")] = False,
    subset: Annotated[
        str | None,
        typer.Option(
            help="Part to fetch. librispeech, libritts: besides dev-clean [default: train-clean-100]; "
            "cmuarctic: the speaker [default: aew]."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Audio: every-Nth, lists:DIR, official or all:NAME [default: official, else every-20th]. "
            "bytes, chars, words: train/val/test fractions [default: files named so, else 90/5/5]."
        ),
    ] = None,
    newlines: Annotated[
        str | None,
        typer.Option(help="enwik8: keep, or drop as the authors of Transformer-XL. [default: keep]"),
    ] = None,
    transcripts: Annotated[
        Path | None,
        typer.Option(help="What is said: lines of id, tab, text. [default: what the known set says]"),
    ] = None,
    trim_db: Annotated[
        float | None, typer.Option(help="Cut silence this far below each clip's loudest part.")
    ] = None,
    gain: Annotated[str, typer.Option(help="none, rms:DBFS or peak:DBFS.")] = "none",
    variants: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prepare each training recording so many times: as it is, then with speed within 8 %, level "
            "within 6 dB and other frame bounds, always the same ones.",
        ),
    ] = 1,
    codec: Annotated[
        str | None,
        typer.Option(
            help="What sound becomes: mulaw, lyra, rvq, encodec, dac or mimi; with settings: lyra:stages=46. "
            "[default: mulaw]"
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Folder of the codec's weights, or their name on Hugging Face's hub.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. [default: by cores and files]")] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Encode on Ray: the cluster that RAY_ADDRESS names, else this machine; extra ray."
        ),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(help="Prepare part i of n, as 2/8, into OUT.shard-2-of-8, here or on another machine."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Join the shards beside --out into it; without SOURCE.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(help="Stop at the first file that cannot be used, or corpus unlike the published one."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option(help="Replace shards in --out made of other files or with other settings.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn recordings or texts into shards of symbols. Audio continues where an interrupted run stopped."""
    from txl_audio.codecs import parse_codec
    from txl_audio.data.corpora import CORPORA
    from txl_audio.data.datasets import DATASETS

    if merge:
        if source is not None or dataset is not None or shard is not None:
            raise ConfigError("--merge joins what was prepared; give it --out alone")
        _merge(out, {"strict": strict, "overwrite": overwrite}, as_json)
        return
    known = (*DATASETS, *CORPORA)
    if dataset is not None and dataset not in known:
        near = difflib.get_close_matches(dataset, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"--dataset is {dataset!r}, which is no set of speech or text; {hint}")
    if dataset in CORPORA:
        if (source is None) == (root is None):
            raise ConfigError(f"--dataset {dataset} needs SOURCE, its archive, folder or file")
        of_audio = (subset, transcripts, trim_db, codec, weights, workers, shard)
        if (
            download
            or ray
            or gain != "none"
            or variants > 1
            or any(option is not None for option in of_audio)
        ):
            raise ConfigError(
                "--download, --subset, --transcripts, --trim-db, --gain, --variants, --codec, --weights, "
                f"--workers, --ray and --shard are for audio, {dataset} is a text"
            )
        options = {"split": split, "newlines": newlines, "strict": strict, "overwrite": overwrite}
        _prepare_text(dataset, source or str(root), out, options, as_json)
        return
    if newlines is not None:
        raise ConfigError(f"--newlines {newlines} is for --dataset enwik8")
    if (source is None) == (dataset is None):
        raise ConfigError("give either SOURCE or --dataset NAME with --root DIR")
    if dataset is not None and root is None:
        raise ConfigError(f"--dataset {dataset} needs --root DIR, the folder of its local copy")
    if subset is not None and not download:
        raise ConfigError("--subset says what to fetch; give it with --download")
    if download:
        _download(dataset, root, subset)
    options = {"split": split, "trim_db": trim_db, "gain": gain, "variants": variants, "workers": workers}
    options |= {"ray": ray, "shard": _shard(shard), "root": root if dataset else None}
    options |= {"strict": strict, "overwrite": overwrite}
    options |= {"transcripts": transcripts, "codec": parse_codec(codec or "mulaw", weights=weights)}
    _prepare_audio(dataset or source or "", out, options, as_json)


def _download(dataset: str | None, root: Path | None, subset: str | None) -> None:
    from txl_audio.data import datasets

    if dataset is None or root is None:
        raise ConfigError("--download needs --dataset NAME and --root DIR")
    say(f"downloading {dataset} into {root} ...")
    datasets.download(dataset, root, subset=subset)


def _shard(shard: str | None) -> tuple[int, int] | None:
    if shard is None:
        return None
    parts = re.fullmatch(r"(\d+)/(\d+)", shard)
    if parts is None:
        raise ConfigError(f"--shard is {shard!r}, expected i/n, such as 2/8")
    return int(parts[1]), int(parts[2])


def _merge(out: Path, options: dict[str, Any], as_json: bool) -> None:
    from txl_audio.data.merge import merge

    _tell_audio(merge(out, **options), as_json)


def _prepare_audio(source: str, out: Path, options: dict[str, Any], as_json: bool) -> None:
    from txl_audio.data.prepare import prepare as prepare_shards

    with progress_bar("preparing") as update:
        report = prepare_shards(
            source,
            out,
            progress=lambda done, total, seconds: update(done, total, f"{duration(seconds)} of audio"),
            **options,
        )
    _tell_audio(report, as_json)


def _tell_audio(report: PrepareReport, as_json: bool) -> None:
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


def _prepare_text(dataset: str, source: str, out: Path, options: dict[str, Any], as_json: bool) -> None:
    from txl_audio.data.prepare_text import prepare_text

    with progress_bar("preparing") as update:
        report = prepare_text(
            dataset,
            source,
            out,
            progress=lambda what, done, total: update(done >> 20, max(done, total) >> 20, f"MiB, {what}"),
            **options,
        )
    for warning in report.warnings:
        say(f"warning: {warning}")
    figures = {
        "out": str(report.out),
        "documents": report.documents,
        "tokens": report.tokens,
        "vocabulary": report.vocabulary_size,
        "unknown": report.unknown,
        "preparation": report.preparation,
        "warnings": list(report.warnings),
        "unchanged": report.unchanged,
    }
    tokens = ", ".join(f"{name} {count:,}" for name, count in report.tokens.items())
    already = "already prepared: " if report.unchanged else ""
    tell(
        figures,
        f"{already}{tokens} tokens of {report.vocabulary_size:,} symbols, {report.unknown:,} unknown "
        f"({preparation(report.preparation)}), in {report.out}",
        as_json,
    )
