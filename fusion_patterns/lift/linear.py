"""Linear projections: y = x W (+ b), with the weight always seen as (k, n)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op, static, stored_tensor
from fusion_patterns.miss import Miss, miss

__all__ = ["Linear", "WeightView", "recognise_linear"]


@dataclass(frozen=True)
class WeightView:
    """A weight matrix seen as (k, n): `initializer` as it lies, or transposed when it lies as (n, k)."""

    initializer: ir.Value
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(k, n)."""
        rows, columns = static(self.initializer.shape)
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class Linear:
    """y = x W (+ bias): `x` (..., k), `weight` (k, n)."""

    x: ir.Value
    weight: WeightView
    bias: ir.Value | None
    node: ir.Node


def recognise_linear(value: ir.Value, facts: Facts) -> Linear | Miss:
    """The projection that computes a value.

    Spellings
    ---------
    1. MatMul(x, W) with W an initializer (k, n).
    2. MatMul(x, Transpose(W)) with W an initializer (n, k).
    3. Gemm(x, W) with alpha = beta = 1, transB 0 or 1.
    4. Add of a constant vector to one of these, on either side.
    """
    return facts.remember("linear", value, _linear)


def _linear(value: ir.Value, facts: Facts) -> Linear | Miss:
    node = facts.producer(value)
    if is_op(node, "Add"):
        return _biased(node, value, facts)
    if is_op(node, "MatMul"):
        weight = _weight(facts.input(node, 1), facts)
        if weight is not None:
            return Linear(facts.input(node, 0), weight, None, node)
    if is_op(node, "Gemm"):
        plain = attribute(node, "alpha") == 1 and attribute(node, "transA") == 0
        weight = _weight(facts.input(node, 1), facts)
        bias = facts.input(node, 2) if len(node.inputs) > 2 else None
        if plain and weight is not None and (bias is None or attribute(node, "beta") == 1):
            view = WeightView(weight.initializer, weight.transposed != bool(attribute(node, "transB")))
            return Linear(facts.input(node, 0), view, bias, node)
    found = node.op_type if node is not None else "a graph input"
    return miss("query-unrecognised", value, "a product with a constant weight matrix", found)


def _biased(node: ir.Node, value: ir.Value, facts: Facts) -> Linear | Miss:
    for product, bias in facts.either_way(node):
        if stored_tensor(bias) is None or facts.rank(bias) != 1:
            continue
        linear = recognise_linear(product, facts)
        if isinstance(linear, Linear) and linear.bias is None:
            return Linear(linear.x, linear.weight, bias, linear.node)
    return miss("query-unrecognised", value, "a product plus a constant vector", "an Add of other values")


def _weight(value: ir.Value, facts: Facts) -> WeightView | None:
    if _is_matrix(value):
        return WeightView(value, transposed=False)
    node = facts.producer(value)
    if is_op(node, "Transpose") and _is_matrix(facts.input(node, 0)):
        return WeightView(facts.input(node, 0), transposed=attribute(node, "perm") in (None, [1, 0], (1, 0)))
    return None


def _is_matrix(value: ir.Value) -> bool:
    shape = value.shape
    return (
        stored_tensor(value) is not None
        and shape is not None
        and len(shape) == 2
        and all(isinstance(d, int) for d in shape)
    )
