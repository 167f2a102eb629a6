"""Per-head views of rows (T, C): which columns of a projection a value (T, heads, size) or (T, size) consists of."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.heads import recognise_split
from fusion_patterns.miss import Miss, miss

__all__ = ["TokenHeads", "recognise_token_heads"]


@dataclass(frozen=True)
class TokenHeads:
    """Columns [h * width + start, h * width + start + size) of `source` (T, heads * width), for every head h.

    The viewed value is (T, heads, size), (heads, T, size) when `heads_first`, or (T, size) of one head.
    """

    source: ir.Value
    heads: int
    width: int
    start: int
    size: int
    heads_first: bool


def recognise_token_heads(value: ir.Value, facts: Facts) -> TokenHeads | Miss:
    """The per-head view that a value of two or three axes is.

    Reshape or Unsqueeze of (T, C) to (T, heads, width), Transpose(1, 0, 2), and cuts along the last axis, in any order.
    Rows (T, C) are one head.
    """
    return facts.remember("token_heads", value, _token_heads)


def _token_heads(value: ir.Value, facts: Facts) -> TokenHeads | Miss:
    rank, size = facts.rank(value), facts.size(value, -1)
    if rank not in (2, 3) or size is None:
        return miss("query-unrecognised", value, "rows (T, C) or heads (T, N, D)", f"{rank} axes")
    if rank == 2:
        return TokenHeads(facts.plain(value), 1, size, 0, size, heads_first=False)
    start, swapped, current = 0, False, facts.plain(value)
    while (node := current.producer()) is not None:
        if is_op(node, "Transpose") and list(attribute(node, "perm") or ()) == [1, 0, 2]:
            swapped, current = not swapped, facts.input(node, 0)
        elif (cut := recognise_split(current, facts)) is not None:
            start, current = start + cut.start, cut.source
        elif is_op(node, "Reshape", "Unsqueeze"):
            return _unfolded(current, facts.input(node, 0), start, size, swapped, facts)
        else:
            break
    found = "a graph input" if node is None else node.op_type
    return miss("query-unrecognised", value, "a reshape of (T, C) to heads", found)


def _unfolded(
    value: ir.Value, source: ir.Value, start: int, size: int, swapped: bool, facts: Facts
) -> TokenHeads | Miss:
    target, given = facts.shape(value), facts.shape(source)
    if target is None or given is None or len(given) != 2:
        return miss("query-unrecognised", value, "a reshape of rows (T, C)", f"shape {given}")
    heads, width, columns = target[1], target[2], given[1]
    if isinstance(heads, int) and isinstance(width, int) and heads * width == columns:  # so T stays what it is
        return TokenHeads(source, heads, width, start, size, heads_first=swapped)
    return miss("query-unrecognised", value, f"(T, heads, {width}) of {columns} columns", f"shape {list(target)}")
