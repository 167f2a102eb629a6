"""Oracle of MlaPrologV2WeightNz in its five scenarios.

Source: aclnnMlaPrologV2WeightNz, formulas and scenario table; the steps are numbered as in the operator specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numerics import (
    FRACTAL_BYTES,
    Float64,
    dynamic_quantise,
    from_fractal_nz,
    interleaved_rope,
    quantise,
    rms_norm,
    round_to,
    widen,
)
from .result import Array, Expected

__all__ = ["mla_prolog_v2_weight_nz"]


def mla_prolog_v2_weight_nz(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Expected]:
    """Every output that the scenario produces, by name; see the operator's inputs for names and shapes.

    `dequant_scale_q_nope` is there only in full int8 with an int8 kv cache.
    """
    x = inputs["token_x"]
    leading = x.shape[:-1]
    heads, nope, latent = inputs["weight_uk"].shape
    rope = inputs["rope_sin"].shape[-1]
    element = inputs["weight_uk"].dtype
    tokens = x.reshape(-1, x.shape[-1])
    sin = widen(inputs["rope_sin"]).reshape(-1, rope)
    cos = widen(inputs["rope_cos"]).reshape(-1, rope)
    quantised_weight = inputs["weight_uq_qr"].dtype == np.int8

    # Steps 1 to 4: the query's way down and up again.
    down = _project(inputs, tokens, "weight_dq", "dequant_scale_w_dq")
    c_q = rms_norm(down, widen(inputs["rmsnorm_gamma_cq"]), attributes.get("rmsnorm_epsilon_cq", 1e-5))
    weight_uq_qr = widen(from_fractal_nz(inputs["weight_uq_qr"]))
    if quantised_weight:
        if "smooth_scales_cq" in inputs:
            c_q = c_q * widen(inputs["smooth_scales_cq"])
        c_q_int8, scale = dynamic_quantise(c_q)
        up = (widen(c_q_int8) @ weight_uq_qr) * widen(scale) * widen(inputs["dequant_scale_w_uq_qr"])
    else:
        up = round_to(round_to(c_q, element) @ weight_uq_qr, element)
    up = up.reshape(-1, heads, nope + rope)

    # Steps 5 and 6: the absorbed query and its rotated part.
    q_c = round_to(up[..., :nope], element)
    query = np.einsum("thd,hdk->thk", q_c, widen(inputs["weight_uk"]))
    query_rope = interleaved_rope(up[..., nope:], cos[:, None, :], sin[:, None, :])

    # Step 7: the latent and the rotated key.
    kv = _project(inputs, tokens, "weight_dkv_kr", "dequant_scale_w_dkv_kr")
    c_kv = rms_norm(kv[:, :latent], widen(inputs["rmsnorm_gamma_ckv"]), attributes.get("rmsnorm_epsilon_ckv", 1e-5))
    k_rope = interleaved_rope(kv[:, latent:], cos, sin)

    results: dict[str, Expected] = {}
    full_int8 = x.dtype == np.int8 and inputs["kv_cache"].dtype == np.int8
    if full_int8:
        query_int8, q_scale = dynamic_quantise(round_to(query, element))
        results["query"] = Expected.maths(query_int8.reshape(*leading, heads, latent), np.int8)
        ratio = widen(inputs["quant_scale_ckv"]).reshape(-1)[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            query_rope = round_to(query_rope, element) * ratio / widen(q_scale)
        results["dequant_scale_q_nope"] = Expected.maths(widen(q_scale), np.float32)
    else:
        results["query"] = Expected.maths(query.reshape(*leading, heads, latent), element)
    results["query_rope"] = Expected.maths(query_rope.reshape(*leading, heads, rope), element)

    # Steps 8 and 9: what goes into the caches.
    ckv_scale = inputs.get("quant_scale_ckv")
    if full_int8 and ckv_scale is not None:
        ckv_scale = ckv_scale.reshape(-1)[:1]
    results["kv_cache_out"] = _written(inputs, attributes, "kv_cache", c_kv, ckv_scale)
    results["kr_cache_out"] = _written(inputs, attributes, "kr_cache", k_rope, inputs.get("quant_scale_ckr"))
    return results


def _project(inputs: Mapping[str, Array], tokens: Array, weight: str, scale: str) -> Float64:
    """`tokens @ weight`: rounded to the type of the tokens, or dequantised by token and column and not rounded."""
    product = widen(tokens) @ widen(from_fractal_nz(inputs[weight]))
    if tokens.dtype == np.int8:
        return product * widen(inputs["dequant_scale_x"]).reshape(-1, 1) * widen(inputs[scale])
    return round_to(product, tokens.dtype)


def _written(
    inputs: Mapping[str, Array], attributes: Mapping[str, Any], name: str, rows: Float64, scale: Array | None
) -> Expected:
    """The cache called `name` after row t of `rows` went to slot `cache_index[t]`; a negative slot is skipped."""
    cache = inputs[name]
    slots = inputs["cache_index"].reshape(-1).astype(np.int64)
    width = cache.shape[-1]
    if cache.dtype == np.int8:
        assert scale is not None, f"an int8 {name} needs a scale"
        rows = widen(quantise(rows, scale.reshape(1, -1)))
    value = widen(cache).reshape(-1)
    written = np.zeros(value.shape, np.bool_)
    if value.size:
        kept = slots >= 0
        places = _places(slots[kept], cache.shape[1], width, attributes.get("cache_mode", "PA_BSND"), cache.itemsize)
        value[places] = rows[kept]
        written[places] = True
    shape = cache.shape
    return Expected.maths(value.reshape(shape), cache.dtype, computed=written.reshape(shape))


def _places(slots: NDArray[np.int64], block_size: int, width: int, cache_mode: str, itemsize: int) -> NDArray[np.int64]:
    """Flat offsets (T, width) of the rows in `slots`; PA_NZ stores a block as (width / c0, block_size, c0)."""
    lane = np.arange(width)
    if cache_mode == "PA_BSND":
        return slots[:, None] * width + lane
    c0 = FRACTAL_BYTES // itemsize
    block, offset = slots[:, None] // block_size, slots[:, None] % block_size
    return block * block_size * width + (lane // c0) * block_size * c0 + offset * c0 + lane % c0
