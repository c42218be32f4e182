"""Speed of training steps, by attention path and precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from txl_audio import cost, runtime
from txl_audio.model.attention import Backend
from txl_audio.model.embeddings import SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.model.transformer import CoreConfig
from txl_audio.optim import OptimConfig
from txl_audio.tokens import TokenSpec

VOCAB_SIZE, SEGMENT_LEN, MEM_LEN, LANES = 256, 256, 256, 8


def plain_text_model(attention: Backend) -> SequenceModel:
    """The shape that systems are compared on: 6 layers, d_model 256, 4 heads of 64, d_ff 1024."""
    spec = TokenSpec("text", VOCAB_SIZE, 1, 0.0, 0, "bytes", "bench")
    core = CoreConfig(
        n_layer=6,
        d_model=256,
        n_head=4,
        d_head=64,
        d_ff=1024,
        mem_len=MEM_LEN,
        segment_len=SEGMENT_LEN,
        attention=attention,
    )
    embedding = SymbolEmbeddingConfig().build(spec, core.d_model)
    head = SoftmaxHeadConfig().build(spec, core.d_model, embedding)
    return SequenceModel(spec, embedding=embedding, core=core.build(), head=head)


def train_throughput(*, seconds: float, device: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Tokens/s of training steps (forward, backward, clipping, AdamW) with a full memory.

    Each setting is measured in turns of about 2 s, so that a drift of the machine's speed meets all
    alike; the median turn counts. `ratio` is against the reference path in float32.
    """
    place = runtime.device(device)
    runtime.keep_freed_memory()
    settings: list[tuple[Backend, runtime.Precision]] = [
        ("reference", "float32"),
        ("reference", "bfloat16"),
        ("shifted", "float32"),
        ("shifted", "bfloat16"),
        ("shift_free", "bfloat16"),
    ]
    steps = {f"{a} {p}": _training(plain_text_model(a).to(place), p) for a, p in settings}
    flops = cost.training_flops_per_symbol(
        plain_text_model("auto").to(place), lanes=LANES, segment_len=SEGMENT_LEN
    )
    matmul = {p: runtime.matmul_flops(place, getattr(torch, p)) for p in ("float32", "bfloat16")}
    for step in steps.values():
        step()
        step()
    turns = max(3, round(seconds / 2))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns):
        for name, step in steps.items():
            begun, tokens = time.perf_counter(), 0
            while (passed := time.perf_counter() - begun) < 2.0:
                tokens += step()
            rates[name].append(tokens / passed)
        tell(f"turn {turn + 1} of {turns}: " + ", ".join(f"{n} {r[-1]:,.0f}" for n, r in rates.items()))
    median = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    reference = median["reference float32"]
    return {
        "device": str(place),
        "threads": torch.get_num_threads(),
        "flops_per_token": flops,
        "matmul_flops": matmul,
        "settings": {
            name: {
                "tokens_per_s": rate,
                "ratio": rate / reference,
                "share_of_matmul_rate": rate * flops / matmul[name.split()[1]],
            }
            for name, rate in median.items()
        },
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `train_throughput` for reading."""
    lines = [f"{'attention, precision':<24}{'tokens/s':>10}{'ratio':>8}{'of matrix-product rate':>24}"]
    for name, values in figures["settings"].items():
        share = f"{values['share_of_matmul_rate']:.0%}"
        lines.append(f"{name:<24}{values['tokens_per_s']:>10,.0f}{values['ratio']:>8.2f}{share:>24}")
    return "\n".join(lines)


def _training(model: SequenceModel, precision: runtime.Precision) -> Callable[[], int]:
    """A function that does one training step and returns its number of tokens."""
    device = next(model.parameters()).device
    config = OptimConfig()
    optimiser = config.build(model)
    state = model.initial_state(LANES)
    tokens = torch.randint(VOCAB_SIZE, (LANES, SEGMENT_LEN + 1, 1), device=device)

    def step() -> int:
        nonlocal state
        with runtime.autocast(device, precision):
            loss, count, state = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad()
        return tokens[:, 1:].numel()

    return step
