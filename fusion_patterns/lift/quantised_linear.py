"""Projections of 8-bit rows through an int8 weight: an integer product, and what makes real numbers of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op, static
from fusion_patterns.lift.linear import WeightView
from fusion_patterns.lift.quantised import (
    OtherwiseQuantised,
    PerToken,
    Quantised,
    recognise_quantised,
    row_maximum,
    zero_point_of,
)
from fusion_patterns.miss import Miss, miss

__all__ = [
    "INTEGER_PRODUCT",
    "UNDERSTOOD",
    "QuantisedLinear",
    "QuantisedProduct",
    "dequantised",
    "recognise_quantised_linear",
    "recognise_quantised_product",
]

INTEGER_PRODUCT = "a product of 8-bit rows and a constant int8 weight"
"""What is expected where no such thing was found at all."""

UNDERSTOOD = "rows in -128 .. 127 by one scale, or one a token, times an int8 weight without zero point"
"""What a product must be that is not odd."""

_UNSIGNED_BY = 128


@dataclass(frozen=True)
class QuantisedProduct:
    """(codes - shift) W: `codes` int8 (.., k) of the rows, `weight` int8 (k, n).

    What the product is multiplied by afterwards, because its operands were dequantised before it, are `scales`. Where
    `odd` says what no operator computes, the rest does not count.
    """

    rows: Quantised
    shift: int
    weight: WeightView
    scales: tuple[ir.Value, ...]
    bias: ir.Value | None
    node: ir.Node
    odd: str | None = None


@dataclass(frozen=True)
class QuantisedLinear:
    """y = (product + bias) * scales, and by the scale of each row where `by_row`; `bias` (n) holds integers.

    `scales` are constants of one element or one for every column.
    """

    product: QuantisedProduct
    bias: ir.Value | None
    scales: tuple[ir.Value, ...]
    by_row: bool

    @property
    def x(self) -> ir.Value:
        """The rows (.., k) before they were quantised."""
        return self.product.rows.x

    @property
    def rows(self) -> Quantised:
        return self.product.rows

    @property
    def weight(self) -> WeightView:
        return self.product.weight

    @property
    def node(self) -> ir.Node:
        return self.product.node

    def column_scales(self) -> npt.NDArray[np.float32]:
        """(n): what the integers of each column are multiplied by."""
        product = np.ones(self.weight.shape[1], np.float32)
        for scale in self.scales:
            product = product * _array(scale).astype(np.float32).reshape(-1)
        return product


def recognise_quantised_linear(value: ir.Value, facts: Facts) -> QuantisedLinear | Miss:
    """The projection of 8-bit rows that computes a value.

    Spellings
    ---------
    1. Integer product, Add(integers), Cast(float), Mul(one scale for every column), Mul(the scale of each row).
    2. The same in floating point throughout.
    3. Product of two DequantizeLinear.
    """
    return facts.remember("quantised_linear", value, _linear)


def _linear(value: ir.Value, facts: Facts) -> QuantisedLinear | Miss:
    scales: list[ir.Value] = []
    largest = None
    current = _unrounded(value, facts)
    while is_op(node := current.producer(), "Mul"):
        step = _scaled(node, facts)
        if step is None or (step[2] is not None and largest is not None):
            break
        current = facts.plain(step[0])
        scales.extend([] if step[1] is None else [step[1]])
        largest = step[2] or largest
    current = _float_of_integers(current, facts)
    bias = None
    if is_op(current.producer(), "Add"):
        parts = _biased(current.producer(), facts)
        if parts is not None:
            current, bias = _float_of_integers(parts[0], facts), parts[1]
    found = current.producer()
    product = None if found is None else recognise_quantised_product(found, facts)
    if product is None and bias is not None and isinstance(recognise_quantised_linear(current, facts), QuantisedLinear):
        return miss("bias", value, "integers added before scaling", "a bias added after it")
    if product is None:
        got = "a graph input" if found is None else found.op_type
        return miss("quantisation-unsupported", value, INTEGER_PRODUCT, got)
    if product.odd is not None:
        return miss("quantisation-unsupported", product.node, UNDERSTOOD, product.odd)
    scales.extend(product.scales)
    return _checked(QuantisedLinear(product, bias, tuple(scales), largest is not None), largest, value)


def _checked(linear: QuantisedLinear, largest: ir.Value | None, value: ir.Value) -> QuantisedLinear | Miss:
    rows, product = linear.rows, linear.product
    width = linear.weight.shape[1]
    if isinstance(rows, PerToken) and rows.largest is not largest:
        return miss("quantisation-unsupported", value, "a product by the scale of each row", "none, or another")
    if not isinstance(rows, PerToken) and largest is not None:
        return miss("quantisation-unsupported", value, "a product by one scale", "one for every row")
    if any(static(scale.shape)[-1:] not in ((), (1,), (width,)) for scale in linear.scales):
        return miss("quantisation-unsupported", value, f"one scale for each of {width} columns", "another number")
    if product.bias is not None:
        if linear.bias is not None:
            return miss("bias", value, "one bias", "two")
        linear = replace(linear, bias=product.bias)
    if linear.bias is not None:
        if product.scales:
            return miss("bias", value, "integers added before scaling", "a bias on dequantised numbers")
        if static(linear.bias.shape)[-1:] != (width,) or not _holds_integers(linear.bias):
            return miss("bias", value, f"{width} integers added before scaling", "other numbers")
    return linear


def _unrounded(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before one rounding from float32 to the type of the model."""
    node = facts.producer(value)
    narrow = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if is_op(node, "Cast") and attribute(node, "to") in narrow and facts.input(node, 0).dtype == ir.DataType.FLOAT:
        return facts.input(node, 0)
    return facts.plain(value)


def _float_of_integers(value: ir.Value, facts: Facts) -> ir.Value:
    node = facts.producer(value)
    if is_op(node, "Cast") and facts.input(node, 0).dtype == ir.DataType.INT32:
        return facts.input(node, 0) if attribute(node, "to") == ir.DataType.FLOAT else value
    return facts.plain(value)


def _scaled(node: ir.Node, facts: Facts) -> tuple[ir.Value, ir.Value | None, ir.Value | None] | None:
    """(x, constant, None) of x * constant, or (x, None, m) of x * m / 127 with m from each row."""
    for x, factor in facts.either_way(node):
        if _is_vector(factor, facts):
            return x, factor, None
    for x, factor in facts.either_way(node):
        largest = row_maximum(factor, facts)
        if largest is not None:
            return x, None, largest
    return None


def _biased(node: ir.Node | None, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    if node is None:
        return None
    for x, bias in facts.either_way(node):
        if _is_vector(bias, facts):
            return x, bias
    return None


def _is_vector(value: ir.Value, facts: Facts) -> bool:
    """A constant with all its elements along the last axis."""
    shape = facts.shape(value)
    constant = value.is_initializer() and not value.is_graph_input() and value.const_value is not None
    return constant and shape is not None and all(dim == 1 for dim in shape[:-1]) and isinstance((1, *shape)[-1], int)


def _holds_integers(value: ir.Value) -> bool:
    """Whether a bias, the size of one row, can be stored as int32. Its numbers are read for that."""
    numbers = _array(value)
    if np.issubdtype(numbers.dtype, np.integer):
        return True
    exact = numbers.astype(np.float64)
    return bool(np.all(exact == np.rint(exact)) and np.all(np.abs(exact) < 2**31))


def _array(value: ir.Value) -> npt.NDArray[np.generic]:
    tensor = value.const_value
    if tensor is None:
        raise ValueError(f"constant {value.name!r} has no data")
    return tensor.numpy()


# --- The product ------------------------------------------------------------------------------------------------------


def recognise_quantised_product(node: ir.Node, facts: Facts) -> QuantisedProduct | None:
    """The product of 8-bit rows and a constant 8-bit weight that a node computes, in integers or floating point.

    MatMul, MatMulInteger, QLinearMatMul, and Gemm of alpha and beta 1.
    """
    return facts.remember("quantised_product", node.outputs[0], lambda _value, f: _product(node, f))


def _product(node: ir.Node, facts: Facts) -> QuantisedProduct | None:
    if not is_op(node, "MatMul", "MatMulInteger", "QLinearMatMul", "Gemm"):
        return None
    turned, bias = False, None
    if node.op_type == "Gemm":
        if (attribute(node, "alpha"), attribute(node, "beta"), attribute(node, "transA")) != (1, 1, 0):
            return None
        turned = bool(attribute(node, "transB"))
        bias = facts.input(node, 2) if facts.has(node, 2) else None
    weight = _weight(facts.input(node, 3 if node.op_type == "QLinearMatMul" else 1), turned, facts)
    rows = None if weight is None else _codes(facts.input(node, 0), facts)
    if weight is None or rows is None:
        return None
    odd, shift = rows.odd or weight.odd, rows.shift
    if isinstance(rows.rows, OtherwiseQuantised):
        odd = f"rows quantised {rows.rows.how}"
    if node.op_type == "QLinearMatMul":
        odd = odd or "a product whose result is quantised again"
    if node.op_type == "MatMulInteger":
        zero_points = [_zero_point(node, index, facts) for index in (2, 3)]
        shift += zero_points[0] or 0
        if zero_points[0] is None:
            odd = odd or "rows with a zero point that is not one constant"
        if zero_points[1] != 0:
            odd = odd or "a weight with zero points"
    if bias is not None and not _is_vector(bias, facts):
        odd = odd or "a bias that is no constant vector"
    scales = tuple(scale for scale in (rows.scale, weight.scale) if scale is not None)
    return QuantisedProduct(rows.rows, shift, weight.view, scales, bias, node, odd)


def _zero_point(node: ir.Node, index: int, facts: Facts) -> int | None:
    """The one number that all zero points are."""
    if not facts.has(node, index):
        return 0
    value = facts.input(node, index)
    if not _is_vector(value, facts):
        return None
    numbers = set(_array(value).reshape(-1).tolist())
    return int(numbers.pop()) if len(numbers) == 1 else None


@dataclass(frozen=True)
class _Codes:
    """(codes of `rows` - shift) * scale."""

    rows: Quantised
    shift: int
    scale: ir.Value | None
    odd: str | None = None


@dataclass(frozen=True)
class _Weight:
    """view * scale, one number or one for every column."""

    view: WeightView
    scale: ir.Value | None
    odd: str | None


def _codes(value: ir.Value, facts: Facts) -> _Codes | None:
    node = facts.producer(value)
    if is_op(node, "DequantizeLinear"):
        rows = recognise_quantised(facts.input(node, 0), facts)
        if isinstance(rows, Miss):
            return None
        scale, zero_point = facts.input(node, 1), zero_point_of(node, facts)
        if facts.scalar(scale) is None or zero_point is None:
            return _Codes(rows, 0, None, "rows dequantised by scales that are not one constant")
        return _Codes(rows, zero_point, scale)
    codes, shift = value, 0
    while is_op(node, "Sub", "Cast"):
        if node.op_type == "Sub":
            constant = facts.scalar(facts.input(node, 1))
            if constant is None or constant != int(constant):
                return None
            shift += int(constant)
        elif not is_op(facts.producer(facts.input(node, 0)), "Sub"):
            break
        codes = facts.input(node, 0)
        node = facts.producer(codes)
    rows = recognise_quantised(codes, facts)
    if isinstance(rows, Miss):
        return None
    return _Codes(rows, shift - (_UNSIGNED_BY if rows.value.dtype == ir.DataType.UINT8 else 0), None)


def _weight(value: ir.Value, turned: bool, facts: Facts) -> _Weight | None:
    """A constant 8-bit matrix under Transpose, Cast and DequantizeLinear."""
    current, scale, odd = value, None, None
    while True:
        node = facts.producer(current)
        if is_op(node, "Transpose") and attribute(node, "perm") in (None, [1, 0], (1, 0)):
            turned = not turned
        elif is_op(node, "DequantizeLinear"):
            scale = facts.input(node, 1)
            odd = odd or _odd_scale(node, 0 if turned else 1, facts)
        elif not is_op(node, "Cast"):
            break
        current = facts.input(node, 0)
    shape = current.shape
    matrix = current.is_initializer() and not current.is_graph_input() and shape is not None and len(shape) == 2
    if not matrix or current.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        return None
    if current.dtype == ir.DataType.UINT8:
        odd = odd or "a weight of uint8"
    return _Weight(WeightView(current, transposed=turned), scale, odd)


def _odd_scale(node: ir.Node, columns: int, facts: Facts) -> str | None:
    """What keeps a dequantised weight from being an int8 weight by one scale, or one for every column."""
    scale = facts.input(node, 1)
    along = facts.rank(scale) == 1 and facts.size(scale, 0) != 1
    if (
        not _is_vector(scale, facts)
        or (facts.rank(scale) or 0) > 1
        or (along and attribute(node, "axis") % 2 != columns)
    ):
        return "a weight with scales for something else than its columns"
    return None if _zero_point(node, 2, facts) == 0 else "a weight with zero points"


def dequantised(node: ir.Node, facts: Facts) -> ir.Value:
    """The value that a product becomes through additions, casts and scalings, each its only reader."""
    value = node.outputs[0]
    while True:
        readers = facts.readers(value)
        if len(readers) != 1 or not is_op(readers[0][0], "Add", "Cast", "Mul", "Div", "DequantizeLinear"):
            return facts.plain(value)
        value = readers[0][0].outputs[0]
