"""MoeInitRoutingV3: the tokens of a mixture of experts, copied and put in the order of their experts.

    expert_idx -> stable sort by expert -> expanded_row_idx
    x[token of the sorted assignment] [-> quantisation] -> expanded_x, expanded_scale
    assignments per expert -> expert_tokens_count_or_cumsum

Letters: N tokens, H hidden size, K experts per token, E experts, C = expert_capacity rows per expert, R rows of
expanded_x. An assignment is one of the N * K pairs of a token and one of its experts; it is routed if its expert lies
in the active range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx.reference.op_run import OpRun
from onnxscript import OpBuilder

from ascend_onnx import numerics
from ascend_onnx.limits import (
    INVALID,
    TILING,
    Place,
    With,
    absent,
    agree,
    attribute,
    given,
    of_type,
    produced,
    ranks,
    require,
    rule,
    shape,
    when,
)
from ascend_onnx.operator import DOMAIN, Attribute, Body, Call, Dim, Input, Operator, Output, Product, Tensor, product

__all__ = ["OPERATOR"]

_INT32 = (ir.DataType.INT32,)
_FLOAT32 = (ir.DataType.FLOAT,)
_X_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.INT8)
_STATIC, _DYNAMIC = 0, 1
_MXFP8 = {2: (ir.DataType.FLOAT8E5M2, 57344.0, 15), 3: (ir.DataType.FLOAT8E4M3FN, 448.0, 8)}
"""Element type, its largest value and the exponent of that, by quant_mode."""
_QUANT_NAMES = {_STATIC: "static", _DYNAMIC: "dynamic", 2: "mxfp8e5m2", 3: "mxfp8e4m3fn"}
_ROW_INDICES = {0: "gather", 1: "scatter"}
_COUNTS = {0: "cumsum", 1: "count", 2: "keyvalue"}
_BLOCK = 32
_BIAS = 127
_NOT_A_NUMBER = 255

# --- What a call means ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """What a body depends on, apart from types. `capacity` is None without drop and pad, `active` 0 if unlimited."""

    outputs: int
    chosen: int | None
    """K, where it is known."""
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
        experts = attributes["expert_num"]
        bounds: tuple[int, ...] = attributes.get("active_expert_range") or ()
        start, end = (bounds[0], bounds[1]) if len(bounds) == 2 else (0, experts)
        return cls(
            outputs=call.output_count,
            chosen=chosen if isinstance(chosen := call.input("expert_idx").dim(1), int) and chosen > 0 else None,
            experts=experts,
            start=start,
            end=end,
            capacity=attributes["expert_capacity"] if attributes["drop_pad_mode"] == 1 else None,
            active=max(attributes["active_num"], 0),
            counts=bool(attributes["expert_tokens_num_flag"]) and call.has("expert_tokens_count_or_cumsum"),
            quant_mode=attributes["quant_mode"],
        )


def _overload(call: Call) -> str:
    """Every attribute that shapes the body: "dropless_scatter_count_experts256_top8_0to32_bfloat16"."""
    attributes = call.attributes
    form = _Form.of(call)
    if form.capacity is not None:
        rows = f"capacity{form.capacity}"
    else:
        rows = f"active{form.active}" if form.active else "dropless"
    present = {
        _ROW_INDICES.get(attributes["row_idx_type"], "unknown"): True,
        _COUNTS.get(attributes["expert_tokens_num_type"], "unknown"): form.counts,
        f"experts{form.experts}": True,
        f"top{form.chosen}": form.chosen is not None,
        f"{form.start}to{form.end}": (form.start, form.end) != (0, form.experts),
        _QUANT_NAMES.get(form.quant_mode, "unknown"): form.quant_mode != -1,
        "scale": call.has("scale"),
        f"outputs{form.outputs}": form.outputs != 2,
    }
    dtype = call.input("x").dtype
    words = [rows, *(word for word, is_present in present.items() if is_present)]
    return "_".join((*words, "unknown" if dtype is None else dtype.name.lower()))


def _infer(call: Call) -> Mapping[str, Tensor]:
    """Rows: (E, C, H) with drop and pad, else (R, H) with R = N*K or at most active_num of them."""
    form, x = _Form.of(call), call.input("x")
    assignments = product(call.input("expert_idx").dim(0), call.input("expert_idx").dim(1))
    leading: tuple[Dim, ...] = (_at_most(form.active, assignments),)
    if form.capacity is not None:
        leading = (form.experts, form.capacity if form.capacity > 0 else None)
    rows, width = product(*leading), x.dim(1)
    quantised = {_STATIC: ir.DataType.INT8, _DYNAMIC: ir.DataType.INT8} | {mode: t for mode, (t, *_) in _MXFP8.items()}
    scale = Tensor(ir.DataType.FLOAT, (rows,) if _has_scale(call) else (0,))
    if form.quant_mode in _MXFP8:
        blocks = 2 * -(-width // (2 * _BLOCK)) if isinstance(width, int) else None
        scale = Tensor(ir.DataType.FLOAT8E8M0, (rows, blocks))
    counts: tuple[Dim, ...] = (form.end - form.start,)
    if call.attributes["expert_tokens_num_type"] == 2:
        counts = (form.experts, 2)
    return {
        "expanded_x": Tensor(quantised.get(form.quant_mode, x.dtype), (*leading, width)),
        "expanded_row_idx": Tensor(ir.DataType.INT32, (assignments,)),
        "expert_tokens_count_or_cumsum": Tensor(
            ir.DataType.INT64, counts if call.attributes["expert_tokens_num_flag"] else (0,)
        ),
        "expanded_scale": scale,
    }


def _has_scale(call: Call) -> bool:
    """Whether the configuration produces expanded_scale."""
    mode = call.attributes["quant_mode"]
    return mode in (_DYNAMIC, *_MXFP8) or (mode == -1 and call.has("scale"))


def _at_most(limit: int, dim: Dim) -> Dim:
    """`dim`, or `limit` where that is positive and smaller."""
    if limit <= 0 or dim is None:
        return dim
    return min(limit, dim) if isinstance(dim, int) else f"Min({limit}, {dim})"


# --- Body -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Routing:
    """Where everything goes.

    `row_idx`: (N*K) expanded_row_idx. `token`, `expert`: (R) what each expanded row holds; a row that holds
    nothing has token N. `counts`: (end - start) routed assignments per expert.
    """

    row_idx: ir.Value
    token: ir.Value
    expert: ir.Value
    counts: ir.Value


def _body(call: Call) -> Body:
    """Sort the assignments, then gather rows of `x`, to which a row of zeros is appended for rows without a token.

    Raises `InputError` for an attribute value that has no meaning, and where a static quantisation lacks its inputs.
    """
    form = _Form.of(call)
    attributes = call.attributes
    require(call, *_NEEDED_BY_BODY)

    def trace(
        op: OpBuilder, x: ir.Value, expert_idx: ir.Value, scale: ir.Value | None, offset: ir.Value | None
    ) -> Sequence[ir.Value]:
        routing = _route(op, form, expert_idx, scatter=attributes["row_idx_type"] == 1)
        expanded, expanded_scale = _expanded(op, form, routing, x, scale, offset)
        if form.capacity is not None:
            shape = op.Concat([form.experts, form.capacity], numerics.dim(op, x, 1), axis=0)
            expanded = op.Reshape(expanded, shape, allowzero=1)
        results = [expanded, routing.row_idx]
        if form.outputs > 2:
            counts = _counts(op, form, routing.counts, attributes["expert_tokens_num_type"]) if form.counts else None
            results.append(_empty(op, ir.DataType.INT64) if counts is None else counts)
        if form.outputs > 3:
            results.append(_empty(op, ir.DataType.FLOAT) if expanded_scale is None else expanded_scale)
        return results[: form.outputs]

    return trace


def _route(op: OpBuilder, form: _Form, expert_idx: ir.Value, *, scatter: bool) -> _Routing:
    """The routing, from a stable sort of the assignments by expert (TopK breaks ties by the lower index).

    Experts are numbered from the start of the active range here, and assignments that are not routed belong to one
    further expert behind the range, so that they sort last.
    """
    nobody = form.end - form.start
    ids = op.Reshape(expert_idx, [-1])
    if form.start:
        ids = op.Sub(ids, form.start)
    # Read as an unsigned number, an expert in front of the range lies far behind it.
    key = op.Cast(op.Min(op.Cast(ids, to=ir.DataType.UINT32), nobody), to=ir.DataType.INT32)
    assignments = op.Shape(key)
    expert, order = op.TopK(key, assignments, largest=0, sorted=1, _outputs=2)
    order = op.Cast(order, to=ir.DataType.INT32)
    routed = op.Less(expert, nobody)
    ones = op.ConstantOfShape(assignments, value=_int64([1]))
    no_counts = op.ConstantOfShape([nobody + 1], value=_int64([0]))
    counts = op.ScatterElements(no_counts, key, ones, axis=0, reduction="add")
    kept_counts = op.Slice(counts, [0], [nobody], [0])
    count = op.Cast(op.Squeeze(assignments, [0]), to=ir.DataType.INT32)
    chosen: ir.Value | int = form.chosen or 1
    if form.chosen is None:
        chosen = op.Max(op.Cast(numerics.dim(op, expert_idx, 1), to=ir.DataType.INT32), [1])
    token = op.Div(op.Where(routed, order, count), chosen)
    if form.capacity is None:
        if scatter:
            row_idx = op.Where(routed, order, -1)
        else:
            row_idx = _inverse(op, order, op.Where(routed, op.Range(0, count, 1), -1))
        if form.active:
            token, expert = (op.Slice(rows, [0], [form.active], [0]) for rows in (token, expert))
        return _Routing(row_idx, token, expert, kept_counts)

    before = op.Cast(op.CumSum(counts, 0, exclusive=1), to=ir.DataType.INT32)
    slot = op.Sub(op.Range(0, count, 1), op.Gather(before, expert))
    kept = op.And(routed, op.Less(slot, form.capacity))
    row = op.Add(op.Mul(expert, form.capacity), slot)
    rows = form.experts * form.capacity
    # What is dropped is written to one row too many, which is then cut off.
    holder = op.Expand(op.Cast(numerics.dim(op, expert_idx, 0), to=ir.DataType.INT32), [rows + 1])
    holder = op.ScatterElements(holder, op.Where(kept, row, rows), token, axis=0)
    return _Routing(
        row_idx=_inverse(op, order, op.Where(kept, row, -1)),
        token=op.Slice(holder, [0], [rows], [0]),
        expert=op.Div(op.Range(0, rows, 1), form.capacity),
        counts=kept_counts,
    )


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
            last = op.Sub(numerics.dim(op, scale, 0), 1)
            factor = op.Min(op.Cast(routing.expert, to=ir.DataType.INT64), last)
            rows = op.Mul(rows, op.Gather(scale, factor))
        values, scales = numerics.dynamic_quantise(op, rows)
        return values, op.Squeeze(scales, [-1])
    if form.quant_mode in _MXFP8:
        dtype, limit, largest_exponent = _MXFP8[form.quant_mode]
        values, exponents = _mxfp8(op, numerics.widen(op, x), limit, largest_exponent)
        taken = _take(op, values, routing.token), _take(op, exponents, routing.token)
        return op.Cast(taken[0], to=dtype), _e8m0(op, taken[1])
    return _take(op, x, routing.token), None if scale is None else _take(op, scale, routing.token, rank=1)


def _take(op: OpBuilder, rows: ir.Value, token: ir.Value, *, rank: int = 2) -> ir.Value:
    """The rows (N, ...) of the tokens (R), zeros where the token is N."""
    if rows.dtype in (ir.DataType.FLOAT, ir.DataType.INT8):
        padded = op.Pad(rows, [0] * rank + [1] + [0] * (rank - 1))
    else:  # ONNX Runtime pads no short floats
        shape = op.Concat([1], op.Shape(rows, start=1), axis=0)
        zeros = numerics.narrow(op, op.ConstantOfShape(shape), rows.dtype or ir.DataType.FLOAT)
        padded = op.Concat(rows, zeros, axis=0)
    taken: ir.Value = op.Gather(padded, token)
    return taken


def _mxfp8(op: OpBuilder, x: ir.Value, limit: float, largest_exponent: int) -> tuple[ir.Value, ir.Value]:
    """Elements (N, H) before the cast to float8, and the biased shared exponents (N, even number of blocks) in float32.

    The shared exponent is that of the largest magnitude of a block, less `largest_exponent`; 0 at least, and 255 for
    a block with a value that is not finite, whose elements are 0.
    """
    width = numerics.dim(op, x, 1)
    padding = op.Mod(op.Neg(width), [2 * _BLOCK])
    padded = op.Pad(x, op.Concat([0, 0, 0], padding, axis=0))
    blocks = op.Div(op.Add(width, padding), [_BLOCK])
    grouped = op.Reshape(padded, op.Concat(numerics.dim(op, x, 0), blocks, [_BLOCK], axis=0), allowzero=1)
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


# --- Reference --------------------------------------------------------------------------------------------------------

_Array = np.ndarray[Any, np.dtype[Any]]

_FLOAT8 = {2: (ml_dtypes.float8_e5m2, 57344.0, 15), 3: (ml_dtypes.float8_e4m3fn, 448.0, 8)}
"""Like `_MXFP8`, with the element types of numpy."""


class MoeInitRoutingV3(OpRun):
    """The operator in numpy: a list of assignments in expanded order, and one pass over it per output.

    Written independently of the body.
    """

    op_domain = DOMAIN

    def _run(
        self,
        x: _Array,
        expert_idx: _Array,
        scale: _Array | None = None,
        offset: _Array | None = None,
        *,
        expert_num: int,
        active_num: int = -1,
        expert_capacity: int = -1,
        drop_pad_mode: int = 0,
        expert_tokens_num_type: int = 0,
        expert_tokens_num_flag: int = 0,
        quant_mode: int = -1,
        active_expert_range: Sequence[int] | None = None,
        row_idx_type: int = 0,
    ) -> tuple[_Array, ...]:
        start, end = active_expert_range if active_expert_range else (0, expert_num)
        ids = expert_idx.reshape(-1).astype(np.int64)
        routed = np.flatnonzero((ids >= start) & (ids < end))
        order = routed[np.argsort(ids[routed], kind="stable")]
        counts = np.bincount(ids[routed], minlength=end)[start:end]

        rows = np.arange(order.size)
        if drop_pad_mode == 1:
            first = np.cumsum(counts) - counts
            slots = rows - first[ids[order]]
            rows = np.where(slots < expert_capacity, ids[order] * expert_capacity + slots, -1)
            leading: tuple[int, ...] = (expert_num, expert_capacity)
        else:
            leading = (min(active_num, ids.size) if active_num > 0 else ids.size,)
        row_idx = np.full(ids.size, -1, np.int32)
        if row_idx_type == 1:
            row_idx[: order.size] = order
        else:
            row_idx[order] = rows

        size = int(np.prod(leading))
        written = (rows >= 0) & (rows < size)
        sources = order[written]
        values, scales = _rows(
            x, sources // max(expert_idx.shape[1], 1), ids[sources] - start, scale, offset, quant_mode
        )
        expanded = _placed(values, rows[written], size).reshape(*leading, x.shape[1])
        expanded_scale = np.zeros(0, np.float32) if scales is None else _placed(scales, rows[written], size)
        tokens = _tokens(counts, start, expert_num, expert_tokens_num_type) if expert_tokens_num_flag else counts[:0]
        results = (expanded, row_idx, tokens.astype(np.int64), expanded_scale)
        return results[: len(self.onnx_node.output)]


def _placed(values: _Array, rows: _Array, size: int) -> _Array:
    """`values` at `rows` of an array of `size` rows, zeros elsewhere."""
    result = np.zeros((size, *values.shape[1:]), values.dtype)
    result[rows] = values
    return result


def _tokens(counts: _Array, start: int, experts: int, kind: int) -> _Array:
    """Tokens per expert: running sum, count, or rows (expert, count) of the experts that have any."""
    if kind == 0:
        return np.cumsum(counts)
    if kind == 1:
        return counts
    found = np.flatnonzero(counts)
    pairs = np.zeros((experts, 2), np.int64)
    pairs[: found.size] = np.stack((found + start, counts[found]), axis=1)
    return pairs


def _rows(
    x: _Array, tokens: _Array, experts: _Array, scale: _Array | None, offset: _Array | None, quant_mode: int
) -> tuple[_Array, _Array | None]:
    """The values (R, H) and the scales of the rows that hold `tokens` for `experts`, both of size R."""
    if quant_mode == -1:
        return x[tokens], None if scale is None else scale[tokens]
    values = x[tokens].astype(np.float32)
    if quant_mode == 0:
        if scale is None or offset is None:
            raise ValueError("MoeInitRoutingV3 with quant_mode 0 needs the inputs scale and offset")
        return _int8(values * scale + offset), None
    if quant_mode == 1:
        if scale is not None:
            values = values * (scale if scale.shape[0] == 1 else scale[experts])
        largest = np.abs(values).max(axis=1, initial=0.0)
        scales = largest / np.float32(127.0)
        return _int8(values / np.where(scales == 0, np.float32(1.0), scales)[:, None]), scales
    return _float8(values, *_FLOAT8[quant_mode])


def _int8(values: _Array) -> _Array:
    return np.clip(np.rint(values), -128, 127).astype(np.int8)


def _float8(values: _Array, dtype: type[Any], limit: float, largest_exponent: int) -> tuple[_Array, _Array]:
    """float8 elements and E8M0 scales of blocks of 32 columns; an even number of blocks, the last one perhaps empty."""
    rows, width = values.shape
    padded = np.zeros((rows, -(-width // 64) * 64), np.float32)
    padded[:, :width] = values
    blocks = padded.reshape(rows, padded.shape[1] // 32, 32)
    finite = np.logical_and.reduce(np.isfinite(blocks), axis=-1)
    # frexp gives a fraction in [0.5, 1), hence 126 where the stored exponent of float32 is biased by 127.
    biased = np.frexp(np.abs(blocks).max(axis=-1))[1] + 126
    biased = np.where(blocks.any(axis=-1), biased, 0)
    shared = np.maximum(biased - largest_exponent, 0)
    with np.errstate(invalid="ignore"):
        scaled = np.clip(np.ldexp(blocks, 127 - shared[..., None]), -limit, limit)
    elements = np.where(finite[..., None], scaled, 0.0).reshape(padded.shape)[:, :width]
    return elements.astype(dtype), np.where(finite, shared, 255).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


# --- The limits of the device -----------------------------------------------------------------------------------------

_PARAMETERS = "aclnnMoeInitRoutingV3, parameters"
_BY_PRODUCT = "aclnnMoeInitRoutingV3, differences between products"
_GE = "GE operator MoeInitRoutingV3, tiling"
_A2_A3, _950 = frozenset({Product.A2, Product.A3}), frozenset({Product.ASCEND_950})
_DROP_PAD, _COUNTED = With("drop_pad_mode", 1), With("expert_tokens_num_flag", 1)
_TOKENS, _WIDTH = Place("x", 0), Place("x", 1)


def _wrong_smoothing(call: Call) -> str | None:
    """scale has a row of H for each expert of the active range, or one for all."""
    form = _Form.of(call)
    shared = call.input("scale").dim(0) == 1
    return shape("scale", 1 if shared else form.end - form.start, _WIDTH)(call)


def _wrong_expert_num(call: Call) -> str | None:
    """expert_num is at most 10240, with expert_tokens_num_type 2 at most 5120."""
    largest = 5120 if call.attributes["expert_tokens_num_type"] == 2 else 10240
    return attribute("expert_num", range(largest + 1))(call)


def _wrong_range(call: Call) -> str | None:
    """active_expert_range is [start, end] within 0 and expert_num; with drop_pad_mode 1 it is [0, expert_num]."""
    bounds, experts = call.attributes.get("active_expert_range"), call.attributes["expert_num"]
    if not bounds:
        return None
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] <= experts:
        return f"active_expert_range must be [start, end] within 0 and expert_num {experts}, got {list(bounds)}"
    if _DROP_PAD(call) and tuple(bounds) != (0, experts):
        return f"active_expert_range must be [0, {experts}] with drop_pad_mode 1, got {list(bounds)}"
    return None


def _wrong_active_num(call: Call) -> str | None:
    """active_num is -1 or 0 (no limit) or positive."""
    active = call.attributes["active_num"]
    return None if active >= -1 else f"active_num must be -1 or 0 (no limit) or positive, got {active}"


def _limited_rows(call: Call) -> str | None:
    """active_num does not limit: it is -1, 0 or N * K."""
    # "No limit" is fine: a launch passes N * K for it, which is known by then.
    active, assignments = call.attributes["active_num"], (Place("expert_idx", 0) * Place("expert_idx", 1))(call)
    if active <= 0 or assignments in (None, active):
        return None
    return f"active_num must be the number of assignments {assignments}, got {active}"


def _wrong_capacity(call: Call) -> str | None:
    """expert_capacity is from 1 to N."""
    capacity, tokens = call.attributes["expert_capacity"], _TOKENS(call)
    if capacity >= 1 and (tokens is None or capacity <= tokens):
        return None
    return f"expert_capacity must be from 1 to {tokens or 'the number of tokens'}, got {capacity}"


def _unproduced_scale(call: Call) -> str | None:
    """expanded_scale is produced with quant_mode 1, 2, 3 or, given a scale, -1 only."""
    if not call.has("expanded_scale") or _has_scale(call):
        return None
    mode = call.attributes["quant_mode"]
    return f"expanded_scale is produced with quant_mode 1, 2, 3 or, given a scale, -1, got quant_mode {mode}"


_NEEDED_BY_BODY = (
    attribute("expert_num", range(2**31)),
    attribute("quant_mode", (-1, *_QUANT_NAMES)),
    attribute("row_idx_type", tuple(_ROW_INDICES)),
    attribute("expert_tokens_num_type", tuple(_COUNTS)),
    attribute("drop_pad_mode", (0, 1)),
    given("scale", With("quant_mode", _STATIC)),
    given("offset", With("quant_mode", _STATIC)),
    when(_DROP_PAD, attribute("expert_capacity", range(1, 2**31))),
    _wrong_range,
)
_tiling, _ge = partial(rule, TILING, _PARAMETERS), partial(rule, TILING, _GE)
_on_a2_a3 = partial(rule, TILING, _PARAMETERS, products=_A2_A3)
_on_950 = partial(rule, TILING, _BY_PRODUCT, products=_950)
_CONSTRAINTS = (
    rule(
        INVALID,
        _PARAMETERS,
        "type",
        when(With("quant_mode", 0, 1), of_type(["x"], *_X_TYPES[:3])),
        when(With("quant_mode", 2, 3), of_type(["x"], *_X_TYPES[:2])),
    ),
    _tiling("rank", ranks({"x": 2, "expert_idx": 2}), agree("N", _TOKENS, Place("expert_idx", 0))),
    _tiling(
        "scale",
        given("scale", With("quant_mode", _STATIC)),
        absent("scale", With("quant_mode", -1, _STATIC, _DYNAMIC)),
        when(With("quant_mode", -1), shape("scale", _TOKENS)),
        when(With("quant_mode", _STATIC), shape("scale", 1)),
        when(With("quant_mode", _DYNAMIC), _wrong_smoothing),
    ),
    _tiling(
        "offset",
        given("offset", With("quant_mode", _STATIC)),
        absent("offset", With("quant_mode", _STATIC)),
        shape("offset", 1),
    ),
    _tiling("expert_num", _wrong_expert_num),
    _tiling("active_expert_range", _wrong_range),
    _tiling("active_num", _wrong_active_num),
    _on_950("active_num", _limited_rows),
    _ge("expert_capacity", when(_DROP_PAD, _wrong_capacity)),
    _ge(
        "drop_pad",
        when(_DROP_PAD, attribute("row_idx_type", 0)),
        when(_DROP_PAD, when(_COUNTED, attribute("expert_tokens_num_type", 1))),
    ),
    _on_a2_a3("drop_pad_mode", attribute("drop_pad_mode", (0, 1))),
    _on_950("drop_pad_mode", attribute("drop_pad_mode", 0)),
    _on_a2_a3("expert_tokens_num_type", attribute("expert_tokens_num_type", (0, 1, 2))),
    _on_950("expert_tokens_num_type", attribute("expert_tokens_num_type", (1, 2))),
    _on_a2_a3("expert_tokens_num_flag", attribute("expert_tokens_num_flag", (0, 1))),
    _on_950("expert_tokens_num_flag", attribute("expert_tokens_num_flag", 1)),
    rule(TILING, _BY_PRODUCT, "quant_mode", attribute("quant_mode", (-1, 0, 1)), products=_A2_A3),
    _on_950("quant_mode", attribute("quant_mode", (-1, 1, 2, 3))),
    _tiling("row_idx_type", attribute("row_idx_type", (0, 1))),
    rule(
        INVALID,
        _PARAMETERS,
        "unproduced_output",
        produced("expert_tokens_count_or_cumsum", _COUNTED),
        _unproduced_scale,
    ),
)

# --- The operator -----------------------------------------------------------------------------------------------------


def _attribute(name: str, description: str, default: int) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, description, default)


_EXAMPLE = """
import numpy as np
import onnxruntime
from onnxscript import FLOAT, opset18, script

import ascend_onnx
from ascend_onnx import op


@script()
def route(x: FLOAT["N", 64], scores: FLOAT["N", 4]):
    count = opset18.Constant(value_ints=[2])
    best_scores, experts = opset18.TopK(scores, count)
    expert_idx = opset18.Cast(experts, to=6)  # int32
    expanded_x, expanded_row_idx, tokens_per_expert = op.MoeInitRoutingV3(
        x, expert_idx,
        expert_num=4,
        expert_tokens_num_flag=1,
        expert_tokens_num_type=1,
    )
    return expanded_x, expanded_row_idx, tokens_per_expert


model = ascend_onnx.attach_functions(route.to_model_proto())
session = onnxruntime.InferenceSession(model.SerializeToString())
x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
scores = np.array([[9, 8, 0, 0], [0, 9, 0, 8], [9, 0, 0, 8]], np.float32)
expanded_x, expanded_row_idx, tokens_per_expert = session.run(None, {"x": x, "scores": scores})
assert tokens_per_expert.tolist() == [2, 2, 0, 2]
assert expanded_row_idx.tolist() == [0, 2, 3, 4, 1, 5]  # where each token went, for each of its experts
assert np.array_equal(expanded_x[expanded_row_idx], np.repeat(x, 2, axis=0))
"""

OPERATOR = Operator(
    name="MoeInitRoutingV3",
    description=(
        "Copies the tokens of a mixture of experts once per chosen expert, sorted stably by expert, and says where "
        "each went and how many every expert got. Only experts of the active range count; rows that hold no token "
        "are zero. Optionally quantises what it copies; a device rounds the dynamic int8 values half away from zero, "
        "so that single ones may differ by 1."
    ),
    source="GE operator MoeInitRoutingV3, aclnnMoeInitRoutingV3",
    inputs=(
        Input("x", _X_TYPES, "(N, H)", "Tokens."),
        Input("expert_idx", _INT32, "(N, K)", "Experts of each token."),
        Input(
            "scale",
            _FLOAT32,
            "(N), (1), (end - start, H) or (1, H)",
            "Copied along (quant_mode -1), or the factor of x: one (0), or per expert and column (1).",
            optional=True,
        ),
        Input("offset", _FLOAT32, "(1)", "Added before rounding, quant_mode 0.", optional=True),
    ),
    outputs=(
        Output(
            "expanded_x",
            (*_X_TYPES, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E4M3FN),
            "(N*K, H), (min(active_num, N*K), H) or (E, C, H)",
            "Tokens in the order of their experts.",
        ),
        Output(
            "expanded_row_idx",
            _INT32,
            "(N*K)",
            "Row of each assignment, -1 if it has none (row_idx_type 0), or assignment of each row (1).",
        ),
        Output(
            "expert_tokens_count_or_cumsum",
            (ir.DataType.INT64,),
            "(end - start) or (E, 2)",
            "Assignments per expert, before any are dropped.",
            optional=True,
        ),
        Output(
            "expanded_scale",
            (ir.DataType.FLOAT, ir.DataType.FLOAT8E8M0),
            "(rows) or (rows, blocks of 32 columns rounded up to even)",
            "Scale of each expanded row.",
            optional=True,
        ),
    ),
    attributes=(
        Attribute("expert_num", ir.AttributeType.INT, "Number of experts E.", required=True),
        _attribute("active_num", "Most rows of expanded_x; 0 or -1: no limit.", -1),
        _attribute("expert_capacity", "Rows per expert C, with drop_pad_mode 1.", -1),
        _attribute("drop_pad_mode", "0: all assignments in one list, 1: exactly C rows per expert.", 0),
        _attribute("expert_tokens_num_type", "0: running sum, 1: count, 2: (expert, count) of experts in use.", 0),
        _attribute("expert_tokens_num_flag", "Whether the counts are produced.", 0),
        _attribute("quant_mode", "-1: none, 0: static int8, 1: dynamic int8, 2 / 3: MXFP8 E5M2 / E4M3FN.", -1),
        Attribute("active_expert_range", ir.AttributeType.INTS, "[start, end); absent: all experts."),
        _attribute("row_idx_type", "0: row of each assignment, 1: assignment of each row.", 0),
    ),
    aclnn="aclnnMoeInitRoutingV3",
    infer=_infer,
    overload=_overload,
    body=_body,
    reference=MoeInitRoutingV3,
    constraints=_CONSTRAINTS,
    example=_EXAMPLE,
)
