"""Attention in the latent space, with plain ONNX operators.

score = (q_nope W_UK . latent + q_rope . k_rope) * scale + mask;  out = (softmax(score) latent) W_UV
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.emit import Emitter
from fusion_patterns.graph import Dimension, static
from fusion_patterns.lift.attention import Attention
from fusion_patterns.lift.permuted import Permuted

__all__ = [
    "LatentQuery",
    "Tokens",
    "expand_values",
    "interleave",
    "latent_attention",
    "scaled_query",
    "without_head_axis",
]


@dataclass(frozen=True)
class Tokens:
    """The dimensions of one layer: B, S, N, T with T = cached plus new tokens; and the number of tokens at run time.

    `batch` and `length` are int64 vectors of one element holding B and S.
    """

    b: Dimension
    s: Dimension
    n: int
    t: Dimension
    batch: ir.Value
    length: ir.Value


@dataclass(frozen=True)
class LatentQuery:
    """`query` (B, S, N, 512) already multiplied by W_UK, `query_rope` (B, S, N, 64)."""

    query: ir.Value
    query_rope: ir.Value


def scaled_query(emit: Emitter, query: LatentQuery, scale: Permuted) -> LatentQuery:
    """The query times one number per token, which a permutation of `scale` yields as (B or 1, 1, S, 1)."""
    batch, head, token, feature = scale.perm
    order, dims = (batch, token, head, feature), _dims(scale.base)
    factor = scale.base
    if order != (0, 1, 2, 3):
        factor = emit.op("Transpose", factor, perm=list(order), shape=[dims[axis] for axis in order])
    parts = (query.query, query.query_rope)
    return LatentQuery(*(emit.op("Mul", part, factor, shape=_dims(part)) for part in parts))


def latent_attention(
    emit: Emitter,
    tokens: Tokens,
    q: LatentQuery,
    latent: ir.Value,
    rotated: ir.Value,
    attention: Attention,
) -> ir.Value:
    """The weighted latents (B, S, N, 512) of keys `latent` (B, 1, T, 512) or (B, T, 512) and `rotated`, 64 wide.

    All heads share their keys, so the heads of one token are rows of one product (B, S * N, T): no key is expanded.
    Softmax and what goes into it are float32, as the NPU computes them: a scale or a mask rounded to bfloat16 is not
    the one the original graph meant.
    """
    rows = _rows(emit, tokens)
    keys, rotated_keys = without_head_axis(emit, latent), without_head_axis(emit, rotated)
    scores = emit.op(
        "Add",
        _scores(emit, tokens, rows, q.query, keys),
        _scores(emit, tokens, rows, q.query_rope, rotated_keys),
        shape=(tokens.b, tokens.s * tokens.n, tokens.t),
    )
    scores = emit.cast(scores, ir.DataType.FLOAT)
    scores = emit.op("Mul", scores, emit.scalar(attention.scale, ir.DataType.FLOAT), shape=_dims(scores))
    if attention.mask is not None:
        scores = _masked(emit, tokens, scores, keys, attention.mask, attention.heads_first)
    if attention.causal:
        scores = _causal(emit, tokens, scores, keys)
    weights = emit.op("Softmax", scores, axis=-1, shape=_dims(scores))
    if attention.empty_rows_zero:
        empty = emit.op("IsNaN", weights, dtype=ir.DataType.BOOL, shape=_dims(weights))
        zero = emit.scalar(0.0, ir.DataType.FLOAT)
        weights = emit.op("Where", empty, zero, weights, dtype=ir.DataType.FLOAT, shape=_dims(weights))
    if len(_dims(scores)) == 4:
        flat = emit.op("Concat", rows, _length_of(emit, keys), axis=0, shape=[3])
        weights = emit.op("Reshape", weights, flat, shape=(tokens.b, tokens.s * tokens.n, tokens.t))
    weights = emit.cast(weights, keys.dtype or ir.DataType.FLOAT)
    width = _dims(keys)[2]
    context = emit.op("MatMul", weights, keys, shape=(tokens.b, tokens.s * tokens.n, width))
    return emit.op(
        "Reshape", context, emit.op("Shape", q.query, dtype=ir.DataType.INT64, shape=[4]), shape=_dims(q.query)
    )


def _masked(
    emit: Emitter, tokens: Tokens, scores: ir.Value, keys: ir.Value, mask: ir.Value, heads_first: bool
) -> ir.Value:
    """Scores (B, S * N, T) as (B, S, N, T), plus the mask; a boolean one hides scores where it is False."""

    def build() -> ir.Value:
        ordered = _tokens_before_heads(emit, mask) if heads_first else mask
        return _added(emit, ordered) if ordered.dtype == ir.DataType.BOOL else emit.cast(ordered, ir.DataType.FLOAT)

    per_head = _per_head(emit, tokens, scores, keys)
    return emit.op("Add", per_head, emit.shared(("mask", mask, heads_first), build), shape=_dims(per_head))


def _causal(emit: Emitter, tokens: Tokens, scores: ir.Value, keys: ir.Value) -> ir.Value:
    """Scores as (B, S, N, T), those of keys j > i hidden from query i."""

    def build() -> ir.Value:
        queries = _positions(emit, tokens.length, tokens.s)
        positions = _positions(emit, _length_of(emit, keys), tokens.t)
        rows = emit.op("Unsqueeze", queries, emit.integers([1, 2]), shape=(tokens.s, 1, 1))
        dims = (tokens.s, 1, tokens.t)
        return _added(emit, emit.op("GreaterOrEqual", rows, positions, dtype=ir.DataType.BOOL, shape=dims))

    per_head = _per_head(emit, tokens, scores, keys)
    named = isinstance(tokens.t, int) or tokens.t.value is not None
    key = ("causal mask", tokens.length, str(tokens.t) if named else keys)
    return emit.op("Add", per_head, emit.shared(key, build), shape=_dims(per_head))


def _positions(emit: Emitter, count: ir.Value, size: Dimension) -> ir.Value:
    """0, 1, .. below a vector of one number."""
    limit = emit.op("Squeeze", count, shape=[])
    return emit.op("Range", emit.integers(0), limit, emit.integers(1), shape=[size])


def _added(emit: Emitter, visible: ir.Value) -> ir.Value:
    """A boolean mask as one that is added to scores."""
    nothing, hidden = (emit.scalar(number, ir.DataType.FLOAT) for number in (0.0, float("-inf")))
    return emit.op("Where", visible, nothing, hidden, dtype=ir.DataType.FLOAT, shape=_dims(visible))


def _per_head(emit: Emitter, tokens: Tokens, scores: ir.Value, keys: ir.Value) -> ir.Value:
    """Scores (B, S * N, T) as (B, S, N, T); as they are where they lie so."""
    if len(_dims(scores)) == 4:
        return scores
    target = emit.op(
        "Concat", tokens.batch, tokens.length, emit.integers([tokens.n]), _length_of(emit, keys), axis=0, shape=[4]
    )
    return emit.op("Reshape", scores, target, shape=(tokens.b, tokens.s, tokens.n, tokens.t))


def expand_values(
    emit: Emitter, tokens: Tokens, context: ir.Value, weight_uv: ir.Value, *, heads_first: bool
) -> ir.Value:
    """(B, N, S, Dv) or (B, S, N, Dv): `context` (B, S, N, 512) through W_UV (N, 512, Dv), one product per head."""
    b, s, n = tokens.b, tokens.s, tokens.n
    _, rank, size = static(weight_uv.shape)
    per_head = emit.op("Transpose", context, perm=[2, 0, 1, 3], shape=(n, b, s, rank))
    rows = emit.op("Reshape", per_head, emit.integers([n, -1, rank]), shape=(n, b * s, rank))
    values = emit.op("MatMul", rows, weight_uv, shape=(n, b * s, size))
    target = emit.shared(
        ("per head", tokens.batch, tokens.length, n, size),
        lambda: emit.op(
            "Concat", emit.integers([n]), tokens.batch, tokens.length, emit.integers([size]), axis=0, shape=[4]
        ),
    )
    per_token = emit.op("Reshape", values, target, shape=(n, b, s, size))
    if heads_first:
        return emit.op("Transpose", per_token, perm=[1, 0, 2, 3], shape=(b, n, s, size))
    return emit.op("Transpose", per_token, perm=[1, 2, 0, 3], shape=(b, s, n, size))


def _rows(emit: Emitter, tokens: Tokens) -> ir.Value:
    """[B, S * N], shared by all layers of these dimensions."""

    def build() -> ir.Value:
        heads = emit.op("Mul", tokens.length, emit.integers([tokens.n]), shape=[1])
        return emit.op("Concat", tokens.batch, heads, axis=0, shape=[2])

    value: ir.Value = emit.shared(("rows", tokens.batch, tokens.length, tokens.n), build)
    return value


def _scores(emit: Emitter, tokens: Tokens, rows: ir.Value, query: ir.Value, keys: ir.Value) -> ir.Value:
    """(B, S * N, T) products of a query (B, S, N, H) with keys (B, T, H)."""
    b, s, n, t = tokens.b, tokens.s, tokens.n, tokens.t
    width = _dims(query)[3]
    assert isinstance(width, int)  # the split sizes have been looked at
    target = emit.shared(
        ("query rows", rows, width),
        lambda: emit.op("Concat", rows, emit.integers([width]), axis=0, shape=[3]),
    )
    flat = emit.op("Reshape", query, target, shape=(b, s * n, width))
    if s == 1:
        # Few rows of queries: keys are read once, row by row, which a product with transposed keys does not do.
        turned = emit.op("Transpose", flat, perm=[0, 2, 1], shape=(b, width, n))
        return emit.op("Transpose", emit.op("MatMul", keys, turned, shape=(b, t, n)), perm=[0, 2, 1], shape=(b, n, t))
    turned = emit.op("Transpose", keys, perm=[0, 2, 1], shape=(b, width, t))
    return emit.op("MatMul", flat, turned, shape=(b, s * n, t))


def _length_of(emit: Emitter, keys: ir.Value) -> ir.Value:
    """[T] of keys (B, T, H), which a Reshape could not infer where the batch is empty."""

    def build() -> ir.Value:
        shape = emit.op("Shape", keys, dtype=ir.DataType.INT64, shape=[3])
        return emit.op("Slice", shape, emit.integers([1]), emit.integers([2]), shape=[1])

    value: ir.Value = emit.shared(("length", keys), build)
    return value


def _tokens_before_heads(emit: Emitter, mask: ir.Value) -> ir.Value:
    """A mask that broadcasts to (B, N, S, T) as one that broadcasts to (B, S, N, T); shared by all its readers."""

    def build() -> ir.Value:
        dims = _dims(mask)
        missing = list(range(4 - len(dims)))
        whole = mask
        if missing:
            dims = (*[1 for _ in missing], *dims)
            whole = emit.op("Unsqueeze", mask, emit.integers(missing), shape=dims)
        return emit.op("Transpose", whole, perm=[0, 2, 1, 3], shape=(dims[0], dims[2], dims[1], dims[3]))

    value: ir.Value = emit.shared(("tokens first", mask), build)
    return value


def _dims(value: ir.Value) -> tuple[Dimension, ...]:
    assert value.shape is not None  # matched values have a rank, emitted ones a shape
    return tuple(value.shape)


def without_head_axis(emit: Emitter, rows: ir.Value) -> ir.Value:
    """(B, T, H) of (B, 1, T, H); as it is where it has no head axis."""
    dims = _dims(rows)
    return rows if len(dims) == 3 else emit.op("Squeeze", rows, emit.integers([1]), shape=(dims[0], *dims[2:]))


def interleave(emit: Emitter, rotated: ir.Value) -> ir.Value:
    """Rotated features (.., D) in half order, put next to each other in pairs."""
    dims = _dims(rotated)
    width = dims[-1]
    assert isinstance(width, int)  # the split sizes have been looked at
    keep = [0] * (len(dims) - 1)
    halves = emit.op("Reshape", rotated, emit.integers([*keep, 2, width // 2]), shape=(*dims[:-1], 2, width // 2))
    perm = [*range(len(keep)), len(keep) + 1, len(keep)]
    pairs = emit.op("Transpose", halves, perm=perm, shape=(*dims[:-1], width // 2, 2))
    return emit.op("Reshape", pairs, emit.integers([*keep, width]), shape=dims)
