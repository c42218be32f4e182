"""A stream of symbols through embedding, core and head; the memory between segments.

Shapes: B lanes, T frames, K symbols per frame, R recent symbols, W history symbols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from txl_audio.model.contracts import Context, Embedding, Head, SideStage
from txl_audio.model.memory import AnyMemory, DecodeState, Memory
from txl_audio.model.transformer import TransformerXL, Window, shallow_twin
from txl_audio.tokens import TokenSpec, TxlError

SINGLE = "main"
"""Name of the stream of a model that has only one."""


@dataclass(frozen=True)
class SequenceState:
    """Where a set of lanes stands between two segments.

    memory: the core's; recent [B, R]: symbols before the newest input frame, start symbols where
    a document had not begun; stage [B, Z]: of the codec's stage after that frame, where there is one.
    """

    memory: AnyMemory
    recent: Tensor
    stage: Tensor | None = None

    def select(self, lanes: Tensor) -> SequenceState:
        stage = None if self.stage is None else self.stage[lanes.cpu()]
        return SequenceState(self.memory.select(lanes), self.recent[lanes], stage)


@dataclass
class SequenceDecodeState:
    """A stream being sampled: the core's ring, the newest symbols [B, R + K], the stage's state [B, Z]."""

    core: DecodeState
    recent: Tensor
    stage: Tensor | None = None

    def fork(self) -> SequenceDecodeState:
        """An independent copy, for trying several continuations."""
        stage = None if self.stage is None else self.stage.clone()
        return replace(self, core=self.core.fork(), recent=self.recent.clone(), stage=stage)

    def nbytes(self) -> int:
        return self.core.nbytes() + self.recent.nbytes + (0 if self.stage is None else self.stage.nbytes)


def staged(state: SequenceState | SequenceDecodeState) -> Tensor:
    """The stage's part of a state. Raises TxlError where it has none."""
    if state.stage is None:
        raise TxlError("the model has predictors, the state is of one without; begin from initial_state")
    return state.stage


class SequenceModel(nn.Module):
    """One stream over a core. The core may be shared with other streams' models."""

    def __init__(
        self,
        spec: TokenSpec,
        *,
        embedding: Embedding,
        core: TransformerXL,
        head: Head,
        stage: SideStage | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.spec, self.embedding, self.core, self.head = spec, embedding, core, head
        self.history = max(embedding.history, head.history, spec.symbols_per_frame)

    @property
    def streams(self) -> dict[str, SequenceModel]:
        """Itself, under the name SINGLE; a JointModel has several."""
        return {SINGLE: self}

    def view(
        self,
        *,
        mem_len: int | None = None,
        segment_len: int | None = None,
        window: Window | None = None,
        clamp_len: int | None = None,
    ) -> SequenceModel:
        """This model with other settings of its core; see `TransformerXL.view`."""
        twin = shallow_twin(self)
        twin.core = self.core.view(
            mem_len=mem_len, segment_len=segment_len, window=window, clamp_len=clamp_len
        )
        return twin

    def projected(self, state: SequenceState) -> SequenceState:
        """`state` with its memory projected, for scoring without gradients; see `TransformerXL.project`."""
        if not isinstance(state.memory, Memory):
            return state
        return replace(state, memory=self.core.project(state.memory))

    def initial_state(self, lanes: int) -> SequenceState:
        """Before the first frame of every lane."""
        memory = self.core.first_memory(lanes)
        kept = self.history - self.spec.symbols_per_frame
        recent = torch.full((lanes, kept), self.spec.start_symbol, device=memory.valid.device)
        return SequenceState(memory, recent, None if self.stage is None else self.stage.initial_state(lanes))

    def nll(
        self, inputs: Tensor, targets: Tensor, state: SequenceState, reset: Tensor | None = None
    ) -> tuple[Tensor, SequenceState]:
        """One segment.

        inputs [B, T, K]: the frame before each target frame, start symbols where there is none;
        targets [B, T, K], IGNORE where not scored; reset [B, T] bool, true where a document begins.
        Returns nats [B, T, K] (0 where ignored) and the state after the segment.
        """
        if targets.shape != inputs.shape:
            raise TxlError(
                f"targets {tuple(targets.shape)} differ in shape from inputs {tuple(inputs.shape)}"
            )
        hidden, context, state = self.encode(inputs, targets, state, reset)
        return self.head.nll(hidden, context, targets), state

    def encode(
        self,
        inputs: Tensor,
        targets: Tensor,
        state: SequenceState,
        reset: Tensor | None = None,
        *,
        layer_outputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, Context, SequenceState]:
        """What the head needs of every frame: hidden [B, T, D] and its context; and the next state.

        `layer_outputs` gets what every layer of the core gives, [B, T, D] each.
        """
        if inputs.dim() != 3 or inputs.size(2) != self.spec.symbols_per_frame:
            raise TxlError(
                f"inputs have shape {tuple(inputs.shape)}, expected [lanes, frames, "
                f"{self.spec.symbols_per_frame}]"
            )
        line = torch.cat([state.recent, inputs.flatten(1)], dim=1)
        history = self._histories(line, inputs.size(1), reset)
        side = stage = None
        if self.stage is not None:
            side, stage = self.stage.run(inputs, targets, staged(state))
        seen = history[..., history.size(-1) - self.embedding.history :]
        x = self.embedding(seen, None if side is None else side[:, :, 0])
        hidden, memory = self.core(x, state.memory, reset, layer_outputs=layer_outputs)
        # The newest history without its oldest frame is what the next segment starts from.
        recent = history[:, -1, self.spec.symbols_per_frame :]
        return hidden, Context(history, targets, side), SequenceState(memory, recent, stage)

    def loss(
        self, inputs: Tensor, targets: Tensor, state: SequenceState, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor, SequenceState]:
        """(sum of nats, number of scored symbols, next state): sums, so that totals are exact."""
        nats, _, count, state = self.losses(inputs, targets, state, reset)
        return nats, count, state

    def losses(
        self,
        inputs: Tensor,
        targets: Tensor,
        state: SequenceState,
        reset: Tensor | None = None,
        *,
        layers: Sequence[int] = (),
        heard: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, SequenceState]:
        """As `loss`, with a second sum, which training minimises: (nats, objective, count, next state).

        The objective has the nats of the same targets predicted from `layers` of the core added to it.
        heard [B, T, K]: what later predictions see in place of `targets`, as `inputs` then does too.
        weights [K]: of the codebooks of a neural codec, in the objective; text beside codes has weight 1.
        """
        heard = targets if heard is None else heard
        outputs: list[Tensor] = []
        hidden, context, state = self.encode(
            inputs, heard, state, reset, layer_outputs=outputs if layers else None
        )
        each = None if weights is None else torch.where(targets < self.spec.codes, weights, 1.0)

        def weighted(nats: Tensor) -> Tensor:
            return nats.sum() if each is None else (each * nats).sum()

        nats = self.head.nll(hidden, context, targets)
        objective = weighted(nats)
        for layer in layers:
            output = self.core.dropout(self.core.final_norm(outputs[layer]))
            objective = objective + weighted(self.head.nll(output, context, targets))
        return nats.sum(), objective, (targets >= 0).sum(), state

    def _histories(self, line: Tensor, frames: int, reset: Tensor | None) -> Tensor:
        """[B, R + T K] -> [B, T, W]: the W newest symbols at each step, none older than its document."""
        history = line.unfold(1, self.history, self.spec.symbols_per_frame)
        assert history.size(1) == frames
        if reset is None or not bool(reset.any()):
            return history
        index = torch.arange(frames, device=line.device)
        begun = torch.where(reset, index, -1).cummax(dim=1).values
        # At frame t of a document that began at r, t - r + 1 of its frames are there, the newest last.
        exists = torch.where(begun >= 0, (index - begun + 1) * self.spec.symbols_per_frame, self.history)
        lag = torch.arange(self.history, 0, -1, device=line.device)
        return torch.where(lag <= exists[..., None], history, self.spec.start_symbol)

    # Sampling.

    def decode_state(self, state: SequenceState) -> SequenceDecodeState:
        """The sampling state that continues after `state`, at a segment boundary."""
        frame = state.recent.new_full(
            (state.recent.size(0), self.spec.symbols_per_frame), self.spec.start_symbol
        )
        # The first step drops this oldest frame for its own.
        recent = torch.cat([frame, state.recent], dim=1)
        if not isinstance(state.memory, Memory):
            raise TxlError("sampling continues after a plain memory; got a projected one, which only scores")
        stage = None if state.stage is None else state.stage.clone()
        return SequenceDecodeState(self.core.decode_state(state.memory), recent, stage)

    @torch.no_grad()
    def step_(self, frame: Tensor, state: SequenceDecodeState) -> Tensor:
        """The newest frame [B, K] of every lane -> hidden [B, D] that predicts the next one."""
        state.recent.copy_(torch.cat([state.recent[:, frame.size(1) :], frame], dim=1))
        newest = state.recent[:, None, state.recent.size(1) - self.embedding.history :]
        side = None
        if self.stage is not None:
            side, state.stage = self.stage.observe(frame, staged(state))
            side = side[:, None]
        return self.core.step_(self.embedding(newest, side)[:, 0], state.core)

    @torch.no_grad()
    def log_probs(self, hidden: Tensor, state: SequenceDecodeState, symbols: Tensor) -> Tensor:
        """Log-probabilities [B, V] of the symbol that follows `symbols` [B, k < K] in the next frame."""
        window = torch.cat([state.recent, symbols], dim=1)
        side = None
        if self.stage is not None:
            side, _ = self.stage.observe(symbols, staged(state))
        seen = window[:, window.size(1) - self.head.history :]
        return self.head.log_probs(hidden, seen, symbols.size(1), side)


class JointModel(nn.Module):
    """Several streams over one core: each has its embedding, head and memory, all have its weights.

    Args:
        streams: models whose cores are `core` itself or views of it (`TransformerXL.view`).
    """

    def __init__(self, core: TransformerXL, streams: Mapping[str, SequenceModel]) -> None:
        super().__init__()
        self.core = core
        self.parts = nn.ModuleDict(
            {name: nn.ModuleDict({"embedding": s.embedding, "head": s.head}) for name, s in streams.items()}
        )
        # In a tuple, which is no submodule: their parameters are those above.
        self._streams = (dict(streams),)

    @property
    def streams(self) -> dict[str, SequenceModel]:
        return self._streams[0]

    def train(self, mode: bool = True) -> JointModel:
        super().train(mode)
        for stream in self.streams.values():
            stream.train(mode)
        return self
