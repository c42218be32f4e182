"""Speed of training steps: by attention path and precision, and beside other systems."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from txl_audio import cost, runtime
from txl_audio.bench import peers, shape
from txl_audio.model.attention import Backend
from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.optim import OptimConfig
from txl_audio.tokens import TokenSpec, TxlError
from txl_audio.train_config import TrainConfig

REFERENCE = "reference float32"
SETTINGS: tuple[tuple[Backend, runtime.Precision], ...] = (
    ("reference", "float32"),
    ("reference", "bfloat16"),
    ("shifted", "float32"),
    ("shifted", "bfloat16"),
    ("shift_free", "bfloat16"),
)
TURN_S = 2.0


def plain_text_model(attention: Backend) -> SequenceModel:
    """The model of `bench.shape`."""
    spec = TokenSpec("text", shape.VOCAB_SIZE, 1, 0.0, 0, "bytes", "bench")
    core = CoreConfig(
        n_layer=shape.LAYERS,
        d_model=shape.D_MODEL,
        n_head=shape.HEADS,
        d_head=shape.D_HEAD,
        d_ff=shape.D_FF,
        mem_len=shape.MEM_LEN,
        segment_len=shape.SEGMENT_LEN,
        attention=attention,
    )
    embedding = SymbolEmbeddingConfig().build(spec, core.d_model)
    head = SoftmaxHeadConfig().build(spec, core.d_model, embedding)
    return SequenceModel(spec, embedding=embedding, core=core.build(), head=head)


def train_throughput(
    *, seconds: float, device: str, tell: Callable[[str], None], beside: Path | None = None
) -> dict[str, Any]:
    """Tokens/s of training steps (forward, backward, clipping, AdamW) with a full memory.

    Each setting is measured in turns of about 2 s, so that a drift of the machine's speed meets all
    alike; the median turn counts. `ratio` is against the reference path in float32.

    beside: also measures the systems of `bench.peers`, Hugging Face's from this folder, in the same turns.
    Then `others` says why some cannot run, `fastest_other` which of them was fastest, and `against_others`
    how many times as fast the fastest of ours was, by the medians and in the median turn.
    """
    place = runtime.device(device)
    runtime.keep_freed_memory()
    rates: dict[str, Callable[[float], float]] = {}
    for attention, precision in SETTINGS:
        step = training_step(
            plain_text_model(attention).to(place),
            OptimConfig(),
            lanes=shape.LANES,
            segment_len=shape.SEGMENT_LEN,
            precision=precision,
        )
        rates[f"{attention} {precision}"] = _rate(step)
    ours = list(rates)
    failed: dict[str, str] = {}
    running: list[peers.Peer] = []
    if beside is not None:
        for system in peers.SYSTEMS:
            for precision in ("float32", "bfloat16"):
                name = f"{system} {precision}"
                try:
                    peer = peers.Peer(system, precision, device=str(place), folder=beside)
                except TxlError as error:
                    failed[name] = str(error)
                    tell(f"{name} cannot run: {error}")
                else:
                    running.append(peer)
                    rates[name] = peer.rate
    flops = cost.training_flops_per_symbol(
        plain_text_model("auto").to(place), lanes=shape.LANES, segment_len=shape.SEGMENT_LEN
    )
    matmul = {p: runtime.matmul_flops(place, getattr(torch, p)) for p in ("float32", "bfloat16")}
    measured = _in_turns(rates, max(3, round(seconds / TURN_S)), tell)
    for peer in running:
        peer.close()
    medians = {name: median(values) for name, values in measured.items()}
    figures: dict[str, Any] = {
        "device": str(place),
        "threads": torch.get_num_threads(),
        "flops_per_token": flops,
        "matmul_flops": matmul,
        "settings": {
            name: {
                "tokens_per_s": rate,
                "ratio": rate / medians[REFERENCE],
                "share_of_matmul_rate": rate * flops / matmul[name.split()[-1]],
            }
            for name, rate in medians.items()
        },
    }
    if beside is not None:
        others = [name for name in medians if name not in ours]
        figures["others"] = failed
        if others:
            best, other = (max(names, key=medians.__getitem__) for names in (ours, others))
            turns = zip(measured[best], measured[other], strict=True)
            figures["fastest_other"] = other
            figures["against_others"] = {
                "of_medians": medians[best] / medians[other],
                "median_of_turns": median(a / b for a, b in turns),
            }
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `train_throughput` for reading."""
    width = max(24, *(len(name) + 1 for name in figures["settings"]))
    lines = [f"{'attention, precision':<{width}}{'tokens/s':>10}{'ratio':>8}{'of matrix-product rate':>24}"]
    for name, values in figures["settings"].items():
        share = f"{values['share_of_matmul_rate']:.0%}"
        lines.append(f"{name:<{width}}{values['tokens_per_s']:>10,.0f}{values['ratio']:>8.2f}{share:>24}")
    lines += [f"{name} cannot run: {why}" for name, why in figures.get("others", {}).items()]
    if "against_others" in figures:
        against = figures["against_others"]
        lines.append(
            f"against the fastest other, {figures['fastest_other']}: {against['of_medians']:.2f} times as "
            f"fast ({against['median_of_turns']:.2f} in the median turn)"
        )
    return "\n".join(lines)


def training_step(
    model: SequenceModel,
    config: OptimConfig,
    *,
    lanes: int,
    segment_len: int,
    precision: runtime.Precision,
) -> Callable[[], int]:
    """A function that does one training step on random symbols and returns their number."""
    device, places = next(model.parameters()).device, model.spec.symbols_per_frame
    optimiser = config.build(model, precision)
    state = model.initial_state(lanes)
    tokens = torch.randint(model.spec.vocab_size, (lanes, segment_len + 1, places), device=device)

    def step() -> int:
        nonlocal state
        with runtime.autocast(device, precision):
            loss, count, state = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return tokens[:, 1:].numel()

    return step


def step_seconds(
    model: SequenceModel,
    config: TrainConfig,
    *,
    device: torch.device,
    precision: runtime.Precision,
    seconds: float,
) -> float:
    """Median seconds of a training step of one batch, times the batches of a step."""
    runtime.keep_freed_memory()
    segment_len = config.of_stream(SINGLE, model.core.config).segment_len
    assert segment_len is not None
    step = training_step(
        model.to(device).train(), config, lanes=config.lanes, segment_len=segment_len, precision=precision
    )
    for _ in range(2):
        step()
    times: list[float] = []
    while not times or sum(times) < seconds:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return median(times) * config.accumulate


def _rate(step: Callable[[], int]) -> Callable[[float], float]:
    """Tokens per second of steps that take about so many seconds."""
    for _ in range(2):
        step()

    def rate(seconds: float) -> float:
        begun, tokens = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < seconds:
            tokens += step()
        return tokens / passed

    return rate


def _in_turns(
    rates: Mapping[str, Callable[[float], float]], turns: int, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {name: [] for name in rates}
    for turn in range(turns):
        for name, rate in rates.items():
            measured[name].append(rate(TURN_S))
        tell(f"turn {turn + 1} of {turns}: " + ", ".join(f"{n} {r[-1]:,.0f}" for n, r in measured.items()))
    return measured
