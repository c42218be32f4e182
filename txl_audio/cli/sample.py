"""Generation."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import Device, Json, RunPath, app, progress_bar, tell
from txl_audio.tokens import ConfigError


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
        progress_bar("sampling") as update,
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
        tell(
            figures,
            f"{made / rate:.2f} s in {wall_s:.1f} s (real-time factor {figures['rtf']:.2f}), in {out}",
            as_json,
        )
