"""Where an element of a value comes from: reshapes, transposes, broadcasts and cuts as arithmetic on indices.

    (S, B, N, D) -> Reshape -> (S, B, H):   the element [s, b, h] was [s, b, h // D, h % D]
    (T, N, 8) -> Slice(lane 0) -> Tile(D):  the element [t, n, d] was [t, n, 0]

Two values that were laid out in different ways for one product are the same if their elements have the same origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op
from fusion_patterns.lift.slices import recognise_slice

__all__ = [
    "Digit",
    "Element",
    "Entry",
    "Index",
    "Size",
    "broadcast_index",
    "compose",
    "itself",
    "recognise_view",
    "sizes",
    "trace",
    "widens",
]

Size = int | str
"""A size: a number, or a simplified symbolic expression."""


@dataclass(frozen=True, order=True)
class Digit:
    """(index along `axis`) // over % size; `size` None: up to the end of the axis."""

    axis: int
    over: Size = 1
    size: Size | None = None


Entry = int | tuple[Digit, ...]
"""An index along one axis: a number, or digits from the most to the least significant."""

Index = tuple[Entry, ...]
"""One entry per axis of a value, in terms of the axes of another one."""


@dataclass(frozen=True)
class Element:
    """value[index]; `index` has one entry per axis of `value`, in terms of the axes of the value that is looked at."""

    value: ir.Value
    index: Index

    def seen_from(self, outer: Index, dims: Sequence[Size | None]) -> Element | None:
        """The element in terms of new axes (of sizes `dims`), where `outer` gives the present axes in terms of them."""
        index = compose(self.index, outer, dims)
        return None if index is None else Element(self.value, index)


def sizes(value: ir.Value, facts: Facts) -> tuple[Size | None, ...] | None:
    """The dimensions of a value, None each where nothing is known; None without a rank."""
    return facts.remember("sizes", value, _sizes)


def _sizes(value: ir.Value, facts: Facts) -> tuple[Size | None, ...] | None:
    shape = facts.shape(value)
    return None if shape is None else tuple(_size(dim) for dim in shape)


def _size(dim: Dimension) -> Size | None:
    if isinstance(dim, int):
        return dim
    name = None if dim.value is None else dim.simplify().value
    return int(name) if name is not None and name.isdigit() else name


# --- Tracing ----------------------------------------------------------------------------------------------------------


def trace(value: ir.Value, facts: Facts) -> Element:
    """Where the elements of a value come from: the first value above it that is computed, not just laid out anew."""
    return facts.remember("trace", value, _trace)


def _trace(value: ir.Value, facts: Facts) -> Element:
    current, dims = facts.plain(value), sizes(value, facts) or ()
    index = itself(dims)
    while (view := recognise_view(current, facts)) is not None:
        source, inner = view
        composed = compose(inner, index, dims)
        if composed is None:
            break
        current, index = source, composed
    return Element(current, index)


def itself(dims: Sequence[Size | None]) -> Index:
    """The index of a value of these sizes in terms of its own axes; 0 along an axis of size 1."""
    return tuple(0 if size == 1 else (Digit(axis),) for axis, size in enumerate(dims))


def recognise_view(value: ir.Value, facts: Facts) -> tuple[ir.Value, Index] | None:
    """(source, index) with value[i] = source[index(i)], for the node that computes a value; None if it does more.

    Spellings
    ---------
    1. Cast to a wider float type.
    2. Transpose.
    3. Reshape, Squeeze, Unsqueeze, Flatten, where axes are merged or split, not both at once.
    4. Expand and Tile of axes of size 1.
    5. Slice, Split and SplitToSequence that leave one index, Gather of one index.
    """
    return facts.remember("view", value, _view)


def _view(value: ir.Value, facts: Facts) -> tuple[ir.Value, Index] | None:
    node = facts.producer(value)
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    source = facts.input(node, 0)
    before, after = sizes(source, facts), sizes(value, facts)
    if before is None or after is None:
        return None
    index: Index | None = None
    if is_op(node, "Cast"):
        index = itself(after) if widens(source, value) else None
    elif is_op(node, "Transpose"):
        perm = attribute(node, "perm") or tuple(reversed(range(len(after))))
        index = tuple((Digit(list(perm).index(axis)),) for axis in range(len(before)))
    elif is_op(node, "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        index = _reshaped(before, after)
    elif is_op(node, "Expand", "Tile"):
        index = broadcast_index(before, after)
    elif is_op(node, "Gather"):
        index = _gathered(node, before, len(after), facts)
    elif is_op(node, "Slice", "Split", "SequenceAt"):
        return _cut(value, facts)
    return None if index is None else (source, index)


_WIDTHS = {ir.DataType.FLOAT16: 1, ir.DataType.BFLOAT16: 1, ir.DataType.FLOAT: 2, ir.DataType.DOUBLE: 3}


def widens(source: ir.Value, value: ir.Value) -> bool:
    """Whether the second value has the wider float type, so that a cast from the first to it is exact."""
    before, after = (_WIDTHS.get(v.dtype) if v.dtype is not None else None for v in (source, value))
    return before is not None and after is not None and before < after


def broadcast_index(before: Sequence[Size | None], after: Sequence[Size | None]) -> Index | None:
    """A value of sizes `before` in terms of the axes that it is broadcast to; None where equality is not certain."""
    if len(before) > len(after):
        return None
    offset = len(after) - len(before)
    entries: list[Entry] = []
    for axis, size in enumerate(before):
        if size == 1:
            entries.append(0)
        elif size is not None and size == after[axis + offset]:
            entries.append((Digit(axis + offset),))
        else:
            return None
    return tuple(entries)


def _gathered(node: ir.Node, before: Sequence[Size | None], after: int, facts: Facts) -> Index | None:
    picked = facts.integers(facts.input(node, 1))
    at = attribute(node, "axis", 0) % len(before)
    size = before[at]
    if picked is None or len(picked) != 1 or not isinstance(size, int) or not -size <= picked[0] < size:
        return None
    removed = len(before) - after
    return tuple(
        picked[0] % size if axis == at else (Digit(axis - removed if axis > at else axis),)
        for axis in range(len(before))
    )


def _cut(value: ir.Value, facts: Facts) -> tuple[ir.Value, Index] | None:
    cut = recognise_slice(value, facts)
    if cut is None or cut.size != 1:
        return None
    whole = itself(sizes(cut.source, facts) or ())
    return cut.source, tuple(cut.start if axis == cut.axis else entry for axis, entry in enumerate(whole))


# --- Reshapes ---------------------------------------------------------------------------------------------------------

_Axes = list[tuple[int, Size | None]]


def _reshaped(before: Sequence[Size | None], after: Sequence[Size | None]) -> Index | None:
    """Axes of size 1 say nothing; equal sizes at either end are the same axes; what is left is merged or split."""
    entries: dict[int, Entry] = {axis: 0 for axis, size in enumerate(before) if size == 1}
    left: _Axes = [(axis, size) for axis, size in enumerate(before) if size != 1]
    right: _Axes = [(axis, size) for axis, size in enumerate(after) if size != 1]
    for end in (0, -1):
        while left and right and left[end][1] is not None and left[end][1] == right[end][1]:
            entries[left.pop(end)[0]] = (Digit(right.pop(end)[0]),)
    while left or right:
        group = _next_group(left, right)
        if group is None:
            return None
        merged, split = left[: group[0]], right[: group[1]]
        del left[: group[0]], right[: group[1]]
        if len(merged) == 1:
            entries[merged[0][0]] = tuple(Digit(axis) for axis, _ in split)
            continue
        inner: Size | None = 1
        for position in reversed(range(len(merged))):
            axis, size = merged[position]
            if inner is None:
                return None
            entries[axis] = (Digit(split[0][0], inner, size if position else None),)
            inner = _product(inner, size)
    return tuple(entries[axis] for axis in range(len(before)))


def _next_group(left: _Axes, right: _Axes) -> tuple[int, int] | None:
    """How many axes of either side hold the same elements: one of them exactly one axis."""
    if len(left) == 1 or len(right) == 1:
        return (len(left), len(right)) if left and right else None
    for short, long, turned in ((left, right, False), (right, left, True)):
        if not short:
            return None
        total: Size | None = 1
        for count, (_, size) in enumerate(long, 1):
            total = _product(total, size)
            if total is not None and total == short[0][1]:
                return (count, 1) if turned else (1, count)
    return None


def _product(left: Size | None, right: Size | None) -> Size | None:
    if left is None or right is None:
        return None
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return _size(_dimension(left) * _dimension(right))


def _dimension(size: Size) -> ir.SymbolicDim:
    return ir.SymbolicDim(str(size))


# --- Composition ------------------------------------------------------------------------------------------------------


def compose(inner: Index, outer: Index, dims: Sequence[Size | None]) -> Index | None:
    """`inner` in terms of new axes of sizes `dims`, `outer` being the axes it speaks of in terms of those."""
    entries = [_through(entry, outer, dims) for entry in inner]
    known = [entry for entry in entries if entry is not None]
    return tuple(known) if len(known) == len(entries) else None


def _through(entry: Entry, outer: Index, dims: Sequence[Size | None]) -> Entry | None:
    if isinstance(entry, int):
        return entry
    if len(entry) == 1 and isinstance(outer[entry[0].axis], int) and entry[0] == Digit(entry[0].axis):
        return outer[entry[0].axis]
    digits: list[Digit] = []
    for digit in entry:
        part = _part(outer[digit.axis], digit, dims)
        if part is None:
            return None
        digits.extend(part)
    return _joined(digits, dims) or 0


def _part(entry: Entry, wanted: Digit, dims: Sequence[Size | None]) -> tuple[Digit, ...] | None:
    """The digits of `entry` that make up entry // wanted.over % wanted.size."""
    if isinstance(entry, int):
        return () if entry == 0 else None
    if wanted.over == 1 and wanted.size is None:
        return entry
    if len(entry) == 1:
        return _part_of_digit(entry[0], wanted)
    end = None if wanted.size is None else _product(wanted.over, wanted.size)
    stride: Size | None = 1
    taken: list[Digit] = []
    for digit in reversed(entry):
        if stride == wanted.over or taken:
            if end is not None and stride == end:
                break
            taken.insert(0, digit)
        stride = _product(stride, _digit_size(digit, dims))
    reached = bool(taken) and (end is None or stride == end)
    return tuple(taken) if reached else None


def _part_of_digit(digit: Digit, wanted: Digit) -> tuple[Digit, ...] | None:
    over = _product(digit.over, wanted.over)
    if over is None:
        return None
    if wanted.size is not None or digit.size is None:
        return (Digit(digit.axis, over, wanted.size),)
    if isinstance(digit.size, int) and isinstance(wanted.over, int) and digit.size % wanted.over == 0:
        return (Digit(digit.axis, over, digit.size // wanted.over),)
    return None


def _digit_size(digit: Digit, dims: Sequence[Size | None]) -> Size | None:
    if digit.size is not None:
        return digit.size
    whole = dims[digit.axis]
    if digit.over == 1:
        return whole
    return whole // digit.over if isinstance(whole, int) and isinstance(digit.over, int) else None


def _joined(digits: Sequence[Digit], dims: Sequence[Size | None]) -> tuple[Digit, ...]:
    """The same number with neighbouring digits of one axis as one, and without digits that are always 0."""
    joined: list[Digit] = []
    for digit in digits:
        if digit.size == 1 or dims[digit.axis] == 1:
            continue
        if digit.size is not None and _product(digit.over, digit.size) == dims[digit.axis]:
            digit = replace(digit, size=None)
        above = joined[-1] if joined else None
        if (
            above is not None
            and above.axis == digit.axis
            and digit.size is not None
            and above.over == _product(digit.over, digit.size)
        ):
            joined[-1] = replace(digit, size=above.size)
        else:
            joined.append(digit)
    return tuple(joined)
