"""Transformer-XL: blocks with relative attention over a memory of earlier segments.

Shapes: L layers, B lanes, T frames, D model width, H heads, d head width, M memory frames,
K = M + T keys, C ring slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from txl_audio.config import validate
from txl_audio.model.attention import visible
from txl_audio.model.block import Block, BlockConfig, initialise
from txl_audio.model.memory import AnyMemory, DecodeState, Memory, ProjectedMemory
from txl_audio.model.positions import (
    AbsoluteConfig,
    AlRfouConfig,
    Positions,
    PositionsConfig,
    Relative,
    RelativeConfig,
    Shape,
    Terms,
)
from txl_audio.tokens import ConfigError, TxlError

M = TypeVar("M", bound=nn.Module)
Window: TypeAlias = Literal["segment", "same_length", "sliding"]


class CoreConfig(BlockConfig):
    """The core. Defaults are the paper's choices at a small size.

    window: which earlier frames a query sees. `segment` (the paper's): all of memory and of its own
    segment, so later queries see more. `same_length` (the authors' evaluation): the mem_len newest
    frames, itself among them. `sliding`: itself and exactly mem_len earlier ones, so that the result
    does not depend on how a stream is cut into segments.
    segment_len: frames per segment; part of the model where the result depends on it.
    first_memory: what a stream begins with: nothing, or zero vectors that are attended to (Hugging
    Face's and TensorFlow's Transformer-XL). After a reset inside a stream there is always nothing.
    """

    n_layer: int = Field(ge=1)
    mem_len: int = Field(ge=0)
    segment_len: int = Field(ge=1)
    window: Window = "segment"
    positions: PositionsConfig = RelativeConfig()
    final_norm: bool = False
    first_memory: Literal["empty", "zeros"] = "empty"

    @model_validator(mode="after")
    def _check(self) -> CoreConfig:
        at = self.positions
        if isinstance(at, AbsoluteConfig | AlRfouConfig):
            if self.mem_len > 0:
                raise ValueError(
                    f"positions {at.kind} number frames inside a segment, so a memory would carry the same "
                    f"numbers; expected mem_len 0, got {self.mem_len}"
                )
            if self.window != "segment":
                raise ValueError(f"positions {at.kind} need window segment, got {self.window}")
            if at.segment_len != self.segment_len:
                raise ValueError(
                    f"positions.segment_len is {at.segment_len}, expected segment_len {self.segment_len}"
                )
        if self.window == "same_length" and self.mem_len == 0:
            raise ValueError("window same_length shows mem_len frames, so mem_len 0 would show none")
        return self

    def build(self) -> TransformerXL:
        return TransformerXL(self)


class TransformerXL(nn.Module):
    """The core: [B, T, D] in, [B, T, D] out, memory in, memory out. It holds no state of its own."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self.config = config
        shape = Shape(config.n_layer, config.d_model, config.n_head, config.d_head)
        self.positions: Positions = config.positions.build(shape, dropout=config.dropout)
        layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.layers = cast("Sequence[Block]", layers)
        self.final_norm = nn.LayerNorm(config.d_model) if config.final_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.positions.apply(initialise)
        self.final_norm.apply(initialise)
        for name, parameter in self.positions.named_parameters(recurse=False):
            if name in ("u", "v", "r", "rows"):
                nn.init.normal_(parameter, std=0.02)

    def view(
        self,
        *,
        mem_len: int | None = None,
        segment_len: int | None = None,
        window: Window | None = None,
        clamp_len: int | None = None,
    ) -> TransformerXL:
        """This core with other settings: a twin that shares every parameter. None keeps a setting.

        Raises ConfigError where the position scheme has no such setting.
        """
        config = self.config.model_dump(mode="json")
        changes = {"mem_len": mem_len, "segment_len": segment_len, "window": window}
        config |= {name: value for name, value in changes.items() if value is not None}
        if clamp_len is not None:
            if not isinstance(self.config.positions, RelativeConfig):
                raise ConfigError(
                    f"clamp_len is {clamp_len}, but positions {self.config.positions.kind} have no distances "
                    "to clamp; leave it out"
                )
            config["positions"]["clamp_len"] = clamp_len
        twin = shallow_twin(self)
        twin.config = validate(CoreConfig, config, origin="the core as viewed")
        if clamp_len is not None:
            assert isinstance(self.positions, Relative)
            twin.positions = positions = shallow_twin(self.positions)
            positions.clamp_len = clamp_len
        return twin

    def first_memory(self, lanes: int) -> Memory:
        """Memory of a stream that has not begun."""
        c, device = self.config, next(self.parameters()).device
        memory = Memory.empty(
            n_layer=c.n_layer, lanes=lanes, mem_len=c.mem_len, d_model=c.d_model, device=device
        )
        return memory.filled() if c.first_memory == "zeros" else memory

    def forward(
        self,
        x: Tensor,
        memory: AnyMemory,
        reset: Tensor | None = None,
        *,
        layer_outputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, AnyMemory]:
        """One segment.

        x [B, T, D]; reset [B, T] bool, true where a new document begins: it and what follows see
        nothing of before. Returns hidden [B, T, D] and the memory after the segment, of the kind that
        was given; `memory` is not changed. `layer_outputs` gets what every layer gives, [B, T, D] each.
        Raises TxlError where lanes or sizes do not match, and for
        a projected memory while gradients are recorded.
        """
        self._check(x, memory, reset)
        age = frames_since_start(memory.valid, x.size(1), reset)
        limit = torch.minimum(age, self.window_limit(x.size(1), x.device))
        distances = memory.mem_len + x.size(1)
        seen = visible(limit, distances)
        projected = isinstance(memory, ProjectedMemory)
        terms = memory.terms_for(distances) if projected else self.score_terms(distances, x.device)
        x = self.dropout(x)
        inputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = self.positions.add(index, x, offset=0)
            if memory.mem_len == 0:
                past = None
            elif projected:
                past = memory.keys[index], memory.values[index]
            else:
                inputs.append(x)
                past = memory.hidden[index]
            x, k, v = layer(x, past, terms[index], seen)
            if layer_outputs is not None:
                layer_outputs.append(x)
            if projected:
                # Nothing is copied: the memory is a view of the newest of these keys.
                keys.append(k[:, :, k.size(2) - memory.mem_len :])
                values.append(v[:, :, v.size(2) - memory.mem_len :])
        hidden = self.dropout(self.final_norm(x))
        valid = (age[:, -1] + 1).clamp(max=memory.mem_len)
        if projected:
            return hidden, replace(memory, keys=tuple(keys), values=tuple(values), valid=valid)
        return hidden, self._remember(memory, inputs, valid)

    def window_limit(self, frames: int, device: torch.device, first: int | Tensor = 0) -> Tensor:
        """[1, T]: largest distance that each frame of a segment sees, from offset `first` on."""
        c = self.config
        if c.window == "segment":
            return (torch.arange(frames, device=device) + first + c.mem_len)[None]
        reach = c.mem_len - 1 if c.window == "same_length" else c.mem_len
        return torch.full((1, frames), reach, device=device)

    def score_terms(self, distances: int, device: torch.device) -> tuple[Terms | None, ...]:
        """What the position scheme adds to the scores of every layer, for distances 0..N-1."""
        table = self.positions.table(distances, device)
        return tuple(self.positions.terms(index, distances, table) for index in range(len(self.layers)))

    @torch.no_grad()
    def project(self, memory: Memory) -> ProjectedMemory:
        """`memory` as keys and values, for scoring many segments with the same weights.

        The paper's evaluation projects all M frames again for every segment, which with a long memory
        and short segments is most of the work; here each frame is projected once.
        """
        pairs = [layer.keys_values(hidden) for layer, hidden in zip(self.layers, memory.hidden, strict=True)]
        terms = self.score_terms(memory.mem_len + self.config.segment_len, memory.valid.device)
        return ProjectedMemory(
            tuple(k for k, _ in pairs),
            tuple(v for _, v in pairs),
            memory.valid,
            tuple(None if term is None else term.ordered() for term in terms),
            self.config.segment_len,
        )

    def _remember(self, memory: Memory, inputs: list[Tensor], valid: Tensor) -> Memory:
        length = memory.mem_len
        if length == 0:
            return memory
        kept = max(0, length - inputs[0].size(1))
        hidden = tuple(
            torch.cat([old[:, length - kept :], new[:, -length:].detach().to(old.dtype)], dim=1)
            for old, new in zip(memory.hidden, inputs, strict=True)
        )
        return Memory(hidden, valid)

    def _check(self, x: Tensor, memory: AnyMemory, reset: Tensor | None) -> None:
        if memory.lanes != x.size(0):
            raise TxlError(
                f"the memory holds {memory.lanes} lanes and the input {x.size(0)}; continue with "
                "memory.select(lanes) or start with model.first_memory(lanes)"
            )
        if memory.mem_len != self.config.mem_len or memory.n_layer != self.config.n_layer:
            raise TxlError(
                f"the memory has {memory.n_layer} layers of {memory.mem_len} frames, this model "
                f"{self.config.n_layer} of {self.config.mem_len}; start with model.first_memory(lanes)"
            )
        if reset is not None and reset.shape != x.shape[:2]:
            raise TxlError(f"reset has shape {tuple(reset.shape)}, expected {tuple(x.shape[:2])}")
        if isinstance(memory, ProjectedMemory):
            if torch.is_grad_enabled():
                raise TxlError(
                    "a projected memory has no gradient; use it under torch.no_grad(), and "
                    "model.first_memory(lanes) to learn"
                )
            if x.size(1) > memory.longest_segment:
                raise TxlError(
                    f"the projected memory is made for segments of up to {memory.longest_segment} frames, "
                    f"got {x.size(1)}; use shorter ones, or a view of the model with that segment_len"
                )
        longest = self.positions.max_segment
        if longest is not None and x.size(1) > longest:
            raise TxlError(
                f"a segment of {x.size(1)} frames is longer than the {longest} positions of this model; "
                f"use segments of at most {longest}"
            )

    # Sampling: one frame at a time, on keys and values that were projected once.

    @torch.no_grad()
    def decode_state(self, memory: Memory) -> DecodeState:
        """The ring that continues after `memory`, at a segment boundary."""
        c = self.config
        capacity = {"segment": c.mem_len + c.segment_len, "same_length": c.mem_len, "sliding": c.mem_len + 1}
        slots = capacity[c.window]
        like = next(self.parameters())
        ring = like.new_zeros(c.n_layer, memory.lanes, c.n_head, slots, c.d_head)
        terms = self.score_terms(slots, like.device)
        phase = memory.valid.new_zeros(())
        time = phase + c.mem_len
        state = DecodeState(ring, ring.clone(), c.mem_len - memory.valid, time, phase, terms)
        newest = min(c.mem_len, slots)
        if newest:
            slot = torch.arange(c.mem_len - newest, c.mem_len, device=like.device) % slots
            for index, layer in enumerate(self.layers):
                k, v = layer.keys_values(memory.hidden[index][:, -newest:].to(like.dtype))
                state.keys[index][:, :, slot] = k.transpose(0, 1)
                state.values[index][:, :, slot] = v.transpose(0, 1)
        return state

    @torch.no_grad()
    def step_(self, x: Tensor, state: DecodeState) -> Tensor:
        """x [B, D], the next frame of every lane -> hidden [B, D]; writes it into `state`.

        Equals `forward` on the whole stream in segments of `segment_len` (any split where the
        window is `sliding` or `same_length`). Meant for a model in eval mode.
        """
        if x.size(0) != state.start.size(0):
            raise TxlError(
                f"the ring holds {state.start.size(0)} lanes and the frame {x.size(0)}; expected as many"
            )
        slots, phase = state.capacity, state.segment_phase
        # Slot s was last written at the newest frame congruent to it: s is this far back.
        behind = (state.time - torch.arange(slots, device=x.device)) % slots
        age = state.time - state.start[:, None]
        limit = torch.minimum(age, self.window_limit(1, x.device, phase))
        seen = (behind <= limit)[:, None]
        x = x[:, None]
        for index, layer in enumerate(self.layers):
            x = self.positions.add(index, x, offset=phase)
            keys, values, terms = state.keys[index], state.values[index], state.terms[index]
            x = layer.step_(x, keys, values, state.time % slots, terms, behind, seen)
        state.time += 1
        phase.add_(1).remainder_(self.config.segment_len)
        return self.final_norm(x)[:, 0]


def shallow_twin(module: M) -> M:
    """A module of its own attributes and the same parameters and submodules."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = module.__dict__["_modules"].copy()
    twin.__dict__["_compiled_call_impl"] = None  # it is bound to the original
    return twin


def frames_since_start(valid: Tensor, frames: int, reset: Tensor | None) -> Tensor:
    """How many earlier frames of its document each frame may look back on, [B, T].

    valid [B] frames in memory; reset [B, T] bool, true where a document begins.
    """
    index = torch.arange(frames, device=valid.device)
    unbroken = valid[:, None] + index
    if reset is None:
        return unbroken
    begun = torch.where(reset, index, -1).cummax(dim=1).values
    return torch.where(begun >= 0, index - begun, unbroken)
