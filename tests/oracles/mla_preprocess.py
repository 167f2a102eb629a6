"""Oracle of MlaPreprocess: static int8 and floating weights, cache modes 0 to 3.

Source: aclnnMlaPreprocess, formulas and parameter table, corrected by the operator specification; the steps are
numbered as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numerics import Float64, quantise, rms_norm, round_to, widen
from .result import Array, Expected

__all__ = ["mla_preprocess", "tie_distance"]

EPSILON = 1e-6
"""Of all three norms, whatever the attribute says."""

JOINED, SPLIT, NZ_INT8, NZ = range(4)
"""The cache modes."""


def mla_preprocess(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Expected]:
    """Every output that the cache mode produces, by name; see the operator's inputs for names and shapes.

    `q_rope_out` and `kr_cache_out` are not there in cache mode 0, which joins them to the other two. A tensor of shape
    (0) counts as absent where the input is optional.
    """
    element = inputs["input"].dtype
    mode = attributes.get("cache_mode", JOINED)
    rope = inputs["cos"].shape[-1]
    latent = inputs["gamma_2"].size
    weight_uk = _weight_uk(inputs["wuk"])
    heads, nope, _ = weight_uk.shape

    # Steps 1 and 2: the way down. The columns are the latent, the key's rope lanes, the low-rank query.
    down = _first_projection(inputs, attributes)
    c_kv, k_rope, c_q = np.split(down, [latent, latent + rope], axis=-1)

    # Steps 3 and 4: the query's way up, and its absorption.
    up = _second_projection(inputs, c_q).reshape(-1, heads, nope + rope)
    query = np.einsum("thd,hdk->thk", up[..., :nope], weight_uk)

    # Steps 5 and 6: the rotated lanes and the normalised latent.
    cos, sin = widen(inputs["cos"]), widen(inputs["sin"])
    query_rope = half_rope(up[..., nope:], cos[:, None, :], sin[:, None, :])
    key_rope = half_rope(k_rope, cos, sin)
    key = rms_norm(c_kv, widen(inputs["gamma_2"]), EPSILON)

    # Step 7: what goes out and what goes into the caches.
    if mode == JOINED:
        return {
            "q_out": Expected.maths(np.concatenate([query, query_rope], axis=-1), element),
            "kv_cache_out": _written(inputs, "kv_cache", np.concatenate([key, key_rope], axis=-1), mode),
        }
    results = {"q_out": Expected.maths(query, element)}
    if mode == NZ_INT8:
        # As in the published golden code, both are rounded to the type of the input before they are quantised.
        q_scale = inputs["q_nope_scale"].reshape(-1, 1)
        results["q_out"] = Expected.maths(quantise(round_to(query, element), q_scale), np.int8)
        key = widen(quantise(round_to(key, element), _reciprocal(inputs["ctkv_scale"])))
    results["kv_cache_out"] = _written(inputs, "kv_cache", key, mode)
    results["q_rope_out"] = Expected.maths(query_rope, element)
    results["kr_cache_out"] = _written(inputs, "kv_cache_rope", key_rope, mode)
    return results


def tie_distance(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> float:
    """How close the int8 roundings before the two products come to a tie, where float32 maths may round either way.

    One step of int8 there moves a whole row of the results.
    """
    latent_and_rope = inputs["gamma_2"].size + inputs["cos"].shape[-1]
    c_q = _first_projection(inputs, attributes)[:, latent_and_rope:]
    x = widen(inputs["input"])
    stages = (_norm(inputs, x, 0) if attributes.get("do_rms_norm", 1) else x, _norm(inputs, c_q, 1))
    distance = 0.5
    for stage, rows in enumerate(stages):
        scale, offset = _quantisation(inputs, stage)
        scaled = rows * widen(scale) + np.asarray(offset, np.float64)
        from_tie = np.abs(scaled - np.floor(scaled) - 0.5)
        distance = min(distance, float(np.min(from_tie, initial=0.5, where=np.abs(scaled) < 129)))
    return distance


def half_rope(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """RoPE of features in half order: lane i turns with lane i + half. Halves of `cos` and `sin` need not be equal."""
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def _first_projection(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> Float64:
    """Norm, quantisation and product with `wdqkv`; floating weights take the input as it is."""
    x = widen(inputs["input"])
    if inputs["wdqkv"].dtype != np.int8:
        return round_to(x @ widen(_matrix(inputs["wdqkv"])).T, inputs["input"].dtype)
    if attributes.get("do_rms_norm", 1):
        x = _norm(inputs, x, 0)
    return _int8_projection(inputs, x, "wdqkv", 0)


def _second_projection(inputs: Mapping[str, Array], c_q: Float64) -> Float64:
    """Norm, quantisation and product with `wuq`; floating weights know neither a beta nor a quantisation."""
    element = inputs["input"].dtype
    if inputs["wuq"].dtype != np.int8:
        normed = round_to(rms_norm(c_q, widen(inputs["gamma_1"]), EPSILON), element)
        return round_to(normed @ widen(_matrix(inputs["wuq"])).T, element)
    return _int8_projection(inputs, _norm(inputs, c_q, 1), "wuq", 1)


def _norm(inputs: Mapping[str, Array], x: Float64, stage: int) -> Float64:
    beta = _optional(inputs, f"beta_{stage}")
    normed = rms_norm(x, widen(inputs[f"gamma_{stage}"]), EPSILON)
    return normed if beta is None else normed + widen(beta)


def _int8_projection(inputs: Mapping[str, Array], x: Float64, weight: str, stage: int) -> Float64:
    """`x` in int8, times the weight in int32, plus the bias; each column is scaled and rounded to the input's type."""
    scale, offset = _quantisation(inputs, stage)
    product = widen(quantise(x, scale, offset)) @ widen(_matrix(inputs[weight])).T
    bias = _optional(inputs, f"bias_{stage}")
    if bias is not None:
        product = product + widen(bias).reshape(-1)
    return round_to(product * widen(_descale(inputs[f"descale_{stage}"])), inputs["input"].dtype)


def _quantisation(inputs: Mapping[str, Array], stage: int) -> tuple[Array, Array | float]:
    """Factor and offset; without an offset the quantisation is symmetric."""
    offset = _optional(inputs, f"quant_offset_{stage}")
    return _reciprocal(inputs[f"quant_scale_{stage}"]), 0.0 if offset is None else offset


def _reciprocal(scale: Array) -> NDArray[np.float32]:
    return np.float32(1) / scale.astype(np.float32)


def _descale(descale: Array) -> Array:
    """float32, or int64 with the bits of a float32 in the lower half."""
    if descale.dtype != np.int64:
        return descale
    return descale.astype(np.uint64).astype(np.uint32).view(np.float32)


def _optional(inputs: Mapping[str, Array], name: str) -> Array | None:
    array = inputs.get(name)
    return None if array is None or array.shape == (0,) else array


def _matrix(stored: Array) -> Array:
    """The (n, k) matrix of a weight in FRACTAL_NZ storage; matrices are returned as they are.

    Storage is (k / w0, n, w0), or (k / w0, n / 16, 16, w0), which is the same memory.
    """
    if stored.ndim == 2:
        return stored
    columns, w0 = stored.shape[0], stored.shape[-1]
    n = stored.size // (columns * w0)
    return stored.reshape(columns, n, w0).transpose(1, 0, 2).reshape(n, columns * w0)


def _weight_uk(stored: Array) -> Float64:
    """(N, nope, latent), also from the storage (N, latent / w0, nope, w0)."""
    if stored.ndim == 4:
        heads, columns, nope, w0 = stored.shape
        stored = stored.transpose(0, 2, 1, 3).reshape(heads, nope, columns * w0)
    return widen(stored)


def _written(inputs: Mapping[str, Array], name: str, rows: Float64, mode: int) -> Expected:
    """The cache called `name` after row t of `rows` went to slot `slot_mapping[t]`; a negative slot is skipped."""
    cache = inputs[name]
    slots = inputs["slot_mapping"].astype(np.int64)
    kept = slots >= 0
    value = _slots_first(widen(cache), mode)
    written = np.zeros(value.shape, np.bool_)
    places = np.divmod(slots[kept], value.shape[1])
    value[places] = rows[kept]
    written[places] = True
    return Expected.maths(_stored(value, cache.shape, mode), cache.dtype, computed=_stored(written, cache.shape, mode))


def _slots_first(cache: Array, mode: int) -> Array:
    """(blocks, block size, width) of a cache; the NZ modes store a block as (width / c0, block size, c0)."""
    blocks = cache.shape[0]
    if mode in (NZ_INT8, NZ):
        cache = cache.transpose(0, 2, 1, 3)
    return cache.reshape(blocks, cache.shape[1], cache.shape[2] * cache.shape[3])


def _stored(slots: Array, shape: tuple[int, ...], mode: int) -> Array:
    """The inverse of `_slots_first`, for a cache of `shape`."""
    if mode not in (NZ_INT8, NZ):
        return slots.reshape(shape)
    blocks, columns, block_size, c0 = shape
    return slots.reshape(blocks, block_size, columns, c0).transpose(0, 2, 1, 3)
