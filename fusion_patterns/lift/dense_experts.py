"""Experts that all run on all tokens, each result weighted by what the token gives to that expert, 0 for most.

share of e = sum over choices of weights where ids == e
experts(x) * shares -> sum over the experts
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.expert_mask import ExpertMask, recognise_expert_mask, recognise_one_hot
from fusion_patterns.lift.expert_network import FoundProduct, Values
from fusion_patterns.lift.expert_weight import ExpertLinear, ExpertWeight, recognise_expert_linear
from fusion_patterns.lift.mask import uniform_value
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss

__all__ = ["DenseExperts", "Share", "WeightedSum", "recognise_share", "recognise_weighted_sum", "separate_product"]


@dataclass(frozen=True)
class Share:
    """value (..) or (.., 1) = sum over choices of `weights` (.., K) where `ids` (.., K) == expert."""

    ids: ir.Value
    weights: ir.Value
    expert: int
    experts: int | None


def recognise_share(value: ir.Value, facts: Facts) -> Share | None:
    """The share of one expert that a value is.

    Spellings
    ---------
    1. ReduceSum(weights * (ids == e), last axis).
    2. ReduceSum(Where(ids == e, weights, 0), last axis).
    3. Column e of ScatterElements(zeros (.., E), ids, weights, last axis).
    4. Column e of ReduceSum(one-hot (.., K, E) * weights (.., K, 1), axis of choices).
    """
    return facts.remember("share", value, _share)


def _share(value: ir.Value, facts: Facts) -> Share | None:
    while is_op(node := facts.producer(value), "Unsqueeze", "Squeeze"):
        value = facts.input(node, 0)
    value = facts.plain(value)
    if is_op(node, "ReduceSum"):
        return _summed(node, facts)
    if is_op(node, "Gather"):
        table, place = facts.input(node, 0), facts.integers(facts.input(node, 1))
        last = facts.axis(node, table, 0) == (facts.rank(table) or 0) - 1
        return _column(table, place[0], facts) if last and place is not None and len(place) == 1 else None
    cut = recognise_slice(value, facts)
    if cut is None or cut.size != 1 or cut.axis != (facts.rank(cut.source) or 0) - 1:
        return None
    return _column(cut.source, cut.start, facts)


def _reduced_axis(node: ir.Node, facts: Facts) -> int | None:
    """The only axis that a reduction removes or keeps as 1, counted from the back."""
    axes = facts.integers(facts.input(node, 1)) if facts.has(node, 1) else attribute(node, "axes")
    rank = facts.rank(facts.input(node, 0))
    return (axes[0] % rank) - rank if axes is not None and len(axes) == 1 and rank is not None else None


def _summed(node: ir.Node, facts: Facts) -> Share | None:
    if _reduced_axis(node, facts) != -1:
        return None
    masked = facts.producer(facts.input(node, 0))
    if is_op(masked, "Mul"):
        pairs = facts.either_way(masked)
    elif is_op(masked, "Where") and uniform_value(facts.input(masked, 2), facts) == 0:
        pairs = ((facts.input(masked, 1), facts.input(masked, 0)),) * 2
    else:
        return None
    for weights, hits in pairs:
        mask = recognise_expert_mask(hits, facts)
        if mask is not None and _aligned(mask, hits, weights, facts):
            return Share(mask.ids, weights, mask.expert, mask.experts)
    return None


def _aligned(mask: ExpertMask, hits: ir.Value, weights: ir.Value, facts: Facts) -> bool:
    plain = not mask.choices_first and mask.hit_of is None
    return plain and facts.rank(hits) == facts.rank(weights) and facts.size(mask.ids, -1) == facts.size(weights, -1)


def _column(table: ir.Value, place: int, facts: Facts) -> Share | None:
    node, experts = facts.producer(table), facts.size(table, -1)
    if experts is None or node is None:
        return None
    expert = place % experts
    if is_op(node, "ScatterElements") and uniform_value(facts.input(node, 0), facts) == 0:
        if attribute(node, "reduction") not in ("none", "add"):
            return None
        ids, weights, rank = facts.input(node, 1), facts.input(node, 2), facts.rank(table)
        last = facts.axis(node, table, 0) == (rank or 0) - 1
        return Share(ids, weights, expert, experts) if last and facts.rank(weights) == rank else None
    if not is_op(node, "ReduceSum") or attribute(node, "keepdims") != 0 or _reduced_axis(node, facts) != -2:
        return None
    product = facts.producer(facts.input(node, 0))
    if not is_op(product, "Mul"):
        return None
    for hits, spread in facts.either_way(product):
        one_hot, added = recognise_one_hot(hits, facts), facts.producer(spread)
        if one_hot is None or one_hot.perm != tuple(range(len(one_hot.perm))) or facts.size(spread, -1) != 1:
            continue
        if is_op(added, "Unsqueeze", "Reshape") and facts.rank(facts.input(added, 0)) == facts.rank(one_hot.ids):
            return Share(one_hot.ids, facts.input(added, 0), expert, experts)
    return None


@dataclass(frozen=True)
class WeightedSum:
    """total = sum over the experts e of outputs[e] * share of e."""

    ids: ir.Value
    weights: ir.Value
    outputs: dict[int, ir.Value]
    experts: int | None
    total: ir.Value


_TO_SHARES = (
    "Cast",
    "Mul",
    "Where",
    "ReduceSum",
    "Unsqueeze",
    "Squeeze",
    "Slice",
    "Split",
    "Gather",
    "Equal",
    "OneHot",
)
_FARTHEST = 8


def recognise_weighted_sum(ids: ir.Value, facts: Facts) -> WeightedSum | Miss | None:
    """The sum of expert results that are weighted by shares of `ids`; None when no share is computed from them."""
    terms: dict[int, tuple[Share, ir.Value, ir.Value]] = {}
    for value in _shares_of(ids, facts):
        share = recognise_share(value, facts)
        for node, place in facts.readers(value):
            if share is None or not is_op(node, "Mul"):
                continue
            output = facts.input(node, 1 - place)
            if share.expert in terms and terms[share.expert][2] is not node.outputs[0]:
                return miss("combine-unrecognised", node, f"one result of expert {share.expert}", "several")
            terms[share.expert] = (share, output, node.outputs[0])
    if not terms:
        return None
    first = next(iter(terms.values()))[0]
    for share, _, term in terms.values():
        if share.weights is not first.weights:
            return miss("combine-unrecognised", term, "the same routing weights for every expert", "others")
    total = _sum_of({term for _, _, term in terms.values()}, facts)
    if isinstance(total, Miss):
        return total
    outputs = {expert: output for expert, (_, output, _) in sorted(terms.items())}
    return WeightedSum(ids, first.weights, outputs, first.experts, total)


def _shares_of(ids: ir.Value, facts: Facts) -> list[ir.Value]:
    """Every share that is computed from `ids`."""
    found: list[ir.Value] = []
    queue = [(node.outputs[0], 0) for node, place in facts.readers(ids) if _starts(node, place)]
    seen = {value for value, _ in queue}
    while queue:
        value, depth = queue.pop(0)
        is_share = recognise_share(value, facts) is not None
        if is_share:
            found.append(facts.plain(value))
        onward = ("Unsqueeze", "Squeeze") if is_share else _TO_SHARES
        for node, _ in facts.readers(value) if depth < _FARTHEST else ():
            fresh = [output for output in node.outputs if output not in seen] if is_op(node, *onward) else []
            seen.update(fresh)
            queue.extend((output, depth + 1) for output in fresh)
    return list(dict.fromkeys(found))


def _starts(node: ir.Node, place: int) -> bool:
    if is_op(node, "ScatterElements"):
        return place == 1
    return is_op(node, "Equal", "OneHot", "Unsqueeze", "Reshape")


def _sum_of(terms: set[ir.Value], facts: Facts) -> ir.Value | Miss:
    """The value that adds up all `terms` and nothing else but zeros, in whatever order."""
    left = set(terms)
    current = next(iter(terms))
    left.discard(current)
    while left:
        adds = [node for node, _ in facts.readers(current) if is_op(node, "Add", "Sum")]
        if len(adds) != 1:
            return miss("combine-unrecognised", current, "a sum over the experts", f"{len(adds)} sums")
        for place in range(len(adds[0].inputs)):
            other = facts.input(adds[0], place)
            if other is current:
                continue
            missing = _leaves(other, left, facts)
            if missing is not None:
                return miss("combine-unrecognised", missing, "weighted results of the experts only", "another summand")
        current = adds[0].outputs[0]
    return current


def _leaves(value: ir.Value, left: set[ir.Value], facts: Facts) -> ir.Value | None:
    """Take the terms below a sum out of `left`; the first summand that is none of them and not zero, else None."""
    stack = [value]
    while stack:
        current = stack.pop()
        if current in left:
            left.discard(current)
        elif is_op(node := current.producer(), "Add", "Sum") and node is not None:
            stack.extend(facts.input(node, place) for place in range(len(node.inputs)))
        elif uniform_value(current, facts) != 0:
            return current
    return None


class DenseExperts:
    """Experts that are spelled one by one, see `fusion_patterns.lift.expert_network.Experts`.

    What all of them read is the tokens: after the network is recognised, `x` (.., H).
    """

    def __init__(self) -> None:
        self.x: ir.Value | None = None

    def are_rows(self, values: Values, facts: Facts) -> bool:
        if any(value is not values[0] for value in values):
            return False
        self.x = self.x or values[0]
        return self.x is values[0]

    def product(self, values: Values, facts: Facts) -> FoundProduct | None:
        return separate_product(values, facts)


def separate_product(values: Values, facts: Facts) -> FoundProduct | None:
    """The product that stands in the same place of every expert, each with weights of its own."""
    linears = [linear for value in values if (linear := recognise_expert_linear(value, facts)) is not None]
    if len(linears) != len(values) or len({linear.weight.shape for linear in linears}) != 1:
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        return None
    return FoundProduct(
        tuple(linear.x for linear in linears), _weights(linears), tuple(biases) or None, linears[0].weight.shape[1]
    )


def _weights(linears: list[ExpertLinear]) -> tuple[ExpertWeight, ...]:
    return tuple(linear.weight for linear in linears)
