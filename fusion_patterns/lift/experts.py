"""Expert layers over rows that are sorted by expert: one product per expert on its slice of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.expert_weight import ExpertWeight, recognise_expert_weight
from fusion_patterns.lift.histogram import recognise_counts
from fusion_patterns.lift.row_gather import gathered_rows
from fusion_patterns.miss import Miss, miss

__all__ = ["ExpertWeight", "GroupedProduct", "recognise_counts", "recognise_grouped_product"]


@dataclass(frozen=True)
class GroupedProduct:
    """out = Concat over experts e of rows[end(e - 1) : end(e)] @ weights[e].

    `ends` (E) are the inclusive prefix sums of rows per expert that the slices are cut by.
    """

    rows: ir.Value
    ends: ir.Value
    weights: tuple[ExpertWeight, ...]
    out: ir.Value
    node: ir.Node


def recognise_grouped_product(rows: ir.Value, facts: Facts) -> GroupedProduct | Miss:
    """The product per expert that reads `rows` (M, k).

    Gather(rows, Range(end(e - 1), end(e))) -> MatMul(W_e) -> Concat(axis 0), with ends = Split(prefix sums, E).
    """
    readers = [node for node, place in facts.readers(rows) if place == 0 and gathered_rows(node, facts) is not None]
    if not readers:
        return miss("experts-unrecognised", rows, "slices of the sorted rows, one per expert", "other readers")
    products = [node for node, _ in facts.readers(readers[0].outputs[0]) if is_op(node, "MatMul")]
    joins = [node for product in products for node, _ in facts.readers(product.outputs[0]) if is_op(node, "Concat")]
    if len(joins) != 1 or attribute(joins[0], "axis") not in (0, -2):
        return miss("experts-unrecognised", readers[0], "products per expert, concatenated along the rows", "others")
    return _checked(joins[0], facts.plain(rows), facts)


def _checked(join: ir.Node, rows: ir.Value, facts: Facts) -> GroupedProduct | Miss:
    weights: list[ExpertWeight] = []
    split: ir.Node | None = None
    start: ir.Value | None = None
    for expert, part in enumerate(join.inputs):
        product = None if part is None else facts.producer(part)
        if not is_op(product, "MatMul"):
            return miss("experts-unrecognised", join, f"a product of expert {expert}", "another operator")
        gather, weight = (
            facts.producer(facts.input(product, 0)),
            recognise_expert_weight(facts.input(product, 1), 2, facts),
        )
        cut = None if gather is None else gathered_rows(gather, facts)
        span = None if cut is None else facts.producer(cut.indices)
        if cut is None or cut.source is not rows or not is_op(span, "Range"):
            return miss("experts-unrecognised", product, f"the slice of expert {expert}", "other rows")
        if weight is None:
            return miss("experts-unrecognised", product, f"a constant weight of expert {expert}", "another value")
        if facts.scalar(facts.input(span, 2)) != 1:
            return miss("experts-unrecognised", span, "every row of the slice", "rows left out")
        begins = facts.scalar(facts.input(span, 0)) == 0 if start is None else facts.input(span, 0) is start
        end, source = _element(facts.input(span, 1), facts)
        if not begins or end != expert or source is None or (split is not None and source is not split):
            return miss("experts-unrecognised", span, f"rows from the end of expert {expert - 1}", "other bounds")
        split, start = source, facts.input(span, 1)
        weights.append(weight)
    if split is None or len(weights) != len(split.outputs):
        return miss("experts-unrecognised", join, "as many products as prefix sums", f"{len(weights)} products")
    return GroupedProduct(rows, facts.input(split, 0), tuple(weights), join.outputs[0], join)


def _element(value: ir.Value, facts: Facts) -> tuple[int | None, ir.Node | None]:
    """(i, Split) of a scalar that is the i-th output of a Split into single elements."""
    while is_op(node := facts.producer(value), "Squeeze", "Reshape", "Cast"):
        value = facts.input(node, 0)
    value = facts.plain(value)
    if not is_op(node, "Split") or facts.axis(node, value, 0) != 0:
        return None, None
    if any(facts.size(output, 0) != 1 or facts.rank(output) != 1 for output in node.outputs):
        return None, None
    return next(i for i, output in enumerate(node.outputs) if output is value), node
