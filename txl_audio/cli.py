"""The command line: thin verbs. Figures go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from txl_audio.tokens import ConfigError, DataError, TxlError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
console = Console(stderr=True, highlight=False, markup=False)

# PyTorch takes seconds to import, so every verb imports what it needs: `--help` stays immediate.

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RunPath = Annotated[Path, typer.Argument(help="Run folder.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 2 bad usage or config, 1 anything else."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        app(words, prog_name="txl-audio")
    except SystemExit as stop:
        if stop.code != 130:  # Typer's answer to Ctrl-C
            raise
        _say("interrupted")
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        foreseen = isinstance(error, (TxlError, OSError, MemoryError))
        said = str(error) if foreseen else f"{type(error).__name__}: {error}; --debug shows where"
        _say(f"error: {' '.join(said.split())}")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@app.callback()
def _root() -> None:
    """Transformer-XL for streams: train on speech, generate it while you listen, model text.

    Add --debug to any command for a traceback.
    """


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
        _say(f"downloading {dataset} into {root} ...")
        datasets.download(dataset, root, subset=subset)
    with _bar("preparing") as update:
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
            progress=lambda done, total, seconds: update(done, total, f"{_duration(seconds)} of audio"),
        )
    rejected = [{"source": item.source, "reason": item.reason} for item in report.rejected]
    for item in rejected:
        _say(f"left out {item['source']}: {item['reason']}")
    for warning in report.warnings:
        _say(f"warning: {warning}")
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
    parts = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in report.seconds.items())
    already = "already prepared: " if report.unchanged else ""
    _tell(
        figures,
        f"{already}{report.documents} documents ({parts}), {report.clipped} clipped samples, "
        f"{len(rejected)} files left out, in {report.out}",
        as_json,
    )
    if rejected:
        raise typer.Exit(1)


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
        _say(f"saved; continue with: txl-audio train {run.folder}/config.yaml --resume")
        raise typer.Exit(1)
    _say(f"done: {run.folder}")


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

    _one_of("--memory", memory, ("cold", "warm"))
    _one_of("--precision", precision, ("float32", "bfloat16"))
    config, model = recipe.load_run(run, device=device)
    path = data or config.data
    if path is None:
        raise ConfigError(
            f"the run {run} names no data; give the shard folder: txl-audio evaluate {run} DATA"
        )
    shards = recipe.open_shards(path, model, origin=f"the run {run}")
    documents = recipe.SplitDocuments(shards, split)
    with _bar("scoring") as update:
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
    _tell(
        figures,
        f"{totals.bits:.4f} {unit.replace('_', ' ')} over {totals.count:,} symbols of {split}, "
        f"{memory} memory; {_preparation(shards.preparation)}",
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
        _tell(
            figures,
            f"{totals.nats / max(1, totals.count):.4f} nats per token over {totals.count:,}, in {out}",
            as_json,
        )
        return
    codec = recipe.codec_for_sound(model.spec)
    scored: list[dict[str, Any]] = []
    left_out: list[str] = []
    with _bar("scoring") as update:
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
        _say(f"left out {reason}")
    lines = [f"{item['bits_per_sample']:.4f} bits per sample  {item['path']}" for item in scored]
    _tell({"files": scored}, "\n".join(lines), as_json)
    if left_out:
        raise typer.Exit(1)


@app.command()
def sample(
    run: RunPath,
    seconds: Annotated[float, typer.Option(min=0, help="How much to generate.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="WAV or FLAC file to write.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write 16-bit little-endian samples to stdout as they are made.")
    ] = False,
    prompt: Annotated[Path | None, typer.Option(help="Audio file to continue.")] = None,
    prompt_seconds: Annotated[
        float | None, typer.Option(min=0, help="Use only the beginning of the prompt.")
    ] = None,
    with_prompt: Annotated[bool, typer.Option(help="Put the prompt before its continuation.")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely symbol.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k most likely.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the fewest that reach probability p.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sound.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Generate sound, with bounded memory, while it is heard: --raw | aplay -f S16_LE -r 16000."""
    from txl_audio import recipe, runtime
    from txl_audio.sampling import sound
    from txl_audio.sampling.sampler import Filters

    if (out is None) == (not raw):
        raise ConfigError("give either --out FILE or --raw")
    if raw and as_json:
        raise ConfigError("--raw writes sound to stdout, where --json would write; give one of them")
    _, model = recipe.load_run(run, device=device)
    filters = Filters(temperature=temperature, top_k=top_k, top_p=top_p)
    stream = sound.continuation(
        model,
        recipe.codec_for_sound(model.spec),
        seconds=seconds,
        prompt=prompt,
        prompt_seconds=prompt_seconds,
        with_prompt=with_prompt,
        filters=filters,
        seed=seed,
    )
    rate, wanted = model.spec.sample_rate_hz, round(seconds * model.spec.sample_rate_hz)
    begun, first_chunk_s, made = time.perf_counter(), 0.0, 0
    power, clipped = 0.0, 0
    with (
        runtime.single_thread(next(model.parameters()).device),
        sound.sound_writer(out, rate) as write,
        _bar("sampling") as update,
    ):
        for chunk, generated in stream:
            write(chunk)
            if generated:
                first_chunk_s = first_chunk_s or time.perf_counter() - begun
                made += chunk.size
                power += float((chunk**2).sum())
                clipped += int((abs(chunk) >= 1).sum())
                speed = made / rate / (time.perf_counter() - begun)
                update(made, wanted, f"samples, {speed:.2f} x real time")
    wall_s = time.perf_counter() - begun
    figures = {
        "samples": made,
        "seconds": made / rate,
        "wall_s": wall_s,
        "rtf": wall_s / max(1e-9, made / rate),
        "first_chunk_ms": 1000 * first_chunk_s,
        "level_dbfs": 10 * math.log10(max(1e-12, power / max(1, made))),
        "clipped_samples": clipped,
        "seed": seed,
        "backend": f"torch {next(model.parameters()).device}",
        "out": str(out) if out else None,
    }
    if not raw:
        _tell(
            figures,
            f"{made / rate:.2f} s in {wall_s:.1f} s (real-time factor {figures['rtf']:.2f}), in {out}",
            as_json,
        )


@app.command("import")
def import_weights(
    source: Annotated[Path, typer.Argument(help="Folder with config.json and weights.")],
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    segment_len: Annotated[
        int | None, typer.Option(min=1, help="Frames per segment. [default: the source's own, else 128]")
    ] = None,
) -> None:
    """Read Transformer-XL weights of the authors' PyTorch code or of Hugging Face."""
    from txl_audio import recipe

    model = recipe.import_run(source, out, segment_len=segment_len)
    parameters = sum(p.numel() for p in model.parameters())
    _say(f"imported {parameters:,} parameters, segments of {model.core.config.segment_len}, in {out}")


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
    _tell(figures, "\n".join(lines), as_json)


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

    figures = benchmarks.train_throughput(seconds=seconds, device=device, tell=_say)
    _tell(figures, benchmarks.table(figures), as_json)


def _say(line: str) -> None:
    """To standard error, never wrapped: paths stay whole."""
    console.print(line, soft_wrap=True)


def _tell(figures: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(figures) if as_json else text)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, expected {' or '.join(known)}")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _preparation(preparation: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in preparation.items())


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
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


if __name__ == "__main__":
    main()
