"""Multi-head latent attention with expanded keys and values, as Hugging Face's DeepSeek models compute it.

x -> Linear -> RmsNorm -> Linear -> heads [nope | rope] -> Rope ----------------------------> query
x -> Linear [latent | rope] -> RmsNorm -> (cache) -> Linear -> heads [nope | value] --------> keys, values
                            -> Rope    -> (cache) -> all heads -----------------------------> keys
softmax(query keys^T * scale + mask) values
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, is_op, same_dim
from fusion_patterns.lift.attention import Attention
from fusion_patterns.lift.concat import Concat, recognise_concat
from fusion_patterns.lift.heads import HeadView, recognise_heads, recognise_split
from fusion_patterns.lift.linear import Linear, recognise_linear
from fusion_patterns.lift.rms_norm import RmsNorm, recognise_rms_norm
from fusion_patterns.lift.rope import Rope, recognise_rope
from fusion_patterns.miss import Miss, miss

__all__ = ["CachedRows", "LatentAttention", "recognise_latent_attention"]


@dataclass(frozen=True)
class CachedRows:
    """Rows of a cache (B, 1, T, H): `all` = Concat(past, new) along the tokens, or the new rows alone."""

    all: ir.Value
    past: ir.Value | None
    new: ir.Value


@dataclass(frozen=True)
class QueryPath:
    """x -> down -> norm -> up -> heads of [nope | rope]."""

    down: Linear
    norm: RmsNorm
    up: Linear
    normed: ir.Value
    rope: Rope
    heads: int
    nope: int


@dataclass(frozen=True)
class KeyPath:
    """x -> down [latent | rope]; the normed latent and the rotated rest, each behind its cache; the expansion."""

    down: Linear
    norm: RmsNorm
    rope: Rope
    latent: CachedRows
    rotated: CachedRows
    expansion: Linear
    heads: int
    nope: int
    value_size: int


@dataclass(frozen=True)
class LatentAttention:
    """A whole attention layer from the hidden state x (B, S, He) to the weighted values (B, N, S, Dv)."""

    attention: Attention
    query: QueryPath
    key: KeyPath

    @property
    def x(self) -> ir.Value:
        return self.query.down.x


def recognise_latent_attention(attention: Attention, facts: Facts) -> LatentAttention | Miss:
    """Latent attention around a recognised softmax attention, or the first thing about it that does not fit."""
    keys = recognise_concat(attention.key.base, facts)
    if isinstance(keys, Miss) or _composed(keys.perm, attention.key.perm) != (0, 1, 3, 2) or keys.axis != 3:
        found = keys.got if isinstance(keys, Miss) else "another layout"
        return miss(
            "keys-not-latent", attention.key.base, "keys concatenated from an expanded and a rotated part", found
        )
    if len(keys.parts) != 2:
        return miss("keys-not-latent", attention.key.base, "two parts of the keys", f"{len(keys.parts)}")
    key = _key_path(attention, keys.parts[0], keys.parts[1], facts)
    if isinstance(key, Miss):
        return key
    query = _query_path(attention, facts)
    if isinstance(query, Miss):
        return query
    if query.down.x is not key.down.x:
        return miss("hidden-differs", key.down.node, "the hidden state of the query projection", "another value")
    if (query.heads, query.nope) != (key.heads, key.nope):
        wanted, found = f"{query.heads} heads of {query.nope}", f"{key.heads} heads of {key.nope}"
        return miss("head-count", key.expansion.node, wanted, found)
    if (query.rope.cos, query.rope.sin) != (key.rope.cos, key.rope.sin):
        return miss("rope-differs", key.rope.node, "the cos and sin of the query", "others")
    return LatentAttention(attention, query, key)


def _composed(inner: tuple[int, ...], outer: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(inner[axis] for axis in outer)


def _query_path(attention: Attention, facts: Facts) -> QueryPath | Miss:
    parts = recognise_concat(attention.query, facts)
    if isinstance(parts, Miss):
        return parts
    if len(parts.parts) != 2 or parts.axis != 3 or parts.perm != (0, 1, 2, 3):
        return miss("query-unrecognised", attention.query, "an unrotated and a rotated part per head", "another layout")
    plain = recognise_heads(parts.parts[0], facts)
    if isinstance(plain, Miss):
        return plain
    rope = recognise_rope(parts.parts[1], facts)
    if isinstance(rope, Miss):
        return rope
    rotated = recognise_heads(rope.x, facts)
    if isinstance(rotated, Miss):
        return rotated
    fits = (
        rotated.source is plain.source
        and (rotated.heads, rotated.width) == (plain.heads, plain.width)
        and plain.heads_first
        and rotated.heads_first
        and rope.head_axis == 1
        and (plain.start, rotated.start, rotated.size) == (0, plain.size, plain.width - plain.size)
    )
    if not fits:
        return miss(
            "query-unrecognised", rope.node, "[nope | rope] columns of one projection per head", "other columns"
        )
    return _low_rank_query(plain, rope, facts)


def _low_rank_query(plain: HeadView, rope: Rope, facts: Facts) -> QueryPath | Miss:
    up = recognise_linear(plain.source, facts)
    if isinstance(up, Miss):
        return up
    norm = recognise_rms_norm(up.x, facts)
    if isinstance(norm, Miss):
        expected = "a low-rank query projection: down projection, RMS norm, up projection (q_a, q_a_layernorm, q_b)"
        return miss("no-query-low-rank", up.node, expected, "a projection of the hidden state itself")
    down = recognise_linear(norm.x, facts)
    if isinstance(down, Miss):
        return miss("no-query-low-rank", norm.node, "a down projection before the norm", down.got)
    for linear in (up, down):
        if linear.bias is not None:
            return miss("bias", linear.node, "a query projection without bias", "a bias")
    return QueryPath(down, norm, up, up.x, rope, plain.heads, plain.size)


def _key_path(attention: Attention, plain: ir.Value, rotated: ir.Value, facts: Facts) -> KeyPath | Miss:
    view, values = recognise_heads(plain, facts), recognise_heads(attention.value, facts)
    if isinstance(view, Miss):
        return miss("keys-not-latent", plain, "per-head keys expanded from a latent", view.got)
    if isinstance(values, Miss) or values.source is not view.source or not (view.heads_first and values.heads_first):
        found = values.got if isinstance(values, Miss) else "another source"
        return miss("value-not-latent", attention.value, "values of the expansion that makes the keys", found)
    if (view.start, values.start, view.size + values.size) != (0, view.size, view.width):
        return miss("value-not-latent", attention.value, "[key | value] columns per head", "other columns")
    expansion = recognise_linear(view.source, facts)
    if isinstance(expansion, Miss):
        return miss("keys-not-latent", view.source, "an expansion of a latent by a constant matrix", expansion.got)
    if expansion.bias is not None:
        return miss("bias", expansion.node, "an expansion without bias", "a bias")
    latent = _cached(expansion.x, facts)
    turned = _cached(_before_broadcast(rotated, facts), facts)
    if isinstance(latent, Miss):
        return latent
    if isinstance(turned, Miss):
        return turned
    return _down_projection(view, values, expansion, latent, turned, facts)


def _down_projection(
    view: HeadView, values: HeadView, expansion: Linear, latent: CachedRows, rotated: CachedRows, facts: Facts
) -> KeyPath | Miss:
    normed = recognise_heads(latent.new, facts)
    norm = normed if isinstance(normed, Miss) else recognise_rms_norm(normed.source, facts)
    if isinstance(normed, Miss) or isinstance(norm, Miss):
        found = norm.got if isinstance(norm, Miss) else "other values"
        return miss("latent-unrecognised", latent.new, "an RMS norm of the down projection's first part", found)
    rope = recognise_rope(rotated.new, facts)
    if isinstance(rope, Miss):
        return rope
    unrotated = recognise_heads(rope.x, facts)
    if isinstance(unrotated, Miss):
        return miss("key-rope-unrecognised", rope.x, "one rope head cut from the down projection", unrotated.got)
    first, last = recognise_split(norm.x, facts), recognise_split(unrotated.source, facts)
    if first is None or last is None or first.source is not last.source:
        return miss("latent-unrecognised", norm.node, "[latent | rope] columns of one down projection", "other values")
    down = recognise_linear(first.source, facts)
    if isinstance(down, Miss):
        return miss("latent-unrecognised", first.source, "a down projection", down.got)
    if down.bias is not None:
        return miss("bias", down.node, "a down projection without bias", "a bias")
    columns = (first.start, first.size, last.start, last.size)
    total = down.weight.shape[1]
    if columns != (0, normed.size, normed.size, unrotated.size) or normed.size + unrotated.size != total:
        return miss("split-sizes", down.node, "columns [latent | rope] and no others", f"cuts {columns} of {total}")
    if (normed.heads, unrotated.heads) != (1, 1) or not (normed.heads_first and unrotated.heads_first):
        return miss("latent-unrecognised", latent.new, "one latent head", f"{normed.heads} heads")
    if rope.head_axis != 1:
        return miss("rope-unrecognised", rope.node, "angles broadcast over the head axis", f"axis {rope.head_axis}")
    return KeyPath(down, norm, rope, latent, rotated, expansion, view.heads, view.size, values.size)


def _cached(value: ir.Value, facts: Facts) -> CachedRows | Miss:
    """Past and new rows of a value (B, 1, T, H)."""
    if facts.rank(value) != 4 or facts.dim(value, 1) != 1:
        return miss("latent-unrecognised", value, "rows (B, 1, T, H)", f"shape {facts.shape(value)}")
    parts = recognise_concat(value, facts)
    if isinstance(parts, Concat) and parts.axis == 2 and parts.perm == (0, 1, 2, 3):
        if len(parts.parts) != 2:
            return miss("cache-mismatch", value, "past and new rows", f"{len(parts.parts)} parts")
        return CachedRows(value, parts.parts[0], parts.parts[1])
    return CachedRows(value, None, value)


def _before_broadcast(value: ir.Value, facts: Facts) -> ir.Value:
    """(B, 1, T, H) of a value (B, N, T, H) that Expand made of it."""
    node = facts.producer(value)
    if not is_op(node, "Expand"):
        return value
    source, given, wide = facts.input(node, 0), facts.shape(facts.input(node, 0)), facts.shape(value)
    if given is None or wide is None or len(given) != 4 or len(wide) != 4:
        return value
    same: list[tuple[Dimension, Dimension]] = [(given[axis], wide[axis]) for axis in (0, 2, 3)]
    return source if given[1] == 1 and all(same_dim(a, b) for a, b in same) else value
