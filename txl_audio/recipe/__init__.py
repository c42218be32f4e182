"""From a RunConfig to objects; the only place that knows every component."""

from txl_audio.codecs import CODECS
from txl_audio.recipe.config import ModelConfig, RunConfig
from txl_audio.recipe.parts import codec_for_sound, codec_of
from txl_audio.recipe.runs import (
    SHIPPED,
    SplitDocuments,
    before_sound,
    describe,
    load_model,
    load_run,
    new_model,
    open_shards,
    read_tokens,
    run_folder,
    shipped_models,
    spec_for,
    stream_name,
    transcripts_of,
    transcripts_of_run,
    vocabulary_of,
    write_tensors,
)
from txl_audio.recipe.training import bits_name, config_of_run, train
from txl_audio.recipe.weights import export_run, import_run

__all__ = [
    "CODECS",
    "SHIPPED",
    "ModelConfig",
    "RunConfig",
    "SplitDocuments",
    "before_sound",
    "bits_name",
    "codec_for_sound",
    "codec_of",
    "config_of_run",
    "describe",
    "export_run",
    "import_run",
    "load_model",
    "load_run",
    "new_model",
    "open_shards",
    "read_tokens",
    "run_folder",
    "shipped_models",
    "spec_for",
    "stream_name",
    "train",
    "transcripts_of",
    "transcripts_of_run",
    "vocabulary_of",
    "write_tensors",
]
