"""Sorting tokens by expert, running the experts, and summing up -> MoeInitRoutingV3 with experts on slices.

ids -> TopK (sort) -> gather tokens -> per expert: gather slice, product -> weigh -> gather back -> sum over choices
=>
ids -> MoeInitRoutingV3 -> Split by the counts -> per expert: product -> gather back -> weigh -> sum over choices

The slices are contiguous, so Split cuts them all at once, and each expert's weight is used where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Candidate, Match
from fusion_patterns.graph import Dimension, Facts, is_op, only_reader, static
from fusion_patterns.lift.experts import ExpertWeight, GroupedProduct, recognise_counts, recognise_grouped_product
from fusion_patterns.lift.permutation import (
    Permutation,
    divided_gathers,
    gathers_of,
    recognise_inverse,
    recognise_permutation,
    reshaped_from,
)
from fusion_patterns.miss import Miss, miss
from fusion_patterns.weights import stacked_slice

__all__ = ["MoeInitRouting"]

_OPERATOR = OPERATORS["MoeInitRoutingV3"]
_OUTPUTS = ("expanded_x", "expanded_row_idx", "expert_tokens_count_or_cumsum")


@dataclass(frozen=True)
class Combine:
    """sum over choices of weight * expert result, in token order.

    `weights` (N, K) are the routing weights, `rows` (N, K, H) the weighted results before they are summed.
    """

    weights: ir.Value
    rows: ir.Value


@dataclass(frozen=True)
class RoutedExperts:
    """A whole mixture-of-experts block: tokens `x` (N, H) sorted by expert, two products per expert, combined."""

    permutation: Permutation
    x: ir.Value
    first: GroupedProduct
    second: GroupedProduct
    combine: Combine


class MoeInitRouting:
    """See the module."""

    name = "moe_init_routing"
    operators = ("MoeInitRoutingV3",)
    anchors = ("TopK",)

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Candidate]:
        permutation = recognise_permutation(node, facts)
        if permutation is None:
            return
        block = permutation if isinstance(permutation, Miss) else _recognise_block(permutation, facts)
        yield Candidate(self.name, node, block) if isinstance(block, Miss) else _match(block, facts)


def _recognise_block(permutation: Permutation, facts: Facts) -> RoutedExperts | Miss:
    gathers = divided_gathers(permutation.order, permutation.choices, facts)
    if len(gathers) != 1 or facts.rank(gathers[0].source) != 2:
        expected, found = "one gather of tokens (N, H) by order // K", f"{len(gathers)}"
        return miss("permutation-unrecognised", permutation.node, expected, found)
    first = recognise_grouped_product(gathers[0].rows, facts)
    if isinstance(first, Miss):
        return first
    experts = len(first.weights)
    uncounted = recognise_counts(first.ends, (permutation.keys, permutation.sorted_keys), experts, facts)
    if uncounted is not None:
        return uncounted
    second = _next_product(first, facts)
    if isinstance(second, Miss):
        return second
    combine = _recognise_combine(second.out, permutation, facts)
    if isinstance(combine, Miss):
        return combine
    return RoutedExperts(permutation, gathers[0].source, first, second, combine)


_ROW_WISE = (
    "Split",
    "Sigmoid",
    "Mul",
    "Add",
    "Clip",
    "Tanh",
    "Erf",
    "Relu",
    "Gelu",
    "Swish",
    "Slice",
    "Div",
    "Neg",
    "Exp",
)
_LONGEST_ACTIVATION = 24


def _next_product(first: GroupedProduct, facts: Facts) -> GroupedProduct | Miss:
    """The product that reads the activation of the first one, over the same slices."""
    queue, seen = [first.out], {first.out}
    while queue and len(seen) < _LONGEST_ACTIVATION:
        value = queue.pop(0)
        if value is not first.out:
            product = recognise_grouped_product(value, facts)
            if isinstance(product, GroupedProduct) and product.ends is first.ends:
                return product
        for use in value.uses():
            if is_op(use.node, *_ROW_WISE):
                fresh = [output for output in use.node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return miss(
        "experts-unrecognised", first.node, "a second product over the same slices", "none behind the activation"
    )


def _recognise_combine(results: ir.Value, permutation: Permutation, facts: Facts) -> Combine | Miss:
    """Mul(results, weights in expert order) -> gather by the inverse permutation -> Reshape (N, K, H)."""
    reader = only_reader(results)
    weigh = None if reader is None else reader[0]
    if not is_op(weigh, "Mul"):
        return miss("combine-unrecognised", results, "expert results times routing weights", "other readers")
    factor = facts.input(weigh, 1) if facts.input(weigh, 0) is results else facts.input(weigh, 0)
    weights = None if factor is None else _weights_in_order(factor, permutation, facts)
    if weights is None:
        return miss("combine-unrecognised", weigh, "routing weights gathered by the permutation", "another factor")
    back = [
        gather
        for use in weigh.outputs[0].uses()
        if use.idx == 0
        and len(use.node.inputs) > 1
        and (gather := _gather_back(use.node, permutation, facts)) is not None
    ]
    if len(back) != 1 or only_reader(weigh.outputs[0]) is None:
        return miss("combine-unrecognised", weigh, "one gather by the inverse permutation", f"{len(back)}")
    reader = only_reader(back[0])
    shaped = None if reader is None else reader[0]
    dims = None if shaped is None else facts.shape(shaped.outputs[0])
    if (
        shaped is None
        or not is_op(shaped, "Reshape")
        or dims is None
        or len(dims) != 3
        or dims[1] != permutation.choices
    ):
        return miss("combine-unrecognised", weigh, "rows (N, K, H) in token order", "another shape")
    return Combine(weights, shaped.outputs[0])


def _weights_in_order(factor: ir.Value, permutation: Permutation, facts: Facts) -> ir.Value | None:
    """Routing weights (N, K) of a factor (M, 1) that was gathered from them by the permutation."""
    flat = reshaped_from(factor, facts)
    for gather in gathers_of(permutation.order, facts):
        if gather.rows is flat:
            weights = reshaped_from(gather.source, facts)
            same = facts.shape(weights) == facts.shape(permutation.ids)
            return weights if same else None
    return None


def _gather_back(node: ir.Node, permutation: Permutation, facts: Facts) -> ir.Value | None:
    """The rows gathered by the inverse permutation."""
    plain = reshaped_from(facts.input(node, 1), facts)
    if not recognise_inverse(plain, permutation.order, facts):
        return None
    return next((gather.rows for gather in gathers_of(plain, facts) if gather.rows is node.outputs[0]), None)


def _match(block: RoutedExperts, facts: Facts) -> Match:
    permutation, experts = block.permutation, len(block.first.weights)
    ids = permutation.ids
    return Match(
        MoeInitRouting.name,
        permutation.node,
        (_call(block),),
        (block.first.out, block.second.out, block.combine.rows),
        {block.x: None, ids: f"distinct:{experts}", block.combine.weights: None},
        lambda emit: _emit(emit, block, facts),
        absorbed=(permutation.order, block.first.rows),
    )


def _attributes(experts: int) -> dict[str, int]:
    return {"expert_num": experts, "expert_tokens_num_type": 1, "expert_tokens_num_flag": 1, "row_idx_type": 0}


def _call(block: RoutedExperts) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    ids = Tensor(ir.DataType.INT32, Tensor.of(block.permutation.ids).shape)
    attributes = _OPERATOR.attribute_values(_attributes(len(block.first.weights)))
    return Call(_OPERATOR, {"x": Tensor.of(block.x), "expert_idx": ids}, _OUTPUTS, attributes)


def _emit(emit: Emitter, block: RoutedExperts, facts: Facts) -> dict[ir.Value, ir.Value]:
    permutation = block.permutation
    ids = permutation.ids
    if ids.dtype != ir.DataType.INT32:
        ids = emit.op("Cast", ids, to=ir.DataType.INT32, dtype=ir.DataType.INT32, shape=facts.shape(ids))
    provenance = {"ascend_onnx.fusion": MoeInitRouting.name, "ascend_onnx.anchor": permutation.node.name or ""}
    routed = emit.fused(
        _OPERATOR, {"x": block.x, "expert_idx": ids}, _OUTPUTS, _attributes(len(block.first.weights)), provenance
    )
    counts = routed["expert_tokens_count_or_cumsum"]
    first = _products(emit, block.first, routed["expanded_x"], counts, facts)
    second = _products(emit, block.second, block.second.rows, counts, facts)
    rows, width = facts.dim(block.second.out, 0), _columns(block.second.weights[0])
    back = emit.op("Gather", second, routed["expanded_row_idx"], axis=0, shape=_known(rows, width))
    dims = facts.shape(block.combine.rows)
    per_choice = emit.op("Reshape", back, emit.integers([-1, permutation.choices, width]), shape=dims)
    spread = emit.op("Unsqueeze", block.combine.weights, emit.integers([2]), shape=(*(dims or ())[:2], 1))
    weighted = emit.op("Mul", per_choice, spread, shape=dims)
    return {block.first.out: first, block.second.out: second, block.combine.rows: weighted}


def _products(emit: Emitter, product: GroupedProduct, rows: ir.Value, counts: ir.Value, facts: Facts) -> ir.Value:
    """One product per expert on its slice of the rows, concatenated."""
    width, out = facts.dim(rows, 1), facts.dim(product.out, 1)
    unknown = ir.SymbolicDim(None)
    slices = emit.split(rows, counts, 0, [_known(unknown, width)] * len(product.weights))
    parts = [
        emit.op("MatMul", piece, _matrix(emit, weight), shape=_known(unknown, out))
        for piece, weight in zip(slices, product.weights, strict=True)
    ]
    return emit.op("Concat", *parts, axis=0, shape=facts.shape(product.out))


def _matrix(emit: Emitter, weight: ExpertWeight) -> ir.Value:
    return weight.initializer if weight.index is None else stacked_slice(emit, weight.initializer, weight.index)


def _columns(weight: ExpertWeight) -> int:
    return static(weight.initializer.shape)[-1]


def _known(*dims: Dimension | None) -> tuple[Dimension, ...]:
    return tuple(ir.SymbolicDim(None) if dim is None else dim for dim in dims)
