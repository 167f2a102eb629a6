"""Gathering rows of a tensor by a vector of positions."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op

__all__ = ["RowGather", "gathered_rows", "gathers_of"]


@dataclass(frozen=True)
class RowGather:
    """rows = source[indices] along the first axis; `indices` (M) before any axis was added for GatherND."""

    source: ir.Value
    indices: ir.Value
    rows: ir.Value


def gathered_rows(node: ir.Node, facts: Facts) -> RowGather | None:
    """The gather of rows that a node is.

    Spellings
    ---------
    1. Gather(axis 0) with a vector of indices.
    2. GatherND with indices (M, 1).
    """
    if not is_op(node, "Gather", "GatherND"):
        return None
    source, indices = facts.input(node, 0), facts.input(node, 1)
    if node.op_type == "Gather":
        rows = facts.axis(node, source, 0) == 0 and facts.rank(indices) == 1
        return RowGather(source, _flat(indices, facts), node.outputs[0]) if rows else None
    if attribute(node, "batch_dims") != 0 or facts.size(indices, -1) != 1 or facts.rank(indices) != 2:
        return None
    added = facts.producer(indices)
    if not is_op(added, "Unsqueeze", "Reshape") or facts.rank(facts.input(added, 0)) != 1:
        return None
    return RowGather(source, facts.input(added, 0), node.outputs[0])


def _flat(indices: ir.Value, facts: Facts) -> ir.Value:
    """A vector before it was reshaped to a vector."""
    node = indices.producer()
    while is_op(node, "Reshape") and facts.rank(facts.input(node, 0)) == 1:
        indices = facts.input(node, 0)
        node = indices.producer()
    return indices


def gathers_of(indices: ir.Value, facts: Facts) -> list[RowGather]:
    """Every gather of rows by these indices, directly or reshaped for it."""
    found: list[RowGather] = []
    queue = [indices]
    while queue:
        for node, place in facts.readers(queue.pop()):
            gather = gathered_rows(node, facts) if place == 1 else None
            if gather is not None:
                found.append(gather)
            elif is_op(node, "Reshape", "Unsqueeze") and place == 0:
                queue.append(node.outputs[0])
    return [gather for gather in found if gather.indices is facts.plain(indices)]
