"""Which experts a token goes to: what is known of expert ids, and of how many tokens a value has rows for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, is_op

__all__ = ["Router", "recognise_router", "reshaped_from", "row_counts", "same_rows"]


@dataclass(frozen=True)
class Router:
    """ids (.., K) are the places of the K chosen of `scores` (.., E): from 0 to E - 1, and distinct in each row."""

    ids: ir.Value
    scores: ir.Value
    experts: int
    node: ir.Node


def recognise_router(ids: ir.Value, facts: Facts) -> Router | None:
    """The TopK over the scores of all experts that expert ids come from, whatever their shape and integer type."""
    return facts.remember("router", ids, _router)


def _router(ids: ir.Value, facts: Facts) -> Router | None:
    while is_op(node := facts.producer(ids), "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        ids = facts.input(node, 0)
    node, ids = facts.producer(ids), facts.plain(ids)
    if not is_op(node, "TopK") or node.outputs[1] is not ids:
        return None
    scores = facts.input(node, 0)
    experts, rank = facts.size(scores, -1), facts.rank(scores)
    if experts is None or rank is None or rank < 2 or facts.axis(node, scores) != rank - 1:
        return None
    return Router(ids, scores, experts, node)


def reshaped_from(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before Reshape, Squeeze, Unsqueeze and Flatten, which keep the order of elements."""
    value = facts.plain(value)
    while is_op(node := value.producer(), "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        value = facts.input(node, 0)
    return value


_SAME_ROWS = (
    *("Cast", "Sigmoid", "Softmax", "Add", "Sub", "Mul", "Div", "Where", "TopK", "MatMul", "Gemm", "GatherElements"),
    *("ReduceSum", "Tanh", "Relu", "Not", "RMSNormalization", "LayerNormalization"),
)
_FARTHEST = 32


def row_counts(value: ir.Value, facts: Facts) -> frozenset[str]:
    """Of how many rows of its last axis a value consists, in every way in which that can be told.

    Shape inference loses sizes in reshapes and calls them anew, so the value is followed upwards, through operators
    that keep rows and through reshapes whose last axis is known. Each answer is a normalised product of named sizes.
    """
    return facts.remember("row_counts", value, _row_counts)


def _row_counts(value: ir.Value, facts: Facts) -> frozenset[str]:
    queue: list[tuple[ir.Value, int, int]] = [(facts.plain(value), 1, 1)]
    seen = {queue[0][0]}
    found: set[str] = set()
    while queue:
        current, times, parts = queue.pop(0)
        rows = _declared_rows(current, facts)
        if rows is not None:
            found.add(_normalised(rows, times, parts))
        for source, more, fewer in _above(current, facts):
            if source not in seen and len(seen) < _FARTHEST:
                seen.add(source)
                queue.append((source, times * more, parts * fewer))
    return frozenset(found)


def _declared_rows(value: ir.Value, facts: Facts) -> tuple[int | str, ...] | None:
    """All dimensions but the last, a named one by its name."""
    shape = facts.shape(value)
    rows = tuple(dim if isinstance(dim, int) else dim.value for dim in shape[:-1]) if shape else (None,)
    return None if None in rows else tuple(dim for dim in rows if dim is not None)


@functools.cache
def _normalised(rows: tuple[int | str, ...], times: int, parts: int) -> str:
    """The product of the dimensions times `times` over `parts`; equal texts are equal numbers."""
    product: Dimension = 1
    for dim in rows:
        product = product * (dim if isinstance(dim, int) else ir.SymbolicDim(dim))
    product = product * times // parts
    return str(product if isinstance(product, int) else product.simplify())


def _above(value: ir.Value, facts: Facts) -> list[tuple[ir.Value, int, int]]:
    """Values with a known relation: rows of `value` = rows of that value * times / parts."""
    node = value.producer()
    if is_op(node, "Reshape", "Flatten", "Squeeze", "Unsqueeze"):
        source = facts.input(node, 0)
        before, after = facts.size(source, -1), facts.size(value, -1)
        if not before or not after or max(before, after) % min(before, after):
            return []
        return [(source, max(before // after, 1), max(after // before, 1))]
    if not is_op(node, *_SAME_ROWS):
        return []
    operands = [facts.input(node, index) for index in range(len(node.inputs))]
    return [(v, 1, 1) for v in operands if not v.is_initializer() and not _is_spread(v, value, facts)]


def _is_spread(operand: ir.Value, value: ir.Value, facts: Facts) -> bool:
    """Whether an operand has fewer rows than the result, because it is broadcast."""
    given, made = facts.shape(operand), facts.shape(value)
    if given is None or made is None or len(given) != len(made):
        return True
    return any(a == 1 and b != 1 for a, b in zip(given[:-1], made[:-1], strict=True))


def same_rows(left: ir.Value, right: ir.Value, facts: Facts) -> bool:
    """Whether two values provably have as many rows of their last axis as each other."""
    return not row_counts(left, facts).isdisjoint(row_counts(right, facts))
