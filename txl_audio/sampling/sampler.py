"""Symbols and sound, made while they are heard: constant memory, constant time per sample.

Shapes: B lanes, K symbols per frame, N samples.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from txl_audio import runtime
from txl_audio.model.sequence import SequenceDecodeState, SequenceModel
from txl_audio.sampling import graphed
from txl_audio.sampling.compiled import Compiled, Weights, unsupported
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.graphed import Graphed
from txl_audio.sampling.stepwise import FREE, Stepper, Stepwise
from txl_audio.tokens import Codec, ConfigError, SpecError, TokenSpec

Backend: TypeAlias = Literal["auto", "torch", "compiled", "graph"]

FIRST_CHUNK_S = 0.02
"""Sound comes in longer pieces after this much of it, so that it begins at once."""


def named_backend(model: SequenceModel, backend: Backend, weights: Weights = "float32") -> str:
    """What samples from a model: `auto` resolved, the device, and the weights where they are not its own.

    Raises ConfigError for a backend that the model does not have.
    """
    device = next(model.parameters()).device
    uncompiled, unrecorded = unsupported(model, weights), graphed.unsupported(model)
    if backend == "auto":
        backend = "torch" if uncompiled else "compiled"
        if device.type == "cuda" and not unrecorded:
            backend = "graph"
    if backend == "compiled" and uncompiled:
        raise ConfigError(f"the sampler cannot be compiled: {uncompiled}; use backend torch")
    if backend == "graph" and unrecorded:
        raise ConfigError(f"the sampler cannot be recorded as a graph: {unrecorded}; use backend torch")
    if backend != "compiled" and weights != "float32":
        raise ConfigError(
            f"backend {backend} samples with the model's own weights, got {weights}; use float32"
        )
    return f"{backend} {device}" if weights == "float32" else f"{backend} {device} {weights}"


class Sampler:
    """Continues B streams frame by frame. Knows neither files nor sockets.

    Args:
        model: put into eval mode.
        prompt: [B, N] symbols to continue; None starts B = `lanes` streams from nothing. Text needs
            at least one symbol. A prompt that ends inside a frame is completed by the model. Beside text,
            places of a frame hold the start symbol, as in the data.
        writes: goes on with text instead of sound; for streams that have both.
        seed: the same seed, prompt and filters give the same symbols, whatever the backend; what a lane
            gets does not depend on the others.
        backend: `compiled` runs on a CPU without Python, `graph` is recorded for a GPU, `torch` runs
            everywhere; `auto` takes the fast one of the model's device where the model has it.
        weights: of the compiled backend; see `Compiled`.
        tell: is told before something takes long.
        going_on: is called between segments of the prompt; what it raises ends the reading.

    Attributes:
        filters: may be exchanged while sampling; ConfigError where they have tails and the stream is no
            waveform.
        nats: [B, K] float32, what the newest frame cost under the unfiltered model; 0 for symbols
            that came from the prompt.
        backend: what runs, as `named_backend` says.

    Raises SpecError for a prompt of another shape, with symbols outside the vocabulary, or with none
    where one is needed; ConfigError for a backend that the model does not have.
    """

    def __init__(
        self,
        model: SequenceModel,
        *,
        lanes: int = 1,
        prompt: Tensor | None = None,
        writes: bool = False,
        filters: Filters | None = None,
        seed: int = 0,
        backend: Backend = "auto",
        weights: Weights = "float32",
        tell: Callable[[str], object] = lambda _: None,
        going_on: Callable[[], object] = lambda: None,
    ) -> None:
        self.model, self.filters = model.eval(), filters or Filters()
        self.device = next(model.parameters()).device
        self.backend = named_backend(model, backend, weights)
        spec = model.spec
        prompt = torch.empty(lanes, 0, dtype=torch.int64) if prompt is None else prompt
        if prompt.dim() != 2 or prompt.is_floating_point():
            raise SpecError(
                f"the prompt is {prompt.dtype} of shape {list(prompt.shape)}, expected integers of shape "
                "[lanes, symbols]"
            )
        highest = spec.start_symbol if spec.text_size else spec.vocab_size - 1
        if prompt.numel() and not 0 <= int(prompt.min()) <= int(prompt.max()) <= highest:
            raise SpecError(
                f"the prompt has symbols {int(prompt.min())} to {int(prompt.max())}, expected 0 to {highest}"
            )
        if writes and not spec.text_size:
            raise SpecError(f"symbols of {spec.name} have no text beside them, so none can be written")
        lanes = len(prompt)
        line, self._given = _steps(prompt.long().to(self.device), spec)
        if line.size(1) == 0:
            raise SpecError("a text model needs a prompt of at least one symbol, got none")
        # What goes on: one free symbol and nothing beside it, or a whole frame of them.
        self._rest = torch.full_like(line[:, :1], spec.start_symbol if writes else FREE)
        self._rest[..., 0] = FREE
        if writes:
            self._given[..., 1:] = self._given[..., 1:].where(self._given[..., 1:] != FREE, spec.start_symbol)
        among = None
        if spec.text_size:
            among = spec.written if writes else spec.spoken
        self._generators = [np.random.default_rng((seed % 2**64, lane)) for lane in range(lanes)]
        self._pending = line[:, :0]
        self.nats = torch.zeros(lanes, spec.symbols_per_frame, device=self.device)
        # Whole segments at once, the rest frame by frame; the newest frame waits for the first step.
        length = model.core.config.segment_len
        at = (line.size(1) - 1) // length * length
        with _notice(tell):
            self.state = self._after(line[:, : at + 1], going_on)
            self._stepper: Stepper = {
                "torch": lambda: Stepwise(model, among),
                "graph": lambda: Graphed(model, among, lanes=lanes),
                "compiled": lambda: Compiled(model, self.state, among, weights=weights),
            }[self.backend.split()[0]]()
        self._frame = line[:, at]
        if rest := line.size(1) - 1 - at:
            unused = torch.zeros(lanes, rest, spec.symbols_per_frame, dtype=torch.float64)
            self._stepper.run(self.state, self._frame, line[:, at + 1 :], unused, self.filters)
            self._frame = line[:, -1]

    @torch.no_grad()
    def _after(self, line: Tensor, going_on: Callable[[], object]) -> SequenceDecodeState:
        """Where streams stand after all frames [B, T, K] but the last, which are whole segments."""
        length = self.model.core.config.segment_len
        state = self.model.initial_state(line.size(0))
        for at in range(0, line.size(1) - 1, length):
            going_on()
            inputs, targets = line[:, at : at + length], line[:, at + 1 : at + length + 1]
            *_, state = self.model.encode(inputs, targets, state)
        return self.model.decode_state(state)

    def next_frame(self) -> Tensor:
        """Symbols [B, K] of the next frame."""
        return self.next_frames(1)[:, 0]

    def next_frames(self, count: int) -> Tensor:
        """Symbols [B, count, K] of the next frames; many at once cost less than one by one."""
        places, delay = self.model.spec.symbols_per_frame, self.model.spec.delay_frames
        if self.filters.tails and self.model.spec.modality != "waveform":
            raise ConfigError(
                f"tails is {self.filters.tails}, but symbols of {self.model.spec.name} are in no order of "
                "amplitude; set it to 0, or use top_p"
            )
        # Of delayed frames the last place comes some steps after the first.
        steps = count + (places - 1) * delay - self._pending.size(1)
        uniforms = torch.from_numpy(np.stack([g.random((steps, places)) for g in self._generators]))
        uniforms = self.filters.between_tails(uniforms)
        rest = self._rest.expand(-1, max(0, steps - self._given.size(1)), -1)
        given = torch.cat([self._given[:, :steps], rest], dim=1)
        made, self.nats = self._stepper.run(self.state, self._frame, given, uniforms, self.filters)
        self._given, self._frame = self._given[:, steps:], made[:, -1]
        made = torch.cat([self._pending, made], dim=1)
        self._pending = made[:, count:]
        return torch.stack([made[:, k * delay : k * delay + count, k] for k in range(places)], dim=-1)

    def pcm(self, codec: Codec, *, samples: int, chunk_samples: int = 1600) -> Iterator[Tensor]:
        """Chunks of sound [B, n], `samples` in all, as soon as each is final; a short one first.

        What the prompt had begun of the first frame is left out: the sound continues the prompt. Where text
        stands beside the codes it ends with the mark for it, of the first lane to come to its own.
        Raises SpecError where codec and model disagree.
        """
        spec = self.model.spec
        spec.sound.require(codec.spec, here="the model", there="the codec")
        decoder = codec.stream_decoder()
        begun = 0 if spec.modality == "codes" else int((self._given[0] != FREE).sum())
        skip, left = begun, samples
        frame_samples = codec.spec.sample_rate_hz / codec.spec.frame_rate_hz
        wanted = min(chunk_samples, round(FIRST_CHUNK_S * codec.spec.sample_rate_hz))
        ended = False
        while left > 0 and not ended:
            count = max(1, math.ceil((min(wanted, left) + skip) / frame_samples))
            frames = self.next_frames(count)
            if spec.text_size:
                marks = (frames[..., 0] >= spec.codes).any(0)
                ended = bool(marks.any())
                frames = frames[:, : int(marks.int().argmax())] if ended else frames
            pcm = decoder.push(frames) if frames.size(1) else torch.empty(len(frames), 0)
            if ended:
                pcm = torch.cat([pcm, decoder.flush()], dim=1)
            pcm, skip = pcm[:, skip:], max(0, skip - pcm.size(1))
            pcm = pcm[:, :left]
            left -= pcm.size(1)
            wanted = chunk_samples
            if pcm.size(1):
                yield pcm


def _steps(prompt: Tensor, spec: TokenSpec) -> tuple[Tensor, Tensor]:
    """The steps that a prompt [B, N] is read in: those known whole, [B, S, K], the start of a document before
    them where it has one; and the following ones of which some symbols are known, the others FREE."""
    places, symbols = spec.symbols_per_frame, prompt.size(1)
    if not spec.scores_first:
        return prompt[..., None], prompt[:, :0, None]
    place = torch.arange(places)
    last = -(-symbols // places) + (places - 1) * spec.delay_frames
    frame = torch.arange(-1, last)[:, None] - spec.delay_frames * place
    index = frame * places + place
    steps = prompt.new_full((len(prompt), *index.shape), FREE)
    steps[:, frame < 0] = spec.start_symbol
    exists = (frame >= 0) & (index < symbols)
    steps[:, exists] = prompt[:, index[exists]]
    whole = int((index < symbols).all(1).sum())
    return steps[:, :whole], steps[:, whole:]


@contextmanager
def _notice(tell: Callable[[str], object]) -> Iterator[None]:
    """Says so where what is done takes long, and is not interrupted in the middle of compiling."""
    timer = threading.Timer(2.0, tell, ("preparing the sampler; its first use on a machine compiles it",))
    timer.start()
    try:
        with runtime.interrupts_held():
            yield
    finally:
        timer.cancel()
