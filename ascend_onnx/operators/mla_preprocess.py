"""MlaPreprocess: what stands in front of latent attention at decoding, with static int8 activations, as one operator.

    input -> [RmsNorm] -> Quant -> W_DQKV -> c_kv | k_rope | c_q
    c_kv -> RmsNorm -> kv_cache,  k_rope -> RoPE -> kv_cache or kv_cache_rope
    c_q -> RmsNorm -> Quant -> W_UQ -> [nope -> W_UK -> q_out | RoPE -> q_out or q_rope_out]

Letters: T tokens, He the hidden size, Hcq and Hckv the ranks of query and key-value, N heads, D and Dr the head sizes
without and with rotary embedding. With floating weights there is no quantisation and no first norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference.op_run import OpRun
from onnxscript import OpBuilder

from ascend_onnx import layout, numerics
from ascend_onnx.limits import (
    INVALID,
    NULL,
    TILING,
    Limit,
    Place,
    With,
    agree,
    attribute,
    bounded,
    broken,
    equal,
    of_type,
    produced,
    ranks,
    require,
    rule,
    same_type,
    size,
    when,
)
from ascend_onnx.operator import (
    DOMAIN,
    Attribute,
    Body,
    Call,
    Constraint,
    Dim,
    Input,
    Operator,
    Output,
    Product,
    Tensor,
)

__all__ = ["OPERATOR"]

_Array = np.ndarray[Any, np.dtype[Any]]
_Given = Mapping[str, ir.Value]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_FLOATS_OR_INT8 = (*_FLOATS, ir.DataType.INT8)
_INT8, _INT32 = (ir.DataType.INT8,), (ir.DataType.INT32,)
_DESCALES = (ir.DataType.FLOAT, ir.DataType.INT64)
_WEIGHTS = ("wdqkv", "wuq")
_RANKS = {"wdqkv": 2, "wuq": 2, "wuk": 3}
"""The ranks of weights that are not packed."""
_PACKED_AXES: Mapping[tuple[int, int | None], tuple[tuple[int, ...], ...]] = {
    # (k / w0, n, w0) and (k / w0, n / 16, 16, w0) of (n, k); (N, Hckv / w0, D, w0) of (N, D, Hckv)
    (2, 3): ((1,), (0, 2)),
    (2, 4): ((1, 2), (0, 3)),
    (3, 4): ((0,), (2,), (1, 3)),
}
"""Rank of a weight and of its storage: the axes of the storage into which each axis went."""
_ADDENDS = ("beta_0", "quant_offset_0", "bias_0", "beta_1", "quant_offset_1", "bias_1")
"""The inputs without which the body still has a meaning: nothing is added."""
_EPSILON = 1e-6
"""The kernels know no other, whatever the attribute says."""
_NO_QUANT, _STATIC, _PER_TOKEN, _UNKNOWN = "no_quant", "int8", "int8_per_token", "unknown_quant"
_END = 2**63 - 1


def _counts(name: str, shape: tuple[Dim, ...] | None) -> bool:
    """Whether an input of that shape is there: shape (0) stands for an absent one, but no tokens have no slots."""
    return shape != (0,) or name == "slot_mapping"


# --- What a call means ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The facts of a call that its body depends on."""

    float_type: ir.DataType
    cache_mode: int
    quantisation: str
    """How activations become int8: not at all (floating weights), with given scales, or by the maximum of a token."""
    input_norm: bool
    """The input goes through the first RmsNorm."""
    given: frozenset[str]
    """The inputs that are there."""
    unsure: frozenset[str]
    """Of those, the addends that may turn out to be of shape (0), because their size is symbolic."""
    packed: Mapping[str, int]
    """The weights in FRACTAL_NZ storage, with the rank of that storage."""

    @classmethod
    def of(cls, call: Call) -> _Form:
        int8 = call.input("wdqkv").dtype == ir.DataType.INT8
        given = frozenset(name for name, tensor in call.inputs.items() if _counts(name, tensor.shape))
        quantisation = {0: _STATIC, 1: _PER_TOKEN}.get(call.attributes["quant_mode"], _UNKNOWN) if int8 else _NO_QUANT
        return cls(
            float_type=call.input("input").dtype or ir.DataType.FLOAT,
            cache_mode=call.attributes["cache_mode"],
            quantisation=quantisation,
            input_norm=int8 and bool(call.attributes["do_rms_norm"]),
            given=given,
            unsure=frozenset(
                name for name in given.intersection(_ADDENDS) if not isinstance(call.input(name).dim(-1), int)
            ),
            packed={name: rank for name, nd in _RANKS.items() if (rank := call.input(name).rank or 0) > nd},
        )

    @property
    def nz_cache(self) -> bool:
        return self.cache_mode in (2, 3)

    @property
    def cache_type(self) -> ir.DataType:
        return ir.DataType.INT8 if self.cache_mode == 2 else self.float_type


def _overload(call: Call) -> str:
    """Cache mode, quantisation and type, then what is unusual: "cache1_int8_bfloat16_wuk_nz4_without_beta_0"."""
    form = _Form.of(call)
    parts = [f"cache{form.cache_mode}", form.quantisation, form.float_type.name.lower()]
    parts += [f"{name}_nz{rank}" for name, rank in form.packed.items()]
    if form.quantisation != _NO_QUANT:
        parts += [] if form.input_norm else ["no_norm"]
        parts += [f"without_{name}" for name in _ADDENDS if name not in form.given]
        parts += [f"{name}_or_empty" for name in _ADDENDS if name in form.unsure]
    for declared in call.operator.inputs:
        dtype = call.input(declared.name).dtype
        usual = form.float_type
        if declared.types == _DESCALES:
            usual = ir.DataType.INT64 if form.float_type == ir.DataType.FLOAT16 else ir.DataType.FLOAT
        if declared.name in form.given and dtype in (*_FLOATS, ir.DataType.INT64) and dtype != usual:
            parts.append(f"{declared.name}_{dtype.name.lower()}")
    parts += [] if call.output_count == (2 if form.cache_mode == 0 else 4) else [f"{call.output_count}_outputs"]
    return "_".join(parts)


def _infer(call: Call) -> Mapping[str, Tensor]:
    float_type, kv_cache = call.input("input").dtype, call.input("kv_cache")
    tokens = _known(call, ("input", 0), ("slot_mapping", 0), ("cos", 0), ("sin", 0))
    heads, rank, rope = _dim(call, "wuk", 0), _dim(call, "wuk", 2), _known(call, ("cos", 1), ("sin", 1))
    if call.attributes["cache_mode"] == 0:
        width = rank + rope if isinstance(rank, int) and isinstance(rope, int) else kv_cache.dim(3)
        q_rope, kr_cache = Tensor(float_type, (0,)), Tensor(float_type, (0,))
    else:
        width = rank
        q_rope, kr_cache = Tensor(float_type, (tokens, heads, rope)), call.input("kv_cache_rope")
    query = Tensor(kv_cache.dtype, (tokens, heads, width))
    return {"q_out": query, "kv_cache_out": kv_cache, "q_rope_out": q_rope, "kr_cache_out": kr_cache}


def _known(call: Call, *places: tuple[str, int]) -> Dim:
    """The first known one of the dimensions at `places`, (input, axis)."""
    return next((dim for name, axis in places if (dim := call.input(name).dim(axis)) is not None), None)


def _dim(call: Call, name: str, axis: int) -> Dim:
    """A dimension of an input, of its unpacked shape if it is a packed weight."""
    tensor = call.input(name)
    if name not in _RANKS or tensor.rank in (None, _RANKS[name]):
        return tensor.dim(axis)
    factors = _PACKED_AXES.get((_RANKS[name], tensor.rank))
    if factors is None:
        return None
    dims = [tensor.dim(factor) for factor in factors[axis]]
    known = [dim for dim in dims if isinstance(dim, int)]
    return prod(known) if len(known) == len(dims) else dims[0] if len(dims) == 1 else None


# --- Body -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Sizes as values of shape (1), mostly read from the shapes of weights, so that the nodes fold away."""

    heads: ir.Value
    nope: ir.Value
    rank: ir.Value
    rope: ir.Value

    @classmethod
    def of(cls, op: OpBuilder, form: _Form, given: _Given) -> _Sizes:
        wuk = [op.Shape(given["wuk"], start=axis, end=axis + 1) for axis in range(4 if "wuk" in form.packed else 3)]
        heads, nope, rank = (wuk[0], wuk[2], op.Mul(wuk[1], wuk[3])) if "wuk" in form.packed else wuk
        return cls(heads, nope, rank, op.Shape(given["cos"], start=1))


def _body(call: Call) -> Body:
    """The body for the form of `call`: float32 inside, rounded to the type of `input` where the device stores a value.

    Raises `InputError` for an unknown quantisation mode, for types that do not fit the mode, and where an input that
    the mode needs is absent.
    """
    form = _Form.of(call)
    require(call, *_NEEDED_BY_BODY)

    def trace(op: OpBuilder, *inputs: ir.Value | None) -> list[ir.Value]:
        named = zip(call.operator.inputs, inputs, strict=True)
        given = {d.name: value for d, value in named if value is not None and d.name in form.given}
        sizes = _Sizes.of(op, form, given)
        down = _projection(op, form, given, numerics.widen(op, given["input"]), 0, norm=form.input_norm)
        c_q_start = op.Add(sizes.rank, sizes.rope)
        c_kv = _lanes(op, down, [0], sizes.rank)
        c_kv = numerics.rms_norm(op, c_kv, numerics.widen(op, given["gamma_2"]), _EPSILON)
        k_rope = _rotated(op, given, sizes, _lanes(op, down, sizes.rank, c_q_start))
        q_nope, q_rope = _query(op, form, given, sizes, _lanes(op, down, c_q_start, [_END]))

        written = _Slots(op, form, given)
        if form.cache_mode == 0:
            query = numerics.narrow(op, op.Concat(q_nope, q_rope, axis=-1), form.float_type)
            kv_cache = written.into(given["kv_cache"], op.Concat(c_kv, k_rope, axis=-1), form.float_type)
            nothing = numerics.narrow(op, op.ConstantOfShape([0]), form.float_type)
            return [query, kv_cache, nothing, op.Identity(nothing)][: call.output_count]
        query = numerics.narrow(op, q_nope, form.float_type)
        if form.cache_mode == 2:
            # Both are rounded to the float type before they are scaled: the query by head, the rows all alike.
            factor = op.Reshape(numerics.widen(op, given["q_nope_scale"]), [-1, 1])
            query = numerics.quantise(op, op.Mul(numerics.widen(op, query), factor))
            c_kv = numerics.rounded(op, c_kv, form.float_type)
            c_kv = op.Mul(c_kv, op.Reciprocal(numerics.widen(op, given["ctkv_scale"])))
        return [
            query,
            written.into(given["kv_cache"], c_kv, form.cache_type),
            numerics.narrow(op, q_rope, form.float_type),
            written.into(given["kv_cache_rope"], k_rope, form.float_type),
        ][: call.output_count]

    return trace


def _lanes(op: OpBuilder, x: ir.Value, start: ir.Value | list[int], end: ir.Value | list[int]) -> ir.Value:
    lanes: ir.Value = op.Slice(x, start, end, [-1])
    return lanes


def _projection(op: OpBuilder, form: _Form, given: _Given, x: ir.Value, stage: int, *, norm: bool) -> ir.Value:
    """`x` (T, k), normed and quantised, times the weight of the stage, dequantised, rounded to the float type; float32.

    Floating weights take `x` without beta and as it is, rounded to the float type.
    """
    weight = _transposed(op, form, given[_WEIGHTS[stage]])
    if norm:
        x = numerics.rms_norm(op, x, numerics.widen(op, given[f"gamma_{stage}"]), _EPSILON)
    if form.quantisation == _NO_QUANT:
        x = numerics.rounded(op, x, form.float_type) if norm else x
        return numerics.rounded(op, op.MatMul(x, numerics.widen(op, weight)), form.float_type)
    if norm:
        x = _plus(op, form, given, x, f"beta_{stage}")
    descale = given[f"descale_{stage}"]
    if descale.dtype == ir.DataType.INT64:
        descale = numerics.float_of_bits(op, descale)
    if form.quantisation == _PER_TOKEN:
        quantised, token_scale = numerics.dynamic_quantise(op, x)
        exact = op.Cast(numerics.integer_matmul(op, quantised, weight), to=ir.DataType.FLOAT)
        return numerics.rounded(op, op.Mul(op.Mul(exact, descale), token_scale), form.float_type)
    scaled = op.Mul(x, op.Reciprocal(numerics.widen(op, given[f"quant_scale_{stage}"])))
    quantised = numerics.quantise(op, _plus(op, form, given, scaled, f"quant_offset_{stage}"))
    exact = _plus(op, form, given, numerics.integer_matmul(op, quantised, weight), f"bias_{stage}")
    return numerics.rounded(op, op.Mul(op.Cast(exact, to=ir.DataType.FLOAT), descale), form.float_type)


def _plus(op: OpBuilder, form: _Form, given: _Given, x: ir.Value, name: str) -> ir.Value:
    """`x` plus the input `name`; nothing is added if that was not given or turns out to be empty."""
    if name not in given:
        return x
    is_bias = name.startswith("bias")
    addend = given[name] if is_bias else numerics.widen(op, given[name])
    if name in form.unsure:
        width = op.Constant(value_ints=[1]) if name.startswith("quant_offset") else op.Shape(x, start=-1)
        zeros = op.ConstantOfShape(width, value=ir.tensor(np.zeros(1, np.int32 if is_bias else np.float32)))
        addend = op.Slice(op.Concat(op.Reshape(addend, [-1]), zeros, axis=0), [0], width, [0])
    total: ir.Value = op.Add(x, addend)
    return total


def _transposed(op: OpBuilder, form: _Form, weight: ir.Value) -> ir.Value:
    """The matrix (k, n) of a weight (n, k), or of its storage (k / w0, n, w0) or (k / w0, n / 16, 16, w0)."""
    rank = form.packed.get(weight.name or "", 2)
    transposed: ir.Value = op.Transpose(weight, perm=[[1, 0], [0, 2, 1], [0, 3, 1, 2]][rank - 2])
    if rank == 2:
        return transposed
    k = op.Mul(op.Shape(weight, start=0, end=1), op.Shape(weight, start=-1))
    unpacked: ir.Value = op.Reshape(transposed, op.Concat(k, [-1], axis=0))
    return unpacked


def _query(op: OpBuilder, form: _Form, given: _Given, sizes: _Sizes, c_q: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The query in the latent space (T, N, Hckv) and its rotary part (T, N, Dr), not rounded."""
    q = _projection(op, form, given, c_q, 1, norm=True)
    q = op.Reshape(q, op.Concat([-1], sizes.heads, op.Add(sizes.nope, sizes.rope), axis=0))
    weight = given["wuk"]
    if "wuk" in form.packed:
        shape = op.Concat(sizes.heads, sizes.nope, sizes.rank, axis=0)
        weight = op.Reshape(op.Transpose(weight, perm=[0, 2, 1, 3]), shape)
    # One product per head with all tokens as its rows, so that each head's W_UK is read once.
    nope = op.Transpose(_lanes(op, q, [0], sizes.nope), perm=[1, 0, 2])
    q_nope = op.Transpose(op.MatMul(nope, numerics.widen(op, weight)), perm=[1, 0, 2])
    return q_nope, _rotated(op, given, sizes, _lanes(op, q, sizes.nope, [_END]), per_head=True)


def _rotated(op: OpBuilder, given: _Given, sizes: _Sizes, x: ir.Value, *, per_head: bool = False) -> ir.Value:
    """RoPE of half-split features, (T, Dr) or (T, N, Dr)."""
    cos, sin = (numerics.widen(op, given[name]) for name in ("cos", "sin"))
    if per_head:
        cos, sin = op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1])
    half = op.Div(sizes.rope, [2])
    return numerics.rotate(op, _lanes(op, x, [0], half), _lanes(op, x, half, [_END]), cos, sin)


class _Slots:
    """The slots of the tokens; a negative one means "do not write". Such tokens are taken out, as are their rows."""

    def __init__(self, op: OpBuilder, form: _Form, given: _Given) -> None:
        self._op = op
        self._nz = form.nz_cache
        axis = 2 if form.nz_cache else 1
        self._block_size = op.Shape(given["kv_cache"], start=axis, end=axis + 1)
        slots = op.Cast(given["slot_mapping"], to=ir.DataType.INT64)
        capacity = op.Mul(op.Shape(given["kv_cache"], start=0, end=1), self._block_size)
        self._valid = op.And(op.GreaterOrEqual(slots, [0]), op.Less(slots, capacity))
        self._slots = op.Compress(slots, self._valid, axis=0)

    def into(self, cache: ir.Value, rows: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The cache of type `dtype` with the float32 rows, (T, H), in their slots."""
        op = self._op
        rows = op.Compress(rows, self._valid, axis=0)
        rows = numerics.quantise(op, rows) if dtype == ir.DataType.INT8 else numerics.narrow(op, rows, dtype)
        lanes = op.Shape(cache, start=-1) if self._nz else None
        return numerics.scatter_rows(op, cache, self._slots, rows, block_size=self._block_size, lanes=lanes)


# --- Reference --------------------------------------------------------------------------------------------------------


class MlaPreprocess(OpRun):
    """The operator in numpy, token by token where the device addresses memory; written independently of the body."""

    op_domain = DOMAIN

    def _run(
        self,
        *inputs: _Array | None,
        cache_mode: int = 0,
        quant_mode: int = 0,
        do_rms_norm: int = 1,
        **_: float,
    ) -> tuple[_Array, ...]:
        named = zip((declared.name for declared in OPERATOR.inputs), inputs, strict=False)
        given = {name: array for name, array in named if array is not None and _counts(name, array.shape)}
        x, cos, sin, slots = (given[name] for name in ("input", "cos", "sin", "slot_mapping"))
        dtype = x.dtype
        key = layout.heads_nz_to_nd(given["wuk"]) if given["wuk"].ndim == 4 else given["wuk"]
        heads, nope, rank = key.shape

        def latent(x: _Array, stage: int, *, norm: bool) -> _Array:
            return _projected(_f32(x), given, stage, norm=norm, per_token=quant_mode == 1, dtype=dtype)

        down = latent(x, 0, norm=bool(do_rms_norm) and given["wdqkv"].dtype == np.int8)
        c_kv, k_rope, c_q = np.split(down, (rank, rank + cos.shape[1]), axis=1)
        q = latent(c_q, 1, norm=True).reshape(len(x), heads, nope + cos.shape[1])
        q_nope = np.einsum("thd,hdc->thc", q[..., :nope], _f32(key)).astype(dtype)
        q_rope = _turned(q[..., nope:], cos[:, None], sin[:, None]).astype(dtype)
        c_kv, k_rope = _normed(c_kv, given["gamma_2"]), _turned(k_rope, cos, sin).astype(dtype)
        nothing = np.zeros(0, dtype)
        if cache_mode == 0:
            row = np.concatenate((c_kv.astype(dtype), k_rope), axis=1)
            query = np.concatenate((q_nope, q_rope), axis=2)
            results = [query, _filled(given["kv_cache"], row, slots, nz=False), nothing, nothing]
        else:
            row = c_kv.astype(dtype)
            if cache_mode == 2:
                row = _int8(_f32(row) * (1 / _f32(given["ctkv_scale"])))
                q_nope = _int8(_f32(q_nope) * _f32(given["q_nope_scale"]).reshape(-1, 1))
            nz = cache_mode > 1
            caches = [_filled(given[n], r, slots, nz=nz) for n, r in (("kv_cache", row), ("kv_cache_rope", k_rope))]
            results = [q_nope, caches[0], q_rope, caches[1]]
        return tuple(results[: len(self.onnx_node.output)])


def _f32(x: _Array) -> _Array:
    return x.astype(np.float32)


def _int8(x: _Array) -> _Array:
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def _normed(x: _Array, gamma: _Array) -> _Array:
    mean = np.einsum("th,th->t", x, x)[:, None] / np.float32(x.shape[-1])
    return _f32(x * (1 / np.sqrt(mean + np.float32(_EPSILON))) * _f32(gamma))


def _turned(x: _Array, cos: _Array, sin: _Array) -> _Array:
    low, high = np.split(x, 2, axis=-1)
    return _f32(x * _f32(cos) + np.concatenate((-high, low), axis=-1) * _f32(sin))


def _projected(
    x: _Array, given: Mapping[str, _Array], stage: int, *, norm: bool, per_token: bool, dtype: np.dtype[Any]
) -> _Array:
    """`x` (T, k) in float32, through norm, int8 and the weight (n, k) of the stage, rounded to `dtype`; float32."""

    def added(name: str) -> _Array:
        return given.get(f"{name}_{stage}", np.zeros(1, np.int8))

    weight = given[_WEIGHTS[stage]]
    weight = layout.transposed_nz_to_nd(weight) if weight.ndim > 2 else weight
    x = _normed(x, given[f"gamma_{stage}"]) if norm else x
    if weight.dtype != np.int8:
        return _f32((_f32(x.astype(dtype)) @ _f32(weight).T).astype(dtype))
    x = x + _f32(added("beta")) if norm else x
    factor = given[f"descale_{stage}"]
    factor = layout.bits_to_descale(factor) if factor.dtype == np.int64 else factor
    if per_token:
        token_scale = _f32(np.abs(x).max(axis=1, keepdims=True, initial=0) / np.float32(127))
        levels = _int8(np.divide(x, token_scale, out=np.zeros_like(x), where=token_scale != 0))
        return _f32((_f32(levels.astype(np.int64) @ weight.T.astype(np.int64)) * factor * token_scale).astype(dtype))
    levels = _int8(x * (1 / _f32(given[f"quant_scale_{stage}"])) + _f32(added("quant_offset")))
    exact = levels.astype(np.int64) @ weight.T.astype(np.int64) + added("bias")
    return _f32((_f32(exact) * factor).astype(dtype))


def _filled(cache: _Array, rows: _Array, slots: _Array, *, nz: bool) -> _Array:
    """The cache with row t at slot t: (BlockNum, BlockSize, 1, H), or NZ blocks (BlockNum, H / c0, BlockSize, c0)."""
    out = cache.copy()
    block_size = cache.shape[2 if nz else 1]
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if 0 <= slot < len(out) * block_size:
            block, place = divmod(slot, block_size)
            target = out[block, :, place] if nz else out[block, place]
            target[...] = row.reshape(target.shape)
    return out


# --- The limits of the device -----------------------------------------------------------------------------------------

_SEED = "aclnnMlaPreprocess"
_TABLE = f"{_SEED}, parameter table"
_LIMITS = f"{_SEED}, constraints"
_GE = "GE operator MlaPreprocess, tiling and kernels"
_DOWN, _UP = "Hckv + Dr + Hcq", "N * (D + Dr)"
"""The sizes of the two projections."""
_RESERVED = {
    "wdq_dim": 1536,
    **dict.fromkeys(("q_rope_dim", "k_rope_dim"), 64),
    **dict.fromkeys(("q_rotary_coeff", "k_rotary_coeff"), 2),
    **dict.fromkeys(("transpose_wdq", "transpose_wuq", "transpose_wuk", "wdkv_split_count"), 1),
}
"""Attributes that no kernel reads, with the one value that the device accepts."""
_OF_INPUT_TYPE = (
    *("gamma_0", "beta_0", "quant_scale_0", "gamma_1", "beta_1", "quant_scale_1", "gamma_2", "cos", "sin", "wuk"),
    *("kv_cache_rope", "ctkv_scale", "q_nope_scale"),
)
_SCALES = ("quant_scale_0", "quant_offset_0", "quant_scale_1", "quant_offset_1", "ctkv_scale")
_CACHES = ("kv_cache", "kv_cache_rope")
_JOINED, _SPLIT, _NZ = With("cache_mode", 0), With("cache_mode", 1, 2, 3), With("cache_mode", 2, 3)
_ROWS, _INT8_CACHE = With("cache_mode", 0, 1), With("cache_mode", 2)


def _logical_shape(call: Call, name: str) -> tuple[Dim, ...] | None:
    """The shape of an input that is there, unpacked if it is a packed weight."""
    rank = _RANKS.get(name, call.input(name).rank)
    if rank is None or name not in _Form.of(call).given:
        return None
    return tuple(_dim(call, name, axis) for axis in range(rank))


_at = partial(Place, shape_of=_logical_shape)


def _vectors(*names: str) -> list[Place]:
    return [_at(name, -1) for name in names]  # a vector may come as a matrix of one row


_T = [_at("input", 0), _at("cos", 0), _at("sin", 0), *_vectors("slot_mapping")]
_HE = [_at("input", 1), _at("wdqkv", 1), *_vectors("gamma_0", "beta_0")]
_HCQ = [_at("wuq", 1), *_vectors("gamma_1", "beta_1")]
_HCKV = [_at("wuk", 2), *_vectors("gamma_2")]
_DR = [_at("cos", 1), _at("sin", 1)]
_N = [_at("wuk", 0), *_vectors("q_nope_scale")]
_D = [_at("wuk", 1)]
_DOWN_ROWS = [_at("wdqkv", 0), *_vectors("descale_0", "bias_0")]
_UP_ROWS = [_at("wuq", 0), *_vectors("descale_1", "bias_1")]


def _wrong_float_weights(call: Call) -> str | None:
    """wdqkv and wuq are int8, or bfloat16 as input is."""
    return broken(
        f"{name} must be int8, or bfloat16 as input is, got {_named(dtype)}"
        for name in _WEIGHTS
        if (dtype := call.input(name).dtype) not in (None, ir.DataType.INT8)
        and (dtype != ir.DataType.BFLOAT16 or call.input("input").dtype not in (None, dtype))
    )


def _wrong_descale(call: Call) -> str | None:
    """descale_0 and descale_1 are int64 with float16 input and float32 with bfloat16 input."""
    dtype = call.input("input").dtype
    needed = {ir.DataType.FLOAT16: ir.DataType.INT64, ir.DataType.BFLOAT16: ir.DataType.FLOAT}.get(dtype or _FLOATS[2])
    return broken(
        f"{name} must be {_named(needed)} with {_named(dtype)} input, got {_named(got)}"
        for name in ("descale_0", "descale_1")
        if None not in (needed, got := call.input(name).dtype) and got != needed
    )


def _wrong_cache_type(call: Call) -> str | None:
    """kv_cache is int8 in cache_mode 2; otherwise the caches have the type of input."""
    mode, dtype = call.attributes["cache_mode"], call.input("input").dtype
    needed = {"kv_cache": ir.DataType.INT8 if mode == 2 else dtype, "kv_cache_rope": dtype if mode else None}
    return broken(
        f"{name} must be {_named(expected)} with cache_mode {mode} and {_named(dtype)} input, got {_named(got)}"
        for name, expected in needed.items()
        if None not in (expected, got := call.input(name).dtype) and got != expected
    )


def _named(dtype: ir.DataType | None) -> str:
    return "unknown" if dtype is None else dtype.name.lower()


def _missing_input(call: Call, *, on_device: bool = True) -> str | None:
    """All inputs that the mode needs are given; only beta and bias may be absent."""
    form, mode = _Form.of(call), call.attributes["cache_mode"]
    scales = (form.quantisation == _STATIC, "int8 weights and quant_mode 0")
    needed = {
        **dict.fromkeys(("gamma_1", "gamma_2"), (True, "every mode")),
        "gamma_0": (form.input_norm, "do_rms_norm 1"),
        **dict.fromkeys(("quant_scale_0", "quant_scale_1"), scales),
        # The body takes an absent offset for 0.
        **(dict.fromkeys(("quant_offset_0", "quant_offset_1"), scales) if on_device else {}),
        **dict.fromkeys(("descale_0", "descale_1"), (form.quantisation != _NO_QUANT, "int8 weights")),
        "kv_cache_rope": (mode != 0, f"cache_mode {mode}"),
        **dict.fromkeys(("ctkv_scale", "q_nope_scale"), (mode == 2, "cache_mode 2")),
    }
    return broken(
        f"{name} must be given with {reason}, got none"
        for name, (is_needed, reason) in needed.items()
        if is_needed and name not in form.given
    )


def _wrong_storage(call: Call) -> str | None:
    """Packed weights have lines of 32 bytes, 16 lines to a fractal."""
    for name, rank in _Form.of(call).packed.items():
        tensor = call.input(name)
        lanes = None if tensor.dtype is None else layout.fractal_width(tensor.dtype.bitwidth // 8)
        for axis, expected in ((-1, lanes), (2, 16 if name in _WEIGHTS and rank == 4 else None)):
            got = tensor.dim(axis)
            if expected is not None and isinstance(got, int) and got != expected:
                return f"a packed {name} must have {expected} in axis {axis}, got {got}"
    return None


def _wrong_epsilon(call: Call) -> str | None:
    """epsilon is 1e-6, the only one that the kernels know."""
    epsilon = call.attributes["epsilon"]
    return None if np.float32(epsilon) == np.float32(_EPSILON) else f"epsilon must be {_EPSILON}, got {epsilon}"


def _present(limit: Limit) -> Limit:
    """A limit on the inputs that are there, of which tensors of shape (0) are none."""

    @wraps(limit)
    def check(call: Call) -> str | None:
        given = {name: tensor for name, tensor in call.inputs.items() if name in _Form.of(call).given}
        return limit(replace(call, inputs=given))

    return check


def _rule(code: int, source: str, name: str, *limits: Limit) -> Constraint:
    return rule(code, source, name, *(_present(limit) for limit in limits))


def _unknown_quantisation(call: Call) -> str | None:
    """quant_mode is 0, or 1 without a device."""
    if _Form.of(call).quantisation != _UNKNOWN:
        return None
    return f"quant_mode must be 0, or 1 without a device, got {call.attributes['quant_mode']}"


_NEEDED_BY_BODY = (
    _unknown_quantisation,
    same_type(*_WEIGHTS),
    _wrong_cache_type,
    partial(_missing_input, on_device=False),
)
_invalid, _tiling = partial(_rule, INVALID, _TABLE), partial(_rule, TILING, _LIMITS)
_bounded = partial(bounded, TILING, _LIMITS)
_CONSTRAINTS = (
    _invalid(
        "type", of_type(["input"], ir.DataType.FLOAT16, ir.DataType.BFLOAT16), same_type("input", *_OF_INPUT_TYPE)
    ),
    _invalid("weight_types", same_type(*_WEIGHTS)),
    _rule(TILING, _GE, "float_weights", _wrong_float_weights),
    _invalid("descale_type", _wrong_descale),
    _invalid("cache_type", _wrong_cache_type),
    _rule(NULL, _TABLE, "missing_input", _missing_input),
    _invalid("reserved_attribute", *(attribute(name, value) for name, value in _RESERVED.items())),
    _invalid("quant_mode", attribute("quant_mode", 0)),
    _rule(INVALID, _GE, "epsilon", _wrong_epsilon),
    _invalid("unproduced_output", *(produced(name, _SPLIT) for name in ("q_rope_out", "kr_cache_out"))),
    _invalid(
        "rank",
        ranks({"input": 2, "cos": 2, "sin": 2, "slot_mapping": 1, "kv_cache": 4, "kv_cache_rope": 4}),
        ranks({"wdqkv": range(2, 5), "wuq": range(2, 5), "wuk": (3, 4)}),
    ),
    _invalid("storage", _wrong_storage),
    rule(
        TILING,
        _TABLE,
        "shapes_agree",
        *(agree(letter, *places) for letter, places in (("T", _T), ("He", _HE), ("Hcq", _HCQ), ("Hckv", _HCKV))),
        *(agree(letter, *places) for letter, places in (("Dr", _DR), ("N", _N), (_DOWN, _DOWN_ROWS), (_UP, _UP_ROWS))),
    ),
    _tiling(
        "weight_rows",
        equal(_DOWN, _HCKV[0] + _DR[0] + _HCQ[1], _DOWN_ROWS[0]),
        equal(_UP, _N[0] * (_D[0] + _DR[0]), _UP_ROWS[0]),
    ),
    _tiling("token_count", size("T", range(257), *_T)),
    _bounded("hidden", "hidden", "He", range(2048, 10241, 256), *_HE),
    _bounded("hcq", "rank", "Hcq", range(32, 4097, 32), *_HCQ),
    _bounded("hckv", "rank", "Hckv", 512, *_HCKV),
    _bounded("rope_dim", "head_dim", "Dr", 64, *_DR),
    _tiling("heads", size("N", range(1, 129), *_N)),
    _bounded("head_dim", "head_dim", "D", range(16, 257, 16), *_D),
    _tiling("scale_shape", size("the size of a scale", 1, *_vectors(*_SCALES))),
    _tiling(
        "block_count",
        size("BlockNum", 192, _at("kv_cache", 0)),
        when(_SPLIT, size("BlockNum", 192, _at("kv_cache_rope", 0))),
    ),
    _tiling(
        "block_size",
        when(_ROWS, size("BlockSize", 128, _at("kv_cache", 1))),
        when(With("cache_mode", 1), size("BlockSize", 128, _at("kv_cache_rope", 1))),
        when(_NZ, size("BlockSize", 128, *(_at(name, 2) for name in _CACHES))),
    ),
    _rule(
        TILING,
        _TABLE,
        "cache_shape",
        when(_ROWS, size("Nkv", 1, _at("kv_cache", 2))),
        when(_JOINED, equal("Hckv + Dr", _HCKV[0] + _DR[0], _at("kv_cache", 3))),
        when(With("cache_mode", 1), size("Nkv", 1, _at("kv_cache_rope", 2))),
        when(With("cache_mode", 1), equal("Hckv", _HCKV[0], _at("kv_cache", 3))),
        when(With("cache_mode", 1), equal("Dr", _DR[0], _at("kv_cache_rope", 3))),
        when(_INT8_CACHE, size("c0", 32, _at("kv_cache", 3))),
        when(With("cache_mode", 3), size("c0", 16, _at("kv_cache", 3))),
        when(_NZ, size("c0", 16, _at("kv_cache_rope", 3))),
        when(_NZ, equal("Hckv", _HCKV[0], _at("kv_cache", 1) * _at("kv_cache", 3))),
        when(_NZ, equal("Dr", _DR[0], _at("kv_cache_rope", 1) * _at("kv_cache_rope", 3))),
    ),
)

# --- The operator -----------------------------------------------------------------------------------------------------


def _reserved(name: str, description: str) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, f"{description}; reserved, no kernel reads it.", _RESERVED[name])


def _optional(name: str, types: tuple[ir.DataType, ...], shape: str, description: str) -> Input:
    return Input(name, types, shape, description, optional=True)


_EXAMPLE = """
import numpy as np
import onnxruntime
from onnxscript import FLOAT, INT32, script

import ascend_onnx
from ascend_onnx import op


@script(opset_version=18)
def preprocess(
    x: FLOAT["T", 2048],
    gamma_0: FLOAT[2048],
    wdqkv: FLOAT[2112, 2048],
    gamma_1: FLOAT[1536],
    wuq: FLOAT[4 * 192, 1536],
    gamma_2: FLOAT[512],
    cos: FLOAT["T", 64],
    sin: FLOAT["T", 64],
    wuk: FLOAT[4, 128, 512],
    kv_cache: FLOAT["BlockNum", 128, 1, 512],
    kv_cache_rope: FLOAT["BlockNum", 128, 1, 64],
    slot_mapping: INT32["T"],
):
    q_out, kv_cache_out, q_rope_out, kr_cache_out = op.MlaPreprocess(
        x, gamma_0, None, None, None, wdqkv, None, None,
        gamma_1, None, None, None, wuq, None, None,
        gamma_2, cos, sin, wuk, kv_cache, kv_cache_rope, slot_mapping,
        cache_mode=1,
    )
    return q_out, kv_cache_out, q_rope_out, kr_cache_out


model = ascend_onnx.attach_functions(preprocess.to_model_proto())
session = onnxruntime.InferenceSession(model.SerializeToString())
sizes = {"T": 3, "BlockNum": 1}
feeds = {
    value.name: np.full([sizes.get(dim, dim) for dim in value.shape], 0.01, np.float32)
    for value in session.get_inputs()
}
feeds["slot_mapping"] = np.array([0, 5, -1], np.int32)  # the third token is not written
q_out, kv_cache, q_rope_out, kr_cache = session.run(None, feeds)
assert q_out.shape == (3, 4, 512)
assert q_rope_out.shape == (3, 4, 64)
written = (kv_cache != feeds["kv_cache"]).any(axis=(2, 3))
assert np.argwhere(written).tolist() == [[0, 0], [0, 5]]
"""

OPERATOR = Operator(
    name="MlaPreprocess",
    description="Everything in front of latent attention at decoding: norm and quantisation of the input, the joint "
    "down-projection to [Hckv latent | Dr rotary key | Hcq query], norm and quantisation of the query latent, its "
    "up-projection, the absorbed W_UK, rotary embedding of half-split features, and the write of latent and rotary key "
    "into the paged cache. Tokens with a negative slot are not written. A tensor of shape (0) stands for an absent "
    "input. The epsilon of all norms is 1e-6. The body rounds float32 values to int8; the device casts them through "
    "float16, so that up to 6 % of its int8 values differ by 1.",
    source=_SEED,
    aclnn="aclnnMlaPreprocess",
    inputs=(
        Input("input", _FLOATS, "(T, He)", "The hidden states."),
        Input("gamma_0", _FLOATS, "(He)", "Weight of the norm of the input."),
        _optional("beta_0", _FLOATS, "(He)", "Added after that norm."),
        _optional("quant_scale_0", _FLOATS, "(1)", "Scale of the int8 input, which is divided by it."),
        _optional("quant_offset_0", _INT8, "(1)", "Zero point of the int8 input."),
        Input(
            "wdqkv",
            _FLOATS_OR_INT8,
            f"({_DOWN}, He)",
            "W_DKV, W_KR and W_DQ, transposed; also FRACTAL_NZ storage (He / w0, n, w0) or (He / w0, n / 16, 16, w0).",
        ),
        _optional(
            "descale_0",
            _DESCALES,
            f"({_DOWN})",
            "Scale per row of an int8 wdqkv; for float16 input int64 whose low 32 bits are the float32.",
        ),
        _optional("bias_0", _INT32, f"({_DOWN})", "Added to the int32 product."),
        Input("gamma_1", _FLOATS, "(Hcq)", "Weight of the norm of the query latent."),
        _optional("beta_1", _FLOATS, "(Hcq)", "Added after that norm; not with floating weights."),
        _optional("quant_scale_1", _FLOATS, "(1)", "Scale of the int8 query latent, which is divided by it."),
        _optional("quant_offset_1", _INT8, "(1)", "Zero point of the int8 query latent."),
        Input(
            "wuq",
            _FLOATS_OR_INT8,
            f"({_UP}, Hcq)",
            "W_UQ and W_QR, transposed, head by head [D | Dr]; also FRACTAL_NZ storage, like wdqkv.",
        ),
        _optional("descale_1", _DESCALES, f"({_UP})", "Scale per row of an int8 wuq, like descale_0."),
        _optional("bias_1", _INT32, f"({_UP})", "Added to the int32 product."),
        Input("gamma_2", _FLOATS, "(Hckv)", "Weight of the norm of the key-value latent."),
        Input("cos", _FLOATS, "(T, Dr)", "Cosines of the rotary embedding."),
        Input("sin", _FLOATS, "(T, Dr)", "Sines of the rotary embedding."),
        Input("wuk", _FLOATS, "(N, D, Hckv)", "W_UK; also FRACTAL_NZ storage (N, Hckv / w0, D, w0)."),
        Input(
            "kv_cache",
            _FLOATS_OR_INT8,
            "(BlockNum, BlockSize, 1, H) or (BlockNum, H / c0, BlockSize, c0)",
            "The paged cache of latents, with the rotary keys in cache_mode 0; the second shape in cache_mode 2 and 3.",
        ),
        _optional(
            "kv_cache_rope",
            _FLOATS,
            "(BlockNum, BlockSize, 1, Dr) or (BlockNum, Dr / c0, BlockSize, c0)",
            "The paged cache of rotary keys, except in cache_mode 0.",
        ),
        Input("slot_mapping", _INT32, "(T)", "The cache slot of each token; negative: none."),
        _optional("ctkv_scale", _FLOATS, "(1)", "Scale of an int8 kv_cache: rows are divided by it."),
        _optional("q_nope_scale", _FLOATS, "(N)", "Factor per head of the int8 query of cache_mode 2."),
    ),
    outputs=(
        Output(
            "q_out",
            _FLOATS_OR_INT8,
            "(T, N, Hckv + Dr) or (T, N, Hckv)",
            "The query in the latent space, with the rotary part behind it in cache_mode 0; in the type of kv_cache.",
        ),
        Output("kv_cache_out", _FLOATS_OR_INT8, "as kv_cache", "kv_cache with the new rows."),
        Output("q_rope_out", _FLOATS, "(T, N, Dr)", "The rotary query; not in cache_mode 0.", optional=True),
        Output("kr_cache_out", _FLOATS, "as kv_cache_rope", "kv_cache_rope with the new rows.", optional=True),
    ),
    attributes=(
        _reserved("wdq_dim", "Hcq"),
        _reserved("q_rope_dim", "Dr of the query"),
        _reserved("k_rope_dim", "Dr of the key"),
        Attribute("epsilon", ir.AttributeType.FLOAT, "Epsilon of the norms; they use 1e-6 whatever it is.", _EPSILON),
        _reserved("q_rotary_coeff", "Parts in which rotary embedding splits the query"),
        _reserved("k_rotary_coeff", "Parts in which rotary embedding splits the key"),
        _reserved("transpose_wdq", "Whether wdqkv is transposed"),
        _reserved("transpose_wuq", "Whether wuq is transposed"),
        _reserved("transpose_wuk", "Whether wuk is transposed"),
        Attribute(
            "cache_mode",
            ir.AttributeType.INT,
            "0: latent and rotary key in one cache; 1: in two; 2: in two of NZ order, latent and query as int8; 3: in "
            "two of NZ order.",
            0,
            choices=(0, 1, 2, 3),
        ),
        Attribute(
            "quant_mode",
            ir.AttributeType.INT,
            "How int8 weights have activations quantised. 0: by scale and offset. 1: by the maximum of each token, "
            "without bias; only the body has it.",
            0,
        ),
        Attribute(
            "do_rms_norm",
            ir.AttributeType.INT,
            "Whether the input is normed before it is quantised; with floating weights it is not.",
            1,
            choices=(0, 1),
        ),
        _reserved("wdkv_split_count", "Parts of wdqkv"),
    ),
    infer=_infer,
    overload=_overload,
    body=_body,
    reference=MlaPreprocess,
    products=frozenset({Product.A2, Product.A3}),
    constraints=_CONSTRAINTS,
    example=_EXAMPLE,
)
