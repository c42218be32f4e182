"""Products of the compiled sampler with large matrices, whose weights are float32 or int8.

Which one is known when a kernel is compiled, and so is what multiplies int8: the dot-product instruction of
CPUs with AVX512-VNNI, or vectors of int16 elsewhere. Both give the same numbers, bit for bit.

Shapes: B lanes, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from txl_audio.sampling.numerics import FAST, add_rows, f32, larger

BLOCK = 64
"""Outputs of an int8 matrix that are summed together: 4 vector registers of 16 int32."""
GROUP = 4
"""Inputs of an int8 matrix that are multiplied together."""
ZERO = 128
"""What an int8 weight of 0 is kept as, since the dot-product instruction wants one factor without a sign."""
MOST = 127 * 256 + 127
"""The largest rounded input, so that its high byte is one with a sign, as its low byte is."""
CACHE_LINE = 64
"""Bytes."""
_NUMBA: Any = config  # its settings are no declared attributes
DOT_PRODUCTS = bool(
    get_host_cpu_features().get("avx512vnni") and not (_NUMBA.CPU_NAME or _NUMBA.CPU_FEATURES)
)
"""Whether kernels are compiled for a CPU with vpdpbusd; numba may be told to compile for another one."""


class Matrix(NamedTuple):
    """`number` matrices of one shape, as `product` reads them.

    float32: values [N, I, O], scale empty. int8: values [N, O / 64, I / 4, 256] uint8, four inputs of 64
    outputs beside each other and both sizes filled up with zeros; scale [N, O] float32 of every output.
    Scratch for the rounded inputs of B lanes, since to allocate it anew for every product would take a tenth
    of a step: whole [B, I] int16, or [B, 2, I] int8 of their high and low bytes for the dot-product
    instruction; steps [B], what 1 of them says; shifts [B], what the zero of the weights adds to every sum.
    """

    number: int
    inputs: int
    outputs: int
    values: np.ndarray
    scale: np.ndarray
    whole: np.ndarray
    steps: np.ndarray
    shifts: np.ndarray

    @classmethod
    def pack(cls, weights: np.ndarray, kind: str, *, lanes: int = 1) -> Matrix:
        """weights [N, O, I] float32, as PyTorch keeps them; kind `float32` or `int8`; lanes: of inputs."""
        number, outputs, inputs = weights.shape
        rounded = np.zeros((lanes, 2, inputs + -inputs % GROUP), np.int8)
        if not DOT_PRODUCTS:
            rounded = rounded.reshape(lanes, -1).view(np.int16)
        steps, shifts = np.empty(lanes, np.float32), np.empty(lanes, np.int32)
        if kind == "float32":
            values = _aligned(weights.transpose(0, 2, 1))
            none = np.empty((0, 0), np.float32)
            return cls(number, inputs, outputs, values, none, rounded, steps, shifts)
        weights = np.pad(weights, ((0, 0), (0, -outputs % BLOCK), (0, -inputs % GROUP)))
        scale = np.abs(weights).max(axis=2, initial=1e-30) / 127
        values = (np.rint(weights / scale[:, :, None]) + ZERO).astype(np.uint8)
        blocks, groups = values.shape[1] // BLOCK, values.shape[2] // GROUP
        values = values.reshape(number, blocks, BLOCK, groups, GROUP).transpose(0, 1, 3, 2, 4)
        values = _aligned(values.reshape(number, blocks, groups, BLOCK * GROUP))
        return cls(number, inputs, outputs, values, scale.astype(np.float32), rounded, steps, shifts)


def _aligned(values: np.ndarray) -> np.ndarray:
    """A copy in order that begins with a cache line: no vector that is read then lies in two."""
    room = np.empty(values.nbytes + CACHE_LINE, np.uint8)
    begin = -room.ctypes.data % CACHE_LINE
    copy = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def product(x: np.ndarray, matrix: Matrix, index: int, y: np.ndarray) -> None:
    """y [B, O] = matrix number `index` times x [B, I], float32; every weight is read once for all lanes.

    An int8 matrix multiplies inputs that are rounded to 15 bits of their lane's largest, or as many as the
    sums have room for in 32.
    """
    raise NotImplementedError


@overload(product, jit_options={"fastmath": FAST})
def _product(x, matrix, index, y):
    return _product_float32 if matrix.types[3].dtype == types.float32 else _product_int8


def _product_float32(x, matrix, index, y):
    rows = matrix.values[index]
    y[:] = f32(0.0)
    for i in range(0, x.shape[1], 8):
        for b in range(x.shape[0]):
            add_rows(y[b], x[b][i : i + 8], rows[i : i + 8])


def _product_int8(x, matrix, index, y):
    lanes, inputs, outputs = x.shape[0], x.shape[1], y.shape[1]
    values, scale = matrix.values[index], matrix.scale[index]
    groups = values.shape[1]
    most = np.floor(min(float(MOST), 2.0**31 / (GROUP * 127 * groups) - 1))
    whole, steps, shifts = matrix.whole, matrix.steps, matrix.shifts
    for b in range(lanes):
        line, largest = x[b], f32(1e-30)
        for i in range(inputs):
            largest = larger(largest, abs(line[i]))
        factor = f32(most) / largest
        steps[b] = f32(1.0) / factor
        # Sums may wrap around on their way: what is left after this shift has room.
        shifts[b] = ZERO * round_inputs(line, factor, whole[b])
    sums = np.empty(BLOCK, np.int32)
    for block in range(values.shape[0]):
        first = BLOCK * block
        for b in range(lanes):
            sum_block(values[block], whole[b], groups, sums)
            line, shift, step = y[b], shifts[b], steps[b]
            for o in range(min(BLOCK, outputs - first)):
                line[first + o] = f32(np.int32(sums[o] - shift)) * (scale[first + o] * step)


def round_inputs(line: np.ndarray, factor: float, whole: np.ndarray) -> int:
    """line [I] times factor, rounded, into a lane of `Matrix.whole`; returns the sum."""
    raise NotImplementedError


@overload(round_inputs, jit_options={"fastmath": FAST})
def _round_inputs(line, factor, whole):
    return _round_whole if whole.dtype == types.int16 else _round_bytes


def _round_whole(line, factor, whole):
    total = np.int32(0)
    for i in range(line.size):
        value = np.int32(np.floor(line[i] * factor + f32(0.5)))
        whole[i] = value
        total = np.int32(total + value)
    return total


def _round_bytes(line, factor, whole):
    high, low, total = whole[0], whole[1], np.int32(0)
    for i in range(line.size):
        value = np.int32(np.floor(line[i] * factor + f32(0.5)))
        high[i] = (value + 128) >> 8
        low[i] = value
        total = np.int32(total + value)
    return total


def _block_sums(_: Any, weights: Any, whole: Any, groups: Any, sums: Any) -> Any:
    """sums [64] int32 = weights [groups, 256] uint8, of 64 outputs, times a lane of `Matrix.whole`.

    LLVM finds the instructions that this is about only in vectors that are written out, or not at all.
    """
    multiply = _dot_products if whole.dtype == types.int8 else _neighbours

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = [context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 1, 3)]
        out = builder.bitcast(data[2], SIXTEEN.as_pointer())
        for number, total in enumerate(multiply(builder, data[0], data[1], args[2])):
            builder.store(total, builder.gep(out, [INT32(number)]), align=4)
        return context.get_dummy_value()

    return types.void(weights, whole, groups, sums), build


sum_block: Any = intrinsic(_block_sums)

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
SIXTEEN = ir.VectorType(INT32, 16)


def _dot_products(builder: Any, weights: Any, whole: Any, groups: Any) -> list[Any]:
    """With vpdpbusd, which adds four products of bytes to each of 16 sums: of high bytes and of low bytes."""
    kind = ir.FunctionType(SIXTEEN, [SIXTEEN] * 3)
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    weight = builder.bitcast(weights, SIXTEEN.as_pointer())
    input_ = builder.bitcast(whole, INT32.as_pointer())
    high, low = _zeros(builder, 4), _zeros(builder, 4)
    with cgutils.for_range(builder, groups) as loop:
        first = builder.mul(loop.index, loop.index.type(4))
        of_high = _repeated(builder, input_, loop.index, SIXTEEN)
        of_low = _repeated(builder, input_, builder.add(loop.index, groups), SIXTEEN)
        for number in range(4):
            place = builder.add(first, loop.index.type(number))
            values = builder.load(builder.gep(weight, [place]), align=1)
            for total, factor in ((high[number], of_high), (low[number], of_low)):
                builder.store(builder.call(dot, [builder.load(total), values, factor]), total)
    bits = ir.Constant(SIXTEEN, [8] * 16)
    return [
        builder.add(builder.shl(builder.load(a), bits), builder.load(b))
        for a, b in zip(high, low, strict=True)
    ]


def _neighbours(builder: Any, weights: Any, whole: Any, groups: Any) -> list[Any]:
    """The sum of two neighbouring products of int16 is one instruction on every CPU that matters (vpmaddwd,
    vpdpwssd). Half of the outputs at a time: older CPUs have registers for no more."""
    products = ir.VectorType(INT32, 32)
    weight = builder.bitcast(weights, ir.VectorType(INT8, 32).as_pointer())
    input_ = builder.bitcast(whole, INT64.as_pointer())
    none, pairs = ir.Constant(products, ir.Undefined), []
    for half in range(2):
        totals = _zeros(builder, 4)
        with cgutils.for_range(builder, groups) as loop:
            first = builder.mul(loop.index, loop.index.type(8))
            four = _repeated(builder, input_, loop.index, ir.VectorType(INT64, 8))
            four = builder.sext(builder.bitcast(four, ir.VectorType(INT16, 32)), products)
            for number, total in enumerate(totals):
                place = builder.add(first, loop.index.type(4 * half + number))
                values = builder.load(builder.gep(weight, [place]), align=1)
                sums = _add_neighbours(builder, builder.mul(builder.zext(values, products), four), none)
                builder.store(builder.add(builder.load(total), sums), total)
        pairs += [builder.load(total) for total in totals]
    # Two sums belong to each output: of the first two and of the last two of every four inputs.
    return [_add_neighbours(builder, a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]


def _zeros(builder: Any, number: int) -> list[Any]:
    zeros = ir.Constant(SIXTEEN, [0] * 16)
    totals = [cgutils.alloca_once(builder, SIXTEEN) for _ in range(number)]
    for total in totals:
        builder.store(zeros, total)
    return totals


def _repeated(builder: Any, numbers: Any, index: Any, kind: Any) -> Any:
    """A vector of nothing but the number at an index."""
    none, zeros = (
        ir.Constant(kind, ir.Undefined),
        ir.Constant(ir.VectorType(INT32, kind.count), [0] * kind.count),
    )
    number = builder.load(builder.gep(numbers, [index]), align=1)
    return builder.shuffle_vector(builder.insert_element(none, number, INT32(0)), none, zeros)


def _add_neighbours(builder: Any, a: Any, b: Any) -> Any:
    """[16] int32: the sums of every two neighbours in a and b, one behind the other."""
    halves = (ir.Constant(SIXTEEN, list(range(first, 32, 2))) for first in (0, 1))
    return builder.add(*(builder.shuffle_vector(a, b, half) for half in halves))
