"""Products of the compiled sampler with large matrices, whose weights are float32 or int8.

Which one is known when a kernel is compiled.

Shapes: B lanes, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from txl_audio.sampling.numerics import FAST, add_rows, f32, larger

BLOCK = 64
"""Outputs of an int8 matrix that are summed together: 4 vector registers of 16 int32."""


class Matrix(NamedTuple):
    """`number` matrices of one shape, as `product` reads them.

    float32: values [N, I, O], scale empty. int8: values [N, O / 64, I / 2, 128], two inputs of 64 outputs
    beside each other and both sizes filled up with zeros; scale [N, O] float32 of every output; whole
    [B, I] int16 and steps [B]: scratch for the rounded inputs of B lanes, since to allocate it anew for every
    product would take a tenth of a step.
    """

    number: int
    inputs: int
    outputs: int
    values: np.ndarray
    scale: np.ndarray
    whole: np.ndarray
    steps: np.ndarray

    @classmethod
    def pack(cls, weights: np.ndarray, kind: str, *, lanes: int = 1) -> Matrix:
        """weights [N, O, I] float32, as PyTorch keeps them; kind `float32` or `int8`; lanes: of inputs."""
        number, outputs, inputs = weights.shape
        if kind == "float32":
            values = np.ascontiguousarray(weights.transpose(0, 2, 1))
            none = np.empty((0, 0), np.float32)
            return cls(number, inputs, outputs, values, none, none.astype(np.int16), none.ravel())
        weights = np.pad(weights, ((0, 0), (0, -outputs % BLOCK), (0, inputs % 2)))
        scale = np.abs(weights).max(axis=2, initial=1e-30) / 127
        pairs = np.rint(weights / scale[:, :, None]).astype(np.int8)
        pairs = pairs.reshape(number, weights.shape[1] // BLOCK, BLOCK, weights.shape[2] // 2, 2).transpose(
            0, 1, 3, 2, 4
        )
        values = np.ascontiguousarray(pairs).reshape(*pairs.shape[:3], 2 * BLOCK)
        whole = np.zeros((lanes, weights.shape[2]), np.int16)
        return cls(
            number, inputs, outputs, values, scale.astype(np.float32), whole, np.empty(lanes, np.float32)
        )


def product(x: np.ndarray, matrix: Matrix, index: int, y: np.ndarray) -> None:
    """y [B, O] = matrix number `index` times x [B, I], float32; every weight is read once for all lanes.

    An int8 matrix multiplies inputs that are rounded to 15 bits of their lane's largest, or as many as the
    sums have room for in 32.
    """
    raise NotImplementedError


@overload(product, jit_options={"fastmath": FAST})
def _product(x, matrix, index, y):
    return _product_int8 if matrix.types[3].dtype == types.int8 else _product_float32


def _product_float32(x, matrix, index, y):
    rows = matrix.values[index]
    y[:] = f32(0.0)
    for i in range(0, x.shape[1], 8):
        for b in range(x.shape[0]):
            add_rows(y[b], x[b][i : i + 8], rows[i : i + 8])


def _product_int8(x, matrix, index, y):
    lanes, inputs, outputs = x.shape[0], x.shape[1], y.shape[1]
    values, scale = matrix.values[index], matrix.scale[index]
    pairs = values.shape[1]
    most = np.floor(min(32767.0, 2.0**31 / (2 * 127 * pairs) - 1))
    whole, steps = matrix.whole, matrix.steps
    for b in range(lanes):
        line, to, largest = x[b], whole[b], f32(1e-30)
        for i in range(inputs):
            largest = larger(largest, abs(line[i]))
        factor = f32(most) / largest
        steps[b] = f32(1.0) / factor
        for i in range(inputs):
            to[i] = np.int16(np.floor(line[i] * factor + f32(0.5)))
    sums = np.empty(BLOCK, np.int32)
    for block in range(values.shape[0]):
        first = BLOCK * block
        for b in range(lanes):
            sum_block(values[block], whole[b], pairs, sums)
            line = y[b]
            for o in range(min(BLOCK, outputs - first)):
                line[first + o] = sums[o] * (scale[first + o] * steps[b])


def _block_sums(_: Any, weights: Any, x: Any, pairs: Any, sums: Any) -> Any:
    """sums [64] int32 = weights [pairs, 128] int8, two inputs of 64 outputs, times x [2 pairs] int16.

    The sum of two neighbouring products is one instruction on every CPU that matters (vpmaddwd, vpdpwssd),
    but LLVM finds it only in vectors that are written out as here.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int16, int32 = ir.IntType(16), ir.IntType(32)
        sixteen, products = ir.VectorType(int32, 16), ir.VectorType(int32, 32)
        bytes_ = ir.VectorType(ir.IntType(8), 32)
        some, some_products = ir.Constant(sixteen, ir.Undefined), ir.Constant(products, ir.Undefined)
        zeros = ir.Constant(sixteen, [0] * 16)
        even, odd = (ir.Constant(sixteen, list(range(first, 32, 2))) for first in (0, 1))

        def data(place: int, kind: Any) -> Any:
            array = context.make_array(signature.args[place])(context, builder, args[place])
            return builder.bitcast(array.data, kind.as_pointer())

        weight, pair, out = data(0, bytes_), data(1, int32), data(3, sixteen)
        totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(4)]
        with cgutils.for_range(builder, args[2]) as loop:
            two = builder.load(builder.gep(pair, [loop.index]), align=2)
            two = builder.shuffle_vector(builder.insert_element(some, two, int32(0)), some, zeros)
            two = builder.sext(builder.bitcast(two, ir.VectorType(int16, 32)), products)
            first = builder.mul(loop.index, loop.index.type(4))
            for number, total in enumerate(totals):
                place = builder.gep(weight, [builder.add(first, loop.index.type(number))])
                both = builder.mul(builder.sext(builder.load(place, align=1), products), two)
                neighbours = [builder.shuffle_vector(both, some_products, half) for half in (even, odd)]
                builder.store(builder.add(builder.load(total), builder.add(*neighbours)), total)
        for number, total in enumerate(totals):
            builder.store(builder.load(total), builder.gep(out, [int32(number)]), align=4)
        return context.get_dummy_value()

    return types.void(weights, x, pairs, sums), build


sum_block: Any = intrinsic(_block_sums)
