"""What a server serves: models that were named at its start, and what is made with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from txl_audio import recipe
from txl_audio.data.transcripts import Transcripts
from txl_audio.evaluate import EvaluateConfig, Totals, score_pieces
from txl_audio.model.sequence import SINGLE, SequenceModel
from txl_audio.recipe.config import SampleConfig
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Backend, Sampler, named_backend
from txl_audio.sampling.sound import int16, symbols_of
from txl_audio.sampling.text import newline
from txl_audio.serve.protocol import Drawing, Limits, Refusal, Request
from txl_audio.serve.turns import Piece
from txl_audio.tokens import ConfigError, Vocabulary

CHUNK_S = 0.1
"""Sound that is made in one turn, but for the first piece, see `Sampler.pcm`; and what any turn may take."""

_MEASURED_S = 1.0

GoOn: TypeAlias = Callable[[], object]
"""Is called while something long goes on, and ends it by raising."""


class ServedModel:
    """One stream of a model, ready to be sampled.

    Args:
        name: what clients call it.
        sample, evaluate: of its run, how it is sampled and scored where a client says nothing else.
        vocabulary: of a text model.
        transcripts: of a model that says texts. codec_weights: see `StreamSettings`.

    Attributes:
        backend: as `sampling.sampler.named_backend` says.
        real_time_factor: seconds that a second of sound takes where all threads of the server make some;
            None before `warm_up`, and of text.
    """

    def __init__(
        self,
        name: str,
        model: SequenceModel,
        *,
        sample: SampleConfig | None = None,
        evaluate: EvaluateConfig | None = None,
        vocabulary: Vocabulary | None = None,
        transcripts: Transcripts | None = None,
        codec_weights: str | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.name, self.model = name, model.eval()
        self.vocabulary, self.transcripts = vocabulary, transcripts
        self.sample = sample or SampleConfig()
        self.evaluate = (evaluate or EvaluateConfig()).model_copy(update={"dynamic": None})
        self.kind = "text" if model.spec.modality == "text" else "audio"
        if vocabulary is not None:
            model.spec.require(vocabulary.spec, here=f"the model {name}", there="its vocabulary")
        self.codec = recipe.codec_for_sound(model.spec, codec_weights) if self.kind == "audio" else None
        self.sample_rate_hz = self.codec.spec.sample_rate_hz if self.codec else 0
        self._how: Any = {"backend": backend, "weights": self.sample.weights_for(model, backend)}
        self.backend = named_backend(model, **self._how)
        self.real_time_factor: float | None = None

    def warm_up(self, workers: int = 1, tell: Callable[[str], object] = lambda _: None) -> None:
        """Compiles or loads what is needed; measures how fast `workers` threads are together, and scoring."""
        filters = self.filters(Drawing())
        if self.vocabulary is not None:
            self.sampler(filters, newline(self.vocabulary), seed=0, tell=tell).next_frames(1)
            return
        samplers = [self.sampler(filters, None, seed=seed, tell=tell) for seed in range(workers)]
        # Cores may share their arithmetic or their caches: one thread alone would promise too much.
        with ThreadPoolExecutor(workers) as pool:
            self.real_time_factor = max(pool.map(self._speed, samplers))
        self._score_in_turns()

    def _speed(self, sampler: Sampler) -> float:
        """Seconds that a second of sound takes."""
        assert self.codec is not None
        decoder = self.codec.stream_decoder()
        turns = round(_MEASURED_S / CHUNK_S)
        frames = math.ceil(CHUNK_S * self.model.spec.frame_rate_hz)
        begun = 0.0
        for turn in range(-turns // 4, turns):  # first the memory fills
            if turn == 0:
                begun = time.perf_counter()
            codes = sampler.next_frames(frames)
            decoder.push(codes.clamp(max=self.model.spec.codes - 1))  # a mark for the end is no code
        return (time.perf_counter() - begun) * self.model.spec.frame_rate_hz / (turns * frames)

    def _score_in_turns(self) -> None:
        """Shortens the segments of scoring to what fits into a turn, where their length changes no result."""
        length = self.evaluate.view(self.model).core.config.segment_len
        pieces = self._scores(np.zeros(3 * length * self.model.spec.symbols_per_frame, np.int64))
        took_s = 0.0
        for _ in range(3):  # the first loads what is needed, and has no memory yet
            began = time.perf_counter()
            next(pieces, None)
            took_s = time.perf_counter() - began
        window = self.evaluate.window or self.model.core.config.window
        if self.evaluate.segment_len is None and window != "segment" and took_s > CHUNK_S:
            shorter = {"segment_len": max(1, int(length * CHUNK_S / took_s))}
            self.evaluate = self.evaluate.model_copy(update=shorter)

    def filters(self, drawing: Drawing) -> Filters:
        """The model's own, with what a client said instead."""
        given = {name: getattr(drawing, name) for name in Drawing.model_fields}
        return self.sample.filters(self.model.spec, **given)

    def sampler(
        self,
        filters: Filters,
        prompt: torch.Tensor | None,
        *,
        seed: int,
        tell: Callable[[str], object] = lambda _: None,
        going_on: GoOn = lambda: None,
    ) -> Sampler:
        """Continues a prompt [N] of symbols, or begins from nothing; `going_on` as `Sampler` has it."""
        line = None if prompt is None else prompt[None]
        return Sampler(
            self.model, prompt=line, filters=filters, seed=seed, tell=tell, going_on=going_on, **self._how
        )

    def scores(self, pcm: np.ndarray) -> Iterator[Piece]:
        """Totals of sound [N] float32, segment by segment."""
        assert self.codec is not None
        return self._scores(symbols_of(pcm, self.codec))  # not in a turn: of a neural codec it takes long

    def _scores(self, symbols: np.ndarray) -> Iterator[Piece]:
        for nats in score_pieces(self.model, symbols, self.evaluate):
            yield Piece(Totals(nats.double().sum().item(), nats.numel()), nats.numel())

    def facts(self) -> dict[str, Any]:
        """What clients are told of it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "sample_rate_hz": self.sample_rate_hz,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "temperature": self.sample.temperature,
            "top_k": self.sample.top_k,
            "top_p": self.sample.top_p,
            "backend": self.backend,
            "real_time_factor": self.real_time_factor,
            "takes_text": self.kind == "text" or self.transcripts is not None,
            "takes_audio": self.kind == "audio",
        }


class Generation:
    """What one client asked of a model.

    Args:
        prompt: sound to continue, [N] float32 at the model's rate.

    Attributes:
        filters: may be exchanged while it is made; what comes after uses them.

    Raises Refusal where the model or the limits do not allow it.
    """

    def __init__(
        self, model: ServedModel, request: Request, limits: Limits, prompt: np.ndarray | None = None
    ) -> None:
        self.model, self.request, self.prompt = model, request, prompt
        other = {"audio": ("tokens",), "text": ("seconds",)}[model.kind]
        if model.kind == "audio" and model.transcripts is None:
            other = ("text", *other)
        unfit = [name for name in other if getattr(request, name) is not None]
        if prompt is not None and model.kind == "text":
            unfit.append("an audio prompt")
        if unfit:
            raise Refusal(
                "unsupported", f"{model.name} makes {model.kind} and does not take {unfit[0]}; leave it out"
            )
        self.seconds = limits.stream_s if request.seconds is None else request.seconds
        self.tokens = limits.stream_tokens if request.tokens is None else request.tokens
        if self.seconds > limits.stream_s:
            raise Refusal("too_long", f"got {self.seconds:g} seconds, at most {limits.stream_s:g} are made")
        if self.tokens > limits.stream_tokens:
            raise Refusal("too_long", f"got {self.tokens} tokens, at most {limits.stream_tokens} are made")
        self.filters = model.filters(request)

    @property
    def prompt_samples(self) -> int:
        return 0 if self.prompt is None else len(self.prompt)

    def prepare(self, going_on: GoOn) -> Iterator[Piece]:
        """Reads the prompt. Pieces are s16le bytes, or text; TxlError where the prompt cannot be read."""
        return self._sound(going_on) if self.model.codec is not None else self._text(going_on)

    def _sound(self, going_on: GoOn) -> Iterator[Piece]:
        model, codec = self.model, self.model.codec
        assert codec is not None
        prompt = np.empty(0, np.int64) if self.prompt is None else symbols_of(self.prompt, codec)
        if model.transcripts is not None:
            text = model.transcripts.speak_prompt(self.request.text or "")
            prompt = np.concatenate([text.reshape(-1), prompt])
        sampler = model.sampler(
            self.filters, torch.from_numpy(prompt), seed=self.request.seed, going_on=going_on
        )

        def pieces() -> Iterator[Piece]:
            rate = model.sample_rate_hz
            chunk = round(CHUNK_S * rate / max(1.0, model.real_time_factor or 1.0))
            for pcm in sampler.pcm(codec, samples=round(self.seconds * rate), chunk_samples=chunk):
                data = int16(pcm[0].cpu().numpy()).astype("<i2").tobytes()
                yield Piece(data, pcm.size(1), pcm.size(1) / rate)
                sampler.filters = self.filters

        return pieces()

    def _text(self, going_on: GoOn) -> Iterator[Piece]:
        vocabulary = self.model.vocabulary
        assert vocabulary is not None
        start = vocabulary.encode(self.request.text or "", complete=False)
        if not len(start):
            start = newline(vocabulary)
        sampler = self.model.sampler(self.filters, start, seed=self.request.seed, going_on=going_on)
        decoder = vocabulary.stream_decoder()
        decoder.push(start)

        def pieces() -> Iterator[Piece]:
            left, count = self.tokens, 1
            while left:
                count = min(left, count)
                left -= count
                sampler.filters = self.filters
                began = time.perf_counter()
                symbols = sampler.next_frames(count)[0].cpu()
                took_s = time.perf_counter() - began
                yield Piece(decoder.push(symbols), count)
                # As many as a turn has time for, found out from one on.
                count = max(1, min(2 * count, int(count * CHUNK_S / took_s)))
            yield Piece(decoder.flush(), 0)

        return pieces()


def load(runs: Sequence[str], *, device: str = "auto") -> list[ServedModel]:
    """Models of run folders, or that ship with the package; a run of several streams gives one for each.

    They are called as the folder, or FOLDER.STREAM. Raises ConfigError where two would be called the same,
    where none is given, and what `recipe.load_model` raises.
    """
    served: dict[str, ServedModel] = {}
    for run in runs:
        config, whole = recipe.load_model(run, device=device)
        folder = Path(recipe.run_folder(run).path).resolve().name
        for stream, model in whole.streams.items():
            single = stream == SINGLE
            name = folder if single else f"{folder}.{stream}"
            if name in served:
                raise ConfigError(f"two runs are called {name}; rename a folder")
            text = model.spec.modality == "text"
            vocabulary = recipe.vocabulary_of(run, None if single else stream) if text else None
            part = config.part(stream)
            speaks = "speak" in part.transcripts
            served[name] = ServedModel(
                name,
                model,
                sample=config.sample,
                evaluate=config.evaluate,
                vocabulary=vocabulary,
                transcripts=recipe.transcripts_of_run(run, config, model, "speak") if speaks else None,
                codec_weights=part.codec_weights,
            )
    if not served:
        raise ConfigError("no run to serve; give run folders, or kathleen")
    return list(served.values())


def slots_for(models: Sequence[ServedModel], workers: int) -> int:
    """How many streams of the slowest model `workers` threads keep in real time; at least 1.

    A tenth of the machine is left for all that is not sampling. A stream of text, or a score, gets no more
    time than such a stream, see `Turns`. Where all write text, one for each thread.
    """
    factors = [model.real_time_factor for model in models if model.real_time_factor is not None]
    return max(1, int(0.9 * workers / max(factors, default=0.9)))
