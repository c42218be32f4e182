"""From a RunConfig to objects; the only place that knows every component."""

from txl_audio.codecs import CODECS
from txl_audio.recipe.config import ModelConfig, RunConfig
from txl_audio.recipe.parts import codec_for_sound, codec_of
from txl_audio.recipe.runs import (
    SplitDocuments,
    describe,
    load_run,
    new_model,
    open_shards,
    read_tokens,
    write_tensors,
)
from txl_audio.recipe.training import BITS, config_of_run, train
from txl_audio.recipe.weights import import_run

__all__ = [
    "BITS",
    "CODECS",
    "ModelConfig",
    "RunConfig",
    "SplitDocuments",
    "codec_for_sound",
    "codec_of",
    "config_of_run",
    "describe",
    "import_run",
    "load_run",
    "new_model",
    "open_shards",
    "read_tokens",
    "train",
    "write_tensors",
]
