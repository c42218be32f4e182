"""Generation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from txl_audio.cli.common import Device, Json, RunPath, Stream, app, one_of, progress_bar, say, tell
from txl_audio.tokens import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from txl_audio.model.sequence import SequenceModel
    from txl_audio.sampling.sampler import Backend
    from txl_audio.tokens import Codec, Vocabulary


@app.command()
def sample(
    run: RunPath,
    prompt: Annotated[
        str | None, typer.Option(help="What to continue: an audio file, or text of a text model.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="What to say, of a model trained to speak; ends by itself.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Sound: how much to generate, at most with --text. [default: 5, 30]"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Text: how many symbols to generate. [default: 256]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="WAV, FLAC or text file to write.")] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Sound: write 16-bit little-endian samples to stdout as they are made."),
    ] = False,
    prompt_seconds: Annotated[
        float | None, typer.Option(min=0, help="Sound: use only the beginning of the prompt.")
    ] = None,
    with_prompt: Annotated[bool, typer.Option(help="Sound: put the prompt before its continuation.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely symbol.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k most likely.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the fewest that reach probability p.")
    ] = None,
    tails: Annotated[
        float | None, typer.Option(help="Sound: cut this probability from both ends of amplitude.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    backend: Annotated[
        str,
        typer.Option(help="auto, compiled (without Python, on a CPU), graph (recorded, on a GPU) or torch."),
    ] = "auto",
    weights: Annotated[
        str | None, typer.Option(help="Compiled: float32, or int8, which is faster and nearly as good.")
    ] = None,
    stream: Stream = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Generate sound or text, with bounded memory, while it is heard or read.

    What is not said here is as the run's config has it under `sample`.

    Sound: --raw | aplay -f S16_LE -r 16000. Text goes to stdout, or to --out.
    """
    from txl_audio import recipe
    from txl_audio.sampling.sampler import named_backend

    one_of("--backend", backend, ("auto", "compiled", "graph", "torch"))
    one_of("--weights", weights or "float32", ("float32", "int8"))
    config, model = recipe.load_run(run, device=device, stream=stream)
    filters = config.sample.filters(
        model.spec, temperature=temperature, top_k=top_k, top_p=top_p, tails=tails
    )
    weights = weights or config.sample.weights_for(model, cast("Backend", backend))
    how: Any = {"filters": filters, "seed": seed, "backend": backend, "weights": weights}
    named = {"seed": seed, "backend": named_backend(model, how["backend"], how["weights"])}
    if model.spec.modality == "text":
        if seconds is not None or prompt_seconds is not None or raw or with_prompt or text is not None:
            raise ConfigError(
                "--seconds, --prompt-seconds, --with-prompt, --raw and --text are for sound, and "
                f"{run} writes text; use --prompt TEXT, --tokens N and --out FILE"
            )
        vocabulary = recipe.vocabulary_of(run, stream)
        tokens = 256 if tokens is None else tokens
        _text(
            model,
            vocabulary,
            prompt=prompt,
            tokens=tokens,
            out=out,
            how=how,
            named=named,
            as_json=as_json,
        )
        return
    if tokens is not None:
        raise ConfigError(f"--tokens is for text, and {run} makes sound; use --seconds S")
    _sound(
        model,
        recipe.codec_for_sound(model.spec, config.part(stream).codec_weights),
        prompt=None if prompt is None else Path(prompt),
        prompt_seconds=prompt_seconds,
        with_prompt=with_prompt,
        text=recipe.before_sound(run, config, model, text, stream=stream),
        seconds=(5.0 if text is None else 30.0) if seconds is None else seconds,
        out=out,
        raw=raw,
        how=how,
        named=named,
        as_json=as_json,
    )


@app.command()
def transcribe(
    run: RunPath,
    files: Annotated[list[Path], typer.Argument(help="Audio files.")],
    stream: Stream = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write what is said in audio files, by a model trained to transcribe."""
    from txl_audio import recipe, runtime
    from txl_audio.sampling.sound import read_symbols
    from txl_audio.sampling.text import transcription

    config, model = recipe.load_run(run, device=device, stream=stream)
    transcripts = recipe.transcripts_of_run(run, config, model, "transcribe", stream=stream)
    codec, found = recipe.codec_for_sound(model.spec, config.part(stream).codec_weights), []
    with runtime.single_thread(next(model.parameters()).device), progress_bar("transcribing") as update:
        for count, file in enumerate(files, 1):
            codes = read_symbols(file, codec).reshape(-1, model.spec.symbols_per_frame)
            found.append({"path": str(file), "text": transcription(model, transcripts, codes)})
            if not as_json:
                print(f"{file}\t{found[-1]['text']}", flush=True)  # at once: a later file may be bad
            update(count, len(files), "files")
    if as_json:
        print(json.dumps({"files": found}))


def _sound(
    model: SequenceModel,
    codec: Codec,
    *,
    prompt: Path | None,
    prompt_seconds: float | None,
    with_prompt: bool,
    text: np.ndarray | None,
    seconds: float,
    out: Path | None,
    raw: bool,
    how: Mapping[str, Any],
    named: Mapping[str, Any],
    as_json: bool,
) -> None:
    from txl_audio import runtime
    from txl_audio.sampling import sound

    if (out is None) == (not raw):
        raise ConfigError("give either --out FILE or --raw")
    if raw and as_json:
        raise ConfigError("--raw writes sound to stdout, where --json would write; give one of them")
    stream = sound.continuation(
        model,
        codec,
        seconds=seconds,
        prompt=prompt,
        prompt_seconds=prompt_seconds,
        with_prompt=with_prompt,
        text=text,
        tell=say,
        **how,
    )
    rate, wanted = model.spec.sample_rate_hz, round(seconds * model.spec.sample_rate_hz)
    begun, first_chunk_s, first, made = time.perf_counter(), 0.0, 0, 0
    power, clipped = 0.0, 0
    with (
        runtime.single_thread(next(model.parameters()).device),
        sound.sound_writer(out, rate) as write,
        progress_bar("sampling") as update,
    ):
        for chunk, generated in stream:
            write(chunk)
            if generated:
                made += chunk.size
                if not first_chunk_s:
                    first_chunk_s, first = time.perf_counter() - begun, made
                power += float((chunk**2).sum())
                clipped += int((abs(chunk) >= 1).sum())
                speed = made / rate / (time.perf_counter() - begun)
                update(made, wanted, f"samples, {speed:.2f} x real time")
    wall_s = time.perf_counter() - begun
    # Before the first chunk a prompt is read and, once on a machine, the sampler is compiled.
    taken_s, after = (wall_s - first_chunk_s, made - first) if made > first else (wall_s, made)
    figures = {
        "samples": made,
        "seconds": made / rate,
        "wall_s": wall_s,
        "rtf": taken_s * rate / after if after else None,
        "first_chunk_ms": 1000 * first_chunk_s,
        "level_dbfs": 10 * math.log10(max(1e-12, power / max(1, made))),
        "clipped_samples": clipped,
        **named,
        "out": str(out) if out else None,
    }
    if not raw:
        tell(
            figures,
            f"{made / rate:.2f} s in {wall_s:.1f} s"
            + (f" (first {first_chunk_s:.2f} s, then {figures['rtf']:.2f} of real time)" if made else "")
            + f", in {out}",
            as_json,
        )


def _text(
    model: SequenceModel,
    vocabulary: Vocabulary,
    *,
    prompt: str | None,
    tokens: int,
    out: Path | None,
    how: Mapping[str, Any],
    named: Mapping[str, Any],
    as_json: bool,
) -> None:
    from txl_audio import runtime
    from txl_audio.sampling import text

    begun, first_chunk_s = time.perf_counter(), 0.0
    pieces = text.continuation(model, vocabulary, tokens=tokens, prompt=prompt, tell=say, **how)
    kept: list[str] = []
    with runtime.single_thread(next(model.parameters()).device), text.text_writer(out) as write:
        for piece, generated in pieces:
            kept.append(piece)
            if generated:
                first_chunk_s = first_chunk_s or time.perf_counter() - begun
            if out is not None or not as_json:
                write(piece)
    wall_s = time.perf_counter() - begun
    figures = {
        "symbols": tokens,
        "wall_s": wall_s,
        "symbols_per_s": tokens / wall_s,
        "first_chunk_ms": 1000 * first_chunk_s,
        **named,
        "text": "".join(kept),
        "out": str(out) if out else None,
    }
    words = f"{tokens:,} symbols in {wall_s:.1f} s ({tokens / wall_s:.0f} per second)"
    if out is None and not as_json:
        print()  # ends the text's last line
        say(words)
    else:
        tell(figures, f"{words}, in {out}", as_json)
