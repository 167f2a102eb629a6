"""Expert layers over rows that are sorted by expert: one product per expert on its slice of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.mask import uniform_value
from fusion_patterns.lift.permutation import gathered_rows
from fusion_patterns.miss import Miss, miss

__all__ = ["ExpertWeight", "GroupedProduct", "recognise_counts", "recognise_grouped_product"]


@dataclass(frozen=True)
class ExpertWeight:
    """The weight (k, n) of one expert: entry `index` of a stack (E, k, n), or an initializer of its own (None)."""

    initializer: ir.Value
    index: int | None


@dataclass(frozen=True)
class GroupedProduct:
    """out = Concat over experts e of rows[end(e - 1) : end(e)] @ weights[e].

    `ends` (E) are the inclusive prefix sums of rows per expert that the slices are cut by.
    """

    rows: ir.Value
    ends: ir.Value
    weights: tuple[ExpertWeight, ...]
    out: ir.Value
    node: ir.Node


def recognise_grouped_product(rows: ir.Value, facts: Facts) -> GroupedProduct | Miss:
    """The product per expert that reads `rows` (M, k).

    Gather(rows, Range(end(e - 1), end(e))) -> MatMul(W_e) -> Concat(axis 0), with ends = Split(prefix sums, E).
    """
    readers = [use.node for use in rows.uses() if use.idx == 0 and gathered_rows(use.node, facts) is not None]
    if not readers:
        return miss("experts-unrecognised", rows, "slices of the sorted rows, one per expert", "other readers")
    products = [use.node for use in readers[0].outputs[0].uses() if is_op(use.node, "MatMul")]
    joins = [use.node for product in products for use in product.outputs[0].uses() if is_op(use.node, "Concat")]
    if len(joins) != 1 or attribute(joins[0], "axis") not in (0, -2):
        return miss("experts-unrecognised", readers[0], "products per expert, concatenated along the rows", "others")
    return _checked(joins[0], rows, facts)


def _checked(join: ir.Node, rows: ir.Value, facts: Facts) -> GroupedProduct | Miss:
    weights: list[ExpertWeight] = []
    split: ir.Node | None = None
    start: ir.Value | None = None
    for expert, part in enumerate(join.inputs):
        product = None if part is None else facts.producer(part)
        if not is_op(product, "MatMul"):
            return miss("experts-unrecognised", join, f"a product of expert {expert}", "another operator")
        gather, weight = facts.producer(facts.input(product, 0)), _expert_weight(facts.input(product, 1), facts)
        cut = None if gather is None else gathered_rows(gather, facts)
        span = None if cut is None else facts.producer(cut.indices)
        if cut is None or cut.source is not rows or not is_op(span, "Range"):
            return miss("experts-unrecognised", product, f"the slice of expert {expert}", "other rows")
        if weight is None:
            return miss("experts-unrecognised", product, f"a constant weight of expert {expert}", "another value")
        begins = facts.scalar(facts.input(span, 0)) == 0 if start is None else facts.input(span, 0) is start
        end, source = _element(facts.input(span, 1), facts)
        if not begins or end != expert or source is None or (split is not None and source is not split):
            return miss("experts-unrecognised", span, f"rows from the end of expert {expert - 1}", "other bounds")
        split, start = source, facts.input(span, 1)
        weights.append(weight)
    if split is None or len(weights) != len(split.outputs):
        return miss("experts-unrecognised", join, "as many products as prefix sums", f"{len(weights)} products")
    return GroupedProduct(rows, facts.input(split, 0), tuple(weights), join.outputs[0], join)


def _element(value: ir.Value, facts: Facts) -> tuple[int | None, ir.Node | None]:
    """(i, Split) of a scalar that is the i-th output of a Split into single elements."""
    node = facts.producer(value)
    while is_op(node, "Squeeze", "Reshape", "Cast"):
        value = facts.input(node, 0)
        node = facts.producer(value)
    if not is_op(node, "Split") or facts.axis(node, value, 0) != 0:
        return None, None
    if any(facts.size(output, 0) != 1 or facts.rank(output) != 1 for output in node.outputs):
        return None, None
    return next(i for i, output in enumerate(node.outputs) if output is value), node


def _expert_weight(value: ir.Value, facts: Facts) -> ExpertWeight | None:
    """The initializer behind a matrix: itself, or Squeeze(Split(stack)[e], 0)."""
    if value.is_initializer() and not value.is_graph_input() and facts.rank(value) == 2:
        return ExpertWeight(value, None)
    squeeze = facts.producer(value)
    if not is_op(squeeze, "Squeeze"):
        return None
    piece = facts.input(squeeze, 0)
    split = facts.producer(piece)
    if not is_op(split, "Split") or facts.axis(split, piece, 0) != 0:
        return None
    stack = facts.input(split, 0)
    single = all(facts.size(output, 0) == 1 for output in split.outputs)
    if not stack.is_initializer() or stack.is_graph_input() or facts.rank(stack) != 3 or not single:
        return None
    if facts.rank(value) != 2:
        return None
    return ExpertWeight(stack, next(i for i, output in enumerate(split.outputs) if output is piece))


def recognise_counts(ends: ir.Value, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> Miss | None:
    """None when `ends` (E) are the inclusive prefix sums of how often each expert stands in one of the values `ids`.

    CumSum of a histogram: ScatterElements(add) of ones into zeros (E), at indices that are the ids or arithmetic on
    them that leaves every id 0 .. E - 1 as it is (a histogram's bin computation; checked by evaluating it on all ids).
    """
    total = _through(ends, ("Cast", "Reshape"), facts).producer()
    if not is_op(total, "CumSum"):
        return miss("expert-count-unknown", ends, "prefix sums of rows per expert", total.op_type if total else "input")
    if (
        attribute(total, "exclusive") != 0
        or attribute(total, "reverse") != 0
        or facts.scalar(facts.input(total, 1)) not in (0, -1)
    ):
        return miss("expert-count-unknown", total, "inclusive prefix sums from the front", "others")
    counted = _through(facts.input(total, 0), ("Cast", "Reshape"), facts).producer()
    if (
        counted is None
        or not is_op(counted, "ScatterElements")
        or attribute(counted, "reduction") not in ("add", b"add")
    ):
        found = counted.op_type if counted is not None else "a graph input"
        return miss("expert-count-unknown", total, "a histogram of the expert ids", found)
    data, indices, updates = facts.input(counted, 0), facts.input(counted, 1), facts.input(counted, 2)
    zeros, ones = uniform_value(data, facts) == 0, uniform_value(updates, facts) == 1
    if data is None or not zeros or not ones or facts.size(data, 0) != experts or facts.rank(data) != 1:
        return miss("expert-count-unknown", counted, f"ones added into {experts} zeros", "other values")
    if indices is None or not _leaves_ids_alone(indices, ids, experts, facts):
        return miss("expert-count-unknown", counted, "the expert ids as indices", "other indices")
    return None


def _through(value: ir.Value, op_types: tuple[str, ...], facts: Facts) -> ir.Value:
    while is_op(node := facts.producer(value), *op_types):
        value = facts.input(node, 0)
    return value


def _leaves_ids_alone(indices: ir.Value, ids: tuple[ir.Value, ...], experts: int, facts: Facts) -> bool:
    """Whether element-wise arithmetic from one of `ids` to `indices` maps every expert id to itself."""
    steps: list[ir.Node] = []
    value = indices
    while not any(value is source for source in ids):
        node = facts.producer(value)
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

_ELEMENTWISE = ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Div", "Mul", "Add", "Sub", "Clip", "Floor")


def _apply(node: ir.Node, x: _Array, facts: Facts) -> _Array | None:
    """One step on sample values, as the runtime computes it; None when its other operand is no scalar constant."""
    if node.op_type in ("Reshape", "Unsqueeze", "Squeeze", "Identity"):
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
