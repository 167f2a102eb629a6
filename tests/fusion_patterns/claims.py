"""What the descriptions of `fusion_patterns.lift` claim, computed with numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_patterns.lift.attention import Attention
from fusion_patterns.lift.concat import Concat
from fusion_patterns.lift.contraction import Contraction
from fusion_patterns.lift.experts import GroupedProduct
from fusion_patterns.lift.floor_division import FloorDivision
from fusion_patterns.lift.heads import Cut, HeadView
from fusion_patterns.lift.latent_attention import CachedRows, LatentAttention
from fusion_patterns.lift.linear import Linear, WeightView
from fusion_patterns.lift.mask import CausalMask, EmptyRowGuard, Selection
from fusion_patterns.lift.permutation import Permutation, RowGather
from fusion_patterns.lift.permuted import Permuted
from fusion_patterns.lift.rms_norm import RmsNorm
from fusion_patterns.lift.rope import Angles, Rope, RopeLayout
from fusion_patterns.lift.slices import Sliced
from tests.fusion_patterns.graphs import Array, Run

Of = Callable[[ir.Value], Array]


@singledispatch
def claimed(description: Any, run: Run) -> Array:
    """The array that a description says its value holds."""
    raise TypeError(f"nothing is known of {type(description).__name__}")


@claimed.register
def _(description: Permuted, run: Run) -> Array:
    return run.of(description.base).transpose(description.perm)


@claimed.register
def _(description: Concat, run: Run) -> Array:
    joined = np.concatenate([run.of(part) for part in description.parts], description.axis)
    return joined.transpose(description.perm)


@claimed.register
def _(description: WeightView, run: Run) -> Array:
    weight = run.of(description.initializer)
    weight = weight.T if description.transposed else weight
    assert weight.shape == description.shape
    return weight


@claimed.register
def _(description: Linear, run: Run) -> Array:
    product = run.of(description.x) @ claimed(description.weight, run)
    return product if description.bias is None else product + run.of(description.bias)


@claimed.register
def _(description: RmsNorm, run: Run) -> Array:
    x = run.of(description.x).astype(np.float32)
    assert run.of(description.gamma).shape == (x.shape[-1],)
    scale = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(description.epsilon))
    return x * scale * run.of(description.gamma).astype(np.float32)


@claimed.register
def _(description: HeadView, run: Run) -> Array:
    source = run.of(description.source)
    batch, tokens = source.shape[0], source.shape[-2]
    heads = source.reshape(batch, tokens, description.heads, description.width)
    cut = heads[..., description.start : description.start + description.size]
    return cut.transpose(0, 2, 1, 3) if description.heads_first else cut


@claimed.register
def _(description: Cut, run: Run) -> Array:
    return run.of(description.source)[..., description.start : description.start + description.size]


@claimed.register
def _(description: Sliced, run: Run) -> Array:
    cut = [slice(None)] * run.of(description.source).ndim
    end = description.start + description.size * description.step
    cut[description.axis] = slice(description.start, end, description.step)
    return run.of(description.source)[tuple(cut)]


@claimed.register
def _(description: Angles, run: Run) -> Array:
    """Four axes: angles of three axes are for heads before tokens, as RotaryEmbedding has them."""
    angles = run.of(description.value)
    if angles.ndim == 5:
        assert angles.shape[-1] == 1
        return angles[..., 0]
    return angles[:, None] if angles.ndim == 3 else angles


@claimed.register
def _(description: Rope, run: Run) -> Array:
    x, cos, sin = run.of(description.x), claimed(description.cos, run), claimed(description.sin, run)
    if description.added_axis is not None:
        x = np.expand_dims(x, description.added_axis)
    half = x.shape[-1] // 2
    assert cos.shape[-1] == sin.shape[-1] == (half if description.half_width else 2 * half)
    if description.half_width:
        cos, sin = (np.concatenate([angles, angles], -1) for angles in (cos, sin))
    if description.input_layout is RopeLayout.INTERLEAVED:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    turned = [
        first * cos[..., :half] - second * sin[..., :half],
        second * cos[..., half:] + first * sin[..., half:],
    ]
    if description.output_layout is RopeLayout.HALF:
        return np.concatenate(turned, -1)
    return np.stack(turned, -1).reshape(x.shape)


def softmax(scores: Array) -> Array:
    with np.errstate(invalid="ignore"):  # rows that are hidden whole become NaN, as they do in ONNX
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


@claimed.register
def _(description: Contraction, run: Run) -> Array:
    """A broadcasting axis of an operand keeps no label of its own."""
    sides = [
        (
            run.of(side.value).squeeze(tuple(i for i, label in enumerate(side.labels) if label == "1")),
            side.labels.replace("1", ""),
        )
        for side in (description.left, description.right)
    ]
    assert "1" not in description.labels
    equation = f"{sides[0][1]},{sides[1][1]}->{description.labels}"
    return np.einsum(equation, sides[0][0], sides[1][0]) * np.float32(description.factor)


def attended(description: Attention, query: Array, key: Array, value: Array, run: Run) -> Array:
    """The weighted values in the order of the description's result, of queries, keys and values (B, N, .., ..)."""
    scores = query @ key.swapaxes(-1, -2) * np.float32(description.scale)
    if not description.heads_first:
        scores = scores.transpose(0, 2, 1, 3)
    if description.mask is not None:
        mask = run.of(description.mask)
        scores = scores + (np.where(mask, np.float32(0), -np.inf) if mask.dtype == np.bool_ else mask)
    if description.causal:
        later = np.triu(np.ones((query.shape[-2], key.shape[-2]), np.bool_), 1)
        scores = np.where(later if description.heads_first else later[:, None], -np.inf, scores)
    weights = softmax(scores)
    if description.empty_rows_zero:
        weights = np.where(np.isnan(weights), 0, weights)
    if description.heads_first:
        return weights @ value
    return (weights.transpose(0, 2, 1, 3) @ value).transpose(0, 2, 1, 3)


@claimed.register
def _(description: Attention, run: Run) -> Array:
    return attended(
        description, *(claimed(side, run) for side in (description.query, description.key, description.value)), run
    )


@claimed.register
def _(description: CausalMask, run: Run) -> Array:
    """Over queries and keys alone."""
    queries, keys = run.size(description.queries), run.size(description.keys)
    return np.arange(keys)[None] <= np.arange(queries)[:, None] + run.size(description.offset)


@claimed.register
def _(description: Selection, run: Run) -> Array:
    """The visible keys (B, 1, S, T). In the indices hidden keys must stand last, visible ones by falling score."""
    indices, scores = run.of(description.indices), run.of(description.scores)
    causal = np.broadcast_to(claimed(description.causal, run), scores.shape)
    selected = np.zeros(scores.shape, bool)
    np.put_along_axis(selected, indices, True, -1)
    hidden = ~np.take_along_axis(causal, indices, -1)
    assert np.array_equal(hidden, np.sort(hidden, -1))
    picked = np.where(hidden, -np.inf, np.take_along_axis(scores, indices, -1))
    assert np.array_equal(picked, -np.sort(-picked, -1))
    return (causal & selected)[:, None]


@claimed.register
def _(description: EmptyRowGuard, run: Run) -> Array:
    return np.where(run.of(description.visible).any(-1, keepdims=True), run.of(description.x), 0)


@claimed.register
def _(description: FloorDivision, run: Run) -> Array:
    return run.of(description.numerator) // description.divisor


@claimed.register
def _(description: Permutation, run: Run) -> Array:
    """The order; the flattened ids must be the keys and have `choices` columns, the sorted keys be sorted."""
    keys, ids = run.of(description.keys), run.of(description.ids)
    order = np.argsort(keys, kind="stable")
    assert ids.shape[-1] == description.choices
    assert np.array_equal(ids.reshape(-1), keys)
    assert np.array_equal(run.of(description.sorted_keys), keys[order])
    return order


@claimed.register
def _(description: RowGather, run: Run) -> Array:
    return run.of(description.source)[run.of(description.indices)]


@claimed.register
def _(description: GroupedProduct, run: Run) -> Array:
    rows, ends = run.of(description.rows), run.of(description.ends).reshape(-1)
    starts = [0, *ends[:-1]]
    assert len(description.weights) == len(ends)
    parts = []
    for weight, start, end in zip(description.weights, starts, ends, strict=True):
        matrix = run.of(weight.initializer)
        parts.append(rows[start:end] @ (matrix if weight.index is None else matrix[weight.index]))
    return np.concatenate(parts)


@claimed.register
def _(description: LatentAttention, run: Run) -> Array:
    """The weighted values, absorbed: scores and context in the latent space, from x and the caches alone."""
    attention, path = description.attention, description.key
    query, key, x = description.projections.query, description.projections.key, run.of(description.projections.x)
    batch, tokens = x.shape[:2]
    latent_size = key.norm.gamma.shape[0]
    down = x @ claimed(key.down.weight, run)
    close(run.of(key.norm.x).reshape(batch, tokens, -1), down[..., :latent_size])
    close(run.of(key.rope.x).reshape(batch, tokens, -1), down[..., latent_size:])
    latent = cached_rows(path.latent, claimed(key.norm, run), run)[:, None]
    rotated_keys = cached_rows(path.rotated, claimed(key.rope, run), run)[:, None]
    close(run.of(query.norm.x), x @ claimed(query.down.weight, run))
    close(run.of(query.up.x), claimed(query.norm, run))
    heads = (run.of(query.up.x) @ claimed(query.up.weight, run)).reshape(batch, tokens, query.heads, -1)
    nope = heads[..., : query.nope].transpose(0, 2, 1, 3)
    rotated = claimed(attention.query, run)[..., query.nope :]
    close(np.sort(rotated.reshape(-1)), np.sort(claimed(query.rope, run).reshape(-1)))
    expansion = claimed(path.expansion.weight, run).reshape(latent_size, path.heads, path.nope + path.value_size)
    to_keys, to_values = (
        part.transpose(1, 0, 2) for part in (expansion[..., : path.nope], expansion[..., path.nope :])
    )
    absorbed = np.concatenate([nope @ to_keys.swapaxes(-1, -2), rotated], -1)
    return attended(attention, absorbed, np.concatenate([latent, rotated_keys], -1), latent @ to_values, run)


def cached_rows(rows: CachedRows, computed: Array, run: Run) -> Array:
    """All rows (B, T, H) of a cache, whose new ones are what was computed."""
    everything = run.of(rows.all)
    batch, width = everything.shape[0], everything.shape[-1]
    new = run.of(rows.new).reshape(batch, -1, width)
    close(run.of(rows.computed).reshape(new.shape), computed.reshape(new.shape))
    close(new, computed.reshape(new.shape))
    past = [] if rows.past is None else [run.of(rows.past).reshape(batch, -1, width)]
    joined = np.concatenate([*past, new], 1)
    close(everything.reshape(joined.shape), joined)
    return joined


def close(actual: Array, expected: Array) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * max(1.0, float(np.abs(expected).max(initial=0))))


def assert_true(description: Any, value: ir.Value, run: Run, tolerance: float = 1e-4) -> None:
    """The claim of a description of `value` is what ONNX Runtime computed."""
    expected, actual = run.of(value), claimed(description, run)
    if isinstance(description, CausalMask):
        actual = np.broadcast_to(actual, expected.shape)
    if isinstance(description, Selection) and expected.dtype != np.bool_:
        expected = expected == 0  # an added mask
    if isinstance(description, Permutation):
        assert description.order is value
    assert actual.shape == expected.shape
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
    )
