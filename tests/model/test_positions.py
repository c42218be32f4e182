"""Position schemes against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from txl_audio.model.positions import (
    AbsoluteConfig,
    AlRfouConfig,
    RelativeConfig,
    Shape,
    ShawConfig,
    sinusoids,
)

SHAPE = Shape(n_layer=2, d_model=8, n_head=2, d_head=3)
CPU = torch.device("cpu")


def test_sinusoids_are_sines_then_cosines() -> None:
    table = sinusoids(torch.tensor([0, 1, 37]), 8)
    assert table[0].tolist() == [0.0] * 4 + [1.0] * 4
    for row, position in ((1, 1), (2, 37)):
        for n in range(4):
            angle = position / 10000 ** (2 * n / 8)
            assert table[row, n].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 4 + n].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_clamped_distances_share_a_row() -> None:
    table = RelativeConfig(clamp_len=4).build(SHAPE, dropout=0.0).table(10, CPU)
    assert (table[4:] == table[4]).all() and not torch.equal(table[3], table[4])


def test_relative_terms_tell_whether_they_are_exact_sinusoids() -> None:
    exact = RelativeConfig().build(SHAPE, dropout=0.1).eval()
    terms = exact.terms(1, 5, exact.table(5, CPU))
    assert terms.projection is not None and terms.r.shape == (2, 5, 3)
    rebuilt = torch.einsum("hdm,nm->hnd", terms.projection, sinusoids(torch.arange(5), 8))
    torch.testing.assert_close(terms.r, rebuilt)
    exact.train()
    assert exact.terms(1, 5, exact.table(5, CPU)).projection is None
    clamped = RelativeConfig(clamp_len=2).build(SHAPE, dropout=0.0)
    assert clamped.terms(0, 5, clamped.table(5, CPU)).projection is None


def test_shaw_shares_its_last_row_with_what_lies_beyond() -> None:
    shaw = ShawConfig(kind="shaw", max_distance=3).build(SHAPE, dropout=0.0)
    torch.nn.init.normal_(shaw.r)
    torch.nn.init.normal_(shaw.b)
    terms = shaw.terms(1, 6, shaw.table(6, CPU))
    assert terms.b is not None and terms.v is None
    for distance in range(6):
        row = min(distance, 2)
        assert torch.equal(terms.r[:, distance], shaw.r[1, row])
        assert torch.equal(terms.b[:, distance], shaw.b[1, row])


def test_absolute_counts_backwards_from_the_segments_end() -> None:
    scheme = AbsoluteConfig(kind="absolute", segment_len=5).build(SHAPE, dropout=0.0)
    zeros = torch.zeros(1, 3, 8)
    assert torch.equal(scheme.add(0, zeros, offset=2)[0], sinusoids(torch.tensor([2, 1, 0]), 8))
    assert torch.equal(scheme.add(1, zeros, offset=2), zeros)  # only the input is numbered
    assert scheme.terms(0, 5, scheme.table(5, CPU)) is None


def test_alrfou_numbers_every_layer() -> None:
    scheme = AlRfouConfig(kind="alrfou", segment_len=5).build(SHAPE, dropout=0.0)
    torch.nn.init.normal_(scheme.rows)
    for layer in range(2):
        assert torch.equal(scheme.add(layer, torch.zeros(1, 3, 8), offset=1)[0], scheme.rows[layer, 1:4])
