"""Integer division of non-negative numbers by a constant, in the spellings of exporters."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op

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
    """
    return facts.remember("floor_division", value, _floor_division)


def _floor_division(value: ir.Value, facts: Facts) -> FloorDivision | None:
    node = facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Div"):
        divisor = facts.integers(facts.input(node, 1))
        if divisor is not None and len(divisor) == 1 and divisor[0] > 0:
            return FloorDivision(facts.input(node, 0), divisor[0])
    if is_op(node, "Sub"):
        truncated = recognise_floor_division(facts.input(node, 0), facts)
        if truncated is not None and _is_zero_unless_negative(facts.input(node, 1), truncated.numerator, facts):
            return truncated
    return None


def _is_zero_unless_negative(correction: ir.Value, numerator: ir.Value, facts: Facts) -> bool:
    """Cast(And(Less(p, 0) [== True], anything)), in any order."""
    node = facts.producer(correction)
    both = facts.producer(facts.input(node, 0)) if is_op(node, "Cast") else None
    if not is_op(both, "And"):
        return False
    return any(operand is not None and _is_negative(operand, numerator, facts) for operand in both.inputs)


def _is_negative(value: ir.Value, numerator: ir.Value, facts: Facts) -> bool:
    node = facts.producer(value)
    if is_op(node, "Equal") and facts.scalar(facts.input(node, 1)) == 1:
        node = facts.producer(facts.input(node, 0))
    return is_op(node, "Less") and facts.input(node, 0) is numerator and facts.scalar(facts.input(node, 1)) == 0
