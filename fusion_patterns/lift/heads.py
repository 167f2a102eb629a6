"""Per-head views: which columns of a projection a value of per-head rows consists of."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op, same_dim
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss

__all__ = ["HeadView", "recognise_heads", "recognise_split"]


@dataclass(frozen=True)
class HeadView:
    """Columns [h * width + start, h * width + start + size) of `source` (B, S, heads * width), for every head h.

    The viewed value has four axes: (B, heads, S, size) when `heads_first`, else (B, S, heads, size). `source` may also
    be (B, 1, S, heads * width).
    """

    source: ir.Value
    heads: int
    width: int
    start: int
    size: int
    heads_first: bool


def recognise_heads(value: ir.Value, facts: Facts) -> HeadView | Miss:
    """The per-head view that a value of four axes is.

    Reshape of (B, S, C) to (B, S, heads, width), then Transpose(0, 2, 1, 3) and a cut along the last axis in any order
    and number; Unsqueeze, or Reshape, to one head needs no transpose.
    """
    return facts.remember("heads", value, _heads)


def _heads(value: ir.Value, facts: Facts) -> HeadView | Miss:
    if facts.rank(value) != 4:
        return miss("query-unrecognised", value, "a per-head value of four axes", f"{facts.rank(value)} axes")
    start, size, swapped, current = 0, facts.size(value, -1), False, value
    while size is not None:
        node = facts.producer(current)
        if node is None:
            break
        if is_op(node, "Transpose"):
            if list(attribute(node, "perm") or ()) != [0, 2, 1, 3]:
                break
            swapped, current = not swapped, facts.input(node, 0)
            continue
        cut = recognise_split(current, facts)
        if cut is not None:
            start, current = start + cut.start, cut.source
            continue
        if is_op(node, "Reshape", "Unsqueeze"):
            return _unfolded(current, facts.input(node, 0), start, size, swapped, facts)
        break
    found = facts.producer(current)
    return miss("query-unrecognised", value, "a reshape to heads", found.op_type if found else "a graph input")


def _unfolded(value: ir.Value, source: ir.Value, start: int, size: int, swapped: bool, facts: Facts) -> HeadView | Miss:
    """`value` is a reshape of `source` (B, S, C) or (B, 1, S, C) to four axes."""
    target, given = facts.shape(value), facts.shape(source)
    columns = None if given is None else given[-1]
    if target is None or given is None or not isinstance(columns, int) or not isinstance(target[3], int):
        return miss("query-unrecognised", value, "known column counts", "unknown shapes")
    batch, tokens = given[0], given[-2]
    if len(given) not in (3, 4) or (len(given) == 4 and given[1] != 1) or not same_dim(batch, target[0]):
        return miss("query-unrecognised", value, "a projection (B, S, C) of the same batch", f"shape {list(given)}")
    width = target[3]
    if width == columns and _is_one_head(target, tokens):
        one_token, heads_second = target[1] == 1 and target[2] == 1, target[1] != 1
        return HeadView(source, 1, width, start, size, heads_first=one_token or swapped == heads_second)
    heads = target[2]
    if isinstance(heads, int) and heads * width == columns and same_dim(target[1], tokens):
        return HeadView(source, heads, width, start, size, heads_first=swapped)
    return miss("query-unrecognised", value, f"(B, S, heads, {width}) of {columns} columns", f"shape {list(target)}")


def _is_one_head(target: tuple[Dimension, ...], tokens: Dimension) -> bool:
    return (target[1] == 1 and same_dim(target[2], tokens)) or (target[2] == 1 and same_dim(target[1], tokens))


@dataclass(frozen=True)
class Cut:
    """value = source[..., start : start + size]."""

    source: ir.Value
    start: int
    size: int


def recognise_split(value: ir.Value, facts: Facts) -> Cut | None:
    """The cut of consecutive columns along the last axis that a value is."""
    cut = recognise_slice(value, facts)
    if cut is None or cut.step != 1 or cut.axis != (facts.rank(value) or 0) - 1:
        return None
    return Cut(cut.source, cut.start, cut.size)
