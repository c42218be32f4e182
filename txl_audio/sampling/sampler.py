"""Symbols and sound, made while they are heard: constant memory, constant time per sample.

Shapes: B lanes, K symbols per frame, V vocabulary, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from txl_audio.model.sequence import SequenceDecodeState, SequenceModel
from txl_audio.tokens import Codec, ConfigError, SpecError


@dataclass(frozen=True)
class Filters:
    """How a symbol is drawn. Temperature 0 takes the most likely one.

    top_k keeps the k most likely symbols, top_p the fewest whose probabilities reach p.
    Raises ConfigError for values that cannot be meant.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}, expected a number from 0 up")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}, expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected more than 0 and at most 1")

    def draw(self, log_probs: Tensor, generator: torch.Generator) -> Tensor:
        """log_probs [B, V] -> symbols [B] int64."""
        if self.temperature == 0:
            return log_probs.argmax(-1)
        scores = log_probs / self.temperature
        if self.top_k is not None and self.top_k < scores.size(-1):
            best, order = scores.topk(self.top_k)
            scores = torch.full_like(scores, float("-inf")).scatter(-1, order, best)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = scores.softmax(-1).sort(descending=True)
            # A symbol stays while those before it have not yet reached p; the first always stays.
            cut = (ordered.cumsum(-1) - ordered) >= self.top_p
            scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), float("-inf"))
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


class Sampler:
    """Continues B streams frame by frame. Knows neither files nor sockets.

    Args:
        model: put into eval mode.
        prompt: [B, N] symbols to continue; None starts B = `lanes` streams from nothing. Text needs
            at least one symbol. A prompt that ends inside a frame is completed by the model.
        seed: the same seed, prompt and filters give the same symbols.

    Attributes:
        filters: may be exchanged while sampling.
        nats: [B, K] float32, what the newest frame cost under the unfiltered model; 0 for symbols
            that came from the prompt.

    Raises SpecError for a prompt of another shape, with symbols outside the vocabulary, or with none
    where one is needed.
    """

    def __init__(
        self,
        model: SequenceModel,
        *,
        lanes: int = 1,
        prompt: Tensor | None = None,
        filters: Filters | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.filters = model.eval(), filters or Filters()
        self.device = next(model.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        spec = model.spec
        prompt = torch.empty(lanes, 0, dtype=torch.int64) if prompt is None else prompt
        if prompt.dim() != 2 or prompt.is_floating_point():
            raise SpecError(
                f"the prompt is {prompt.dtype} of shape {list(prompt.shape)}, expected integers of shape "
                "[lanes, symbols]"
            )
        prompt = prompt.long()
        if prompt.numel() and not 0 <= int(prompt.min()) <= int(prompt.max()) < spec.vocab_size:
            raise SpecError(
                f"the prompt has symbols {int(prompt.min())} to {int(prompt.max())}, "
                f"expected 0 to {spec.vocab_size - 1}"
            )
        prompt = prompt.to(self.device)
        lanes, symbols = prompt.shape
        whole = symbols // spec.symbols_per_frame * spec.symbols_per_frame
        line = prompt[:, :whole].reshape(lanes, -1, spec.symbols_per_frame)
        if spec.scores_first:
            line = torch.cat([line.new_full((lanes, 1, spec.symbols_per_frame), spec.start_symbol), line], 1)
        elif whole == 0:
            raise SpecError("a text model needs a prompt of at least one symbol, got none")
        self._begun = prompt[:, whole:]
        self.nats = torch.zeros(lanes, spec.symbols_per_frame, device=self.device)
        self.state, self._frame = self._prefill(line)

    @torch.no_grad()
    def _prefill(self, line: Tensor) -> tuple[SequenceDecodeState, Tensor]:
        """Feeds all frames [B, T, K] but the last: whole segments at once, the rest step by step."""
        length = self.model.core.config.segment_len
        whole = (line.size(1) - 1) // length * length
        state = self.model.initial_state(line.size(0))
        for at in range(0, whole, length):
            _, _, state = self.model.encode(line[:, at : at + length], state)
        decode = self.model.decode_state(state)
        for at in range(whole, line.size(1) - 1):
            self.model.step_(line[:, at], decode)
        return decode, line[:, -1]

    @torch.inference_mode()
    def next_frame(self) -> Tensor:
        """Symbols [B, K] of the next frame."""
        hidden = self.model.step_(self._frame, self.state)
        symbols, self._begun = self._begun, self._begun[:, :0]
        self.nats = torch.zeros_like(self.nats)
        for place in range(symbols.size(1), self.model.spec.symbols_per_frame):
            log_probs = self.model.log_probs(hidden, self.state, symbols)
            symbol = self.filters.draw(log_probs, self.generator)[:, None]
            self.nats[:, place] = -log_probs.gather(-1, symbol)[:, 0]
            symbols = torch.cat([symbols, symbol], dim=1)
        self._frame = symbols
        return symbols

    def pcm(self, codec: Codec, *, samples: int, chunk_samples: int = 1600) -> Iterator[Tensor]:
        """Chunks of sound [B, n], `samples` in all, as soon as each is final.

        What the prompt had begun of the first frame is left out: the sound continues the prompt.
        Raises SpecError where codec and model disagree.
        """
        self.model.spec.require(codec.spec, here="the model", there="the codec")
        decoder = codec.stream_decoder()
        skip, left = self._begun.size(1), samples
        held: list[Tensor] = []
        while left > 0:
            pcm = decoder.push(self.next_frame()[:, None])
            pcm, skip = pcm[:, skip:], max(0, skip - pcm.size(1))
            held.append(pcm[:, :left])
            left -= held[-1].size(1)
            if left == 0 or sum(part.size(1) for part in held) >= chunk_samples:
                yield torch.cat(held, dim=1)
                held = []
