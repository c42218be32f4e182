"""Text, made while it is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from txl_audio.data.transcripts import Transcripts
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.compiled import Weights
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Backend, Sampler
from txl_audio.tokens import ConfigError, DataError, Vocabulary

LONGEST_TEXT = 20
"""Characters beside one for every frame of 20 ms that the sound has."""


def continuation(
    model: SequenceModel,
    vocabulary: Vocabulary,
    *,
    tokens: int,
    prompt: str | torch.Tensor | None,
    filters: Filters,
    seed: int,
    backend: Backend = "auto",
    weights: Weights = "float32",
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[str, bool]]:
    """Pieces (text, whether it was generated): the prompt, then `tokens` symbols that continue it.

    `prompt` is text or its symbols [N]. A piece may be empty, where a symbol is part of a character.
    Without a prompt the model starts from a newline, which is not shown. Raises ConfigError, DataError or
    SpecError at once, before there is anything to write.
    """
    model.spec.require(vocabulary.spec, here="the model", there="the vocabulary")
    if isinstance(prompt, torch.Tensor):
        shown = prompt
    else:
        shown = torch.empty(0) if prompt is None else vocabulary.encode(prompt, complete=False)
    start = shown if len(shown) else newline(vocabulary)
    sampler = Sampler(
        model, prompt=start[None], filters=filters, seed=seed, backend=backend, weights=weights, tell=tell
    )
    decoder = vocabulary.stream_decoder()
    begin = decoder.push(start)

    def pieces() -> Iterator[tuple[str, bool]]:
        if len(shown):
            yield begin, False
        for _ in range(tokens):
            yield decoder.push(sampler.next_frame()[0].cpu()), True
        if rest := decoder.flush():
            yield rest, True

    return pieces()


def transcription(model: SequenceModel, transcripts: Transcripts, codes: np.ndarray) -> str:
    """What is said in codes [N, K], by the most likely symbols, up to the mark of the end.

    A model that never comes to it is cut off where no one could have said as much.
    """
    prompt = torch.from_numpy(transcripts.transcribe_prompt(codes).reshape(1, -1))
    sampler = Sampler(model, prompt=prompt, writes=True, filters=Filters(temperature=0))
    symbols: list[int] = []
    for _ in range(LONGEST_TEXT + len(codes)):
        symbols.append(int(sampler.next_frame()[0, 0]))
        if symbols[-1] == transcripts.end:
            break
    return transcripts.text_of(np.array(symbols))


@contextmanager
def text_writer(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Writes pieces of text: to a file, or to standard output as they come.

    A file appears, or replaces an older one, only when it is complete.
    """
    if path is None:

        def write(piece: str) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        yield write
        return
    unfinished = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            yield file.write
        unfinished.replace(path)
    except OSError as error:
        raise DataError(f"cannot write text to {path}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def newline(vocabulary: Vocabulary) -> torch.Tensor:
    """The symbol that ends a line, [1]: after it a text may begin."""
    try:
        ids = vocabulary.encode("\n")
    except DataError:
        ids = torch.empty(0)
    if not len(ids):
        raise ConfigError(
            f"the vocabulary of {vocabulary.spec.name} has no newline from which a text could begin; give "
            "--prompt TEXT"
        )
    return ids[-1:]
