"""What the descriptions of `fusion_patterns.lift` claim, computed with numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_patterns.lift.attention import Attention
from fusion_patterns.lift.concat import Concat
from fusion_patterns.lift.experts import GroupedProduct
from fusion_patterns.lift.floor_division import FloorDivision
from fusion_patterns.lift.heads import Cut, HeadView
from fusion_patterns.lift.latent_attention import LatentAttention
from fusion_patterns.lift.linear import Linear, WeightView
from fusion_patterns.lift.mask import CausalMask, EmptyRowGuard, Selection
from fusion_patterns.lift.permutation import Permutation, RowGather
from fusion_patterns.lift.permuted import Permuted
from fusion_patterns.lift.rms_norm import RmsNorm
from fusion_patterns.lift.rope import Rope, RopeLayout
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
def _(description: Rope, run: Run) -> Array:
    x, cos, sin = (run.of(v) for v in (description.x, description.cos, description.sin))
    half = x.shape[-1] // 2
    assert cos.shape[-1] == (half if description.half_width else 2 * half)
    cos, sin = (np.expand_dims(angles, description.head_axis) for angles in (cos, sin))
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
    assert description.output_layout is RopeLayout.HALF
    return np.concatenate(turned, -1)


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@claimed.register
def _(description: Attention, run: Run) -> Array:
    scores = run.of(description.query) @ claimed(description.key, run) * np.float32(description.scale)
    if description.mask is not None:
        scores = scores + run.of(description.mask)
    return softmax(scores) @ run.of(description.value)


@claimed.register
def _(description: CausalMask, run: Run) -> Array:
    """Over queries and keys alone."""
    queries, keys = run.size(description.queries), run.size(description.keys)
    return np.arange(keys)[None] <= np.arange(queries)[:, None] + run.size(description.offset)


@claimed.register
def _(description: Selection, run: Run) -> Array:
    """The visible keys (B, 1, S, T); the indices must put hidden keys behind visible ones, and those by falling score."""
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
    assert ids.shape[1] == description.choices
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
    """The weighted values, absorbed: scores and context in the latent space."""
    attention, query, key = description.attention, description.query, description.key
    x = run.of(description.x)
    batch, tokens = x.shape[:2]
    low_rank = run.of(query.normed)
    assert np.allclose(low_rank, claimed(query.norm, run), atol=1e-4)
    heads = (low_rank @ claimed(query.up.weight, run)).reshape(batch, tokens, query.heads, -1).transpose(0, 2, 1, 3)
    nope = heads[..., : query.nope]
    latent, rotated = run.of(key.latent.all), run.of(key.rotated.all)
    expansion = claimed(key.expansion.weight, run).reshape(-1, key.heads, key.nope + key.value_size).transpose(1, 0, 2)
    to_keys, to_values = expansion[..., : key.nope], expansion[..., key.nope :]
    scores = nope @ to_keys.transpose(0, 2, 1) @ latent.swapaxes(-1, -2)
    scores = scores + claimed(query.rope, run) @ rotated.swapaxes(-1, -2)
    scores = scores * np.float32(attention.scale)
    if attention.mask is not None:
        scores = scores + run.of(attention.mask)
    down = x @ claimed(key.down.weight, run)
    size = key.norm.gamma.shape[0]
    assert np.allclose(down[..., :size], run.of(key.norm.x), atol=1e-4)
    assert np.allclose(x @ claimed(query.down.weight, run), run.of(query.norm.x), atol=1e-4)
    assert np.allclose(down[:, None, :, size:], run.of(key.rope.x), atol=1e-4)
    for rows, new in ((key.latent, claimed(key.norm, run)[:, None]), (key.rotated, claimed(key.rope, run))):
        assert np.allclose(run.of(rows.new), new, atol=1e-4)
        past = [] if rows.past is None else [run.of(rows.past)]
        assert np.allclose(run.of(rows.all), np.concatenate([*past, run.of(rows.new)], 2), atol=1e-4)
    return softmax(scores) @ latent @ to_values


def assert_true(description: Any, value: ir.Value, run: Run, tolerance: float = 1e-4) -> None:
    """The claim of a description of `value` is what ONNX Runtime computed."""
    expected, actual = run.of(value), claimed(description, run)
    if isinstance(description, CausalMask):
        actual = np.broadcast_to(actual, expected.shape)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max(initial=0))))
