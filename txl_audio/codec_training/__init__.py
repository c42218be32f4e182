"""Training of the project's own codec (`txl_audio.codecs.rvq`) from recordings."""

from txl_audio.codec_training.config import (
    CodecRunConfig,
    CodecTrainConfig,
    codec_config_of_run,
    describes_codec,
    size,
)
from txl_audio.codec_training.loop import train_codec

__all__ = [
    "CodecRunConfig",
    "CodecTrainConfig",
    "codec_config_of_run",
    "describes_codec",
    "size",
    "train_codec",
]
