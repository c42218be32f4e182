"""Arithmetic of the compiled sampler: what LLVM turns into vector instructions.

numba calls the scalar functions of libm one number at a time; the polynomials here are computed many at once.
Keys and values of the ring are float32 or pairs of bfloat16 in a uint32, of which a whole register is read at
once; which one is known when a kernel is compiled.

Shapes: B lanes, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

FAST = {"contract", "reassoc", "nsz", "arcp", "nnan", "ninf"}
"""Sums may be taken in any order."""
EXACT = {"contract"}
"""Order matters: the two steps of a range reduction must not be merged."""

f32 = np.float32


@register_jitable(fastmath=EXACT)
def exp(x):
    """e^x of a float32 in [-87, 88], to 1e-7 (Cephes expf)."""
    x = min(max(x, f32(-87.0)), f32(88.0))
    n = np.floor(x * f32(1.44269504) + f32(0.5))
    r = (x - n * f32(0.693359375)) + n * f32(2.12194440e-4)
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    p = p * r * r + r + f32(1.0)
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@register_jitable(fastmath=EXACT)
def exp64(x):
    """e^x of a float64 in [-700, 700], to 1e-15 (Taylor's series)."""
    x = min(max(x, -700.0), 700.0)
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
    p = 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = (p * r + 1.0) * r + 1.0
    return p * np.int64((np.int64(n) + 1023) << 52).view(np.float64)


@register_jitable(fastmath=EXACT)
def erf(x):
    """The error function of a float32, to 1e-7 (N. Juffa's minimax polynomials)."""
    t, s = abs(x), x * x
    r = f32(-1.72853470e-5) * t + f32(3.83197126e-4)
    r = r * s + (f32(-3.88396438e-3) * t + f32(2.42546219e-2))
    r = r * t + f32(-1.06777877e-1)
    r = r * t + f32(-6.34846687e-1)
    r = r * t + f32(-1.28717512e-1)
    far = np.copysign(f32(1.0) - exp(r * t - t), x)
    q = f32(-5.96761703e-4)
    q = q * s + f32(4.99119423e-3)
    q = q * s + f32(-2.67681349e-2)
    q = q * s + f32(1.12819925e-1)
    q = q * s + f32(-3.76125336e-1)
    q = q * s + f32(1.28379166e-1)
    return far if t > f32(0.927734375) else q * x + x


@register_jitable(fastmath=FAST)
def add_bias(x, bias):
    """x [B, O] += bias [O]."""
    for b in range(x.shape[0]):
        line = x[b]
        for i in range(bias.size):
            line[i] += bias[i]


@register_jitable(fastmath=FAST)
def add_bias_gelu(x, bias):
    """x [B, O] becomes GELU(x + bias) in its exact form, as `torch.nn.functional.gelu`."""
    for b in range(x.shape[0]):
        line = x[b]
        for i in range(bias.size):
            value = line[i] + bias[i]
            line[i] = value * f32(0.5) * (f32(1.0) + erf(value * f32(0.70710678)))


@register_jitable(fastmath=FAST)
def layer_norm(x, weight, out):
    """x [B, D] -> out [B, D], which may be x; weight [2, D]: what it is multiplied by, what is added."""
    width = x.shape[1]
    for b in range(x.shape[0]):
        line, to = x[b], out[b]
        mean = f32(0.0)
        for i in range(width):
            mean += line[i]
        mean /= f32(width)
        variance = f32(0.0)
        for i in range(width):
            variance += (line[i] - mean) * (line[i] - mean)
        factor = f32(1.0) / np.sqrt(variance / f32(width) + f32(1e-5))
        for i in range(width):
            to[i] = (line[i] - mean) * factor * weight[0, i] + weight[1, i]


def _half(high: bool) -> Any:
    """The lower or the higher bfloat16 of a uint32, as float32: it is the front half of one."""

    def typed(_: Any, pair: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(32)
            bits = builder.and_(args[0], word(0xFFFF0000)) if high else builder.shl(args[0], word(16))
            return builder.bitcast(bits, ir.FloatType())

        return types.float32(pair), build

    return intrinsic(typed)


low_half, high_half = _half(False), _half(True)


def _larger(_: Any, a: Any, b: Any) -> Any:
    """max(a, b) of two float32 that are no NaN. Python's `max` keeps LLVM from finding many at once."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FloatType()
        function = ir.FunctionType(kind, [kind, kind])
        return builder.call(builder.module.declare_intrinsic("llvm.maxnum", [kind], function), args)

    return types.float32(types.float32, types.float32), build


larger: Any = intrinsic(_larger)


def _borrowed(_: Any, values: Any) -> Any:
    """The same arrays, also those in tuples, whose users are not counted: only for a function's arguments,
    which its caller keeps alive.

    numba counts whenever an array is taken from a tuple or sliced, each time by an atomic operation.
    """

    def uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value)
            array.meminfo = ir.Constant(array.meminfo.type, None)
            return array._getvalue()
        if isinstance(kind, types.BaseTuple):
            parts: Any = kind.types  # pyright: ignore[reportAttributeAccessIssue]
            for index, part in enumerate(parts):
                own = uncounted(context, builder, part, builder.extract_value(value, index))
                value = builder.insert_value(value, own, index)
        return value

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return uncounted(context, builder, values, args[0])

    return values(values), build


borrowed: Any = intrinsic(_borrowed)


@register_jitable(fastmath=FAST)
def add_dots(y, rows, x):
    """y [N] += rows [N, I] . x [I]."""
    for j in range(y.size):
        row, total = rows[j], f32(0.0)
        for i in range(x.size):
            total += row[i] * x[i]
        y[j] += total


@register_jitable(fastmath=FAST)
def dense(x, weights, y):
    """y [B, O] += x [B, I] weights^T, with weights [O, I] as PyTorch keeps them: for few outputs."""
    for b in range(x.shape[0]):
        add_dots(y[b], weights, x[b])


@register_jitable(fastmath=FAST)
def add_rows(y, x, rows):
    """y [O] += x [I] . rows [I, O], eight rows at a time: y is then read and written an eighth as often."""
    whole = x.size - x.size % 8
    for i in range(0, whole, 8):
        r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        r4, r5, r6, r7 = rows[i + 4], rows[i + 5], rows[i + 6], rows[i + 7]
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        x4, x5, x6, x7 = x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        for o in range(y.size):
            low = (x0 * r0[o] + x1 * r1[o]) + (x2 * r2[o] + x3 * r3[o])
            high = (x4 * r4[o] + x5 * r5[o]) + (x6 * r6[o] + x7 * r7[o])
            y[o] += low + high
    for i in range(whole, x.size):
        row = rows[i]
        for o in range(y.size):
            y[o] += x[i] * row[o]


def put(row: np.ndarray, values: np.ndarray) -> None:
    """Writes float32 values [d] into a row of the ring; bfloat16 is rounded to the nearest, ties to even."""
    raise NotImplementedError


def as_ring(values: np.ndarray, out: np.ndarray, rows: np.ndarray) -> None:
    """values [d] in the order that rows of the ring are read in: of pairs all first ones, then all second."""
    raise NotImplementedError


def from_ring(values: np.ndarray, out: np.ndarray, rows: np.ndarray) -> None:
    """The inverse of `as_ring`."""
    raise NotImplementedError


def ring_dots(y: np.ndarray, rows: np.ndarray, x: np.ndarray) -> None:
    """`add_dots` with rows of the ring and x in its order."""
    raise NotImplementedError


def ring_rows(y: np.ndarray, x: np.ndarray, rows: np.ndarray) -> None:
    """`add_rows` with rows of the ring and y in its order."""
    raise NotImplementedError


@overload(put, jit_options={"fastmath": FAST})
def _put(row, values):
    return _put_float32 if row.dtype == types.float32 else _put_pairs


@overload(as_ring)
def _as_ring(values, out, rows):
    return _copy if rows.dtype == types.float32 else _halves


@overload(from_ring)
def _from_ring(values, out, rows):
    return _copy if rows.dtype == types.float32 else _pairs


@overload(ring_dots, jit_options={"fastmath": FAST})
def _ring_dots(y, rows, x):
    return (lambda y, rows, x: add_dots(y, rows, x)) if rows.dtype == types.float32 else _pair_dots


@overload(ring_rows, jit_options={"fastmath": FAST})
def _ring_rows(y, x, rows):
    return (lambda y, x, rows: add_rows(y, x, rows)) if rows.dtype == types.float32 else _pair_rows


def _put_float32(row, values):
    row[:] = values


def _put_pairs(row, values):
    bits = values.view(np.uint32)
    for i in range(row.size):
        low, high = bits[2 * i], bits[2 * i + 1]
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        high = (high + 0x7FFF + ((high >> 16) & 1)) & 0xFFFF0000
        row[i] = low | high


def _copy(values, out, rows):
    out[:] = values


def _halves(values, out, rows):
    half = values.size // 2
    for i in range(half):
        out[i], out[half + i] = values[2 * i], values[2 * i + 1]


def _pairs(values, out, rows):
    half = values.size // 2
    for i in range(half):
        out[2 * i], out[2 * i + 1] = values[i], values[half + i]


def _pair_dots(y, rows, x):
    even, odd = x[: x.size // 2], x[x.size // 2 :]
    for j in range(y.size):
        row, total = rows[j], f32(0.0)
        for i in range(even.size):
            total += low_half(row[i]) * even[i] + high_half(row[i]) * odd[i]
        y[j] += total


def _pair_rows(y, x, rows):
    even, odd = y[: y.size // 2], y[y.size // 2 :]
    whole = x.size - x.size % 4
    for i in range(0, whole, 4):
        r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        for o in range(even.size):
            low = x0 * low_half(r0[o]) + x1 * low_half(r1[o])
            even[o] += low + (x2 * low_half(r2[o]) + x3 * low_half(r3[o]))
            high = x0 * high_half(r0[o]) + x1 * high_half(r1[o])
            odd[o] += high + (x2 * high_half(r2[o]) + x3 * high_half(r3[o]))
    for i in range(whole, x.size):
        row = rows[i]
        for o in range(even.size):
            even[o] += x[i] * low_half(row[o])
            odd[o] += x[i] * high_half(row[o])
