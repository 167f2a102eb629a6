"""Cutting a range out of one axis: Slice, Split, SplitToSequence."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op

__all__ = ["Sliced", "recognise_slice"]


@dataclass(frozen=True)
class Sliced:
    """value = source[start : start + size * step : step] along `axis`, counted from the front."""

    source: ir.Value
    axis: int
    start: int
    size: int
    step: int


def recognise_slice(value: ir.Value, facts: Facts) -> Sliced | None:
    """The cut of constant place and size that a value is.

    Spellings
    ---------
    1. An output of Split.
    2. Slice along one axis with constant bounds.
    3. SequenceAt of SplitToSequence, both with constants.
    """
    return facts.remember("slice", value, _slice)


def _slice(value: ir.Value, facts: Facts) -> Sliced | None:
    value = facts.plain(value)
    node = value.producer()
    if is_op(node, "Split"):
        return _split(node, value, facts)
    if is_op(node, "Slice"):
        return _along_one_axis(node, value, facts)
    if is_op(node, "SequenceAt"):
        return _from_sequence(node, value, facts)
    return None


def _split(node: ir.Node, value: ir.Value, facts: Facts) -> Sliced | None:
    source = facts.input(node, 0)
    axis = facts.axis(node, source, 0)
    if axis is None:
        return None
    sizes = [facts.size(output, axis) for output in node.outputs]
    position = next(index for index, output in enumerate(node.outputs) if output is value)
    before = sizes[:position]
    size = sizes[position]
    if size is None or None in before:
        return None
    return Sliced(source, axis, sum(s for s in before if s is not None), size, 1)


def _along_one_axis(node: ir.Node, value: ir.Value, facts: Facts) -> Sliced | None:
    source, rank = facts.input(node, 0), facts.rank(value)
    given = [facts.integers(facts.input(node, i)) if facts.has(node, i) else None for i in range(1, 5)]
    starts, ends, axes, steps = given
    unread = any(facts.has(node, i) and given[i - 1] is None for i in range(1, 5))
    if rank is None or unread or starts is None or ends is None or len(starts) != 1 or len(axes or [0]) != 1:
        return None
    axis, step = (axes or [0])[0] % rank, (steps or [1])[0]
    total = facts.size(source, axis)
    if total is None or step < 1:
        return None
    places = range(total)[starts[0] : ends[0] : step]
    return Sliced(source, axis, places.start, len(places), step)


def _from_sequence(node: ir.Node, value: ir.Value, facts: Facts) -> Sliced | None:
    split, index = facts.input(node, 0).producer(), facts.scalar(facts.input(node, 1))
    if not is_op(split, "SplitToSequence") or index is None:
        return None
    source, rank = facts.input(split, 0), facts.rank(value)
    sizes = facts.integers(facts.input(split, 1)) if facts.has(split, 1) else None
    if rank is None or sizes is None or (attribute(split, "keepdims") != 1 and len(split.inputs) < 2):
        return None
    axis = attribute(split, "axis") % rank
    total = facts.size(source, axis)
    if len(sizes) == 1 and total is not None and facts.rank(facts.input(split, 1)) == 0:
        sizes = [min(sizes[0], total - start) for start in range(0, total, sizes[0])]
    position = int(index) % len(sizes)
    return Sliced(source, axis, sum(sizes[:position]), sizes[position], 1)
