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
    node = value.producer()
    if node is None:
        return None
    if is_op(node, "Div") and node.inputs[0] is not None:
        divisor = facts.integers(node.inputs[1])
        if divisor is not None and len(divisor) == 1 and divisor[0] > 0:
            return FloorDivision(node.inputs[0], divisor[0])
    if is_op(node, "Sub") and node.inputs[0] is not None and node.inputs[1] is not None:
        truncated = recognise_floor_division(node.inputs[0], facts)
        if truncated is not None and _is_zero_unless_negative(node.inputs[1], truncated.numerator, facts):
            return truncated
    return None


def _is_zero_unless_negative(correction: ir.Value, numerator: ir.Value, facts: Facts) -> bool:
    """Cast(And(Less(p, 0) [== True], anything)), in any order."""
    node = correction.producer()
    both = (
        node.inputs[0].producer() if node is not None and is_op(node, "Cast") and node.inputs[0] is not None else None
    )
    if both is None or not is_op(both, "And"):
        return False
    return any(operand is not None and _is_negative(operand, numerator, facts) for operand in both.inputs)


def _is_negative(value: ir.Value, numerator: ir.Value, facts: Facts) -> bool:
    node = value.producer()
    if node is not None and is_op(node, "Equal") and facts.scalar(node.inputs[1]) == 1 and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return (
        node is not None and is_op(node, "Less") and node.inputs[0] is numerator and facts.scalar(node.inputs[1]) == 0
    )
