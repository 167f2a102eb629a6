"""Rows of tokens repeated once per chosen expert, before anything is gathered by expert."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, is_op, same_dim
from fusion_patterns.lift.floor_division import recognise_floor_division
from fusion_patterns.lift.row_gather import gathered_rows

__all__ = ["RepeatedRows", "recognise_repeated_rows"]


@dataclass(frozen=True)
class RepeatedRows:
    """value[i] = x[i // choices], with x (N, H)."""

    x: ir.Value
    choices: int


def recognise_repeated_rows(value: ir.Value, facts: Facts) -> RepeatedRows | None:
    """The rows that a value (N * K, H) or (N, K, H) repeats.

    Spellings
    ---------
    1. Unsqueeze(1) -> Expand or Tile to (N, K, H) [-> Reshape or Flatten to (N * K, H)].
    2. A gather by 0, 1, .., N * K - 1 divided by K.
    3. A gather by 0, 1, .., N - 1 each repeated K times as in 1.
    """
    return facts.remember("repeated_rows", value, _repeated_rows)


def _repeated_rows(value: ir.Value, facts: Facts) -> RepeatedRows | None:
    node = facts.producer(value)
    if node is None:
        return None
    gather = gathered_rows(node, facts)
    if gather is None:
        return _spread(value, 2, facts)
    tokens = facts.dim(gather.source, 0)
    if facts.rank(gather.source) != 2 or tokens is None or (isinstance(tokens, ir.SymbolicDim) and not tokens.value):
        return None
    division = recognise_floor_division(gather.indices, facts)
    if division is not None:
        whole = same_dim(_count(division.numerator, facts), tokens * division.divisor)
        return RepeatedRows(gather.source, division.divisor) if whole else None
    repeated = _spread(gather.indices, 1, facts)
    if repeated is None or not same_dim(_count(repeated.x, facts), tokens):
        return None
    return RepeatedRows(gather.source, repeated.choices)


def _count(value: ir.Value, facts: Facts) -> Dimension | None:
    """n of a value 0, 1, .., n - 1."""
    node = facts.producer(value)
    if not is_op(node, "Range") or facts.scalar(facts.input(node, 0)) != 0 or facts.scalar(facts.input(node, 2)) != 1:
        return None
    end = facts.symbolic(facts.input(node, 1))
    return end[0] if end is not None and len(end) == 1 else None


def _spread(value: ir.Value, rank: int, facts: Facts) -> RepeatedRows | None:
    """Expand or Tile(x with an axis 1 added), its new axis folded into the one before it or not; x of this rank."""
    node, value = facts.producer(value), facts.plain(value)
    folded = is_op(node, "Reshape", "Flatten")
    spread = facts.producer(facts.input(node, 0)) if is_op(node, "Reshape", "Flatten") else node
    added = facts.producer(facts.input(spread, 0)) if is_op(spread, "Expand", "Tile") else None
    if spread is None or not is_op(added, "Unsqueeze", "Reshape"):
        return None
    x, widened = facts.input(added, 0), facts.input(spread, 0)
    if (facts.rank(x), facts.rank(widened), facts.size(widened, 1)) != (rank, rank + 1, 1):
        return None
    if facts.rank(value) != (rank if folded else rank + 1):
        return None
    if rank == 2 and not (_same_width(x, widened, facts) and _same_width(x, value, facts)):
        return None
    choices = _repetitions(spread, facts)
    return None if choices is None else RepeatedRows(x, choices)


def _same_width(left: ir.Value, right: ir.Value, facts: Facts) -> bool:
    width = facts.size(left, -1)
    return width is not None and facts.size(right, -1) == width


def _repetitions(spread: ir.Node, facts: Facts) -> int | None:
    """K where Expand or Tile repeats only axis 1, of size 1, K times."""
    unsqueezed = facts.input(spread, 0)
    shape, target = facts.shape(unsqueezed), facts.symbolic(facts.input(spread, 1))
    if shape is None or target is None or len(target) != len(shape):
        return None
    for axis, (size, given) in enumerate(zip(shape, target, strict=True)):
        untouched = given == 1 or (is_op(spread, "Expand") and same_dim(size, given))
        if axis != 1 and not untouched:
            return None
    return target[1] if isinstance(target[1], int) and target[1] > 0 else None
