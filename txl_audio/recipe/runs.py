"""Run folders and shards to objects."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.codec_training.config import describes_codec
from txl_audio.codecs import MuLawCodec
from txl_audio.config import load
from txl_audio.data.remote import is_url
from txl_audio.data.shards import INDEX_FILE, Document, Shards
from txl_audio.data.stream import Symbols
from txl_audio.data.text import VOCABULARY_FILE, TextVocabulary, load_vocabulary
from txl_audio.data.transcripts import MARKS, Order, Transcripts
from txl_audio.model.depth import DepthHeadConfig
from txl_audio.model.heads import FrameHeadConfig
from txl_audio.model.sequence import JointModel, SequenceModel
from txl_audio.recipe.config import MixConfig, RunConfig, StreamConfig
from txl_audio.tokens import CheckpointError, ConfigError, DataError, TokenSpec, unnamed_text_spec

SHIPPED = Path(__file__).resolve().parents[1] / "models"
"""Run folders that are part of the package, without training state, each with a card, README.md."""


class SplitDocuments:
    """The documents of one split of a shard folder, as flat symbol arrays.

    With `orders` every recording is a document in each of them, with what is said in it. Raises DataError
    where that is not known.
    """

    def __init__(self, shards: Shards, split: str, orders: Sequence[Order] = ()) -> None:
        self.shards, self.orders = shards, orders
        self.documents: Sequence[Document] = shards.of_split(split)
        empty = [s.path for s, (own, _) in zip(shards.mix, self.mix, strict=True) if not own]
        if empty and split == "train":
            raise DataError(f"{empty[0]} has no documents of train to mix; leave it out")
        self.transcripts = transcripts_of(shards) if orders else None
        if orders and (silent := [d.id for d in self.documents if not d.text]):
            raise DataError(
                f"{shards.path} says nothing of what is said in {len(silent)} recordings of {split} (first: "
                f"{silent[0]}); prepare them with --transcripts FILE"
            )

    def __len__(self) -> int:
        return len(self.documents) * max(1, len(self.orders))

    def __getitem__(self, index: int, /) -> Symbols:
        number, order = divmod(index, max(1, len(self.orders)))
        document = self.documents[number]
        if self.transcripts is None:
            return self.shards.line(document)
        codes = self.shards.symbols(document)
        return self.transcripts.document(self.orders[order], codes, document.text).reshape(-1)

    @property
    def lengths(self) -> list[int]:
        """Symbols of every document, none of which is read for it."""
        k = self.shards.spec.symbols_per_frame
        return [
            (d.frames + (len(d.text) + MARKS if order else 0)) * k
            for d in self.documents
            for order in self.orders or (None,)
        ]

    def name_of(self, index: int) -> str:
        """The id of the recording, or the text, that document `index` is of."""
        return self.documents[index // max(1, len(self.orders))].id

    @property
    def mix(self) -> list[tuple[range, float]]:
        """Which documents are of which folder of a mix, and its weight."""
        begins = [d.offset for d in self.documents]
        times = max(1, len(self.orders))
        bounds = [[bisect_left(begins, at) * times for at in (s.begin, s.end)] for s in self.shards.mix]
        return [(range(*b), share.weight) for b, share in zip(bounds, self.shards.mix, strict=True)]

    @property
    def separator(self) -> int | None:
        """The symbol that ends a sentence, where the data are sentences in no order."""
        return self.shards.preparation.get("separator")

    @property
    def symbols(self) -> int:
        """Symbols in the split, those of text among them."""
        sound = sum(d.frames for d in self.documents) * self.shards.spec.symbols_per_frame
        text = sum(len(d.text) + MARKS for d in self.documents)
        return max(1, len(self.orders)) * sound + len(self.orders) * text

    @property
    def data_id(self) -> str:
        """Hash of which symbols these are and of their order, from the index."""
        facts: list[Any] = [(d.id, d.frames, d.sha256, d.gain, d.trim) for d in self.documents]
        if self.orders:
            facts += [*self.orders, *(d.text for d in self.documents)]
        facts += [(len(documents), weight) for documents, weight in self.mix]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def transcripts_of(shards: Shards) -> Transcripts:
    """What puts text beside the codes of `shards`. Raises DataError where they have no text."""
    path = shards.path / VOCABULARY_FILE
    if not path.is_file():
        raise DataError(
            f"{shards.path} says nothing of what is said in its recordings; prepare them with --transcripts "
            "FILE"
        )
    return Transcripts(load_vocabulary(path), shards.spec)


def spec_for(part: StreamConfig, shards: Shards) -> TokenSpec:
    """What a stream reads of `shards`."""
    return transcripts_of(shards).spec if part.transcripts else shards.spec


def open_data(data: str | Path | MixConfig) -> Shards:
    """The shards of a folder, a URL or a mix. Raises as `Shards.open` and `Shards.mixed`."""
    if isinstance(data, MixConfig):
        return Shards.mixed([(one.path, one.weight) for one in data.mix])
    return Shards.open(data)


def open_shards(path: str | Path | MixConfig, model: SequenceModel, *, origin: str) -> Shards:
    """Shards that hold the symbols of the model of `origin`; SpecError otherwise."""
    shards = open_data(path)
    spec = transcripts_of(shards).spec if model.spec.text_size else shards.spec
    framed = spec.framed(model.spec.symbols_per_frame)
    framed.require(model.spec.stored, here=f"the data {path}", there=origin)
    return shards


def shipped_models() -> list[str]:
    """Names of the models that are part of the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.yaml"))


def run_folder(path: str | Path) -> RunFolder:
    """The run folder that is meant: one on disk or, by its name, a model that ships with the package.

    A run folder of that name comes first; a word with a separator, such as ./kathleen, is never a name.
    Raises CheckpointError where there is neither.
    """
    folder, names = RunFolder(path), shipped_models()
    if folder.config_path.is_file():
        return folder
    if str(path) in names:
        return RunFolder(SHIPPED / str(path))
    raise CheckpointError(
        f"no run folder at {path} (no config.yaml in it); train or import one, or name a model that ships "
        f"with the package: {', '.join(names)}"
    )


def load_model(path: str | Path, *, device: str = "auto") -> tuple[RunConfig, SequenceModel | JointModel]:
    """Config and whole model of a run, in eval mode; `path` is as in `run_folder`.

    Raises ConfigError, and CheckpointError where files are missing, damaged or of different models.
    """
    folder = run_folder(path)
    if describes_codec(folder.config_path):
        raise CheckpointError(
            f"{path} is the run of a codec, expected that of a model; use it as `txl-audio codec encode FILE "
            f"--codec rvq --weights {path}`, or prepare data with it"
        )
    folder.require_weights()
    config, specs = load(RunConfig, folder.config_path), folder.specs()
    # Every weight is about to be replaced: drawing large models at random would take longer than reading.
    with runtime.no_initialisation():
        model = config.model.build(specs)
    for name, stream in model.streams.items():
        if stream.spec != specs[name]:
            raise CheckpointError(
                f"the weights of {path} were trained with other symbols or predictors (model.json) than its "
                "config.yaml describes in this version of txl_audio; use the version that made it, or train "
                "it again"
            )
    folder.load_model(model)
    model.to(runtime.device(device)).eval()
    return config, model


def load_run(
    path: str | Path, *, device: str = "auto", stream: str | None = None
) -> tuple[RunConfig, SequenceModel]:
    """As `load_model`, one stream of it; `stream` is needed where there are several."""
    config, model = load_model(path, device=device)
    return config, model.streams[stream_name(model, stream, origin=f"the run {path}")]


def stream_name(model: SequenceModel | JointModel, stream: str | None, *, origin: str) -> str:
    """The stream that is meant; ConfigError where that is not clear."""
    names = list(model.streams)
    if stream is None and len(names) == 1:
        return names[0]
    if stream not in names:
        said = "no --stream" if stream is None else f"--stream {stream}"
        raise ConfigError(f"got {said}, but {origin} has the streams {', '.join(names)}; name one of them")
    return stream


def vocabulary_of(path: str | Path, stream: str | None = None) -> TextVocabulary:
    """The vocabulary of a text run. Raises CheckpointError where there is none."""
    folder = run_folder(path)
    own = folder.vocabulary_path(stream)
    file = own if own.is_file() else folder.vocabulary_path()
    if not file.is_file():
        raise CheckpointError(
            f"{folder.path} has no vocabulary ({own.name}), so text cannot be turned into its symbols; "
            "score --tokens FILE works without"
        )
    return load_vocabulary(file)


def transcripts_of_run(
    path: str | Path,
    config: RunConfig,
    model: SequenceModel,
    order: Order,
    *,
    stream: str | None = None,
) -> Transcripts:
    """What puts text beside a run's codes. Raises ConfigError where it was not trained in that order."""
    trained = config.part(stream).transcripts
    if order not in trained:
        raise ConfigError(
            f"{path} was not trained to {order} (its config's transcripts are {list(trained)}); train one "
            f"with model.transcripts=[{order}] on recordings prepared with transcripts"
        )
    return Transcripts(vocabulary_of(path, stream), model.spec.sound)


def before_sound(
    path: str | Path, config: RunConfig, model: SequenceModel, text: str | None, *, stream: str | None = None
) -> np.ndarray | None:
    """Frames [N, K] before the sound that a run makes: those of `text`; None where it knows of no text.

    Raises ConfigError where it cannot say a text, or nothing but a text.
    """
    if text is not None:
        if not text.strip():
            raise ConfigError("the text to say is empty; give at least one word")
        return transcripts_of_run(path, config, model, "speak", stream=stream).speak_prompt(text)
    if not model.spec.text_size:
        return None
    try:
        return transcripts_of_run(path, config, model, "transcribe", stream=stream).speaks
    except ConfigError as error:
        raise ConfigError(f"{path} says texts; give it one with --text") from error


def new_model(config: RunConfig, specs: Mapping[str, TokenSpec]) -> SequenceModel | JointModel:
    """A freshly initialised model, the same for the same seed."""
    runtime.seed_everything(config.seed)
    return config.model.build(specs)


def describe(
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    draw: bool = False,
    codes: TokenSpec | None = None,
) -> SequenceModel | JointModel:
    """The model of a run (see `run_folder`) or of a config file, whether its data are prepared or not.

    The weights of the latter are undefined, since its sizes and costs are asked for; `draw` initialises them.
    What does not exist and has no ending is a name. codes: of a neural codec whose data are not prepared.
    """
    path = Path(target)
    if path.is_dir() or not (path.exists() or path.suffix):
        if overrides:
            raise ConfigError("overrides change a config file, not a trained run; give the config file")
        return load_model(target, device="cpu")[1]
    config = load(RunConfig, target, overrides)
    specs = {
        name: _expected_spec(part, config.data_folders.get(name), codes, origin=f"{target}, stream {name}")
        for name, part in config.model.parts().items()
    }
    if draw:
        return new_model(config, specs)
    with runtime.no_initialisation():
        return config.model.build(specs)


def _expected_spec(
    part: StreamConfig, data: str | MixConfig | None, codes: TokenSpec | None, *, origin: str
) -> TokenSpec:
    """What a stream's symbols are: of its data where they are prepared, else as its config says."""
    if isinstance(data, MixConfig) or (
        data is not None and (is_url(data) or (Path(data) / INDEX_FILE).is_file())
    ):
        return spec_for(part, open_data(data))
    if part.vocab_size is not None:
        return unnamed_text_spec(part.vocab_size)
    if isinstance(part.head, DepthHeadConfig):
        if codes is not None:
            return codes
        raise ConfigError(
            f"{origin}: the data ({data}) are not prepared, and only their codec says what a frame is; "
            "prepare them first, as the config's first lines say"
        )
    if not isinstance(part.head, FrameHeadConfig):
        raise ConfigError(
            f"{origin}: the data ({data}) are not prepared and the config says no vocab_size, so its size "
            "is not known; prepare the data or set model.vocab_size"
        )
    return MuLawCodec().spec


def read_tokens(path: str | Path) -> torch.Tensor:
    """The tensor `tokens` of a safetensors file; DataError where there is none."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from error
    if "tokens" not in tensors:
        raise DataError(f"{path} holds {sorted(tensors)}, expected a tensor `tokens` [N + 1, B]")
    return tensors["tokens"]


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file; DataError where that is not possible."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    except SafetensorError as error:
        raise DataError(f"cannot write {path}: {error}") from error
