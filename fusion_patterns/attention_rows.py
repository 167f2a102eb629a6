"""Rows of an attention (..., D) as RingAttentionUpdateV2 takes them, and its results as the graph has them.

Statistics that lie as the operator stores them, (B, N, S, 8) beside (S, B, H) or (T, N, 8) beside (T, N, D), go in as
they are. All others are laid out as (T, N, 8), T being all rows of one head, and the merged ones are laid out back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.emit import Emitter
from fusion_patterns.graph import Dimension, Facts
from fusion_patterns.lift.indexed import Digit, Element, Entry, Index, Size, sizes
from fusion_patterns.miss import Miss, miss

__all__ = ["LANES", "AttentionRows", "recognise_rows"]

LANES = 8
"""How many times the operator stores the statistic of a row."""

_SBH, _TND = (1, 2, 0), (0, 1)
"""The axes of the attention that a statistic has before its lanes; 2 in SBH stands for the heads in H."""


@dataclass(frozen=True)
class AttentionRows:
    """How rows lie in an attention of sizes `dims`: along all axes but the last, and by `heads` along that if `split`.

    `stored` names the axes of the statistics if they lie in the graph as the operator takes them.
    """

    dims: tuple[Size | None, ...]
    heads: int
    head_size: int
    split: bool
    stored: tuple[int, ...] | None

    @property
    def is_sbh(self) -> bool:
        return self.stored == _SBH

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of rows in row-major order; that of the features stands for the heads in it."""
        return tuple(range(len(self.dims) if self.split else len(self.dims) - 1))

    def size(self, axis: int) -> Size | None:
        """How many rows there are along one of `axes`."""
        return self.heads if axis == len(self.dims) - 1 else self.dims[axis]

    def covered_by(self, index: Index) -> bool:
        """Whether each axis of rows is one axis of a statistic with this index."""
        entries = [entry for entry in index if not isinstance(entry, int)]
        found = sorted(entry[0].axis for entry in entries if len(entry) == 1)
        return len(found) == len(entries) and found == [axis for axis in self.axes if self.size(axis) != 1]

    # Into the operator

    def attention_in(self, emit: Emitter, attention: ir.Value) -> ir.Value:
        """(T, N, D) of an attention; the attention itself where it is that, or (S, B, H) beside such statistics."""
        if self._is_taken_as_it_is():
            return attention
        shape = (ir.SymbolicDim(None), self.heads, self.head_size)
        return emit.op("Reshape", attention, emit.integers([-1, self.heads, self.head_size]), shape=shape)

    def _is_taken_as_it_is(self) -> bool:
        return self.stored is not None or (len(self.dims) == 3 and not self.split and self.dims[1] == self.heads)

    def statistic_in(self, emit: Emitter, statistic: ir.Value, element: Element, facts: Facts) -> ir.Value:
        """(T, N, 8) float32 of a statistic, now in `statistic`; itself where it is stored as the operator takes it."""
        if self.stored is not None:
            return emit.cast(statistic, ir.DataType.FLOAT)
        entries, dims = list(element.index), list(sizes(element.value, facts) or ())
        for axis in reversed(range(len(entries))):
            entry = entries[axis]
            if isinstance(entry, int) and dims[axis] != 1:
                del entries[axis], dims[axis]
                statistic = emit.op("Gather", statistic, emit.integers(entry), axis=axis, shape=_dimensions(dims))
        order = sorted(range(len(entries)), key=lambda axis: _row_axis(entries[axis]))
        rows = emit.cast(_transposed(emit, statistic, order), ir.DataType.FLOAT)
        tokens = ir.SymbolicDim(None)
        rows = emit.op("Reshape", rows, emit.integers([-1, self.heads, 1]), shape=(tokens, self.heads, 1))
        return emit.op("Expand", rows, emit.integers([1, 1, LANES]), shape=(tokens, self.heads, LANES))

    # Out of the operator

    def attention_out(self, emit: Emitter, merged: ir.Value, like: ir.Value) -> ir.Value:
        """The merged attention in the shape of the attention `like`."""
        if self._is_taken_as_it_is():
            return merged
        target = emit.integers(_target(self.dims)) if _is_constant(self.dims) else _shape(emit, like, len(self.dims))
        return emit.op("Reshape", merged, target, shape=_dimensions(self.dims))

    def statistic_out(
        self, emit: Emitter, lane: ir.Value, index: Index, dims: Sequence[Size | None], like: ir.Value
    ) -> ir.Value:
        """One lane (.., 1) of a merged statistic, laid out by `index` in the shape `dims`; `like` is an attention."""
        axes = list(self.stored or self.axes)
        if self.stored is not None:
            rows = emit.op("Squeeze", lane, emit.integers([-1]), shape=_dimensions([self.size(a) for a in axes]))
        else:
            row_dims = [self.size(axis) for axis in axes]
            rows = emit.op("Reshape", lane, self._row_shape(emit, row_dims, like), shape=_dimensions(row_dims))
        wanted = [entry[0].axis for entry in index if not isinstance(entry, int)]
        order = [axes.index(axis) for axis in wanted] + [i for i, axis in enumerate(axes) if axis not in wanted]
        rows = _transposed(emit, rows, order)
        if len(wanted) < len(axes):
            unit = list(range(len(wanted), len(axes)))
            rows = emit.op("Squeeze", rows, emit.integers(unit), shape=_dimensions([self.size(a) for a in wanted]))
        others = [axis for axis, entry in enumerate(index) if isinstance(entry, int)]
        if others:
            single = [1 if axis in others else size for axis, size in enumerate(dims)]
            rows = emit.op("Unsqueeze", rows, emit.integers(others), shape=_dimensions(single))
        lanes = [size if axis in others and isinstance(size, int) else 1 for axis, size in enumerate(dims)]
        if any(size != 1 for size in lanes):
            rows = emit.op("Expand", rows, emit.integers(lanes), shape=_dimensions(dims))
        return rows

    def _row_shape(self, emit: Emitter, row_dims: Sequence[Size | None], like: ir.Value) -> ir.Value:
        if _is_constant(row_dims):
            return emit.integers(_target(row_dims))
        outer = _shape(emit, like, len(self.dims) - 1)
        if not self.split:
            return outer
        return emit.op("Concat", outer, emit.integers([self.heads]), axis=0, shape=(len(row_dims),))


def recognise_rows(attention: ir.Value, statistics: Sequence[Element], facts: Facts) -> AttentionRows | Miss:
    """The rows of an attention, of which each of the `statistics` must have exactly one value per row.

    `statistics` are the maxima and perhaps sums of both attentions, in terms of the axes of the attention.
    """
    dims = sizes(attention, facts) or ()
    last, width = len(dims) - 1, dims[-1]
    inside = next((digit.over for digit in _digits(statistics[0]) if digit.axis == last), None)
    head_size = width if inside is None else inside
    if not isinstance(width, int) or not isinstance(head_size, int) or width % head_size:
        return miss("merge-layout", attention, "a head size that is a number", f"{head_size} of {width}")
    expected = [Digit(axis) for axis in range(last) if dims[axis] != 1]
    expected += [] if inside is None else [Digit(last, head_size)]
    for element in statistics:
        if not _is_one_per_row(element, expected, facts):
            return miss("merge-layout", element.value, "one statistic for each row of the attention", "another layout")
    beside = dims[-2] if len(dims) > 2 else 1
    heads = beside if inside is None else width // head_size
    stored = _stored(statistics, facts) if len(dims) == 3 and len(statistics) == 4 else None
    return AttentionRows(dims, heads if isinstance(heads, int) else 1, head_size, inside is not None, stored)


def _is_one_per_row(element: Element, rows: Sequence[Digit], facts: Facts) -> bool:
    """Whether a statistic has exactly these axes, and perhaps lanes behind them, of which one is read."""
    lanes = [axis for axis, size in enumerate(sizes(element.value, facts) or ()) if size != 1]
    read = [axis for axis in lanes if isinstance(element.index[axis], int)]
    return sorted(_digits(element), key=lambda digit: digit.axis) == rows and read in ([], [len(element.index) - 1])


def _stored(statistics: Sequence[Element], facts: Facts) -> tuple[int, ...] | None:
    """The order in which all statistics lie as the operator takes them; None if they do not."""
    for order in (_SBH, _TND):
        if all(_lies(element, order, facts) for element in statistics):
            return order
    return None


def _lies(element: Element, order: Sequence[int], facts: Facts) -> bool:
    """Whether a statistic has these axes of the attention, and lanes behind them."""
    if len(element.index) != len(order) + 1 or facts.size(element.value, -1) != LANES:
        return False
    found = {digit.axis: digit for digit in _digits(element)}
    wanted: list[Entry] = [(found[axis],) if axis in found else 0 for axis in order]
    return list(element.index[:-1]) == wanted and isinstance(element.index[-1], int)


def _digits(element: Element) -> list[Digit]:
    return [digit for entry in element.index if not isinstance(entry, int) for digit in entry]


def _row_axis(entry: Entry) -> tuple[bool, int]:
    """A key that sorts axes as the rows lie, those of size 1 behind."""
    return (True, 0) if isinstance(entry, int) else (False, entry[0].axis)


def _transposed(emit: Emitter, value: ir.Value, order: Sequence[int]) -> ir.Value:
    if list(order) == list(range(len(order))):
        return value
    shape = None if value.shape is None else [value.shape[axis] for axis in order]
    return emit.op("Transpose", value, perm=list(order), shape=shape)


def _is_constant(dims: Sequence[Size | None]) -> bool:
    """Whether a Reshape to these sizes can be written as numbers, one of them perhaps -1."""
    return sum(not isinstance(size, int) for size in dims) <= 1


def _target(dims: Sequence[Size | None]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in dims]


def _shape(emit: Emitter, value: ir.Value, end: int) -> ir.Value:
    return emit.op("Shape", value, start=0, end=end, dtype=ir.DataType.INT64, shape=(end,))


def _dimensions(dims: Sequence[Size | None]) -> list[Dimension]:
    return [size if isinstance(size, int) else ir.SymbolicDim(size) for size in dims]
