"""How a model sounds when it continues its own output: held-out prompts, continued and compared with speech.

    python scripts/free_running.py runs/kathleen --data data/kathleen --out out/free --first 20 --seed 1
    python scripts/free_running.py runs/kathleen --data data/kathleen --out out/hour \\
        --prompts 1 --first 20 --seed 1 --seconds 3600 --no-audio

Every prompt is the begin of another held-out document, drawn in a fixed order: with --first N the first N
are left to whoever tunes settings. All prompts run side by side. OUT gets results.json, report.md, a FLAC
file for every prompt, spectrograms.png, and minutes.png: speed, memory, level and bits as the run goes on.

Figures are of minutes (or of all there is, if shorter), so that a run of hours needs no more memory than one
of a minute. Beside the model stand real held-out speech in pieces of the same length, and the model's own
adaptive linear predictors alone, whose output is their prediction plus a residual drawn from those of the
prompt. Where `speechmos` is installed (pip install -e '.[baselines]'), DNSMOS (P.835, overall) of the first
20 s of each is given too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from free_running_report import draw_minutes, draw_sounds, report
from linear_speech import linear_continuations

from txl_audio import recipe, runtime
from txl_audio.codecs.mulaw import SAMPLE_RATE_HZ, MuLawCodec, mulaw_decode
from txl_audio.codecs.predictors import PredictorsConfig
from txl_audio.evaluate import evaluate
from txl_audio.listening import CLIPPED, Sound, compare, describe, pooled
from txl_audio.sampling.sampler import Sampler
from txl_audio.sampling.sound import sound_writer
from txl_audio.tokens import ConfigError, TxlError

MINUTE_S = 60
TELL_EVERY_S = 10.0
SCORED_SAMPLES = 2_000_000
"""Real speech is scored up to about this many samples."""
PIECE_FRAMES = 10
"""Frames that are drawn at once. The sampler says what the last of them cost, and bits are of those."""
PREDICTED_EXCERPTS = 3
"""Of the linear predictor."""
OPINION_S = 20
"""How much of every excerpt DNSMOS hears: it takes a third of real time."""


@dataclass(frozen=True)
class Minute:
    """One minute of all lanes side by side.

    samples: of every lane until here; wall_s: what this minute took; samples_per_s: of all lanes together;
    real_time_factor: wall time over the time that one lane's sound lasts; state_bytes: of the sampler;
    peak_memory_bytes: most that the process has held until here; bits: mean cost of a sample under the model;
    level_dbfs, clipped: over all lanes.
    """

    samples: int
    wall_s: float
    samples_per_s: float
    real_time_factor: float
    state_bytes: int
    peak_memory_bytes: int
    bits: float
    level_dbfs: float
    clipped: float


def choose(documents: recipe.SplitDocuments, *, prompts: int, first: int, samples: int) -> list[int]:
    """Which documents are continued: `prompts` of those with more than `samples`, in a fixed random order
    of which the `first` are passed over. Raises ConfigError where there are too few."""
    long = [i for i, document in enumerate(documents.documents) if document.frames > samples]
    order = np.random.default_rng(0).permutation(long)
    if first + prompts > len(order):
        raise ConfigError(
            f"{prompts} prompts after the first {first} were asked for, the split has {len(order)} documents "
            f"of more than {samples / SAMPLE_RATE_HZ:g} s; ask for fewer or shorter ones"
        )
    return [int(i) for i in order[first : first + prompts]]


def minutes(
    sampler: Sampler, codec: MuLawCodec, samples: int, lanes: int
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """(pcm [B, n], bits [B], seconds taken) of one minute after another, `samples` of every lane in all."""
    places = codec.spec.symbols_per_frame
    total, per_minute = -(-samples // places), -(-MINUTE_S * SAMPLE_RATE_HZ // places)
    told = started = time.perf_counter()
    for at in range(0, total, per_minute):
        begun, frames = time.perf_counter(), min(per_minute, total - at)
        codes = torch.empty(lanes, frames, places, dtype=torch.uint8)
        nats = torch.zeros(lanes, dtype=torch.float64, device=sampler.device)
        pieces = range(0, frames, PIECE_FRAMES)
        for first in pieces:
            after = min(first + PIECE_FRAMES, frames)
            codes[:, first:after] = sampler.next_frames(after - first)
            nats += sampler.nats.sum(1)
            if (now := time.perf_counter()) - told > TELL_EVERY_S:
                told, made = now, (at + after) * places
                done = f"{made / SAMPLE_RATE_HZ:.1f} of {samples / SAMPLE_RATE_HZ:g} s"
                say(f"{done}, {made / (now - started):,.0f} samples/s in each of {lanes} lanes")
        pcm = codec.decode(codes, samples=min(frames * places, samples - at * places)).numpy()
        bits = nats.cpu().numpy() / (len(pieces) * places) / math.log(2)
        yield pcm, bits, time.perf_counter() - begun


def opinion_score(sounds: Sequence[np.ndarray]) -> float | None:
    """Mean DNSMOS P.835, overall (1 to 5), of how pcm [N] begin; None where speechmos is not installed."""
    try:
        from speechmos import dnsmos  # pyright: ignore[reportMissingImports]
    except ImportError:
        say("speechmos is not installed: no DNSMOS; pip install -e '.[baselines]'")
        return None
    begins = [pcm[: OPINION_S * SAMPLE_RATE_HZ] for pcm in sounds]
    return float(np.mean([dnsmos.run(pcm, SAMPLE_RATE_HZ)["ovrl_mos"] for pcm in begins]))


def real_speech(documents: recipe.SplitDocuments, *, length: int, pieces: int) -> list[np.ndarray]:
    """The documents one after another, in up to `pieces` of pcm [length]; all of it where that is less."""
    parts, held = [], 0
    for index in range(len(documents)):
        if held < length * pieces:
            parts.append(mulaw_decode(documents[index]))
            held += len(parts[-1])
    pcm = np.concatenate(parts)
    return [pcm[at : at + length] for at in range(0, max(1, len(pcm) - length + 1), length)][:pieces]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Generated:
    """What a model made: a Minute and excerpts (a minute of one prompt each) for all of it, pcm [B, N] of the
    first minute."""

    curve: list[Minute]
    excerpts: list[dict[str, Any]]
    sounds: list[Sound]
    first: np.ndarray


def generate(sampler: Sampler, codec: MuLawCodec, prompts: Mapping[str, np.ndarray], given: Any) -> Generated:
    """Continues the prompts, codes by document id, and writes their files unless given.no_audio."""
    made = Generated([], [], [], np.empty(0))
    samples = round(given.seconds * SAMPLE_RATE_HZ)
    with runtime.single_thread(sampler.device), ExitStack() as files:
        writers = []
        for name, prompt in {} if given.no_audio else prompts.items():
            writers.append(files.enter_context(sound_writer(given.out / f"{name}.flac", SAMPLE_RATE_HZ)))
            writers[-1](mulaw_decode(prompt))
        for pcm, bits, wall_s in minutes(sampler, codec, samples, len(prompts)):
            for write, lane in zip(writers, pcm, strict=False):
                write(lane)
            if not made.curve:
                made.first = pcm
            before = made.curve[-1].samples if made.curve else 0
            made.curve.append(minute_of(pcm, bits, wall_s, sampler, before=before))
            say(f"minute {len(made.curve)}: {made.curve[-1]}")
            if pcm.shape[1] < SAMPLE_RATE_HZ:
                continue  # the rest of a run, too short for statistics
            for name, lane, own_bits in zip(prompts, pcm, bits, strict=True):
                made.sounds.append(describe(lane))
                made.excerpts.append({"prompt": name, "minute": len(made.curve), "bits": float(own_bits)})
    return made


def minute_of(pcm: np.ndarray, bits: np.ndarray, wall_s: float, sampler: Sampler, *, before: int) -> Minute:
    lanes, samples = pcm.shape
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Minute(
        samples=before + samples,
        wall_s=wall_s,
        samples_per_s=lanes * samples / wall_s,
        real_time_factor=wall_s * SAMPLE_RATE_HZ / samples,
        state_bytes=sampler.state.nbytes(),
        peak_memory_bytes=peak,
        bits=float(bits.mean()),
        level_dbfs=10 * math.log10(max(1e-12, float(np.square(pcm, dtype=np.float64).mean()))),
        clipped=float((np.abs(pcm) >= CLIPPED).mean()),
    )


def run(given: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Generates, measures and writes all files; `arguments` are what was asked, to be found in them."""
    config, model = recipe.load_run(given.run)
    weights = (recipe.run_folder(given.run).path / "model.safetensors").read_bytes()
    codec = recipe.codec_for_sound(model.spec)
    if not isinstance(codec, MuLawCodec):
        raise ConfigError(f"{given.run} is a model of {model.spec.name}, expected one of mu-law samples")
    shards = recipe.open_shards(given.data, model, origin=str(given.run))
    documents = recipe.SplitDocuments(shards, given.split)
    places = model.spec.symbols_per_frame
    size = round(given.prompt_seconds * SAMPLE_RATE_HZ) // places * places
    chosen = choose(documents, prompts=given.prompts, first=given.first, samples=size)
    prompts = {documents.documents[i].id: documents[i][:size].astype(np.int64) for i in chosen}
    line = np.stack(list(prompts.values()))
    given.out.mkdir(parents=True, exist_ok=True)

    # First, so that the memory it takes is not hidden by what comes after.
    own = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "tails")}
    filters = config.sample.filters(model.spec, **own)
    given.weights = given.weights or config.sample.weights_for(model)
    for name in own:
        setattr(given, name, getattr(filters, name))
    sampler = Sampler(
        model,
        prompt=torch.from_numpy(line),
        filters=filters,
        weights=given.weights,
        seed=given.seed,
        tell=say,
    )
    made = generate(sampler, codec, prompts, given)

    precision = runtime.choose_precision(config.precision, sampler.device)
    say(f"scoring the {given.split} split")
    score = evaluate(model, documents, precision=precision, limit=SCORED_SAMPLES)
    say("continuing prompts by the linear predictor")
    length, stage = made.first.shape[1], model.stage or PredictorsConfig().build(codec.levels)
    groups = {
        "real speech": real_speech(documents, length=length, pieces=given.prompts),
        "linear predictor": linear_continuations(
            stage, line[:PREDICTED_EXCERPTS], length, seed=given.seed, tell=say
        ),
    }
    whole = {name: pooled([describe(pcm) for pcm in group]) for name, group in groups.items()}
    whole["model"] = pooled(made.sounds)
    statistics = {name: sound.to_json() for name, sound in whole.items()}
    statistics["real speech"]["bits"] = score.bits
    statistics["model"]["bits"] = float(np.mean([excerpt["bits"] for excerpt in made.excerpts]))
    for name, group in {**groups, "model": made.first}.items():
        statistics[name]["dnsmos"] = opinion_score(group)
    results = {
        "arguments": arguments,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "backend": sampler.backend,
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(given).items()},
        "verdicts": [verdict.to_json() for verdict in compare(made.sounds, whole["real speech"])],
        "statistics": statistics,
        "excerpts": [{**e, **s.to_json()} for e, s in zip(made.excerpts, made.sounds, strict=True)],
        "minutes": [asdict(minute) for minute in made.curve],
    }
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (given.out / "report.md").write_text(report(results))
    heard = {name: mulaw_decode(prompt) for name, prompt in prompts.items()}
    draw_sounds(groups["real speech"][0], heard, made.first, given.out / "spectrograms.png")
    draw_minutes(results, given.out / "minutes.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of a mu-law model")
    parser.add_argument("--data", type=Path, required=True, help="prepared shards")
    parser.add_argument("--split", default="val")
    parser.add_argument("--prompts", type=int, default=20, help="how many documents are continued")
    parser.add_argument("--first", type=int, default=0, help="pass over so many prompts")
    parser.add_argument("--prompt-seconds", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="how much is generated for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, help="what is not given is as the run's config says")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--tails", type=float)
    parser.add_argument("--weights", choices=("float32", "int8"), help="of the compiled backend")
    parser.add_argument("--no-audio", action="store_true", help="measure only, write no sound")
    parser.add_argument("--out", type=Path, default=Path("out/free"), help="folder of results")
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = parser.parse_args(words)
    if given.prompts < 1 or given.first < 0 or given.prompt_seconds <= 0 or given.seconds < 1:
        parser.error(
            "--prompts is at least 1, --first at least 0, --prompt-seconds above 0, --seconds at least 1"
        )
    try:
        run(given, words)
    except TxlError as error:
        raise SystemExit(f"error: {error}") from error
    print((given.out / "report.md").read_text(), end="")


if __name__ == "__main__":
    main()
