"""What a training will take: time, memory and money, from counts. docs/scaling.md has the formulas."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Literal, NamedTuple

import torch

from txl_audio import runtime
from txl_audio.bench import floors
from txl_audio.bench.train import step_seconds
from txl_audio.model.sequence import SequenceModel
from txl_audio.plan_counts import StepCounts, count_step
from txl_audio.tokens import ConfigError, TokenSpec
from txl_audio.train_config import TrainConfig


class Accelerator(NamedTuple):
    """Peaks of one device: bfloat16 products without sparsity, its memory, and its links, one way."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM (NVLink: half of the stated sum of both ways), L40S
# (PCIe 4 x16).
ACCELERATORS = {
    "a100": Accelerator(312e12, 2.039e12, 80e9, 300e9),
    "h100": Accelerator(989.4e12, 3.35e12, 80e9, 450e9),
    "h200": Accelerator(989.4e12, 4.8e12, 141e9, 450e9),
    "l40s": Accelerator(362e12, 0.864e12, 48e9, 32e9),
}
HERE = "here"
UTILISATION = 0.5
"""Share of the floor's speed that is assumed where nothing is measured; an assumption, not a measurement."""
MACHINE_GPUS, NETWORK_BYTES_PER_S = 8, 50e9
"""GPUs that the links join, and what each has of the network beyond them: 400 Gbit/s."""


def plan(
    model: SequenceModel,
    config: TrainConfig,
    *,
    device: str,
    gpus: int = 1,
    hours: float | None = None,
    utilisation: float | None = None,
    price: float | None = None,
    seconds: float = 10.0,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Figures of training `model` once through `hours` of sound, or for the config's steps.

    Args:
        device: a name of ACCELERATORS, or HERE: this machine, whose step and rates are measured for about
            `seconds` each.
        gpus: share the lanes of every batch.
        utilisation: share of the floor's speed that is reached; see UTILISATION.
        price: of one device for one hour, in any currency.

    Raises ConfigError for settings that do not go together and for models that cannot be counted. The model
    loses its weights.
    """
    spec, lanes = model.spec, ceil(config.lanes / gpus)
    if gpus > config.lanes:
        raise ConfigError(
            f"{gpus} GPUs share the lanes of a batch, of which there are {config.lanes}; set train.lanes "
            "higher"
        )
    precision: runtime.Precision = "bfloat16"
    measured: float | None = None
    kind: Literal["cpu", "cuda"] = "cuda"
    if device == HERE:
        if gpus != 1 or utilisation is not None:
            raise ConfigError("device here is measured: it has one device, and no utilisation is assumed")
        place = runtime.device("auto")
        precision = runtime.choose_precision("auto", place)
        kind = "cuda" if place.type == "cuda" else "cpu"
        tell(f"measuring a training step and the rates of this machine, about {4 * seconds:.0f} s")
        measured = step_seconds(model, config, device=place, precision=precision, seconds=seconds)
        machine = _this_machine(place, precision, seconds)
    elif device in ACCELERATORS:
        machine, utilisation = ACCELERATORS[device], utilisation or UTILISATION
    else:
        raise ConfigError(f"device {device!r} is not known; expected {HERE} or {', '.join(ACCELERATORS)}")
    counts = count_step(model, config, lanes=lanes, precision=precision, device=kind)
    floor = counts.floor_s(machine.flops_per_s, machine.bytes_per_s)
    computing = floor / utilisation if utilisation else measured
    assert computing is not None
    exchange = _exchange_s(counts.parameters, config, gpus, machine)
    step_s = computing + exchange
    symbols = counts.symbols * config.lanes / lanes
    steps = _steps(config, spec, hours, symbols)
    total_s = steps * step_s
    return {
        "parameters": counts.parameters,
        "device": device,
        "gpus": gpus,
        "precision": precision,
        "lanes_per_gpu": lanes,
        "symbols_per_step": symbols,
        "flops_per_symbol": counts.flops / counts.symbols,
        "moved_bytes_per_symbol": counts.moved_bytes / counts.symbols,
        "fixed_bytes": counts.fixed_bytes,
        "held_bytes": counts.held_bytes - _elsewhere(model, config, gpus, counts),
        "memory_bytes": machine.memory_bytes,
        "flops_per_s": machine.flops_per_s,
        "bytes_per_s": machine.bytes_per_s,
        "floor_s": floor,
        "arithmetic_s": counts.flops / machine.flops_per_s,
        "utilisation": floor / computing,
        "utilisation_is_measured": measured is not None,
        "exchange_s": exchange,
        "step_s": step_s,
        "symbols_per_s": symbols / step_s,
        "flops_utilisation": counts.flops / step_s / machine.flops_per_s,
        "sound_hours": steps * symbols / spec.symbol_rate_hz / 3600 if spec.symbol_rate_hz else None,
        "steps": steps,
        "days": total_s / 86400,
        "gpu_hours": gpus * total_s / 3600,
        "price": price,
        "money": None if price is None else price * gpus * total_s / 3600,
        "predictors": model.stage is not None,
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `plan` for reading."""
    f, how = figures, "measured" if figures["utilisation_is_measured"] else "assumed"
    gb = {name: f"{f[name + '_bytes'] / 1e9:,.1f} GB" for name in ("held", "fixed", "memory")}
    ms = {name: f"{1000 * f[name + '_s']:,.1f} ms" for name in ("floor", "arithmetic", "exchange", "step")}
    sound = "" if f["sound_hours"] is None else f" ({f['sound_hours']:,.0f} h of sound)"
    fits = "fits" if f["held_bytes"] <= f["memory_bytes"] else "DOES NOT FIT: fewer lanes on each, more GPUs"
    flops, moved = f["flops_per_symbol"] / 1e6, f["moved_bytes_per_symbol"] / 1e3
    rows = {
        "model": f"{f['parameters'] / 1e6:,.1f} M parameters; {flops:,.2f} MFLOP, {moved:,.1f} kB a symbol",
        "devices": f"{f['gpus']} x {f['device']}, {f['precision']}, {f['lanes_per_gpu']} lanes each, "
        f"{f['symbols_per_step']:,.0f} symbols a step",
        "memory": f"{gb['held']} of {gb['memory']}: {fits}; weights, gradients and optimiser {gb['fixed']}",
        "floor": f"{ms['floor']} a step, arithmetic alone {ms['arithmetic']}",
        "step": f"{ms['step']}: {f['utilisation']:.0%} of the floor's speed ({how}); exchange "
        f"{ms['exchange']}",
        "speed": f"{f['symbols_per_s']:,.0f} symbols/s, {f['flops_utilisation']:.0%} of peak arithmetic",
        "training": f"{f['steps']:,} steps{sound}: {f['days']:,.2f} days, {f['gpu_hours']:,.1f} device hours",
    }
    if f["money"] is not None:
        rows["money"] = f"{f['money']:,.0f} at {f['price']:g} a device hour"
    if f["predictors"] and not f["utilisation_is_measured"]:
        rows["beside"] = "adaptive predictors, which CPU cores compute, are not counted"
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def code_spec(text: str) -> TokenSpec:
    """The symbols of a codec that is only described: `8x256@50` has 8 codes of 256 in 50 frames a second."""
    found = re.fullmatch(r"(\d+)x(\d+)@(\d+(?:\.\d+)?)", text)
    if found is None or not all(map(float, found.groups())):
        raise ConfigError(f"codes are {text!r}, expected CODESxVALUES@FRAMES a second, such as 8x256@50")
    places, values, rate = found.groups()
    return TokenSpec("codes", int(values), int(places), float(rate), 0, "planned", "")


def _this_machine(place: torch.device, precision: runtime.Precision, seconds: float) -> Accelerator:
    if place.type == "cuda":
        memory = torch.cuda.get_device_properties(place).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    products = runtime.matmul_flops(place, getattr(torch, precision), seconds)
    return Accelerator(products, floors.copy_bytes_per_s(place, floors.NEAR, seconds), memory, float("inf"))


def _exchange_s(parameters: int, config: TrainConfig, gpus: int, machine: Accelerator) -> float:
    """What float32 weights and gradients take around a ring, while nothing else happens: an upper bound.

    DDP sums the gradients of a step, in two rounds. FSDP2 gathers the weights twice for every batch, and
    leaves each GPU the sum of its share of the gradients.
    """
    link = machine.link_bytes_per_s if gpus <= MACHINE_GPUS else NETWORK_BYTES_PER_S
    rounds = 2 * config.accumulate + 1 if config.fsdp else 2
    return rounds * (gpus - 1) / gpus * 4 * parameters / min(link, machine.link_bytes_per_s)


def _elsewhere(model: SequenceModel, config: TrainConfig, gpus: int, counts: StepCounts) -> int:
    """Bytes that a GPU leaves to the others under FSDP2: shares of weights and of what the optimiser keeps.

    All weights outside of the layers and those of two layers are there as a whole while they are used.
    """
    if not config.fsdp or gpus == 1:
        return 0
    layer = sum(p.numel() for p in model.core.layers[0].parameters())
    gathered = counts.parameters - (len(model.core.layers) - 2) * layer
    kept = counts.fixed_bytes - 4 * counts.parameters
    return max(0, round(kept * (1 - 1 / gpus) - 4 * gathered))


def _steps(config: TrainConfig, spec: TokenSpec, hours: float | None, symbols: float) -> int:
    if hours is None:
        if config.steps is None:
            raise ConfigError("how long is the training? give --hours of sound, or set train.steps")
        return config.steps
    if not spec.symbol_rate_hz:
        raise ConfigError("--hours are of sound, and this stream is text; set train.steps instead")
    return ceil(hours * 3600 * spec.symbol_rate_hz / symbols)
