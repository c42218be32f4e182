"""Training of a neural codec: the step, the budget, validation, exact resume."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder, load_weights
from txl_audio.codec_quality import log_spectral_distance_db, pesq_wb
from txl_audio.codec_training.adversary import Adversary
from txl_audio.codec_training.config import CodecRunConfig, CodecTrainConfig, describes_codec
from txl_audio.codec_training.losses import SpectralLoss
from txl_audio.codec_training.recordings import Recordings, read_recordings
from txl_audio.codec_training.report import CodecReporter
from txl_audio.codecs.rvq import RvqCodec
from txl_audio.codecs.rvq_model import FRAME_SAMPLES, SAMPLE_RATE_HZ, RvqModel, RvqModelConfig
from txl_audio.model.sequence import SINGLE
from txl_audio.optim import Optimiser
from txl_audio.stops import DivergedError, interruptions
from txl_audio.tokens import CheckpointError, ConfigError


@dataclass
class Position:
    """How far a training is."""

    step: int = 0
    seconds: float = 0.0
    warmup_progress: float = 0.0


class CodecTrainer:
    """Trains an `RvqModel`; `run` does all of it.

    Raises ConfigError where there is no budget or the quantiser's package is not installed.
    """

    def __init__(
        self,
        model: RvqModel,
        config: CodecTrainConfig,
        data: Mapping[str, Recordings],
        *,
        folder: RunFolder,
        seed: int,
        precision: runtime.Precision,
    ) -> None:
        if config.steps is None and config.minutes is None:
            raise ConfigError("a training needs a budget; set train.steps, train.minutes or both")
        self.model, self.config, self.data, self.folder = model, config, data, folder
        self.seed = seed
        self.precision: runtime.Precision = precision
        self.device = model.codebooks.device
        self.piece_samples = round(config.seconds * SAMPLE_RATE_HZ / FRAME_SAMPLES) * FRAME_SAMPLES
        self.quantiser = residual_quantiser(model.config, config.commitment).to(self.device)
        self.spectral = SpectralLoss(SAMPLE_RATE_HZ).to(self.device)
        self.optimiser = config.build(model, precision)
        self.at = Position()
        self.adversary = None if config.adversarial is None else Adversary(config.adversarial, self.device)
        # Codes of the batches since the last record: how evenly every codebook is used.
        self.usage = torch.zeros(model.config.codebooks, model.config.codebook_size, device=self.device)

    def progress(self) -> float:
        """Share of the budget used up."""
        steps = self.at.step / self.config.steps if self.config.steps else 0.0
        minutes = self.at.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(steps, minutes)

    def step(self) -> dict[str, float]:
        """One optimiser step: its losses by name."""
        self.model.train()
        # Drawn anew from seed and step, so that a resumed training goes on with the same pieces.
        draws = np.random.default_rng((self.seed, self.at.step))
        pcm = self.data["train"].pieces(self.config.batch, samples=self.piece_samples, draws=draws)
        pcm = pcm.to(self.device)
        with runtime.autocast(self.device, self.precision):
            latents = self.model.whole_latents(pcm)
        quantised, codes, commitment = self.quantiser(latents.float())
        with runtime.autocast(self.device, self.precision):
            decoded = self.model.whole_sound(quantised)
        logs, loudness = self.spectral(decoded, pcm)
        loss = self.config.log_spectra * logs + self.config.loudness * loudness + commitment.sum()
        losses = {
            "log_spectra": logs.item(),
            "loudness": loudness.item(),
            "commitment": commitment.sum().item(),
        }
        if self.adversary is not None and self.progress() >= self.adversary.config.start:
            with runtime.autocast(self.device, self.precision):
                adversarial, facts = self.adversary.losses(decoded, pcm, draws)
            loss, losses = loss + adversarial, losses | facts
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not torch.isfinite(norm):
            raise DivergedError(
                f"the gradient is not finite at step {self.at.step}; lower train.lr or look at the data. "
                "The last checkpoint is intact"
            )
        if self.at.step == self.config.warmup_steps:
            self.at.warmup_progress = self.progress()
        self.optimiser.set_rate(self.config.rate(self.at.step, self.progress(), self.at.warmup_progress))
        self.optimiser.step()
        self.optimiser.zero_grad()
        for stage, chosen in zip(self.usage, codes.flatten(0, -2).unbind(-1), strict=True):
            stage += torch.bincount(chosen, minlength=len(stage))
        self.at.step += 1
        return losses | {"gradient_norm": norm.item()}

    def run(self, reporter: CodecReporter) -> bool:
        """Trains to the end of the budget; false where it was interrupted (and saved)."""
        c, since, recent = self.config, time.perf_counter(), []
        with interruptions() as interrupted:
            begun = self.at.step, self.at.seconds
            while self.progress() < 1 and not interrupted():
                recent.append(self.step())
                now = time.perf_counter()
                self.at.seconds, since = self.at.seconds + now - since, now
                sound_s = (self.at.step - begun[0]) * c.batch * self.piece_samples / SAMPLE_RATE_HZ
                rate = sound_s / max(1e-9, self.at.seconds - begun[1])
                loudness = recent[-1]["loudness"]
                reporter.progress(self.at.step, self.progress(), loudness=loudness, sound_per_s=rate)
                if self.at.step % c.log_every == 0:
                    self._record(reporter, recent, rate)
                    recent = []
                ended = self.progress() >= 1
                # Saved first: what goes wrong in judging and drawing costs no training.
                if self.at.step % c.save_every == 0 and not ended:
                    self.save()
                if self.at.step % c.validate_every == 0 and not ended:
                    self._validate(reporter, c.validate_recordings)
                since = time.perf_counter()
            self.save()
            done = self.progress() >= 1 and not interrupted()
        if done:
            self._validate(reporter, None)
        return done

    def _record(self, reporter: CodecReporter, recent: list[dict[str, float]], rate: float) -> None:
        values = {**_means(recent), "lr": self.optimiser.lr, "sound_s_per_s": rate}
        share = self.usage / self.usage.sum(-1, keepdim=True).clamp_min(1)
        for stage, perplexity in enumerate(torch.special.entr(share).sum(-1).exp().tolist(), 1):
            values[f"stage_{stage}_perplexity"] = perplexity
        self.usage.zero_()
        reporter.figures("train", asdict(self.at), values)

    def _validate(self, reporter: CodecReporter, limit: int | None) -> None:
        """Qualities of decoded validation recordings, evenly chosen from all, and the first as a sample."""
        codec = self.codec()
        recordings = self.data["val"]
        count = len(recordings) if limit is None else min(limit, len(recordings))
        qualities: list[dict[str, float]] = []
        for number in range(count):
            pcm = recordings[number * len(recordings) // count]
            decoded = codec.decode(codec.encode(pcm[None]), samples=len(pcm))[0]
            qualities.append(quality(pcm, decoded))
            if number == 0:
                reporter.sample(self.at.step, pcm, decoded)
        values = _means(qualities)
        reporter.figures("validation", asdict(self.at), {**values, "recordings": count})

    def codec(self) -> RvqCodec:
        """The codec as it is now: a copy on the CPU."""
        self._take_codebooks()
        return RvqCodec(copy.deepcopy(self.model).cpu())

    def _take_codebooks(self) -> None:
        """The quantiser learns its codebooks apart; here they become the model's."""
        self.model.codebooks.copy_(cast(Tensor, self.quantiser.codebooks))

    # Exact resume.

    def save(self) -> None:
        """Writes the codec, then everything that `resume` needs."""
        codec = self.codec()
        self.folder.save_model(codec.model, {SINGLE: codec.spec}, step=self.at.step, origin="trained")
        tensors = {
            f"{part}.{name}": v for part, m in self._modules().items() for name, v in m.state_dict().items()
        }
        for part, optimiser in self._optimisers().items():
            tensors |= {f"{part}.{name}": value for name, value in optimiser.state_tensors().items()}
        random = runtime.rng_state()
        tensors |= {f"random.{name}": random.pop(name) for name in ("torch", "cuda") if name in random}
        values = {"at": asdict(self.at), "random": random, "settings": self._settings()}
        self.folder.save_state(tensors, values, step=self.at.step)

    def resume(self) -> None:
        """Continues where `save` was. Raises CheckpointError where settings or recordings differ."""
        tensors, values = self.folder.load_state()
        for key, mine in self._settings().items():
            saved = values["settings"].get(key)
            if saved != mine:
                raise CheckpointError(
                    f"{self.folder.path} was trained with {key}={saved}, got {mine}; resume with the same or "
                    "start a new run"
                )
        for part, module in self._modules().items():
            load_weights(module, _under(f"{part}.", tensors), origin=str(self.folder.path))
        for part, optimiser in self._optimisers().items():
            optimiser.load_state_tensors(_under(f"{part}.", tensors))
        self.at = Position(**values["at"])
        runtime.set_rng_state({**values["random"], **_under("random.", tensors)})

    def _modules(self) -> dict[str, nn.Module]:
        own: dict[str, nn.Module] = {"model": self.model, "quantiser": self.quantiser}
        return own | ({} if self.adversary is None else {"adversary": self.adversary.discriminator})

    def _optimisers(self) -> dict[str, Optimiser]:
        own = {"optimiser": self.optimiser}
        return own | ({} if self.adversary is None else {"adversary_optimiser": self.adversary.optimiser})

    def _settings(self) -> dict[str, object]:
        """What a resume has to have in common with what was saved."""
        train, c = self.data["train"], self.config
        adversarial = None if c.adversarial is None else c.adversarial.model_dump()
        return {
            "data": train.data_id,
            "seed": self.seed,
            "model": self.model.config.model_dump(),
            "train.batch": c.batch,
            "train.seconds": c.seconds,
            "train.optimiser": c.optimiser,
            "train.adversarial": adversarial,
        }


def quality(pcm: Tensor, decoded: Tensor) -> dict[str, float]:
    """Figures by name for pcm [N] and decoded [N]; PESQ where its package is there and finds speech."""
    original, other = pcm.numpy(), decoded.numpy()
    figures = {"log_spectral_distance_db": log_spectral_distance_db(original, other)}
    if find_spec("pesq") is not None and not math.isnan(score := pesq_wb(original, other)):
        figures["pesq_wb"] = score
    return figures


def _means(records: list[dict[str, float]]) -> dict[str, float]:
    """Mean of every figure over the records that have it."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: float(np.mean([r[name] for r in records if name in r])) for name in names}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def residual_quantiser(config: RvqModelConfig, commitment: float) -> nn.Module:
    """The trainable form of `config`'s codebooks: k-means start, moving averages, dead rows drawn anew.

    Raises ConfigError where vector-quantize-pytorch is not installed.
    """
    try:
        from vector_quantize_pytorch import ResidualVQ
    except ImportError as error:
        raise ConfigError(
            f"training a codec needs the package vector-quantize-pytorch ({error}); install "
            "'txl-audio[codec-training]'"
        ) from error
    return ResidualVQ(
        dim=config.latent,
        num_quantizers=config.codebooks,
        codebook_size=config.codebook_size,
        kmeans_init=True,
        decay=0.95,
        threshold_ema_dead_code=0.5,
        commitment_weight=commitment,
        rotation_trick=True,
    )


def train_codec(config: CodecRunConfig, *, resume: bool = False, overwrite: bool = False) -> bool:
    """Trains the codec that `config` describes; false where it was interrupted, saved.

    Raises ConfigError, DataError or CheckpointError before anything is written where the config, the
    recordings or the run folder cannot be used.
    """
    if config.data is None:
        raise ConfigError("training needs recordings; set data=DIR to a folder of audio files")
    device = runtime.device(config.device)
    folder = RunFolder(config.folder)
    if resume and not folder.config_path.is_file():
        raise CheckpointError(f"no run to resume at {folder.path}; train it without --resume, or set out=DIR")
    recordings = read_recordings(config.data, config.split)
    runtime.keep_freed_memory()
    precision = runtime.choose_precision(config.precision, device)
    config = config.model_copy(update={"precision": precision})
    runtime.seed_everything(config.seed)
    trainer = CodecTrainer(
        config.model.build().to(device),
        config.train,
        recordings,
        folder=folder,
        seed=config.seed,
        precision=precision,
    )
    with folder.locked():
        if resume:
            trainer.resume()
            folder.save_config(config.to_yaml())
        else:
            if overwrite:
                if folder.config_path.exists() and not describes_codec(folder.config_path):
                    raise CheckpointError(
                        f"{folder.path} is not replaced: it holds a run that is no codec; choose another "
                        "folder with out=DIR"
                    )
                folder.remove()
            folder.create(config.to_yaml())
        reporter = CodecReporter(folder.path, resumed_at=trainer.at.step)
        with reporter:
            return trainer.run(reporter)
