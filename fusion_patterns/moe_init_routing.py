"""Mixture-of-experts blocks -> MoeInitRoutingV3, with each expert on the slice of rows that are its own.

1. sorted tokens, grouped products          fusion_patterns.moe_grouped
2. sorted tokens alone                      fusion_patterns.moe_permutation
3. weight matrices gathered per assignment  fusion_patterns.lift.batched_experts
4. all experts on all tokens                fusion_patterns.lift.dense_experts
5. an unrolled loop over the experts        fusion_patterns.lift.looped_experts

3 to 5 compute in another order than the operator; they are put into routed form: fusion_patterns.moe_routed_experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from fusion_patterns.engine import Match, Refused
from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.batched_experts import (
    BatchedExperts,
    StackGather,
    recognise_batched_product,
    recognise_bias,
    recognise_stack_gather,
)
from fusion_patterns.lift.dense_experts import DenseExperts, WeightedSum, recognise_weighted_sum
from fusion_patterns.lift.expert_mask import recognise_expert_mask
from fusion_patterns.lift.expert_network import ON_ROWS, recognise_network
from fusion_patterns.lift.looped_experts import ExpertLoop, LoopedExperts, recognise_loop
from fusion_patterns.lift.permutation import recognise_permutation
from fusion_patterns.lift.router import Router, recognise_router, same_rows
from fusion_patterns.lift.unpermutation import recognise_unsorted_combine
from fusion_patterns.miss import Miss, miss
from fusion_patterns.moe_grouped import grouped_match, is_grouped, recognise_grouped_experts
from fusion_patterns.moe_permutation import permutation_match
from fusion_patterns.moe_routed_experts import RoutedExperts, routed_match, routed_tokens

__all__ = ["MoeInitRouting"]

Outcome = Match | Miss | None


class MoeInitRouting:
    """See the module."""

    name = "moe_init_routing"
    operators = ("MoeInitRoutingV3",)
    anchors = (
        *("TopK", "Gather", "GatherND", "Equal", "OneHot", "ScatterElements", "NonZero"),
        *("ReduceSum", "ScatterND"),
    )

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]:
        outcome = _FORMS[node.op_type](self.name, node, facts)
        if outcome is not None:
            yield Refused(self.name, node, outcome) if isinstance(outcome, Miss) else outcome


def _sorted(fusion: str, node: ir.Node, facts: Facts) -> Outcome:
    """Forms 1 and 2."""
    permutation = recognise_permutation(node, facts)
    if permutation is None or isinstance(permutation, Miss):
        return permutation
    if not is_grouped(permutation, facts):
        return permutation_match(fusion, permutation, facts)
    block = recognise_grouped_experts(permutation, facts)
    return block if isinstance(block, Miss) else grouped_match(fusion, block, facts)


def _batched(fusion: str, node: ir.Node, facts: Facts) -> Outcome:
    """Form 3, from the gather of the stack that is multiplied last."""
    gather = recognise_stack_gather(node, facts)
    if gather is None or facts.rank(gather.stack) != 3:
        return None
    result = _product_of(gather, facts)
    if result is None:
        if recognise_router(gather.ids, facts) is None:
            return None
        return miss("experts-unrecognised", node, "a product with the gathered matrices", "another reader")
    if _is_followed(result, gather, facts):
        return None
    result = _with_bias(result, gather, facts)
    experts = BatchedExperts(gather.ids, gather.experts)
    network = recognise_network((result,), experts, facts)
    if isinstance(network, Miss):
        return network
    if experts.x is None or sum(not isinstance(dim, int) for dim in facts.shape(result) or (None, None)) > 1:
        return miss("experts-unrecognised", node, "results with one axis of unknown size", str(result.shape))
    tokens = routed_tokens(experts.x, gather.ids, experts.choices, gather.experts, facts)
    return routed_match(fusion, RoutedExperts(tokens, network, None, result, node), facts)


def _product_of(gather: StackGather, facts: Facts) -> ir.Value | None:
    """The product that the gathered matrices go into, transposed or not."""
    queue = [gather.node.outputs[0]]
    while queue:
        for node, _ in facts.readers(queue.pop()):
            if is_op(node, "Transpose"):
                queue.append(node.outputs[0])
            elif is_op(node, "MatMul", "Einsum"):
                product = recognise_batched_product(node.outputs[0], facts)
                if product is not None and product.stack.node is gather.node:
                    return node.outputs[0]
    return None


_FARTHEST = 48


def _is_followed(result: ir.Value, gather: StackGather, facts: Facts) -> bool:
    """Whether a later product of the same experts reads what is computed from this one row by row."""
    queue, seen = [result], {result}
    while queue:
        for node, _ in facts.readers(queue.pop(0)):
            if is_op(node, "MatMul", "Einsum"):
                later = recognise_batched_product(node.outputs[0], facts)
                if later is not None and later.ids is gather.ids and later.stack.node is not gather.node:
                    return True
            elif is_op(node, *ON_ROWS) and len(seen) < _FARTHEST:
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return False


def _with_bias(result: ir.Value, gather: StackGather, facts: Facts) -> ir.Value:
    """The result with the bias of its expert, where one is added."""
    queue = [result]
    while queue:
        for node, place in facts.readers(queue.pop()):
            if is_op(node, "Squeeze", "Reshape"):
                queue.append(node.outputs[0])
            elif is_op(node, "Add") and recognise_bias(facts.input(node, 1 - place), gather.ids, facts) is not None:
                return node.outputs[0]
    return result


def _dense(fusion: str, node: ir.Node, facts: Facts) -> Outcome:
    """Form 4, from the first node that looks where an expert was chosen."""
    ids = _compared_ids(node, facts)
    if ids is None:
        return None
    anchor, outcome = facts.remember(
        "dense_block", ids, lambda ids, facts: (node, _dense_block(fusion, node, ids, facts))
    )
    return outcome if anchor is node else None


def _compared_ids(node: ir.Node, facts: Facts) -> ir.Value | None:
    if is_op(node, "ScatterElements", "OneHot"):
        ids = facts.input(node, 1 if node.op_type == "ScatterElements" else 0)
    else:
        mask = recognise_expert_mask(node.outputs[0], facts)
        if mask is None:
            return None
        ids = mask.ids
    return ids if ids.dtype in (ir.DataType.INT64, ir.DataType.INT32) and (facts.rank(ids) or 0) > 1 else None


def _dense_block(fusion: str, anchor: ir.Node, ids: ir.Value, facts: Facts) -> Outcome:
    found = recognise_weighted_sum(ids, facts)
    if not isinstance(found, WeightedSum):
        return found
    router = recognise_router(ids, facts)
    if router is None and len(found.outputs) < 2:
        return None
    reason = _wrong_experts(found.outputs, found.experts, router, anchor)
    if reason is not None:
        return reason
    experts = DenseExperts()
    network = recognise_network(tuple(found.outputs.values()), experts, facts)
    if isinstance(network, Miss):
        return network
    choices, x = facts.size(ids, -1), experts.x
    if x is None or choices is None or not same_rows(x, ids, facts):
        return miss("experts-unrecognised", anchor, "tokens with constant K expert ids each", str(ids.shape))
    tokens = routed_tokens(x, ids, choices, len(found.outputs), facts)
    return routed_match(fusion, RoutedExperts(tokens, network, found.weights, found.total, anchor), facts)


def _wrong_experts(
    outputs: dict[int, ir.Value], listed: int | None, router: Router | None, anchor: ir.Node, hit_of: int | None = None
) -> Miss | None:
    """A reason where the experts that are present are not all that the ids can name."""
    largest = max(outputs) + 1
    wanted = max(largest, router.experts if router is not None else listed or 0)
    if hit_of is not None and hit_of != wanted:
        found = f"{hit_of}: the loop was traced over the experts that the example input hit"
        return miss("experts-missing", anchor, f"the {wanted} experts of the router", found)
    if len(outputs) < wanted:
        return miss("experts-missing", anchor, f"the {wanted} experts of the router", f"{len(outputs)}")
    if len(outputs) < 2:
        return miss("experts-unrecognised", anchor, "at least two experts", f"{len(outputs)}")
    return None


def _looped(fusion: str, node: ir.Node, facts: Facts) -> Outcome:
    """Form 5, from the first expert's list of tokens."""
    mask = recognise_expert_mask(facts.input(node, 0), facts)
    if mask is None:
        return None

    def block(ids: ir.Value, facts: Facts) -> tuple[ir.Node, Outcome]:
        loop = recognise_loop(node, mask, facts)
        return node, _looped_block(fusion, node, loop, facts) if isinstance(loop, ExpertLoop) else loop

    anchor, outcome = facts.remember("looped_block", mask.ids, block)
    return outcome if anchor is node else None


def _looped_block(fusion: str, anchor: ir.Node, loop: ExpertLoop, facts: Facts) -> Match | Miss:
    router = recognise_router(loop.ids, facts)
    reason = _wrong_experts(loop.outputs, loop.experts, router, anchor, loop.hit_of)
    if reason is not None:
        return reason
    experts = LoopedExperts(tuple(loop.tokens[expert] for expert in loop.outputs))
    network = recognise_network(tuple(loop.outputs.values()), experts, facts)
    if isinstance(network, Miss):
        return network
    if loop.overwrites and router is None:
        return miss("combine-unrecognised", anchor, "ids proved distinct for every token, from a TopK", "other ids")
    choices, x = facts.size(loop.ids, -1), experts.x
    rows = x is not None and same_rows(x, loop.ids, facts) and same_rows(x, loop.base, facts)
    if x is None or choices is None or not rows:
        return miss("combine-unrecognised", anchor, "as many rows of results as of tokens and of ids", "other sizes")
    tokens = routed_tokens(x, loop.ids, choices, len(loop.outputs), facts)
    return routed_match(
        fusion, RoutedExperts(tokens, network, loop.weights, loop.total, anchor, loop.first_rows), facts
    )


def _unsorted(_fusion: str, node: ir.Node, facts: Facts) -> Outcome:
    """What looks like the end of a block that begins outside of the graph."""
    return recognise_unsorted_combine(node, facts)


_FORMS: dict[str, Callable[[str, ir.Node, Facts], Outcome]] = {
    "TopK": _sorted,
    "Gather": _batched,
    "GatherND": _batched,
    "Equal": _dense,
    "OneHot": _dense,
    "ScatterElements": _dense,
    "NonZero": _looped,
    "ReduceSum": _unsorted,
    "ScatterND": _unsorted,
}
