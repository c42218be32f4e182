"""Training: the step, the budget, what is written at intervals, and exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from txl_audio import distributed, parallel, runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.evaluate import EvaluateConfig, Totals, evaluate
from txl_audio.lanes import StreamData, StreamTraining
from txl_audio.learner import Learner, under
from txl_audio.model.sequence import SINGLE, JointModel, SequenceModel
from txl_audio.report import Reporter, Silence
from txl_audio.stops import DivergedError, diverged, interruptions
from txl_audio.tokens import CheckpointError, ConfigError, TokenSpec
from txl_audio.train_config import TrainConfig

PLAIN = EvaluateConfig()


class _CutShortError(Exception):
    """A signal came while the training was validated on the way."""


@dataclass
class Position:
    """How far a training is."""

    step: int = 0
    symbols: int = 0
    seconds: float = 0.0
    warmup_progress: float = 0.0


class Trainer:
    """Trains a model on its stream, or on its streams in turn; `run` does all of it.

    Args:
        model: one stream, or several over one core; `data` has an entry for each of `model.streams`.
        scoring: how the whole validation split is scored at the end; on the way the model's own settings
            are used.

    Attributes:
        samplers: by stream, called as `sample(model, step=...)` to make and file a sample.

    Raises ConfigError, before any training, for settings that the model cannot have, those of `scoring`
    among them.
    """

    def __init__(
        self,
        model: SequenceModel | JointModel,
        config: TrainConfig,
        data: Mapping[str, StreamData],
        *,
        folder: RunFolder,
        seed: int,
        precision: runtime.Precision,
        scoring: EvaluateConfig = PLAIN,
    ) -> None:
        if config.steps is None and config.minutes is None:
            raise ConfigError("a training needs a budget; set train.steps, train.minutes or both")
        self.model, self.config, self.folder = model, config, folder
        self.precision: runtime.Precision = precision
        self.seed, self.scoring = seed, scoring
        self.device = next(model.parameters()).device
        self.streams = {
            name: StreamTraining(
                stream,
                config.of_stream(name, stream.core.config),
                data[name],
                seed=seed,
                lanes_setting=config.setting(name, "lanes"),
                disturb=config.disturb,
                codebook_weights=config.codebook_weights,
            )
            for name, stream in model.streams.items()
        }
        if config.disturb and all(s.spec.modality != "waveform" for s in model.streams.values()):
            raise ConfigError("train.disturb is of waveforms, and the model has none; leave it out")
        if config.codebook_weights and all(s.spec.modality != "codes" for s in model.streams.values()):
            raise ConfigError("train.codebook_weights is of neural codecs' codes; leave it out")
        for stream in model.streams.values():
            scoring.view(stream)  # what the end cannot score is refused now
        self.learner = Learner(model, config, precision)
        self.average, self.optimiser = self.learner.average, self.learner.optimiser
        self.at = Position()
        self.samplers: dict[str, Callable[..., None]] = {}

    @property
    def best_model(self) -> SequenceModel | JointModel:
        """See `Learner.best_model`."""
        return self.learner.best_model

    def progress(self) -> float:
        """Share of the budget used up."""
        steps = self.at.step / self.config.steps if self.config.steps else 0.0
        minutes = self.at.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(steps, minutes)

    def next_stream(self) -> str:
        """The stream of the next step: the one furthest behind its share of all steps."""
        share = {name: s.config.weight for name, s in self.streams.items()}
        whole = sum(share.values())
        return max(share, key=lambda n: share[n] / whole * (self.at.step + 1) - self.streams[n].steps)

    def step(self) -> tuple[str, Totals, float]:
        """One optimiser step: the name of its stream, the batch's totals and the gradient norm."""
        self.model.train()
        name = self.next_stream()
        stream, nats, count, read = self.streams[name], 0.0, 0, []
        layers = self.auxiliary_layers(stream.model)
        for remaining in reversed(range(self.config.accumulate)):
            whole = next(stream.batches)
            read.append((whole, stream.batches.spans))
            batch = whole.lanes(stream.own).to(self.device)
            with distributed.accumulating(self.learner.losses, last=remaining == 0):
                with runtime.autocast(self.device, self.precision):
                    loss, objective, scored, stream.state = self.learner.losses(
                        name, batch, stream.state, layers, stream.weights
                    )
                objective.backward()
            nats, count = nats + loss.item(), count + int(scored)
        nats, total = parallel.summed(nats, count, device=self.device)
        count = round(total)
        norm = self.learner.gradient_norm(count, self.config.clip)
        if not (math.isfinite(nats) and torch.isfinite(norm)):
            what = "the gradient" if math.isfinite(nats) else "the loss"
            raise diverged(self.folder, name, stream.data, read, step=self.at.step, what=what)
        if self.at.step == self.config.warmup_steps:
            self.at.warmup_progress = self.progress()
        self.optimiser.set_rate(self.config.rate(self.at.step, self.progress(), self.at.warmup_progress))
        self.learner.step()
        self.at.step += 1
        self.at.symbols += count
        stream.steps += 1
        return name, Totals(nats, count), float(norm)

    def auxiliary_layers(self, model: SequenceModel) -> range:
        """Indices of the layers below the last that predict too: l of n until l / 2n of the budget."""
        n = model.core.config.n_layer
        first = int(self.progress() * 2 * n)
        return range(min(first, n - 1), n - 1) if self.config.auxiliary else range(0)

    def run(self, reporter: Reporter | Silence) -> bool:
        """Trains to the end of the budget; false where it was interrupted (and saved)."""
        c, since = self.config, time.perf_counter()
        reporter.begin(self.at.symbols, self.at.seconds)
        with interruptions() as interrupted:
            while self.progress() < 1 and not self._agreed(interrupted()):
                name, totals, norm = self.step()
                now = time.perf_counter()
                seconds, since = self.at.seconds + now - since, now
                self.at.seconds = self._agreed(seconds)
                self.streams[name].totals += totals
                reporter.step(name, self.at.step, self.at.symbols, self.at.seconds, self.progress(), totals)
                if self.at.step % c.log_every == 0:
                    self._record(reporter, norm)
                ended = self.progress() >= 1
                if self.at.step % c.validate_every == 0 and not ended:
                    with suppress(_CutShortError):
                        self._validate(reporter, c.validate_symbols, interrupted)
                if self.at.step % c.save_every == 0 and not ended:
                    self.save()
                if c.sample_every and self.at.step % c.sample_every == 0 and not ended:
                    self._sample()
                since = time.perf_counter()
            self.save()
            done = self.progress() >= 1 and not self._agreed(interrupted())
        # From here on Ctrl-C ends it at once: all is saved, and a resume does only what follows.
        if done:
            self._validate(reporter, None)
            if c.sample_every:
                self._sample()
        return done

    def _agreed(self, value: float) -> float:
        """The highest of all ranks: they have one clock, and stop together."""
        return parallel.highest(value, device=self.device)

    def _record(self, reporter: Reporter | Silence, norm: float) -> None:
        for name, stream in self.streams.items():
            if stream.totals.count:
                facts = {"gradient_norm": norm, "lr": self.optimiser.lr}
                reporter.train(name, asdict(self.at), stream.totals, facts)
            stream.totals = Totals(0.0, 0)

    def _validate(
        self,
        reporter: Reporter | Silence,
        limit: int | None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        best = self.best_model
        if isinstance(reporter, Silence):
            return

        def scored(count: int) -> None:
            if interrupted():
                raise _CutShortError  # a system that sends SIGTERM does not wait for long
            progress(count)

        for name, model in best.streams.items():
            with reporter.validating(limit) as progress:
                totals = evaluate(
                    model,
                    self.streams[name].data.valid,
                    self.scoring if limit is None else PLAIN,
                    precision=self.precision,
                    limit=limit,
                    progress=scored,
                )
            reporter.validation(name, asdict(self.at), totals, whole=limit is None)

    def _sample(self) -> None:
        best = self.best_model
        if runtime.rank() > 0:
            return
        for name, model in best.streams.items():
            if name in self.samplers:
                self.samplers[name](model, step=self.at.step)

    # Exact resume.

    def save(self) -> None:
        """Writes everything that `resume` needs, then the weights to use. All ranks have to call it.

        Raises DivergedError for weights that are not finite, CheckpointError for what cannot be written.
        """
        if not self.learner.is_finite():
            raise DivergedError(
                f"weights are not finite after step {self.at.step} and are not saved; lower train.lr and "
                "continue with --resume from the last checkpoint, which is intact"
            )
        tensors = {
            f"stream.{name}.{key}": value
            for name, stream in self.streams.items()
            for key, value in stream.tensors().items()
        }
        tensors |= parallel.draws(self.device)
        learned, best = self.learner.tensors(), self.best_model
        if runtime.rank() > 0 and not self.learner.sharded:
            return
        specs = {name: stream.spec for name, stream in self.model.streams.items()}
        random = runtime.rng_state()
        tensors |= {f"random.{name}": random.pop(name) for name in ("torch", "cuda") if name in random}
        values = {
            "at": asdict(self.at),
            "streams": {name: stream.values() for name, stream in self.streams.items()},
            "random": random,
            "ema": self.config.ema,
            "optimiser": self.config.optimiser,
            "disturb": self._disturb(),
            "seed": self.seed,
            "specs": {name: spec.to_json() for name, spec in specs.items()},
        }
        shards = learned if self.learner.sharded else None
        tensors |= {} if self.learner.sharded else learned
        self.folder.save_state(tensors, values, step=self.at.step, keep=self.config.keep, shards=shards)
        if runtime.rank() == 0:
            self.folder.save_model(best, specs, step=self.at.step, origin="trained")

    def resume(self) -> None:
        """Continues exactly where `save` was.

        Raises CheckpointError where the batches would differ or another version saved, SpecError where
        the symbols do.
        """
        tensors, values = self.folder.load_state(self.learner.place())
        specs = self._saved_specs(values)
        for name, stream in self.model.streams.items():
            stream.spec.require(specs[name], here="the data", there=f"the run {self.folder.path}")
        self._require("train.ema", values["ema"], self.config.ema)
        self._require("train.optimiser", values["optimiser"], self.config.optimiser)
        self._require("train.disturb", values.get("disturb"), self._disturb())
        self._require("seed", values["seed"], self.seed)
        for name, stream in self.streams.items():
            saved, mine = values["streams"][name], stream.values()
            prefix = "train." if name == SINGLE else f"train.streams.{name}."
            for key, value in mine["config"].items():
                self._require(prefix + key, saved["config"][key], value)
            self._require("data", saved["data_id"], mine["data_id"])
        self.learner.load(tensors, origin=str(self.folder.path))
        for name, stream in self.streams.items():
            stream.load(under(f"stream.{name}.", tensors), values["streams"][name])
        self.at = Position(**values["at"])
        runtime.set_rng_state({**values["random"], **under("random.", tensors)})
        parallel.continue_draws(tensors, seed=self.seed + self.at.step)

    def _saved_specs(self, values: Mapping[str, Any]) -> dict[str, TokenSpec]:
        if "specs" not in values:  # checkpoints of before leave them to model.json
            return self.folder.specs()
        origin = str(self.folder.path)
        return {name: TokenSpec.from_json(spec, origin=origin) for name, spec in values["specs"].items()}

    def _disturb(self) -> dict[str, float] | None:
        return None if self.config.disturb is None else self.config.disturb.model_dump()

    def _require(self, key: str, saved: object, mine: object) -> None:
        if saved != mine:
            raise CheckpointError(
                f"{self.folder.path} was trained with {key}={saved}, got {mine}; resume with the same or "
                "start a new run"
            )
