"""Where an expert was chosen: ids == e, for every assignment."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.slices import recognise_slice

__all__ = ["ExpertMask", "OneHot", "recognise_expert_mask", "recognise_one_hot"]


@dataclass(frozen=True)
class OneHot:
    """value[.., k, e] = (ids[.., k] == e), for `experts` numbers e, its axes permuted by `perm`."""

    ids: ir.Value
    experts: int
    perm: tuple[int, ...]


@dataclass(frozen=True)
class ExpertMask:
    """value = (ids == expert) in any type; `choices_first`: with the axis of choices in front of that of tokens.

    `hit_of` is set where the expert is the `expert`-th of that many experts that were found to be chosen at all when
    the graph was traced: a number that holds only if all experts are.
    """

    ids: ir.Value
    expert: int
    choices_first: bool
    experts: int | None = None
    hit_of: int | None = None


def recognise_one_hot(value: ir.Value, facts: Facts) -> OneHot | None:
    """OneHot along a new last axis, or Equal(ids with a new last axis, [0, 1, .., E - 1]); cast, permuted."""
    return facts.remember("one_hot", value, _one_hot)


def _one_hot(value: ir.Value, facts: Facts) -> OneHot | None:
    perm: tuple[int, ...] | None = None
    while is_op(node := facts.producer(value), "Cast", "Transpose"):
        value = facts.input(node, 0)
        if node.op_type == "Transpose":
            given = tuple(attribute(node, "perm") or reversed(range(facts.rank(value) or 0)))
            perm = given if perm is None else tuple(given[axis] for axis in perm)
    value = facts.plain(value)
    if not is_op(node, "OneHot", "Equal"):
        return None
    rank = facts.rank(value)
    if rank is None:
        return None
    found = _spelled_one_hot(node, rank, facts) if node.op_type == "OneHot" else _compared(node, rank, facts)
    return None if found is None else OneHot(*found, perm or tuple(range(rank)))


def _spelled_one_hot(node: ir.Node, rank: int, facts: Facts) -> tuple[ir.Value, int] | None:
    depth, off_on = facts.integers(facts.input(node, 1)), facts.constant(facts.input(node, 2))
    if depth is None or len(depth) != 1 or off_on is None or off_on.tolist() != [0, 1]:
        return None
    return (facts.input(node, 0), depth[0]) if attribute(node, "axis") in (-1, rank - 1) else None


def _compared(node: ir.Node, rank: int, facts: Facts) -> tuple[ir.Value, int] | None:
    for column, numbers in facts.either_way(node):
        row, added = facts.integers(numbers), facts.producer(column)
        if row is None or len(row) < 2 or row != list(range(len(row))) or facts.size(numbers, -1) != len(row):
            continue
        if is_op(added, "Unsqueeze", "Reshape") and facts.size(column, -1) == 1 and facts.rank(column) == rank:
            ids = facts.input(added, 0)
            return (ids, len(row)) if facts.rank(ids) == rank - 1 else None
    return None


def recognise_expert_mask(value: ir.Value, facts: Facts) -> ExpertMask | None:
    """The comparison with one expert that a value (N, K), (.., N, K) or (K, N) is.

    Spellings
    ---------
    1. Equal(ids, constant e), cast.
    2. One entry of a one-hot encoding, along the axis of experts, cast.
    3. The same with the number taken from the list of experts that were chosen at all.
    """
    return facts.remember("expert_mask", value, _expert_mask)


def _expert_mask(value: ir.Value, facts: Facts) -> ExpertMask | None:
    while is_op(node := facts.producer(value), "Cast", "Squeeze"):
        value = facts.input(node, 0)
    value = facts.plain(value)
    if is_op(node, "Equal"):
        for ids, number in facts.either_way(node):
            expert = facts.integers(number)
            whole = expert is not None and len(expert) == 1 and facts.rank(ids) == facts.rank(value)
            if whole and expert is not None and facts.constant(ids) is None:
                return ExpertMask(ids, expert[0], choices_first=False)
        return None
    return _entry(node, value, facts)


def _entry(node: ir.Node | None, value: ir.Value, facts: Facts) -> ExpertMask | None:
    hit_of: int | None = None
    if is_op(node, "Gather"):
        table, axis = facts.input(node, 0), facts.axis(node, facts.input(node, 0), 0)
        number = facts.integers(facts.input(node, 1))
        if number is not None and len(number) == 1:
            expert = number[0]
        elif (hit := _hit_expert(facts.input(node, 1), facts)) is not None:
            expert, hit_of = hit
        else:
            return None
    else:
        cut = recognise_slice(value, facts)
        if cut is None or cut.size != 1:
            return None
        table, axis, expert = cut.source, cut.axis, cut.start
    one_hot = recognise_one_hot(table, facts)
    if one_hot is None or axis is None or one_hot.perm[axis] != len(one_hot.perm) - 1:
        return None
    kept = [place for place in one_hot.perm if place != len(one_hot.perm) - 1]
    if kept not in (sorted(kept), [1, 0]):
        return None
    return ExpertMask(one_hot.ids, expert % one_hot.experts, kept != sorted(kept), one_hot.experts, hit_of)


def _hit_expert(value: ir.Value, facts: Facts) -> tuple[int, int] | None:
    """(i, n) where a value is the i-th of n entries of NonZero(how often each expert was chosen > 0)."""
    while is_op(node := facts.producer(value), "Squeeze", "Reshape", "Gather", "Cast"):
        if node.op_type == "Gather" and facts.integers(facts.input(node, 1)) not in ([0], [-1]):
            return None
        value = facts.input(node, 0)
    value = facts.plain(value)
    if not is_op(node, "Split"):
        return None
    hits = facts.producer(facts.input(node, 0))
    while is_op(hits, "Transpose", "Reshape", "Squeeze"):
        hits = facts.producer(facts.input(hits, 0))
    if not is_op(hits, "NonZero"):
        return None
    chosen = facts.producer(facts.input(hits, 0))
    if not is_op(chosen, "Greater", "Cast", "Not", "ReduceMax", "ReduceSum"):
        return None
    sizes = {facts.size(output, facts.axis(node, output, 0) or 0) for output in node.outputs}
    position = next(index for index, output in enumerate(node.outputs) if output is value)
    return (position, len(node.outputs)) if sizes == {1} else None
