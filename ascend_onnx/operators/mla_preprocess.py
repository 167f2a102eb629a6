"""MlaPreprocess: what stands in front of latent attention at decoding, with static int8 activations, as one operator.

    input -> [RmsNorm] -> Quant -> W_DQKV -> ckv | k_rope | q_lora
    ckv -> RmsNorm -> kv_cache,  k_rope -> RoPE -> kv_cache or kv_cache_rope
    q_lora -> RmsNorm -> Quant -> W_UQ -> [nope -> W_UK -> q_out | RoPE -> q_out or q_rope_out]

Letters: T tokens, He the hidden size, Hcq and Hckv the ranks of query and key-value, N heads, D and Dr the head sizes
without and with rotary embedding. With floating weights there is no quantisation and no first norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx.reference.op_run import OpRun
from onnxscript import OpBuilder

from ascend_onnx import layout, numerics
from ascend_onnx.errors import InputError
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

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_FLOATS_OR_INT8 = (*_FLOATS, ir.DataType.INT8)
_INT8, _INT32 = (ir.DataType.INT8,), (ir.DataType.INT32,)
_DESCALES = (ir.DataType.FLOAT, ir.DataType.INT64)
_WEIGHTS = ("wdqkv", "wuq")
_NEED_NOT_BE_GIVEN = ("beta_0", "quant_offset_0", "bias_0", "beta_1", "quant_offset_1", "bias_1")
_EPSILON = 1e-6
"""The kernels know no other, whatever the attribute says."""
_NO_QUANT, _STATIC, _PER_TOKEN = "no_quant", "int8", "int8_per_token"
_END = 2**63 - 1


def _present(call: Call, name: str) -> bool:
    """Whether the call gives `name`; a tensor of shape (0) stands for an absent one."""
    return call.has(name) and call.input(name).shape != (0,)


# --- What a call means ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The facts of a call that its body depends on."""

    float_type: ir.DataType
    cache_mode: int
    quantisation: str
    """How activations are quantised: not at all (floating weights), with given scales, or by the maximum of a token."""
    input_norm: bool
    """The input goes through the first RmsNorm."""
    given: frozenset[str]
    """The inputs that are there."""
    unsure: frozenset[str]
    """Of those, vectors that may turn out to be of shape (0), because their size is symbolic."""
    packed: Mapping[str, int]
    """The weights in FRACTAL_NZ storage, with the rank of that storage."""

    @classmethod
    def of(cls, call: Call) -> _Form:
        given = frozenset(declared.name for declared in call.operator.inputs if _present(call, declared.name))
        ranks = {"wdqkv": 2, "wuq": 2, "wuk": 3}
        int8 = call.input("wdqkv").dtype == ir.DataType.INT8
        modes = {0: _STATIC, 1: _PER_TOKEN}
        quantisation = modes.get(call.attributes["quant_mode"], "unknown") if int8 else _NO_QUANT
        return cls(
            float_type=call.input("input").dtype or ir.DataType.FLOAT,
            cache_mode=call.attributes["cache_mode"],
            quantisation=quantisation,
            input_norm=int8 and bool(call.attributes["do_rms_norm"]),
            given=given,
            unsure=frozenset(
                name
                for name in _NEED_NOT_BE_GIVEN
                if name in given and not all(isinstance(dim, int) for dim in call.input(name).shape or (None,))
            ),
            packed={name: rank for name in ranks if (rank := call.input(name).rank or 0) > ranks[name]},
        )

    @property
    def int8_cache(self) -> bool:
        return self.cache_mode == 2

    @property
    def nz_cache(self) -> bool:
        return self.cache_mode in (2, 3)


def _overload(call: Call) -> str:
    """Cache mode, quantisation and type, then what is unusual: "cache1_int8_float16_without_beta_0_descale_0_int64"."""
    form = _Form.of(call)
    parts = [f"cache{form.cache_mode}", form.quantisation, form.float_type.name.lower()]
    parts += [] if form.input_norm or form.quantisation == _NO_QUANT else ["no_norm"]
    parts += [f"{name}_nz{rank}" for name, rank in form.packed.items()]
    if form.quantisation != _NO_QUANT:
        parts += [f"without_{name}" for name in _NEED_NOT_BE_GIVEN if name not in form.given]
        parts += [f"{name}_or_empty" for name in _NEED_NOT_BE_GIVEN if name in form.unsure]
    for declared in call.operator.inputs:
        dtype = call.input(declared.name).dtype
        usual = {form.float_type} if form.float_type in declared.types else {ir.DataType.FLOAT}
        if declared.name in form.given and dtype in (*_FLOATS, ir.DataType.INT64) and dtype not in usual:
            parts.append(f"{declared.name}_{dtype.name.lower()}")
    usual_outputs = 2 if form.cache_mode == 0 else 4
    return "_".join(parts + ([] if call.output_count == usual_outputs else [f"{call.output_count}_outputs"]))


def _infer(call: Call) -> Mapping[str, Tensor]:
    heads, _, rank = _wuk(call)
    tokens = _first_known(call, ("input", 0), ("slot_mapping", 0), ("cos", 0), ("sin", 0))
    rope = _first_known(call, ("cos", -1), ("sin", -1))
    float_type, kv_cache = call.input("input").dtype, call.input("kv_cache")
    if call.attributes["cache_mode"] == 0:
        empty = Tensor(float_type, (0,))
        width = kv_cache.dim(3)
        if width is None and isinstance(rank, int) and isinstance(rope, int):
            width = rank + rope
        outputs = {"q_out": Tensor(kv_cache.dtype, (tokens, heads, width)), "q_rope_out": empty, "kr_cache_out": empty}
    else:
        outputs = {
            "q_out": Tensor(kv_cache.dtype, (tokens, heads, rank)),
            "q_rope_out": Tensor(float_type, (tokens, heads, rope)),
            "kr_cache_out": call.input("kv_cache_rope"),
        }
    return {**outputs, "kv_cache_out": kv_cache}


def _first_known(call: Call, *places: tuple[str, int]) -> Dim:
    """The first known one of the dimensions at `places`, (input, axis)."""
    return next((dim for name, axis in places if (dim := call.input(name).dim(axis)) is not None), None)


def _wuk(call: Call) -> tuple[Dim, Dim, Dim]:
    """N, D and Hckv from wuk, (N, D, Hckv) or its storage (N, Hckv / w0, D, w0)."""
    tensor = call.input("wuk")
    if tensor.rank != 4:
        return tensor.dim(0), tensor.dim(1), tensor.dim(2)
    return tensor.dim(0), tensor.dim(2), _times(tensor.dim(1), tensor.dim(3))


def _matrix(call: Call, name: str) -> tuple[Dim, Dim]:
    """n and k of a weight (n, k) or of its storage (k / w0, n, w0) or (k / w0, n / 16, 16, w0)."""
    tensor = call.input(name)
    if tensor.rank not in (3, 4):
        return tensor.dim(0), tensor.dim(1)
    rows = tensor.dim(1) if tensor.rank == 3 else _times(tensor.dim(1), tensor.dim(2))
    return rows, _times(tensor.dim(0), tensor.dim(-1))


def _times(first: Dim, second: Dim) -> Dim:
    return first * second if isinstance(first, int) and isinstance(second, int) else None


# --- Body -------------------------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    input: ir.Value
    gamma_0: ir.Value
    beta_0: ir.Value
    quant_scale_0: ir.Value
    quant_offset_0: ir.Value
    wdqkv: ir.Value
    descale_0: ir.Value
    bias_0: ir.Value
    gamma_1: ir.Value
    beta_1: ir.Value
    quant_scale_1: ir.Value
    quant_offset_1: ir.Value
    wuq: ir.Value
    descale_1: ir.Value
    bias_1: ir.Value
    gamma_2: ir.Value
    cos: ir.Value
    sin: ir.Value
    wuk: ir.Value
    kv_cache: ir.Value
    kv_cache_rope: ir.Value
    slot_mapping: ir.Value
    ctkv_scale: ir.Value
    q_nope_scale: ir.Value


class _Sizes(NamedTuple):
    """Sizes as values of shape (1), read from shapes that are mostly those of weights, so that the nodes fold away."""

    heads: ir.Value
    nope: ir.Value
    rank: ir.Value
    rope: ir.Value


def _body(call: Call) -> Body:
    """The body for the form of `call`: float32 inside, rounded to the type of `input` where the device stores a value.

    Raises `InputError` for an unknown cache or quantisation mode, for types that do not fit the mode, and where an
    input that the mode needs is absent.
    """
    form = _Form.of(call)
    _require(call, form)

    def trace(op: OpBuilder, *inputs: ir.Value) -> list[ir.Value]:
        given = _Inputs(*inputs)
        sizes = _Sizes(*_head_sizes(op, form, given.wuk), op.Shape(given.cos, start=1))
        down = _down_projection(op, form, given)
        latent_end = op.Add(sizes.rank, sizes.rope)
        c_kv = numerics.rms_norm(op, _lanes(op, down, [0], sizes.rank), numerics.widen(op, given.gamma_2), _EPSILON)
        k_rope = _rotated(op, given, sizes, _lanes(op, down, sizes.rank, latent_end), per_head=False)
        q_nope, q_rope = _query(op, form, given, sizes, _lanes(op, down, latent_end, [_END]))
        if form.cache_mode == 0:
            row = numerics.narrow(op, op.Concat(c_kv, k_rope, axis=-1), form.float_type)
            query = numerics.narrow(op, op.Concat(q_nope, q_rope, axis=-1), form.float_type)
            nothing = [numerics.narrow(op, op.ConstantOfShape([0]), form.float_type) for _ in range(2)]
            outputs = [query, _written(op, form, given.kv_cache, given.slot_mapping, row, form.float_type), *nothing]
        else:
            query, row = _stored(op, form, given, q_nope, c_kv)
            stored_type = ir.DataType.INT8 if form.int8_cache else form.float_type
            rope_row = numerics.narrow(op, k_rope, form.float_type)
            outputs = [
                query,
                _written(op, form, given.kv_cache, given.slot_mapping, row, stored_type),
                numerics.narrow(op, q_rope, form.float_type),
                _written(op, form, given.kv_cache_rope, given.slot_mapping, rope_row, form.float_type),
            ]
        return outputs[: call.output_count]

    return trace


def _require(call: Call, form: _Form) -> None:
    wrong = _mixed_weights(call) or _missing_input(call, needed_by_body=True) or _wrong_cache_type(call)
    if form.cache_mode not in (0, 1, 2, 3):
        wrong = f"cache_mode must be from 0 to 3, got {form.cache_mode}"
    elif form.quantisation == "unknown":
        mode = call.attributes["quant_mode"]
        wrong = f"quant_mode must be 0 (static) or 1 (per token) with int8 weights, got {mode}, which no device has"
    if wrong is not None:
        raise InputError(f"{call.operator.name}: {wrong}")


def _head_sizes(op: OpBuilder, form: _Form, wuk: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """N, D and Hckv."""
    sizes = [op.Shape(wuk, start=axis, end=axis + 1) for axis in range(4 if "wuk" in form.packed else 3)]
    return (sizes[0], sizes[2], op.Mul(sizes[1], sizes[3])) if "wuk" in form.packed else (sizes[0], sizes[1], sizes[2])


def _lanes(op: OpBuilder, x: ir.Value, start: ir.Value | list[int], end: ir.Value | list[int]) -> ir.Value:
    lanes: ir.Value = op.Slice(x, start, end, [-1])
    return lanes


def _down_projection(op: OpBuilder, form: _Form, given: _Inputs) -> ir.Value:
    """[ckv | k_rope | q_lora], (T, Hckv + Dr + Hcq)."""
    x = numerics.widen(op, given.input)
    if form.input_norm:
        x = _normed(op, form, x, given.gamma_0, given.beta_0)
    scales = (given.quant_scale_0, given.quant_offset_0, given.descale_0, given.bias_0)
    return _projection(op, form, x, given.wdqkv, *scales)


def _query(op: OpBuilder, form: _Form, given: _Inputs, sizes: _Sizes, q_lora: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The query in the latent space (T, N, Hckv) and its rotary part (T, N, Dr), not rounded."""
    if form.quantisation == _NO_QUANT:
        x = numerics.rms_norm(op, q_lora, numerics.widen(op, given.gamma_1), _EPSILON)
        x = numerics.rounded(op, x, form.float_type)
    else:
        x = _normed(op, form, q_lora, given.gamma_1, given.beta_1)
    scales = (given.quant_scale_1, given.quant_offset_1, given.descale_1, given.bias_1)
    q = _projection(op, form, x, given.wuq, *scales)
    q = op.Reshape(q, op.Concat([-1], sizes.heads, op.Add(sizes.nope, sizes.rope), axis=0))

    weight = given.wuk
    if "wuk" in form.packed:
        shape = op.Concat(sizes.heads, sizes.nope, sizes.rank, axis=0)
        weight = op.Reshape(op.Transpose(weight, perm=[0, 2, 1, 3]), shape)
    # One product per head with all tokens as its rows, so that each head's W_UK is read once.
    nope = op.Transpose(_lanes(op, q, [0], sizes.nope), perm=[1, 0, 2])
    q_nope = op.Transpose(op.MatMul(nope, numerics.widen(op, weight)), perm=[1, 0, 2])
    return q_nope, _rotated(op, given, sizes, _lanes(op, q, sizes.nope, [_END]), per_head=True)


def _rotated(op: OpBuilder, given: _Inputs, sizes: _Sizes, x: ir.Value, *, per_head: bool) -> ir.Value:
    """RoPE of half-split features, (T, Dr) or (T, N, Dr)."""
    cos, sin = numerics.widen(op, given.cos), numerics.widen(op, given.sin)
    if per_head:
        cos, sin = op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1])
    half = op.Div(sizes.rope, [2])
    return numerics.rotate(op, _lanes(op, x, [0], half), _lanes(op, x, half, [_END]), cos, sin)


def _normed(op: OpBuilder, form: _Form, x: ir.Value, gamma: ir.Value, beta: ir.Value | None) -> ir.Value:
    x = numerics.rms_norm(op, x, numerics.widen(op, gamma), _EPSILON)
    return x if beta is None else _plus(op, form, x, numerics.widen(op, beta), beta.name)


def _plus(op: OpBuilder, form: _Form, x: ir.Value, addend: ir.Value, name: str | None) -> ir.Value:
    """`x` plus the vector `addend` of the input `name`; nothing is added if that was not given or is empty."""
    if name not in form.given:
        return x
    if name in form.unsure:
        width = op.Shape(x, start=-1)
        zeros = op.ConstantOfShape(width, value=ir.tensor(np.zeros(1, np.int32 if "bias" in name else np.float32)))
        addend = op.Slice(op.Concat(op.Reshape(addend, [-1]), zeros, axis=0), [0], width, [0])
    total: ir.Value = op.Add(x, addend)
    return total


def _projection(
    op: OpBuilder,
    form: _Form,
    x: ir.Value,
    weight: ir.Value,
    scale: ir.Value | None,
    offset: ir.Value | None,
    descale: ir.Value,
    bias: ir.Value | None,
) -> ir.Value:
    """`x` quantised, times the transposed `weight`, dequantised by column and rounded to the float type; float32."""
    transposed = _transposed(op, form, weight)
    if form.quantisation == _NO_QUANT:
        return numerics.rounded(op, op.MatMul(x, numerics.widen(op, transposed)), form.float_type)
    descale = _float_of_bits(op, descale) if descale.dtype == ir.DataType.INT64 else descale
    if form.quantisation == _PER_TOKEN:
        quantised, token_scale = numerics.dynamic_quantise(op, x)
        exact = op.Cast(numerics.integer_matmul(op, quantised, transposed), to=ir.DataType.FLOAT)
        return numerics.rounded(op, op.Mul(op.Mul(exact, descale), token_scale), form.float_type)
    scaled = op.Mul(x, op.Reciprocal(numerics.widen(op, scale)))
    if offset is not None and offset.name in form.given:
        scaled = op.Add(scaled, op.Cast(offset, to=ir.DataType.FLOAT))
    exact = numerics.integer_matmul(op, numerics.quantise(op, scaled), transposed)
    if bias is not None:
        exact = _plus(op, form, exact, bias, bias.name)
    return numerics.rounded(op, op.Mul(op.Cast(exact, to=ir.DataType.FLOAT), descale), form.float_type)


def _transposed(op: OpBuilder, form: _Form, weight: ir.Value) -> ir.Value:
    """The matrix (k, n) of a weight (n, k), or of its storage (k / w0, n, w0) or (k / w0, n / 16, 16, w0)."""
    rank = form.packed.get(weight.name or "")
    if rank is None:
        transposed: ir.Value = op.Transpose(weight, perm=[1, 0])
        return transposed
    k = op.Mul(op.Shape(weight, start=0, end=1), op.Shape(weight, start=-1))
    lines = op.Transpose(weight, perm=[0, 2, 1] if rank == 3 else [0, 3, 1, 2])
    unpacked: ir.Value = op.Reshape(lines, op.Concat(k, [-1], axis=0))
    return unpacked


def _float_of_bits(op: OpBuilder, bits: ir.Value) -> ir.Value:
    """The float32 whose bits are the low 32 bits of an int64, put together from sign, exponent and fraction."""
    word = op.Mod(bits, 2**32)
    exponent, fraction = op.Mod(op.Div(word, 2**23), 256), op.Mod(word, 2**23)
    mantissa = op.Where(op.Equal(exponent, 0), fraction, op.Add(fraction, 2**23))
    powers = np.ldexp(np.float32(1), np.maximum(np.arange(256), 1) - 150).astype(np.float32)
    magnitude = op.Mul(
        op.Cast(mantissa, to=ir.DataType.FLOAT), op.Gather(op.Constant(value=ir.tensor(powers)), exponent)
    )
    value: ir.Value = op.Where(op.Less(word, 2**31), magnitude, op.Neg(magnitude))
    return value


def _stored(op: OpBuilder, form: _Form, given: _Inputs, q_nope: ir.Value, c_kv: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Query and cache rows in the type of the cache; int8 by a factor per head and a divisor for all rows."""
    query = numerics.narrow(op, q_nope, form.float_type)
    if not form.int8_cache:
        return query, numerics.narrow(op, c_kv, form.float_type)
    row = numerics.quantise(op, op.Mul(c_kv, op.Reciprocal(numerics.widen(op, given.ctkv_scale))))
    factor = op.Reshape(numerics.widen(op, given.q_nope_scale), [-1, 1])
    scaled = op.Mul(numerics.widen(op, query), factor)
    if form.float_type == ir.DataType.FLOAT16:  # the product itself is float16 there
        scaled = numerics.rounded(op, scaled, form.float_type)
    return numerics.quantise(op, scaled), row


def _written(
    op: OpBuilder, form: _Form, cache: ir.Value, slots: ir.Value, rows: ir.Value, dtype: ir.DataType
) -> ir.Value:
    """The cache with the rows of the tokens that have a slot; a negative one means "do not write"."""
    axis = 2 if form.nz_cache else 1
    block_size = op.Shape(cache, start=axis, end=axis + 1)
    slots = op.Cast(slots, to=ir.DataType.INT64)
    capacity = op.Mul(op.Shape(cache, start=0, end=1), block_size)
    valid = op.And(op.GreaterOrEqual(slots, [0]), op.Less(slots, capacity))
    lanes = layout.fractal_width(dtype.bitwidth // 8) if form.nz_cache else None
    slots, rows = op.Compress(slots, valid, axis=0), op.Compress(rows, valid, axis=0)
    return numerics.scatter_rows(op, cache, slots, rows, block_size=block_size, lanes=lanes)


# --- Reference --------------------------------------------------------------------------------------------------------


def _f32(x: _Array) -> _Array:
    return x.astype(np.float32)


def _via(x: _Array, dtype: np.dtype[Any]) -> _Array:
    with np.errstate(over="ignore"):
        return _f32(_f32(x).astype(dtype))


def _int8(x: _Array) -> _Array:
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def _normalise(x: _Array, gamma: _Array, beta: _Array | None = None) -> _Array:
    root = np.sqrt(np.einsum("th,th->t", x, x) / np.float32(x.shape[-1]) + np.float32(_EPSILON))[:, None]
    y = _f32(x / root * _f32(gamma))
    return y if beta is None or not beta.size else y + _f32(beta)


def _half_rope(x: _Array, cos: _Array, sin: _Array) -> _Array:
    """(T, ..., Dr), turned by the tables (T, Dr)."""
    table = (len(cos),) + (1,) * (x.ndim - 2) + (-1,) if len(cos) else cos.shape[:1] + x.shape[1:]
    low, high = np.split(x, 2, axis=-1)
    return x * _f32(cos).reshape(table) + np.concatenate((-high, low), axis=-1) * _f32(sin).reshape(table)


class MlaPreprocess(OpRun):
    """The operator in numpy, token by token where the device addresses memory; written independently of the body."""

    op_domain = DOMAIN

    def _run(
        self,
        input: _Array,
        gamma_0: _Array | None,
        beta_0: _Array | None,
        quant_scale_0: _Array | None,
        quant_offset_0: _Array | None,
        wdqkv: _Array,
        descale_0: _Array | None,
        bias_0: _Array | None,
        gamma_1: _Array,
        beta_1: _Array | None,
        quant_scale_1: _Array | None,
        quant_offset_1: _Array | None,
        wuq: _Array,
        descale_1: _Array | None,
        bias_1: _Array | None,
        gamma_2: _Array,
        cos: _Array,
        sin: _Array,
        wuk: _Array,
        kv_cache: _Array,
        kv_cache_rope: _Array | None,
        slot_mapping: _Array,
        ctkv_scale: _Array | None = None,
        q_nope_scale: _Array | None = None,
        *,
        cache_mode: int = 0,
        quant_mode: int = 0,
        do_rms_norm: int = 1,
        **_inert: float,
    ) -> tuple[_Array, ...]:
        dtype = input.dtype
        key = layout.heads_nz_to_nd(wuk) if wuk.ndim == 4 else wuk
        heads, nope, rank = key.shape
        rope = cos.shape[-1]
        scales = (
            (quant_scale_0, quant_offset_0, descale_0, bias_0),
            (quant_scale_1, quant_offset_1, descale_1, bias_1),
        )

        int8 = wdqkv.dtype == np.int8
        x = _f32(input)
        if int8 and do_rms_norm and gamma_0 is not None:
            x = _normalise(x, gamma_0, beta_0)
        down = _project(x, wdqkv, *scales[0], per_token=quant_mode == 1, dtype=dtype)
        c_kv, k_rope, c_q = np.split(down, (rank, rank + rope), axis=1)
        c_q = _normalise(c_q, gamma_1, beta_1) if int8 else _via(_normalise(c_q, gamma_1), dtype)
        q = _project(c_q, wuq, *scales[1], per_token=quant_mode == 1, dtype=dtype)
        q = q.reshape(len(x), heads, nope + rope)

        q_nope = np.einsum("thd,hdc->thc", q[..., :nope], _f32(key)).astype(dtype)
        q_rope = _half_rope(q[..., nope:], cos, sin).astype(dtype)
        c_kv, k_rope = _normalise(c_kv, gamma_2), _half_rope(k_rope, cos, sin).astype(dtype)
        if cache_mode == 0:
            rows = np.concatenate((c_kv.astype(dtype), k_rope), axis=1)
            query = np.concatenate((q_nope, q_rope), axis=2)
            nothing = np.zeros(0, dtype)
            return (query, _filled(kv_cache, rows, slot_mapping), nothing, nothing)[: len(self.onnx_node.output)]
        rows = c_kv.astype(dtype)
        if cache_mode == 2 and ctkv_scale is not None and q_nope_scale is not None:
            rows = _int8(c_kv * (1 / _f32(ctkv_scale)))
            product = _f32(q_nope) * _f32(q_nope_scale).reshape(-1, 1)
            q_nope = _int8(_via(product, dtype) if dtype == np.float16 else product)
        results = [q_nope, _filled(kv_cache, rows, slot_mapping), q_rope]
        if kv_cache_rope is not None:
            results.append(_filled(kv_cache_rope, k_rope, slot_mapping))
        return tuple(results[: len(self.onnx_node.output)])


def _project(
    x: _Array,
    weight: _Array,
    scale: _Array | None,
    offset: _Array | None,
    descale: _Array | None,
    bias: _Array | None,
    *,
    per_token: bool,
    dtype: np.dtype[Any],
) -> _Array:
    """`x` (T, k) times the weight (n, k), through int8 if the weight is, rounded to `dtype`; float32."""
    if weight.ndim > 2:
        weight = layout.transposed_nz_to_nd(weight)
    if weight.dtype != np.int8 or (scale is None and not per_token) or descale is None:
        return _via(x @ _f32(weight).T, dtype)
    factor = layout.bits_to_descale(descale) if descale.dtype == np.int64 else descale
    if per_token:
        token_scale = _f32(np.abs(x).max(axis=1, keepdims=True, initial=0) / np.float32(127))
        quantised = _int8(np.divide(x, token_scale, out=np.zeros_like(x), where=token_scale != 0))
        return _via(_f32(quantised.astype(np.int64) @ weight.T.astype(np.int64)) * factor * token_scale, dtype)
    shift = np.float32(0) if offset is None or not offset.size else _f32(offset)
    exact = _int8(x * (1 / _f32(scale)) + shift).astype(np.int64) @ weight.T.astype(np.int64)
    if bias is not None and bias.size:
        exact = exact + bias
    return _via(_f32(exact) * factor, dtype)


def _filled(cache: _Array, rows: _Array, slots: _Array) -> _Array:
    """The cache with row t at slot t: (BlockNum, BlockSize, 1, H), or NZ blocks (BlockNum, H / c0, BlockSize, c0)."""
    out = cache.copy()
    is_nz = cache.shape[2] != 1 or cache.shape[3] != rows.shape[1]
    block_size = cache.shape[2 if is_nz else 1]
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if 0 <= slot < len(out) * block_size:
            block, place = divmod(slot, block_size)
            if is_nz:
                out[block, :, place] = row.reshape(cache.shape[1], cache.shape[3])
            else:
                out[block, place, 0] = row
    return out


# --- The limits of the device -----------------------------------------------------------------------------------------

_SEED = "aclnnMlaPreprocess"
_PARAMETERS = f"{_SEED}, parameters"
_LIMITS = f"{_SEED}, constraints"
_GE = "GE operator MlaPreprocess, tiling"
_Broken = Callable[[Call], str | None]
_Place = tuple[str, int]
"""An input and an axis of its unpacked shape."""
_OF_INPUT_TYPE = (
    *("gamma_0", "beta_0", "quant_scale_0", "gamma_1", "beta_1", "quant_scale_1", "gamma_2", "cos", "sin", "wuk"),
    *("kv_cache_rope", "ctkv_scale", "q_nope_scale"),
)
_RANKS = {"input": 2, "cos": 2, "sin": 2, "slot_mapping": 1, "kv_cache": 4, "kv_cache_rope": 4}


def _first(sentences: Iterable[str | None]) -> str | None:
    return next((sentence for sentence in sentences if sentence), None)


def _dim(call: Call, place: _Place) -> int | None:
    """The dimension at a place if it is a known number and the input is there."""
    name, axis = place
    if not _present(call, name):
        return None
    dim = _matrix(call, name)[axis] if name in _WEIGHTS else _wuk(call)[axis] if name == "wuk" else None
    dim = call.input(name).dim(axis) if dim is None and name not in (*_WEIGHTS, "wuk") else dim
    return dim if isinstance(dim, int) else None


def _place_name(place: _Place) -> str:
    return f"axis {place[1]} of {place[0]}"


def _agree(letter: str, *places: _Place) -> Constraint:
    """The dimensions at `places` are equal."""

    def broken(call: Call) -> str | None:
        known = [(place, dim) for place in places if (dim := _dim(call, place)) is not None]
        return _first(
            f"{letter} must be {known[0][1]} in {_place_name(place)}, as in {_place_name(known[0][0])}, got {dim}"
            for place, dim in known
            if dim != known[0][1]
        )

    return Constraint(f"{letter}-agrees".lower(), 561002, _PARAMETERS, broken)


def _limit(
    rule: str, words: str, accepted: Callable[[int], bool], *places: _Place, source: str = _LIMITS
) -> Constraint:
    """The dimensions at `places` are `accepted`; `words` say what and which, as in "N must be from 1 to 128"."""

    def broken(call: Call) -> str | None:
        return _first(
            f"{words}, got {dim} in {_place_name(place)}"
            for place in places
            if (dim := _dim(call, place)) is not None and not accepted(dim)
        )

    return Constraint(rule, 561002, source, broken)


def _fixed(rule: str, letter: str, size: int, *places: _Place) -> Constraint:
    return _limit(rule, f"{letter} must be {size}", lambda dim: dim == size, *places)


def _wrong_type(call: Call) -> str | None:
    dtype = call.input("input").dtype
    if dtype not in (None, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return f"input must be float16 or bfloat16, got {dtype.name.lower()}"
    return _first(
        f"{name} must have the type of input, {dtype.name.lower()}, got {got.name.lower()}"
        for name in _OF_INPUT_TYPE
        if _present(call, name) and dtype is not None and (got := call.input(name).dtype) not in (None, dtype)
    )


def _mixed_weights(call: Call) -> str | None:
    first, second = (call.input(name).dtype for name in _WEIGHTS)
    if first is None or second is None or first == second:
        return None
    return f"wdqkv and wuq must have one type, got {first.name.lower()} and {second.name.lower()}"


def _wrong_float_weights(call: Call) -> str | None:
    return _first(
        f"{name} must be int8 or bfloat16 with input of the same type, got {dtype.name.lower()}"
        for name in _WEIGHTS
        if (dtype := call.input(name).dtype) not in (None, ir.DataType.INT8, ir.DataType.BFLOAT16)
        or (dtype == ir.DataType.BFLOAT16 and call.input("input").dtype not in (None, dtype))
    )


def _wrong_descale(call: Call) -> str | None:
    expected = {ir.DataType.FLOAT16: ir.DataType.INT64, ir.DataType.BFLOAT16: ir.DataType.FLOAT}
    dtype = call.input("input").dtype
    needed = expected.get(dtype) if dtype is not None else None
    return _first(
        f"{name} must be {needed.name.lower()} with {dtype.name.lower()} input, got {got.name.lower()}"
        for name in ("descale_0", "descale_1")
        if _present(call, name)
        and dtype is not None
        and needed is not None
        and (got := call.input(name).dtype) not in (None, needed)
    )


def _wrong_cache_type(call: Call) -> str | None:
    mode, dtype = call.attributes["cache_mode"], call.input("input").dtype
    kv_cache, kv_cache_rope = call.input("kv_cache").dtype, call.input("kv_cache_rope").dtype
    needed = ir.DataType.INT8 if mode == 2 else dtype
    if needed is not None and kv_cache not in (None, needed):
        return f"kv_cache must be {needed.name.lower()} with cache_mode {mode}, got {kv_cache.name.lower()}"
    if mode != 0 and dtype is not None and kv_cache_rope not in (None, dtype):
        return f"kv_cache_rope must have the type of input, {dtype.name.lower()}, got {kv_cache_rope.name.lower()}"
    return None


def _missing_input(call: Call, *, needed_by_body: bool = False) -> str | None:
    """An input that the mode needs; the body takes an absent quant_offset for 0, the device does not."""
    mode, form = call.attributes["cache_mode"], _Form.of(call)
    static, int8 = form.quantisation == _STATIC, form.quantisation != _NO_QUANT
    needed = {
        "gamma_0": (form.input_norm, "do_rms_norm 1"),
        "quant_scale_0": (static, "int8 weights"),
        "quant_offset_0": (static and not needed_by_body, "int8 weights"),
        "descale_0": (int8, "int8 weights"),
        "gamma_1": (True, "every mode"),
        "quant_scale_1": (static, "int8 weights"),
        "quant_offset_1": (static and not needed_by_body, "int8 weights"),
        "descale_1": (int8, "int8 weights"),
        "gamma_2": (True, "every mode"),
        "kv_cache_rope": (mode != 0, f"cache_mode {mode}"),
        "ctkv_scale": (mode == 2, "cache_mode 2"),
        "q_nope_scale": (mode == 2, "cache_mode 2"),
    }
    return _first(
        f"{name} must be given with {reason}, got none"
        for name, (is_needed, reason) in needed.items()
        if is_needed and not _present(call, name)
    )


def _wrong_rank(call: Call) -> str | None:
    ranks = {name: (rank,) for name, rank in _RANKS.items()} | dict.fromkeys(_WEIGHTS, (2, 3, 4)) | {"wuk": (3, 4)}
    return _first(
        f"{name} must have rank {' or '.join(map(str, accepted))}, got {rank}"
        for name, accepted in ranks.items()
        if _present(call, name) and (rank := call.input(name).rank) is not None and rank not in accepted
    )


def _wrong_storage(call: Call) -> str | None:
    """Packed weights have lines of 32 bytes, and 16 of them in a fractal."""
    for name, rank in _Form.of(call).packed.items():
        tensor = call.input(name)
        lanes = None if tensor.dtype is None else layout.fractal_width(tensor.dtype.bitwidth // 8)
        if lanes is not None and isinstance(tensor.dim(-1), int) and tensor.dim(-1) != lanes:
            return f"the lines of a packed {name} must have {lanes} elements, got {tensor.dim(-1)}"
        if name in _WEIGHTS and rank == 4 and isinstance(tensor.dim(2), int) and tensor.dim(2) != 16:
            return f"the fractals of a packed {name} must have 16 lines, got {tensor.dim(2)}"
    return None


_CACHE_SHAPES: Mapping[int, Mapping[str, tuple[int | None, ...]]] = {
    # Block count and block size have rules of their own.
    0: {"kv_cache": (None, None, 1, 576)},
    1: {"kv_cache": (None, None, 1, 512), "kv_cache_rope": (None, None, 1, 64)},
    2: {"kv_cache": (None, 16, None, 32), "kv_cache_rope": (None, 4, None, 16)},
    3: {"kv_cache": (None, 32, None, 16), "kv_cache_rope": (None, 4, None, 16)},
}


def _wrong_cache_shape(call: Call) -> str | None:
    mode = call.attributes["cache_mode"]
    return _first(
        f"{name} must have {expected} in axis {axis} with cache_mode {mode}, got {got}"
        for name, shape in _CACHE_SHAPES.get(mode, {}).items()
        for axis, expected in enumerate(shape)
        if expected is not None and (got := _dim(call, (name, axis))) not in (None, expected)
    )


def _wrong_blocks(size: int, *, counted: bool) -> _Broken:
    """The number of blocks, or the rows of a block, are not `size`."""

    def broken(call: Call) -> str | None:
        mode = call.attributes["cache_mode"]
        axis = 0 if counted else 2 if mode in (2, 3) else 1
        words = "blocks" if counted else "rows in a block"
        return _first(
            f"{name} must have {size} {words}, got {got}"
            for name in _CACHE_SHAPES.get(mode, {})
            if (got := _dim(call, (name, axis))) not in (None, size)
        )

    return broken


def _wrong_down_width(call: Call) -> str | None:
    rows, rank = _dim(call, ("wdqkv", 0)), _dim(call, ("gamma_1", 0))
    if rows is None or rank is None or rows == 576 + rank:
        return None
    return f"wdqkv must have 512 + 64 + Hcq = {576 + rank} rows, got {rows}"


def _wrong_up_width(call: Call) -> str | None:
    rows, heads, nope = _dim(call, ("wuq", 0)), _dim(call, ("wuk", 0)), _dim(call, ("wuk", 1))
    if rows is None or heads is None or nope is None or rows == heads * (nope + 64):
        return None
    return f"wuq must have N * (D + 64) = {heads * (nope + 64)} rows, got {rows}"


def _wrong_epsilon(call: Call) -> str | None:
    epsilon = call.attributes["epsilon"]
    if np.float32(epsilon) == np.float32(_EPSILON):
        return None
    return f"epsilon must be {_EPSILON}, the only one that the kernels know, got {epsilon}"


def _unproduced_output(call: Call) -> str | None:
    if call.attributes["cache_mode"] != 0:
        return None
    return _first(
        f"{name} exists with cache_mode 1 to 3 only, got 0" for name in ("q_rope_out", "kr_cache_out") if call.has(name)
    )


_CONSTRAINTS = (
    Constraint("types", 161002, _PARAMETERS, _wrong_type),
    Constraint("weights-agree", 161002, _GE, _mixed_weights),
    Constraint("float-weights", 561002, _GE, _wrong_float_weights),
    Constraint("descale-type", 161002, _PARAMETERS, _wrong_descale),
    Constraint("cache-type", 161002, _PARAMETERS, _wrong_cache_type),
    Constraint("missing-input", 161001, _PARAMETERS, _missing_input),
    Constraint("epsilon", 161002, "GE operator MlaPreprocess, kernels", _wrong_epsilon),
    Constraint("unproduced-output", 161002, _PARAMETERS, _unproduced_output),
    Constraint("ranks", 161002, _PARAMETERS, _wrong_rank),
    Constraint("storage", 561002, _PARAMETERS, _wrong_storage),
    _limit("token-count", "T must be from 0 to 256", lambda t: t <= 256, ("input", 0)),
    _limit(
        "hidden-size",
        "He must be a multiple of 256 from 2048 to 10240",
        lambda size: size % 256 == 0 and 2048 <= size <= 10240,
        ("input", 1),
    ),
    _limit("head-count", "N must be from 1 to 128", lambda heads: 1 <= heads <= 128, ("wuk", 0)),
    _limit(
        "hcq",
        "Hcq must be a multiple of 32 from 32 to 4096",
        lambda rank: rank % 32 == 0 and 32 <= rank <= 4096,
        ("gamma_1", 0),
    ),
    _limit(
        "head-size",
        "D must be a multiple of 16 from 16 to 256",
        lambda size: size % 16 == 0 and 16 <= size <= 256,
        ("wuk", 1),
    ),
    _fixed("hckv", "Hckv", 512, ("wuk", 2), ("gamma_2", 0)),
    _fixed("rope-size", "Dr", 64, ("cos", 1), ("sin", 1)),
    _fixed(
        "scale-count",
        "the number of elements",
        1,
        *((name, 0) for name in ("quant_scale_0", "quant_offset_0", "quant_scale_1", "quant_offset_1", "ctkv_scale")),
    ),
    _agree("T", ("input", 0), ("cos", 0), ("sin", 0), ("slot_mapping", 0)),
    _agree("He", ("input", 1), ("gamma_0", 0), ("beta_0", 0), ("wdqkv", 1)),
    _agree("Hcq", ("gamma_1", 0), ("beta_1", 0), ("wuq", 1)),
    _agree("N", ("wuk", 0), ("q_nope_scale", 0)),
    _agree("wdqkv-rows", ("wdqkv", 0), ("descale_0", -1), ("bias_0", -1)),
    _agree("wuq-rows", ("wuq", 0), ("descale_1", -1), ("bias_1", -1)),
    Constraint("down-width", 561002, _LIMITS, _wrong_down_width),
    Constraint("up-width", 561002, _LIMITS, _wrong_up_width),
    Constraint("cache-shape", 561002, _PARAMETERS, _wrong_cache_shape),
    Constraint("block-count", 561002, _LIMITS, _wrong_blocks(192, counted=True)),
    Constraint("block-size", 561002, _LIMITS, _wrong_blocks(128, counted=False)),
)

# --- The operator -----------------------------------------------------------------------------------------------------


def _only(name: str, description: str, value: int) -> Attribute:
    """An attribute that no kernel reads; the device accepts one value."""
    return Attribute(name, ir.AttributeType.INT, f"{description}; reserved.", value, choices=(value,))


OPERATOR = Operator(
    name="MlaPreprocess",
    description="Everything in front of latent attention when decoding: norm and quantisation of the input, the joint "
    "down-projection, whose columns are [Hckv latent | Dr rotary key | Hcq query], norm and quantisation of the query "
    "latent, its up-projection, the absorbed W_UK, rotary embedding of half-split features, and the write of latent "
    "and rotary key into the paged cache. Tokens with a negative slot are not written. The epsilon of all norms is "
    "1e-6. The device casts through float16 before int8, so that up to 6 % of its int8 values differ by 1 from those "
    "of the body, which rounds the float32 value.",
    source=_SEED,
    aclnn="aclnnMlaPreprocess",
    inputs=(
        Input("input", _FLOATS, "(T, He)", "The hidden states."),
        Input("gamma_0", _FLOATS, "(He)", "Weight of the norm of the input."),
        Input("beta_0", _FLOATS, "(He)", "Added after that norm.", optional=True),
        Input("quant_scale_0", _FLOATS, "(1)", "Scale of the int8 input: it is divided by it.", optional=True),
        Input("quant_offset_0", _INT8, "(1)", "Zero point of the int8 input.", optional=True),
        Input(
            "wdqkv",
            _FLOATS_OR_INT8,
            "(Hckv + Dr + Hcq, He)",
            "W_DKV, W_KR and W_DQ, transposed; also as FRACTAL_NZ storage (He / w0, n, w0) or (He / w0, n / 16, 16, w0).",
        ),
        Input(
            "descale_0",
            _DESCALES,
            "(Hckv + Dr + Hcq)",
            "Scale per row of an int8 wdqkv; for float16 input int64 whose low 32 bits are the float32.",
            optional=True,
        ),
        Input("bias_0", _INT32, "(Hckv + Dr + Hcq)", "Added to the int32 product.", optional=True),
        Input("gamma_1", _FLOATS, "(Hcq)", "Weight of the norm of the query latent."),
        Input("beta_1", _FLOATS, "(Hcq)", "Added after that norm; not with floating weights.", optional=True),
        Input("quant_scale_1", _FLOATS, "(1)", "Scale of the int8 query latent.", optional=True),
        Input("quant_offset_1", _INT8, "(1)", "Zero point of the int8 query latent.", optional=True),
        Input(
            "wuq",
            _FLOATS_OR_INT8,
            "(N * (D + Dr), Hcq)",
            "W_UQ and W_QR, transposed, head by head [D | Dr]; also as FRACTAL_NZ storage, like wdqkv.",
        ),
        Input("descale_1", _DESCALES, "(N * (D + Dr))", "Scale per row of an int8 wuq, like descale_0.", optional=True),
        Input("bias_1", _INT32, "(N * (D + Dr))", "Added to the int32 product.", optional=True),
        Input("gamma_2", _FLOATS, "(Hckv)", "Weight of the norm of the key-value latent."),
        Input("cos", _FLOATS, "(T, Dr)", "Cosines of the rotary embedding."),
        Input("sin", _FLOATS, "(T, Dr)", "Sines of the rotary embedding."),
        Input("wuk", _FLOATS, "(N, D, Hckv)", "W_UK; also as FRACTAL_NZ storage (N, Hckv / w0, D, w0)."),
        Input(
            "kv_cache",
            _FLOATS_OR_INT8,
            "(BlockNum, BlockSize, 1, Hckv + Dr), (BlockNum, BlockSize, 1, Hckv) or (BlockNum, Hckv / c0, BlockSize, c0)",
            "The paged cache, for cache_mode 0, 1, and 2 (int8) or 3.",
        ),
        Input(
            "kv_cache_rope",
            _FLOATS,
            "(BlockNum, BlockSize, 1, Dr) or (BlockNum, Dr / c0, BlockSize, c0)",
            "The paged cache of rotary keys, for cache_mode 1, and 2 or 3.",
            optional=True,
        ),
        Input("slot_mapping", _INT32, "(T)", "The cache slot of each token; negative: none."),
        Input("ctkv_scale", _FLOATS, "(1)", "Scale of an int8 kv_cache: rows are divided by it.", optional=True),
        Input("q_nope_scale", _FLOATS, "(N)", "Factor per head for the int8 query of cache_mode 2.", optional=True),
    ),
    outputs=(
        Output(
            "q_out",
            _FLOATS_OR_INT8,
            "(T, N, Hckv + Dr) or (T, N, Hckv)",
            "The query in the latent space, with the rotary part behind it in cache_mode 0; in the type of kv_cache.",
        ),
        Output("kv_cache_out", _FLOATS_OR_INT8, "as kv_cache", "kv_cache with the new rows."),
        Output(
            "q_rope_out", _FLOATS, "(T, N, Dr)", "The rotary part of the query; not in cache_mode 0.", optional=True
        ),
        Output(
            "kr_cache_out",
            _FLOATS,
            "as kv_cache_rope",
            "kv_cache_rope with the new rows; not in cache_mode 0.",
            optional=True,
        ),
    ),
    attributes=(
        _only("wdq_dim", "Hcq", 1536),
        _only("q_rope_dim", "Dr of the query", 64),
        _only("k_rope_dim", "Dr of the key", 64),
        Attribute("epsilon", ir.AttributeType.FLOAT, "Epsilon of the norms; they use 1e-6 whatever it is.", _EPSILON),
        _only("q_rotary_coeff", "Parts in which the rotary embedding splits the query", 2),
        _only("k_rotary_coeff", "Parts in which the rotary embedding splits the key", 2),
        _only("transpose_wdq", "Whether wdqkv is transposed", 1),
        _only("transpose_wuq", "Whether wuq is transposed", 1),
        _only("transpose_wuk", "Whether wuk is transposed", 1),
        Attribute(
            "cache_mode",
            ir.AttributeType.INT,
            "0: latent and rotary key in one cache; 1: in two; 2: two in NZ order, the latent and the query int8; "
            "3: two in NZ order.",
            0,
            choices=(0, 1, 2, 3),
        ),
        Attribute(
            "quant_mode",
            ir.AttributeType.INT,
            "Quantisation of activations with int8 weights. 0: given scales and offsets. 1: by the maximum of each "
            "token, without bias, which the device lacks. Floating weights ignore it.",
            0,
            choices=(0,),
        ),
        Attribute(
            "do_rms_norm",
            ir.AttributeType.INT,
            "Whether the input is normed before it is quantised; floating weights take it as it is.",
            1,
            choices=(0, 1),
        ),
        _only("wdkv_split_count", "Parts of wdqkv", 1),
    ),
    infer=_infer,
    overload=_overload,
    body=_body,
    reference=MlaPreprocess,
    products=frozenset({Product.A2, Product.A3}),
    constraints=_CONSTRAINTS,
)
