"""Integer division of non-negative numbers by a constant, in the spellings of exporters."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op

__all__ = ["FloorDivision", "recognise_floor_division"]


@dataclass(frozen=True)
class FloorDivision:
    """value = numerator // divisor, for a numerator that is never negative."""

    numerator: ir.Value
    divisor: int


def recognise_floor_division(value: ir.Value, facts: Facts) -> FloorDivision | None:
    """The division by a constant that computes a value.

    Spellings
    ---------
    1. Div of integers.
    2. Sub(Div(p, K), Cast(And(.., Cast(Mod(p, K))))): truncation corrected for negative p, which leaves others alone.
    3. Div(Sub(p, Mod(p, K)), K).
    4. Cast(Floor(Div(Cast(p), K))), or without Floor, through float32 or double: a position is exact in both.
    5. One of these cast to another integer type.
    """
    return facts.remember("floor_division", value, _floor_division)


def _floor_division(value: ir.Value, facts: Facts) -> FloorDivision | None:
    node = facts.producer(value)
    if is_op(node, "Div"):
        return _integer_division(node, facts)
    if is_op(node, "Sub"):
        truncated = recognise_floor_division(facts.input(node, 0), facts)
        if truncated is not None and _is_zero_unless_negative(facts.input(node, 1), truncated.numerator, facts):
            return truncated
    if is_op(node, "Cast") and _is_integer(facts.plain(value)):
        source = facts.input(node, 0)
        return recognise_floor_division(source, facts) if _is_integer(source) else _through_floats(source, facts)
    return None


def _integer_division(node: ir.Node, facts: Facts) -> FloorDivision | None:
    numerator, divisor = facts.input(node, 0), facts.integers(facts.input(node, 1))
    if divisor is None or len(divisor) != 1 or divisor[0] <= 0:
        return None
    rounded = numerator.producer()
    if is_op(rounded, "Sub"):
        below, rest = facts.input(rounded, 0), facts.producer(facts.input(rounded, 1))
        if is_op(rest, "Mod") and facts.input(rest, 0) is below and facts.integers(facts.input(rest, 1)) == divisor:
            numerator = below
    return FloorDivision(numerator, divisor[0])


def _through_floats(value: ir.Value, facts: Facts) -> FloorDivision | None:
    node = facts.producer(value)
    if is_op(node, "Floor"):
        node = facts.producer(facts.input(node, 0))
    if not is_op(node, "Div"):
        return None
    cast, divisor = facts.producer(facts.input(node, 0)), facts.scalar(facts.input(node, 1))
    if not is_op(cast, "Cast") or attribute(cast, "to") not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    if divisor is None or divisor <= 0 or divisor != int(divisor) or not _is_integer(facts.input(cast, 0)):
        return None
    return FloorDivision(facts.input(cast, 0), int(divisor))


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _is_zero_unless_negative(correction: ir.Value, numerator: ir.Value, facts: Facts) -> bool:
    """Cast(And(Less(p, 0) [== True], anything)), in any order."""
    node = facts.producer(correction)
    both = facts.producer(facts.input(node, 0)) if is_op(node, "Cast") else None
    if not is_op(both, "And"):
        return False
    return any(_is_negative(facts.input(both, index), numerator, facts) for index in range(2))


def _is_negative(value: ir.Value, numerator: ir.Value, facts: Facts) -> bool:
    node = facts.producer(value)
    if is_op(node, "Equal") and facts.scalar(facts.input(node, 1)) == 1:
        node = facts.producer(facts.input(node, 0))
    return is_op(node, "Less") and facts.input(node, 0) is numerator and facts.scalar(facts.input(node, 1)) == 0
