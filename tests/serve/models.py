"""Models that are served in tests: the real ones' rules, but sounds that cost nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.tiny import text_model, wave_model
from txl_audio.data.text import CharacterVocabulary
from txl_audio.sampling.filters import Filters
from txl_audio.serve.models import ServedModel
from txl_audio.tokens import Codec


class Noise:
    """In a sampler's place: noise of the seed, as loud as the temperature, that needs no model."""

    def __init__(self, filters: Filters, *, seed: int, gate: threading.Event) -> None:
        self.filters, self._random, self._gate = filters, np.random.default_rng(seed), gate

    def pcm(self, codec: Codec, *, samples: int, chunk_samples: int) -> Iterator[Tensor]:
        wanted = min(320, chunk_samples)
        while samples > 0:
            count, wanted = min(wanted, samples), chunk_samples
            samples -= count
            self._gate.wait()
            noise = self._random.uniform(-0.25, 0.25, (1, count)).astype(np.float32)
            yield torch.from_numpy(noise) * self.filters.temperature

    def next_frames(self, count: int) -> Tensor:
        self._gate.wait()
        return torch.from_numpy(self._random.integers(1, 11, (1, count, 1)))


class NoiseModel(ServedModel):
    """A served model whose samplers are `Noise`. While `gate` is clear, nothing is made."""

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(name, **fields, backend="torch")
        self.gate = threading.Event()
        self.gate.set()
        self.prompts: list[Tensor | None] = []

    def sampler(self, filters: Filters, prompt: Tensor | None, *, seed: int, **_: Any) -> Any:
        self.prompts.append(prompt)
        return Noise(filters, seed=seed, gate=self.gate)


def tiny(name: str = "tiny") -> NoiseModel:
    return NoiseModel(name, model=wave_model())


def letters(name: str = "letters") -> NoiseModel:
    vocabulary = CharacterVocabulary("\nabcdefghij")
    return NoiseModel(name, model=text_model(vocabulary.spec), vocabulary=vocabulary)


def expected(seed: int, samples: int, *, chunk_samples: int = 1600) -> np.ndarray:
    """int16 samples of `Noise` at temperature 1."""
    noise = Noise(Filters(), seed=seed, gate=_open())
    chunks = noise.pcm(None, samples=samples, chunk_samples=chunk_samples)  # pyright: ignore[reportArgumentType]
    return np.rint(torch.cat(list(chunks), dim=1)[0].numpy() * 32768).astype(np.int16)


def _open() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate
