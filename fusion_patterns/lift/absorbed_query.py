"""A query already multiplied by the key half of kv_b, and the other three values its projections yield.

x -> low-rank query -> heads [nope | rope]: nope x W_UK -> query in the latent space; rope -> Rope -> rotated query
x -> down projection [latent | rope]: RmsNorm -> latent rows; Rope -> rotated rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op, stored_tensor
from fusion_patterns.lift.contraction import Labelled, recognise_contraction
from fusion_patterns.lift.heads import recognise_heads
from fusion_patterns.lift.linear import WeightView
from fusion_patterns.lift.nearby import values_behind
from fusion_patterns.lift.projections import (
    KeyProjection,
    Projection,
    Projections,
    join_projections,
    key_projection,
    query_projection,
    recognise_projection,
)
from fusion_patterns.lift.quantised import PerToken
from fusion_patterns.lift.quantised_linear import QuantisedLinear, dequantised, recognise_quantised_linear
from fusion_patterns.lift.rms_norm import RmsNorm, recognise_rms_norm
from fusion_patterns.lift.rope import Rope, recognise_rope
from fusion_patterns.lift.scale import without_scale
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss

__all__ = ["AbsorbedQuery", "KeyWeight", "key_weight", "recognise_absorbed_query"]


@dataclass(frozen=True)
class KeyWeight:
    """W_UK (N, D, Hckv) inside a constant: the key half of `kv_b`, or a constant of its own with its axes in `perm`."""

    kv_b: WeightView | None
    stored: ir.Value | None
    perm: tuple[int, ...]
    heads: int
    nope: int


@dataclass(frozen=True)
class AbsorbedQuery:
    """The four results of the projections.

    `query` has the axes of `order` out of (B, S, N, Hckv); `query_rope` has its heads on axis 1 (`rope_heads_first`) or
    2; `latent` and `rotated` are new rows, with or without an axis of size 1.
    """

    projections: Projections
    weight: KeyWeight
    query: ir.Value
    order: tuple[int, ...]
    query_rope: ir.Value
    rope_heads_first: bool
    latent: ir.Value
    rotated: ir.Value


def recognise_absorbed_query(node: ir.Node, facts: Facts) -> AbsorbedQuery | Miss | None:
    """The projections around a product of per-head queries and per-head constant matrices; None for other products."""
    product = recognise_contraction(node.outputs[0], facts)
    if product is None or product.node is not node:
        return None
    weight = key_weight(product.right, product.shared, facts)
    plain = recognise_heads(product.left.value, facts) if weight is not None else None
    if weight is None or plain is None or isinstance(plain, Miss) or len(product.labels) != 4:
        return None
    tokens, heads = (2, 1) if plain.heads_first else (1, 2)
    labels = product.left.labels
    canonical = labels[0] + labels[tokens] + labels[heads] + _latent_label(product.right, labels)
    order = Labelled(node.outputs[0], canonical).order(product.labels)
    if order is None or labels[heads] not in product.right.labels or labels[3] != product.shared:
        return miss("query-unrecognised", node, "heads of the query times one matrix per head", product.labels)
    if (plain.heads, plain.size) != (weight.heads, weight.nope):
        wanted, found = f"{weight.heads} heads of {weight.nope}", f"{plain.heads} heads of {plain.size}"
        return miss("head-count", node, wanted, found)
    quantised = recognise_quantised_linear(plain.source, facts)
    if isinstance(quantised, QuantisedLinear) and not isinstance(quantised.rows, PerToken):
        return None  # another operator's
    rope = next(_rotations(plain.source, facts), None)
    if rope is None:
        return miss("rope-unrecognised", node, "a rotation of the query's other columns", "none")
    query = query_projection(plain, rope[1], facts, (product.factor, 1.0))
    if isinstance(query, Miss):
        return query
    key = _key_beside(query.down, facts)
    if isinstance(key, Miss):
        return key
    paths = join_projections(query, key[0], facts)
    if isinstance(paths, Miss):
        return paths
    turned = recognise_heads(without_scale(rope[1].x, facts)[0], facts)
    heads_first = not isinstance(turned, Miss) and turned.heads_first
    return AbsorbedQuery(paths, weight, node.outputs[0], order, rope[0], heads_first, key[1], key[2])


def _latent_label(weight: Labelled, query: str) -> str:
    return next((label for label in weight.labels if label not in query), "")


def key_weight(operand: Labelled, shared: str, facts: Facts) -> KeyWeight | None:
    """W_UK behind an operand of three axes.

    1. A constant of three axes.
    2. The first rows of every head of a constant (N * (D + Dv), Hckv) that is reshaped to (N, D + Dv, Hckv).
    """
    shape = facts.shape(operand.value)
    if shape is None or len(shape) != 3 or len(operand.labels) != 3 or not all(isinstance(dim, int) for dim in shape):
        return None
    sizes = [dim for dim in shape if isinstance(dim, int)]
    inner = operand.labels.index(shared)
    if stored_tensor(operand.value) is not None:
        # which of the other two axes counts heads is known where the product's labels are compared
        perm = (0, inner, 3 - inner) if inner != 0 else (1, 0, 2)
        return KeyWeight(None, operand.value, perm, sizes[perm[0]], sizes[inner])
    cut = recognise_slice(operand.value, facts)
    source = operand.value if cut is None else cut.source
    if cut is not None and (cut.axis != 1 or cut.start != 0 or cut.step != 1):
        return None
    reshape = facts.producer(source)
    whole = facts.shape(source)
    stored = facts.input(reshape, 0) if is_op(reshape, "Reshape") else None
    if stored is None or stored_tensor(stored) is None or facts.rank(stored) != 2 or whole is None or inner != 1:
        return None
    heads, width, rank = whole
    if facts.shape(stored) != (heads * width, rank) or not isinstance(heads, int):
        return None
    return KeyWeight(WeightView(stored, transposed=True), None, (0, 1, 2), heads, sizes[1])


def _rotations(source: ir.Value, facts: Facts) -> Iterator[tuple[ir.Value, Rope]]:
    """Rotated values whose features are columns of `source`."""
    for value in values_behind(source, facts):
        rope = recognise_rope(value, facts)
        heads = None if isinstance(rope, Miss) else recognise_heads(without_scale(rope.x, facts)[0], facts)
        if not isinstance(rope, Miss) and heads is not None and not isinstance(heads, Miss):
            cut = recognise_slice(heads.source, facts)
            if heads.source is source or (cut is not None and cut.source is source):
                yield value, rope


def _norms(source: ir.Value, facts: Facts) -> Iterator[tuple[ir.Value, RmsNorm]]:
    """Normed values whose features are columns of `source`."""
    for value in values_behind(source, facts):
        norm = recognise_rms_norm(value, facts)
        cut = None if isinstance(norm, Miss) else recognise_slice(norm.x, facts)
        if not isinstance(norm, Miss) and cut is not None and cut.source is source:
            yield value, norm


def _key_beside(query_down: Projection, facts: Facts) -> tuple[KeyProjection, ir.Value, ir.Value] | Miss:
    """The key projection of the hidden state that the query projection reads, with its normed and rotated rows."""
    for source in _projected(query_down, facts):
        normed = next(_norms(source, facts), None)
        rotated = next(_rotations(source, facts), None)
        if normed is not None and rotated is not None:
            key = key_projection(normed[1], rotated[1], facts)
            return key if isinstance(key, Miss) else (key, normed[0], rotated[0])
    return miss("latent-unrecognised", query_down.node, "a key projection of the same hidden state", "none")


def _projected(query_down: Projection, facts: Facts) -> Iterator[ir.Value]:
    """The results of the other projections of what `query_down` reads."""
    quantised = isinstance(query_down, QuantisedLinear)
    if quantised:
        readers = [value.producer() for value in values_behind(query_down.x, facts)]
    else:
        readers = [node for node, _ in facts.readers(query_down.x)]
    for node in dict.fromkeys(readers):
        if node is None or node is query_down.node:
            continue
        value = dequantised(node, facts) if quantised else node.outputs[0]
        if not isinstance(recognise_projection(value, facts), Miss):
            yield value
