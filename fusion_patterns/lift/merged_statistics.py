"""The statistics of a merged attention that a graph computes beside it: new maxima, sums, and log-sum-exps."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.exponentials import Ratio
from fusion_patterns.lift.indexed import Digit, Element, Entry, Index, Size, recognise_view, sizes
from fusion_patterns.lift.partial_attention import PartialMerge, reference_of
from fusion_patterns.lift.softmax_weights import (
    LogSumExp,
    RowMax,
    SoftmaxSum,
    Statistic,
    recognise_statistic,
    seen_from,
)

__all__ = ["MergedStatistic", "StatisticKind", "find_merged_statistics"]

_MOST_VALUES = 96
"""How many values computed from the statistics are looked at: a merge of any spelling has fewer."""


class StatisticKind(enum.Enum):
    """max(prev, cur); the sum of both weights over e^max; or max + log(sum)."""

    MAXIMUM = "maximum"
    SUM = "sum"
    LOG_SUM_EXP = "log_sum_exp"


@dataclass(frozen=True)
class MergedStatistic:
    """A statistic of the merged rows. `index` gives the axes of `value` in terms of those of the merged attention.

    A number in it stands for an axis of size 1, or for lanes that repeat one value.
    """

    value: ir.Value
    kind: StatisticKind
    index: Index


def find_merged_statistics(merge: PartialMerge, facts: Facts) -> tuple[MergedStatistic, ...]:
    """What the graph computes of the merged rows, in the order of the computation from the first maximum on."""
    found = []
    for value in _computed_from(merge, facts):
        statistic = recognise_statistic(value, facts)
        kind = None if statistic is None else _kind(statistic, merge)
        index = None if statistic is None or kind is None else _index(statistic, merge, facts)
        if kind is not None and index is not None:
            found.append(MergedStatistic(value, kind, index))
    return tuple(found)


def _kind(statistic: Statistic, merge: PartialMerge) -> StatisticKind | None:
    """What the statistic may be for this merge: log-sum-exps have no maxima and sums of their own."""
    if merge.prev.sum is None:
        return StatisticKind.LOG_SUM_EXP if isinstance(statistic, LogSumExp) else None
    kinds = {RowMax: StatisticKind.MAXIMUM, SoftmaxSum: StatisticKind.SUM}
    return kinds.get(type(statistic))


_ROW_WISE = ("Add", "Sub", "Mul", "Div", "Neg", "Max", "Exp", "Log", "Sigmoid", "Softplus", "Reciprocal", "Cast")


def _computed_from(merge: PartialMerge, facts: Facts) -> Iterator[ir.Value]:
    """Values computed row by row from the first maximum, breadth first, up to the merged attention."""
    queue = [merge.prev.maximum.value]
    seen = {merge.merged, *queue}
    while queue and len(seen) < _MOST_VALUES:
        for node, _ in facts.readers(queue.pop(0)):
            value = node.outputs[0]
            if value in seen or not (is_op(node, *_ROW_WISE) or recognise_view(value, facts) is not None):
                continue
            seen.add(value)
            queue.append(value)
            if value.uses() or value.is_graph_output():
                yield value


def _index(statistic: Statistic, merge: PartialMerge, facts: Facts) -> Index | None:
    """Where the rows of the merged attention lie in a statistic; None if it is not one of exactly these rows."""
    dims, merged_dims = sizes(statistic.value, facts), sizes(merge.merged, facts)
    own = next((e for e in _elements(statistic) if e.value is merge.prev.maximum.value), None)
    if dims is None or merged_dims is None or own is None:
        return None
    index = _matched(own, merge.prev.maximum, dims)
    if index is None or not _is_of(statistic, index, merge, merged_dims, facts):
        return None
    return index


def _elements(statistic: Statistic) -> set[Element]:
    if isinstance(statistic, RowMax):
        return {statistic.first, statistic.second}
    return statistic.definition.elements


def _matched(own: Element, merged: Element, dims: Sequence[Size | None]) -> Index | None:
    """The axes in which `own` is expressed, so that it is `merged`. One that it does not use must be of size 1."""
    entries: list[Entry | None] = [0 if size == 1 else None for size in dims]
    for ours, theirs in zip(own.index, merged.index, strict=True):
        if isinstance(ours, int):
            if ours != theirs:
                return None
        elif len(ours) == 1 and ours[0] == Digit(ours[0].axis):
            entries[ours[0].axis] = theirs
        else:
            return None
    known = tuple(entry for entry in entries if entry is not None)
    return known if len(known) == len(entries) else None


def _is_of(statistic: Statistic, index: Index, merge: PartialMerge, dims: Sequence[Size | None], facts: Facts) -> bool:
    """Whether the statistic, read at `index`, is that of the merge."""
    prev, cur = merge.prev, merge.cur
    if isinstance(statistic, RowMax):
        sides = {side.seen_from(index, dims) for side in (statistic.first, statistic.second)}
        return sides == {prev.maximum, cur.maximum}
    definition: Ratio | None = seen_from(statistic.definition, index, dims)
    if definition is None:
        return False
    if isinstance(statistic, LogSumExp):
        return definition.equals(prev.weight.plus(cur.weight))
    return reference_of(definition, prev, cur, dims, facts) is not None
