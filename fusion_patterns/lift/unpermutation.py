"""Expert results put back in token order and summed over the choices, without a sort that says where they were."""

from __future__ import annotations

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.mask import uniform_value
from fusion_patterns.lift.router import reshaped_from
from fusion_patterns.lift.row_gather import gathered_rows
from fusion_patterns.miss import Miss, miss

__all__ = ["recognise_unsorted_combine"]


def recognise_unsorted_combine(node: ir.Node, facts: Facts) -> Miss | None:
    """The reason against a weighted sum over choices whose row indices are a graph input; None for other nodes.

    Spellings
    ---------
    1. ReduceSum(Reshape(rows[indices]) * weights, axis of choices).
    2. ScatterND(add) of rows * weights into zeros.
    """
    if is_op(node, "ReduceSum"):
        indices = _gathered_by(node, facts)
    elif is_op(node, "ScatterND") and attribute(node, "reduction") == "add":
        weighted = (
            is_op(facts.producer(facts.input(node, 2)), "Mul") and uniform_value(facts.input(node, 0), facts) == 0
        )
        indices = facts.input(node, 1) if weighted else None
    else:
        return None
    if indices is None or not reshaped_from(indices, facts).is_graph_input():
        return None
    return miss("permutation-absent", node, "a sort of expert ids that the row indices come from", "a graph input")


def _gathered_by(node: ir.Node, facts: Facts) -> ir.Value | None:
    product = facts.producer(facts.input(node, 0))
    if not is_op(product, "Mul") or facts.rank(product.outputs[0]) != 3:
        return None
    for rows, _ in facts.either_way(product):
        reader = reshaped_from(rows, facts).producer()
        gather = None if reader is None else gathered_rows(reader, facts)
        if gather is not None:
            return gather.indices
    return None
