"""Softmax attention: softmax(q k^T * scale + mask) v, in the spellings of exporters."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.contraction import Contraction, Labelled, recognise_contraction
from fusion_patterns.lift.permuted import Permuted
from fusion_patterns.lift.scale import without_scale
from fusion_patterns.miss import Miss, miss

__all__ = ["Attention", "recognise_attention", "weighing_product"]


@dataclass(frozen=True)
class Attention:
    """out = softmax(q k^T * scale + mask) v, one key head per query head.

    Permutations of `query`, `key` and `value` yield (B, N, S, D), (B, N, T, D) and (B, N, T, Dv). `mask` is added to
    the scores, or says where keys are visible if it is boolean (None: no mask). `causal`: key j is visible to query i
    only if j <= i, besides. `out` is (B, N, S, Dv) when `heads_first`, else (B, S, N, Dv); mask and scores have the
    heads on the same side. `empty_rows_zero`: probabilities that are not a number (no key visible) count as zero.
    """

    query: Permuted
    key: Permuted
    value: Permuted
    scale: float
    mask: ir.Value | None
    out: ir.Value
    heads_first: bool
    empty_rows_zero: bool
    node: ir.Node
    causal: bool = False


def recognise_attention(node: ir.Node, facts: Facts) -> Attention | Miss | None:
    """The attention around a Softmax, or that an Attention node is; None when no product follows a Softmax.

    Spellings
    ---------
    1. product of q and k [-> times scale] [-> Add(mask)] -> Softmax(-1) -> product with v; products as MatMul over
       (B, N, S, D) or Einsum over any order of axes; the scale also as factors on q and k; between Softmax and
       product perhaps Where(IsNaN(p), 0, p).
    2. Attention (opset 23) on four axes, without cache or softcap. It yields zero where no key is visible.
    """
    return _single_node(node, facts) if is_op(node, "Attention") else _decomposed(node, facts)


def _decomposed(softmax: ir.Node, facts: Facts) -> Attention | Miss | None:
    probabilities = softmax.outputs[0]
    guarded = _guarded(probabilities, facts)
    product = weighing_product(guarded or probabilities, facts)
    if product is None:
        other = _unlike_weights(guarded or probabilities, facts)
        expected = "one product of weights and values"
        return None if other is None else miss("attention-unrecognised", softmax, expected, other)
    if _is_latent(product):
        return None
    rank = facts.rank(probabilities)
    if rank != 4 or facts.axis(softmax, probabilities) != 3:
        return miss("attention-unrecognised", softmax, "a softmax over the last of four axes", f"{rank} axes")
    scores, mask = _without_mask(facts.input(softmax, 0), facts)
    scores, scale = without_scale(scores, facts)
    scored = recognise_contraction(scores, facts)
    if scored is None or len(scored.labels) != 4:
        found = facts.producer(scores)
        return miss(
            "attention-unrecognised", scores, "a product of queries and keys", found.op_type if found else "input"
        )
    return _assembled(softmax, scored, product, scale * scored.factor, mask, guarded is not None)


def _assembled(
    softmax: ir.Node,
    scored: Contraction,
    product: Contraction,
    scale: float,
    mask: ir.Value | None,
    empty_rows_zero: bool,
) -> Attention | Miss:
    """Names for the axes: b in all, t on the keys, s on the queries alone, n on both."""
    b, first, second, t = tuple(scored.labels)
    query, key = (scored.left, scored.right) if t in scored.right.labels else (scored.right, scored.left)
    heads_first = first in key.labels
    n, s = (first, second) if heads_first else (second, first)
    weighed = _renamed(product, scored.labels)
    if n not in key.labels or s in key.labels or weighed is None:
        return miss("attention-unrecognised", softmax, "keys and values with one head per query head", "shared heads")
    values, out = weighed
    width = (set(values.labels) - {b, n, t}).pop() if len(set(values.labels) - {b, n, t}) == 1 else ""
    orders = (
        query.order(b + n + s + scored.shared),
        key.order(b + n + t + scored.shared),
        values.order(b + n + t + width),
    )
    if None in orders or out not in (b + n + s + width, b + s + n + width):
        return miss("attention-unrecognised", softmax, "axes batch, head, token, feature", f"{scored.labels}, {out}")
    if (out == b + n + s + width) != heads_first:
        return miss("attention-unrecognised", softmax, "scores and result in one order of axes", out)
    query_order, key_order, value_order = (order or () for order in orders)
    return Attention(
        Permuted(query.value, query_order),
        Permuted(key.value, key_order),
        Permuted(values.value, value_order),
        scale,
        mask,
        product.node.outputs[0],
        heads_first,
        empty_rows_zero,
        softmax,
    )


def _renamed(product: Contraction, scores: str) -> tuple[Labelled, str] | None:
    """The value operand and the result's labels, with the labels of the probabilities called as in the scores."""
    if len(product.left.labels) != 4:
        return None
    names = dict(zip(product.left.labels, scores, strict=True))
    fresh = iter("vwxyz")
    for label in product.right.labels:
        if label not in names:
            names[label] = next(letter for letter in fresh if letter not in scores)
    renamed = Labelled(product.right.value, "".join(names[label] for label in product.right.labels))
    return renamed, "".join(names.get(label, label) for label in product.labels)


def _guarded(probabilities: ir.Value, facts: Facts) -> ir.Value | None:
    """Where(IsNaN(p), 0, p) of the probabilities p, when nothing else reads them."""
    readers = facts.readers(probabilities)
    choice = next((node for node, index in readers if index == 2 and is_op(node, "Where")), None)
    if choice is None or len(readers) != 2 or facts.scalar(facts.input(choice, 1)) != 0:
        return None
    test = facts.producer(facts.input(choice, 0))
    is_guard = is_op(test, "IsNaN") and facts.input(test, 0) is facts.plain(probabilities)
    return choice.outputs[0] if is_guard else None


def _is_latent(product: Contraction) -> bool:
    """Whether all heads share the values: then attention is in the latent space already."""
    return len(product.right.labels) == 3


def weighing_product(probabilities: ir.Value, facts: Facts) -> Contraction | None:
    """The product that weighs the values by the probabilities."""
    readers = [node for node, index in facts.readers(probabilities) if index == 0 and is_op(node, "MatMul", "Einsum")]
    if len(readers) != 1:
        return None
    product = recognise_contraction(readers[0].outputs[0], facts)
    plain = facts.plain(probabilities)
    return product if product is not None and product.left.value is plain and product.factor == 1 else None


def _unlike_weights(probabilities: ir.Value, facts: Facts) -> str | None:
    """How a product with values differs from one that weighs them; None where there is none, so no attention."""
    if facts.rank(probabilities) != 4:
        return None
    readers = [node for node, _ in facts.readers(probabilities)]
    products = [node for node in readers if is_op(node, "MatMul", "Einsum")]
    if products:
        return "several products" if len(products) > 1 else "another product, or values times a number"
    cuts = [value for node in readers for value in node.outputs if is_op(node, "Slice", "Split")]
    if any(weighing_product(value, facts) is not None for value in cuts):
        return "weights of more than the keys, cut before they weigh values (an attention sink)"
    return None


def _without_mask(scores: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value | None]:
    """(scores, mask) of Add(scores, mask); the scores are the operand that is a product of two values."""
    node = facts.producer(scores)
    if not is_op(node, "Add"):
        return scores, None
    for given, mask in facts.either_way(node):
        if recognise_contraction(without_scale(given, facts)[0], facts) is not None:
            return given, mask
    return scores, None


def _single_node(node: ir.Node, facts: Facts) -> Attention | Miss:
    query, key, value = (facts.input(node, index) for index in range(3))
    others = [output for output in node.outputs[1:] if output.name] or [i for i in node.inputs[4:] if i is not None]
    if facts.rank(query) != 4 or attribute(node, "softcap") != 0 or others:
        found = "a cache" if others else "a softcap" if facts.rank(query) == 4 else f"{facts.rank(query)} axes"
        return miss("attention-unrecognised", node, "Attention on four axes without cache or softcap", found)
    scale, width = attribute(node, "scale"), facts.size(query, -1)
    if scale is None and width is None:
        return miss("attention-unrecognised", node, "a scale or a known head size", "neither")
    scales = [without_scale(side, facts) for side in (query, key)]
    mask = facts.input(node, 3) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    identity = (0, 1, 2, 3)
    return Attention(
        Permuted(scales[0][0], identity),
        Permuted(scales[1][0], identity),
        Permuted(value, identity),
        (scale if scale is not None else float(width or 1) ** -0.5) * scales[0][1] * scales[1][1],
        mask,
        node.outputs[0],
        True,
        mask is not None,
        node,
        causal=attribute(node, "is_causal") == 1,
    )
