"""How many rows each expert gets: histograms of expert ids and their prefix sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.mask import uniform_value
from fusion_patterns.miss import Miss, miss

__all__ = ["PrefixSums", "recognise_counts", "recognise_histogram", "recognise_prefix_sums"]


def recognise_histogram(value: ir.Value, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> Miss | None:
    """None when a value (E) says how often each expert 0 .. E - 1 stands in one of the vectors `ids`, in any type.

    Spellings
    ---------
    1. ScatterElements(add) of ones into zeros, at the ids.
    2. ReduceSum(Equal(ids as a column, [0, 1, .., E - 1]), axis 0).
    3. ReduceSum(OneHot(ids), axis 0).

    The ids may go through arithmetic that leaves every id 0 .. E - 1 as it is (a histogram's computation of bins; it is
    evaluated on all ids).
    """
    value = _through(value, ("Cast", "Reshape"), facts)
    node = value.producer()
    if is_op(node, "ScatterElements"):
        return _scattered(node, ids, experts, facts)
    if is_op(node, "ReduceSum"):
        return _compared(node, ids, experts, facts)
    return miss(
        "expert-count-unknown", value, "a histogram of the expert ids", node.op_type if node else "a graph input"
    )


def _scattered(node: ir.Node, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> Miss | None:
    data, indices, updates = (facts.input(node, index) for index in range(3))
    added = attribute(node, "reduction") == "add" and facts.rank(data) == 1
    if (
        not added
        or uniform_value(data, facts) != 0
        or uniform_value(updates, facts) != 1
        or facts.size(data, 0) != experts
    ):
        return miss("expert-count-unknown", node, f"ones added into {experts} zeros", "other values")
    if not _leaves_ids_alone(indices, ids, experts, facts):
        return miss("expert-count-unknown", node, "the expert ids as indices", "other indices")
    return None


def _compared(node: ir.Node, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> Miss | None:
    """The sum over the assignments of a table (M, E) of hits."""
    expected = f"hits of the experts 0 .. {experts - 1}, summed over the assignments"
    table = _through(facts.input(node, 0), ("Cast",), facts)
    axes = facts.integers(facts.input(node, 1)) if facts.has(node, 1) else attribute(node, "axes")
    hit = table.producer()
    if list(axes or []) not in ([0], [-2]) or attribute(node, "keepdims") != 0 or facts.rank(table) != 2:
        return miss("expert-count-unknown", node, expected, "another sum")
    if is_op(hit, "OneHot"):
        off_on, depth = facts.constant(hit.inputs[2]), facts.integers(facts.input(hit, 1))
        whole = (
            depth == [experts]
            and off_on is not None
            and off_on.tolist() == [0, 1]
            and attribute(hit, "axis") in (-1, 1)
        )
        if whole and _leaves_ids_alone(facts.input(hit, 0), ids, experts, facts):
            return None
    if is_op(hit, "Equal"):
        for column, numbers in facts.either_way(hit):
            row = facts.constant(numbers)
            if row is None or not np.array_equal(row.reshape(-1), np.arange(experts)) or row.shape[-1] != experts:
                continue
            if facts.size(column, -1) == 1 and _leaves_ids_alone(column, ids, experts, facts):
                return None
    return miss("expert-count-unknown", node, expected, "hits of others")


@dataclass(frozen=True)
class PrefixSums:
    """value[e] = counts[0] + .. + counts[e]."""

    counts: ir.Value
    node: ir.Node


def recognise_prefix_sums(value: ir.Value, facts: Facts) -> PrefixSums | Miss:
    """CumSum along the only axis, from the front, the own element included."""
    node = _through(value, ("Cast", "Reshape"), facts).producer()
    if not is_op(node, "CumSum"):
        found = node.op_type if node is not None else "a graph input"
        return miss("expert-count-unknown", value, "prefix sums of rows per expert", found)
    forward = attribute(node, "exclusive") == 0 and attribute(node, "reverse") == 0
    if not forward or facts.scalar(facts.input(node, 1)) not in (0, -1) or facts.rank(node.outputs[0]) != 1:
        return miss("expert-count-unknown", node, "inclusive prefix sums from the front", "others")
    return PrefixSums(facts.input(node, 0), node)


def recognise_counts(ends: ir.Value, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> Miss | None:
    """None when `ends` (E) are the inclusive prefix sums of how often each expert stands in one of the values `ids`."""
    sums = recognise_prefix_sums(ends, facts)
    return sums if isinstance(sums, Miss) else recognise_histogram(sums.counts, ids, experts, facts)


def _through(value: ir.Value, op_types: tuple[str, ...], facts: Facts) -> ir.Value:
    value = facts.plain(value)
    while is_op(node := value.producer(), *op_types):
        value = facts.input(node, 0)
    return value


def _leaves_ids_alone(indices: ir.Value, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> bool:
    """Whether element-wise arithmetic from one of `ids` to `indices` maps every expert id to itself."""
    steps: list[ir.Node] = []
    value = facts.plain(indices)
    while not any(value is source for source in ids):
        node = value.producer()
        if not is_op(node, *_ELEMENTWISE):
            return False
        steps.append(node)
        value = facts.input(node, 0)
    wanted = np.arange(experts)
    current = wanted.astype(np.int64)
    for node in reversed(steps):
        result = _apply(node, current, facts)
        if result is None:
            return False
        current = result
    return bool(np.array_equal(current, wanted))


_Array = npt.NDArray[Any]

_ELEMENTWISE = ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Div", "Mul", "Add", "Sub", "Clip", "Floor")


def _apply(node: ir.Node, x: _Array, facts: Facts) -> _Array | None:
    """One step on sample values, as the runtime computes it; None when its other operand is no scalar constant."""
    if node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
        return x
    if node.op_type == "Cast":
        cast: _Array = x.astype(ir.DataType(attribute(node, "to")).numpy())
        return cast
    if node.op_type == "Floor":
        return np.asarray(np.floor(x))
    bounds = [facts.scalar(operand) for operand in node.inputs[1:]]
    if node.op_type == "Clip":
        low, high = (*bounds, None, None)[:2]
        return np.asarray(np.clip(x, low, high), x.dtype)
    if bounds[0] is None:
        return None
    operand = np.asarray(bounds[0], x.dtype)
    if node.op_type == "Div":
        return np.asarray(x // operand if np.issubdtype(x.dtype, np.integer) else x / operand)
    combine = {"Mul": np.multiply, "Add": np.add, "Sub": np.subtract}[node.op_type]
    return np.asarray(combine(x, operand))
