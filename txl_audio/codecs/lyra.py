"""Lyra v2: Google's pretrained SoundStream codec for 16 kHz speech, 50 frames a second.

SoundStream (arXiv 2107.03312) with residual vector quantisation of 46 stages of 16 entries, of which 16, 30
or 46 are used (3.2, 6 and 9.2 kbit/s). Two stages make one symbol, first * 16 + second, so a frame has 8, 15
or 23 symbols out of 256.

Encoder and decoder are the TFLite models of github.com/google/lyra, folder lyra/model_coeffs (Apache-2.0).
The quantiser needs none: its codebooks are read out of the TFLite model once, a frame is the sum of one row
of each, and encoding takes the nearest row to what the stages before left over. The models keep their state
inside the interpreter and nothing resets it completely, so every lane of a stream has one of its own.

Nothing is delayed: sample n of the output belongs to sample n of the input, and a frame is final as soon as
its 320 samples are there. Codes may differ between kinds of processors beyond the first stages, because they
round float32 sums differently.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from txl_audio.codecs.checks import checked_codes, checked_pcm, first_samples
from txl_audio.config import Config
from txl_audio.tokens import ConfigError, DataError, SpecError, TokenSpec, settings_hash

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 320
WEIGHTS_VARIABLE = "TXL_AUDIO_LYRA"
"""Environment variable that names the folder of weights where no setting does."""

_MAX_STAGES, _ENTRIES, _LATENTS = 46, 16, 64
_VOCAB = _ENTRIES * _ENTRIES
_ENCODER, _QUANTIZER, _DECODER = "soundstream_encoder.tflite", "quantizer.tflite", "lyragan.tflite"
# Distances of so many frames to a codebook are held at once: 4 MB.
_BLOCK_FRAMES = 1024

_Frames = NDArray[np.float32]


class LyraCodec:
    """Lyra v2 with the weights of a folder; implements `tokens.Codec`.

    It can be pickled and forked: interpreters are made where a stream begins.

    Args:
        weights: folder with the three .tflite files.
        stages: 16, 30 or 46.

    Raises ConfigError where the folder lacks a file, a file is something else, or ai-edge-litert is not
    installed.
    """

    def __init__(self, weights: str | Path, *, stages: int = 16) -> None:
        files = {name: _read(Path(weights) / name) for name in (_ENCODER, _QUANTIZER, _DECODER)}
        self._encoder, self._decoder = files[_ENCODER], files[_DECODER]
        self._codebooks = _codebooks(files[_QUANTIZER], origin=Path(weights) / _QUANTIZER)[:stages]
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        self.spec = TokenSpec(
            modality="codes",
            vocab_size=_VOCAB,
            symbols_per_frame=stages // 2,
            frame_rate_hz=SAMPLE_RATE_HZ / FRAME_SAMPLES,
            sample_rate_hz=SAMPLE_RATE_HZ,
            name="lyra",
            settings_hash=settings_hash({"stages": stages, "sha256": digests}),
        )
        self.description = f"Lyra v2, {stages} stages in pairs, {stages * 200} bit/s"

    def encode(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [B, N] float in [-1, 1] -> codes [B, ceil(N / 320), K] int64; zeros fill the last frame.

        Raises DataError for another shape, other types than floats, and samples that are not finite.
        """
        encoder = self.stream_encoder()
        return torch.cat([encoder.push(pcm), encoder.flush()], dim=1)

    def decode(self, codes: torch.Tensor, *, samples: int | None = None) -> torch.Tensor:
        """codes [B, T, K] -> pcm [B, N] float32 with N = T * 320, or the first `samples` of them.

        Raises SpecError for another K or more samples than the codes hold, DataError for codes beyond 255.
        """
        return first_samples(self.stream_decoder().push(codes), samples)

    def stream_encoder(self) -> LyraStreamEncoder:
        """Encoder for one stream; it holds back samples until they fill a frame."""
        return LyraStreamEncoder(self)

    def stream_decoder(self) -> LyraStreamDecoder:
        """Decoder for one stream; every frame that is pushed is final at once."""
        return LyraStreamDecoder(self)

    def encoder_network(self) -> _Network:
        """Frames of samples to latents [64], from a clean start."""
        return _Network(self._encoder, _ENCODER, inputs=FRAME_SAMPLES, outputs=_LATENTS)

    def decoder_network(self) -> _Network:
        """Latents [64] to frames of samples, from a clean start."""
        return _Network(self._decoder, _DECODER, inputs=_LATENTS, outputs=FRAME_SAMPLES)

    def quantise(self, latents: _Frames) -> NDArray[np.int64]:
        """latents [T, 64] -> symbols [T, K]: stage by stage the nearest row to what is left over."""
        stages = np.empty((len(latents), len(self._codebooks)), np.int64)
        for begin in range(0, len(latents), _BLOCK_FRAMES):
            left = latents[begin : begin + _BLOCK_FRAMES].copy()
            for stage, rows in enumerate(self._codebooks):
                # Not by a matrix product: its rounding would depend on how many frames there are.
                nearest = np.square(left[:, None] - rows).sum(-1).argmin(1)
                stages[begin : begin + _BLOCK_FRAMES, stage] = nearest
                left -= rows[nearest]
        return stages[:, ::2] * _ENTRIES + stages[:, 1::2]

    def dequantise(self, symbols: NDArray[np.int64]) -> _Frames:
        """symbols [T, K] -> latents [T, 64]: the sum of one row of every stage."""
        latents = np.zeros((len(symbols), _LATENTS), np.float32)
        for place in range(symbols.shape[1]):
            first, second = np.divmod(symbols[:, place], _ENTRIES)
            latents += self._codebooks[2 * place][first]
            latents += self._codebooks[2 * place + 1][second]
        return latents


class LyraStreamEncoder:
    """`tokens.StreamEncoder` of Lyra."""

    def __init__(self, codec: LyraCodec) -> None:
        self._codec = codec
        self._networks: list[_Network] = []
        self._rest = np.zeros((0, 0), np.float32)

    def push(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [B, n] -> codes [B, T, K] of complete frames. Faults as `LyraCodec.encode`, or another B."""
        samples = checked_pcm(pcm).numpy()
        if not self._networks:
            self._networks = [self._codec.encoder_network() for _ in range(len(samples))]
            self._rest = np.zeros((len(samples), 0), np.float32)
        _require_lanes(len(samples), self._networks)
        samples = np.concatenate([self._rest, samples], axis=1)
        whole = samples.shape[1] // FRAME_SAMPLES * FRAME_SAMPLES
        self._rest = samples[:, whole:]
        k = self._codec.spec.symbols_per_frame
        codes = np.empty((len(samples), whole // FRAME_SAMPLES, k), np.int64)
        for lane, network in enumerate(self._networks):
            frames = samples[lane, :whole].reshape(-1, FRAME_SAMPLES)
            codes[lane] = self._codec.quantise(network.run(frames))
        return torch.from_numpy(codes)

    def flush(self) -> torch.Tensor:
        """codes [B, 0 or 1, K]: the samples held back, followed by zeros."""
        missing = -self._rest.shape[1] % FRAME_SAMPLES
        return self.push(torch.zeros(len(self._rest), missing))


class LyraStreamDecoder:
    """`tokens.StreamDecoder` of Lyra: what is pushed is final at once."""

    def __init__(self, codec: LyraCodec) -> None:
        self._codec = codec
        self._networks: list[_Network] = []

    def push(self, codes: torch.Tensor) -> torch.Tensor:
        """codes [B, T, K] -> pcm [B, T * 320] float32. Faults as `LyraCodec.decode`, or another B."""
        symbols = checked_codes(codes, self._codec.spec).numpy()
        if not self._networks:
            self._networks = [self._codec.decoder_network() for _ in range(len(symbols))]
        _require_lanes(len(symbols), self._networks)
        pcm = np.empty((len(symbols), symbols.shape[1] * FRAME_SAMPLES), np.float32)
        for lane, network in enumerate(self._networks):
            pcm[lane] = network.run(self._codec.dequantise(symbols[lane])).reshape(-1)
        return torch.from_numpy(pcm)

    def flush(self) -> torch.Tensor:
        """pcm [B, 0]: nothing is ever held back."""
        return torch.empty(len(self._networks), 0)


class LyraConfig(Config):
    """`codec: {kind: lyra}`.

    weights: folder of the .tflite files; without it, what the environment variable TXL_AUDIO_LYRA names. The
    folder is no part of what a symbol means, the content of the files is.
    """

    kind: Literal["lyra"] = "lyra"
    stages: Literal[16, 30, 46] = 16
    weights: str | None = None

    @classmethod
    def for_spec(cls, spec: TokenSpec, weights: str | None = None) -> LyraCodec:
        """The codec with the spec's symbols per frame. Raises SpecError without one, or as `build`."""
        stages: Any = 2 * spec.symbols_per_frame
        if stages not in (16, 30, 46):
            raise SpecError(f"Lyra has 8, 15 or 23 symbols a frame, got {spec.symbols_per_frame}")
        return cls(stages=stages, weights=weights).build()

    def build(self) -> LyraCodec:
        """Raises ConfigError where there are no weights; see `LyraCodec`."""
        weights = self.weights or os.environ.get(WEIGHTS_VARIABLE)
        if not weights:
            raise ConfigError(f"the codec lyra needs its weights: {_ADVICE}")
        return LyraCodec(weights, stages=self.stages)


_ADVICE = (
    f"get the folder lyra/model_coeffs of github.com/google/lyra (Apache-2.0, 3.4 MB), with {_ENCODER}, "
    f"{_QUANTIZER} and {_DECODER}, and name it by the variable {WEIGHTS_VARIABLE}, with --weights DIR where "
    "--codec is given, or as model.codec_weights in a run's config"
)


class _Network:
    """One TFLite model with the state of one stream."""

    def __init__(self, content: bytes, name: str, *, inputs: int, outputs: int) -> None:
        # One thread: a frame is too little work to share.
        self._interpreter = _interpreter(content, name)
        (into,), (out,) = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        if (int(np.prod(into["shape"])), int(np.prod(out["shape"]))) != (inputs, outputs):
            raise ConfigError(
                f"{name} takes {into['shape']} and gives {out['shape']} values, expected {inputs} and "
                f"{outputs}; {_ADVICE}"
            )
        self._input, self._shape, self._output = into["index"], into["shape"], out["index"]
        self._width = outputs

    def run(self, frames: _Frames) -> _Frames:
        """frames [T, inputs] -> [T, outputs] float32, one after another; the state goes on."""
        result = np.empty((len(frames), self._width), np.float32)
        for t, frame in enumerate(frames):
            self._interpreter.set_tensor(self._input, frame.reshape(self._shape))
            self._interpreter.invoke()
            result[t] = self._interpreter.get_tensor(self._output).reshape(-1)
        return result


def _interpreter(content: bytes, name: str) -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise ConfigError(
            f"the codec lyra needs the package ai-edge-litert ({error}); pip install 'txl-audio[lyra]'"
        ) from error
    try:
        interpreter = Interpreter(model_content=content, num_threads=1)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is no TFLite model that can be used: {error}; {_ADVICE}") from error
    return interpreter


def _codebooks(content: bytes, *, origin: Path) -> _Frames:
    """Codebooks [46, 16, 64]: what the quantiser's model makes of every code of every stage alone."""
    interpreter = _interpreter(content, str(origin))
    if "decode" not in interpreter.get_signature_list():
        raise ConfigError(f"{origin} is not Lyra's quantiser: it cannot decode; {_ADVICE}")
    decode = interpreter.get_signature_runner("decode")
    codebooks = np.empty((_MAX_STAGES, _ENTRIES, _LATENTS), np.float32)
    for stage in range(_MAX_STAGES):
        codes = np.full((_MAX_STAGES, 1, 1), -1, np.int32)  # -1: the stage adds nothing
        for code in range(_ENTRIES):
            codes[stage] = code
            codebooks[stage, code] = decode(encoding_indices=codes)["output_0"].reshape(_LATENTS)
    return codebooks


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {_ADVICE}") from error


def _require_lanes(lanes: int, networks: list[_Network]) -> None:
    if lanes != len(networks):
        raise DataError(f"the stream has {len(networks)} lanes, got {lanes}; begin another stream for others")
