"""Pieces that the bodies of several operators share, written with an onnxscript `OpBuilder`.

All of them compute in float32 and stay inside the operators whose meaning is the same in opsets 17 to 25; the one
fork, reductions whose axes became an input in opset 18, is `reduce`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

__all__ = [
    "attribute",
    "dequantised_matmul",
    "dim",
    "dynamic_quantise",
    "every_second",
    "integer_matmul",
    "narrow",
    "nonzero",
    "opset",
    "quantise",
    "reduce",
    "rms_norm",
    "rotate",
    "rounded",
    "scatter_rows",
    "widen",
]

_END = 2**63 - 1
"""A Slice end that stands for "to the end of the axis"."""


def opset(op: OpBuilder) -> int:
    """The version of the default domain that the body under construction imports."""
    return op.builder.graph.opset_imports[""]


def attribute(op: OpBuilder, name: str) -> ir.Value:
    """The value of the function's FLOAT attribute `name`, as a scalar."""
    value: ir.Value = op.Constant(value_float=ir.RefAttr("value_float", name, ir.AttributeType.FLOAT))
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(())  # inference does not follow references
    return value


def dim(op: OpBuilder, x: ir.Value, axis: int) -> ir.Value:
    """The size of one axis, as a tensor of shape (1)."""
    size: ir.Value = op.Shape(x, start=axis) if axis == -1 else op.Shape(x, start=axis, end=axis + 1)
    return size


def widen(op: OpBuilder, x: ir.Value) -> ir.Value:
    """`x` in float32; no node is added where it is float32 already."""
    return x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)


def narrow(op: OpBuilder, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The float32 `x` as `dtype`, rounded half to even; no node is added for float32."""
    return x if dtype == ir.DataType.FLOAT else op.Cast(x, to=dtype)


def rounded(op: OpBuilder, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The float32 `x` after a round trip through `dtype`, as when a device stores it in between."""
    return widen(op, narrow(op, x, dtype))


def reduce(op: OpBuilder, kind: str, x: ir.Value) -> ir.Value:
    """`kind` ("ReduceMean", "ReduceMax", ...) over the last axis, which is kept with size 1.

    The axes of ReduceSum became an input in opset 13, those of the others in opset 18.
    """
    operator: Callable[..., ir.Value] = getattr(op, kind)
    if opset(op) < 18 and kind != "ReduceSum":
        return operator(x, axes=[-1], keepdims=1)
    return operator(x, [-1], keepdims=1)


def rms_norm(op: OpBuilder, x: ir.Value, gamma: ir.Value, epsilon: ir.Value | float) -> ir.Value:
    """`gamma * x / sqrt(mean(x^2) + epsilon)` over the last axis, all float32.

    The spelling is the one that ONNX Runtime fuses into a single kernel.
    """
    variance = reduce(op, "ReduceMean", op.Pow(x, 2.0))
    normed: ir.Value = op.Mul(op.Div(x, op.Sqrt(op.Add(variance, epsilon))), gamma)
    return normed


def rotate(op: OpBuilder, first: ir.Value, second: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotary embedding of a vector given as its two halves, in half-split order.

    `first` and `second` are (..., Dr/2); `cos` and `sin` are (..., Dr) and used as they come (their halves need not
    be equal). Returns `[first | second] * cos + [-second | first] * sin`, (..., Dr), float32. For interleaved features
    the halves are the even and the odd lanes.
    """
    straight = op.Mul(op.Concat(first, second, axis=-1), cos)
    turned = op.Mul(op.Concat(op.Neg(second), first, axis=-1), sin)
    rotated: ir.Value = op.Add(straight, turned)
    return rotated


def quantise(op: OpBuilder, x: ir.Value) -> ir.Value:
    """The float32 `x` as int8: rounded half to even, then saturated."""
    quantised: ir.Value = op.Cast(op.Clip(op.Round(x), -128.0, 127.0), to=ir.DataType.INT8)
    return quantised


def dynamic_quantise(op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Symmetric int8 quantisation of each row of the last axis: values, and scales `max|x| / 127` of size 1 there.

    A row of zeros gets scale 0 and values 0.
    """
    scale = op.Div(reduce(op, "ReduceMax", op.Abs(x)), 127.0)
    return quantise(op, op.Div(x, nonzero(op, scale))), scale


def nonzero(op: OpBuilder, scale: ir.Value) -> ir.Value:
    """`scale` with 1 in the place of 0, so that one may divide by it."""
    safe: ir.Value = op.Where(op.Equal(scale, 0.0), 1.0, scale)
    return safe


def every_second(op: OpBuilder, x: ir.Value, start: ir.Value | list[int]) -> ir.Value:
    """The lanes `start`, `start + 2`, ... of the last axis."""
    lanes: ir.Value = op.Slice(x, start, [_END], [-1], [2])
    return lanes


def float_of_bits(op: OpBuilder, bits: ir.Value) -> ir.Value:
    """The float32 whose bits are the low 32 bits of the int64 `bits`, put together from sign, exponent and fraction.

    Exact for every finite value, subnormal ones included, and for infinities; a NaN becomes an infinity.
    """
    word = op.Mod(bits, 2**32)
    exponent, fraction = op.Mod(op.Div(word, 2**23), 256), op.Mod(word, 2**23)
    mantissa = op.Where(op.Equal(exponent, 0), fraction, op.Add(fraction, 2**23))
    powers = np.ldexp(np.float32(1), np.maximum(np.arange(256), 1) - 150).astype(np.float32)
    power = op.Gather(op.Constant(value=ir.tensor(powers)), exponent)
    magnitude = op.Mul(op.Cast(mantissa, to=ir.DataType.FLOAT), power)
    value: ir.Value = op.Where(op.Less(word, 2**31), magnitude, op.Neg(magnitude))
    return value


def integer_matmul(op: OpBuilder, x: ir.Value, weight: ir.Value) -> ir.Value:
    """The exact int32 product of int8 tensors, `x` (..., k) and `weight` (k, n).

    ONNX Runtime multiplies int8 by int8 in scalar code, and uint8 by int8 on some processors with an instruction that
    saturates; uint8 by uint8 is vectorised and exact everywhere. So both factors are shifted by 128, which the zero
    points take back. For a constant weight the shift is folded away.
    """
    zero_point = op.Constant(value=ir.tensor(np.array(128, np.uint8)))
    product: ir.Value = op.MatMulInteger(_shifted(op, x), _shifted(op, weight), zero_point, zero_point)
    return product


def dequantised_matmul(
    op: OpBuilder, x: ir.Value, weight: ir.Value, row_scale: ir.Value, column_scale: ir.Value
) -> ir.Value:
    """The product of int8 tensors, `x` (T, k) and `weight` (k, n), times scales (T, 1) and (1, n); float32."""
    exact = op.Cast(integer_matmul(op, x, weight), to=ir.DataType.FLOAT)
    dequantised: ir.Value = op.Mul(op.Mul(exact, row_scale), column_scale)
    return dequantised


def _shifted(op: OpBuilder, x: ir.Value) -> ir.Value:
    shifted: ir.Value = op.Cast(op.Add(op.Cast(x, to=ir.DataType.INT32), 128), to=ir.DataType.UINT8)
    return shifted


def scatter_rows(
    op: OpBuilder,
    cache: ir.Value,
    slots: ir.Value,
    rows: ir.Value,
    *,
    block_size: ir.Value | None = None,
    lanes: ir.Value | None = None,
) -> ir.Value:
    """A paged cache with `rows` (K, H) written at `slots` (K), int64, each slot valid.

    Slot p is row p of the cache seen as (BlockNum * BlockSize, H). With `lanes` and `block_size`, both of shape (1),
    every block is stored as (H / lanes, BlockSize, lanes) instead.
    """
    index = op.Unsqueeze(slots, [-1])
    width = op.Shape(rows, start=-1)
    if lanes is not None:
        # Piece f of the row for slot p is line (p / BlockSize * (H / lanes) + f) * BlockSize + p % BlockSize of the
        # cache seen as lines of `lanes` elements.
        pieces = op.Div(width, lanes)
        piece = op.Range(0, op.Squeeze(pieces, [0]), 1)
        line = op.Add(op.Mul(op.Div(index, block_size), pieces), piece)
        index = op.Unsqueeze(op.Add(op.Mul(line, block_size), op.Mod(index, block_size)), [-1])
        rows = op.Reshape(rows, op.Concat([-1], pieces, lanes, axis=0))
        width = lanes
    lines = op.Reshape(cache, op.Concat([-1], width, axis=0))
    written: ir.Value = op.Reshape(op.ScatterND(lines, index, rows), op.Shape(cache), allowzero=1)
    return written
