"""Rows quantised to 8 bits: by one constant scale and zero point, or by the largest magnitude of each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.miss import Miss, miss

__all__ = [
    "OtherwiseQuantised",
    "PerTensor",
    "PerToken",
    "Quantised",
    "quantised_again",
    "recognise_quantised",
    "row_maximum",
    "same_codes",
    "zero_point_of",
]

_UNSIGNED_BY = 128
"""How much larger the codes of uint8 are than those of int8 for the same number."""

_EXACT = (
    ir.DataType.INT8,
    ir.DataType.INT16,
    ir.DataType.INT32,
    ir.DataType.INT64,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
)
"""Types that hold every code of int8, and, int8 aside, of uint8."""

_GUARD = 1e-5
"""A floor of up to this under the largest magnitude of a row, or its scale, only guards rows of zeros."""


@dataclass(frozen=True)
class PerTensor:
    """Codes clip(round(x / scale) + zero_point, -128, 127) of `x` (.., k), half to even.

    `value` holds the codes; where its type is uint8 they are larger by 128.
    """

    x: ir.Value
    scale: float
    zero_point: int
    value: ir.Value


@dataclass(frozen=True)
class PerToken:
    """Codes clip(round(x * smooth / scale), -128, 127) of `x` (.., k), half to even, one scale for every row.

    The scale is `largest` / 127, with `largest` (.., 1) the largest |x * smooth| of the row. `smooth` (k) or None.
    """

    x: ir.Value
    smooth: ir.Value | None
    largest: ir.Value
    value: ir.Value


@dataclass(frozen=True)
class OtherwiseQuantised:
    """Codes of `x` (.., k) that no operator makes; `how` says in what they differ."""

    x: ir.Value
    how: str
    value: ir.Value


Quantised = PerTensor | PerToken | OtherwiseQuantised


def recognise_quantised(value: ir.Value, facts: Facts) -> Quantised | Miss:
    """The rows whose codes a value holds, in whatever type.

    Spellings
    ---------
    1. Div(x, s), Round, Add(z), Clip(-128, 127), Cast(int8); also Mul by the inverse, Add before Round, no Add, no
       Cast, Min and Max for Clip.
    2. QuantizeLinear to int8 or uint8.
    3. 1 with s = ReduceMax(Abs(x)) / 127 of each row, on which a floor of up to 1e-5 may lie.
    4. DynamicQuantizeLinear, which is 2 with a scale that is no constant.
    """
    return facts.remember("quantised", value, _quantised)


def quantised_again(value: ir.Value, facts: Facts) -> ir.Value | None:
    """x of DequantizeLinear(QuantizeLinear(x))."""
    node = facts.producer(value)
    codes = facts.producer(facts.input(node, 0)) if is_op(node, "DequantizeLinear") else None
    return facts.input(codes, 0) if is_op(codes, "QuantizeLinear") else None


def same_codes(one: Quantised, other: Quantised) -> bool:
    """Whether both quantise the same rows alike, be it in one place or two."""
    if isinstance(one, PerTensor) and isinstance(other, PerTensor):
        return one.x is other.x and (one.scale, one.zero_point) == (other.scale, other.zero_point)
    if isinstance(one, PerToken) and isinstance(other, PerToken):
        return one.x is other.x and one.smooth is other.smooth
    return False


def row_maximum(scale: ir.Value, facts: Facts) -> ir.Value | None:
    """The largest magnitudes (.., 1) of which a value is one 127th."""
    node = facts.producer(_without_floor(scale, facts))
    if is_op(node, "Div") and facts.scalar(facts.input(node, 1)) == 127:
        return _without_floor(facts.input(node, 0), facts)
    if is_op(node, "Mul"):
        for largest, factor in facts.either_way(node):
            constant = facts.scalar(factor)
            if constant is not None and np.isclose(constant * 127, 1, rtol=1e-6, atol=0):
                return _without_floor(largest, facts)
    return None


def _quantised(value: ir.Value, facts: Facts) -> Quantised | Miss:
    codes, types = facts.plain(value), [value.dtype]
    stored = codes
    while is_op(node := codes.producer(), "Cast") and attribute(node, "to") in _EXACT:
        types.append(attribute(node, "to"))
        stored = codes if attribute(node, "to") == ir.DataType.INT8 else stored
        codes = facts.input(node, 0)
    if codes.dtype in (ir.DataType.INT8, ir.DataType.UINT8):
        stored = codes
    found: Quantised | None = None
    if is_op(node, "QuantizeLinear"):
        found = _quantize_linear(node, stored, facts)
    elif is_op(node, "DynamicQuantizeLinear") and codes is node.outputs[0]:
        found = OtherwiseQuantised(facts.input(node, 0), "by one scale for all rows, computed at run time", stored)
    else:
        while is_op(node, "Cast") and attribute(node, "to") == ir.DataType.UINT8:
            stored, codes = codes, facts.input(node, 0)
            node = codes.producer()
        found = _spelled_out(codes, stored, facts)
    if found is not None and stored.dtype == ir.DataType.UINT8 and ir.DataType.INT8 in types:
        found = OtherwiseQuantised(found.x, "to uint8, then read as int8", stored)
    if found is None:
        return miss("quantisation-unsupported", value, "rounded, clipped rows", "no such arithmetic")
    return found


def _quantize_linear(node: ir.Node, stored: ir.Value, facts: Facts) -> Quantised:
    x, scale = facts.input(node, 0), facts.scalar(facts.input(node, 1))
    zero_point = zero_point_of(node, facts)
    if scale is None or zero_point is None or stored.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        return OtherwiseQuantised(x, f"to {stored.dtype} by scales that are not one constant", stored)
    return PerTensor(x, scale, zero_point, stored)


def zero_point_of(node: ir.Node, facts: Facts) -> int | None:
    """The zero point of QuantizeLinear or DequantizeLinear for codes of int8; None where it is not one constant."""
    codes = facts.input(node, 0) if node.op_type == "DequantizeLinear" else node.outputs[0]
    given: float | None = 0
    if facts.has(node, 2):
        given = facts.scalar(facts.input(node, 2))
    if given is None:
        return None
    return int(given) - (_UNSIGNED_BY if codes.dtype == ir.DataType.UINT8 else 0)


def _spelled_out(codes: ir.Value, stored: ir.Value, facts: Facts) -> Quantised | None:
    """Spellings 1 and 3; what is odd about them is remembered until the rows are found."""
    bounds = _clipped(codes, facts)
    if bounds is None:
        return None
    inside, low, high = bounds
    unsigned = stored.dtype == ir.DataType.UINT8
    odd = None
    if (low, high) != ((0, 255) if unsigned else (-128, 127)):
        odd = f"clipped to {low:g} .. {high:g}"
    rounding, offset = _without_offset(inside, facts)
    node = facts.producer(rounding)
    scaled = rounding
    if is_op(node, "Round", "Floor", "Ceil"):
        odd = odd if node.op_type == "Round" else f"rounded by {node.op_type}"
        scaled, inner = _without_offset(facts.input(node, 0), facts)
        offset += inner
    else:
        odd = "not rounded"
    if offset != int(offset):
        odd = odd or f"with the zero point {offset:g}"
    zero_point = int(offset) - (_UNSIGNED_BY if unsigned else 0)
    return _scaled(scaled, zero_point, odd, stored, facts)


def _clipped(value: ir.Value, facts: Facts) -> tuple[ir.Value, float, float] | None:
    """(x, low, high) of Clip, or of Min and Max in either order."""
    node = facts.producer(value)
    if is_op(node, "Clip"):
        low, high = (facts.scalar(facts.input(node, index)) for index in (1, 2))
        return None if low is None or high is None else (facts.input(node, 0), low, high)
    found: dict[str, float] = {}
    while is_op(node, "Min", "Max") and len(node.inputs) == 2 and node.op_type not in found:
        for inside, bound in facts.either_way(node):
            constant = facts.scalar(bound)
            if constant is not None:
                found[node.op_type], value = constant, inside
                break
        else:
            break
        node = facts.producer(value)
    return (facts.plain(value), found["Max"], found["Min"]) if len(found) == 2 else None


def _without_offset(value: ir.Value, facts: Facts) -> tuple[ir.Value, float]:
    """(base, offset) with value = base + offset, a number."""
    node = facts.producer(value)
    if is_op(node, "Add"):
        for base, constant in facts.either_way(node):
            offset = facts.scalar(constant)
            if offset is not None and facts.rank(base) == facts.rank(value):
                return base, offset
    if is_op(node, "Sub") and (offset := facts.scalar(facts.input(node, 1))) is not None:
        return facts.input(node, 0), -offset
    return facts.plain(value), 0.0


def _scaled(value: ir.Value, zero_point: int, odd: str | None, stored: ir.Value, facts: Facts) -> Quantised | None:
    node = facts.producer(value)
    if not is_op(node, "Div", "Mul"):
        return None
    divides = node.op_type == "Div"
    pairs = facts.either_way(node)[:1] if divides else facts.either_way(node)
    for rows, factor in pairs:
        constant = facts.scalar(factor)
        if constant:
            scale = constant if divides else float(np.float32(1) / np.float32(constant))
            x = _unwidened(rows, facts)
            return PerTensor(x, scale, zero_point, stored) if odd is None else OtherwiseQuantised(x, odd, stored)
    for rows, factor in pairs:
        largest = row_maximum(factor, facts) if divides else _inverse_row_maximum(factor, facts)
        if largest is not None and _is_maximum_of(largest, rows, facts):
            odd = odd or ("with a zero point" if zero_point else None)
            return _per_token(rows, largest, odd, stored, facts)
    rows = pairs[0][0]
    return OtherwiseQuantised(rows, odd or "by a scale that is neither constant nor the maximum of a row / 127", stored)


def _per_token(rows: ir.Value, largest: ir.Value, odd: str | None, stored: ir.Value, facts: Facts) -> Quantised:
    x, smooth = _smoothed(rows, facts)
    return PerToken(x, smooth, largest, stored) if odd is None else OtherwiseQuantised(x, odd, stored)


def _smoothed(rows: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value | None]:
    """(x, smooth) of x * smooth, one constant factor for every column."""
    node = facts.producer(rows)
    if is_op(node, "Mul"):
        for x, smooth in facts.either_way(node):
            is_vector = smooth.is_initializer() and not smooth.is_graph_input() and facts.rank(smooth) == 1
            # the gamma of a norm is such a vector as well; it multiplies what was divided by the root of a mean
            if is_vector and facts.dim(smooth, 0) == facts.dim(x, -1) and not _is_normalised(x, facts):
                return _unwidened(x, facts), smooth
    return _unwidened(rows, facts), None


def _is_normalised(value: ir.Value, facts: Facts) -> bool:
    node = facts.producer(value)
    if is_op(node, "Cast"):
        node = facts.producer(facts.input(node, 0))
    if not is_op(node, "Mul", "Div"):
        return False
    return any(facts.size(operand, -1) == 1 for operand in (facts.input(node, 0), facts.input(node, 1)))


def _inverse_row_maximum(factor: ir.Value, facts: Facts) -> ir.Value | None:
    """The largest magnitudes m of 127 / m or 1 / (m / 127)."""
    node = facts.producer(factor)
    if is_op(node, "Reciprocal"):
        return row_maximum(facts.input(node, 0), facts)
    if not is_op(node, "Div"):
        return None
    numerator, below = facts.scalar(facts.input(node, 0)), facts.input(node, 1)
    if numerator == 1:
        return row_maximum(below, facts)
    return _without_floor(below, facts) if numerator == 127 else None


def _is_maximum_of(largest: ir.Value, rows: ir.Value, facts: Facts) -> bool:
    node = facts.producer(largest)
    if not is_op(node, "ReduceMax") or attribute(node, "keepdims", 1) != 1:
        return False
    axes = facts.integers(facts.input(node, 1)) if facts.has(node, 1) else attribute(node, "axes")
    rank = facts.rank(rows)
    if axes is None or rank is None or [axis % rank for axis in axes] != [rank - 1]:
        return False
    magnitude = facts.producer(facts.input(node, 0))
    return is_op(magnitude, "Abs") and facts.input(magnitude, 0) is facts.plain(rows)


def _without_floor(value: ir.Value, facts: Facts) -> ir.Value:
    """The value under Max(value, tiny) or Clip(value, tiny)."""
    node = facts.producer(value)
    if is_op(node, "Max") and len(node.inputs) == 2:
        for base, constant in facts.either_way(node):
            floor = facts.scalar(constant)
            if floor is not None and floor <= _GUARD:
                return base
    if is_op(node, "Clip") and not facts.has(node, 2):
        floor = facts.scalar(facts.input(node, 1))
        if floor is not None and floor <= _GUARD:
            return facts.input(node, 0)
    return facts.plain(value)


def _unwidened(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before a cast from 16 to 32 bits, which is exact."""
    node = facts.producer(value)
    if is_op(node, "Cast") and attribute(node, "to") == ir.DataType.FLOAT:
        source = facts.input(node, 0)
        return source if source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else value
    return facts.plain(value)
