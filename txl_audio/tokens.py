"""What a stream of symbols is: the spec, the codec and vocabulary contracts, and the error types.

Shape letters used across the package: B lanes, T frames, P or K symbols per frame, V vocabulary,
N samples or symbols, D model width, H heads, M memory frames.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # the command line's --help should not wait for PyTorch
    from pathlib import Path

    import numpy as np
    import torch

Modality = Literal["waveform", "codes", "text"]

IGNORE = -1
"""Target value of a position that is not scored (padding). It lies outside every vocabulary."""


class TxlError(ValueError):
    """Base of every error a user can cause. Its message says what was got, expected and what to do."""


class ConfigError(TxlError):
    """A configuration that cannot be used."""


class DataError(TxlError):
    """A file, folder or set that cannot be read as what it should be."""


class SpecError(TxlError):
    """Two parts that disagree about what a symbol is."""


class CheckpointError(TxlError):
    """A run folder or weight file that cannot be loaded."""


@dataclass(frozen=True)
class TokenSpec:
    """What one stream of symbols is. It travels in shards, checkpoints and codecs.

    A frame is `symbols_per_frame` symbols, each in [0, vocab_size). Symbol id `vocab_size` is the
    start symbol: it stands before a document in the *inputs* of audio streams, never in the data.

    Attributes:
        modality: `waveform` (consecutive samples), `codes` (codebook indices) or `text`.
        vocab_size: V.
        symbols_per_frame: K; the core takes one step per frame.
        frame_rate_hz: frames per second of audio, 0.0 for text.
        sample_rate_hz: samples per second of audio, 0 for text.
        name: codec or vocabulary.
        settings_hash: hash of everything else that changes what a symbol means.
        stage: hash of what a model computes beside the symbols before any network runs (a codec's causal
            stage); empty in data and for models without.
        delay_frames: how many steps later than the place before it a model reads each place of a frame
            (MusicGen's delay pattern); 0 in data and where frames are read as they are.
        text_size: how many of the V symbols, the last, are of text and marks beside a codec's codes. They
            stand alone in the first place of a frame, whose others hold the start symbol: nothing. In order:
            mark of the end, characters, marks before sound and before text; see `data.transcripts`.
        text_hash: of the vocabulary of that text.
    """

    modality: Modality
    vocab_size: int
    symbols_per_frame: int
    frame_rate_hz: float
    sample_rate_hz: int
    name: str
    settings_hash: str
    stage: str = ""
    delay_frames: int = 0
    text_size: int = 0
    text_hash: str = ""

    @property
    def codes(self) -> int:
        """Symbols of the codec: V without those of text."""
        return self.vocab_size - self.text_size

    @property
    def spoken(self) -> range:
        """What sound goes on with, beside text: a code, or the mark of the end."""
        return range(self.codes + 1)

    @property
    def written(self) -> range:
        """What text goes on with, beside codes: the mark of the end, or a character."""
        return range(self.codes, self.vocab_size - 2)

    @property
    def start_symbol(self) -> int:
        """Input id that stands for "nothing before": V."""
        return self.vocab_size

    @property
    def scores_first(self) -> bool:
        """Whether the first symbol of a document is predicted (audio) or only context (text).

        Text follows the language-modelling papers: targets are the *next* symbols, so a document
        of one token has no target.
        """
        return self.modality != "text"

    @property
    def symbol_rate_hz(self) -> float:
        """Symbols per second of audio, 0.0 for text."""
        return self.frame_rate_hz * self.symbols_per_frame

    @property
    def bit_rate(self) -> float:
        """Bits per second of audio, log2 of the number of codes for each symbol; 0.0 for text."""
        return self.symbol_rate_hz * math.log2(self.codes)

    def framed(self, symbols_per_frame: int) -> TokenSpec:
        """Regroups a waveform stream into frames of P samples.

        Only samples can be regrouped: they are one sequence. Raises SpecError for other streams.
        """
        if symbols_per_frame == self.symbols_per_frame:
            return self
        if self.modality != "waveform":
            raise SpecError(
                f"frames of {symbols_per_frame} symbols were asked of a {self.modality} stream "
                f"({self.name}), which has {self.symbols_per_frame} a frame; only waveform streams "
                "can be regrouped"
            )
        if symbols_per_frame < 1:
            raise SpecError(f"a frame needs at least 1 symbol, got {symbols_per_frame}")
        rate = self.symbol_rate_hz / symbols_per_frame
        return replace(self, symbols_per_frame=symbols_per_frame, frame_rate_hz=rate)

    def staged(self, stage: str) -> TokenSpec:
        """The same symbols for a model with this stage."""
        return replace(self, stage=stage)

    def delayed(self, delay_frames: int) -> TokenSpec:
        """The same symbols for a model that reads them with this delay.

        Raises SpecError where they are no codes of a neural codec.
        """
        if delay_frames and self.modality != "codes":
            raise SpecError(
                f"delay_frames is {delay_frames}, but only codes can be delayed, got "
                f"{self.name} ({self.modality}); set it to 0"
            )
        return replace(self, delay_frames=delay_frames)

    @property
    def stored(self) -> TokenSpec:
        """The same symbols as data hold them, without what a model does with them."""
        return replace(self, stage="", delay_frames=0)

    @property
    def sound(self) -> TokenSpec:
        """What the codec of these symbols has as its spec: only sound, as it is stored."""
        return replace(self.stored, vocab_size=self.codes, text_size=0, text_hash="")

    def with_text(self, size: int, text_hash: str) -> TokenSpec:
        """Codes beside `size` symbols of text and marks. Raises SpecError where they are no codes."""
        if self.modality != "codes":
            raise SpecError(
                f"text beside {self.modality} ({self.name}) is not supported; encode the recordings with a "
                "neural codec"
            )
        return replace(self.sound, vocab_size=self.codes + size, text_size=size, text_hash=text_hash)

    def require(self, other: TokenSpec, *, here: str, there: str) -> None:
        """Raises SpecError naming both origins and the differing fields unless the specs agree."""
        mine, theirs = asdict(self), asdict(other)
        different = [f.name for f in fields(self) if mine[f.name] != theirs[f.name]]
        if different:
            what = ", ".join(f"{n}: {mine[n]!r} != {theirs[n]!r}" for n in different)
            advice = (
                "prepare the data again with the model's codec, or use a model trained on this data"
                if self.modality != other.modality or UNNAMED not in (self.name, other.name)
                else "the model was imported without a vocabulary: prepare the text as its authors did, put "
                "the vocabulary.json of that folder beside the model's config.json and import it again"
            )
            raise SpecError(f"{here} and {there} hold different symbols ({what}); {advice}")

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, object], *, origin: str) -> TokenSpec:
        """Reads what `to_json` wrote. Raises SpecError naming `origin` and the fields that differ."""
        names = {f.name for f in fields(cls)}
        if set(value) | {f.name for f in fields(cls) if f.default is not MISSING} != names:
            raise SpecError(
                f"{origin}: token spec has fields {sorted(value)}, expected {sorted(names)}; "
                "it was written by another version, prepare it again"
            )
        return cls(**value)  # pyright: ignore[reportArgumentType]


def settings_hash(settings: Mapping[str, object]) -> str:
    """Short stable hash of a JSON-able mapping."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


UNNAMED = "ids"
"""Name of text symbols of which only the number is known."""


def unnamed_text_spec(vocab_size: int) -> TokenSpec:
    """Text symbols of which only the number is known."""
    return TokenSpec("text", vocab_size, 1, 0.0, 0, UNNAMED, settings_hash({"size": vocab_size}))


class StreamDecoder(Protocol):
    """Turns frames into samples as they come. One per stream; it owns its state."""

    def push(self, codes: torch.Tensor) -> torch.Tensor:
        """codes [B, T, K] -> pcm [B, n] float32, n >= 0 samples that are final."""
        ...

    def flush(self) -> torch.Tensor:
        """Samples still held back, pcm [B, n]. The decoder is finished afterwards."""
        ...


class StreamEncoder(Protocol):
    """Turns samples into frames as they come. One per stream; it owns its state.

    Codecs that need no later samples have one: `Codec.encode` of the whole gives the same frames.
    """

    def push(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [B, n] float in [-1, 1] -> codes [B, T, K] int64 of the T >= 0 frames that are complete."""
        ...

    def flush(self) -> torch.Tensor:
        """The frame that is not complete, filled up: codes [B, 0 or 1, K]. The encoder is finished then."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Audio to frames of symbols and back."""

    @property
    def spec(self) -> TokenSpec: ...

    def encode(self, pcm: torch.Tensor) -> torch.Tensor:
        """pcm [B, N] float in [-1, 1] -> codes [B, T, K] int64 with T = ceil(N / samples per frame)."""
        ...

    def decode(self, codes: torch.Tensor, *, samples: int | None = None) -> torch.Tensor:
        """codes [B, T, K] -> pcm [B, N] float32; exactly `samples` long where given."""
        ...

    def stream_decoder(self) -> StreamDecoder: ...


class TextEncoder(Protocol):
    """Turns a text into symbols piece by piece, in bounded memory."""

    unknown: int
    """Words so far that the vocabulary lacks, encoded as its unknown word."""

    def push(self, text: str | bytes, *, complete: bool = True) -> np.ndarray:
        """The next lines -> ids [N] int32. `complete` as in `Vocabulary.encode`: false, and cut after
        white space, where the last line goes on in the next piece."""
        ...


class TextDecoder(Protocol):
    """Turns symbols into text as they come. One per text; it owns its state."""

    def push(self, ids: torch.Tensor) -> str:
        """ids of any shape, in order -> the text that is final."""
        ...

    def flush(self) -> str:
        """Text still held back. The decoder is finished afterwards."""
        ...


@runtime_checkable
class Vocabulary(Protocol):
    """Text to symbols and back."""

    @property
    def spec(self) -> TokenSpec: ...

    @property
    def symbols(self) -> Sequence[int] | Sequence[str]:
        """The symbols in id order: byte values, characters or words."""
        ...

    def encode(self, text: str | bytes, *, complete: bool = True) -> torch.Tensor:
        """text -> ids [N] int64.

        `complete` is false for a prompt, which text is to follow: a last line without a newline then
        gets no mark of its end.
        """
        ...

    def decode(self, ids: torch.Tensor) -> str:
        """ids [N] -> text."""
        ...

    def stream_encoder(self) -> TextEncoder: ...

    def stream_decoder(self) -> TextDecoder: ...

    def save(self, path: str | Path) -> None: ...
