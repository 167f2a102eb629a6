"""Grouped experts, as exporters write sorted tokens: slices by prefix sums of counts, results put back by the inverse.

ids -> sort -> gather tokens -> per expert: gather slice, product -> weigh -> gather back -> sum over choices
=>
ids -> MoeInitRoutingV3 -> Split by the counts -> per expert: product -> gather back -> weigh -> sum over choices
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match
from fusion_patterns.graph import Facts, is_op, only_reader
from fusion_patterns.lift.expert_network import ON_ROWS
from fusion_patterns.lift.experts import GroupedProduct, recognise_counts, recognise_grouped_product
from fusion_patterns.lift.indexed import widens
from fusion_patterns.lift.permutation import (
    Permutation,
    gathered_rows,
    gathers_of,
    recognise_inverse,
    reshaped_from,
    sorted_gathers,
)
from fusion_patterns.lift.router import recognise_router
from fusion_patterns.miss import Miss, miss
from fusion_patterns.moe_routed_experts import (
    Tokens,
    experts_missing,
    known,
    products,
    route,
    routing_attributes,
    routing_call,
    slices,
    sorted_tokens,
    validation_sizes,
    wrong_dtype,
)

__all__ = ["GroupedExperts", "grouped_match", "is_grouped", "recognise_grouped_experts"]


@dataclass(frozen=True)
class Combine:
    """sum over choices of weight * expert result, in token order.

    `weights` (N, K) are the routing weights, `rows` (N, K, H) the weighted results before they are summed. Both are of
    `dtype`, the experts' type or a wider one.
    """

    weights: ir.Value
    rows: ir.Value
    dtype: ir.DataType


@dataclass(frozen=True)
class GroupedExperts:
    """A whole mixture-of-experts block: tokens sorted by expert, two products per expert, combined."""

    permutation: Permutation
    tokens: Tokens
    first: GroupedProduct
    second: GroupedProduct
    combine: Combine


def is_grouped(permutation: Permutation, facts: Facts) -> bool:
    """Whether the sorted rows are cut into slices, from one position to another."""
    readers = [reader for gather in sorted_gathers(permutation, facts) for reader in facts.readers(gather.rows)]
    cuts = [cut for node, place in readers if place == 0 and (cut := gathered_rows(node, facts)) is not None]
    return any(is_op(facts.producer(cut.indices), "Range") for cut in cuts)


def recognise_grouped_experts(permutation: Permutation, facts: Facts) -> GroupedExperts | Miss:
    """The block around a permutation, see the module."""
    gathers = sorted_gathers(permutation, facts)
    if len(gathers) != 1 or facts.rank(gathers[0].source) != 2:
        expected, found = "one gather of tokens (N, H) by order // K", f"{len(gathers)}"
        return miss("permutation-unrecognised", permutation.node, expected, found)
    first = recognise_grouped_product(gathers[0].rows, facts)
    if isinstance(first, Miss):
        return first
    experts = len(first.weights)
    router = recognise_router(permutation.ids, facts)
    reason = experts_missing(router, experts, permutation.node) or recognise_counts(
        first.ends, (facts.plain(permutation.keys), permutation.sorted_keys), experts, facts
    )
    if reason is not None:
        return reason
    second = _next_product(first, facts)
    if isinstance(second, Miss):
        return second
    combine = _recognise_combine(second.out, permutation, facts)
    if isinstance(combine, Miss):
        return combine
    tokens = sorted_tokens(gathers[0].source, permutation, experts, facts)
    return wrong_dtype(tokens.x, permutation.node) or GroupedExperts(permutation, tokens, first, second, combine)


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
            if is_op(use.node, *ON_ROWS):
                fresh = [output for output in use.node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return miss(
        "experts-unrecognised", first.node, "a second product over the same slices", "none behind the activation"
    )


def _recognise_combine(results: ir.Value, permutation: Permutation, facts: Facts) -> Combine | Miss:
    """Mul(results, weights in expert order) -> gather by the inverse permutation -> Reshape (N, K, H).

    Results of half precision may be weighed in a wider type.
    """
    reader = only_reader(results)
    if reader is not None and is_op(reader[0], "Cast") and widens(results, reader[0].outputs[0]):
        results = reader[0].outputs[0]
        reader = only_reader(results)
    weigh = None if reader is None else reader[0]
    if not is_op(weigh, "Mul") or results.dtype is None:
        return miss("combine-unrecognised", results, "expert results times routing weights", "other readers")
    factor = facts.input(weigh, 1) if facts.input(weigh, 0) is facts.plain(results) else facts.input(weigh, 0)
    weights = _weights_in_order(factor, permutation, facts)
    if weights is None:
        return miss("combine-unrecognised", weigh, "routing weights gathered by the permutation", "another factor")
    back = [
        gathered
        for node, place in facts.readers(weigh.outputs[0])
        if place == 0 and (gathered := _gather_back(node, permutation, facts)) is not None
    ]
    if len(back) != 1 or only_reader(weigh.outputs[0]) is None:
        return miss("combine-unrecognised", weigh, "one gather by the inverse permutation", f"{len(back)}")
    reader = only_reader(back[0])
    shaped = None if reader is None else reader[0]
    dims = None if shaped is None else facts.shape(shaped.outputs[0])
    wanted = (permutation.choices, facts.size(results, 1))
    if not is_op(shaped, "Reshape") or dims is None or len(dims) != 3 or dims[1:] != wanted:
        return miss("combine-unrecognised", weigh, "rows (N, K, H) in token order", "another shape")
    return Combine(weights, shaped.outputs[0], results.dtype)


def _weights_in_order(factor: ir.Value, permutation: Permutation, facts: Facts) -> ir.Value | None:
    """Routing weights (N, K) of a factor (M, 1) that was gathered from them by the permutation."""
    if facts.rank(factor) != 2 or facts.size(factor, 1) != 1:
        return None
    flat = reshaped_from(factor, facts)
    for gather in gathers_of(permutation.order, facts):
        if gather.rows is flat:
            weights = reshaped_from(gather.source, facts)
            same = facts.shape(weights) == facts.shape(permutation.ids)
            return weights if same else None
    return None


def _gather_back(node: ir.Node, permutation: Permutation, facts: Facts) -> ir.Value | None:
    """The rows gathered by the inverse permutation."""
    if len(node.inputs) < 2:
        return None
    plain = reshaped_from(facts.input(node, 1), facts)
    if not recognise_inverse(plain, permutation.order, facts):
        return None
    return next((gather.rows for gather in gathers_of(plain, facts) if gather.rows is node.outputs[0]), None)


def grouped_match(fusion: str, block: GroupedExperts, facts: Facts) -> Match:
    """The match that replaces a block: its products and what weighs and reorders their results."""
    tokens, permutation = block.tokens, block.permutation
    return Match(
        fusion,
        permutation.node,
        (routing_call(tokens, routing_attributes(tokens.experts), facts),),
        (block.first.out, block.second.out, block.combine.rows),
        tokens.boundary(block.combine.weights),
        lambda emit: _emit(emit, block, facts),
        absorbed=(permutation.order, permutation.sorted_keys, block.first.rows),
        assumed=tokens.assumed,
        sizes=validation_sizes(tokens, facts),
    )


def _emit(emit: Emitter, block: GroupedExperts, facts: Facts) -> dict[ir.Value, ir.Value]:
    tokens = block.tokens
    routed = route(emit, tokens, routing_attributes(tokens.experts), facts)
    counts = routed["expert_tokens_count_or_cumsum"]
    first = _product(emit, block.first, routed["expanded_x"], counts, facts)
    second = _product(emit, block.second, block.second.rows, counts, facts)
    rows, width = facts.dim(block.second.out, 0), block.second.weights[0].shape[1]
    back = emit.op("Gather", second, routed["expanded_row_idx"], axis=0, shape=known(rows, width))
    dims = facts.shape(block.combine.rows)
    per_choice = emit.op("Reshape", back, emit.integers([-1, tokens.choices, width]), shape=dims)
    spread = emit.op("Unsqueeze", block.combine.weights, emit.integers([2]), shape=(*(dims or ())[:2], 1))
    weighted = emit.op("Mul", emit.cast(per_choice, block.combine.dtype), spread, shape=dims)
    return {block.first.out: first, block.second.out: second, block.combine.rows: weighted}


def _product(emit: Emitter, product: GroupedProduct, rows: ir.Value, counts: ir.Value, facts: Facts) -> ir.Value:
    """One product per expert on its slice of the rows, concatenated."""
    pieces = slices(emit, rows, counts, len(product.weights), facts)
    return products(emit, pieces, product.weights, None, known(*(facts.shape(product.out) or (None, None))))
