"""MlaPrologV2WeightNz: the projections, norms, rotations and cache writes in front of latent attention.

    token_x -> W_DQ -> RmsNorm -> W_UQ|W_QR -> [nope -> W_UK -> query | RoPE -> query_rope]
    token_x -> W_DKV|W_KR -> [RmsNorm -> kv_cache | RoPE -> kr_cache]

Letters: T (or B, S) tokens; He the hidden size; Hcq and Hckv the ranks of query and key-value; N heads; D and Dr the
head sizes without and with rotary embedding. Which tensors are int8 decides the scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference.op_run import OpRun
from onnxscript import OpBuilder

from ascend_onnx import layout, numerics
from ascend_onnx.errors import InputError
from ascend_onnx.limits import (
    INVALID,
    TILING,
    Accepted,
    Place,
    Size,
    agree,
    bounded,
    broken,
    equal,
    not_empty,
    of_type,
    ranks,
    rule,
    shape,
    size,
)
from ascend_onnx.operator import (
    DOMAIN,
    Attribute,
    Body,
    Call,
    Dim,
    Input,
    Operator,
    Output,
    Product,
    Tensor,
    merged,
    product,
)

__all__ = ["OPERATOR"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_FLOATS_OR_INT8 = (*_FLOATS, ir.DataType.INT8)
_SCALE = (ir.DataType.FLOAT,)
_TYPED = (
    *("token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv"),
    *("rope_sin", "rope_cos", "kv_cache", "kr_cache"),
)
"""The inputs whose type is the model's float type or int8."""
_PACKABLE = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
"""The weights that may come in FRACTAL_NZ storage."""

# --- What a call means ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The facts of a call that its body depends on."""

    batched: bool
    """token_x is (B, S, He) rather than (T, He)."""
    nz_cache: bool
    """Blocks of the caches are stored as (H / c0, BlockSize, c0)."""
    float_type: ir.DataType
    int8: tuple[str, ...]
    """The inputs that are int8, in order."""
    packed: tuple[str, ...]
    """The weights that come in FRACTAL_NZ storage, (n / w0, k / 16, 16, w0)."""

    @classmethod
    def of(cls, call: Call) -> _Form:
        return cls(
            batched=call.input("token_x").rank == 3,
            nz_cache=call.attributes["cache_mode"] == "PA_NZ",
            float_type=call.input("weight_uk").dtype or ir.DataType.FLOAT,
            int8=tuple(name for name in _TYPED if call.input(name).dtype == ir.DataType.INT8),
            packed=tuple(name for name in _PACKABLE if call.input(name).rank == 4),
        )

    @property
    def query_int8(self) -> bool:
        """Both the tokens and the latent cache are int8, and so is the query (FullQuant+KV)."""
        return "token_x" in self.int8 and "kv_cache" in self.int8

    @property
    def scenario(self) -> str:
        """Which tensors are int8: "no_quant", "partial_quant_kv_kr", "full_quant_kv", ..."""
        names = {(False, False): "no", (False, True): "partial", (True, False): "token", (True, True): "full"}
        parts = [names["token_x" in self.int8, "weight_uq_qr" in self.int8], "quant"]
        parts += [short for short in ("kv", "kr") if f"{short}_cache" in self.int8]
        return "_".join(parts)


def _overload(call: Call) -> str:
    """Tokens, cache mode, scenario and type, then what is unusual: "bsh_pa_nz_full_quant_kv_bf16_packed_smooth"."""
    form = _Form.of(call)
    parts = ["bsh" if form.batched else "th", str(call.attributes["cache_mode"]).lower(), form.scenario]
    parts.append(form.float_type.short_name())
    if form.packed:
        parts += ["packed", *(() if form.packed == _PACKABLE else form.packed)]
    for name in _TYPED:
        dtype = call.input(name).dtype
        if dtype not in (None, form.float_type, ir.DataType.INT8):
            parts.append(f"{name}_{dtype.short_name()}")
    parts += ["smooth"] if call.has("smooth_scales_cq") else []
    parts += ["scale_q_nope"] if call.has("dequant_scale_q_nope") else []
    return "_".join(parts)


def _infer(call: Call) -> Mapping[str, Tensor]:
    form = _Form.of(call)
    tokens = _token_dims(call)
    heads, rank, rope = call.input("weight_uk").dim(0), call.input("weight_uk").dim(2), call.input("rope_sin").dim(-1)
    float_type = call.input("weight_uk").dtype
    query = query_rope = scale = None
    if tokens is not None:
        query, query_rope = (*tokens, heads, rank), (*tokens, heads, rope)
        scale = (product(*tokens), heads, 1) if form.query_int8 else (0,)
    return {
        "query": Tensor(ir.DataType.INT8 if form.query_int8 else float_type, query),
        "query_rope": Tensor(float_type, query_rope),
        "kv_cache_out": call.input("kv_cache"),
        "kr_cache_out": call.input("kr_cache"),
        "dequant_scale_q_nope": Tensor(ir.DataType.FLOAT, scale),
    }


def _token_dims(call: Call) -> tuple[Dim, ...] | None:
    """(T,) or (B, S), from whichever inputs know them."""
    rows = (call.input(name).shape for name in ("token_x", "rope_sin", "rope_cos"))
    return merged([*(shape and shape[:-1] for shape in rows), call.input("cache_index").shape])


# --- Body -------------------------------------------------------------------------------------------------------------

_Given = Mapping[str, ir.Value]


class _Sizes(NamedTuple):
    """Sizes as values of shape (1). They are read from weights, whose shapes any runtime knows: the nodes fold away."""

    hidden: ir.Value
    heads: ir.Value
    nope: ir.Value
    rank: ir.Value
    rope: ir.Value


def _body(call: Call) -> Body:
    """The body for the form of `call`: float32 inside, rounded where the device stores a value in between.

    Raises `InputError` where the int8 tensors do not fit together or lack a scale.
    """
    form = _Form.of(call)
    _require_scales(call, form)

    def trace(op: OpBuilder, *inputs: ir.Value | None) -> list[ir.Value]:
        named = call.operator.named(inputs)
        sizes = _sizes(op, form, named)
        given = named | _flat_tokens(op, form, named, sizes)
        query, query_rope = _query(op, form, given, sizes)
        caches = _written_caches(op, form, given, *_key_value(op, form, given, sizes))
        scales = []
        if form.query_int8:
            query, query_rope, scale = _quantised_query(op, form, given, query, query_rope)
            scales.append(scale)
        elif call.has("dequant_scale_q_nope"):
            scales.append(op.ConstantOfShape([0]))
        if form.batched:
            lead = op.Shape(named["token_x"], end=2)
            query = op.Reshape(query, op.Concat(lead, sizes.heads, sizes.rank, axis=0), allowzero=1)
            query_rope = op.Reshape(query_rope, op.Concat(lead, sizes.heads, sizes.rope, axis=0), allowzero=1)
        return [query, query_rope, *caches, *scales]

    return trace


def _require_scales(call: Call, form: _Form) -> None:
    together = ("token_x", "weight_dq", "weight_dkv_kr")
    if len({name in form.int8 for name in together}) > 1:
        raise InputError(f"{call.operator.name}: {', '.join(together)} must be int8 together or not at all")
    scales = {
        "dequant_scale_x": "token_x",
        "dequant_scale_w_dq": "token_x",
        "dequant_scale_w_dkv_kr": "token_x",
        "dequant_scale_w_uq_qr": "weight_uq_qr",
        "quant_scale_ckv": "kv_cache",
        "quant_scale_ckr": "kr_cache",
    }
    for name, scaled in scales.items():
        if scaled in form.int8 and not call.has(name):
            raise InputError(f"{call.operator.name} with an int8 {scaled} needs the input {name}, which is absent")


def _sizes(op: OpBuilder, form: _Form, given: _Given) -> _Sizes:
    heads, nope, rank = (numerics.dim(op, given["weight_uk"], axis) for axis in range(3))
    hidden, _ = _weight_shape(op, form, given["weight_dq"])
    _, latent_and_rope = _weight_shape(op, form, given["weight_dkv_kr"])
    return _Sizes(hidden, heads, nope, rank, op.Sub(latent_and_rope, rank))


def _weight_shape(op: OpBuilder, form: _Form, weight: ir.Value) -> tuple[ir.Value, ir.Value]:
    """k and n, each of shape (1), of a weight (k, n) or of its storage (n / w0, k / 16, 16, w0)."""
    if weight.name not in form.packed:
        return numerics.dim(op, weight, 0), numerics.dim(op, weight, 1)
    outer_n, outer_k, inner_k, inner_n = (numerics.dim(op, weight, axis) for axis in range(4))
    return op.Mul(outer_k, inner_k), op.Mul(outer_n, inner_n)


def _flat_tokens(op: OpBuilder, form: _Form, given: _Given, sizes: _Sizes) -> dict[str, ir.Value]:
    """What belongs to the tokens, with (B, S) flattened to (T); the tables of the rotary embedding in float32."""
    x, slots = given["token_x"], given["cache_index"]
    cos, sin = numerics.widen(op, given["rope_cos"]), numerics.widen(op, given["rope_sin"])
    if form.batched:
        x = op.Reshape(x, op.Concat([-1], sizes.hidden, axis=0))
        cos, sin = (op.Reshape(table, op.Concat([-1], sizes.rope, axis=0)) for table in (cos, sin))
        slots = op.Reshape(slots, [-1])
    return {"token_x": x, "rope_cos": cos, "rope_sin": sin, "cache_index": slots}


def _query(op: OpBuilder, form: _Form, given: _Given, sizes: _Sizes) -> tuple[ir.Value, ir.Value]:
    """query (T, N, Hckv) and query_rope (T, N, Dr) in the float type."""
    c_q = _projection(op, form, given, "weight_dq", "dequant_scale_w_dq")
    gamma, epsilon = numerics.widen(op, given["rmsnorm_gamma_cq"]), numerics.attribute(op, "rmsnorm_epsilon_cq")
    q_c = _query_projection(op, form, given, numerics.rms_norm(op, c_q, gamma, epsilon))
    q_c = op.Reshape(q_c, op.Concat([-1], sizes.heads, op.Add(sizes.nope, sizes.rope), axis=0))

    nope = op.Slice(q_c, [0], sizes.nope, [2])
    if "weight_uq_qr" in form.int8:
        nope = numerics.rounded(op, nope, form.float_type)
    # One product per head with all tokens as its rows, so that each head's W_UK is read once.
    latent = op.MatMul(op.Transpose(nope, perm=[1, 0, 2]), numerics.widen(op, given["weight_uk"]))
    query = op.Transpose(latent, perm=[1, 0, 2])

    cos, sin = (op.Unsqueeze(given[table], [1]) for table in ("rope_cos", "rope_sin"))
    query_rope = numerics.rotate(op, *_lanes(op, q_c, sizes.nope), cos, sin)
    return numerics.narrow(op, query, form.float_type), numerics.narrow(op, query_rope, form.float_type)


def _key_value(op: OpBuilder, form: _Form, given: _Given, sizes: _Sizes) -> tuple[ir.Value, ir.Value]:
    """The rows of the two caches, (T, Hckv) and (T, Dr), in float32; scaled where the cache is int8."""
    kv = _projection(op, form, given, "weight_dkv_kr", "dequant_scale_w_dkv_kr")
    gamma, epsilon = numerics.widen(op, given["rmsnorm_gamma_ckv"]), numerics.attribute(op, "rmsnorm_epsilon_ckv")
    c_kv = numerics.rms_norm(op, op.Slice(kv, [0], sizes.rank, [1]), gamma, epsilon)
    k_rope = numerics.rotate(op, *_lanes(op, kv, sizes.rank), given["rope_cos"], given["rope_sin"])
    if "kv_cache" in form.int8:
        c_kv = op.Mul(c_kv, _latent_scale(op, form, given))
    if "kr_cache" in form.int8:
        k_rope = op.Mul(k_rope, given["quant_scale_ckr"])
    return c_kv, k_rope


def _latent_scale(op: OpBuilder, form: _Form, given: _Given) -> ir.Value:
    """quant_scale_ckv (1, Hckv); with an int8 query the quantisation is per tensor: its first element alone, (1, 1)."""
    scale = given["quant_scale_ckv"]
    return op.Slice(scale, [0], [1], [1]) if form.query_int8 else scale


def _quantised_query(
    op: OpBuilder, form: _Form, given: _Given, query: ir.Value, query_rope: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The query in int8, the rotary part scaled to match, and the scale (T, N, 1) per token and head.

    Attention multiplies the sum of nope and rope scores by one factor, so the rope part is divided by it here.
    """
    quantised, scale = numerics.dynamic_quantise(op, numerics.widen(op, query))
    ratio = op.Div(_latent_scale(op, form, given), numerics.nonzero(op, scale))
    query_rope = numerics.narrow(op, op.Mul(numerics.widen(op, query_rope), ratio), form.float_type)
    return quantised, query_rope, scale


def _projection(op: OpBuilder, form: _Form, given: _Given, weight: str, scale: str) -> ir.Value:
    """`token_x @ weight` in float32: rounded to the float type, or dequantised by token and column and not rounded."""
    x, matrix = given["token_x"], _matrix(op, form, given[weight])
    if "token_x" in form.int8:
        return numerics.dequantised_matmul(op, x, matrix, given["dequant_scale_x"], given[scale])
    return numerics.rounded(op, op.MatMul(numerics.widen(op, x), numerics.widen(op, matrix)), form.float_type)


def _query_projection(op: OpBuilder, form: _Form, given: _Given, c_q: ir.Value) -> ir.Value:
    """`c_q @ weight_uq_qr` in float32; where the weight is int8, `c_q` is quantised per token on the way."""
    matrix = _matrix(op, form, given["weight_uq_qr"])
    if "weight_uq_qr" not in form.int8:
        c_q = numerics.rounded(op, c_q, form.float_type)
        return numerics.rounded(op, op.MatMul(c_q, numerics.widen(op, matrix)), form.float_type)
    if "smooth_scales_cq" in given:
        c_q = op.Mul(c_q, given["smooth_scales_cq"])
    quantised, scale = numerics.dynamic_quantise(op, c_q)
    return numerics.dequantised_matmul(op, quantised, matrix, scale, given["dequant_scale_w_uq_qr"])


def _matrix(op: OpBuilder, form: _Form, weight: ir.Value) -> ir.Value:
    """A weight as (k, n): FRACTAL_NZ storage (n / w0, k / 16, 16, w0) is put back in order."""
    if weight.name not in form.packed:
        return weight
    shape = op.Concat(*_weight_shape(op, form, weight), axis=0)
    matrix: ir.Value = op.Reshape(op.Transpose(weight, perm=[1, 2, 0, 3]), shape)
    return matrix


def _lanes(op: OpBuilder, x: ir.Value, start: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The even and the odd lanes of the interleaved features that begin at `start` in the last axis."""
    return numerics.every_second(op, x, start), numerics.every_second(op, x, op.Add(start, [1]))


def _written_caches(
    op: OpBuilder, form: _Form, given: _Given, c_kv: ir.Value, k_rope: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The caches with the rows of the tokens that have a slot.

    A negative index means "do not write", and an empty cache has no slots: such tokens are taken out, which costs less
    than a spare row, for which the cache would have to be copied.
    """
    slots, block_size = given["cache_index"], numerics.dim(op, given["kv_cache"], 1)
    capacity = op.Mul(numerics.dim(op, given["kv_cache"], 0), block_size)
    written = op.And(op.GreaterOrEqual(slots, [0]), op.Less(slots, capacity))
    slots = op.Compress(slots, written, axis=0)

    def scattered(cache: ir.Value, rows: ir.Value) -> ir.Value:
        dtype = cache.dtype or form.float_type
        rows = op.Compress(rows, written, axis=0)
        stored = numerics.quantise(op, rows) if dtype == ir.DataType.INT8 else numerics.narrow(op, rows, dtype)
        c0 = layout.fractal_width(dtype.bitwidth // 8)
        lanes = op.Constant(value_ints=[c0]) if form.nz_cache else None
        return numerics.scatter_rows(op, cache, slots, stored, block_size=block_size, lanes=lanes)

    return scattered(given["kv_cache"], c_kv), scattered(given["kr_cache"], k_rope)


# --- Reference --------------------------------------------------------------------------------------------------------

_Array = npt.NDArray[Any]
_Float32 = npt.NDArray[np.float32]


def _f32(x: _Array) -> _Float32:
    return x.astype(np.float32)


def _via(x: _Float32, dtype: np.dtype[np.generic]) -> _Float32:
    return _f32(x.astype(dtype))


def _times(x: _Float32, scale: _Array | None) -> _Float32:
    return x if scale is None else _f32(x * scale)


def _int8(x: _Float32) -> npt.NDArray[np.int8]:
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def _int8_rows(x: _Float32) -> tuple[npt.NDArray[np.int8], _Float32]:
    scale = _f32(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127))
    return _int8(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)), scale


def _norm(x: _Float32, gamma: _Array, epsilon: float) -> _Float32:
    mean = np.einsum("th,th->t", x, x)[:, None] / np.float32(x.shape[-1])
    return _f32(x * (1 / np.sqrt(mean + np.float32(epsilon))) * _f32(gamma))


def _rope(x: _Float32, cos: _Array, sin: _Array) -> _Float32:
    """(T, ..., Dr) interleaved in, half-split out; cos and sin (T, Dr)."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    table = (len(cos),) + (1,) * (x.ndim - 2) + (2, x.shape[-1] // 2)
    c, s = _f32(cos).reshape(table), _f32(sin).reshape(table)
    halves = (real * c[..., 0, :] - imaginary * s[..., 0, :], imaginary * c[..., 1, :] + real * s[..., 1, :])
    return _f32(np.concatenate(halves, axis=-1))


class MlaPrologV2WeightNz(OpRun):
    """The operator in numpy, token by token where the device addresses memory; written independently of the body.

    Rounding and the order of the steps are those of the published CPU goldens.
    """

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

        def project(weight: _Array, scale: _Array | None) -> _Float32:
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
    out = layout.cache_nz_to_bsnd(cache) if nz else cache.copy()
    lines = out.reshape(out.shape[0] * out.shape[1], out.shape[3])
    for slot, row in zip(cache_index.ravel(), rows, strict=True):
        if 0 <= slot < len(lines):
            lines[slot] = row
    return layout.cache_bsnd_to_nz(out) if nz else out


# --- The limits of the device -----------------------------------------------------------------------------------------

_SEED = "aclnnMlaPrologV2WeightNz"
_SHAPES = f"{_SEED}, Shape format field description"
_AGREEMENT = f"{_SEED}, Shape constraints"
_TYPES = f"{_SEED}, dtype and shape combinations"
_PARTIAL_SCALES = ("dequant_scale_w_uq_qr",)
_FULL_SCALES = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
_SCENARIO_SCALES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    # The inputs that are int8, and the scales that such a call needs.
    (): (),
    ("weight_uq_qr",): _PARTIAL_SCALES,
    ("weight_uq_qr", "kv_cache", "kr_cache"): (*_PARTIAL_SCALES, "quant_scale_ckv", "quant_scale_ckr"),
    ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr"): _FULL_SCALES,
    ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr", "kv_cache"): (*_FULL_SCALES, "quant_scale_ckv"),
}


def _unknown_scenario(call: Call) -> str | None:
    """The int8 inputs are those of one of the five scenarios."""
    int8 = _Form.of(call).int8
    if any(call.input(name).dtype is None for name in _TYPED) or int8 in _SCENARIO_SCALES:
        return None
    known = "; ".join(", ".join(names) or "none" for names in _SCENARIO_SCALES)
    return f"the int8 inputs must be one of the sets [{known}], got {', '.join(int8)}"


def _wrong_scales(call: Call) -> str | None:
    """The scales are those that the scenario needs; smooth_scales_cq may be given where anything is int8."""
    int8 = _Form.of(call).int8
    needed = _SCENARIO_SCALES.get(int8, ())
    scales = [name for name in call.inputs if "_scale" in name]
    allowed = (*needed, "smooth_scales_cq") if int8 else needed
    if int8 not in _SCENARIO_SCALES:
        return None
    return broken(
        [f"{name} is required in this scenario and absent" for name in needed if name not in scales]
        + [f"{name} must be absent in this scenario" for name in scales if name not in allowed]
    )


def _wrong_token_ranks(call: Call) -> str | None:
    """rope_sin and rope_cos have the rank of token_x, cache_index one less."""
    rank = call.input("token_x").rank
    if rank is None:
        return None
    return ranks({"rope_sin": rank, "rope_cos": rank, "cache_index": rank - 1})(call)


def _unproduced_scale(call: Call) -> str | None:
    """dequant_scale_q_nope is produced where token_x and kv_cache are both int8 only."""
    if not call.has("dequant_scale_q_nope") or _Form.of(call).query_int8:
        return None
    return "dequant_scale_q_nope exists only when token_x and kv_cache are both int8"


def _logical_shape(call: Call, name: str) -> tuple[Dim, ...] | None:
    """The shape of an input, of a packed weight the (k, n) that it stores."""
    dims = call.input(name).shape
    if name not in _PACKABLE or dims is None or len(dims) != 4:
        return dims
    return product(dims[1], dims[2]), product(dims[0], dims[3])


def _tokens_of_rank(rank: int) -> Callable[[Call, str], tuple[Dim, ...] | None]:
    return lambda call, name: call.input(name).shape if call.input(name).rank == rank else None


class _TokenCount(Size):
    """T, or B * S."""

    def __call__(self, call: Call) -> int | None:
        count = product(*(_token_dims(call) or (None,)))
        return count if isinstance(count, int) else None

    def __str__(self) -> str:
        return "the number of tokens"


_at = partial(Place, shape_of=_logical_shape)
_HE = (_at("token_x", -1), _at("weight_dq", 0), _at("weight_dkv_kr", 0))
_HCQ = (_at("weight_dq", 1), _at("weight_uq_qr", 0), _at("rmsnorm_gamma_cq", 0))
_N, _D, _HCKV, _DR = _at("weight_uk", 0), _at("weight_uk", 1), _at("weight_uk", 2), _at("rope_sin", -1)
_FIRST = (_at("token_x", 0), _at("rope_sin", 0), _at("rope_cos", 0), _at("cache_index", 0))
_LAST = (_at("token_x", -2), _at("rope_sin", -2), _at("rope_cos", -2), _at("cache_index", -1))
_BLOCK_SIZES = (_at("kv_cache", 1), _at("kr_cache", 1))
_RANKS: Mapping[str, Accepted] = {"token_x": (2, 3), "kv_cache": 4, "kr_cache": 4, "weight_uk": 3}

_types, _agreement, _shapes = (
    partial(rule, INVALID, _TYPES),
    partial(rule, INVALID, _AGREEMENT),
    partial(rule, TILING, _SHAPES),
)
_bounded = partial(bounded, TILING, _SHAPES)
_CONSTRAINTS = (
    _types("type", of_type(_TYPED, ir.DataType.BFLOAT16, ir.DataType.INT8)),
    _types("scenario", _unknown_scenario),
    _types("scale", _wrong_scales),
    _types("unproduced_output", _unproduced_scale),
    _agreement("rank", ranks(_RANKS), ranks(dict.fromkeys(_PACKABLE, (2, 4))), _wrong_token_ranks),
    _agreement("tokens", agree("T or B", *_FIRST), agree("T or S", *_LAST)),
    _agreement(
        "sizes",
        agree("He", *_HE),
        agree("BlockNum", _at("kv_cache", 0), _at("kr_cache", 0)),
        agree("BlockSize", *_BLOCK_SIZES),
    ),
    _types(
        "scale_shape",
        shape("dequant_scale_x", _TokenCount(), 1),
        shape("dequant_scale_w_dq", 1, _at("weight_dq", 1)),
        shape("dequant_scale_w_uq_qr", 1, _at("weight_uq_qr", 1)),
        shape("dequant_scale_w_dkv_kr", 1, _at("weight_dkv_kr", 1)),
        shape("quant_scale_ckv", 1, _at("kv_cache", 3)),
        shape("quant_scale_ckr", 1, _at("kr_cache", 3)),
        shape("smooth_scales_cq", 1, _at("rmsnorm_gamma_cq", 0)),
    ),
    _types("empty_input", not_empty(*_PACKABLE, "weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")),
    _shapes(
        "token_count",
        size("T", range(1048577), Place("token_x", 0, _tokens_of_rank(2))),
        size("B", range(65537), Place("token_x", 0, _tokens_of_rank(3))),
    ),
    _bounded("hidden", "hidden", "He", (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192), *_HE),
    _shapes("heads", size("N", (1, 2, 4, 8, 16, 32, 64, 128), _N)),
    _bounded("hcq", "rank", "Hcq", 1536, *_HCQ),
    _bounded("hckv", "rank", "Hckv", 512, _HCKV, _at("rmsnorm_gamma_ckv", 0), _at("kv_cache", 3)),
    _bounded("head_dim", "head_dim", "D", 128, _D),
    _bounded("rope_dim", "head_dim", "Dr", 64, _DR, _at("rope_cos", -1), _at("kr_cache", 3)),
    _shapes("query_width", equal("N * (D + Dr)", _N * (_D + _DR), _at("weight_uq_qr", 1))),
    _shapes("kv_width", equal("Hckv + Dr", _HCKV + _DR, _at("weight_dkv_kr", 1))),
    _shapes("kv_heads", size("Nkv", 1, _at("kv_cache", 2), _at("kr_cache", 2))),
    _shapes("block_size", size("BlockSize", range(16, 1025, 16), *_BLOCK_SIZES)),
)

# --- The operator -----------------------------------------------------------------------------------------------------


def _scale(name: str, shape: str, description: str) -> Input:
    return Input(name, _SCALE, shape, description, optional=True)


_EXAMPLE = """
import numpy as np
import onnxruntime
from onnxscript import FLOAT, INT64, script

import ascend_onnx
from ascend_onnx import op


@script(opset_version=18)
def prolog(
    token_x: FLOAT["T", 1024],
    weight_dq: FLOAT[1024, 1536],
    weight_uq_qr: FLOAT[1536, 4 * 192],
    weight_uk: FLOAT[4, 128, 512],
    weight_dkv_kr: FLOAT[1024, 576],
    gamma_cq: FLOAT[1536],
    gamma_ckv: FLOAT[512],
    sin: FLOAT["T", 64],
    cos: FLOAT["T", 64],
    cache_index: INT64["T"],
    kv_cache: FLOAT["BlockNum", 16, 1, 512],
    kr_cache: FLOAT["BlockNum", 16, 1, 64],
):
    query, query_rope, kv_cache_out, kr_cache_out = op.MlaPrologV2WeightNz(
        token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr,
        gamma_cq, gamma_ckv, sin, cos, cache_index, kv_cache, kr_cache,
        rmsnorm_epsilon_cq=1e-6,
        rmsnorm_epsilon_ckv=1e-6,
    )
    return query, query_rope, kv_cache_out, kr_cache_out


model = ascend_onnx.attach_functions(prolog.to_model_proto())
session = onnxruntime.InferenceSession(model.SerializeToString())
sizes = {"T": 3, "BlockNum": 2}
feeds = {
    value.name: np.full([sizes.get(dim, dim) for dim in value.shape], 0.01, np.float32)
    for value in session.get_inputs()
}
feeds["cache_index"] = np.array([0, 17, -1])  # the third token is not written
query, query_rope, kv_cache, kr_cache = session.run(None, feeds)
assert query.shape == (3, 4, 512)
assert query_rope.shape == (3, 4, 64)
written = (kv_cache != feeds["kv_cache"]).any(axis=(2, 3))
assert np.argwhere(written).tolist() == [[0, 0], [1, 1]]
"""

OPERATOR = Operator(
    name="MlaPrologV2WeightNz",
    description="Query and key-value projections of multi-head latent attention: low-rank projections, RmsNorm, the "
    "absorbed W_UK, rotary embedding (interleaved in, half-split out) and the write of the new latents into the paged "
    "caches. Tokens with a negative cache_index are not written. The body rounds float32 values to int8; the device "
    "rounds an int8 kr_cache to bfloat16 first and an int8 query half away from zero, so that up to 6 % of these int8 "
    "values differ by 1.",
    source=_SEED,
    aclnn="aclnnMlaPrologV2WeightNz",
    inputs=(
        Input("token_x", _FLOATS_OR_INT8, "(T, He) or (B, S, He)", "The hidden states."),
        Input("weight_dq", _FLOATS_OR_INT8, "(He, Hcq)", "W_DQ, also as FRACTAL_NZ storage of rank 4."),
        Input(
            "weight_uq_qr",
            _FLOATS_OR_INT8,
            "(Hcq, N * (D + Dr))",
            "W_UQ and W_QR, head by head [D | Dr], also as FRACTAL_NZ storage of rank 4.",
        ),
        Input("weight_uk", _FLOATS, "(N, D, Hckv)", "W_UK, the absorbed key up-projection."),
        Input(
            "weight_dkv_kr",
            _FLOATS_OR_INT8,
            "(He, Hckv + Dr)",
            "W_DKV and W_KR, [Hckv | Dr], also as FRACTAL_NZ storage of rank 4.",
        ),
        Input("rmsnorm_gamma_cq", _FLOATS, "(Hcq)", "Weight of the norm of the query latent."),
        Input("rmsnorm_gamma_ckv", _FLOATS, "(Hckv)", "Weight of the norm of the key-value latent."),
        Input("rope_sin", _FLOATS, "(T, Dr) or (B, S, Dr)", "Sines of the rotary embedding."),
        Input("rope_cos", _FLOATS, "(T, Dr) or (B, S, Dr)", "Cosines of the rotary embedding."),
        Input("cache_index", (ir.DataType.INT64,), "(T) or (B, S)", "The cache slot of each token; negative: none."),
        Input("kv_cache", _FLOATS_OR_INT8, "(BlockNum, BlockSize, 1, Hckv)", "The paged cache of latents."),
        Input("kr_cache", _FLOATS_OR_INT8, "(BlockNum, BlockSize, 1, Dr)", "The paged cache of rotary keys."),
        _scale("dequant_scale_x", "(T, 1) or (B * S, 1)", "Scale per token of an int8 token_x."),
        _scale("dequant_scale_w_dq", "(1, Hcq)", "Scale per column of an int8 weight_dq."),
        _scale("dequant_scale_w_uq_qr", "(1, N * (D + Dr))", "Scale per column of an int8 weight_uq_qr."),
        _scale("dequant_scale_w_dkv_kr", "(1, Hckv + Dr)", "Scale per column of an int8 weight_dkv_kr."),
        _scale(
            "quant_scale_ckv",
            "(1, Hckv)",
            "Factor per lane for an int8 kv_cache; only the first counts when token_x is int8 too.",
        ),
        _scale("quant_scale_ckr", "(1, Dr)", "Factor per lane for an int8 kr_cache."),
        _scale("smooth_scales_cq", "(1, Hcq)", "Factor per lane of the query latent before its dynamic quantisation."),
    ),
    outputs=(
        Output("query", _FLOATS_OR_INT8, "(T, N, Hckv) or (B, S, N, Hckv)", "The query in the latent space."),
        Output("query_rope", _FLOATS, "(T, N, Dr) or (B, S, N, Dr)", "The rotary part of the query."),
        Output("kv_cache_out", _FLOATS_OR_INT8, "as kv_cache", "kv_cache with the new latents."),
        Output("kr_cache_out", _FLOATS_OR_INT8, "as kr_cache", "kr_cache with the new rotary keys."),
        Output(
            "dequant_scale_q_nope",
            _SCALE,
            "(T, N, 1) or (B * S, N, 1)",
            "Scale per token and head of an int8 query.",
            optional=True,
        ),
    ),
    attributes=(
        Attribute("rmsnorm_epsilon_cq", ir.AttributeType.FLOAT, "Epsilon of the query norm.", default=1e-5),
        Attribute("rmsnorm_epsilon_ckv", ir.AttributeType.FLOAT, "Epsilon of the key-value norm.", default=1e-5),
        Attribute(
            "cache_mode",
            ir.AttributeType.STRING,
            "Order inside a cache block: rows (PA_BSND) or fractals (PA_NZ).",
            default="PA_BSND",
            choices=("PA_BSND", "PA_NZ"),
        ),
    ),
    infer=_infer,
    overload=_overload,
    body=_body,
    reference=MlaPrologV2WeightNz,
    products=frozenset({Product.A2, Product.A3}),
    constraints=_CONSTRAINTS,
    example=_EXAMPLE,
)
