"""MlaPrologV2WeightNz in numpy, for onnx's reference evaluator; written independently of the body.

Source: aclnnMlaPrologV2WeightNz, Formula; rounding and the order of the steps are those of the published CPU goldens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx.reference.op_run import OpRun

from ascend_onnx import layout
from ascend_onnx.operator import DOMAIN

__all__ = ["MlaPrologV2WeightNz"]

_Array = npt.NDArray[Any]


def _f32(x: _Array) -> npt.NDArray[np.float32]:
    return x.astype(np.float32)


def _via(x: npt.NDArray[np.float32], dtype: np.dtype[np.generic]) -> npt.NDArray[np.float32]:
    return _f32(x.astype(dtype))


def _times(x: npt.NDArray[np.float32], scale: _Array | None) -> npt.NDArray[np.float32]:
    return x if scale is None else _f32(x * scale)


def _int8(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def _int8_rows(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    scale = _f32(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127))
    return _int8(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)), scale


def _norm(x: npt.NDArray[np.float32], gamma: _Array, epsilon: float) -> npt.NDArray[np.float32]:
    mean = np.einsum("th,th->t", x, x)[:, None] / np.float32(x.shape[-1])
    return _f32(x * (1 / np.sqrt(mean + np.float32(epsilon))) * _f32(gamma))


def _rope(x: npt.NDArray[np.float32], cos: _Array, sin: _Array) -> npt.NDArray[np.float32]:
    """(T, ..., Dr) interleaved in, half-split out; cos and sin (T, Dr)."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    table = (len(cos),) + (1,) * (x.ndim - 2) + (2, x.shape[-1] // 2)
    c, s = _f32(cos).reshape(table), _f32(sin).reshape(table)
    halves = (real * c[..., 0, :] - imaginary * s[..., 0, :], imaginary * c[..., 1, :] + real * s[..., 1, :])
    return _f32(np.concatenate(halves, axis=-1))


class MlaPrologV2WeightNz(OpRun):
    """Plain numpy, token by token where the device addresses memory; independent of the body."""

    op_domain = DOMAIN

    def _run(
        self,
        token_x: _Array,
        weight_dq: _Array,
        weight_uq_qr: _Array,
        weight_uk: _Array,
        weight_dkv_kr: _Array,
        rmsnorm_gamma_cq: _Array,
        rmsnorm_gamma_ckv: _Array,
        rope_sin: _Array,
        rope_cos: _Array,
        cache_index: _Array,
        kv_cache: _Array,
        kr_cache: _Array,
        dequant_scale_x: _Array | None = None,
        dequant_scale_w_dq: _Array | None = None,
        dequant_scale_w_uq_qr: _Array | None = None,
        dequant_scale_w_dkv_kr: _Array | None = None,
        quant_scale_ckv: _Array | None = None,
        quant_scale_ckr: _Array | None = None,
        smooth_scales_cq: _Array | None = None,
        rmsnorm_epsilon_cq: float = 1e-5,
        rmsnorm_epsilon_ckv: float = 1e-5,
        cache_mode: str = "PA_BSND",
    ) -> tuple[_Array, ...]:
        dtype = weight_uk.dtype
        heads, nope, rank = weight_uk.shape
        lead = token_x.shape[:-1]
        tokens = token_x.reshape(int(np.prod(lead)), token_x.shape[-1])
        cos, sin = (table.reshape(len(tokens), table.shape[-1]) for table in (rope_cos, rope_sin))

        def project(weight: _Array, scale: _Array | None) -> npt.NDArray[np.float32]:
            if token_x.dtype == np.int8:
                exact = tokens.astype(np.int64) @ _logical(weight).astype(np.int64)
                return _times(_times(_f32(exact), dequant_scale_x), scale)
            return _via(_f32(tokens) @ _f32(_logical(weight)), dtype)

        c_q = _norm(project(weight_dq, dequant_scale_w_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
        if weight_uq_qr.dtype == np.int8:
            quantised, scale = _int8_rows(_times(c_q, smooth_scales_cq))
            exact = quantised.astype(np.int64) @ _logical(weight_uq_qr).astype(np.int64)
            q_c = _times(_times(_f32(exact), scale), dequant_scale_w_uq_qr)
        else:
            q_c = _via(_via(c_q, dtype) @ _f32(_logical(weight_uq_qr)), dtype)
        q_c = q_c.reshape(len(tokens), heads, nope + cos.shape[-1])
        query = np.einsum("thd,hdc->thc", _via(q_c[..., :nope], dtype), _f32(weight_uk)).astype(dtype)
        query_rope = _rope(q_c[..., nope:], cos, sin).astype(dtype)

        kv = project(weight_dkv_kr, dequant_scale_w_dkv_kr)
        c_kv = _norm(kv[:, :rank], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
        k_rope = _rope(kv[:, rank:], cos, sin)
        q_scale = np.zeros(0, np.float32)
        if kv_cache.dtype == np.int8 and quant_scale_ckv is not None:
            per_tensor = token_x.dtype == np.int8
            c_kv = _times(c_kv, quant_scale_ckv[:, :1] if per_tensor else quant_scale_ckv)
            if per_tensor:
                query, q_scale = _int8_rows(_f32(query))
                ratio = quant_scale_ckv[0, 0] / np.where(q_scale == 0, np.float32(1), q_scale)
                query_rope = (_f32(query_rope) * ratio).astype(dtype)
        if kr_cache.dtype == np.int8:
            k_rope = _times(k_rope, quant_scale_ckr)

        nz = cache_mode == "PA_NZ"
        caches = [
            _cache_written(cache, _int8(rows) if cache.dtype == np.int8 else rows.astype(cache.dtype), cache_index, nz)
            for cache, rows in ((kv_cache, c_kv), (kr_cache, k_rope))
        ]
        results = (query.reshape(*lead, heads, rank), query_rope.reshape(*lead, heads, cos.shape[-1]), *caches, q_scale)
        return results[: len(self.onnx_node.output)]


def _logical(weight: _Array) -> _Array:
    return layout.nz_to_nd(weight) if weight.ndim == 4 else weight


def _cache_written(cache: _Array, rows: _Array, cache_index: _Array, nz: bool) -> _Array:
    out = cache.copy()
    blocks, block_size, _, width = cache.shape
    for slot, row in zip(cache_index.ravel(), rows, strict=True):
        if not 0 <= slot < blocks * block_size:
            continue
        block, offset = divmod(int(slot), block_size)
        if nz:
            lanes = layout.fractal_width(cache.itemsize)
            out[block].reshape(width // lanes, block_size, lanes)[:, offset, :] = row.reshape(-1, lanes)
        else:
            out[block, offset, 0] = row
    return out
