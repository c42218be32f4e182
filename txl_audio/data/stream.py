"""Documents dealt onto lanes: lane i of one batch continues lane i of the batch before.

Shapes: B lanes, T frames, K symbols per frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from txl_audio.tokens import IGNORE, DataError, TokenSpec


class Documents(Protocol):
    """Where symbols come from: `len` documents, each an integer array [N] of symbols in order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Batch:
    """One segment of every lane.

    inputs [B, T, K] int64: the frame before each target frame; targets [B, T, K] int64, IGNORE where
    nothing is scored; reset [B, T] bool, true where a document begins.
    """

    inputs: Tensor
    targets: Tensor
    reset: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device), self.reset.to(device))


class TokenStream:
    """Contiguous lanes over documents; every symbol of an epoch is a target exactly once.

    A lane takes the next document when it has finished its own, so nothing is cut off; at the end of
    the last epoch idle lanes are filled with ignored targets. A waveform document begins from start
    symbols and its first sample is scored; in text the first symbol is only context. The last frame
    of a document is padded with ignored targets to P samples.

    Args:
        documents: the symbols; `spec` says how they form frames.
        lanes, segment_len: B and T.
        seed: shuffles the documents of every epoch anew; None keeps their order.
        epochs: None for an endless stream.
        reset: whether the model forgets at each document's begin; false leaves memory warm.
    """

    def __init__(
        self,
        documents: Documents,
        spec: TokenSpec,
        *,
        lanes: int,
        segment_len: int,
        seed: int | None = None,
        epochs: int | None = 1,
        reset: bool = True,
    ) -> None:
        if len(documents) == 0:
            raise DataError("a stream needs at least one document, got none")
        self.documents, self.spec = documents, spec
        self.lanes, self.segment_len = lanes, segment_len
        self.seed, self.epochs, self.reset = seed, epochs, reset
        self._epoch, self._next, self._order = 0, 0, self._shuffled(0)
        # Per lane: the document it reads (-1: none) and the frame it stands at.
        self._document = [-1] * lanes
        self._frame = [0] * lanes
        self._cache: list[tuple[np.ndarray, np.ndarray] | None] = [None] * lanes

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        shape = (self.lanes, self.segment_len, self.spec.symbols_per_frame)
        inputs = np.full(shape, self.spec.start_symbol if self.spec.scores_first else 0, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        reset = np.zeros(shape[:2], dtype=bool)
        filled = [self._fill(lane, inputs[lane], targets[lane], reset[lane]) for lane in range(self.lanes)]
        if not any(filled):
            raise StopIteration
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(reset))

    def _fill(self, lane: int, inputs: np.ndarray, targets: np.ndarray, reset: np.ndarray) -> bool:
        """Fills one lane's segment; false where no document was left for it."""
        place = 0
        while place < self.segment_len:
            if self._document[lane] < 0 and not self._take(lane):
                return place > 0
            frames_in, frames_out = self._frames(lane)
            at = self._frame[lane]
            n = min(self.segment_len - place, len(frames_out) - at)
            inputs[place : place + n] = frames_in[at : at + n]
            targets[place : place + n] = frames_out[at : at + n]
            reset[place] |= at == 0 and self.reset
            place += n
            self._frame[lane] += n
            if self._frame[lane] == len(frames_out):
                self._document[lane] = -1
        return True

    def _take(self, lane: int) -> bool:
        """Gives the lane its next document; false at the end of the last epoch."""
        while True:
            if self._next == len(self._order):
                if self.epochs is not None and self._epoch + 1 >= self.epochs:
                    return False
                self._epoch, self._next = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
            document = self._order[self._next]
            self._next += 1
            if len(self.documents[document]) > int(not self.spec.scores_first):
                self._document[lane], self._frame[lane], self._cache[lane] = document, 0, None
                return True
            if self._next == len(self._order) and not self._any_usable():
                raise DataError("no document has a symbol to predict; text needs at least 2 symbols in one")

    def _any_usable(self) -> bool:
        least = int(not self.spec.scores_first)
        return any(len(self.documents[i]) > least for i in range(len(self.documents)))

    def _frames(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """(input frames, target frames) of the lane's document, each [frames, K]."""
        frames = self._cache[lane]
        if frames is None:
            frames = self._cache[lane] = document_frames(self.documents[self._document[lane]], self.spec)
        return frames

    def _shuffled(self, epoch: int) -> Sequence[int]:
        if self.seed is None:
            return range(len(self.documents))
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.documents)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Position to resume from, JSON-able."""
        return {
            "documents": len(self.documents),
            "epoch": self._epoch,
            "next": self._next,
            "document": list(self._document),
            "frame": list(self._frame),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken.

        Raises DataError where lanes or documents are not those of then.
        """
        if state["documents"] != len(self.documents):
            raise DataError(
                f"the saved position is of {state['documents']} documents, here are {len(self.documents)}; "
                "resume with the data the run was started with"
            )
        if len(state["document"]) != self.lanes:
            raise DataError(
                f"the saved position has {len(state['document'])} lanes, this stream {self.lanes}; "
                "resume with the saved number"
            )
        self._epoch, self._next = state["epoch"], state["next"]
        self._order = self._shuffled(self._epoch)
        self._document, self._frame = list(state["document"]), list(state["frame"])
        self._cache = [None] * self.lanes


def document_frames(symbols: np.ndarray, spec: TokenSpec) -> tuple[np.ndarray, np.ndarray]:
    """One document [N] -> (input frames, target frames), each [frames, K].

    Audio: inputs begin with a frame of start symbols, and the last target frame is padded with
    IGNORE. Text: targets are the next symbols.
    """
    symbols, k = np.asarray(symbols).reshape(-1), spec.symbols_per_frame
    if not spec.scores_first:
        return symbols[:-1, None], symbols[1:, None]
    line = np.full(
        k + -(-len(symbols) // k) * k, IGNORE, dtype=np.int16 if spec.vocab_size < 2**15 else np.int32
    )
    line[:k] = spec.start_symbol
    line[k : k + len(symbols)] = symbols
    frames = line.reshape(-1, k)
    return frames[:-1], frames[1:]
