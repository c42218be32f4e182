"""What may be drawn, and how often."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from txl_audio.sampling.filters import Filters
from txl_audio.tokens import ConfigError


def uniforms(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_probs(seed: int, lanes: int = 4, vocab_size: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(lanes, vocab_size, generator=generator)).log_softmax(-1)


def rank_and_mass_before(scores: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor]:
    """How many symbols are more likely than the drawn one, and their mass."""
    more = scores > scores.gather(1, symbols[:, None])
    return more.sum(-1), scores.exp().masked_fill(~more, 0.0).sum(-1)


def test_the_first_symbol_that_exceeds_the_number() -> None:
    """In symbol order, not in the order of likelihood."""
    scores = torch.tensor([0.2, 0.5, 0.0, 0.3]).log()
    numbers = torch.tensor([0.0, 0.1999, 0.2001, 0.6999, 0.7001, 1 - 2**-53], dtype=torch.float64)
    drawn = Filters().draw(scores.expand(len(numbers), -1), numbers)
    assert drawn.tolist() == [0, 0, 1, 1, 3, 3]
    kept = Filters(top_k=2).draw(scores.expand(len(numbers), -1), numbers)
    assert kept.tolist() == [1, 1, 1, 3, 3, 3]


@given(seed=st.integers(0, 999), top_k=st.integers(1, 12), temperature=st.floats(0.05, 5.0))
def test_top_k_keeps_the_k_most_likely(seed: int, top_k: int, temperature: float) -> None:
    scores = log_probs(seed)
    for draw in range(5):
        symbols = Filters(temperature=temperature, top_k=top_k).draw(scores, uniforms(4, draw))
        assert (rank_and_mass_before(scores, symbols)[0] < top_k).all()


@given(seed=st.integers(0, 999), top_p=st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_that_reach_p(seed: int, top_p: float) -> None:
    scores = log_probs(seed)
    for draw in range(5):
        symbols = Filters(top_p=top_p).draw(scores, uniforms(4, draw))
        assert (rank_and_mass_before(scores, symbols)[1] < top_p + 1e-5).all()


@given(seed=st.integers(0, 999), temperature=st.floats(0.01, 10.0))
def test_only_the_most_likely_is_left_at_the_limits(seed: int, temperature: float) -> None:
    scores = log_probs(seed)
    best = scores.argmax(-1)
    for filters in (
        Filters(temperature=0.0),
        Filters(temperature=0.0, top_k=5, top_p=0.5),
        Filters(temperature=temperature, top_k=1),
        Filters(temperature=temperature, top_p=1e-6),
        Filters(temperature=1e-6),
    ):
        assert torch.equal(filters.draw(scores, uniforms(4)), best)


def frequencies(filters: Filters, scores: Tensor, draws: int = 20_000) -> Tensor:
    symbols = filters.draw(scores.expand(draws, -1), uniforms(draws))
    return torch.bincount(symbols, minlength=scores.size(-1)) / draws


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    scores = log_probs(3, lanes=1)
    expected = (scores / temperature).softmax(-1)[0]
    error = (frequencies(Filters(temperature=temperature), scores) - expected).abs()
    assert (error < 5 * (expected * (1 - expected) / 20_000).sqrt() + 1e-6).all()


def test_what_is_kept_is_renormalised() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    expected = {
        Filters(top_k=2): [0.625, 0.375, 0.0, 0.0],
        Filters(top_p=0.79): [0.625, 0.375, 0.0, 0.0],
        Filters(top_p=0.81): [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0],
        Filters(top_k=2, top_p=0.6): [1.0, 0.0, 0.0, 0.0],
    }
    for filters, shares in expected.items():
        torch.testing.assert_close(frequencies(filters, scores), torch.tensor(shares), rtol=0, atol=0.02)


def test_tails_are_cut_from_both_ends() -> None:
    """Of five symbols in order, with a tenth cut from each end of the cumulative probability."""
    scores = torch.tensor([[0.05, 0.15, 0.5, 0.28, 0.02]]).log()
    filters = Filters(tails=0.1)
    symbols = filters.draw(scores.expand(20_000, -1), filters.between_tails(uniforms(20_000)))
    shares = torch.bincount(symbols, minlength=5) / 20_000
    expected = torch.tensor([0.0, 0.1 / 0.8, 0.5 / 0.8, 0.2 / 0.8, 0.0])
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.02)
    assert torch.equal(Filters().between_tails(uniforms(9)), uniforms(9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected a number from 0 up"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0, expected at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0, expected more than 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"tails": -0.1}, "tails is -0.1, expected at least 0 and less than 0.5"),
        ({"tails": 0.5}, "tails is 0.5"),
    ],
)
def test_values_that_cannot_be_meant(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Filters(**settings)  # pyright: ignore[reportArgumentType]
