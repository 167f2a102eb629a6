"""RingAttentionUpdateV2: merges two partial attentions over disjoint keys, each with its softmax statistics.

    max = Max(prev_max, cur_max)
    prev_weight = prev_sum * Exp(prev_max - max), cur_weight likewise; sum = prev_weight + cur_weight
    attn_out = prev_attn_out * (prev_weight / sum) + cur_attn_out * (cur_weight / sum)

Letters: S and B the sequence length and batches of SBH; T tokens of all batches, N heads, D the head size, H = N * D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference.op_run import OpRun
from onnxscript import OpBuilder

from ascend_onnx import numerics
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
_FLOAT32 = (ir.DataType.FLOAT,)
_ATTENTIONS = ("prev_attn_out", "cur_attn_out")
_STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")
_LANES = 8
"""How many times the statistics of one row are stored; the copies are equal."""
_END = 2**63 - 1

# --- What a call means ------------------------------------------------------------------------------------------------


def _infer(call: Call) -> Mapping[str, Tensor]:
    return {
        "attn_out": Tensor(call.input("prev_attn_out").dtype, _common_shape(call, _ATTENTIONS)),
        "softmax_max": Tensor(ir.DataType.FLOAT, _common_shape(call, _STATISTICS)),
        "softmax_sum": Tensor(ir.DataType.FLOAT, _common_shape(call, _STATISTICS)),
    }


def _common_shape(call: Call, names: Sequence[str]) -> tuple[Dim, ...] | None:
    """The shape that the inputs `names` share, each dimension from the first of them that knows it."""
    shapes = [shape for name in names if (shape := call.input(name).shape) is not None]
    if not shapes:
        return None
    return tuple(next((dim for dim in dims if dim is not None), None) for dims in zip(*shapes, strict=False))


def _is_tnd(call: Call) -> bool:
    return bool(call.attributes["input_layout"] == "TND")


def _is_ragged(call: Call) -> bool:
    """Whether the statistics of TND tokens are stored batch by batch as [N, S_b, 8], under the shape (T, N, 8)."""
    return _is_tnd(call) and call.attributes["input_softmax_layout"] != "TND"


def _overload(call: Call) -> str:
    """Layouts and element types: "sbh_float16", "tnd_softmax_tnd_bfloat16", "tnd_softmax_sbh_float"."""
    layout = "sbh"
    if _is_tnd(call):
        layout = "tnd_softmax_sbh" if _is_ragged(call) else "tnd_softmax_tnd"
    dtypes = dict.fromkeys(call.input(name).dtype for name in _ATTENTIONS)
    parts = [layout, *("unknown" if dtype is None else dtype.name.lower() for dtype in dtypes)]
    parts += [] if call.output_count == len(call.operator.outputs) else [f"{call.output_count}_outputs"]
    return "_".join(parts + (["unusable"] if _unusable(call) else []))


def _unusable(call: Call) -> str | None:
    """Why there is no body for the call."""
    return _wrong_softmax_layout(call) or _missing_lengths(call) if _is_ragged(call) else None


# --- Body -------------------------------------------------------------------------------------------------------------


def _body(call: Call) -> Body:
    """The merge in float32; a sum of zero gives NaN, as on the device.

    Raises `InputError` for an unknown layout of the statistics, and where the prefix sums that theirs needs are absent.
    """
    if wrong := _unusable(call):
        raise InputError(f"{call.operator.name}: {wrong}")
    attention_type = call.input("prev_attn_out").dtype or ir.DataType.FLOAT

    def trace(
        op: OpBuilder,
        prev_attn_out: ir.Value,
        prev_softmax_max: ir.Value,
        prev_softmax_sum: ir.Value,
        cur_attn_out: ir.Value,
        cur_softmax_max: ir.Value,
        cur_softmax_sum: ir.Value,
        actual_seq_qlen: ir.Value | None,
    ) -> list[ir.Value]:
        softmax_max = op.Max(prev_softmax_max, cur_softmax_max)
        prev_weight = op.Mul(prev_softmax_sum, op.Exp(op.Sub(prev_softmax_max, softmax_max)))
        cur_weight = op.Mul(cur_softmax_sum, op.Exp(op.Sub(cur_softmax_max, softmax_max)))
        softmax_sum = op.Add(prev_weight, cur_weight)

        by_head, of_row = _layout(op, call, softmax_max, actual_seq_qlen)
        parts = [
            op.Mul(numerics.widen(op, by_head(attention)), of_row(op.Div(weight, softmax_sum)))
            for attention, weight in ((prev_attn_out, prev_weight), (cur_attn_out, cur_weight))
        ]
        attn_out = numerics.narrow(op, op.Add(*parts), attention_type)
        if not _is_tnd(call):
            attn_out = op.Reshape(attn_out, op.Shape(prev_attn_out), allowzero=1)
        return [attn_out, softmax_max, softmax_sum][: call.output_count]

    return trace


_Step = Callable[[ir.Value], ir.Value]


def _layout(op: OpBuilder, call: Call, softmax_max: ir.Value, lengths: ir.Value | None) -> tuple[_Step, _Step]:
    """Two functions: an attention seen as (..., N, D), and one lane of a statistic as its factor (..., N, 1)."""

    def first_lane(statistic: ir.Value) -> ir.Value:
        lane: ir.Value = op.Slice(statistic, [0], [1], [-1])
        return lane

    if not _is_tnd(call):
        heads = op.Shape(softmax_max, start=1, end=2)

        def split_heads(attention: ir.Value) -> ir.Value:
            head_size = op.Div(op.Shape(attention, start=2), op.Max(heads, [1]))
            shape = op.Concat(op.Shape(attention, end=2), heads, head_size, axis=0)
            by_head: ir.Value = op.Reshape(attention, shape, allowzero=1)
            return by_head

        return split_heads, lambda statistic: op.Transpose(first_lane(statistic), perm=[2, 0, 1, 3])
    if lengths is None or not _is_ragged(call):
        return lambda attention: attention, first_lane
    rows = _ragged_rows(op, lengths, op.Shape(softmax_max, start=0, end=1), op.Shape(softmax_max, start=1, end=2))
    return lambda attention: attention, lambda statistic: op.Gather(op.Reshape(first_lane(statistic), [-1]), rows)


def _ragged_rows(op: OpBuilder, bounds: ir.Value, tokens: ir.Value, heads: ir.Value) -> ir.Value:
    """Where the row of token t and head n lies, (T, N, 1), if batch after batch is stored as [N, S_b].

    `bounds` are prefix sums (B + 1) from 0 to T. With one head the order is that of the tokens whatever they say.
    """
    token = op.Range(0, op.Squeeze(tokens, [0]), 1)
    ends = op.Slice(bounds, [1], [_END], [0])
    ended = op.LessOrEqual(op.Unsqueeze(ends, [0]), op.Unsqueeze(token, [1]))
    batch = op.ReduceSum(op.Cast(ended, to=ir.DataType.INT64), [1], keepdims=0)
    last = op.Sub(op.Shape(bounds), 1)
    begin = op.Gather(bounds, op.Min(batch, last))
    length = op.Sub(op.Gather(bounds, op.Min(op.Add(batch, 1), last)), begin)
    first_row = op.Add(op.Mul(begin, heads), op.Sub(token, begin))
    head = op.Unsqueeze(op.Range(0, op.Squeeze(heads, [0]), 1), [1])
    rows: ir.Value = op.Add(op.Unsqueeze(first_row, [1, 2]), op.Mul(op.Unsqueeze(length, [1, 2]), head))
    return rows


# --- Reference --------------------------------------------------------------------------------------------------------


class RingAttentionUpdateV2(OpRun):
    """The operator in numpy, batch by batch; written independently of the body."""

    op_domain = DOMAIN

    def _run(
        self,
        prev_attn_out: _Array,
        prev_softmax_max: _Array,
        prev_softmax_sum: _Array,
        cur_attn_out: _Array,
        cur_softmax_max: _Array,
        cur_softmax_sum: _Array,
        actual_seq_qlen: _Array | None = None,
        *,
        input_layout: str = "SBH",
        input_softmax_layout: str = "",
    ) -> tuple[_Array, ...]:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            softmax_max = np.maximum(prev_softmax_max, cur_softmax_max)
            prev_part = prev_softmax_sum * np.exp(prev_softmax_max - softmax_max)
            cur_part = cur_softmax_sum * np.exp(cur_softmax_max - softmax_max)
            softmax_sum = prev_part + cur_part
            merged = np.zeros(prev_attn_out.shape, np.float32)
            for attention, part in ((prev_attn_out, prev_part), (cur_attn_out, cur_part)):
                factor = (part / softmax_sum)[..., 0]
                if input_layout == "SBH":
                    factor = np.moveaxis(factor, 2, 0)
                elif input_softmax_layout != "TND" and actual_seq_qlen is not None:
                    factor = _token_major(factor, actual_seq_qlen)
                head_size = attention.size // factor.size if factor.size else 0
                merged += attention.astype(np.float32) * np.repeat(factor, head_size, axis=-1).reshape(merged.shape)
            results = (merged.astype(prev_attn_out.dtype), softmax_max, softmax_sum)
        return results[: len(self.onnx_node.output)]


def _token_major(statistic: _Array, bounds: _Array) -> _Array:
    """A statistic (T, N) whose memory holds one [N, S_b] after the other, in the order of its shape."""
    tokens, heads = statistic.shape
    if heads == 1:
        return statistic
    memory = statistic.reshape(-1)
    pieces = [memory[b * heads : e * heads].reshape(heads, e - b).T for b, e in pairwise(bounds.tolist())]
    return np.concatenate([*pieces, np.zeros((0, heads), statistic.dtype)]).reshape(tokens, heads)


# --- The limits of the device -----------------------------------------------------------------------------------------

_SEED = "aclnnRingAttentionUpdateV2"
_GE = "GE operator RingAttentionUpdate, tiling"
_A2_A3 = frozenset({Product.A2, Product.A3})


def _wrong_softmax_layout(call: Call) -> str | None:
    layout = call.attributes["input_softmax_layout"]
    if layout in ("", "SBH", "TND"):
        return None
    return f"input_softmax_layout must be empty, SBH or TND, got {layout!r}"


def _missing_lengths(call: Call) -> str | None:
    if not _is_tnd(call) or call.has("actual_seq_qlen"):
        return None
    return "actual_seq_qlen, the prefix sums from 0 to T, must be given with input_layout TND, got none"


def _wrong_type(call: Call) -> str | None:
    previous, current = (call.input(name).dtype for name in _ATTENTIONS)
    if previous is None or current is None or previous == current:
        return None
    return f"cur_attn_out must have the type of prev_attn_out, {previous.name.lower()}, got {current.name.lower()}"


def _wrong_rank(call: Call) -> str | None:
    layout = call.attributes["input_layout"]
    ranks = dict.fromkeys(_ATTENTIONS, 3) | dict.fromkeys(_STATISTICS, 3 if _is_tnd(call) else 4)
    for name, rank in (ranks | {"actual_seq_qlen": 1}).items():
        if call.input(name).rank not in (None, rank):
            return f"{name} must have rank {rank} with input_layout {layout}, got {call.input(name).rank}"
    return None


def _empty_input(call: Call) -> str | None:
    for name in (*_ATTENTIONS, *_STATISTICS):
        shape = call.input(name).shape
        if shape is not None and 0 in shape:
            return f"{name} must not be empty, got shape {shape}"
    return None


def _wrong_lanes(call: Call) -> str | None:
    for name in _STATISTICS:
        lanes = call.input(name).dim(-1)
        if isinstance(lanes, int) and lanes != _LANES:
            return f"the last dimension of {name} must be {_LANES}, got {lanes}"
    return None


def _wrong_shape(call: Call) -> str | None:
    """The shapes of one kind agree, and the statistics are those of the attention's rows."""
    for names in (_ATTENTIONS, _STATISTICS):
        for name in names[1:]:
            for axis, (expected, got) in enumerate(_paired_dims(call, names[0], name)):
                if isinstance(expected, int) and isinstance(got, int) and expected != got:
                    return f"{name} must have {expected} in axis {axis}, like {names[0]}, got {got}"
    attention, statistic = call.input("prev_attn_out"), call.input("prev_softmax_max")
    for axis, same in {0: 0, 1: 1}.items() if _is_tnd(call) else {2: 0, 0: 1}.items():
        expected, got = attention.dim(same), statistic.dim(axis)
        if isinstance(expected, int) and isinstance(got, int) and expected != got:
            return f"prev_softmax_max must have {expected} in axis {axis}, like prev_attn_out in axis {same}, got {got}"
    return None


def _paired_dims(call: Call, first: str, second: str) -> list[tuple[Dim, Dim]]:
    return list(zip(call.input(first).shape or (), call.input(second).shape or (), strict=False))


def _undivided_heads(call: Call) -> str | None:
    size, heads = call.input("prev_attn_out").dim(2), call.input("prev_softmax_max").dim(1)
    if _is_tnd(call) or not (isinstance(size, int) and isinstance(heads, int) and heads) or size % heads == 0:
        return None
    return f"H (axis 2 of prev_attn_out) must be a multiple of the {heads} heads of prev_softmax_max, got {size}"


def _wrong_head_count(call: Call) -> str | None:
    heads = call.input("prev_attn_out").dim(1)
    if not _is_tnd(call) or not isinstance(heads, int) or heads <= 256:
        return None
    return f"N (axis 1 of prev_attn_out) must be at most 256 with input_layout TND, got {heads}"


def _wrong_head_size(call: Call) -> str | None:
    size = call.input("prev_attn_out").dim(2)
    if not _is_tnd(call) or not isinstance(size, int) or (size % 64 == 0 and size <= 768):
        return None
    return f"D (axis 2 of prev_attn_out) must be a multiple of 64 up to 768 with input_layout TND, got {size}"


_CONSTRAINTS = (
    Constraint("type", 161002, f"{_SEED}, curAttnOut", _wrong_type),
    Constraint("missing_input", 161001, f"{_SEED}, Constraints", _missing_lengths),
    Constraint("rank", 161002, f"{_SEED}, Parameters", _wrong_rank),
    Constraint("empty_input", 161002, f"{_SEED}, Return Value", _empty_input),
    Constraint("softmax_lanes", 161002, f"{_SEED}, Parameters", _wrong_lanes),
    Constraint("shapes_agree", 161002, f"{_SEED}, Parameters", _wrong_shape),
    Constraint("softmax_layout", 561002, f"{_SEED}, Return Value", _wrong_softmax_layout),
    Constraint("heads_divide", 561002, _GE, _undivided_heads),
    Constraint("heads", 561002, f"{_SEED}, Constraints", _wrong_head_count, _A2_A3),
    Constraint("head_dim", 561002, f"{_SEED}, Constraints", _wrong_head_size, _A2_A3),
)

# --- The operator -----------------------------------------------------------------------------------------------------

_ATTENTION_SHAPE = "(S, B, H) or (T, N, D)"
_STATISTIC_SHAPE = "(B, N, S, 8) or (T, N, 8)"

OPERATOR = Operator(
    name="RingAttentionUpdateV2",
    description="Merges two attention results over disjoint keys by their softmax statistics, as every step of ring "
    "attention does. The 8 lanes of a statistic are equal; the first one weighs the attention. All maths is float32, "
    "and a row whose sums are both zero gives NaN. With input_layout TND and input_softmax_layout empty or SBH the "
    "statistics are declared (T, N, 8) but stored batch after batch as [N, S_b, 8].",
    source=_SEED,
    aclnn="aclnnRingAttentionUpdateV2",
    inputs=(
        Input("prev_attn_out", _FLOATS, _ATTENTION_SHAPE, "The attention over the keys so far."),
        Input("prev_softmax_max", _FLOAT32, _STATISTIC_SHAPE, "Its row maxima."),
        Input("prev_softmax_sum", _FLOAT32, _STATISTIC_SHAPE, "Its row sums of exp(score - maximum)."),
        Input("cur_attn_out", _FLOATS, _ATTENTION_SHAPE, "The attention over the next keys."),
        Input("cur_softmax_max", _FLOAT32, _STATISTIC_SHAPE, "Its row maxima."),
        Input("cur_softmax_sum", _FLOAT32, _STATISTIC_SHAPE, "Its row sums of exp(score - maximum)."),
        Input(
            "actual_seq_qlen",
            (ir.DataType.INT64,),
            "(B + 1)",
            "Prefix sums of the batches' lengths, from 0 to T; required with input_layout TND.",
            optional=True,
        ),
    ),
    outputs=(
        Output("attn_out", _FLOATS, _ATTENTION_SHAPE, "The attention over both, in the type of prev_attn_out."),
        Output("softmax_max", _FLOAT32, _STATISTIC_SHAPE, "The row maxima over both."),
        Output("softmax_sum", _FLOAT32, _STATISTIC_SHAPE, "The row sums over both."),
    ),
    attributes=(
        Attribute("input_layout", ir.AttributeType.STRING, "Layout of the attentions.", "SBH", choices=("SBH", "TND")),
        Attribute(
            "input_softmax_layout",
            ir.AttributeType.STRING,
            "Order of the statistics under TND: TND as declared; empty or SBH batch after batch. SBH ignores it.",
            "",
        ),
    ),
    infer=_infer,
    overload=_overload,
    body=_body,
    reference=RingAttentionUpdateV2,
    constraints=_CONSTRAINTS,
)
