"""The arithmetic of the compiled sampler, each piece against its definition."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from numba import njit

from txl_audio.sampling import numerics

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


@njit
def each(x, exp, exp64, gelu):
    for i in range(x.size):
        exp[i] = numerics.exp(x[i])
        exp64[i] = numerics.exp64(8.0 * x[i])
        gelu[0, i] = x[i]
    numerics.add_bias_gelu(gelu, np.zeros(x.size, np.float32))


def test_functions_are_as_exact_as_float32() -> None:
    x = np.linspace(-86, 86, 100_001).astype(np.float32)
    exp, exp64, gelu = np.empty_like(x), np.empty(x.size), np.empty((1, x.size), np.float32)
    each(x, exp, exp64, gelu)
    np.testing.assert_allclose(exp, np.exp(x.astype(np.float64)), rtol=1.5e-7)
    np.testing.assert_allclose(exp64, np.exp(8 * x.astype(np.float64)), rtol=1e-13)
    expected = torch.nn.functional.gelu(torch.from_numpy(x).double())
    np.testing.assert_allclose(gelu[0], expected, rtol=2e-7, atol=5e-7)


@njit
def double_all(several):
    x, (y, number) = numerics.borrowed(several)
    for i in range(x.size):
        x[i] *= number
    for line in y:
        line *= number


def test_borrowed_arrays_are_the_same_and_are_not_counted() -> None:
    x, y = normal(5), normal(2, 3)
    expected = 2 * x, 2 * y
    counts = sys.getrefcount(x), sys.getrefcount(y)
    for _ in range(3):
        double_all((x, (y, np.float32(1.0))))
    double_all((x, (y, np.float32(2.0))))
    np.testing.assert_array_equal(x, expected[0])
    np.testing.assert_array_equal(y, expected[1])
    assert (sys.getrefcount(x), sys.getrefcount(y)) == counts


@njit
def put(row, values):
    numerics.put(row, values)


def test_bfloat16_is_rounded_as_pytorch_does() -> None:
    values = np.concatenate([normal(1000), np.float32([0.0, 1.00390625, 1.01171875, -1.00390625])])
    row = np.empty(values.size // 2, np.uint32)
    put(row, values)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint32)
    np.testing.assert_array_equal(row, expected)


@njit
def through_ring(ring, rows, x, scores, out):
    for j in range(len(rows)):
        numerics.put(ring[j], rows[j])
    ordered = np.empty_like(x)
    numerics.as_ring(x, ordered, ring)
    numerics.ring_dots(scores, ring, ordered)
    numerics.as_ring(out, ordered, ring)
    numerics.ring_rows(ordered, scores, ring)
    numerics.from_ring(ordered, out, ring)


@pytest.mark.parametrize("kind", [np.float32, np.uint32])
def test_the_ring_is_read_as_it_was_written(kind: type) -> None:
    rows, x = normal(11, 6), normal(6)
    ring = np.empty((11, 6 if kind is np.float32 else 3), kind)
    scores, out = np.ones(11, np.float32), np.ones(6, np.float32)
    through_ring(ring, rows, x, scores, out)
    if kind is np.uint32:
        rows = torch.from_numpy(rows).bfloat16().float().numpy()
    np.testing.assert_allclose(scores, 1 + rows @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, 1 + (1 + rows @ x) @ rows, rtol=1e-5, atol=1e-5)
