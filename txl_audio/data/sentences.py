"""Texts of unrelated sentences, read in another order."""

from __future__ import annotations

from typing import Any

import numpy as np


class ShuffledSentences:
    """A document [N] with its sentences in another order, read by slices without copying it.

    The first symbol is context and stays; a sentence is what follows, up to and with `separator`. Ended
    by it, each gives the next its context. Symbols after the last separator stay last.
    """

    def __init__(self, symbols: np.ndarray, separator: int, rng: np.random.Generator) -> None:
        self._symbols = symbols
        ends = np.flatnonzero(symbols[1:] == separator) + 2
        begins = np.concatenate(([1], ends))[: len(ends)]
        order = rng.permutation(len(ends))
        # In their new order: the place where each sentence begins, and where it comes from.
        lengths = (ends - begins)[order]
        last = int(ends[-1]) if len(ends) else 1
        places = np.concatenate(([0, 1], 1 + np.cumsum(lengths)))
        self._places = places.astype(_index_type(symbols))
        self._sources = np.concatenate(([0], begins[order], [last])).astype(self._places.dtype)

    def __len__(self) -> int:
        return len(self._symbols)

    def __getitem__(self, where: slice, /) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        line = np.empty(max(0, stop - start), dtype=self._symbols.dtype)
        # As a number of the table's own type: of another one, the whole table would be converted.
        first = self._places.dtype.type(start)
        sentence, at = int(np.searchsorted(self._places, first, side="right")) - 1, start
        while at < stop:
            begin = int(self._places[sentence])
            end = int(self._places[sentence + 1]) if sentence + 1 < len(self._places) else stop
            source, n = int(self._sources[sentence]) + at - begin, min(end, stop) - at
            line[at - start : at - start + n] = self._symbols[source : source + n]
            sentence, at = sentence + 1, at + n
        return line


def _index_type(symbols: np.ndarray) -> type[np.integer[Any]]:
    """Half the memory where it does: a large corpus has some tables of this open at once."""
    return np.int32 if len(symbols) < 2**31 else np.int64
