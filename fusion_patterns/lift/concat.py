"""Concatenation, also where an exporter writes slices into an empty buffer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op, same_dim
from fusion_patterns.lift.permuted import recognise_permuted
from fusion_patterns.miss import Miss, miss

__all__ = ["Concat", "recognise_concat"]


@dataclass(frozen=True)
class Concat:
    """value = Transpose(Concat(parts, axis), perm), all parts in one layout and `axis` counted from the front."""

    parts: tuple[ir.Value, ...]
    axis: int
    perm: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.perm)


def recognise_concat(value: ir.Value, facts: Facts) -> Concat | Miss:
    """The parts a value is concatenated from.

    Spellings
    ---------
    1. Concat.
    2. A row of ScatterND that each write one slice along the first axis, starting from a buffer that is overwritten
       whole (`new_empty` followed by slice assignments, as exporters of torch write it), between Transposes.
    """
    return facts.remember("concat", value, _concat)


def _concat(value: ir.Value, facts: Facts) -> Concat | Miss:
    permuted = recognise_permuted(value, facts)
    if permuted is None:
        return miss("query-unrecognised", value, "a concatenation", "a value of unknown rank")
    node = facts.producer(permuted.base)
    if is_op(node, "Concat"):
        parts = tuple(i for i in node.inputs if i is not None)
        axis = facts.axis(node, permuted.base)
        assert axis is not None  # the permutation has a rank
        return Concat(parts, axis, permuted.perm)
    if is_op(node, "ScatterND"):
        return _scattered(permuted.base, permuted.perm, facts)
    return miss("query-unrecognised", permuted.base, "a concatenation", node.op_type if node else "a graph input")


@dataclass(frozen=True)
class _Write:
    """One slice written along the first axis of a buffer that is itself Transpose(update, perm)."""

    start: int
    end: int | None
    update: ir.Value
    perm: tuple[int, ...]


def _scattered(value: ir.Value, outer: tuple[int, ...], facts: Facts) -> Concat | Miss:
    """`value` is the ScatterND written last; undo the writes one by one down to the buffer."""
    writes: list[_Write] = []
    width = facts.size(value, 0)
    current, relative = value, tuple(range(len(outer)))
    while True:
        node = facts.producer(current)
        if not is_op(node, "ScatterND"):
            break
        write = _slice_write(node, facts)
        if isinstance(write, Miss):
            return write
        if relative != tuple(range(len(outer))):
            return miss("query-unrecognised", current, "all slices written along one axis", "a transpose in between")
        writes.append(write)
        buffer = facts.input(node, 0)
        permuted = None if buffer is None else recognise_permuted(buffer, facts)
        if permuted is None:
            return miss("query-unrecognised", current, "a buffer of known rank", "unknown rank")
        current, relative = permuted.base, permuted.perm
    layouts = {write.perm for write in writes}
    if len(layouts) != 1:
        return miss("query-unrecognised", value, "slices in one layout", f"{len(layouts)} layouts")
    (perm,) = layouts
    ordered = sorted(writes, key=lambda write: write.start)
    position: Dimension | None = 0
    for write in ordered:
        if not same_dim(position, write.start):
            return miss(
                "query-unrecognised", value, f"a slice starting at {position}", f"one starting at {write.start}"
            )
        position = write.end if write.end is not None else width
    if width is None or not same_dim(position, width):
        return miss("query-unrecognised", value, f"slices that cover all {width}", f"slices up to {position}")
    return Concat(tuple(w.update for w in ordered), perm[0], tuple(perm[axis] for axis in outer))


def _slice_write(node: ir.Node, facts: Facts) -> _Write | Miss:
    indices, update = facts.input(node, 1), facts.input(node, 2)
    if attribute(node, "reduction", b"none") not in ("none", b"none") or indices is None or update is None:
        return miss("query-unrecognised", node, "a plain slice assignment", "a reducing ScatterND")
    rows = _row_range(indices, facts)
    if rows is None:
        return miss("query-unrecognised", node, "consecutive rows [start, end)", "other indices")
    permuted = recognise_permuted(update, facts)
    if permuted is None:
        return miss("query-unrecognised", node, "an update of known rank", "unknown rank")
    return _Write(*rows, permuted.base, permuted.perm)


def _row_range(indices: ir.Value, facts: Facts) -> tuple[int, int | None] | None:
    """[start, end) of Unsqueeze(Slice(Range(0, n, 1), start, end), -1); end None means up to n."""
    unsqueeze = facts.producer(indices)
    if not is_op(unsqueeze, "Unsqueeze"):
        return None
    cut = facts.producer(facts.input(unsqueeze, 0))
    if not is_op(cut, "Slice"):
        return None
    rows = facts.producer(facts.input(cut, 0))
    start, end = facts.integers(facts.input(cut, 1)), facts.integers(facts.input(cut, 2))
    steps = facts.integers(facts.input(cut, 4)) if len(cut.inputs) > 4 else [1]
    if not is_op(rows, "Range") or start is None or end is None or steps != [1]:
        return None
    if facts.scalar(facts.input(rows, 0)) != 0 or facts.scalar(facts.input(rows, 2)) != 1 or start[0] < 0 or end[0] < 0:
        return None
    return start[0], (None if end[0] >= 2**31 - 1 else end[0])
