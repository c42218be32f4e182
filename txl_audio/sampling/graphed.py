"""Frame by frame on a GPU: what `stepwise` does, recorded once as a CUDA graph and replayed.

A frame is hundreds of small kernels, and Python takes longer to start them than the GPU to run them. A graph
starts them all at once. In return it does the same work at the same addresses every time, and nothing in it
waits for a value.

Shapes: B lanes, K symbols per frame.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from txl_audio.model.adaptive import AdaptiveEmbedding
from txl_audio.model.sequence import SequenceDecodeState, SequenceModel
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.stepwise import FREE, only


def unsupported(model: SequenceModel) -> str | None:
    """Why a model's frames cannot be recorded; None where they can."""
    if model.stage is not None:
        return "its codec has a stage that follows every sample on the CPU"
    if isinstance(model.embedding, AdaptiveEmbedding) and not model.embedding.one_table:
        return "its adaptive embedding reads other tables for other words"
    return None


class Graphed:
    """`stepwise.Stepper` of a recorded frame; on a CPU the same operations, not recorded.

    Records anew for another state or other filters.
    """

    def __init__(self, model: SequenceModel, among: range | None = None, *, lanes: int) -> None:
        assert unsupported(model) is None
        self._model, self._among, device = model, among, next(model.parameters()).device
        shape = lanes, model.spec.symbols_per_frame
        self._frame = torch.zeros(shape, dtype=torch.int64, device=device)
        self._given = torch.zeros_like(self._frame)
        self._uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self._nats = torch.zeros(shape, device=device)
        self._recorded: tuple[SequenceDecodeState, Filters, Callable[[], object]] | None = None

    @torch.inference_mode()
    def run(
        self, state: SequenceDecodeState, frame: Tensor, given: Tensor, uniforms: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(frame):
            advance = self._recording(state, filters)
            uniforms, given = uniforms.to(frame.device), given.to(frame.device)
            frames = torch.empty_like(given)
            self._frame.copy_(frame)
            for index in range(frames.size(1)):
                self._given.copy_(given[:, index])
                self._uniforms.copy_(uniforms[:, index])
                advance()
                frames[:, index] = self._frame
            return frames, self._nats.clone()

    def _recording(self, state: SequenceDecodeState, filters: Filters) -> Callable[[], object]:
        """What replaces the newest frame by the next one."""
        if self._recorded is None or self._recorded[0] is not state or self._recorded[1] != filters:
            replay = self._record(state, filters) if self._frame.is_cuda else None
            self._recorded = state, filters, replay or (lambda: self._advance(state, filters))
        return self._recorded[2]

    def _record(self, state: SequenceDecodeState, filters: Filters) -> Callable[[], object]:
        # Libraries set themselves up when they are first used, which cannot be recorded; on a copy, since
        # that frame runs. What is recorded does not.
        side, copy = torch.cuda.Stream(), state.fork()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance(copy, filters)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the GPU.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._advance(state, filters)
        return graph.replay

    def _advance(self, state: SequenceDecodeState, filters: Filters) -> None:
        """As a turn of the loop in `Stepwise.run`."""
        hidden = self._model.step_(self._frame, state)
        symbols = self._frame[:, :0]
        for place in range(self._frame.size(1)):
            log_probs = self._model.log_probs(hidden, state, symbols)
            given = self._given[:, place]
            allowed = only(log_probs, self._among if place == 0 else None)
            drawn = filters.draw(allowed, self._uniforms[:, place])
            cost = -log_probs.gather(-1, drawn[:, None])[:, 0]
            self._nats[:, place] = cost.masked_fill(given != FREE, 0.0)
            symbol = torch.where(given == FREE, drawn, given)
            symbols = torch.cat([symbols, symbol[:, None]], dim=1)
        self._frame.copy_(symbols)
