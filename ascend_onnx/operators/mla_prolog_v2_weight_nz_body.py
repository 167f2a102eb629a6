"""The body of MlaPrologV2WeightNz: float32 inside, rounded where the device stores a value in between.

Source: aclnnMlaPrologV2WeightNz, Formula and scenario tables.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from onnxscript import OpBuilder

from ascend_onnx import layout, numerics
from ascend_onnx.errors import InputError
from ascend_onnx.operator import Body, Call
from ascend_onnx.operators.mla_prolog_v2_weight_nz_form import Form

__all__ = ["build_body"]


class _Inputs(NamedTuple):
    token_x: ir.Value
    weight_dq: ir.Value
    weight_uq_qr: ir.Value
    weight_uk: ir.Value
    weight_dkv_kr: ir.Value
    rmsnorm_gamma_cq: ir.Value
    rmsnorm_gamma_ckv: ir.Value
    rope_sin: ir.Value
    rope_cos: ir.Value
    cache_index: ir.Value
    kv_cache: ir.Value
    kr_cache: ir.Value
    dequant_scale_x: ir.Value | None
    dequant_scale_w_dq: ir.Value | None
    dequant_scale_w_uq_qr: ir.Value | None
    dequant_scale_w_dkv_kr: ir.Value | None
    quant_scale_ckv: ir.Value | None
    quant_scale_ckr: ir.Value | None
    smooth_scales_cq: ir.Value | None


class _Tokens(NamedTuple):
    """What belongs to the tokens, with (B, S) flattened to (T)."""

    x: ir.Value
    """(T, He)"""
    cos: ir.Value
    """(T, Dr), float32, like sin"""
    sin: ir.Value
    slots: ir.Value
    """(T)"""


class _Sizes(NamedTuple):
    """Sizes as values of shape (1). They are read from weights, whose shapes any runtime knows: the nodes fold away."""

    hidden: ir.Value
    heads: ir.Value
    nope: ir.Value
    rank: ir.Value
    rope: ir.Value


def build_body(call: Call) -> Body:
    """The body for the form of `call`.

    Raises `InputError` where the int8 tensors do not fit together or lack a scale.
    """
    form = Form.of(call)
    _require_scales(call, form)

    def body(op: OpBuilder, *inputs: ir.Value) -> list[ir.Value]:
        given = _Inputs(*inputs)
        sizes = _sizes(op, form, given)
        tokens = _tokens(op, form, given, sizes)
        query, query_rope = _query(op, form, given, sizes, tokens)
        caches = _written_caches(op, form, given, tokens, *_key_value(op, form, given, sizes, tokens))
        scales = []
        if form.query_int8:
            query, query_rope, scale = _quantised_query(op, form, given, query, query_rope)
            scales.append(scale)
        elif call.has("dequant_scale_q_nope"):
            scales.append(op.ConstantOfShape([0]))
        if form.batched:
            lead = op.Shape(given.token_x, end=2)
            query = op.Reshape(query, op.Concat(lead, sizes.heads, sizes.rank, axis=0), allowzero=1)
            query_rope = op.Reshape(query_rope, op.Concat(lead, sizes.heads, sizes.rope, axis=0), allowzero=1)
        return [query, query_rope, *caches, *scales]

    return body


def _require_scales(call: Call, form: Form) -> None:
    together = ("token_x", "weight_dq", "weight_dkv_kr")
    if len({call.input(name).dtype == ir.DataType.INT8 for name in together}) > 1:
        raise InputError(f"{call.operator.name}: {', '.join(together)} must be int8 together or not at all")
    needed = {
        "dequant_scale_x": form.token_int8,
        "dequant_scale_w_dq": form.token_int8,
        "dequant_scale_w_dkv_kr": form.token_int8,
        "dequant_scale_w_uq_qr": form.query_weight_int8,
        "quant_scale_ckv": form.kv_cache == ir.DataType.INT8,
        "quant_scale_ckr": form.kr_cache == ir.DataType.INT8,
    }
    absent = [name for name, is_needed in needed.items() if is_needed and not call.has(name)]
    if absent:
        raise InputError(f"{call.operator.name} with these int8 tensors needs the input {absent[0]}, which is absent")


def _sizes(op: OpBuilder, form: Form, given: _Inputs) -> _Sizes:
    heads, nope, rank = (op.Shape(given.weight_uk, start=axis, end=axis + 1) for axis in range(3))
    hidden, _ = _weight_shape(op, form, given.weight_dq)
    _, latent_and_rope = _weight_shape(op, form, given.weight_dkv_kr)
    return _Sizes(hidden, heads, nope, rank, op.Sub(latent_and_rope, rank))


def _weight_shape(op: OpBuilder, form: Form, weight: ir.Value) -> tuple[ir.Value, ir.Value]:
    """k and n, each of shape (1), of a weight (k, n) or of its storage (n / w0, k / 16, 16, w0)."""
    if weight.name not in form.packed:
        return op.Shape(weight, start=0, end=1), op.Shape(weight, start=1, end=2)
    outer_n, outer_k, inner_k, inner_n = (op.Shape(weight, start=axis, end=axis + 1) for axis in range(4))
    return op.Mul(outer_k, inner_k), op.Mul(outer_n, inner_n)


def _tokens(op: OpBuilder, form: Form, given: _Inputs, sizes: _Sizes) -> _Tokens:
    x, slots = given.token_x, given.cache_index
    cos, sin = numerics.widen(op, given.rope_cos), numerics.widen(op, given.rope_sin)
    if form.batched:
        x = op.Reshape(x, op.Concat([-1], sizes.hidden, axis=0))
        cos, sin = (op.Reshape(table, op.Concat([-1], sizes.rope, axis=0)) for table in (cos, sin))
        slots = op.Reshape(slots, [-1])
    return _Tokens(x, cos, sin, slots)


def _query(op: OpBuilder, form: Form, given: _Inputs, sizes: _Sizes, tokens: _Tokens) -> tuple[ir.Value, ir.Value]:
    """query (T, N, Hckv) and query_rope (T, N, Dr) in the float type."""
    c_q = _projection(op, form, tokens.x, given.weight_dq, given.dequant_scale_x, given.dequant_scale_w_dq)
    gamma, epsilon = numerics.widen(op, given.rmsnorm_gamma_cq), numerics.attribute(op, "rmsnorm_epsilon_cq")
    q_c = _query_projection(op, form, given, numerics.rms_norm(op, c_q, gamma, epsilon))
    q_c = op.Reshape(q_c, op.Concat([-1], sizes.heads, op.Add(sizes.nope, sizes.rope), axis=0))

    nope = op.Slice(q_c, [0], sizes.nope, [2])
    if form.query_weight_int8:
        nope = numerics.rounded(op, nope, form.float_type)
    # One product per head with all tokens as its rows, so that each head's W_UK is read once.
    latent = op.MatMul(op.Transpose(nope, perm=[1, 0, 2]), numerics.widen(op, given.weight_uk))
    query = op.Transpose(latent, perm=[1, 0, 2])

    per_head = op.Concat([-1, 1], sizes.rope, axis=0)
    cos, sin = (op.Reshape(table, per_head) for table in (tokens.cos, tokens.sin))
    query_rope = numerics.rotate(op, *_lanes(op, q_c, sizes.nope), cos, sin)
    return numerics.narrow(op, query, form.float_type), numerics.narrow(op, query_rope, form.float_type)


def _key_value(op: OpBuilder, form: Form, given: _Inputs, sizes: _Sizes, tokens: _Tokens) -> tuple[ir.Value, ir.Value]:
    """The rows of the two caches, (T, Hckv) and (T, Dr), in float32; scaled where the cache is int8."""
    kv = _projection(op, form, tokens.x, given.weight_dkv_kr, given.dequant_scale_x, given.dequant_scale_w_dkv_kr)
    gamma, epsilon = numerics.widen(op, given.rmsnorm_gamma_ckv), numerics.attribute(op, "rmsnorm_epsilon_ckv")
    c_kv = numerics.rms_norm(op, op.Slice(kv, [0], sizes.rank, [1]), gamma, epsilon)
    k_rope = numerics.rotate(op, *_lanes(op, kv, sizes.rank), tokens.cos, tokens.sin)
    if form.kv_cache == ir.DataType.INT8:
        c_kv = op.Mul(c_kv, _latent_scale(op, form, given))
    if form.kr_cache == ir.DataType.INT8:
        k_rope = op.Mul(k_rope, given.quant_scale_ckr)
    return c_kv, k_rope


def _latent_scale(op: OpBuilder, form: Form, given: _Inputs) -> ir.Value | None:
    """quant_scale_ckv (1, Hckv); with an int8 query the quantisation is per tensor: its first element alone, (1, 1)."""
    return op.Slice(given.quant_scale_ckv, [0], [1], [1]) if form.query_int8 else given.quant_scale_ckv


def _quantised_query(
    op: OpBuilder, form: Form, given: _Inputs, query: ir.Value, query_rope: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The query in int8, the rotary part scaled to match, and the scale (T, N, 1) per token and head.

    Attention multiplies the sum of nope and rope scores by one factor, so the rope part is divided by it here.
    """
    quantised, scale = numerics.dynamic_quantise(op, numerics.widen(op, query))
    ratio = op.Div(_latent_scale(op, form, given), numerics.nonzero(op, scale))
    query_rope = numerics.narrow(op, op.Mul(numerics.widen(op, query_rope), ratio), form.float_type)
    return quantised, query_rope, scale


def _projection(
    op: OpBuilder, form: Form, x: ir.Value, weight: ir.Value, scale_x: ir.Value | None, scale_w: ir.Value | None
) -> ir.Value:
    """`x @ weight` in float32: rounded to the float type, or dequantised by token and column and then not rounded."""
    weight = _unpacked(op, form, weight)
    if form.token_int8:
        exact = op.Cast(op.MatMulInteger(x, weight), to=ir.DataType.FLOAT)
        dequantised: ir.Value = op.Mul(op.Mul(exact, scale_x), scale_w)
        return dequantised
    return numerics.rounded(op, op.MatMul(numerics.widen(op, x), numerics.widen(op, weight)), form.float_type)


def _query_projection(op: OpBuilder, form: Form, given: _Inputs, c_q: ir.Value) -> ir.Value:
    """`c_q @ weight_uq_qr` in float32; where the weight is int8, `c_q` is quantised per token on the way."""
    weight = _unpacked(op, form, given.weight_uq_qr)
    if not form.query_weight_int8:
        c_q = numerics.rounded(op, c_q, form.float_type)
        return numerics.rounded(op, op.MatMul(c_q, numerics.widen(op, weight)), form.float_type)
    if given.smooth_scales_cq is not None:
        c_q = op.Mul(c_q, given.smooth_scales_cq)
    quantised, scale = numerics.dynamic_quantise(op, c_q)
    exact = op.Cast(op.MatMulInteger(quantised, weight), to=ir.DataType.FLOAT)
    dequantised: ir.Value = op.Mul(op.Mul(exact, scale), given.dequant_scale_w_uq_qr)
    return dequantised


def _unpacked(op: OpBuilder, form: Form, weight: ir.Value) -> ir.Value:
    """A weight as (k, n): FRACTAL_NZ storage (n / w0, k / 16, 16, w0) is put back in order."""
    if weight.name not in form.packed:
        return weight
    shape = op.Concat(*_weight_shape(op, form, weight), axis=0)
    unpacked: ir.Value = op.Reshape(op.Transpose(weight, perm=[1, 2, 0, 3]), shape)
    return unpacked


def _lanes(op: OpBuilder, x: ir.Value, start: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The even and the odd lanes of the interleaved features that begin at `start` in the last axis."""
    return numerics.every_second(op, x, start), numerics.every_second(op, x, op.Add(start, [1]))


def _written_caches(
    op: OpBuilder, form: Form, given: _Inputs, tokens: _Tokens, c_kv: ir.Value, k_rope: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The caches with the rows of the tokens that have a slot.

    A negative index means "do not write", and an empty cache has no slots: such tokens are taken out, which costs less
    than a spare row, for which the cache would have to be copied.
    """
    capacity = op.Mul(op.Shape(given.kv_cache, start=0, end=1), op.Shape(given.kv_cache, start=1, end=2))
    written = op.And(op.GreaterOrEqual(tokens.slots, [0]), op.Less(tokens.slots, capacity))
    slots = op.Compress(tokens.slots, written, axis=0)

    def scattered(cache: ir.Value, rows: ir.Value, dtype: ir.DataType) -> ir.Value:
        rows = op.Compress(rows, written, axis=0)
        stored = numerics.quantise(op, rows) if dtype == ir.DataType.INT8 else numerics.narrow(op, rows, dtype)
        c0 = layout.fractal_width(dtype.bitwidth // 8) if form.nz_cache else None
        return _scatter(op, cache, slots, stored, c0)

    return scattered(given.kv_cache, c_kv, form.kv_cache), scattered(given.kr_cache, k_rope, form.kr_cache)


def _scatter(op: OpBuilder, cache: ir.Value, slots: ir.Value, rows: ir.Value, c0: int | None) -> ir.Value:
    """The cache (BlockNum, BlockSize, 1, H) with `rows` (K, H) at `slots` (K); in PA_NZ order if `c0` is given."""
    index = op.Unsqueeze(slots, [-1])
    width = op.Shape(cache, start=-1)
    if c0 is not None:
        # A block is (H / c0, BlockSize, c0), so piece f of the row for slot p is line
        # (p / BlockSize * (H / c0) + f) * BlockSize + p % BlockSize of the cache seen as lines of c0 lanes.
        lanes = op.Constant(value_ints=[c0])
        block_size, pieces = op.Shape(cache, start=1, end=2), op.Div(width, lanes)
        piece = op.Range(0, op.Squeeze(pieces, [0]), 1)
        line = op.Add(op.Mul(op.Div(index, block_size), pieces), piece)
        index = op.Unsqueeze(op.Add(op.Mul(line, block_size), op.Mod(index, block_size)), [-1])
        rows = op.Reshape(rows, op.Concat([-1], pieces, lanes, axis=0))
        width = lanes
    flat = op.Reshape(cache, op.Concat([-1], width, axis=0))
    written: ir.Value = op.Reshape(op.ScatterND(flat, index, rows), op.Shape(cache), allowzero=1)
    return written
