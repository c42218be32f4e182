"""Documents dealt onto lanes: lane i of one batch continues lane i of the batch before.

Shapes: B lanes, T frames, K symbols per frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from txl_audio.data.disturb import DisturbConfig, disturbed
from txl_audio.data.sentences import ShuffledSentences
from txl_audio.tokens import IGNORE, DataError, TokenSpec


class Symbols(Protocol):
    """A line of symbols that is read by slices."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> np.ndarray: ...


class Documents(Protocol):
    """Where symbols come from: `len` documents, each a line [N] of symbols in order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Symbols: ...


@runtime_checkable
class Collection(Documents, Protocol):
    """Documents whose `lengths` [symbols] are known without reading them, of several sets where `mix` is set.

    mix: documents of every set, which follow each other, and the weight of the set.
    """

    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def mix(self) -> Sequence[tuple[range, float]]: ...


@dataclass(frozen=True)
class Batch:
    """One segment of every lane.

    inputs [B, T, K] int64: the frame before each target frame; targets [B, T, K] int64, IGNORE where
    nothing is scored; reset [B, T] bool, true where a document, or a piece of one, begins; heard [B, T, K]
    int64: what later predictions see at the targets' places, as `inputs` are; another where it was disturbed.
    """

    inputs: Tensor
    targets: Tensor
    reset: Tensor
    heard: Tensor

    def lanes(self, which: slice) -> Batch:
        """Some of its lanes."""
        return Batch(self.inputs[which], self.targets[which], self.reset[which], self.heard[which])

    def to(self, device: torch.device) -> Batch:
        parts = (self.inputs, self.targets, self.reset, self.heard)
        return Batch(*(part.to(device) for part in parts))


class Span(NamedTuple):
    """Frames [begin, end) of targets of one document that a lane has in a batch."""

    lane: int
    document: int
    begin: int
    end: int


class Piece(NamedTuple):
    """Frames [begin, end) of targets of one document."""

    document: int
    begin: int
    end: int


class TokenStream:
    """Contiguous lanes over documents; every symbol of an epoch is a target exactly once.

    A lane takes the next document when it has finished its own, so nothing is cut off; at the end of
    the last epoch idle lanes are filled with ignored targets. A waveform document begins from start
    symbols and its first sample is scored; in text the first symbol is only context. The last frame
    of a document is padded with ignored targets to P samples.

    A text longer than a lane's share of all targets is cut into equal pieces no longer than that, so
    that one giant document fills every lane, as the authors' `LMOrderedIterator` does, but without a
    rest that is left out. A piece is read like a document of its own: it begins with the symbol before
    its first target as context. With one lane nothing is cut, nor are recordings ever.

    Of a mix of sets, with a seed, an epoch has frames of every set in proportion to the weights: it reads the
    set that has the fewest epochs in it once, and of the others whole passes and then documents drawn
    anew in every epoch, to the nearest document. Without a seed all documents are read once.

    Args:
        documents: the symbols; `spec` says how they form frames.
        lanes, segment_len: B and T.
        seed: shuffles the documents (and pieces) of every epoch anew; None keeps their order.
        epochs: None for an endless stream.
        reset: whether the model forgets at each document's begin; false leaves memory warm.
        separator: of texts of unrelated sentences, the symbol that ends each: with a seed the
            sentences of a document are shuffled too, anew every epoch.
        disturb: of mu-law recordings, with a seed: how they are disturbed; see `data.disturb`.

    Raises DataError where no document has a symbol to predict.
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
        separator: int | None = None,
        disturb: DisturbConfig | None = None,
    ) -> None:
        if len(documents) == 0:
            raise DataError("a stream needs at least one document, got none")
        self.documents, self.spec = documents, spec
        self.lanes, self.segment_len = lanes, segment_len
        self.seed, self.epochs, self.reset, self.separator = seed, epochs, reset, separator
        self.disturb = disturb
        known = isinstance(documents, Collection)
        lengths = documents.lengths if known else [len(documents[i]) for i in range(len(documents))]
        self._pieces = _pieces([_frames(n, spec) for n in lengths], spec, lanes)
        self._mix = documents.mix if known else ()
        self._epoch, self._next, self._order = 0, 0, self._shuffled(0)
        # Per lane: the piece it reads (-1: none), the epoch it was taken in, and the frame it stands at.
        self._piece = [-1] * lanes
        self._taken = [0] * lanes
        self._frame = [0] * lanes
        self._lines: list[Symbols | None] = [None] * lanes
        self._disturbed: list[tuple[np.ndarray, np.ndarray] | None] = [None] * lanes
        self.spans: list[Span] = []
        """Of the last batch: what each lane has in it, in order."""
        # Lanes that read pieces of one document share its shuffled sentences.
        self._sentences: WeakValueDictionary[tuple[int, int], ShuffledSentences] = WeakValueDictionary()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        shape = (self.lanes, self.segment_len, self.spec.symbols_per_frame)
        inputs = np.full(shape, self.spec.start_symbol if self.spec.scores_first else 0, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        reset = np.zeros(shape[:2], dtype=bool)
        heard = targets if self.disturb is None else targets.copy()
        parts = (inputs, targets, reset, heard)
        self.spans = []
        filled = [self._fill(lane, *(part[lane] for part in parts)) for lane in range(self.lanes)]
        if not any(filled):
            raise StopIteration
        return Batch(*(torch.from_numpy(part) for part in parts))

    def _fill(
        self, lane: int, inputs: np.ndarray, targets: np.ndarray, reset: np.ndarray, heard: np.ndarray
    ) -> bool:
        """Fills one lane's segment; false where no document was left for it."""
        place = 0
        while place < self.segment_len:
            if self._piece[lane] < 0 and not self._take(lane):
                return place > 0
            piece, at = self._pieces[self._piece[lane]], self._frame[lane]
            n = min(self.segment_len - place, piece.end - at)
            part = slice(place, place + n)
            if self.disturb is None:
                inputs[part], targets[part] = frames_at(self._line(lane), self.spec, at, n)
            else:
                now_heard, scored = self._disturbed_line(lane)
                inputs[part], heard[part] = frames_at(now_heard, self.spec, at, n)
                targets[part] = frames_at(scored, self.spec, at, n)[1]
            reset[place] |= at == piece.begin and self.reset
            self.spans.append(Span(lane, piece.document, at, at + n))
            place += n
            self._frame[lane] += n
            if self._frame[lane] == piece.end:
                self._piece[lane], self._lines[lane], self._disturbed[lane] = -1, None, None
        return True

    def _take(self, lane: int) -> bool:
        """Gives the lane its next piece; false at the end of the last epoch."""
        if self._next == len(self._order):
            if self.epochs is not None and self._epoch + 1 >= self.epochs:
                return False
            self._epoch, self._next = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        self._piece[lane], self._taken[lane] = self._order[self._next], self._epoch
        self._frame[lane] = self._pieces[self._piece[lane]].begin
        self._next += 1
        return True

    def _line(self, lane: int) -> Symbols:
        """The symbols that the lane reads, of the whole document."""
        line = self._lines[lane]
        if line is None:
            document, epoch = self._pieces[self._piece[lane]].document, self._taken[lane]
            line = self._sentences.get((document, epoch))
            if line is None:
                # Of a memory-mapped file a plain view, which is sliced faster.
                line = self.documents[document]
                line = np.asarray(line).reshape(-1) if isinstance(line, np.ndarray) else line
                if self.seed is not None and self.separator is not None:
                    # From 1: a last 0 would give the generator of the documents' order.
                    rng = np.random.default_rng((self.seed, epoch, document + 1))
                    line = ShuffledSentences(line[:], self.separator, rng)
                    self._sentences[document, epoch] = line
            self._lines[lane] = line
        return line

    def _disturbed_line(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """What is heard and what is predicted of the lane's document in this epoch."""
        lines = self._disturbed[lane]
        if lines is None:
            assert self.disturb is not None
            document, epoch = self._pieces[self._piece[lane]].document, self._taken[lane]
            rng = np.random.default_rng((self.seed or 0, epoch, document + 1, 1))
            lines = self._disturbed[lane] = disturbed(np.asarray(self._line(lane)[:]), self.disturb, rng)
        return lines

    def _shuffled(self, epoch: int) -> Sequence[int]:
        if self.seed is None:
            return range(len(self._pieces))
        rng = np.random.default_rng((self.seed, epoch))
        if not self._mix:
            return rng.permutation(len(self._pieces)).tolist()
        return rng.permutation(_mixed(self._pieces, self._mix, rng)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Position to resume from, JSON-able."""
        return {
            "documents": len(self.documents),
            "epoch": self._epoch,
            "next": self._next,
            "piece": list(self._piece),
            "taken": list(self._taken),
            "frame": list(self._frame),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken.

        Raises DataError where lanes or documents are not those of then.
        """
        if state.keys() != self.state_dict().keys():
            raise DataError(
                f"the saved position holds {sorted(state)}, expected {sorted(self.state_dict())}; "
                "resume with the version that saved it, or start anew"
            )
        if state["documents"] != len(self.documents):
            raise DataError(
                f"the saved position is of {state['documents']} documents, here are {len(self.documents)}; "
                "resume with the data the run was started with"
            )
        if len(state["piece"]) != self.lanes:
            raise DataError(
                f"the saved position has {len(state['piece'])} lanes, this stream {self.lanes}; "
                "resume with the saved number"
            )
        self._epoch, self._next = state["epoch"], state["next"]
        self._order = self._shuffled(self._epoch)
        self._piece, self._taken = list(state["piece"]), list(state["taken"])
        self._frame = list(state["frame"])
        self._lines, self._disturbed = [None] * self.lanes, [None] * self.lanes


def _mixed(
    pieces: Sequence[Piece], mix: Sequence[tuple[range, float]], rng: np.random.Generator
) -> np.ndarray:
    """Numbers of the pieces that an epoch of a mix reads, some more than once."""
    document = np.array([piece.document for piece in pieces])
    frames = np.array([piece.end - piece.begin for piece in pieces])
    sets = [np.flatnonzero((document >= r.start) & (document < r.stop)) for r, _ in mix]
    # Frames for a weight of 1.
    unit = max(frames[own].sum() / weight for own, (_, weight) in zip(sets, mix, strict=True))
    chosen = []
    for own, (_, weight) in zip(sets, mix, strict=True):
        if len(own) == 0:
            continue
        passes, rest = divmod(round(unit * weight), int(frames[own].sum()))
        drawn = rng.permutation(own)
        middles = frames[drawn].cumsum() - frames[drawn] / 2
        chosen += [*[own] * passes, drawn[middles < rest]]
    return np.concatenate(chosen)


def _frames(symbols: int, spec: TokenSpec) -> int:
    """Target frames of a document of so many symbols."""
    if not spec.scores_first:
        return max(0, symbols - 1)
    frames = -(-symbols // spec.symbols_per_frame)
    return frames + (spec.symbols_per_frame - 1) * spec.delay_frames if frames else 0


def _pieces(frames: Sequence[int], spec: TokenSpec, lanes: int) -> list[Piece]:
    share = -(-sum(frames) // lanes)
    pieces = []
    for document, n in enumerate(frames):
        parts = min(n, 1) if spec.scores_first else -(-n // max(1, share))
        cuts = [n * i // parts for i in range(parts + 1)] if parts else []
        pieces += [Piece(document, begin, end) for begin, end in pairwise(cuts)]
    if not pieces:
        raise DataError("no document has a symbol to predict; text needs at least 2 symbols in one")
    return pieces


def frames_at(symbols: Symbols, spec: TokenSpec, at: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames [at, at + n) of one document [N] as (inputs, targets), each [n, K].

    Audio: place k of frame t is symbol k of the document's frame t - k delay. What does not exist, before a
    document, at its end and beside text, is the start symbol in inputs and IGNORE in targets. Text: targets
    are the next symbols.
    """
    if not spec.scores_first:
        line = symbols[at : at + n + 1]
        return line[:-1, None], line[1:, None]
    k = spec.symbols_per_frame
    place = np.arange(k)
    frame = np.arange(at - 1, at + n)[:, None] - spec.delay_frames * place
    exists = (frame >= 0) & (frame * k + place < len(symbols))
    first = max(0, int(frame.min())) * k
    read = symbols[first : (at + n) * k]
    frames = np.full(frame.shape, IGNORE, dtype=np.int64)
    frames[exists] = read[(frame * k + place - first)[exists]]
    frames[frames == spec.start_symbol] = IGNORE
    return np.where(frames[:-1] == IGNORE, spec.start_symbol, frames[:-1]), frames[1:]


def document_frames(symbols: Symbols, spec: TokenSpec) -> tuple[np.ndarray, np.ndarray]:
    """One document [N] -> (input frames, target frames), each [frames, K]: `frames_at` of the whole."""
    symbols = np.asarray(symbols).reshape(-1)
    return frames_at(symbols, spec, 0, _frames(len(symbols), spec))
