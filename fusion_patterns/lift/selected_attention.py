"""Attention in the latent space over keys selected per query token, by gathering them or by masking all others.

softmax((q . k + q_rope . k_rope) * scale) k   over the keys k that a list of positions names for the query token
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.attention import weighing_product
from fusion_patterns.lift.contraction import Contraction, Labelled, recognise_contraction
from fusion_patterns.lift.mask import is_huge_negative, uniform_value
from fusion_patterns.lift.scale import without_scale
from fusion_patterns.miss import Miss, miss

__all__ = ["SelectedAttention", "recognise_selected_attention"]


@dataclass(frozen=True)
class SelectedAttention:
    """Attention over selected keys; `out` (B, S, N, D).

    `query` (B, S, N, D), `query_rope` (B, S, N, Dr), `latent` (B, T, D) keys and values, `rotated` (B, T, Dr),
    `indices` (B, S, K). `padded`: entries of -1 select nothing, and a list of nothing else makes its row not a number.
    `proven`: the graph itself says that the entries are distinct and in range.
    """

    query: ir.Value
    query_rope: ir.Value
    latent: ir.Value
    rotated: ir.Value
    indices: ir.Value
    scale: float
    padded: bool
    proven: bool
    out: ir.Value
    node: ir.Node


@dataclass(frozen=True)
class _Keys:
    """Keys of one product: all of them, (B, T, D), and the list (B, S, K) they were gathered by, None for no list."""

    all: ir.Value
    gathered_by: ir.Value | None


def recognise_selected_attention(softmax: ir.Node, facts: Facts) -> SelectedAttention | Miss | None:
    """Selected attention around a Softmax; None where its scores are not the sum of two products with shared keys."""
    return facts.remember("selected_attention", softmax.outputs[0], lambda _, f: _selected_attention(softmax, f))


def _selected_attention(softmax: ir.Node, facts: Facts) -> SelectedAttention | Miss | None:
    probabilities = softmax.outputs[0]
    product = weighing_product(probabilities, facts)
    if product is None or facts.rank(probabilities) != 4 or facts.axis(softmax, probabilities) != 3:
        return None
    scores, hidden = _without_padding(facts.input(softmax, 0), facts)
    scores, mask = _without_added(scores, facts)
    scores, scale = without_scale(scores, facts)
    terms = _two_products(scores, facts)
    if terms is None:
        return None
    values = _shared_keys(product.right, facts)
    sides = [(term, _shared_keys(_keys_of(term), facts)) for term in terms]
    latent = next((side for side in sides if side[1] == values), None)
    rotated = next((side for side in sides if side[1] != values), None)
    if latent is None or rotated is None or values is None or latent[1] is None or rotated[1] is None:
        return None
    chosen = _chosen(values, mask, hidden, facts)
    if isinstance(chosen, Miss) or chosen is None:
        return chosen
    if latent[1].gathered_by is not rotated[1].gathered_by:
        return miss("selection-unrecognised", softmax, "both products over the same selected keys", "different keys")
    if latent[0].factor != rotated[0].factor:
        return miss("selection-unrecognised", softmax, "both products times one scale", "two scales")
    queries = _queries(latent[0], rotated[0], product, mask, facts)
    if queries is None:
        return miss("selection-unrecognised", softmax, "queries and result (B, S, N, D)", "another order of axes")
    indices, padded = chosen
    return SelectedAttention(
        *queries,
        values.all,
        rotated[1].all,
        indices,
        scale * latent[0].factor,
        padded,
        _from_top_k(indices, facts),
        product.node.outputs[0],
        softmax,
    )


def _two_products(scores: ir.Value, facts: Facts) -> tuple[Contraction, Contraction] | None:
    node = facts.producer(scores)
    if not is_op(node, "Add"):
        return None
    left, right = (recognise_contraction(facts.input(node, index), facts) for index in (0, 1))
    return None if left is None or right is None or left.labels != right.labels else (left, right)


def _keys_of(term: Contraction) -> Labelled:
    """The operand that has the keys' axis, the last one of the scores."""
    return term.right if term.labels[3] in term.right.labels else term.left


def _queries_of(term: Contraction) -> Labelled:
    return term.left if term.labels[3] in term.right.labels else term.right


def _shared_keys(operand: Labelled, facts: Facts) -> _Keys | None:
    """The keys behind an operand: gathered per token (B, S, K, D), or all of them (B, T, D)."""
    gathered = facts.producer(operand.value)
    if len(operand.labels) == 3:
        return _Keys(operand.value, None)
    if is_op(gathered, "GatherElements"):
        return _gathered_elements(gathered, facts)
    if is_op(gathered, "GatherND") and attribute(gathered, "batch_dims") == 1:
        added = facts.producer(facts.input(gathered, 1))
        keys = facts.input(gathered, 0)
        if is_op(added, "Unsqueeze") and facts.rank(keys) == 3 and facts.rank(facts.input(added, 0)) == 3:
            return _Keys(keys, facts.input(added, 0))
    return None


def _gathered_elements(node: ir.Node, facts: Facts) -> _Keys | None:
    """GatherElements along axis 2 of Expand(Unsqueeze(keys, 1)) at Expand(Unsqueeze(indices, -1))."""
    if facts.rank(node.outputs[0]) != 4 or facts.axis(node, node.outputs[0], 0) != 2:
        return None
    keys = _before_expand(facts.input(node, 0), 1, facts)
    indices = _before_expand(facts.input(node, 1), 3, facts)
    return None if keys is None or indices is None else _Keys(keys, indices)


def _before_expand(value: ir.Value, axis: int, facts: Facts) -> ir.Value | None:
    """The value of three axes that was repeated along a new `axis`."""
    node = facts.producer(value)
    source = facts.input(node, 0) if is_op(node, "Expand") else value
    added = facts.producer(source)
    if not is_op(added, "Unsqueeze") or facts.integers(facts.input(added, 1)) not in ([axis], [axis - 4]):
        return None
    return facts.input(added, 0) if facts.rank(facts.input(added, 0)) == 3 else None


def _without_padding(scores: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value | None]:
    """(scores, selected): scores that Where replaces by a huge negative, and the boolean (B, S, K) that keeps them."""
    node = facts.producer(scores)
    if not is_op(node, "Where"):
        return scores, None
    choice, chosen, other = (facts.input(node, index) for index in range(3))
    inverted = is_huge_negative(chosen, facts)
    if not inverted and not is_huge_negative(other, facts):
        return scores, None
    negation = facts.producer(choice)
    if is_op(negation, "Not"):
        choice, inverted = facts.input(negation, 0), not inverted
    added = facts.producer(choice)
    if not is_op(added, "Unsqueeze") or facts.integers(facts.input(added, 1)) not in ([2], [-2]):
        return scores, None
    kept = facts.input(added, 0)
    wanted = ("Less",) if inverted else ("GreaterOrEqual",)
    comparison = facts.producer(kept)
    if not is_op(comparison, *wanted) or facts.scalar(facts.input(comparison, 1)) != 0:
        return scores, None
    return (other if is_huge_negative(chosen, facts) else chosen), facts.input(comparison, 0)


def _without_added(scores: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value | None]:
    """(scores, mask) of Add(scores, mask), the mask being made by scattering."""
    node = facts.producer(scores)
    if is_op(node, "Add"):
        for given, mask in facts.either_way(node):
            if _scattered(mask, facts) is not None:
                return given, mask
    return scores, None


def _scattered(mask: ir.Value, facts: Facts) -> tuple[ir.Value, int] | None:
    """(indices (B, S, K), head axis) of a mask that is 0 at them and a huge negative elsewhere."""
    added = facts.producer(mask)
    axes = facts.integers(facts.input(added, 1)) if is_op(added, "Unsqueeze") else None
    node = facts.producer(facts.input(added, 0)) if is_op(added, "Unsqueeze") else None
    if axes is None or len(axes) != 1 or not is_op(node, "ScatterElements") or facts.rank(node.outputs[0]) != 3:
        return None
    if facts.axis(node, node.outputs[0], 0) != 2 or attribute(node, "reduction") != "none":
        return None
    background, written = uniform_value(facts.input(node, 0), facts), uniform_value(facts.input(node, 2), facts)
    if background is None or background > -65504 or written != 0:
        return None
    return facts.input(node, 1), axes[0] % 4


def _chosen(
    values: _Keys, mask: ir.Value | None, padding: ir.Value | None, facts: Facts
) -> tuple[ir.Value, bool] | Miss | None:
    """(indices, padded) of the selection; None where there is none."""
    if values.gathered_by is None:
        scattered = None if mask is None else _scattered(mask, facts)
        return None if scattered is None or padding is not None else (scattered[0], False)
    if mask is not None:
        return miss("selection-unrecognised", mask, "gathered keys without a second mask", "a mask")
    if padding is None:
        return values.gathered_by, False
    clipped = facts.producer(values.gathered_by)
    lowest = facts.scalar(facts.input(clipped, 1)) if is_op(clipped, "Clip", "Max") else None
    if clipped is None or facts.input(clipped, 0) is not padding or lowest != 0:
        return miss(
            "selection-unrecognised", values.gathered_by, "gathering by the list with -1 replaced by 0", "others"
        )
    return padding, True


def _queries(
    latent: Contraction, rotated: Contraction, product: Contraction, mask: ir.Value | None, facts: Facts
) -> tuple[ir.Value, ir.Value] | None:
    """query and query_rope, when they and the result lie as (B, S, N, D)."""
    b, first, second, _ = tuple(latent.labels)
    keys = _keys_of(latent)
    if len(keys.labels) == 4:
        tokens_first = first in keys.labels and second not in keys.labels
    else:
        scattered = None if mask is None else _scattered(mask, facts)
        tokens_first = scattered is not None and scattered[1] == 2
    queries = [_queries_of(term) for term in (latent, rotated)]
    lie = all(q.labels == b + first + second + t.shared for q, t in zip(queries, (latent, rotated), strict=True))
    names = dict(zip(product.left.labels, latent.labels, strict=True)) if len(product.left.labels) == 4 else {}
    result = "".join(names.get(label, "*") for label in product.labels)
    if not tokens_first or not lie or result != b + first + second + "*":
        return None
    return queries[0].value, queries[1].value


def _from_top_k(indices: ir.Value, facts: Facts) -> bool:
    node = facts.producer(indices)
    while is_op(node, "Cast"):
        indices = facts.input(node, 0)
        node = facts.producer(indices)
    return is_op(node, "TopK") and node.outputs[1] is indices
