"""Merging two partial attentions by their softmax statistics -> RingAttentionUpdateV2.

max = Max(..), Exp, Mul, Add -> sum, prev * (prev_weight / sum) + cur * (cur_weight / sum)   =>   RingAttentionUpdateV2
prev * e^(prev_lse - lse) + cur * e^(cur_lse - lse)   =>   the same with max := lse, sum := 1, and lse = max + log(sum)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns.attention_rows import LANES, AttentionRows, recognise_rows
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match, Refused
from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.indexed import Size, sizes
from fusion_patterns.lift.merged_statistics import MergedStatistic, StatisticKind, find_merged_statistics
from fusion_patterns.lift.partial_attention import Partial, PartialMerge, recognise_partial_merge
from fusion_patterns.miss import Miss, miss

__all__ = ["RingAttention"]

_OPERATOR = OPERATORS["RingAttentionUpdateV2"]
_OUTPUTS = ("attn_out", "softmax_max", "softmax_sum")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LONGEST_DIVISION = 3
"""How many nodes may stand between the sum of both attentions and the end of its division by the softmax sum."""


class RingAttention:
    """See the module."""

    name = "ring_attention"
    operators = ("RingAttentionUpdateV2",)
    anchors = ("Add", "Sub")

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]:
        merge = _recognise_at(node, facts)
        if merge is None:
            return
        outcome = merge if isinstance(merge, Miss) else _match(node, merge, facts)
        yield Refused(self.name, node, outcome) if isinstance(outcome, Miss) else outcome


def _recognise_at(node: ir.Node, facts: Facts) -> PartialMerge | Miss | None:
    """The merge that a sum is, or becomes when it is divided afterwards."""
    value = node.outputs[0]
    merge = first = recognise_partial_merge(value, facts)
    for _ in range(_LONGEST_DIVISION):
        readers = facts.readers(value)
        if not isinstance(merge, Miss) or len(readers) != 1 or not is_op(readers[0][0], "Mul", "Div", "Cast"):
            break
        value = readers[0][0].outputs[0]
        merge = recognise_partial_merge(value, facts)
    return merge if isinstance(merge, PartialMerge) else first


def _match(node: ir.Node, merge: PartialMerge, facts: Facts) -> Match | Miss:
    parts = (merge.prev, merge.cur)
    dtypes = [value.dtype for value in (*(part.attention for part in parts), merge.out)]
    if any(dtype not in _FLOATS for dtype in dtypes):
        return miss("dtype", merge.merged, "float32, float16 or bfloat16", ", ".join(str(dtype) for dtype in dtypes))
    given = [element for part in parts for element in (part.maximum, part.sum) if element is not None]
    rows = recognise_rows(merge.merged, given, facts)
    if isinstance(rows, Miss):
        return rows
    boundary: dict[ir.Value, str | None] = {part.attention: None for part in parts}
    boundary.update({part.maximum.value: "lanes" if rows.stored else None for part in parts})
    boundary.update({part.sum.value: "positive_lanes" for part in parts if part.sum is not None})
    inside = _nodes_inside(merge, boundary)
    statistics = [
        found
        for found in find_merged_statistics(merge, facts)
        if _can_be_laid_out(found, rows, facts) and _is_read_outside(found.value, inside)
    ]
    lanes = rows.stored is not None or any(_repeated(statistic, facts) for statistic in statistics)
    replacement = _Replacement(node, merge, rows, statistics, {value: _reading(value) for value in boundary}, facts)
    results = (merge.out, *(statistic.value for statistic in statistics))
    computed = (output for inner in inside for output in inner.outputs)
    return Match(
        RingAttention.name,
        node,
        (_call(merge, rows),),
        results,
        boundary,
        replacement.emit,
        absorbed=tuple(value for value in computed if value not in results and _is_read_outside(value, inside)),
        assumed=("softmax-lanes-equal",) if lanes else (),
    )


def _nodes_inside(merge: PartialMerge, boundary: Collection[ir.Value]) -> dict[ir.Node, None]:
    """The nodes that compute the merged attention from the boundary, in a fixed order."""
    inside: dict[ir.Node, None] = {}
    stack = [merge.out.producer()]
    while stack:
        node = stack.pop()
        if node is not None and node not in inside:
            inside[node] = None
            stack.extend(value.producer() for value in node.inputs if value is not None and value not in boundary)
    return inside


def _is_read_outside(value: ir.Value, inside: Collection[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in inside for use in value.uses())


def _can_be_laid_out(statistic: MergedStatistic, rows: AttentionRows, facts: Facts) -> bool:
    """Whether a statistic is the operator's in another order, perhaps in lanes."""
    return rows.covered_by(statistic.index) and _repeated(statistic, facts) in ([], [LANES])


def _repeated(statistic: MergedStatistic, facts: Facts) -> list[Size | None]:
    """Sizes of the axes of a statistic that are neither rows nor of size 1."""
    dims = sizes(statistic.value, facts) or ()
    return [size for entry, size in zip(statistic.index, dims, strict=True) if isinstance(entry, int) and size != 1]


def _reading(value: ir.Value) -> Callable[[], ir.Value]:
    """What stands for a value when it is asked: another match may have replaced it by then."""
    use = next(iter(value.uses()))

    def current() -> ir.Value:
        read = use.node.inputs[use.idx]
        assert read is not None  # a node keeps its inputs until all matches are replaced
        return read

    return current


def _attributes(rows: AttentionRows) -> dict[str, str]:
    return {"input_layout": "SBH"} if rows.is_sbh else {"input_layout": "TND", "input_softmax_layout": "TND"}


def _call(merge: PartialMerge, rows: AttentionRows) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    if rows.stored is None:
        attention = Tensor(_attention_type(merge), (None, rows.heads, rows.head_size))
        statistic = Tensor(ir.DataType.FLOAT, (None, rows.heads, LANES))
    else:
        attention = Tensor(_attention_type(merge), rows.dims)
        statistic = Tensor(ir.DataType.FLOAT, (*(rows.size(axis) for axis in rows.stored), LANES))
    inputs = {}
    for part in ("prev", "cur"):
        inputs.update({f"{part}_attn_out": attention})
        inputs.update({f"{part}_softmax_max": statistic, f"{part}_softmax_sum": statistic})
    if not rows.is_sbh:
        inputs["actual_seq_qlen"] = Tensor(ir.DataType.INT64, (2,))
    return Call(_OPERATOR, inputs, _OUTPUTS, _OPERATOR.attribute_values(_attributes(rows)))


def _attention_type(merge: PartialMerge) -> ir.DataType:
    """The type that both attentions and the result have; float32 where they differ."""
    dtypes = {value.dtype for value in (merge.prev.attention, merge.cur.attention, merge.out)}
    only = next(iter(dtypes))
    return only if len(dtypes) == 1 and only is not None else ir.DataType.FLOAT


@dataclass(frozen=True)
class _Replacement:
    """Builds the operator and what lays out its inputs and results. `inputs` gives what the subgraph reads."""

    anchor: ir.Node
    merge: PartialMerge
    rows: AttentionRows
    statistics: Sequence[MergedStatistic]
    inputs: dict[ir.Value, Callable[[], ir.Value]]
    facts: Facts

    def emit(self, emit: Emitter) -> dict[ir.Value, ir.Value]:
        """The new value for every result of the match."""
        merge, rows = self.merge, self.rows
        prev, cur = (self._partial(emit, part) for part in (merge.prev, merge.cur))
        inputs = {f"prev_{name}": value for name, value in prev.items()}
        inputs.update({f"cur_{name}": value for name, value in cur.items()})
        if not rows.is_sbh:
            inputs["actual_seq_qlen"] = _one_sequence(emit, prev["attn_out"])
        fused = emit.fused(_OPERATOR, inputs, _OUTPUTS, _attributes(rows))
        out = rows.attention_out(emit, fused["attn_out"], self.inputs[merge.prev.attention]())
        assert merge.out.dtype is not None  # one of `_FLOATS`
        results = {merge.out: emit.cast(out, merge.out.dtype)}
        for statistic in self.statistics:
            results[statistic.value] = self._statistic(emit, statistic, fused)
        return results

    def _partial(self, emit: Emitter, part: Partial) -> dict[str, ir.Value]:
        """The three inputs that are one partial attention."""
        attention = emit.cast(self.inputs[part.attention](), _attention_type(self.merge))
        maximum = self.rows.statistic_in(emit, self.inputs[part.maximum.value](), part.maximum, self.facts)
        if part.sum is not None:
            total = self.rows.statistic_in(emit, self.inputs[part.sum.value](), part.sum, self.facts)
        else:
            total = _ones_like(emit, maximum)
        attention = self.rows.attention_in(emit, attention)
        return {"attn_out": attention, "softmax_max": maximum, "softmax_sum": total}

    def _statistic(self, emit: Emitter, statistic: MergedStatistic, fused: dict[str, ir.Value]) -> ir.Value:
        """A merged statistic in the layout and type that the graph has it in."""
        dims, dtype = sizes(statistic.value, self.facts) or (), statistic.value.dtype
        assert dtype is not None  # it is computed from float values of known types
        output = fused["softmax_sum" if statistic.kind is StatisticKind.SUM else "softmax_max"]
        if self.rows.stored is not None and self._is_stored(statistic, dims):
            return emit.cast(output, dtype)
        lane = _first_lane(emit, output)
        if statistic.kind is StatisticKind.LOG_SUM_EXP:
            logarithm = emit.op("Log", _first_lane(emit, fused["softmax_sum"]), shape=_dims(lane))
            lane = emit.op("Add", lane, logarithm, shape=_dims(lane))
        like = self.inputs[self.merge.prev.attention]()
        return emit.cast(self.rows.statistic_out(emit, lane, statistic.index, dims, like), dtype)

    def _is_stored(self, statistic: MergedStatistic, dims: Sequence[Size | None]) -> bool:
        return statistic.index == self.merge.prev.maximum.index and dims[-1] == LANES


def _first_lane(emit: Emitter, statistic: ir.Value) -> ir.Value:
    shape = (*_dims(statistic)[:-1], 1)
    return emit.op("Slice", statistic, emit.integers([0]), emit.integers([1]), emit.integers([-1]), shape=shape)


def _ones_like(emit: Emitter, statistic: ir.Value) -> ir.Value:
    shape = emit.op("Shape", statistic, dtype=ir.DataType.INT64, shape=(3,))
    one = ir.tensor(np.ones(1, np.float32))
    return emit.op("ConstantOfShape", shape, value=one, dtype=ir.DataType.FLOAT, shape=_dims(statistic))


def _one_sequence(emit: Emitter, attention: ir.Value) -> ir.Value:
    """[0, T]: where sequences begin says nothing about statistics that lie in the order of the tokens."""
    tokens = emit.op("Shape", attention, start=0, end=1, dtype=ir.DataType.INT64, shape=(1,))
    return emit.op("Concat", emit.integers([0]), tokens, axis=0, shape=(2,))


def _dims(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    assert value.shape is not None  # what is emitted has a shape
    return tuple(value.shape)
