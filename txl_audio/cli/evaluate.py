"""Scores of splits, files and token streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txl_audio.cli.common import (
    Device,
    Json,
    RunPath,
    Stream,
    app,
    one_of,
    preparation,
    progress_bar,
    say,
    tell,
)
from txl_audio.tokens import ConfigError, DataError

if TYPE_CHECKING:
    import torch

    from txl_audio.data.shards import Shards
    from txl_audio.data.transcripts import Order
    from txl_audio.evaluate import EvaluateConfig, Totals
    from txl_audio.model.sequence import SequenceModel
    from txl_audio.recipe import RunConfig
    from txl_audio.tokens import TokenSpec, Vocabulary


@app.command()
def evaluate(
    run: RunPath,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA] [evaluate.KEY=VALUE]...",
            help="Shard folder or URL [default: the run's own], and settings instead of the run's.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to score.")] = "val",
    memory: Annotated[str, typer.Option(help="cold: forget at each document; warm: run on.")] = "cold",
    dynamic: Annotated[
        str | None, typer.Option(help="sgd or rms: go on learning from what has been scored.")
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Documents side by side; a text is cut into so many pieces, which begin without what stands "
            "before them. [default: the run's, else 8, text 1; --dynamic 1]",
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="speak or transcribe: of a model trained on transcripts. [default: the run's, all]"
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    stream: Stream = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score every symbol of a split, once."""
    from txl_audio import evaluate as evaluation
    from txl_audio import recipe, runtime

    one_of("--memory", memory, ("cold", "warm"))
    one_of("--precision", precision, ("float32", "bfloat16"))
    folders = [word for word in words or [] if "=" not in word]
    overrides = [word for word in words or [] if "=" in word]
    if len(folders) > 1:
        raise ConfigError(f"got the folders {', '.join(folders)}, expected one")
    overrides += [f"evaluate.lanes={lanes}"] * (lanes is not None)
    if dynamic is not None:
        one_of("--dynamic", dynamic, ("sgd", "rms"))
        overrides.append(f"evaluate.dynamic.method={dynamic}")
    config, model = recipe.load_run(run, device=device, stream=stream)
    settings = _settings(config, overrides, origin=run)
    viewed, adapting = settings.view(model).core.config, settings.dynamic
    shards = shards_to_score(run, config, model, stream, folders[0] if folders else None)
    orders = _orders(config, stream, order)
    documents = recipe.SplitDocuments(shards, split, orders)
    train = recipe.SplitDocuments(shards, "train", orders) if adapting and "train" in shards.splits else None
    runtime.keep_freed_memory()
    with progress_bar("scoring") as update:
        totals = evaluation.evaluate(
            model,
            documents,
            settings,
            warm=memory == "warm",
            precision=precision,  # pyright: ignore[reportArgumentType]
            train=train,
            progress=lambda count: update(count, documents.symbols, "symbols"),
        )
    metrics = figures_of(model.spec, totals)
    figures = {
        **for_json(metrics),
        "nats": totals.nats,
        "count": totals.count,
        "split": split,
        "documents": len(documents),
        **({"orders": orders} if orders else {}),
        "memory": memory,
        "lanes": settings.lanes_of(model.spec),
        "segment_len": viewed.segment_len,
        "mem_len": viewed.mem_len,
        "window": viewed.window,
        "clamp_len": getattr(viewed.positions, "clamp_len", None),
        "stride": settings.stride,
        "dynamic": {**adapting.model_dump(), "lr": adapting.rate} if adapting else None,
        "precision": precision,
        "preparation": shards.preparation,
    }
    tell(
        figures,
        f"{first_figure(metrics)}{_by_stage(metrics)} over {totals.count:,} symbols of {split}, "
        f"{memory} memory; {preparation(shards.preparation)}",
        as_json,
    )


@app.command()
def score(
    run: RunPath,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Audio files, or text files of a text model.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="safetensors with `tokens` [N+1, B], instead of files.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --tokens: safetensors to write `nll` [N, B] to. With one text file: lines of "
            "token, tab, nats, from the second token on."
        ),
    ] = None,
    stream: Stream = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Nats and bits of audio or text files, or of token streams.

    Of a text the first symbol is only context: a file of one symbol has none that is scored.
    """
    from txl_audio import recipe

    if bool(files) == (tokens is not None) or (tokens is not None and out is None):
        raise ConfigError("give FILES, or --tokens FILE.safetensors with --out OUT.safetensors")
    config, model = recipe.load_run(run, device=device, stream=stream)
    settings = config.evaluate
    if settings.dynamic is not None:
        say("scored without learning: the run's evaluate.dynamic is for `txl-audio evaluate`")
        settings = settings.model_copy(update={"dynamic": None})
    if tokens is not None and out is not None:
        _score_tokens(model, tokens, out, settings, as_json)
        return
    vocabulary = recipe.vocabulary_of(run, stream) if model.spec.modality == "text" else None
    files = files or []
    if out is not None and (vocabulary is None or len(files) > 1):
        raise ConfigError("--out takes the nats of one text file, or of --tokens; leave it out")
    _score_files(model, files, vocabulary, config.part(stream).codec_weights, out, settings, as_json)


def _score_tokens(
    model: SequenceModel, tokens: Path, out: Path, settings: EvaluateConfig, as_json: bool
) -> None:
    from txl_audio import evaluate as evaluation
    from txl_audio import recipe

    nll = evaluation.score_tokens(model, recipe.read_tokens(tokens), settings)
    recipe.write_tensors(out, {"nll": nll})
    totals = evaluation.Totals(nll.double().sum().item(), nll.numel())
    figures = {"path": str(tokens), "nats": totals.nats, "count": totals.count, "out": str(out)}
    tell(
        figures,
        f"{totals.nats / max(1, totals.count):.4f} nats per token over {totals.count:,}, in {out}",
        as_json,
    )


def _score_files(
    model: SequenceModel,
    files: list[Path],
    vocabulary: Vocabulary | None,
    codec_weights: str | None,
    out: Path | None,
    settings: EvaluateConfig,
    as_json: bool,
) -> None:
    from txl_audio import evaluate as evaluation
    from txl_audio import recipe
    from txl_audio.sampling import sound

    codec = recipe.codec_for_sound(model.spec, codec_weights) if vocabulary is None else None
    if vocabulary is not None:
        model.spec.require(vocabulary.spec, here="the model", there="the vocabulary")
    # Without newlines the bits are of the bytes that remain.
    form = {"newlines": "drop"} if getattr(vocabulary, "drop_newlines", False) else {}
    note = f" ({preparation(form)})" if form else ""
    scored: list[dict[str, Any]] = []
    lines: list[str] = []
    left_out: list[str] = []
    with progress_bar("scoring") as update:
        for done, path in enumerate(files, 1):
            try:
                if codec is not None:
                    symbols = sound.read_symbols(path, codec)
                else:
                    assert vocabulary is not None
                    symbols = vocabulary.encode(_read(path)).numpy()
            except DataError as error:
                left_out.append(str(error) if str(path) in str(error) else f"{path}: {error}")
                continue
            nats = evaluation.score_document(model, symbols, settings)
            totals = evaluation.Totals(nats.double().sum().item(), nats.numel())
            metrics = figures_of(model.spec, totals)
            lines.append(f"{first_figure(metrics)}{note}  {path}")
            sums = {"nats": totals.nats, "count": totals.count}
            scored.append({"path": str(path), **sums, **for_json(metrics)})
            if out is not None and vocabulary is not None:
                known: Sequence[int | str] = vocabulary.symbols
                names = [_name(known[int(id)]) for id in symbols[1:]]
                _write_lines(out, names, nats)
            update(done, len(files), "")
    if not scored:
        raise DataError("no file can be scored: " + "; ".join(left_out))
    for reason in left_out:
        say(f"left out {reason}")
    tell({"files": scored, "out": str(out) if out else None, **form}, "\n".join(lines), as_json)
    if left_out:
        raise typer.Exit(1)


def _settings(config: RunConfig, overrides: list[str], *, origin: str) -> EvaluateConfig:
    """The run's `evaluate` section, with overrides.

    Lanes of a run that is not scored dynamically are not for dynamic evaluation, see DynamicConfig.
    """
    from txl_audio import recipe
    from txl_audio.config import parse

    for override in overrides:
        if not override.startswith("evaluate."):
            raise ConfigError(
                f"override {override!r} is not of the form evaluate.key=value, the settings that can change"
            )
    settings = parse(recipe.RunConfig, config.to_yaml(), overrides, origin=origin).evaluate
    said = any(override.startswith("evaluate.lanes=") for override in overrides)
    if settings.dynamic is not None and config.evaluate.dynamic is None and not said:
        return settings.model_copy(update={"lanes": None})
    return settings


def _orders(config: RunConfig, stream: str | None, order: str | None) -> Sequence[Order]:
    """In which orders recordings and what is said in them are scored."""
    trained = config.part(stream).transcripts
    if order is None:
        return trained
    if order not in trained:
        known = ", ".join(trained) or "none: it was not trained on transcripts"
        raise ConfigError(f"--order is {order!r}, expected one that the run was trained with ({known})")
    return [one for one in trained if one == order]


def shards_to_score(
    run: str, config: RunConfig, model: SequenceModel, stream: str | None, data: Path | str | None
) -> Shards:
    """The shards to score: `data`, or the run's own."""
    from txl_audio import recipe

    own = config.data_folders
    path = data or (own.get(stream) if stream else next(iter(own.values()), None))
    if path is None:
        raise ConfigError(f"the run {run} names no data; give the shard folder")
    return recipe.open_shards(path, model, origin=f"the run {run}")


def figures_of(spec: TokenSpec, totals: Totals) -> dict[str, float]:
    """The figures people report of a stream, the first one first."""
    from txl_audio import recipe
    from txl_audio.data.text import text_metrics

    if spec.modality == "text":
        return text_metrics(spec, nats=totals.nats, count=totals.count)
    return totals.of_codes(spec.frame_rate_hz) or {recipe.bits_name(spec): totals.bits}


def first_figure(metrics: Mapping[str, float]) -> str:
    """The figure people report, with its unit."""
    unit, value = next(iter(metrics.items()))
    return f"{value:.4f} {unit.replace('_', ' ')}"


def _by_stage(metrics: Mapping[str, float]) -> str:
    """Of a codec's codes: what every codebook has of it."""
    stages = [f"{value:.3f}" for name, value in metrics.items() if name.startswith("bits_per_frame_stage_")]
    return f" ({metrics['bits_per_frame']:.3f} per frame, by stage {' '.join(stages)})" if stages else ""


def for_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _name(symbol: int | str) -> str:
    r"""A symbol on a line of its own: a byte beyond ASCII as \xNN, what breaks a line as \n."""
    if isinstance(symbol, int):
        symbol = chr(symbol) if 32 <= symbol < 127 or symbol in (9, 10, 13) else f"\0{symbol:02x}"
    escapes = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\x"}
    return symbol.translate(str.maketrans(escapes))


def _write_lines(path: Path, names: list[str], nats: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{name}\t{value:.6f}\n" for name, value in zip(names, nats.tolist(), strict=True))
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
