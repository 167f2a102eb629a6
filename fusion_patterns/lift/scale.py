"""Multiplication by constant numbers."""

from __future__ import annotations

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op

__all__ = ["without_scale"]


def without_scale(value: ir.Value, facts: Facts) -> tuple[ir.Value, float]:
    """(base, factor) with value = base * factor, through Mul and Div by scalar constants."""
    factor = 1.0
    value = facts.plain(value)
    while True:
        node = value.producer()
        if not is_op(node, "Mul", "Div"):
            return value, factor
        left, right = facts.input(node, 0), facts.input(node, 1)
        constant = facts.scalar(right)
        if constant is not None and facts.rank(left) == facts.rank(value):
            factor, value = factor * constant if node.op_type == "Mul" else factor / constant, left
        elif node.op_type == "Mul" and (constant := facts.scalar(left)) is not None:
            factor, value = factor * constant, right
        else:
            return value, factor
