"""Speed of sampling on one thread of a CPU, backend beside backend in the same run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from txl_audio import cost, runtime
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.compiled import Weights, unsupported
from txl_audio.sampling.sampler import FIRST_CHUNK_S, Backend, Sampler
from txl_audio.tokens import Codec, TokenSpec

T = TypeVar("T", bound=Hashable)

REFERENCE = "torch"
BACKENDS: dict[str, tuple[Backend, Weights]] = {
    REFERENCE: ("torch", "float32"),
    "compiled float32": ("compiled", "float32"),
    "compiled int8": ("compiled", "int8"),
}
WEIGHT_BYTES: dict[Weights, int] = {"float32": 4, "int8": 1}
MEMORIES = (0.5, 1, 2, 4)
"""Lengths, in those of the model's own memory."""
LANES = (1, 2, 4, 8, 16)
TURNS = 5
CALL_FRAMES = 64
"""Frames of all lanes that are asked for at a time; one of PyTorch, to which it makes no difference."""
PROMPT_S, PROMPT_SYMBOLS = 2.0, 128
"""What is continued when the first chunk is timed: sound, text."""
RUN = 5
"""How many times longer than other measurements the one is that shows constant cost."""
CPU = torch.device("cpu")


class Setting(NamedTuple):
    backend: str
    mem_len: int
    lanes: int = 1


def sampler_speed(
    model: SequenceModel, *, codec: Codec | None = None, seconds: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Speed of every backend that the model has, with a full memory; about `seconds` for each setting.

    codec: whose decoder is measured too.

    What is compared is measured in turns, the machine's own rates beside what is held against them. The best
    turn counts: whatever else the machine does can only make one slower.

    Returns, beside what the model and the measurement are, and in SI units where a name says no other:
        matmul_flops: the machine's rate in large float32 matrix products.
        backends: by name, see `_backends`, or only `unsupported`: why the model does not have it.
        mem_len, lanes: lists of `_row` for lengths of the memory, where there is one, and numbers of streams.
        decoder_real_time_factor: seconds that the codec's decoder takes for a second of one stream.
        held: `sampled`, and `decoded` too, by backend: see `_held`; None where there is no sound or no codec.
        run: one stream of the fastest backend over a longer time, see `_along`.
    """
    model, spec = model.eval(), model.spec
    own = model.core.config.mem_len
    memories = sorted({int(own * factor) for factor in MEMORIES} - {0})
    reasons = {name: unsupported(model, weights) for name, (_, weights) in BACKENDS.items()}
    names = [name for name in BACKENDS if name == REFERENCE or reasons[name] is None]
    prompt = round(PROMPT_S * spec.symbol_rate_hz) or PROMPT_SYMBOLS
    chunk = math.ceil(FIRST_CHUNK_S * spec.frame_rate_hz) or 1
    with runtime.single_thread(CPU):
        macs = cost.macs_per_symbol(model)
        machine, measured = _backends(model, names, seconds, macs=macs, prompt=prompt, chunk=chunk, tell=tell)
        if memories:
            tell(f"with memories of {', '.join(map(str, memories))} frames")
        of_memories = _rows(model, [Setting(n, m) for m in memories for n in names], seconds)
        tell(f"with {', '.join(map(str, LANES))} streams at once")
        of_lanes = _rows(model, [Setting(n, own, b) for b in LANES for n in names], seconds)
        decoder = None
        if codec is not None:
            tell(f"the decoder of {codec.spec.name}")
            decoder = 1 / _best({"decoded": _decoded_s(codec, seconds / TURNS)})["decoded"]
        fastest = max(names, key=lambda name: measured[name]["frames_per_s"])
        tell(f"a longer run of {fastest}")
        run = _along(_full(_sampler(model, fastest)), RUN * seconds)
    return {
        "device": "cpu",
        "threads": 1,
        "symbol_rate_hz": spec.symbol_rate_hz or None,
        "symbols_per_frame": spec.symbols_per_frame,
        "macs_per_symbol": macs,
        "prompt_symbols": prompt,
        "first_chunk_symbols": chunk * spec.symbols_per_frame,
        "matmul_flops": machine,
        "backends": {name: measured.get(name, {"unsupported": reasons[name]}) for name in BACKENDS},
        "mem_len": of_memories,
        "lanes": of_lanes,
        "decoder_real_time_factor": decoder,
        "held": {
            "sampled": _held(of_lanes, 0.0) if spec.frame_rate_hz else None,
            "decoded": None if decoder is None else _held(of_lanes, decoder),
        },
        "run": {"backend": fastest, **run},
    }


def _backends(
    model: SequenceModel,
    names: Sequence[str],
    seconds: float,
    *,
    macs: int,
    prompt: int,
    chunk: int,
    tell: Callable[[str], None],
) -> tuple[float, dict[str, dict[str, Any]]]:
    """The machine's rate in matrix products, in FLOP/s, and of every backend its `_row` and

    first_chunk_s: from a prompt of `prompt` symbols to the next `chunk` frames, in a process that has sampled
        before;
    decode_state_bytes: what one stream holds;
    flops, flops_share: 2 for each of the `macs` multiply-adds in matrix products that a symbol takes, and
        their share of the machine's rate. What the predictors of a waveform codec compute is not counted;
    bytes_per_frame, bytes_per_s: of weights and ring, as often as they are used, see `_traffic`;
    read_bytes_per_s, read_share: the machine's rate of reading as many bytes as weights and state have, over
        and over, and the share of it.
    """
    own, turn = model.core.config.mem_len, seconds / TURNS
    samplers = {name: _full(_sampler(model, name, tell=tell)) for name in names}

    def first_chunk(name: str) -> float:
        begun = time.perf_counter()
        _sampler(model, name, symbols=prompt).next_frames(chunk)
        return time.perf_counter() - begun

    measures: dict[Hashable, Callable[[], float]] = {
        "machine": lambda: runtime.matmul_flops(CPU, torch.float32, turn)
    }
    for name, sampler in samplers.items():
        size = _size(sampler, BACKENDS[name][1])
        measures[name, "rate"] = _frames_per_s(sampler, turn)
        measures[name, "read"] = lambda size=size: _read_rate(size, turn)
        measures[name, "first chunks/s"] = lambda name=name: 1 / first_chunk(name)
    best = _best(measures, tell=tell)
    measured = {}
    for name, sampler in samplers.items():
        rate, read = best[name, "rate"], best[name, "read"]
        row = _row(model.spec, Setting(name, own), rate, rate / best[REFERENCE, "rate"])
        flops = 2 * macs * row["symbols_per_s"]
        traffic = _traffic(sampler, macs, BACKENDS[name][1])
        measured[name] = {
            **row,
            "first_chunk_s": 1 / best[name, "first chunks/s"],
            "decode_state_bytes": sampler.state.nbytes(),
            "flops": flops,
            "flops_share": flops / best["machine"],
            "bytes_per_frame": traffic,
            "bytes_per_s": traffic * rate,
            "read_bytes_per_s": read,
            "read_share": traffic * rate / read,
        }
    return best["machine"], measured


def _rows(model: SequenceModel, settings: Sequence[Setting], seconds: float) -> list[dict[str, Any]]:
    measures = {}
    for setting in settings:
        viewed = model.view(mem_len=setting.mem_len)
        sampler = _full(_sampler(viewed, setting.backend, lanes=setting.lanes))
        measures[setting] = _frames_per_s(sampler, seconds / TURNS)
    best = _best(measures)
    return [
        _row(model.spec, setting, rate, rate / best[setting._replace(backend=REFERENCE)])
        for setting, rate in best.items()
    ]


def _row(spec: TokenSpec, setting: Setting, frames_per_s: float, ratio: float) -> dict[str, Any]:
    """The setting and: frames_per_s of every lane, which step together; symbols_per_s and us_per_symbol of
    all lanes; real_time_factor: seconds for a second of sound in every lane, None for text; ratio of the rate
    to that of PyTorch."""
    symbols_per_s = setting.lanes * spec.symbols_per_frame * frames_per_s
    return {
        **setting._asdict(),
        "frames_per_s": frames_per_s,
        "symbols_per_s": symbols_per_s,
        "us_per_symbol": 1e6 / symbols_per_s,
        "real_time_factor": spec.frame_rate_hz / frames_per_s if spec.frame_rate_hz else None,
        "ratio": ratio,
    }


def _sampler(
    model: SequenceModel,
    name: str,
    *,
    lanes: int = 1,
    symbols: int = 1,
    tell: Callable[[str], object] = lambda _: None,
) -> Sampler:
    """Continues random symbols: the work does not depend on which."""
    backend, weights = BACKENDS[name]
    draws = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.spec.codes, (lanes, symbols), generator=draws)
    return Sampler(model, prompt=prompt, backend=backend, weights=weights, tell=tell)


def _full(sampler: Sampler) -> Sampler:
    """Lets all that the ring holds count as memory: from here on steps cost what they cost for ever."""
    core, segment = sampler.state.core, sampler.model.core.config.segment_len
    core.time += math.ceil(core.capacity / segment) * segment
    return sampler


def _frames_per_s(sampler: Sampler, seconds: float) -> Callable[[], float]:
    lanes = len(sampler.nats)
    call = 1 if sampler.backend.startswith("torch") else max(1, CALL_FRAMES // lanes)

    def measure() -> float:
        frames, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds or not frames:
            sampler.next_frames(call)
            frames += call
        return frames / passed

    return measure


def _decoded_s(codec: Codec, seconds: float) -> Callable[[], float]:
    """Seconds of sound that the decoder of one stream gives in a second."""
    spec, decoder = codec.spec, codec.stream_decoder()
    frames = math.ceil(FIRST_CHUNK_S * spec.frame_rate_hz)
    draws = torch.Generator().manual_seed(0)
    codes = torch.randint(spec.codes, (1, frames, spec.symbols_per_frame), generator=draws)

    def measure() -> float:
        made, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds or not made:
            decoder.push(codes)
            made += frames
        return made / spec.frame_rate_hz / passed

    return measure


def _held(rows: Iterable[Mapping[str, Any]], decoder: float) -> dict[str, dict[str, int]]:
    """By backend, the most `streams` that one thread holds in real time: as many passes of `lanes` streams as
    there is time for, one after another, with `decoder` seconds for a second of every stream."""
    held: dict[str, dict[str, int]] = {}
    for row in rows:
        passes = int(1 / (row["real_time_factor"] + row["lanes"] * decoder))
        found = {"streams": passes * row["lanes"], "lanes": row["lanes"]}
        held[row["backend"]] = max(found, held.get(row["backend"], found), key=lambda each: each["streams"])
    return held


def _best(
    measures: Mapping[T, Callable[[], float]], *, tell: Callable[[str], object] = lambda _: None
) -> dict[T, float]:
    """The highest of every measurement, all of which are made once before any is made again."""
    best = dict.fromkeys(measures, 0.0)
    for turn in range(TURNS):
        for key, measure in measures.items():
            best[key] = max(best[key], measure())
        tell(f"turn {turn + 1} of {TURNS}")
    return best


def _along(sampler: Sampler, seconds: float) -> dict[str, Any]:
    """How many `symbols` were sampled in a row, and `us_per_symbol`: of the best call in the first, middle
    and last third of them."""
    per_call, calls = CALL_FRAMES * sampler.model.spec.symbols_per_frame, []
    begun = time.perf_counter()
    while (now := time.perf_counter()) - begun < seconds or len(calls) < 3:
        sampler.next_frames(CALL_FRAMES)
        calls.append(time.perf_counter() - now)
    thirds = [1e6 * float(third.min()) / per_call for third in np.array_split(calls, 3)]
    return {"symbols": per_call * len(calls), "us_per_symbol": thirds}


def _traffic(sampler: Sampler, macs_per_symbol: int, weights: Weights) -> int:
    """Bytes of weights and ring that a step of one lane reads, wherever they lie.

    Every multiply-add of a matrix and one vector reads an element of the matrix: of the keys or values in the
    ring, or a weight. The few matrices that stay float32 beside int8 weights count as int8.
    """
    core = sampler.state.core
    ring = core.keys.numel() + core.values.numel()
    others = macs_per_symbol * sampler.model.spec.symbols_per_frame - ring
    return ring * core.keys.element_size() + others * WEIGHT_BYTES[weights]


def _size(sampler: Sampler, weights: Weights) -> int:
    """Bytes of all weights and of the state."""
    elements = sum(p.numel() for p in sampler.model.parameters())
    return elements * WEIGHT_BYTES[weights] + sampler.state.nbytes()


def _read_rate(size_bytes: int, seconds: float) -> float:
    """Bytes/s when the largest of so many bytes of int64 is looked for again and again."""
    # Not zeros, which the system maps to one and the same page until they are written.
    numbers, done = np.ones(max(1, size_bytes // 8), np.int64), 0
    begun = time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds or not done:
        numbers.max()
        done += numbers.nbytes
    return done / passed
