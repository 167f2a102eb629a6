"""Rows of tokens repeated once per chosen expert, before anything is gathered by expert."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op, same_dim
from fusion_patterns.lift.floor_division import recognise_floor_division
from fusion_patterns.lift.row_gather import gathered_rows

__all__ = ["RepeatedRows", "recognise_repeated_rows"]


@dataclass(frozen=True)
class RepeatedRows:
    """value[i] = x[i // choices], with x (N, H)."""

    x: ir.Value
    choices: int


def recognise_repeated_rows(value: ir.Value, facts: Facts) -> RepeatedRows | None:
    """The rows that a value (N * K, H) repeats.

    Spellings
    ---------
    1. Unsqueeze(1) -> Expand or Tile to (N, K, H) -> Reshape or Flatten to (N * K, H).
    2. A gather by 0, 1, .., N * K - 1 divided by K.
    3. A gather by 0, 1, .., N - 1 each repeated K times as in 1.
    """
    return facts.remember("repeated_rows", value, _repeated_rows)


def _repeated_rows(value: ir.Value, facts: Facts) -> RepeatedRows | None:
    node = facts.producer(value)
    if is_op(node, "Reshape", "Flatten"):
        return _spread(node, facts)
    gather = None if node is None else gathered_rows(node, facts)
    if gather is None or facts.rank(gather.source) != 2:
        return None
    division = recognise_floor_division(gather.indices, facts)
    if division is not None and _counts_up(division.numerator, facts):
        tokens, counted = facts.dim(gather.source, 0), facts.dim(gather.indices, 0)
        whole = None if tokens is None or (isinstance(tokens, ir.SymbolicDim) and tokens.value is None) else tokens
        if whole is not None and same_dim(counted, whole * division.divisor):
            return RepeatedRows(gather.source, division.divisor)
    tokens_repeated = _spread(facts.producer(gather.indices), facts)
    if tokens_repeated is None or not _counts_up(tokens_repeated.x, facts):
        return None
    if not same_dim(facts.dim(tokens_repeated.x, 0), facts.dim(gather.source, 0)):
        return None
    return RepeatedRows(gather.source, tokens_repeated.choices)


def _counts_up(value: ir.Value, facts: Facts) -> bool:
    node = facts.producer(value)
    return is_op(node, "Range") and facts.scalar(facts.input(node, 0)) == 0 and facts.scalar(facts.input(node, 2)) == 1


def _spread(fold: ir.Node | None, facts: Facts) -> RepeatedRows | None:
    """Reshape(Expand or Tile(Unsqueeze(x, 1))) that folds the repetitions of an axis into the axis before them."""
    if not is_op(fold, "Reshape", "Flatten"):
        return None
    spread = facts.producer(facts.input(fold, 0))
    if not is_op(spread, "Expand", "Tile"):
        return None
    added = facts.producer(facts.input(spread, 0))
    if not is_op(added, "Unsqueeze", "Reshape"):
        return None
    x, unsqueezed = facts.input(added, 0), added.outputs[0]
    rank = facts.rank(x)
    if rank is None or facts.rank(unsqueezed) != rank + 1 or facts.rank(fold.outputs[0]) != rank:
        return None
    if facts.size(unsqueezed, 1) != 1 or (rank == 2 and not _keep_last(x, unsqueezed, fold.outputs[0], facts)):
        return None
    choices = _repetitions(spread, facts)
    return None if choices is None or rank > 2 else RepeatedRows(x, choices)


def _keep_last(x: ir.Value, unsqueezed: ir.Value, folded: ir.Value, facts: Facts) -> bool:
    width = facts.size(x, -1)
    return width is not None and facts.size(unsqueezed, -1) == width and facts.size(folded, -1) == width


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
