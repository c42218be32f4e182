"""Text, made while it is read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.sampler import Filters, Sampler
from txl_audio.tokens import ConfigError, DataError, Vocabulary


def continuation(
    model: SequenceModel,
    vocabulary: Vocabulary,
    *,
    tokens: int,
    prompt: str | None,
    filters: Filters,
    seed: int,
) -> Iterator[tuple[str, bool]]:
    """Pieces (text, whether it was generated): the prompt, then `tokens` symbols that continue it.

    A piece may be empty, where a symbol is part of a character. Without a prompt the model starts
    from a newline, which is not shown. Raises ConfigError, DataError or SpecError at once, before there
    is anything to write.
    """
    model.spec.require(vocabulary.spec, here="the model", there="the vocabulary")
    shown = torch.empty(0) if prompt is None else vocabulary.encode(prompt, complete=False)
    start = shown if len(shown) else _newline(vocabulary)
    sampler = Sampler(model, prompt=start[None], filters=filters, seed=seed)
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


def _newline(vocabulary: Vocabulary) -> torch.Tensor:
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
