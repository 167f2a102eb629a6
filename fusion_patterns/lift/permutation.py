"""Sorting token assignments by expert: the permutation, what gathers by it, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op, same_dim
from fusion_patterns.lift.floor_division import recognise_floor_division
from fusion_patterns.miss import Miss, miss

__all__ = ["Permutation", "RowGather", "gathered_rows", "recognise_inverse", "recognise_permutation", "reshaped_from"]


@dataclass(frozen=True)
class Permutation:
    """A stable ascending sort of `keys` (M): `sorted_keys` and `order`, the position each sorted key came from.

    `ids` (N, K) are the expert ids of every token before they were flattened to `keys`.
    """

    ids: ir.Value
    keys: ir.Value
    sorted_keys: ir.Value
    order: ir.Value
    choices: int
    node: ir.Node


def recognise_permutation(top_k: ir.Node, facts: Facts) -> Permutation | Miss | None:
    """The sort that a TopK node is: all of a vector, smallest first, ties by position; None for other TopKs."""
    keys, count = facts.input(top_k, 0), facts.symbolic(facts.input(top_k, 1))
    if attribute(top_k, "largest") != 0 or facts.rank(keys) != 1:
        return None
    length = facts.dim(keys, 0)
    if attribute(top_k, "sorted") != 1 or count is None or length is None or not same_dim(count[0], length):
        return None
    ids = reshaped_from(keys, facts)
    choices = facts.size(ids, 1) if facts.rank(ids) == 2 else None
    if choices is None:
        return miss("permutation-unrecognised", top_k, "expert ids (N, K) with constant K, flattened", str(ids.shape))
    return Permutation(ids, keys, top_k.outputs[0], top_k.outputs[1], choices, top_k)


def reshaped_from(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before Reshape, Squeeze, Unsqueeze and Flatten, which keep the order of elements."""
    while True:
        node = facts.producer(value)
        if not is_op(node, "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
            return value
        value = facts.input(node, 0)


@dataclass(frozen=True)
class RowGather:
    """rows = source[indices] along the first axis; `indices` (M) before any axis was added for GatherND."""

    source: ir.Value
    indices: ir.Value
    rows: ir.Value


def gathered_rows(node: ir.Node, facts: Facts) -> RowGather | None:
    """Gather(axis 0) with a vector of indices, or GatherND with indices (M, 1)."""
    if len(node.inputs) < 2:
        return None
    source, indices = facts.input(node, 0), facts.input(node, 1)
    if is_op(node, "Gather") and facts.axis(node, source, 0) == 0 and facts.rank(indices) == 1:
        return RowGather(source, indices, node.outputs[0])
    if is_op(node, "GatherND") and attribute(node, "batch_dims") == 0 and facts.size(indices, -1) == 1:
        added = facts.producer(indices)
        if facts.rank(indices) == 2 and is_op(added, "Unsqueeze"):
            return RowGather(source, facts.input(added, 0), node.outputs[0])
    return None


def gathers_of(value: ir.Value, facts: Facts) -> list[RowGather]:
    """Every gather whose indices are `value`, directly or through one added axis."""
    found: list[RowGather] = []
    for use in value.uses():
        node = use.node
        if is_op(node, "Unsqueeze"):
            readers = [u.node for u in node.outputs[0].uses() if u.idx == 1]
        else:
            readers = [node] if use.idx == 1 else []
        gathers = (gathered_rows(reader, facts) for reader in readers)
        found.extend(gather for gather in gathers if gather is not None and gather.indices is value)
    return found


def divided_gathers(order: ir.Value, choices: int, facts: Facts) -> list[RowGather]:
    """Every gather by order // choices: the rows of tokens, put in the order of their experts."""
    found: list[RowGather] = []
    for use in order.uses():
        for output in use.node.outputs:
            for value in (output, *(o for u in output.uses() for o in u.node.outputs)):
                division = recognise_floor_division(value, facts)
                if division is not None and division.numerator is order and division.divisor == choices:
                    found.extend(gathers_of(value, facts))
    return list({id(gather.rows): gather for gather in found}.values())


def recognise_inverse(value: ir.Value, order: ir.Value, facts: Facts) -> bool:
    """Whether a value is the inverse of the permutation `order`: Scatter of 0, 1, .. at `order` over any buffer."""
    node = facts.producer(value)
    if node is None or len(node.inputs) < 3:
        return False
    if attribute(node, "reduction", b"none") not in ("none", b"none") or not _counts_up(
        facts.input(node, 2), order, facts
    ):
        return False
    if is_op(node, "ScatterND"):
        added = facts.producer(facts.input(node, 1))
        return is_op(added, "Unsqueeze") and facts.input(added, 0) is order
    return is_op(node, "ScatterElements") and facts.input(node, 1) is order


def _counts_up(value: ir.Value | None, order: ir.Value, facts: Facts) -> bool:
    """Whether a value is 0, 1, .. up to the length of `order`."""
    if value is None:
        return False
    node = facts.producer(value)
    if not is_op(node, "Range"):
        return False
    if facts.scalar(facts.input(node, 0)) != 0 or facts.scalar(facts.input(node, 2)) != 1:
        return False
    return same_dim(facts.dim(value, 0), facts.dim(order, 0))
