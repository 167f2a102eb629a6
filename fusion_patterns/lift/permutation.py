"""Sorting token assignments by expert: the permutation, what gathers by it, and its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op, same_dim
from fusion_patterns.lift.floor_division import recognise_floor_division
from fusion_patterns.lift.repeated_rows import recognise_repeated_rows
from fusion_patterns.lift.router import reshaped_from
from fusion_patterns.lift.row_gather import RowGather, gathered_rows, gathers_of
from fusion_patterns.miss import Miss, miss

__all__ = [
    "Permutation",
    "RowGather",
    "derived",
    "gathered_rows",
    "gathers_of",
    "inverses",
    "recognise_inverse",
    "recognise_permutation",
    "reshaped_from",
    "sorted_gathers",
]


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
    """The sort that a TopK node is: all of a vector of integers, smallest first, ties by position.

    None for other TopKs, and for one that sorts the order of another sort, which inverts that.
    """
    keys = facts.input(top_k, 0)
    if not _sorts_all(top_k, facts) or keys.dtype is None or not keys.dtype.is_integer():
        return None
    inner = facts.producer(keys)
    if is_op(inner, "TopK") and inner.outputs[1] is keys and _sorts_all(inner, facts):
        return None
    ids = reshaped_from(keys, facts)
    choices = facts.size(ids, 1) if facts.rank(ids) == 2 else None
    if choices is None:
        return miss("permutation-unrecognised", top_k, "expert ids (N, K) with constant K, flattened", str(ids.shape))
    return Permutation(ids, keys, top_k.outputs[0], top_k.outputs[1], choices, top_k)


def _sorts_all(top_k: ir.Node, facts: Facts) -> bool:
    keys, count = facts.input(top_k, 0), facts.symbolic(facts.input(top_k, 1))
    if attribute(top_k, "largest") != 0 or attribute(top_k, "sorted") != 1 or facts.rank(keys) != 1:
        return False
    return count is not None and len(count) == 1 and _is_length(count[0], keys, facts)


def _is_length(dim: Dimension | None, value: ir.Value, facts: Facts) -> bool:
    """Whether a vector has this length; the order that a sort yields has that of what it sorts."""
    node = value.producer()
    if same_dim(dim, facts.dim(value, 0)):
        return True
    return is_op(node, "TopK") and _sorts_all(node, facts) and _is_length(dim, facts.input(node, 0), facts)


_INDEX_ARITHMETIC = (
    *("Div", "Sub", "Cast", "Floor", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Less", "Equal", "Mod", "And"),
    *("Mul", "Add", "Clip", "OneHot", "ReduceSum", "ScatterElements", "ScatterND", "TopK", "CumSum"),
)
_FARTHEST = 48


def derived(value: ir.Value) -> Iterator[ir.Value]:
    """A value and what index arithmetic makes of it, nearest first; not farther than `_FARTHEST` values."""
    queue, seen = [value], {value}
    while queue:
        current = queue.pop(0)
        yield current
        for use in current.uses():
            if is_op(use.node, *_INDEX_ARITHMETIC):
                fresh = [output for output in use.node.outputs if output not in seen]
                if len(seen) < _FARTHEST:
                    seen.update(fresh)
                    queue.extend(fresh)


def sorted_gathers(permutation: Permutation, facts: Facts) -> list[RowGather]:
    """Every gather of x[order // K], the rows of tokens in the order of their experts, with x as its source.

    Spellings
    ---------
    1. A gather by order // K.
    2. A gather by order of rows that were repeated K times.
    """
    found: dict[ir.Value, RowGather] = {}
    for value in derived(permutation.order):
        division = recognise_floor_division(value, facts)
        if division is None or division.numerator is not permutation.order or division.divisor != permutation.choices:
            continue
        found.update({gather.rows: gather for gather in gathers_of(value, facts)})
    for gather in gathers_of(permutation.order, facts):
        repeated = recognise_repeated_rows(gather.source, facts)
        if repeated is not None and repeated.choices == permutation.choices:
            found[gather.rows] = RowGather(repeated.x, gather.indices, gather.rows)
    return list(found.values())


def inverses(permutation: Permutation, facts: Facts) -> list[ir.Value]:
    """Every value that is the inverse of the permutation: the row that each assignment was sorted to."""
    candidates = [value for value in derived(permutation.order) if value is not permutation.order]
    found = [facts.plain(value) for value in candidates if recognise_inverse(value, permutation.order, facts)]
    return list(dict.fromkeys(found))


def recognise_inverse(value: ir.Value, order: ir.Value, facts: Facts) -> bool:
    """Whether a value is the inverse of the permutation `order`.

    Spellings
    ---------
    1. ScatterND or ScatterElements of 0, 1, .. at `order`, over any buffer.
    2. The order in which `order` itself sorts.
    """
    node, value = facts.producer(value), facts.plain(value)
    if is_op(node, "TopK"):
        return node.outputs[1] is value and facts.input(node, 0) is order and _sorts_all(node, facts)
    if not is_op(node, "ScatterND", "ScatterElements") or facts.rank(value) != 1:
        return False
    if attribute(node, "reduction") != "none":
        return False
    if not _counts_up(facts.input(node, 2), order, facts):
        return False
    indices = facts.input(node, 1)
    if is_op(node, "ScatterND"):
        added = facts.producer(indices)
        return is_op(added, "Unsqueeze") and facts.size(indices, -1) == 1 and facts.input(added, 0) is order
    return indices is order


def _counts_up(value: ir.Value, order: ir.Value, facts: Facts) -> bool:
    """Whether a value is 0, 1, .. up to the length of `order`."""
    node, numbers = facts.producer(value), facts.integers(value)
    if numbers is not None and facts.rank(value) == 1:
        return numbers == list(range(len(numbers))) and _is_length(len(numbers), order, facts)
    if not is_op(node, "Range"):
        return False
    if facts.scalar(facts.input(node, 0)) != 0 or facts.scalar(facts.input(node, 2)) != 1:
        return False
    if _is_length(facts.dim(value, 0), order, facts):
        return True
    end = facts.symbolic(facts.input(node, 1))
    return end is not None and len(end) == 1 and _is_length(end[0], order, facts)
