"""Multi-head latent attention -> MlaPrologV2WeightNz -> attention in the latent space.

x -> q_a -> norm -> q_b -> rope                          x -> MlaPrologV2WeightNz -> query, query_rope
x -> kv_a -> norm, rope -> cache -> kv_b -> attention     =>   -> new rows -> cache -> latent attention -> W_UV

New rows are appended to the caches of the graph where the old graph appended them. kv_b is absorbed: its key half
multiplies the query inside the operator, its value half the weighted latents, so keys and values are never expanded.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fusion_patterns import weights
from fusion_patterns.absorbed_attention import (
    LatentQuery,
    Tokens,
    expand_values,
    latent_attention,
    scaled_query,
)
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import LatentCache, Match, Refused
from fusion_patterns.graph import Facts
from fusion_patterns.lift.attention import recognise_attention
from fusion_patterns.lift.latent_attention import LatentAttention, recognise_latent_attention
from fusion_patterns.lift.selected_attention import recognise_selected_attention
from fusion_patterns.miss import Miss, miss
from fusion_patterns.prolog import LATENT, ROPE, Prolog, prolog_call, scratch_of, unfit
from fusion_patterns.prolog_scales import draws
from fusion_patterns.sparse_flash_attention import NAME as SPARSE
from fusion_patterns.sparse_flash_attention import SparseAttention, recognise_sparse_attention

__all__ = ["MlaProlog"]


class MlaProlog:
    """See the module."""

    name = "mla_prolog"
    operators = ("MlaPrologV2WeightNz", "SparseFlashAttention")
    anchors = ("Softmax", "Attention")

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]:
        """A Match, and a Miss for a selection that stays a mask; or the Miss of the whole layer."""
        if recognise_selected_attention(node, facts) is not None:
            return  # another fusion's candidate
        attention = recognise_attention(node, facts)
        if attention is None:
            return
        layer = attention if isinstance(attention, Miss) else recognise_latent_attention(attention, facts)
        reason = layer if isinstance(layer, Miss) else _unfit(layer, facts)
        if reason is not None:
            yield Refused(self.name, node, reason)
            return
        assert not isinstance(layer, Miss)  # that would have been the reason
        sparse = recognise_sparse_attention(layer, facts)
        if isinstance(sparse, SparseAttention) and facts.only is not None:
            sparse = miss(
                "not-requested", node, f"{facts.only} alone", "SparseFlashAttention behind MlaPrologV2WeightNz"
            )
        if isinstance(sparse, Miss):
            yield Refused(SPARSE, node, sparse)
            sparse = None
        if facts.only not in (None, "MlaPrologV2WeightNz"):
            return
        yield _match(layer, sparse, facts)


def _unfit(layer: LatentAttention, facts: Facts) -> Miss | None:
    """What about a recognised layer keeps it from being fused."""
    key, mask = layer.key, layer.attention.mask
    if (key.latent.past is None) != (key.rotated.past is None):
        return miss("cache-mismatch", layer.attention.node, "both parts cached or none", "one cached")
    if mask is not None and (facts.rank(mask) is None or (facts.rank(mask) or 0) > 4):
        return miss("mask-unrecognised", mask, "at most four axes", f"{facts.rank(mask)} axes")
    return unfit(layer.projections, facts)


def _match(layer: LatentAttention, sparse: SparseAttention | None, facts: Facts) -> Match:
    attention, key, paths = layer.attention, layer.key, layer.projections
    boundary = paths.boundary()
    if layer.token_scale is not None:
        boundary[layer.token_scale.base] = None
    boundary.update({rows.past: None for rows in (key.latent, key.rotated) if rows.past is not None})
    if sparse is not None:
        boundary[sparse.selection.scores] = None
    elif attention.mask is not None:
        boundary[attention.mask] = None
    itemsize = int(paths.x.dtype.itemsize) if paths.x.dtype else 0
    per_head = paths.query.heads * (paths.query.nope + ROPE + key.value_size)

    def shape_of(emitter: Emitter, node: ir.Node) -> ir.Value | None:
        return scratch_of(emitter, paths.x, facts).shape_of(emitter, node, key.latent.all, facts)

    return Match(
        MlaProlog.name,
        attention.node,
        (prolog_call(paths), *(() if sparse is None else (sparse.call(layer),))),
        (sparse.out if sparse is not None else attention.out, key.latent.new, key.rotated.new),
        boundary,
        lambda emitter: _emit(emitter, layer, sparse, facts),
        absorbed=(*paths.absorbed(), key.expansion.node.outputs[0], attention.node.outputs[0]),
        assumed=() if sparse is None else sparse.assumed,
        shape_of=shape_of,
        draws=draws(paths),
        cache=LatentCache((LATENT + ROPE) * itemsize, per_head * itemsize),
    )


def _emit(
    emit: Emitter, layer: LatentAttention, sparse: SparseAttention | None, facts: Facts
) -> dict[ir.Value, ir.Value]:
    attention, key, paths = layer.attention, layer.key, layer.projections
    halves = key.expansion.weight, paths.query.heads, paths.query.nope
    weight_uk, weight_uv = weights.key_half(emit, *halves), weights.value_half(emit, *halves)
    prolog = Prolog.emit(emit, paths, weight_uk, facts)
    scratch = prolog.scratch
    new_latent = scratch.shaped(emit, prolog.latent_rows, key.latent.new, facts)
    new_rotated = scratch.shaped(emit, prolog.rotated_rows, key.rotated.new, facts)
    latent = new_latent if key.latent.past is None else key.latent.all
    rotated = new_rotated if key.rotated.past is None else key.rotated.all
    total = facts.dim(key.latent.all, -2)
    length = total if total is not None else ir.SymbolicDim(None)
    tokens = Tokens(scratch.b, scratch.s, paths.query.heads, length, scratch.batch, scratch.length)
    query = LatentQuery(prolog.query, prolog.query_rope)
    if layer.token_scale is not None:
        query = scaled_query(emit, query, layer.token_scale)
    if sparse is not None:
        context = sparse.emit(emit, query, latent, rotated, attention.scale)
    else:
        context = latent_attention(emit, tokens, query, latent, rotated, attention)
    return {
        sparse.out if sparse is not None else attention.out: expand_values(
            emit, tokens, context, weight_uv, heads_first=attention.heads_first
        ),
        key.latent.new: new_latent,
        key.rotated.new: new_rotated,
    }
