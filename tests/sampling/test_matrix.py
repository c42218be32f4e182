"""Products with packed matrices, float32 and int8, against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from tests.sampling.test_numerics import normal
from txl_audio.sampling import matrix as matrices
from txl_audio.sampling.matrix import Matrix, product


@njit
def products(x, weights, y):
    for index in range(weights.number):
        product(x, weights, index, y[index])


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (64, 32), (70, 33), (129, 1030)])
def test_products(outputs: int, inputs: int) -> None:
    weights, x = normal(2, outputs, inputs), normal(3, inputs)
    expected = x.astype(np.float64) @ weights.astype(np.float64).transpose(0, 2, 1)
    y = np.empty((2, 3, outputs), np.float32)
    products(x, Matrix.pack(weights, "float32"), y)
    np.testing.assert_allclose(y, expected, atol=2e-6 * inputs**0.5, rtol=1e-6)
    matrix = Matrix.pack(weights, "int8", lanes=3)
    products(x, matrix, y)
    # With the weights that int8 can say it is exact, but for inputs of 14 or 15 bits.
    scale = np.abs(weights).max(axis=2, keepdims=True) / 127
    said = np.rint(weights / scale) * scale
    np.testing.assert_allclose(y, x @ said.transpose(0, 2, 1), atol=1e-3 * inputs**0.5)
    assert np.sqrt(np.mean((y - expected) ** 2)) < 0.01 * inputs**0.5


def test_int8_sums_have_room() -> None:
    weights, x = np.full((1, 64, 4096), 1.0, np.float32), np.full((1, 4096), 3.0, np.float32)
    y = np.empty((1, 1, 64), np.float32)
    products(x, Matrix.pack(weights, "int8"), y)
    np.testing.assert_allclose(y, 3 * 4096, rtol=1e-3)


@pytest.mark.skipif(not matrices.DOT_PRODUCTS, reason="the CPU has no AVX512-VNNI")
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (70, 33), (64, 1030)])
def test_int8_is_the_same_on_every_cpu(outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dot-product instruction and without, so that a seed gives the same samples everywhere."""
    weights, x = normal(2, outputs, inputs), normal(3, inputs)
    # Both ends of the range, where bytes carry and sums of less than 32 bits would saturate.
    weights[0], x[0], x[1] = -1.0, 1.0, -1.0
    y, without = np.empty((2, 2, 3, outputs), np.float32)
    products(x, Matrix.pack(weights, "int8", lanes=3), y)
    monkeypatch.setattr(matrices, "DOT_PRODUCTS", False)
    matrix = Matrix.pack(weights, "int8", lanes=3)
    assert matrix.whole.dtype == np.int16
    products(x, matrix, without)
    np.testing.assert_array_equal(y, without)
    np.testing.assert_allclose(y[0, :2], [[-inputs] * outputs, [inputs] * outputs], rtol=1e-3)


def test_vectors_of_weights_lie_in_one_cache_line() -> None:
    for kind in ("float32", "int8"):
        assert Matrix.pack(normal(3, 5, 7), kind).values.ctypes.data % matrices.CACHE_LINE == 0
