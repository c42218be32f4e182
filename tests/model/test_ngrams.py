"""Hashed n-gram embeddings: what they number, and that a stream sees the same as a whole text."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import TEXT, core_config, lengths_of, randomised, run_nll
from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.model.embeddings import NgramConfig, NgramEmbedding, SymbolEmbeddingConfig
from txl_audio.model.heads import SoftmaxHeadConfig
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.sampler import Filters, Sampler
from txl_audio.tokens import ConfigError, TokenSpec

NGRAMS = NgramConfig(lengths=(2, 4), rows=97, width=5)


def model() -> SequenceModel:
    def build() -> SequenceModel:
        config = core_config()
        embedding = SymbolEmbeddingConfig(ngrams=NGRAMS).build(TEXT, config.d_model)
        head = SoftmaxHeadConfig().build(TEXT, config.d_model, embedding)
        return SequenceModel(TEXT, embedding=embedding, core=config.build(), head=head)

    return randomised(build)


def test_every_ngram_is_numbered_exactly() -> None:
    embedding = NgramEmbedding(NGRAMS, TEXT, d_model=12)
    symbols = torch.tensor([3, 0, 10, 7])
    base = TEXT.vocab_size + 1
    rows = [(10 * base + 7) % 97, 97 + (((3 * base + 0) * base + 10) * base + 7) % 97]
    expected = embedding.projection(embedding.table[rows].sum(0))
    torch.testing.assert_close(embedding(symbols), expected)
    # What comes before the n-gram does not matter, and order does.
    two = NgramEmbedding(NgramConfig(lengths=(2,), rows=10_007, width=5), TEXT, d_model=12)
    assert torch.equal(two(torch.tensor([1, 2, 3])), two(torch.tensor([9, 2, 3])))
    assert not torch.equal(two(torch.tensor([2, 3])), two(torch.tensor([3, 2])))


def test_segments_of_any_length_see_the_same_ngrams() -> None:
    """The symbols before a segment are carried, and none of another document is seen."""
    line = torch.randint(TEXT.vocab_size, (2, 21, 1))
    reset = torch.zeros(2, 20, dtype=torch.bool)
    reset[:, 0] = reset[1, 9] = True
    expected, _ = run_nll(model(), line[:, :-1], line[:, 1:], [20], reset)
    for length in (1, 3, 7):
        got, _ = run_nll(model(), line[:, :-1], line[:, 1:], lengths_of(20, length), reset)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    alone, _ = run_nll(model(), line[1:, 9:-1], line[1:, 10:], [11])
    torch.testing.assert_close(expected[1:, 9:], alone, rtol=0, atol=1e-5)


def test_sampling_equals_scoring() -> None:
    m = model()
    prompt = torch.tensor([[5]])
    sampler = Sampler(m, prompt=prompt, filters=Filters(), seed=1)
    drawn, nats = [], []
    for _ in range(15):
        drawn.append(int(sampler.next_frame()))
        nats.append(float(sampler.nats))
    line = torch.tensor([[5, *drawn]])[..., None]
    scored, _ = run_nll(m, line[:, :-1], line[:, 1:], [15])
    torch.testing.assert_close(torch.tensor(nats), scored.flatten(), rtol=0, atol=1e-5)


def test_every_table_row_that_is_used_learns() -> None:
    m = model().train()
    line = torch.randint(TEXT.vocab_size, (3, 30, 1))
    loss, _, _ = m.loss(line[:, :-1], line[:, 1:], m.initial_state(3))
    loss.backward()
    gradient = m.embedding.ngrams.table.grad
    assert gradient is not None and (gradient[:97].abs().sum(-1) > 0).sum() > 20
    assert m.embedding.ngrams.projection.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("lengths", [(), (1,), (8,)])
def test_lengths_that_make_no_sense(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of 2 to 7"):
        NgramConfig(lengths=lengths)


def test_streams_that_have_no_ngrams() -> None:
    config = SymbolEmbeddingConfig(ngrams=NGRAMS)
    with pytest.raises(ConfigError, match=r"embedding.ngrams are of frames of 1 symbol, got 4"):
        config.build(MuLawCodec(4).spec, 12)
    words = TokenSpec("text", 267_735, 1, 0.0, 0, "words", "0")
    with pytest.raises(ConfigError, match="4 of 267735 symbols are too many to number; use shorter ones"):
        config.build(words, 12)
