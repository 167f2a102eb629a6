"""The projections of multi-head latent attention: hidden state to low-rank query, latent and rotated key.

x -> Linear -> RmsNorm -> Linear -> heads [nope | rope] -> Rope
x -> Linear [latent | rope] -> RmsNorm, Rope

Constant factors may be anywhere behind the norms, as models have them that scale their low-rank projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts
from fusion_patterns.lift.duplicates import common_sources
from fusion_patterns.lift.heads import HeadView, recognise_heads, recognise_split
from fusion_patterns.lift.linear import Linear, recognise_linear
from fusion_patterns.lift.quantised import PerToken, same_codes
from fusion_patterns.lift.quantised_linear import INTEGER_PRODUCT, QuantisedLinear, recognise_quantised_linear
from fusion_patterns.lift.rms_norm import RmsNorm, recognise_rms_norm
from fusion_patterns.lift.rope import Rope
from fusion_patterns.lift.scale import without_scale
from fusion_patterns.miss import Miss, miss

__all__ = [
    "KeyProjection",
    "Projection",
    "Projections",
    "QueryProjection",
    "join_projections",
    "key_projection",
    "query_projection",
    "recognise_projection",
]

Projection = Linear | QuantisedLinear
"""A projection by a floating weight, or by an int8 one of rows that are quantised token by token."""


@dataclass(frozen=True)
class QueryProjection:
    """x -> down -> norm -> up -> heads of [nope | rope], the last part rotated.

    The parts are then multiplied by `nope_scale` and `rope_scale`.
    """

    down: Projection
    norm: RmsNorm
    up: Projection
    rope: Rope
    heads: int
    nope: int
    nope_scale: float = 1.0
    rope_scale: float = 1.0


@dataclass(frozen=True)
class KeyProjection:
    """x -> down [latent | rope]; the first part normed and multiplied by `latent_scale`, the last part rotated."""

    down: Projection
    norm: RmsNorm
    rope: Rope
    latent_scale: float = 1.0


@dataclass(frozen=True)
class Projections:
    """Both projections of one hidden state x (B, S, He).

    `angles` are the values that cos and sin are computed from: themselves where both rotations read the same ones.
    """

    query: QueryProjection
    key: KeyProjection
    angles: tuple[ir.Value, ...]

    @property
    def x(self) -> ir.Value:
        return self.query.down.x

    def boundary(self) -> dict[ir.Value, str | None]:
        """The values that the projections start from."""
        return {self.x: None, **dict.fromkeys(self.angles)}

    def absorbed(self) -> tuple[ir.Value, ...]:
        """The values that the operator computes inside."""
        linears = (self.query.down, self.query.up, self.key.down)
        return (self.query.up.x, *(linear.node.outputs[0] for linear in linears))


def recognise_projection(value: ir.Value, facts: Facts) -> Projection | Miss:
    """The projection that computes a value."""
    linear = recognise_linear(value, facts)
    quantised = recognise_quantised_linear(value, facts) if isinstance(linear, Miss) else linear
    if isinstance(quantised, Miss):
        return linear if quantised.expected == INTEGER_PRODUCT else quantised
    if isinstance(quantised, QuantisedLinear):
        if not isinstance(quantised.rows, PerToken):
            return miss(
                "quantisation-unsupported", quantised.node, "rows quantised token by token", "one scale for all"
            )
        if quantised.product.shift:
            return miss("quantisation-unsupported", quantised.node, "no zero point", f"{quantised.product.shift}")
    return quantised


def join_projections(query: QueryProjection, key: KeyProjection, facts: Facts) -> Projections | Miss:
    """Both projections together, when they start from one hidden state and rotate by the same angles."""
    if query.down.x is not key.down.x:
        return miss("hidden-differs", key.down.node, "the hidden state of the query projection", "another value")
    reason = _mixed_types(query, key)
    if reason is not None:
        return reason
    cos = common_sources(query.rope.cos.value, key.rope.cos.value, facts)
    sin = common_sources(query.rope.sin.value, key.rope.sin.value, facts)
    if cos is None or sin is None:
        return miss("rope-differs", key.rope.node, "the cos and sin of the query", "others")
    return Projections(query, key, (*cos, *sin))


def _mixed_types(query: QueryProjection, key: KeyProjection) -> Miss | None:
    """Down projections are both by int8 weights of the same rows, or none is; they imply an int8 up projection."""
    downs = [down for down in (query.down, key.down) if isinstance(down, QuantisedLinear)]
    if len(downs) == 1 or (downs and not same_codes(downs[0].rows, downs[1].rows)):
        return miss(
            "quantisation-differs", key.down.node, "the rows of the query projection, quantised alike", "others"
        )
    if downs and not isinstance(query.up, QuantisedLinear):
        wanted = "an int8 up projection behind int8 down projections"
        return miss("quantisation-unsupported", query.up.node, wanted, "a floating one")
    return None


def query_projection(
    plain: HeadView, rope: Rope, facts: Facts, scales: tuple[float, float] = (1.0, 1.0)
) -> QueryProjection | Miss:
    """The low-rank projection behind the unrotated heads `plain` and a rotation of the columns after them.

    `scales` are those of the unrotated heads and of the result of the rotation.
    """
    x, scale_before = without_scale(rope.x, facts)
    rotated = recognise_heads(x, facts)
    if isinstance(rotated, Miss):
        return rotated
    head_axis = 1 if rotated.heads_first else 2
    fits = (
        rotated.source is plain.source
        and (rotated.heads, rotated.width) == (plain.heads, plain.width)
        and rope.cos.fits(head_axis)
        and rope.sin.fits(head_axis)
        and (plain.start, rotated.start, rotated.size) == (0, plain.size, plain.width - plain.size)
    )
    if not fits:
        return miss(
            "query-unrecognised",
            rope.node,
            "[nope | rope] columns of one projection per head, and no others",
            _columns(plain, rotated),
        )
    up, shared = recognise_projection(plain.source, facts), 1.0
    if isinstance(up, Miss):
        source, shared = without_scale(plain.source, facts)
        up = up if source is plain.source else recognise_projection(source, facts)
    if isinstance(up, Miss):
        return up
    normed, scale_of_norm = without_scale(up.x, facts)
    norm = recognise_rms_norm(normed, facts)
    if isinstance(norm, Miss):
        expected = "a low-rank query projection: down projection, RMS norm, up projection (q_a, q_a_layernorm, q_b)"
        return miss("no-query-low-rank", up.node, expected, "a projection of the hidden state itself")
    down = recognise_projection(norm.x, facts)
    if isinstance(down, Miss):
        return miss("no-query-low-rank", norm.node, "a down projection before the norm", down.got)
    for linear in (up, down):
        if linear.bias is not None:
            return miss("bias", linear.node, "a query projection without bias", "a bias")
    shared *= scale_of_norm
    nope_scale, rope_scale = shared * scales[0], shared * scale_before * scales[1]
    return QueryProjection(down, norm, up, rope, plain.heads, plain.size, nope_scale, rope_scale)


def _columns(plain: HeadView, rotated: HeadView) -> str:
    if rotated.source is not plain.source:
        return "columns of two values"
    nope, rope = (f"{view.start} to {view.start + view.size}" for view in (plain, rotated))
    return f"{nope} and {rope} of {plain.width}"


def key_projection(norm: RmsNorm, rope: Rope, facts: Facts, latent_scale: float = 1.0) -> KeyProjection | Miss:
    """The down projection whose first columns are normed, then scaled, and whose last ones are rotated."""
    unrotated = _rope_head(rope, facts)
    if isinstance(unrotated, Miss):
        return miss("key-rope-unrecognised", rope.x, "one rope head cut from the down projection", unrotated.got)
    first, last = recognise_split(norm.x, facts), recognise_split(unrotated.source, facts)
    if first is None or last is None or first.source is not last.source:
        return miss("latent-unrecognised", norm.node, "[latent | rope] columns of one down projection", "other values")
    down = recognise_projection(first.source, facts)
    if isinstance(down, Miss):
        return miss("latent-unrecognised", first.source, "a down projection", down.got)
    if down.bias is not None:
        return miss("bias", down.node, "a down projection without bias", "a bias")
    columns, total = (first.start, first.size, last.start, last.size), down.weight.shape[1]
    if columns != (0, first.size, first.size, unrotated.size) or first.size + unrotated.size != total:
        return miss("split-sizes", down.node, "columns [latent | rope] and no others", f"cuts {columns} of {total}")
    if unrotated.heads != 1:
        return miss("latent-unrecognised", rope.x, "one rope head for all queries", f"{unrotated.heads} heads")
    head_axis = 1 if unrotated.heads_first else 2
    if not (rope.cos.fits(head_axis) and rope.sin.fits(head_axis)):
        return miss("rope-unrecognised", rope.node, "angles broadcast over the head axis", f"axes {rope.cos.head_axes}")
    return KeyProjection(down, norm, rope, latent_scale)


def _rope_head(rope: Rope, facts: Facts) -> HeadView | Miss:
    """The heads that are rotated; rows (B, S, D) to which the rotation adds the head axis are one head."""
    width = facts.size(rope.x, -1)
    if rope.added_axis is None or width is None:
        return recognise_heads(rope.x, facts)
    return HeadView(facts.plain(rope.x), 1, width, 0, width, heads_first=rope.added_axis == 1)
