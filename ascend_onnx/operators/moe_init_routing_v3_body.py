"""The function body of MoeInitRoutingV3, and the name of its configuration.

Letters as in `moe_init_routing_v3`; R rows of expanded_x. Experts are numbered from the start of the active range
here, and assignments that are not routed belong to one further expert behind the range, so that they sort last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

from ascend_onnx import numerics
from ascend_onnx.errors import InputError
from ascend_onnx.operator import Body, Call

__all__ = ["body", "overload"]

_STATIC, _DYNAMIC = 0, 1
_MXFP8 = {2: (ir.DataType.FLOAT8E5M2, 57344.0, 15), 3: (ir.DataType.FLOAT8E4M3FN, 448.0, 8)}
"""Element type, its largest value and the exponent of that, by quant_mode."""
_QUANT_NAMES = {_STATIC: "static", _DYNAMIC: "dynamic", 2: "mxfp8e5m2", 3: "mxfp8e4m3fn"}
_BLOCK = 32
_BIAS = 127
_NOT_A_NUMBER = 255


def overload(call: Call) -> str:
    """Every attribute that shapes the body: "dropless_scatter_count_experts256_0to32_bfloat16"."""
    attributes = call.attributes
    form = _Form.of(call)
    if form.capacity is not None:
        rows = f"capacity{form.capacity}"
    else:
        rows = f"active{form.active}" if form.active else "dropless"
    present = {
        ("gather", "scatter")[attributes["row_idx_type"]]: True,
        ("cumsum", "count", "keyvalue")[attributes["expert_tokens_num_type"]]: form.counts,
        f"experts{form.experts}": True,
        f"{form.start}to{form.end}": (form.start, form.end) != (0, form.experts),
        _QUANT_NAMES.get(form.quant_mode, "unknown"): form.quant_mode != -1,
        "scale": call.has("scale"),
        f"outputs{form.outputs}": form.outputs != 2,
    }
    dtype = call.input("x").dtype
    words = [rows, *(word for word, is_present in present.items() if is_present)]
    return "_".join((*words, "unknown" if dtype is None else dtype.name.lower()))


@dataclass(frozen=True)
class _Form:
    """What a body depends on, apart from types. `capacity` is None without drop and pad, `active` 0 if unlimited."""

    outputs: int
    experts: int
    start: int
    end: int
    capacity: int | None
    active: int
    counts: bool
    quant_mode: int

    @classmethod
    def of(cls, call: Call) -> _Form:
        attributes = call.attributes
        names = [declared.name for declared in call.operator.outputs]
        experts = attributes["expert_num"]
        start, end = attributes.get("active_expert_range") or (0, experts)
        return cls(
            outputs=1 + max(names.index(name) for name in call.outputs),
            experts=experts,
            start=start,
            end=end,
            capacity=attributes["expert_capacity"] if attributes["drop_pad_mode"] == 1 else None,
            active=max(attributes["active_num"], 0),
            counts=bool(attributes["expert_tokens_num_flag"]) and call.has("expert_tokens_count_or_cumsum"),
            quant_mode=attributes["quant_mode"],
        )


@dataclass(frozen=True)
class _Routing:
    """Where everything goes.

    `row_idx`: (N*K) expanded_row_idx, int64. `token`, `expert`: (R) what each expanded row holds; a row that holds
    nothing has token N. `counts`: (end - start) routed assignments per expert.
    """

    row_idx: ir.Value
    token: ir.Value
    expert: ir.Value
    counts: ir.Value


def body(call: Call) -> Body:
    """Sort the assignments, then gather rows of `x`, to which a row of zeros is appended for rows without a token."""
    form = _Form.of(call)
    attributes = call.attributes
    if form.quant_mode != -1 and form.quant_mode not in _QUANT_NAMES:
        raise InputError(f"MoeInitRoutingV3 needs a quant_mode from -1 to 3, got {form.quant_mode}")
    if form.quant_mode == _STATIC and not (call.has("scale") and call.has("offset")):
        raise InputError("MoeInitRoutingV3 with quant_mode 0 needs the inputs scale and offset, one is absent")
    if form.capacity is not None and form.capacity < 1:
        raise InputError(f"MoeInitRoutingV3 with drop_pad_mode 1 needs a positive expert_capacity, got {form.capacity}")

    def trace(
        op: OpBuilder, x: ir.Value, expert_idx: ir.Value, scale: ir.Value | None, offset: ir.Value | None
    ) -> Sequence[ir.Value]:
        routing = _route(op, form, expert_idx, scatter=attributes["row_idx_type"] == 1)
        expanded, expanded_scale = _expanded(op, form, routing, x, scale, offset)
        if form.capacity is not None:
            shape = op.Concat([form.experts, form.capacity], _dim(op, x, 1), axis=0)
            expanded = op.Reshape(expanded, shape, allowzero=1)
        results = [expanded, op.Cast(routing.row_idx, to=ir.DataType.INT32)]
        if form.outputs > 2:
            counts = _counts(op, form, routing.counts, attributes["expert_tokens_num_type"]) if form.counts else None
            results.append(_empty(op, ir.DataType.INT64) if counts is None else counts)
        if form.outputs > 3:
            results.append(_empty(op, ir.DataType.FLOAT) if expanded_scale is None else expanded_scale)
        return results[: form.outputs]

    return trace


def _route(op: OpBuilder, form: _Form, expert_idx: ir.Value, *, scatter: bool) -> _Routing:
    """The routing, from a stable sort of the assignments by expert (TopK breaks ties by the lower index)."""
    nobody = form.end - form.start
    ids = op.Cast(op.Reshape(expert_idx, [-1]), to=ir.DataType.INT64)
    routed = op.And(op.GreaterOrEqual(ids, form.start), op.Less(ids, form.end))
    expert = op.Where(routed, op.Sub(ids, form.start), nobody)
    expert, order, rank = _sorted(op, expert)
    routed = op.Less(expert, nobody)
    tokens = _dim(op, expert_idx, 0)
    token = op.Div(order, op.Max(_dim(op, expert_idx, 1), [1]))
    counts = op.ScatterElements(
        op.ConstantOfShape([nobody + 1], value=_int64([0])),
        expert,
        op.ConstantOfShape(op.Shape(expert), value=_int64([1])),
        axis=0,
        reduction="add",
    )
    kept_counts = op.Slice(counts, [0], [nobody], [0])
    if form.capacity is None:
        token = op.Where(routed, token, tokens)
        row_idx = op.Where(routed, order, -1) if scatter else _inverse(op, order, op.Where(routed, rank, -1))
        if form.active:
            token, expert = (op.Slice(rows, [0], [form.active], [0]) for rows in (token, expert))
        return _Routing(row_idx, token, expert, kept_counts)

    slot = op.Sub(rank, op.Gather(op.CumSum(counts, 0, exclusive=1), expert))
    kept = op.And(routed, op.Less(slot, form.capacity))
    row = op.Add(op.Mul(expert, form.capacity), slot)
    rows = form.experts * form.capacity
    # What is dropped is written to one row too many, which is then cut off.
    holder = op.ScatterElements(op.Expand(tokens, [rows + 1]), op.Where(kept, row, rows), token, axis=0)
    return _Routing(
        row_idx=_inverse(op, order, op.Where(kept, row, -1)),
        token=op.Slice(holder, [0], [rows], [0]),
        expert=op.Div(op.Range(0, rows, 1), form.capacity),
        counts=kept_counts,
    )


def _sorted(op: OpBuilder, keys: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The keys in ascending order, the index that each had, and its new one."""
    count = op.Shape(keys)
    values, order = op.TopK(keys, count, largest=0, sorted=1, _outputs=2)
    return values, order, op.Range(0, op.Squeeze(count, [0]), 1)


def _inverse(op: OpBuilder, order: ir.Value, values: ir.Value) -> ir.Value:
    """`result[order[i]] = values[i]` for the permutation `order`, which overwrites every element."""
    inverse: ir.Value = op.ScatterElements(values, order, values, axis=0)
    return inverse


def _counts(op: OpBuilder, form: _Form, counts: ir.Value, kind: int) -> ir.Value:
    """Running sum (0), count (1) or, per expert that has any, (expert, count) and then zeros (2)."""
    if kind == 0:
        counts = op.CumSum(counts, 0)
    if kind == 2:
        found = op.Squeeze(op.NonZero(counts), [0])
        columns = [op.Unsqueeze(column, [1]) for column in (op.Add(found, form.start), op.Gather(counts, found))]
        missing = op.Sub([form.experts], op.Shape(found))
        counts = op.Pad(op.Concat(*columns, axis=1), op.Concat([0, 0], missing, [0], axis=0))
    return counts


def _expanded(
    op: OpBuilder, form: _Form, routing: _Routing, x: ir.Value, scale: ir.Value | None, offset: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    """expanded_x (R, H), and expanded_scale (R) or (R, blocks) where the mode has one."""
    if form.quant_mode == _STATIC:
        quantised = numerics.quantise(op, op.Add(op.Mul(numerics.widen(op, x), scale), offset))
        return _take(op, quantised, routing.token), None
    if form.quant_mode == _DYNAMIC:
        rows = _take(op, numerics.widen(op, x), routing.token)
        if scale is not None:
            last = op.Sub(_dim(op, scale, 0), 1)
            rows = op.Mul(rows, op.Gather(scale, op.Min(routing.expert, last)))
        values, scales = numerics.dynamic_quantise(op, rows)
        return values, op.Squeeze(scales, [-1])
    if form.quant_mode in _MXFP8:
        dtype, limit, largest_exponent = _MXFP8[form.quant_mode]
        values, exponents = _mxfp8(op, numerics.widen(op, x), limit, largest_exponent)
        taken = _take(op, values, routing.token), _take(op, exponents, routing.token)
        return op.Cast(taken[0], to=dtype), _e8m0(op, taken[1])
    return _take(op, x, routing.token), None if scale is None else _take(op, scale, routing.token)


def _take(op: OpBuilder, rows: ir.Value, token: ir.Value) -> ir.Value:
    """The rows (N, ...) of the tokens (R), zeros where the token is N."""
    shape = op.Concat([1], op.Shape(rows, start=1), axis=0)
    zeros = numerics.narrow(op, op.ConstantOfShape(shape), rows.dtype or ir.DataType.FLOAT)
    taken: ir.Value = op.Gather(op.Concat(rows, zeros, axis=0), token)
    return taken


def _mxfp8(op: OpBuilder, x: ir.Value, limit: float, largest_exponent: int) -> tuple[ir.Value, ir.Value]:
    """Elements (N, H) before the cast to float8, and the biased shared exponents (N, even number of blocks) in float32.

    The shared exponent is that of the largest magnitude of a block, less `largest_exponent`; 0 at least, and 255 for
    a block with a value that is not finite, whose elements are 0.
    """
    width = _dim(op, x, 1)
    padding = op.Mod(op.Neg(width), [2 * _BLOCK])
    padded = op.Pad(x, op.Concat([0, 0, 0], padding, axis=0))
    blocks = op.Div(op.Add(width, padding), [_BLOCK])
    grouped = op.Reshape(padded, op.Concat(_dim(op, x, 0), blocks, [_BLOCK], axis=0), allowzero=1)
    largest = numerics.reduce(op, "ReduceMax", op.Abs(grouped))
    finite = op.Equal(numerics.reduce(op, "ReduceSum", op.Mul(grouped, 0.0)), 0.0)
    exponent = op.Max(op.Add(_exponent(op, largest), float(_BIAS - largest_exponent)), 0.0)
    scaled = op.Clip(op.Mul(grouped, op.Pow(2.0, op.Sub(float(_BIAS), exponent))), -limit, limit)
    elements = op.Reshape(op.Where(finite, scaled, 0.0), op.Shape(padded), allowzero=1)
    shared = op.Where(finite, exponent, float(_NOT_A_NUMBER))
    return op.Slice(elements, [0], width, [1]), op.Squeeze(shared, [-1])


def _exponent(op: OpBuilder, x: ir.Value) -> ir.Value:
    """`floor(log2(x))` of the non-negative `x`, exact although the logarithm is not."""
    guess = op.Floor(op.Div(op.Log(x), float(np.log(2.0))))
    guess = op.Where(op.Greater(op.Pow(2.0, guess), x), op.Sub(guess, 1.0), guess)
    exponent: ir.Value = op.Where(op.LessOrEqual(op.Pow(2.0, op.Add(guess, 1.0)), x), op.Add(guess, 1.0), guess)
    return exponent


def _e8m0(op: OpBuilder, exponents: ir.Value) -> ir.Value:
    """Biased exponents as the powers of two that FLOAT8E8M0 stores, 255 as not-a-number."""
    power = op.Pow(2.0, op.Sub(exponents, float(_BIAS)))
    is_number = op.Less(exponents, float(_NOT_A_NUMBER))
    scale: ir.Value = op.Cast(op.Where(is_number, power, np.nan), to=ir.DataType.FLOAT8E8M0)
    return scale


def _empty(op: OpBuilder, dtype: ir.DataType) -> ir.Value:
    empty: ir.Value = op.ConstantOfShape([0], value=ir.tensor(np.zeros(1, dtype.numpy())))
    return empty


def _int64(values: list[int]) -> ir.TensorProtocol:
    return ir.tensor(values, ir.DataType.INT64)


def _dim(op: OpBuilder, x: ir.Value, axis: int) -> ir.Value:
    """The size of one axis, as a tensor of shape (1)."""
    dim: ir.Value = op.Shape(x, start=axis, end=axis + 1)
    return dim
