"""Softmax attention: softmax(q k^T * scale + mask) v, in the spellings of exporters."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.permuted import Permuted, recognise_permuted
from fusion_patterns.miss import Miss, miss

__all__ = ["Attention", "recognise_attention"]


@dataclass(frozen=True)
class Attention:
    """out = softmax(q k^T * scale + mask) v.

    `query` (B, N, S, D); `key` is Permuted so that its permutation yields (B, N, D, T); `value` (B, N, T, Dv); `mask`
    is added to the scores (None: no mask); `out` (B, N, S, Dv).
    """

    query: ir.Value
    key: Permuted
    value: ir.Value
    scale: float
    mask: ir.Value | None
    out: ir.Value
    node: ir.Node


def recognise_attention(softmax: ir.Node, facts: Facts) -> Attention | Miss | None:
    """The attention around a Softmax node; None when no product follows, so that it was never a candidate.

    Spellings
    ---------
    1. MatMul(q, k^T) [-> Mul or Div by the scale] [-> Add(mask)] -> Softmax(-1) -> MatMul(·, v).
    2. The scale as square roots on q and on k^T before the product, or on one of them.
    """
    probabilities = softmax.outputs[0]
    product = _only_product(probabilities)
    if product is None:
        return None
    value, rank = facts.input(product, 1), facts.rank(probabilities)
    if rank != 4 or facts.axis(softmax, probabilities) != 3:
        return miss("attention-unrecognised", softmax, "a softmax over the last of four axes", f"{rank} axes")
    scores, mask = _without_mask(facts.input(softmax, 0), facts)
    scores, scale = _without_scale(scores, facts)
    node = facts.producer(scores)
    if not is_op(node, "MatMul"):
        found = node.op_type if node is not None else "a graph input"
        return miss("attention-unrecognised", scores, "a product of queries and keys", found)
    query, query_scale = _without_scale(facts.input(node, 0), facts)
    key, key_scale = _scaled_permutation(facts.input(node, 1), facts)
    if key is None:
        return miss("attention-unrecognised", node, "keys of known rank", "unknown rank")
    scale *= query_scale * key_scale
    return Attention(query, key, value, scale, mask, product.outputs[0], softmax)


def _only_product(probabilities: ir.Value) -> ir.Node | None:
    """The MatMul that weighs the values."""
    products = [u.node for u in probabilities.uses() if is_op(u.node, "MatMul") and u.idx == 0]
    return products[0] if len(products) == 1 else None


def _without_mask(scores: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value | None]:
    """(scores, mask) of Add(scores, mask); the scores are the operand that is a product of two values."""
    node = facts.producer(scores)
    if not is_op(node, "Add"):
        return scores, None
    for given, mask in facts.either_way(node):
        if given is not None and mask is not None and is_op(_without_scale(given, facts)[0].producer(), "MatMul"):
            return given, mask
    return scores, None


def _without_scale(value: ir.Value, facts: Facts) -> tuple[ir.Value, float]:
    """(base, factor) with value = base * factor, through Mul and Div by scalar constants."""
    factor = 1.0
    while True:
        node = facts.producer(value)
        if not is_op(node, "Mul", "Div"):
            return value, factor
        left, right = facts.input(node, 0), facts.input(node, 1)
        constant = facts.scalar(right)
        if constant is not None and left is not None and facts.rank(left) == facts.rank(value):
            factor, value = factor * constant if node.op_type == "Mul" else factor / constant, left
        elif node.op_type == "Mul" and (constant := facts.scalar(left)) is not None and right is not None:
            factor, value = factor * constant, right
        else:
            return value, factor


def _scaled_permutation(value: ir.Value, facts: Facts) -> tuple[Permuted | None, float]:
    """The permuted base of a value and the factor on it, whichever of scaling and transposing comes first."""
    outer, factor = _without_scale(value, facts)
    permuted = recognise_permuted(outer, facts)
    if permuted is None:
        return None, factor
    base, inner = _without_scale(permuted.base, facts)
    if base is permuted.base:
        return permuted, factor
    below = recognise_permuted(base, facts)
    if below is None:
        return None, factor
    return Permuted(below.base, tuple(below.perm[axis] for axis in permuted.perm)), factor * inner
