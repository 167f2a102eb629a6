"""Concatenation, also where an exporter writes slices into an empty buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
    2. A row of ScatterND that each write one slice, starting from a buffer that is overwritten whole (`new_empty`
       followed by slice assignments, as exporters of torch write it): slices along the first axis between Transposes,
       or blocks given by the coordinates of every element.
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
    """rows [start, end) along `axis` of a buffer set to `update`; the buffer stored is Transpose(buffer, perm)."""

    axis: int
    start: int
    end: int | None
    update: ir.Value
    perm: tuple[int, ...]


def _scattered(value: ir.Value, outer: tuple[int, ...], facts: Facts) -> Concat | Miss:
    """`value` is the ScatterND written last; undo the writes one by one down to the buffer."""
    writes: list[_Write] = []
    current, relative = value, tuple(range(len(outer)))
    while is_op(node := facts.producer(current), "ScatterND"):
        write = _slice_write(node, facts)
        if isinstance(write, Miss):
            return write
        if relative != tuple(range(len(outer))):
            return miss("query-unrecognised", current, "all slices written along one axis", "a transpose in between")
        writes.append(write)
        permuted = recognise_permuted(facts.input(node, 0), facts)
        if permuted is None:
            return miss("query-unrecognised", current, "a buffer of known rank", "unknown rank")
        current, relative = permuted.base, permuted.perm
    layouts = {(write.axis, write.perm) for write in writes}
    if len(layouts) != 1:
        return miss("query-unrecognised", value, "slices in one layout", f"{len(layouts)} layouts")
    ((axis, perm),) = layouts
    ordered = sorted(writes, key=lambda write: write.start)
    width = facts.size(value, perm.index(axis))
    position: int | None = 0
    for write in ordered:
        if position != write.start:
            return miss(
                "query-unrecognised", value, f"a slice starting at {position}", f"one starting at {write.start}"
            )
        position = write.end if write.end is not None else width
    if width is None or position != width:
        return miss("query-unrecognised", value, f"slices that cover all {width}", f"slices up to {position}")
    return Concat(tuple(w.update for w in ordered), axis, tuple(perm[axis] for axis in outer))


def _slice_write(node: ir.Node, facts: Facts) -> _Write | Miss:
    if attribute(node, "reduction") != "none":
        return miss("query-unrecognised", node, "a plain slice assignment", "a reducing ScatterND")
    permuted = recognise_permuted(facts.input(node, 2), facts)
    if permuted is None:
        return miss("query-unrecognised", node, "an update of known rank", "unknown rank")
    rows = _row_range(facts.input(node, 1), facts)
    if rows is not None:
        return _Write(permuted.perm[0], *rows, permuted.base, permuted.perm)
    region = _region(node, facts)
    if region is None:
        return miss("query-unrecognised", node, "consecutive rows [start, end)", "other indices")
    axis, *bounds = region
    return _Write(permuted.perm[axis], bounds[0], bounds[1], permuted.base, permuted.perm)


def _row_range(indices: ir.Value, facts: Facts) -> tuple[int, int] | None:
    """[start, end) of Unsqueeze(Slice(Range(0, n, 1), start, end), -1), or of these numbers as a constant (rows, 1)."""
    constant = facts.constant(indices)
    if constant is not None:
        return _consecutive(constant.reshape(-1)) if constant.ndim == 2 and constant.shape[1] == 1 else None
    unsqueeze = facts.producer(indices)
    span = _span(facts.input(unsqueeze, 0), facts) if is_op(unsqueeze, "Unsqueeze") else None
    return None if span is None or facts.rank(indices) != 2 else span


def _consecutive(numbers: npt.NDArray[Any]) -> tuple[int, int] | None:
    """[start, end) of numbers that count up by 1 from 0 or more."""
    if numbers.size == 0 or numbers[0] < 0 or np.any(np.diff(numbers) != 1):
        return None
    return int(numbers[0]), int(numbers[-1]) + 1


def _span(value: ir.Value, facts: Facts) -> tuple[int, int] | None:
    """[start, end) of the consecutive numbers a value holds: Range from 0 by 1, or a cut of it, of constant length."""
    constant = facts.constant(value)
    if constant is not None:
        return _consecutive(constant.reshape(-1))
    node = facts.producer(value)
    if is_op(node, "Slice"):
        bounds = facts.integers(facts.input(node, 1)), facts.integers(facts.input(node, 2))
        steps = facts.integers(facts.input(node, 4)) if facts.has(node, 4) else [1]
        inner = _span(facts.input(node, 0), facts)
        if inner is None or bounds[0] is None or bounds[1] is None or steps != [1] or min(*bounds[0], *bounds[1]) < 0:
            return None
        return inner[0] + bounds[0][0], min(inner[0] + bounds[1][0], inner[1])
    if not is_op(node, "Range") or not _counts_from_zero(node, facts):
        return None
    limit = facts.integers(facts.input(node, 1))
    return None if limit is None else (0, limit[0])


def _region(node: ir.Node, facts: Facts) -> tuple[int, int, int] | None:
    """(axis, start, end) of a ScatterND whose indices are coordinates of a block: whole on all axes but one.

    Concat of one coordinate per axis, each a range along its own axis that is broadcast over the others.
    """
    buffer, join = facts.input(node, 0), facts.producer(facts.input(node, 1))
    shape = facts.shape(buffer)
    if shape is None or not is_op(join, "Concat") or len(join.inputs) != len(shape):
        return None
    if facts.axis(join, join.outputs[0]) != len(shape):
        return None
    parts: list[tuple[int, int, int]] = []
    for axis in range(len(shape)):
        source = _along_axis(facts.input(join, axis), axis, len(shape), facts)
        if source is None:
            return None
        if _is_whole(source, shape[axis], facts):
            continue
        span = _span(source, facts)
        if span is None:
            return None
        parts.append((axis, *span))
    return parts[0] if len(parts) == 1 else None


def _along_axis(value: ir.Value, axis: int, rank: int, facts: Facts) -> ir.Value | None:
    """What a coordinate (.., 1) is broadcast from, a vector or a constant of more axes, when it runs along `axis`."""
    current = value
    while is_op(node := facts.producer(current), "Unsqueeze", "Expand", "Reshape") and facts.rank(current) != 1:
        current = facts.input(node, 0)
        shape = facts.shape(current)
        if shape is None:
            return None
        if len(shape) == 1:
            return current if axis == rank - 1 or _was_column(node, axis, rank, facts) else None
        if facts.constant(current) is not None:
            return current if _runs_along(shape, axis, rank) else None
    return None


def _runs_along(shape: tuple[Dimension, ...], axis: int, rank: int) -> bool:
    """Whether a value broadcast to `rank` axes has size 1 on all of its own but `axis`."""
    own = axis - (rank - len(shape))
    return own >= 0 and all(dim == 1 for position, dim in enumerate(shape) if position != own)


def _was_column(node: ir.Node, axis: int, rank: int, facts: Facts) -> bool:
    """Whether a vector was reshaped to run along `axis` of `rank` axes: unit axes behind it."""
    shape = facts.shape(node.outputs[0])
    return shape is not None and len(shape) == rank - axis and all(dim == 1 for dim in shape[1:])


def _counts_from_zero(node: ir.Node, facts: Facts) -> bool:
    return facts.scalar(facts.input(node, 0)) == 0 and facts.scalar(facts.input(node, 2)) == 1


def _is_whole(vector: ir.Value, size: Dimension, facts: Facts) -> bool:
    constant = facts.constant(vector)
    if constant is not None:
        return _consecutive(constant.reshape(-1)) == (0, size)
    node = facts.producer(vector)
    if not is_op(node, "Range") or not _counts_from_zero(node, facts):
        return False
    limit = facts.symbolic(facts.input(node, 1))
    return limit is not None and same_dim(limit[0], size)
