"""From a config to a finished training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from txl_audio import cost, parallel, runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.config import load
from txl_audio.data.shards import Shards
from txl_audio.data.stream import Documents
from txl_audio.data.text import VOCABULARY_FILE, load_vocabulary, unit
from txl_audio.data.transcripts import Order
from txl_audio.evaluate import EvaluateConfig
from txl_audio.lanes import StreamData, StreamTrainConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.recipe.config import RunConfig
from txl_audio.recipe.parts import codec_for_sound
from txl_audio.recipe.runs import SplitDocuments, new_model, open_data, spec_for
from txl_audio.report import Reporter, Silence, StreamFacts
from txl_audio.sampling.gallery import keep_sound, keep_text
from txl_audio.states import write_atomically
from txl_audio.tokens import CheckpointError, ConfigError, TokenSpec
from txl_audio.train import Trainer

PROMPT_SYMBOLS = 32
"""Length of the beginning of the validation split from which a text sample goes on."""


def bits_name(spec: TokenSpec) -> str:
    """Name of the bits figure, such as `bits_per_sample`."""
    of_sound = {"waveform": "sample", "codes": "code"}
    return f"bits_per_{of_sound.get(spec.modality) or unit(spec)}"


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False) -> bool:
    """Trains the run that `config` describes; false where it was interrupted, saved.

    Raises ConfigError, DataError, SpecError or CheckpointError before anything is written where the
    config, the data or the run folder cannot be used.
    """
    device = runtime.device(config.device)
    with parallel.joined(device):
        return _train(config, device, resume=resume, overwrite=overwrite)


def _train(config: RunConfig, device: torch.device, *, resume: bool, overwrite: bool) -> bool:
    shards = _open_data(config)
    runtime.keep_freed_memory()
    folder = RunFolder(config.folder)
    saved = _run_to_resume(folder, config) if resume else None
    if resume and not folder.has_begun():
        if runtime.rank() == 0:
            sys.stderr.write(f"{folder.path} has saved nothing yet; it begins anew\n")
        resume, overwrite = False, True
    wanted = saved.precision if saved and config.precision == "auto" else config.precision
    precision: runtime.Precision = parallel.shared(runtime.choose_precision(wanted, device))
    config = config.model_copy(update={"precision": precision})
    parts = config.model.parts()
    specs = {name: spec_for(parts[name], opened) for name, opened in shards.items()}
    model = new_model(config, specs).to(device)
    parallel.share_weights(model)
    if runtime.rank() > 0:
        torch.manual_seed(config.seed + runtime.rank())  # dropout of its own
    first = runtime.rank() == 0
    # Both draw random numbers, so they come before the random state is restored; and before the model is
    # in shards, which all ranks would have to run.
    facts = {
        name: _facts(stream, config.train.of_stream(name, stream.core.config), precision, shards[name])
        for name, stream in model.streams.items()
        if first
    }
    machine_flops = runtime.matmul_flops(device, getattr(torch, precision)) if first else 1.0
    trainer = Trainer(
        model,
        config.train,
        {name: _stream_data(opened, parts[name].transcripts) for name, opened in shards.items()},
        folder=folder,
        seed=config.seed,
        precision=precision,
        scoring=_scoring(config),
    )
    with ExitStack() as held:
        if first:
            held.enter_context(folder.locked())
        if resume:
            trainer.resume()
        if not first:
            return trainer.run(Silence())
        if resume:
            folder.save_config(config.to_yaml())
        else:
            if overwrite:
                _remove_run(folder)
            folder.create(config.to_yaml())
            for name, opened in shards.items():
                _keep_vocabulary(opened.path, folder.vocabulary_path(name if len(shards) > 1 else None))
        at = trainer.at.step
        reporter = Reporter(folder.path, streams=facts, machine_flops=machine_flops, resumed_at=at)
        held.enter_context(reporter)
        if config.train.sample_every:
            for name, opened in shards.items():
                trainer.samplers[name] = _sampler(config, trainer, name, opened, reporter)
        return trainer.run(reporter)


def _open_data(config: RunConfig) -> dict[str, Shards]:
    if not config.data_folders:
        raise ConfigError("training needs data; set data=DIR to a folder made by `txl-audio prepare`")
    return {name: open_data(data) for name, data in config.data_folders.items()}


def _stream_data(shards: Shards, orders: Sequence[Order]) -> StreamData:
    train, valid = (SplitDocuments(shards, split, orders) for split in ("train", "val"))
    return StreamData(train, valid, train.data_id, train.separator, train.name_of)


def _scoring(config: RunConfig) -> EvaluateConfig:
    """How the end of training scores every stream. ConfigError for what streams cannot have in common."""
    given = config.evaluate.model_dump(exclude_none=True)
    own = sorted(set(given) - {"lanes"})
    if config.model.streams and own:
        raise ConfigError(
            f"evaluate.{own[0]} would be the same for {', '.join(config.model.streams)}; leave it out, and "
            "give it to `txl-audio evaluate --stream NAME`"
        )
    return config.evaluate.model_copy(update={"dynamic": None})


def _sampler(
    config: RunConfig, trainer: Trainer, name: str, shards: Shards, reporter: Reporter
) -> Callable[..., None]:
    """What makes and files samples of one stream."""
    several, folder = len(trainer.streams) > 1, reporter.folder / "samples"
    folder, tag = (folder / name, f"sample/{name}") if several else (folder, "sample")
    stream = trainer.streams[name]
    if stream.model.spec.modality == "text":
        vocabulary = load_vocabulary(shards.path / VOCABULARY_FILE)
        return partial(
            keep_text,
            vocabulary=vocabulary,
            filters=config.sample.filters(stream.model.spec),
            prompt=_beginning(stream.data.valid),
            folder=folder,
            tag=tag,
            writer=reporter.writer,
        )
    return partial(
        keep_sound,
        codec=codec_for_sound(stream.model.spec, config.part(name).codec_weights),
        before=_before(stream.data.valid),
        filters=config.sample.filters(stream.model.spec),
        seconds=trainer.config.sample_seconds,
        folder=folder,
        tag=tag,
        writer=reporter.writer,
    )


def _before(documents: Documents) -> np.ndarray | None:
    """Of streams with text beside codes, what a sample is to say: the first recording's text."""
    assert isinstance(documents, SplitDocuments)
    if documents.transcripts is None:
        return None
    if "speak" in documents.orders:
        return documents.transcripts.speak_prompt(documents.documents[0].text)
    return documents.transcripts.speaks


def _beginning(documents: Documents) -> torch.Tensor:
    """The first symbols of the first document that has any."""
    lines = (documents[index] for index in range(len(documents)))
    first = next((line for line in lines if len(line)), np.empty(0))
    return torch.from_numpy(first[:PROMPT_SYMBOLS].astype(np.int64))


def _facts(
    model: SequenceModel, config: StreamTrainConfig, precision: runtime.Precision, shards: Shards
) -> StreamFacts:
    assert config.lanes is not None and config.segment_len is not None
    flops = cost.training_flops_per_symbol(
        model, lanes=config.lanes, segment_len=config.segment_len, precision=precision
    )
    newlines = shards.preparation.get("newlines")
    form = f"newlines {newlines}" if newlines else ""
    return StreamFacts(bits_name(model.spec), flops, form, model.spec.frame_rate_hz)


def _keep_vocabulary(data: Path, target: Path) -> None:
    """A text run is usable without its data: its vocabulary goes with it."""
    source = data / VOCABULARY_FILE
    if source.is_file():
        write_atomically(target, source.read_bytes())


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
