"""The weight matrix of one expert, alone or in a stack of all experts' matrices."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op, stored_tensor
from fusion_patterns.lift.slices import recognise_slice

__all__ = ["ExpertLinear", "ExpertWeight", "recognise_expert_linear", "recognise_expert_weight"]


@dataclass(frozen=True)
class ExpertWeight:
    """The weight (k, n) of one expert: entry `index` of a stack, or an initializer of its own (None).

    It lies as (k, n), or as (n, k) where `transposed`. A bias (n) is described alike, and is never transposed.
    """

    initializer: ir.Value
    index: int | None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(k, n), or (n) of a bias; sizes of weights are numbers."""
        dims = [int(str(dim)) for dim in self.initializer.shape or ()]
        own = dims if self.index is None else dims[1:]
        return tuple(reversed(own)) if self.transposed else tuple(own)


@dataclass(frozen=True)
class ExpertLinear:
    """y = x W (+ bias) with the weight of one expert."""

    x: ir.Value
    weight: ExpertWeight
    bias: ExpertWeight | None


def recognise_expert_linear(value: ir.Value, facts: Facts) -> ExpertLinear | None:
    """The projection that computes a value.

    Spellings
    ---------
    1. MatMul(x, W).
    2. Gemm(x, W) with alpha = beta = 1, transB 0 or 1, with or without bias.
    3. Add of a constant vector to one of these, on either side.
    """
    return facts.remember("expert_linear", value, _linear)


def _linear(value: ir.Value, facts: Facts) -> ExpertLinear | None:
    node = facts.producer(value)
    if is_op(node, "Add"):
        for product, added in facts.either_way(node):
            bias, linear = recognise_expert_weight(added, 1, facts), recognise_expert_linear(product, facts)
            if bias is not None and linear is not None and linear.bias is None:
                return ExpertLinear(linear.x, linear.weight, bias)
    if not is_op(node, "MatMul", "Gemm"):
        return None
    weight = recognise_expert_weight(facts.input(node, 1), 2, facts)
    if weight is None or is_op(node, "MatMul"):
        return None if weight is None else ExpertLinear(facts.input(node, 0), weight, None)
    if attribute(node, "alpha") != 1 or attribute(node, "transA") != 0 or attribute(node, "beta") != 1:
        return None
    bias = recognise_expert_weight(facts.input(node, 2), 1, facts) if facts.has(node, 2) else None
    if facts.has(node, 2) and bias is None:
        return None
    turned = ExpertWeight(weight.initializer, weight.index, weight.transposed != bool(attribute(node, "transB")))
    return ExpertLinear(facts.input(node, 0), turned, bias)


def recognise_expert_weight(value: ir.Value, rank: int, facts: Facts) -> ExpertWeight | None:
    """The constant matrix (`rank` 2) or vector (1) that a value is.

    Spellings
    ---------
    1. An initializer of that rank.
    2. Transpose of a matrix.
    3. Squeeze or Reshape of one entry that was cut out of a stack with one more axis, in front.
    4. Gather of one entry of such a stack by a constant scalar.
    """
    value = facts.plain(value)
    if _is_weight(value, rank, facts):
        return ExpertWeight(value, None)
    node = value.producer()
    if is_op(node, "Transpose") and rank == 2:
        inner = recognise_expert_weight(facts.input(node, 0), 2, facts)
        swapped = attribute(node, "perm") is None or tuple(attribute(node, "perm")) == (1, 0)
        return ExpertWeight(inner.initializer, inner.index, not inner.transposed) if inner and swapped else None
    if is_op(node, "Gather"):
        stack, index = facts.input(node, 0), facts.integers(facts.input(node, 1))
        picked = facts.axis(node, stack, 0) == 0 and index is not None and len(index) == 1
        if picked and index is not None and _is_weight(stack, rank + 1, facts) and facts.rank(value) == rank:
            return ExpertWeight(stack, index[0] % (facts.size(stack, 0) or 1))
    if is_op(node, "Squeeze", "Reshape"):
        cut = recognise_slice(facts.input(node, 0), facts)
        if cut is None or cut.axis != 0 or cut.size != 1 or not _is_weight(cut.source, rank + 1, facts):
            return None
        if facts.shape(value) == (facts.shape(cut.source) or ())[1:]:
            return ExpertWeight(cut.source, cut.start)
    return None


def _is_weight(value: ir.Value, rank: int, facts: Facts) -> bool:
    """Whether a value is an initializer of this rank that no caller can replace, with sizes that are numbers."""
    shape = facts.shape(value)
    constant = stored_tensor(value) is not None
    return constant and shape is not None and len(shape) == rank and all(isinstance(dim, int) for dim in shape)
