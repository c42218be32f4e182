"""From a config to a finished training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from txl_audio import cost, runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.config import load
from txl_audio.data.shards import Shards
from txl_audio.recipe.config import RunConfig
from txl_audio.recipe.parts import codec_for_sound
from txl_audio.recipe.runs import SplitDocuments, new_model
from txl_audio.report import Reporter
from txl_audio.sampling.gallery import keep_sample
from txl_audio.tokens import CheckpointError, ConfigError
from txl_audio.train import Trainer

BITS = {"waveform": "bits_per_sample", "codes": "bits_per_code", "text": "bits_per_symbol"}
"""Name of the bits figure of a modality."""


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False) -> bool:
    """Trains the run that `config` describes; false where it was interrupted, saved.

    Raises ConfigError, DataError, SpecError or CheckpointError before anything is written where the
    config, the data or the run folder cannot be used.
    """
    if config.data is None:
        raise ConfigError("training needs data; set data=DIR to a folder made by `txl-audio prepare`")
    shards = Shards.open(config.data)
    device = runtime.device(config.device)
    runtime.keep_freed_memory()
    folder = RunFolder(config.folder)
    saved = _run_to_resume(folder, config) if resume else None
    wanted = saved.precision if saved and config.precision == "auto" else config.precision
    precision = runtime.choose_precision(wanted, device)
    config = config.model_copy(update={"precision": precision})
    model = new_model(config, shards.spec).to(device)
    documents = SplitDocuments(shards, "train")
    trainer = Trainer(
        model,
        config.train,
        train=documents,
        valid=SplitDocuments(shards, "val"),
        folder=folder,
        seed=config.seed,
        precision=precision,
        data_id=documents.data_id,
    )
    # Both draw random numbers, so they come before the random state is restored.
    flops = cost.training_flops_per_symbol(
        model, lanes=config.train.lanes, segment_len=trainer.segment_len, precision=precision
    )
    machine_flops = runtime.matmul_flops(device, getattr(torch, precision))
    if resume:
        trainer.resume()
        model.spec.require(folder.spec(), here=f"the data {config.data}", there=f"the run {folder.path}")
        folder.save_config(config.to_yaml())
    else:
        if overwrite:
            _remove_run(folder)
        folder.create(config.to_yaml())
    with Reporter(
        folder.path,
        unit=BITS[model.spec.modality],
        flops_per_symbol=flops,
        machine_flops=machine_flops,
        resumed_at=trainer.at.step,
    ) as reporter:
        if model.spec.modality != "text":
            trainer.sample = partial(
                keep_sample,
                codec=codec_for_sound(model.spec),
                seconds=config.train.sample_seconds,
                folder=folder.path / "samples",
                writer=reporter.writer,
            )
        return trainer.run(reporter)


def config_of_run(path: str | Path, overrides: Sequence[str], *, resume: bool) -> RunConfig:
    """The config that `train` is called with. Raises ConfigError.

    A run's own config continues the run that it lies in, wherever that was moved to.
    """
    config, folder = load(RunConfig, path, overrides), RunFolder(Path(path).parent)
    if resume and folder.config_path == Path(path) and folder.has_state():
        moved = folder.path.resolve() != config.folder.resolve()
        if moved and not any(override.startswith("out=") for override in overrides):
            return config.model_copy(update={"out": str(folder.path)})
    return config


def _run_to_resume(folder: RunFolder, config: RunConfig) -> RunConfig:
    """The config of the run in `folder`; CheckpointError where `config` is of another model."""
    if not folder.config_path.is_file():
        raise CheckpointError(f"no run to resume at {folder.path}; train it without --resume, or set out=DIR")
    saved = load(RunConfig, folder.config_path)
    if saved.model != config.model:
        raise CheckpointError(
            f"{folder.path} holds another model than the config describes; resume with "
            f"`txl-audio train {folder.config_path} --resume`"
        )
    return saved


def _remove_run(folder: RunFolder) -> None:
    """Deletes a run; CheckpointError where the folder is anything else."""
    try:
        if folder.config_path.exists():
            load(RunConfig, folder.config_path)
    except ConfigError as error:
        raise CheckpointError(
            f"{folder.path} is not replaced: its config.yaml is of no run ({error}); move the folder away "
            "or choose another with out=DIR"
        ) from error
    folder.remove()
