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
from fusion_patterns.lift.heads import recognise_heads
from fusion_patterns.lift.linear import Linear, recognise_linear
from fusion_patterns.lift.permuted import Permuted
from fusion_patterns.lift.projections import (
    KeyProjection,
    Projections,
    QueryProjection,
    join_projections,
    key_projection,
    query_projection,
)
from fusion_patterns.lift.rms_norm import recognise_rms_norm
from fusion_patterns.lift.rope import recognise_rope, recognise_rope_of
from fusion_patterns.lift.scale import without_scale
from fusion_patterns.miss import Miss, miss

__all__ = ["CachedRows", "LatentAttention", "recognise_latent_attention"]


@dataclass(frozen=True)
class CachedRows:
    """Rows of a cache (B, 1, T, H) or (B, T, H): `all` = Concat(past, new) along the tokens, or the new rows alone.

    `new` is (B, 1, S, H), (B, S, 1, H) or (B, S, H); `computed` is what it was reshaped from, as it was computed.
    """

    all: ir.Value
    past: ir.Value | None
    new: ir.Value
    computed: ir.Value


@dataclass(frozen=True)
class KeyPath:
    """The rows of keys, each behind its cache, and their expansion to heads of [key | value]."""

    latent: CachedRows
    rotated: CachedRows
    expansion: Linear
    heads: int
    nope: int
    value_size: int


@dataclass(frozen=True)
class LatentAttention:
    """A whole attention layer from the hidden state x (B, S, He) to the weighted values (B, N, S, Dv).

    A permutation of `token_scale` to (B or 1, 1, S, 1) multiplies the whole queries, one number a token; None: nothing.
    """

    attention: Attention
    projections: Projections
    key: KeyPath
    token_scale: Permuted | None = None


def recognise_latent_attention(attention: Attention, facts: Facts) -> LatentAttention | Miss:
    """Latent attention around a recognised softmax attention, or the first thing about it that does not fit."""
    keys = _two_parts(attention.key, facts)
    if isinstance(keys, Miss) and _is_expanded_cache(attention.key, facts):
        expected = "a cache of latents: absorbing what is already expanded in the cache saves nothing"
        return miss("expanded-cache", attention.key.base, expected, "cached keys per head")
    if isinstance(keys, Miss):
        return miss(
            "keys-not-latent", attention.key.base, "keys concatenated of an expanded and a rotated part", keys.got
        )
    path = _key_path(attention, keys, facts)
    if isinstance(path, Miss):
        return path
    key = _down_projection(path, facts)
    if isinstance(key, Miss):
        return key
    whole, token_scale = _without_token_scale(attention.query, facts)
    query = _query(whole, facts)
    if isinstance(query, Miss):
        return query
    paths = join_projections(query, key, facts)
    if isinstance(paths, Miss):
        return paths
    if (query.heads, query.nope) != (path.heads, path.nope):
        wanted, found = f"{query.heads} heads of {query.nope}", f"{path.heads} heads of {path.nope}"
        return miss("head-count", path.expansion.node, wanted, found)
    return LatentAttention(attention, paths, path, token_scale)


def _is_expanded_cache(side: Permuted, facts: Facts) -> bool:
    """Whether keys of several heads are past keys and new ones."""
    parts = recognise_concat(side.base, facts)
    return isinstance(parts, Concat) and parts.rank == 4 and parts.axis == 2 and facts.dim(parts.parts[0], 1) != 1


@dataclass(frozen=True)
class _Parts:
    """Two parts concatenated along the features, of heads before tokens or after them.

    `last` are the values that make up the second part: itself, or the two halves that were concatenated with the first.
    """

    first: ir.Value
    last: tuple[ir.Value, ...]
    heads_first: bool


def _two_parts(side: Permuted, facts: Facts) -> _Parts | Miss:
    parts = recognise_concat(side.base, facts)
    if isinstance(parts, Miss):
        return parts
    heads_first = _heads_first(tuple(parts.perm[axis] for axis in side.perm))
    if heads_first is None or parts.axis != 3 or len(parts.parts) not in (2, 3):
        return miss("query-unrecognised", side.base, "two parts along the last of four axes", "another concatenation")
    return _Parts(parts.parts[0], parts.parts[1:], heads_first)


def _heads_first(perm: tuple[int, ...]) -> bool | None:
    """Whether a value that `perm` makes (B, N, T, D) has its heads before its tokens; None for any other order."""
    return True if perm == (0, 1, 2, 3) else False if perm == (0, 2, 1, 3) else None


def _without_token_scale(query: Permuted, facts: Facts) -> tuple[Permuted, Permuted | None]:
    """(queries, scale) of queries times one number per token, which models take to flatten long contexts."""
    node = facts.producer(query.base)
    if is_op(node, "Mul"):
        for base, scale in facts.either_way(node):
            shape = facts.shape(scale)
            spread = not _all_same(facts.shape(base), facts.shape(query.base))
            if shape is None or len(shape) != 4 or spread:
                continue
            if shape[query.perm[1]] == 1 == shape[query.perm[3]]:
                return Permuted(base, query.perm), Permuted(scale, query.perm)
    return query, None


def _query(whole: Permuted, facts: Facts) -> QueryProjection | Miss:
    parts = _two_parts(whole, facts)
    if isinstance(parts, Miss):
        return miss("query-unrecognised", whole.base, "an unrotated and a rotated part per head", parts.got)
    unrotated, nope_scale = without_scale(parts.first, facts)
    turned, rope_scale = without_scale(parts.last[0], facts) if len(parts.last) == 1 else (parts.last[0], 1.0)
    plain = recognise_heads(unrotated, facts)
    rope = recognise_rope_of((turned, *parts.last[1:]), facts)
    if isinstance(plain, Miss):
        return plain
    if isinstance(rope, Miss):
        return rope
    rotated = recognise_heads(without_scale(rope.x, facts)[0], facts)
    if isinstance(rotated, Miss):
        return rotated
    if not plain.heads_first == rotated.heads_first == parts.heads_first:
        return miss("query-unrecognised", rope.node, "heads and tokens in one order", "two orders")
    return query_projection(plain, rope, facts, (nope_scale, rope_scale))


def _key_path(attention: Attention, keys: _Parts, facts: Facts) -> KeyPath | Miss:
    view, values = recognise_heads(keys.first, facts), recognise_heads(attention.value.base, facts)
    if isinstance(view, Miss) or view.heads_first != keys.heads_first:
        found = view.got if isinstance(view, Miss) else "heads and tokens exchanged"
        return miss("keys-not-latent", keys.first, "per-head keys expanded from a latent", found)
    if isinstance(values, Miss) or values.source is not view.source:
        found = values.got if isinstance(values, Miss) else "another source"
        return miss("value-not-latent", attention.value.base, "values of the expansion that makes the keys", found)
    columns = (view.start, values.start, view.size + values.size)
    if columns != (0, view.size, view.width) or values.heads_first != _heads_first(attention.value.perm):
        return miss("value-not-latent", attention.value.base, "[key | value] columns per head", "other columns")
    expansion = recognise_linear(view.source, facts)
    if isinstance(expansion, Miss):
        return miss("keys-not-latent", view.source, "an expansion of a latent by a constant matrix", expansion.got)
    if expansion.bias is not None:
        return miss("bias", expansion.node, "an expansion without bias", "a bias")
    if len(keys.last) != 1:
        return miss("keys-not-latent", attention.key.base, "one rotated part", f"{len(keys.last)} parts")
    latent = _cached(expansion.x, facts)
    rotated = _cached(_before_broadcast(keys.last[0], keys.heads_first, facts), facts)
    if isinstance(latent, Miss):
        return latent
    if isinstance(rotated, Miss):
        return rotated
    return KeyPath(latent, rotated, expansion, view.heads, view.size, values.size)


def _down_projection(path: KeyPath, facts: Facts) -> KeyProjection | Miss:
    latent, scale = _without_scales(path.latent.computed, facts)
    norm = recognise_rms_norm(latent, facts)
    if isinstance(norm, Miss):
        return miss("latent-unrecognised", path.latent.new, "an RMS norm of the down projection's first part", norm.got)
    rope = recognise_rope(path.rotated.computed, facts)
    return rope if isinstance(rope, Miss) else key_projection(norm, rope, facts, scale)


def _cached(value: ir.Value, facts: Facts) -> CachedRows | Miss:
    """Past and new rows of a value (B, 1, T, H) or (B, T, H)."""
    value = facts.plain(value)
    rank = facts.rank(value)
    if rank not in (3, 4) or (rank == 4 and facts.dim(value, 1) != 1):
        return miss("latent-unrecognised", value, "rows (B, 1, T, H) or (B, T, H)", f"shape {facts.shape(value)}")
    parts = recognise_concat(value, facts)
    past, new = None, value
    if isinstance(parts, Concat) and parts.axis == rank - 2 and parts.perm == tuple(range(rank)):
        if len(parts.parts) != 2:
            return miss("cache-mismatch", value, "past and new rows", f"{len(parts.parts)} parts")
        past, new = parts.parts
    return CachedRows(value, past, new, _without_unit_axis(new, facts))


def _without_scales(rows: ir.Value, facts: Facts) -> tuple[ir.Value, float]:
    """(computed rows, scale) of rows between whose reshapes there are constant factors."""
    scale = 1.0
    while True:
        below, factor = without_scale(rows, facts)
        below = _without_unit_axis(below, facts)
        if below is rows:
            return rows, scale
        rows, scale = below, scale * factor


def _without_unit_axis(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before Reshape, Squeeze and Unsqueeze that only add or drop one axis of size 1 before the last.

    Rotated rows keep four axes, normed rows three: both as they were computed.
    """
    current = facts.plain(value)
    while is_op(node := current.producer(), "Reshape", "Squeeze", "Unsqueeze"):
        source = facts.input(node, 0)
        if _without_ones(facts.shape(source)) != _without_ones(facts.shape(current)) or facts.rank(source) is None:
            break
        if facts.dim(source, -1) != facts.dim(current, -1):
            break
        current = source
    return current


def _all_same(left: tuple[Dimension, ...] | None, right: tuple[Dimension, ...] | None) -> bool:
    if left is None or right is None or len(left) != len(right):
        return False
    return all(same_dim(one, other) for one, other in zip(left, right, strict=True))


def _without_ones(shape: tuple[Dimension, ...] | None) -> list[Dimension] | None:
    return None if shape is None else [dim for dim in shape if dim != 1]


def _before_broadcast(value: ir.Value, heads_first: bool, facts: Facts) -> ir.Value:
    """(B, 1, T, H) or (B, T, H) of a value with one equal copy per head, which one Expand or several made of it."""
    source, head_axis = facts.plain(value), 1 if heads_first else 2
    while is_op(node := source.producer(), "Expand"):
        source = facts.input(node, 0)
    given, wide = facts.shape(source), facts.shape(value)
    if given is None or wide is None or len(given) != 4 or len(wide) != 4 or given[head_axis] != 1:
        return value
    if not all(same_dim(given[axis], wide[axis]) for axis in range(4) if axis != head_axis):
        return value
    added = facts.producer(source)
    if is_op(added, "Unsqueeze") and facts.integers(facts.input(added, 1)) in ([head_axis], [head_axis - 4]):
        return facts.input(added, 0)
    return source
