"""Equal values that a graph computes twice: an exporter may compute the angles of a rotation once for each use."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fusion_patterns.graph import Facts, stored_tensor

__all__ = ["common_sources"]

_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

_DEEPEST = 16
"""How many nodes are compared upwards: angles take about ten from the positions."""


def common_sources(left: ir.Value, right: ir.Value, facts: Facts) -> tuple[ir.Value, ...] | None:
    """The values from which both are computed by the same operators; None where they may differ.

    One value alone is its own source. Constants have no source.
    """
    return _sources(left, right, facts, _DEEPEST)


def _sources(left: ir.Value, right: ir.Value, facts: Facts, depth: int) -> tuple[ir.Value, ...] | None:
    left, right = facts.plain(left), facts.plain(right)
    if left is right:
        return () if stored_tensor(left) is not None else (left,)
    if _same_constant(left, right, facts):
        return ()
    one, other = left.producer(), right.producer()
    if one is None or other is None or depth == 0 or not _same_operation(one, other):
        return None
    if one.outputs.index(left) != other.outputs.index(right):
        return None
    found: dict[ir.Value, None] = {}
    for first, second in zip(one.inputs, other.inputs, strict=True):
        if first is None or second is None:
            if first is not second:
                return None
            continue
        sources = _sources(first, second, facts, depth - 1)
        if sources is None:
            return None
        found.update(dict.fromkeys(sources))
    return tuple(found)


def _same_constant(left: ir.Value, right: ir.Value, facts: Facts) -> bool:
    one, other = facts.constant(left), facts.constant(right)
    return one is not None and other is not None and one.dtype == other.dtype and np.array_equal(one, other)


def _same_operation(one: ir.Node, other: ir.Node) -> bool:
    """Whether two nodes compute the same of the same inputs."""
    named = (one.domain, one.op_type, one.overload) == (other.domain, other.op_type, other.overload)
    if not named or one.op_type in _RANDOM or len(one.inputs) != len(other.inputs):
        return False
    return _attributes(one) == _attributes(other)


def _attributes(node: ir.Node) -> dict[str, object]:
    """Attributes by name; a tensor or a graph is equal to itself alone."""
    return {name: given.value for name, given in node.attributes.items()}
