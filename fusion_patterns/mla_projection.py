"""Projections of latent attention that is absorbed already -> MlaPrologV2WeightNz.

x -> q_a -> norm -> q_b -> nope x W_UK; rope      =>   x -> MlaPrologV2WeightNz -> query, query_rope
x -> kv_a -> norm, rope -> rows of the caches                                    -> rows of the caches

Whatever follows (attention in the latent space, writes into a slot cache) reads the same values as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fusion_patterns import weights
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match, Refused
from fusion_patterns.graph import Facts
from fusion_patterns.lift.absorbed_query import AbsorbedQuery, KeyWeight, recognise_absorbed_query
from fusion_patterns.miss import Miss
from fusion_patterns.prolog import Prolog, prolog_call, scratch_of, unfit
from fusion_patterns.prolog_scales import draws

__all__ = ["MlaProjection", "key_half_of"]


class MlaProjection:
    """See the module."""

    name = "mla_projection"
    operators = ("MlaPrologV2WeightNz",)
    anchors = ("Einsum", "MatMul")

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]:
        found = recognise_absorbed_query(node, facts)
        if found is None:
            return
        reason = found if isinstance(found, Miss) else unfit(found.projections, facts)
        if reason is not None:
            yield Refused(self.name, node, reason)
        elif not isinstance(found, Miss):
            yield _match(node, found, facts)


def _match(node: ir.Node, found: AbsorbedQuery, facts: Facts) -> Match:
    paths = found.projections

    def shape_of(emitter: Emitter, reader: ir.Node) -> ir.Value | None:
        return scratch_of(emitter, paths.x, facts).shape_of(emitter, reader, None, facts)

    return Match(
        MlaProjection.name,
        node,
        (prolog_call(paths),),
        (found.query, found.query_rope, found.latent, found.rotated),
        paths.boundary(),
        lambda emitter: _emit(emitter, found, facts),
        absorbed=paths.absorbed(),
        shape_of=shape_of,
        draws=draws(paths),
    )


def _emit(emit: Emitter, found: AbsorbedQuery, facts: Facts) -> dict[ir.Value, ir.Value]:
    prolog = Prolog.emit(emit, found.projections, key_half_of(emit, found.weight), facts)
    rope_order = (0, 2, 1, 3) if found.rope_heads_first else (0, 1, 2, 3)
    return {
        found.query: _ordered(emit, prolog.query, found.order),
        found.query_rope: _ordered(emit, prolog.query_rope, rope_order),
        found.latent: prolog.scratch.shaped(emit, prolog.latent_rows, found.latent, facts),
        found.rotated: prolog.scratch.shaped(emit, prolog.rotated_rows, found.rotated, facts),
    }


def key_half_of(emit: Emitter, weight: KeyWeight) -> ir.Value:
    """W_UK (N, D, Hckv) as the operators take it."""
    if weight.kv_b is not None:
        return weights.key_half(emit, weight.kv_b, weight.heads, weight.nope)
    assert weight.stored is not None  # a weight is one or the other
    return weights.permuted(emit, weight.stored, weight.perm)


def _ordered(emit: Emitter, value: ir.Value, order: tuple[int, ...]) -> ir.Value:
    if order == tuple(range(len(order))):
        return value
    dims = list(value.shape or ())
    return emit.op("Transpose", value, perm=list(order), shape=[dims[axis] for axis in order])
