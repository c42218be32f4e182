"""Training: the step, the budget, what is written at intervals, and exact resume."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.data.stream import Documents, TokenStream
from txl_audio.evaluate import Totals, evaluate
from txl_audio.model.memory import Memory
from txl_audio.model.sequence import SequenceModel, SequenceState
from txl_audio.optim import OptimConfig
from txl_audio.report import Reporter
from txl_audio.tokens import CheckpointError, ConfigError, TxlError


class DivergedError(TxlError):
    """A training whose gradient is no longer finite."""


class TrainConfig(OptimConfig):
    """Budget, batch and intervals. The budget is `steps`, or `minutes` of training time, or both
    (whichever ends first); intervals count steps, and validation time is not training time.

    ema: decay of an average of the weights, which is then what is validated, saved and sampled.
    accumulate: batches per optimiser step.
    validate_symbols: how much of the validation split is scored on the way; the end scores all.
    """

    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    lanes: int = Field(default=16, ge=1)
    segment_len: int | None = Field(default=None, ge=1)
    accumulate: int = Field(default=1, ge=1)
    ema: float | None = Field(default=None, gt=0, lt=1)
    compile: bool = False
    log_every: int = Field(default=20, ge=1)
    validate_every: int = Field(default=500, ge=1)
    validate_symbols: int | None = Field(default=400_000, ge=1)
    save_every: int = Field(default=500, ge=1)
    sample_every: int | None = Field(default=None, ge=1)
    sample_seconds: float = Field(default=2.0, gt=0)


@dataclass
class Position:
    """How far a training is."""

    step: int = 0
    symbols: int = 0
    seconds: float = 0.0
    warmup_progress: float = 0.0


class Trainer:
    """Trains one model on one stream; `run` does all of it.

    Args:
        data_id: identity of the training documents; a resume with another is refused.
        sample: called as `sample(model, step=...)` to make and file a sample; None for streams without.
    """

    def __init__(
        self,
        model: SequenceModel,
        config: TrainConfig,
        *,
        train: Documents,
        valid: Documents,
        folder: RunFolder,
        seed: int,
        precision: runtime.Precision,
        data_id: str = "",
        sample: Callable[..., None] | None = None,
    ) -> None:
        if config.steps is None and config.minutes is None:
            raise ConfigError("a training needs a budget; set train.steps, train.minutes or both")
        core = model.core.config
        self.segment_len = config.segment_len or core.segment_len
        if core.window == "segment" and self.segment_len != core.segment_len:
            raise ConfigError(
                f"train.segment_len {self.segment_len} differs from core.segment_len {core.segment_len}, "
                "and with window segment the result depends on it; leave train.segment_len out"
            )
        self.model, self.config, self.folder = model, config, folder
        self.precision: runtime.Precision = precision
        self.valid, self.sample, self.seed, self.data_id = valid, sample, seed, data_id
        self.device = next(model.parameters()).device
        self.stream = TokenStream(
            train, model.spec, lanes=config.lanes, segment_len=self.segment_len, seed=seed, epochs=None
        )
        self.state = model.initial_state(config.lanes)
        self.optimiser = config.build(model)
        self.average = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema)) if config.ema else None
        )
        self.at = Position()
        # Since the last record.
        self.totals = Totals(0.0, 0)
        if config.compile:
            model.core.compile()

    @property
    def best_model(self) -> SequenceModel:
        """The weights to use: averaged ones where averaging is on."""
        return cast(SequenceModel, self.average.module) if self.average is not None else self.model

    def progress(self) -> float:
        """Share of the budget used up."""
        steps = self.at.step / self.config.steps if self.config.steps else 0.0
        minutes = self.at.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(steps, minutes)

    def step(self) -> tuple[Totals, float]:
        """One optimiser step; returns the batch's totals and the gradient norm."""
        self.model.train()
        nats, count = 0.0, 0
        for _ in range(self.config.accumulate):
            batch = next(self.stream).to(self.device)
            with runtime.autocast(self.device, self.precision):
                loss, scored, self.state = self.model.loss(
                    batch.inputs, batch.targets, self.state, batch.reset
                )
            loss.backward()
            nats, count = nats + loss.item(), count + int(scored)
        # The sum over all batches, divided once: equal weight for every symbol however it was batched.
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= max(1, count)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not torch.isfinite(norm):
            raise DivergedError(
                f"the gradient is not finite at step {self.at.step}; lower train.lr or look at the data. "
                "The last checkpoint is intact"
            )
        if self.at.step == self.config.warmup_steps:
            self.at.warmup_progress = self.progress()
        rate = self.config.rate(self.at.step, self.progress(), self.at.warmup_progress)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.at.step += 1
        self.at.symbols += count
        return Totals(nats, count), float(norm)

    def run(self, reporter: Reporter) -> bool:
        """Trains to the end of the budget; false where it was interrupted (and saved)."""
        c, since = self.config, time.perf_counter()
        with interruptions() as interrupted:
            while self.progress() < 1 and not interrupted():
                totals, norm = self.step()
                now = time.perf_counter()
                self.at.seconds, since = self.at.seconds + now - since, now
                self.totals = Totals(self.totals.nats + totals.nats, self.totals.count + totals.count)
                reporter.step(self.at.step, self.at.symbols, self.at.seconds, self.progress(), totals)
                if self.at.step % c.log_every == 0:
                    rate = self.optimiser.param_groups[0]["lr"]
                    reporter.train(asdict(self.at), self.totals, gradient_norm=norm, lr=rate)
                    self.totals = Totals(0.0, 0)
                ended = self.progress() >= 1
                if self.at.step % c.validate_every == 0 and not ended:
                    self._validate(reporter, c.validate_symbols)
                if self.at.step % c.save_every == 0 and not ended:
                    self.save()
                if c.sample_every and self.sample and self.at.step % c.sample_every == 0 and not ended:
                    self.sample(self.best_model, step=self.at.step)
                since = time.perf_counter()
            done = self.progress() >= 1
            self.save()
            if done:
                self._validate(reporter, None)
                if c.sample_every and self.sample:
                    self.sample(self.best_model, step=self.at.step)
        return done

    def _validate(self, reporter: Reporter, limit: int | None) -> None:
        with reporter.validating(limit) as progress:
            totals = evaluate(
                self.best_model, self.valid, precision=self.precision, limit=limit, progress=progress
            )
        reporter.validation(asdict(self.at), totals, whole=limit is None)

    # Exact resume.

    def save(self) -> None:
        """Writes the weights to use, then everything that `resume` needs."""
        self.folder.save_model(self.best_model, self.model.spec, step=self.at.step, origin="trained")
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        optimiser = self.optimiser.state_dict()
        for index, entries in optimiser["state"].items():
            tensors |= {f"optimiser.{index}.{name}": value for name, value in entries.items()}
        tensors |= {f"memory.{i}": hidden for i, hidden in enumerate(self.state.memory.hidden)}
        tensors |= {"valid": self.state.memory.valid, "recent": self.state.recent}
        random = runtime.rng_state()
        tensors |= {f"random.{name}": random.pop(name) for name in ("torch", "cuda") if name in random}
        values = {
            "at": asdict(self.at),
            "totals": asdict(self.totals),
            "data_id": self.data_id,
            "stream": self.stream.state_dict(),
            "random": random,
            "config": self.config.model_dump(mode="json"),
            "seed": self.seed,
        }
        self.folder.save_state(tensors, values)

    def resume(self) -> None:
        """Continues exactly where `save` was. Raises CheckpointError where the batches would differ."""
        tensors, values = self.folder.load_state()
        saved, mine = values["config"], self.config.model_dump(mode="json")
        for key in ("lanes", "segment_len", "ema"):
            if saved[key] != mine[key]:
                raise CheckpointError(
                    f"{self.folder.path} was trained with train.{key}={saved[key]}, got {mine[key]}; "
                    "resume with the same or start a new run"
                )
        if values["seed"] != self.seed:
            raise CheckpointError(
                f"{self.folder.path} was trained with seed={values['seed']}, got {self.seed}; "
                "resume with the same or start a new run"
            )
        if values["data_id"] != self.data_id:
            raise CheckpointError(
                f"{self.folder.path} was trained on data {values['data_id']!r}, got {self.data_id!r}; "
                "resume with the data it was started with or start a new run"
            )
        load_weights(self.model, _under("model.", tensors), origin=str(self.folder.path))
        if self.average is not None:
            self.average.load_state_dict(_under("average.", tensors))
        entries: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("optimiser.", tensors).items():
            index, _, key = name.partition(".")
            entries.setdefault(int(index), {})[key] = value
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": entries, "param_groups": groups})
        hidden = tuple(tensors[f"memory.{i}"].to(self.device) for i in range(len(self.state.memory.hidden)))
        memory = Memory(hidden, tensors["valid"].to(self.device))
        self.state = SequenceState(memory, tensors["recent"].to(self.device))
        self.at, self.totals = Position(**values["at"]), Totals(**values["totals"])
        self.stream.load_state_dict(values["stream"])
        runtime.set_rng_state({**values["random"], **_under("random.", tensors)})


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C and SIGTERM into a flag that is looked at between steps; a second one kills."""
    caught: list[int] = []

    def catch(number: int, _: Any) -> None:
        caught.append(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stderr.write("\nstopping after this step and saving ...\n")

    previous = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
