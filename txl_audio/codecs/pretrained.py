"""EnCodec, DAC and Mimi as Hugging Face's `transformers` has them.

A codec works at its own sample rate, which its spec names; files are resampled on the way in, as for every
codec. A symbol is an index of one codebook, the coarsest first, so that fewer codebooks of the same model are
a lower bit rate.

How their decoders stream, through the models' public `decode` alone:

- DAC: its convolutions see a bounded number of frames on both sides (11 in the 16 kHz model, 220 ms). Frames
  are decoded when so many later ones are there: the same sound as offline, up to rounding.
- EnCodec and Mimi are causal, but an LSTM and attention over 10 s reach further back than can be decoded
  again. New frames are decoded with CONTEXT_S of the frames before them: for the first CONTEXT_S the same
  sound as offline, later close to it. How close depends on the weights.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch.nn.utils import parametrize

from txl_audio.codecs.checks import checked_codes, checked_pcm, first_samples
from txl_audio.config import Config
from txl_audio.tokens import ConfigError, TokenSpec, settings_hash

CONTEXT_S = 2.0
"""Sound before the new frames that a stream of EnCodec or Mimi decodes again."""


class PretrainedCodec:
    """A model of `transformers` as a codec; implements `tokens.Codec`. Made by the configurations below.

    Args:
        model: EncodecModel, DacModel or MimiModel, one channel.
        settings: what it was loaded by; a copy in another process loads it again.
    """

    def __init__(self, model: Any, settings: _PretrainedConfig) -> None:
        self._settings = settings
        config, codebooks = model.config, settings.codebooks
        self.kind: str = config.model_type
        weights = _digest(model)
        for module in model.modules():
            # Weight norm would be computed again in every call.
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        self._model = model.eval().requires_grad_(False)
        self.frame_samples = round(config.sampling_rate / config.frame_rate)
        if self.kind == "dac":
            self.frame_samples = int(config.hop_length)
        self.spec = TokenSpec(
            modality="codes",
            vocab_size=config.codebook_size,
            symbols_per_frame=codebooks,
            frame_rate_hz=config.sampling_rate / self.frame_samples,
            sample_rate_hz=config.sampling_rate,
            name=self.kind,
            settings_hash=settings_hash({"weights": weights}),
        )
        entries, rate = config.codebook_size, self.spec.bit_rate
        self.description = f"{self.kind}, {codebooks} codebooks of {entries}, {rate:.0f} bit/s"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._settings.build, ()

    def encode(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [B, N] float in [-1, 1] -> codes [B, T, K] int64; zeros fill the last frame.

        Raises DataError for another shape, other types than floats, and samples that are not finite.
        """
        pcm = checked_pcm(pcm)
        frames, k = -(-pcm.shape[1] // self.frame_samples), self.spec.symbols_per_frame
        if pcm.numel() == 0:
            return torch.empty(len(pcm), frames, k, dtype=torch.int64)
        filled = torch.nn.functional.pad(pcm, (0, frames * self.frame_samples - pcm.shape[1]))
        # One lane after another: in a batch, sums are rounded differently, and a code may be another.
        codes = torch.cat([self._codes(lane[None, None]) for lane in filled])
        return codes[:, :k, :frames].transpose(1, 2).contiguous().long()

    def _codes(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [1, 1, N] -> codes of at least K codebooks [1, Q, T]."""
        k = self.spec.symbols_per_frame
        with torch.no_grad():
            if self.kind == "encodec":
                # Bandwidths are a fixed few; the first codebooks of the largest are those of a smaller one.
                return self._model.encode(pcm, bandwidth=max(self._model.config.target_bandwidths))[0][0]
            if self.kind == "dac":
                return self._model.encode(pcm, n_quantizers=k).audio_codes
            return self._model.encode(pcm, num_quantizers=k).audio_codes

    def decode(self, codes: torch.Tensor, *, samples: int | None = None) -> torch.Tensor:
        """codes [B, T, K] -> pcm [B, N] float32 with N = T * `frame_samples`, or the first `samples` of them.

        Raises SpecError for another K or more samples than the codes hold, DataError for codes outside the
        codebooks.
        """
        planes = checked_codes(codes, self.spec).transpose(1, 2)
        length = codes.shape[1] * self.frame_samples
        if codes.numel() == 0:
            return first_samples(torch.zeros(len(codes), length), samples)
        with torch.no_grad():
            if self.kind == "encodec":
                pcm = self._model.decode(planes[None], [None]).audio_values
            else:
                pcm = self._model.decode(audio_codes=planes).audio_values
        pcm = pcm.reshape(len(codes), -1)[:, :length]
        # With an odd stride DAC's transposed convolutions leave out the last few samples.
        return first_samples(torch.nn.functional.pad(pcm, (0, length - pcm.shape[1])), samples)

    def stream_decoder(self) -> PretrainedStreamDecoder:
        """Decoder for one stream; what it holds back and how close it comes to offline is said above."""
        return PretrainedStreamDecoder(self)

    @property
    def decoder_reach(self) -> tuple[int, int, int]:
        """Frames before and after a frame that are decoded with it, and frames that a stream begins with."""
        config = self._model.config
        if self.kind == "dac":
            reach = _dac_reach_frames(config.upsampling_ratios)
            return reach, reach, 1 + reach
        # Reflected padding: the sound before the first frame is made of the frames after it.
        first = config.kernel_size if config.pad_mode == "reflect" else 1
        return math.ceil(CONTEXT_S * self.spec.frame_rate_hz), 0, first


class PretrainedStreamDecoder:
    """`tokens.StreamDecoder` that decodes the new frames together with some before and after them."""

    def __init__(self, codec: PretrainedCodec) -> None:
        self._codec = codec
        self._before, self._after, self._first = codec.decoder_reach
        self._codes = torch.empty(1, 0, codec.spec.symbols_per_frame, dtype=torch.int64)
        self._done = 0  # frames of `_codes` whose sound is out
        self._begun = False

    def push(self, codes: torch.Tensor) -> torch.Tensor:
        """codes [B, T, K] -> pcm [B, n] of the frames that have all they need. Faults as of `decode`."""
        held = self._codes if self._codes.shape[1] else codes[:, :0]
        self._codes = torch.cat([held, codes], dim=1)
        arrived = self._codes.shape[1]
        ready = arrived - self._after if self._begun or arrived >= self._first else 0
        return self._decode_to(ready)

    def flush(self) -> torch.Tensor:
        """pcm [B, n] of the frames still held back."""
        return self._decode_to(self._codes.shape[1])

    def _decode_to(self, end: int) -> torch.Tensor:
        if end <= self._done:
            return torch.empty(len(self._codes), 0)
        per_frame = self._codec.frame_samples
        pcm = self._codec.decode(self._codes)[:, self._done * per_frame : end * per_frame]
        forget = max(0, end - self._before)
        self._codes, self._done, self._begun = self._codes[:, forget:], end - forget, True
        return pcm


class _PretrainedConfig(Config):
    """What the three have in common.

    weights: folder that `save_pretrained` wrote, or a name on Hugging Face's hub, which is fetched once.
    Without it, what the environment variable TXL_AUDIO_ENCODEC, TXL_AUDIO_DAC or TXL_AUDIO_MIMI says, or else
    the authors' on the hub.
    codebooks: how many are used.
    """

    kind: str
    weights: str | None = None
    codebooks: int = Field(ge=1)
    _model: ClassVar[str]
    _hub: ClassVar[str]

    @classmethod
    def for_spec(cls, spec: TokenSpec, weights: str | None = None) -> PretrainedCodec:
        """The codec with the spec's symbols per frame. Raises as `build`."""
        return cls.model_validate({"codebooks": spec.symbols_per_frame, "weights": weights}).build()

    def build(self) -> PretrainedCodec:
        """Raises ConfigError where transformers or the weights are missing, or the model cannot be used."""
        weights = self.weights or os.environ.get(f"TXL_AUDIO_{self.kind.upper()}") or self._hub
        model = _load(self.kind, self._model, weights)
        config = model.config
        if getattr(config, "audio_channels", 1) != 1 or getattr(config, "normalize", False):
            raise ConfigError(
                f"{weights} is for stereo or scales every chunk, expected one channel as it is; "
                "use a model such as facebook/encodec_24khz"
            )
        if self.kind != "dac" and not (config.use_causal_conv and config.trim_right_ratio == 1.0):
            raise ConfigError(f"{weights} is not causal, so its sound cannot be streamed; use one that is")
        there = config.n_codebooks if self.kind == "dac" else config.num_quantizers
        if self.codebooks > there:
            raise ConfigError(f"codebooks is {self.codebooks}, {weights} has {there}; use at most so many")
        return PretrainedCodec(model, self)


class EncodecConfig(_PretrainedConfig):
    """`codec: {kind: encodec}` (arXiv 2210.13438): 24 kHz, 75 frames/s, 8 codebooks of 1,024: 6 kbit/s."""

    kind: Literal["encodec"] = "encodec"
    codebooks: int = Field(default=8, ge=1)
    _model: ClassVar[str] = "EncodecModel"
    _hub: ClassVar[str] = "facebook/encodec_24khz"


class DacConfig(_PretrainedConfig):
    """`codec: {kind: dac}` (arXiv 2306.06546): 16 kHz, 50 frames/s, 12 codebooks of 1,024: 6 kbit/s."""

    kind: Literal["dac"] = "dac"
    codebooks: int = Field(default=12, ge=1)
    _model: ClassVar[str] = "DacModel"
    _hub: ClassVar[str] = "descript/dac_16khz"


class MimiConfig(_PretrainedConfig):
    """`codec: {kind: mimi}` (arXiv 2410.00037): 24 kHz, 12.5 frames/s, 8 codebooks of 2,048: 1.1 kbit/s."""

    kind: Literal["mimi"] = "mimi"
    codebooks: int = Field(default=8, ge=1)
    _model: ClassVar[str] = "MimiModel"
    _hub: ClassVar[str] = "kyutai/mimi"


def _load(kind: str, model: str, weights: str) -> Any:
    """The model of a folder or hub name; ConfigError where it cannot be had."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"the codec {kind} needs the package transformers ({error}); pip install 'txl-audio[neural]'"
        ) from error
    shows = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # loading is quick; fetching has a bar of its own
    try:
        found = transformers.AutoConfig.from_pretrained(weights).model_type
        if found != kind:
            raise ConfigError(f"{weights} holds the model {found}, expected {kind}; give weights of {kind}")
        return getattr(transformers, model).from_pretrained(weights).float()
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{kind} cannot be loaded from {weights}: {error}; give a folder with config.json and "
            "model.safetensors, or the name of a model on Hugging Face's hub"
        ) from error
    finally:
        if shows:
            transformers.utils.logging.enable_progress_bar()


def _digest(model: Any) -> str:
    """Hash of all weights. Names are left out: they differ between versions of transformers."""
    tensors = (tensor.contiguous().numpy().tobytes() for tensor in model.state_dict().values())
    digests = sorted(hashlib.sha256(content).hexdigest() for content in tensors)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _dac_reach_frames(ratios: list[int]) -> int:
    """Frames on either side that a sample of DAC's decoder depends on.

    Convolutions of 7 at both ends; in a block one transposed of two strides, three of 7 dilated by 1, 3, 9.
    """
    reach, rate = 3.0, 1
    for ratio in ratios:
        reach += 1 / rate
        rate *= ratio
        reach += 3 * (1 + 3 + 9) / rate
    return math.ceil(reach + 3 / rate)
