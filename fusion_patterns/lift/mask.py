"""Attention masks as properties of a value: what is visible, and what of that can be proved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op, only_reader
from fusion_patterns.miss import Miss, miss

__all__ = [
    "CausalMask",
    "EmptyRowGuard",
    "Selection",
    "is_huge_negative",
    "recognise_additive",
    "recognise_causal",
    "recognise_guard",
    "recognise_selection",
    "uniform_value",
]


@dataclass(frozen=True)
class CausalMask:
    """True where key j is visible to query i: j <= i + offset, over the last two axes (query, key)."""

    offset: Dimension
    queries: Dimension
    keys: Dimension


@dataclass(frozen=True)
class Selection:
    """A mask under which a query sees the keys that were selected for it and that a second mask does not hide.

    `indices` (B, S, K) int64 are positions of keys, best first; `scores` (B, S, T) are what they were chosen by, before
    masking. `causal` is the proof that later keys are hidden, so that positions beyond it stand at the end of the
    lists; None where that was assumed.
    """

    indices: ir.Value
    scores: ir.Value
    causal: CausalMask | None
    node: ir.Node


@dataclass(frozen=True)
class EmptyRowGuard:
    """out = Where(row of `visible` has no True, 0, x)."""

    visible: ir.Value
    x: ir.Value
    out: ir.Value


def recognise_additive(mask: ir.Value, facts: Facts) -> ir.Value | None:
    """The boolean value `visible` behind a mask that adds nothing where it is True and a huge negative elsewhere.

    A boolean mask is this value itself.

    Spellings
    ---------
    1. Mul(Cast(Not(visible)), c) with c at most float16's lowest value.
    2. Where(visible, 0, c).
    """
    return facts.remember("additive", mask, _additive)


def _additive(mask: ir.Value, facts: Facts) -> ir.Value | None:
    if mask.dtype == ir.DataType.BOOL:
        return facts.plain(mask)
    node = facts.producer(mask)
    if node is None:
        return None
    if is_op(node, "Mul"):
        for hidden, factor in facts.either_way(node):
            if is_huge_negative(factor, facts):
                return _negated(_before_cast(hidden, facts), facts)
    if (
        is_op(node, "Where")
        and facts.scalar(facts.input(node, 1)) == 0
        and is_huge_negative(facts.input(node, 2), facts)
    ):
        return facts.input(node, 0)
    return None


def is_huge_negative(value: ir.Value, facts: Facts) -> bool:
    """A number that hides a score in every float type: at most float16's lowest."""
    constant = facts.scalar(value)
    return constant is not None and constant <= -65504


def _before_cast(value: ir.Value, facts: Facts) -> ir.Value:
    node = facts.producer(value)
    return facts.input(node, 0) if is_op(node, "Cast") else value


def _negated(value: ir.Value, facts: Facts) -> ir.Value | None:
    """b of Not(b)."""
    node = facts.producer(value)
    return facts.input(node, 0) if is_op(node, "Not") else None


def recognise_guard(value: ir.Value, facts: Facts) -> EmptyRowGuard | None:
    """The guard that reads an attention's output: Where(Less(ReduceSum(Cast(visible), -1), 1), 0, value)."""
    reader = only_reader(value)
    if reader is None or not is_op(reader[0], "Where"):
        return None
    where = reader[0]
    less = facts.producer(facts.input(where, 0))
    if reader[1] != 2 or facts.scalar(facts.input(where, 1)) != 0 or not is_op(less, "Less"):
        return None
    total = facts.producer(facts.input(less, 0))
    if facts.scalar(facts.input(less, 1)) != 1 or not is_op(total, "ReduceSum"):
        return None
    axes = facts.integers(facts.input(total, 1)) if len(total.inputs) > 1 else attribute(total, "axes")
    visible = _before_cast(facts.input(total, 0), facts)
    rank = facts.rank(visible)
    if axes is None or rank is None or list(axes) not in ([-1], [rank - 1]) or attribute(total, "keepdims") != 1:
        return None
    return EmptyRowGuard(visible, value, where.outputs[0])


def recognise_causal(visible: ir.Value, facts: Facts) -> CausalMask | Miss:
    """The proof that a boolean value is j <= i + offset: a comparison of two ranges, either way round.

    Looks through Expand, and through axes of size 1 that are added or dropped.
    """
    return facts.remember("causal", visible, _causal)


def _causal(visible: ir.Value, facts: Facts) -> CausalMask | Miss:
    node = facts.producer(_without_broadcast(visible, facts))
    if not is_op(node, "LessOrEqual", "GreaterOrEqual", "Less", "Greater"):
        found = node.op_type if node is not None else "a graph input"
        return miss("selection-not-causal", visible, "a comparison of key and query positions", found)
    left, right = (None if i is None else _range(i, facts) for i in node.inputs)
    if left is None or right is None:
        return miss("selection-not-causal", node, "two ranges of positions", "other values")
    key, query = (left, right) if node.op_type.startswith("Less") else (right, left)
    if (key.axis, query.axis) not in ((-1, -2), (-1, None)):
        return miss("selection-not-causal", node, "keys on the last axis, queries before them", "other axes")
    strict = 0 if node.op_type.endswith("Equal") else 1
    return CausalMask(query.start - key.start - strict, query.count, key.count)


def _changes_unit_axes(node: ir.Node, facts: Facts) -> bool:
    """Unsqueeze, Squeeze, or Gather of index 0, on axes before the last two."""
    source, result = facts.input(node, 0) if node.inputs else None, node.outputs[0]
    if source is None or facts.rank(source) is None or facts.rank(result) is None:
        return False
    rank = facts.rank(source) or 0
    if is_op(node, "Unsqueeze", "Squeeze"):
        axes = facts.integers(facts.input(node, 1)) if len(node.inputs) > 1 else None
        length = rank if node.op_type == "Squeeze" else facts.rank(result) or 0
        return axes is not None and all(axis % length < length - 2 for axis in axes)
    if is_op(node, "Gather"):
        axis = facts.axis(node, source, 0)
        picks = facts.constant(facts.input(node, 1))
        return axis is not None and axis < rank - 2 and picks is not None and picks.ndim == 0
    return False


@dataclass(frozen=True)
class _Range:
    """start, start + 1, ... along one axis (counted from the end; None: a single number)."""

    start: Dimension
    count: Dimension
    axis: int | None


def _range(value: ir.Value, facts: Facts) -> _Range | None:
    return facts.remember("range", value, _range_of)


def _range_of(value: ir.Value, facts: Facts) -> _Range | None:
    constant = facts.constant(value)
    if constant is not None:
        return _constant_range(constant)
    node = facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Range"):
        start, limit = facts.symbolic(facts.input(node, 0)), facts.symbolic(facts.input(node, 1))
        if start is None or limit is None or facts.scalar(facts.input(node, 2)) != 1:
            return None
        return _Range(start[0], limit[0] - start[0], -1)
    if is_op(node, "Add"):
        return _shifted(node, facts)
    if is_op(node, "Unsqueeze"):
        return _unsqueezed(node, value, facts)
    if is_op(node, "Cast"):
        return _range(facts.input(node, 0), facts)
    return None


def _constant_range(constant: npt.NDArray[np.generic]) -> _Range | None:
    if not np.issubdtype(constant.dtype, np.integer) or constant.size == 0:
        return None
    lengths = [(axis - constant.ndim, length) for axis, length in enumerate(constant.shape) if length > 1]
    flat = constant.reshape(-1)
    if len(lengths) > 1 or np.any(np.diff(flat) != 1):
        return None
    axis = lengths[0][0] if lengths else (-1 if constant.ndim else None)
    return _Range(int(flat[0]), int(flat.size), axis)


def _shifted(node: ir.Node, facts: Facts) -> _Range | None:
    """A range plus a number."""
    for positions, offset in facts.either_way(node):
        by, along = facts.symbolic(offset), _range(positions, facts)
        if by is not None and len(by) == 1 and along is not None and (facts.rank(offset) or 0) <= 1:
            return _Range(along.start + by[0], along.count, along.axis)
    return None


def _unsqueezed(node: ir.Node, value: ir.Value, facts: Facts) -> _Range | None:
    axes, rank = facts.integers(facts.input(node, 1)), facts.rank(value)
    inner = _range(facts.input(node, 0), facts)
    if inner is None or axes is None or rank is None:
        return None
    if inner.axis is None:
        return inner
    added = {axis % rank for axis in axes}
    kept = [axis for axis in range(rank) if axis not in added]
    return _Range(inner.start, inner.count, kept[inner.axis] - rank)


@dataclass(frozen=True)
class _Condition:
    """What a mask demands of a key: True in `value`, or False there where `hides`; or its score changed by `adds`."""

    value: ir.Value
    hides: bool = False
    adds: bool = False


def recognise_selection(mask: ir.Value, facts: Facts) -> Selection | Miss | None:
    """The selection of keys that an added mask expresses; None when no selection is involved.

    The mask demands two things of a key: that it is selected (a boolean tensor into which one value was scattered at
    top-k indices), and a causal mask. The top-k must be sorted, largest first, over scores to which the same causal
    mask was applied: then hidden positions can only stand at the end. A causal mask that the graph does not prove is
    taken for one under the assumption `causal-mask`.
    """
    return facts.remember("selection", mask, _selection)


def _selection(mask: ir.Value, facts: Facts) -> Selection | Miss | None:
    conditions = _conditions(mask, facts)
    for condition in conditions:
        indices = None if condition.adds else _scattered_indices(condition.value, condition.hides, facts)
        node = facts.producer(condition.value)
        if indices is None or node is None:
            continue
        others = [other for other in conditions if other is not condition]
        if len(others) != 1:
            return miss("selection-not-causal", node, "one causal mask beside the selection", f"{len(others)} masks")
        causal = _causal_condition(others[0], facts)
        if isinstance(causal, Miss) and "causal-mask" not in facts.assumed:
            return causal
        return _sorted_by_masked_scores(indices, others[0], None if isinstance(causal, Miss) else causal, node, facts)
    return None


def _conditions(mask: ir.Value, facts: Facts) -> list[_Condition]:
    """What a mask, added or boolean, demands of a key, all together.

    1. Mul(Cast(hidden), huge negative); Where(visible, 0, huge negative); Where(hidden, huge negative, 0).
    2. Where(visible, mask, huge negative), Where(hidden, huge negative, mask): also what that mask demands.
    3. And of conditions, Not of one.
    """
    if mask.dtype == ir.DataType.BOOL:
        return _split_condition(_Condition(mask), facts)
    node = facts.producer(mask)
    if is_op(node, "Mul"):
        for hidden, factor in facts.either_way(node):
            if is_huge_negative(factor, facts):
                return _split_condition(_Condition(_before_cast(hidden, facts), hides=True), facts)
    if is_op(node, "Where"):
        choice, chosen, other = (facts.input(node, index) for index in range(3))
        for inside, outside, hides in ((chosen, other, False), (other, chosen, True)):
            if is_huge_negative(outside, facts):
                rest = [] if uniform_value(inside, facts) == 0 else _conditions(inside, facts)
                return [*_split_condition(_Condition(choice, hides), facts), *rest]
    return [_Condition(facts.plain(mask), adds=True)]


def _split_condition(condition: _Condition, facts: Facts) -> list[_Condition]:
    node = facts.producer(condition.value)
    if is_op(node, "Not"):
        return _split_condition(_Condition(facts.input(node, 0), not condition.hides), facts)
    if is_op(node, "And") and not condition.hides:
        parts = (_split_condition(_Condition(facts.input(node, index)), facts) for index in (0, 1))
        return [part for found in parts for part in found]
    return [condition]


def _causal_condition(condition: _Condition, facts: Facts) -> CausalMask | Miss:
    found = "a mask of unknown content"
    if not condition.adds and not condition.hides:
        causal = recognise_causal(condition.value, facts)
        if not isinstance(causal, Miss):
            return causal
        found = causal.got
    expected = "a comparison of key and query positions (if the mask is causal all the same: --assume causal-mask)"
    return miss("selection-not-causal", condition.value, expected, found)


def _scattered_indices(selected: ir.Value, inverted: bool, facts: Facts) -> ir.Value | None:
    """The indices at which `selected` (B, 1, S, T) is True (False if `inverted`), (B, S, K) along the last axis."""
    if facts.rank(selected) != 4:
        return None
    current = selected
    while True:
        node = facts.producer(current)
        if node is None or not node.inputs:
            return None
        if is_op(node, "Not"):
            inverted, current = not inverted, facts.input(node, 0)
        elif is_op(node, "Cast") or (is_op(node, "Unsqueeze") and facts.integers(facts.input(node, 1)) in ([1], [-3])):
            current = facts.input(node, 0)
        else:
            break
    if facts.rank(current) != 3 or not is_op(node, "ScatterElements") or facts.axis(node, current, 0) != 2:
        return None
    if attribute(node, "reduction") != "none":
        return None
    background, written = uniform_value(facts.input(node, 0), facts), uniform_value(facts.input(node, 2), facts)
    if background is None or written is None or bool(background) == bool(written) or bool(written) == inverted:
        return None
    return facts.input(node, 1)


def uniform_value(value: ir.Value | None, facts: Facts) -> float | None:
    """The number that every element of a value equals: constants, Expand, ConstantOfShape, casts of these."""
    if value is None:
        return None
    constant = facts.constant(value)
    if constant is not None:
        return float(constant.reshape(-1)[0]) if constant.size and np.all(constant == constant.reshape(-1)[0]) else None
    node = facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Expand", "Cast", "Reshape", "Unsqueeze"):
        return uniform_value(facts.input(node, 0), facts)
    if is_op(node, "ConstantOfShape"):
        filled = attribute(node, "value")
        return 0.0 if filled is None or not hasattr(filled, "numpy") else float(filled.numpy().reshape(-1)[0])
    return None


def _sorted_by_masked_scores(
    indices: ir.Value, mask: _Condition, causal: CausalMask | None, anchor: ir.Node, facts: Facts
) -> Selection | Miss:
    chosen = indices
    while is_op(facts.producer(chosen), "Cast"):
        chosen = _before_cast(chosen, facts)
    top_k = facts.producer(chosen)
    if not is_op(top_k, "TopK") or top_k.outputs[1] is not chosen:
        found = top_k.op_type if top_k is not None else "a graph input"
        return miss("selection-unsorted", chosen, "indices of a TopK", found)
    if attribute(top_k, "sorted") != 1 or attribute(top_k, "largest") != 1 or facts.rank(chosen) != 3:
        return miss("selection-unsorted", top_k, "a sorted TopK of the largest of (B, S, T)", "another TopK")
    masked = facts.input(top_k, 0)
    where = facts.producer(masked)
    if where is None or facts.axis(top_k, masked) != 2:
        return miss("selection-unsorted", top_k, "scores masked over the last axis", "other scores")
    scores, applied = _masked_scores(where, facts)
    if scores is None or applied is None:
        return miss("selection-unsorted", where, "scores with -inf or a huge negative where hidden", where.op_type)
    if not _is_same_mask(applied, mask, causal, facts):
        return miss("selection-unsorted", where, "scores masked by the mask of the attention", "another mask")
    return Selection(chosen, scores, causal, anchor)


def _masked_scores(node: ir.Node, facts: Facts) -> tuple[ir.Value | None, _Condition | None]:
    """Scores and the one condition applied to them: by Where with a huge negative, or by adding a mask."""
    if is_op(node, "Where"):
        choice, chosen, other = (facts.input(node, index) for index in range(3))
        for scores, outside, hides in ((chosen, other, False), (other, chosen, True)):
            if is_huge_negative(outside, facts):
                applied = _split_condition(_Condition(choice, hides), facts)
                return (scores, applied[0]) if len(applied) == 1 else (None, None)
    if is_op(node, "Add"):
        for scores, mask in facts.either_way(node):
            applied = _conditions(mask, facts)
            if len(applied) == 1 and (not applied[0].adds or is_op(facts.producer(scores), *_SCORING)):
                return scores, applied[0]
    return None, None


_SCORING = ("Squeeze", "Reshape", "MatMul", "Mul", "ReduceSum", "Einsum")
"""What may compute selection scores, to tell them from a mask they are added to."""


def _is_same_mask(left: _Condition, right: _Condition, causal: CausalMask | None, facts: Facts) -> bool:
    """Whether two conditions are the same value up to unit axes and broadcasting, or both proved the same mask."""
    alike = (left.hides, left.adds) == (right.hides, right.adds)
    if alike and _without_broadcast(left.value, facts) is _without_broadcast(right.value, facts):
        return True
    return causal is not None and _causal_condition(left, facts) == causal


def _without_broadcast(value: ir.Value, facts: Facts) -> ir.Value:
    node = facts.producer(value)
    while is_op(node, "Expand") or (node is not None and _changes_unit_axes(node, facts)):
        value = facts.input(node, 0)
        node = facts.producer(value)
    return facts.plain(value)
