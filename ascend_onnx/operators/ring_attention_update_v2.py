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
from ascend_onnx.limits import (
    INVALID,
    NULL,
    TILING,
    Place,
    With,
    agree,
    attribute,
    bounded,
    given,
    not_empty,
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
    Input,
    Operator,
    Output,
    Product,
    Tensor,
    merged,
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
    statistics = merged(call.input(name).shape for name in _STATISTICS)
    return {
        "attn_out": Tensor(call.input("prev_attn_out").dtype, merged(call.input(name).shape for name in _ATTENTIONS)),
        "softmax_max": Tensor(ir.DataType.FLOAT, statistics),
        "softmax_sum": Tensor(ir.DataType.FLOAT, statistics),
    }


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
    return "_".join(parts)


# --- Body -------------------------------------------------------------------------------------------------------------


def _body(call: Call) -> Body:
    """The merge in float32; a sum of zero gives NaN, as on the device.

    Raises `InputError` for an unknown layout of the statistics, and where the prefix sums that theirs needs are absent.
    """
    if _is_ragged(call):
        require(call, _SOFTMAX_LAYOUTS, given("actual_seq_qlen", _TND))
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


_TND, _SBH = With("input_layout", "TND"), With("input_layout", "SBH")
_SOFTMAX_LAYOUTS = attribute("input_softmax_layout", ("", "SBH", "TND"))
_HEADS = Place("prev_softmax_max", 1)


def _at(axis: int, names: Sequence[str]) -> list[Place]:
    return [Place(name, axis) for name in names]


def _undivided_heads(call: Call) -> str | None:
    """H is a multiple of N."""
    size, heads = Place("prev_attn_out", 2)(call), _HEADS(call)
    if size is None or not heads or size % heads == 0:
        return None
    return f"H (axis 2 of prev_attn_out) must be a multiple of the {heads} heads of prev_softmax_max, got {size}"


_parameters, _return_value = f"{_SEED}, Parameters", f"{_SEED}, Return Value"
_CONSTRAINTS = (
    rule(INVALID, f"{_SEED}, curAttnOut", "type", same_type(*_ATTENTIONS)),
    rule(NULL, f"{_SEED}, Constraints", "missing_input", given("actual_seq_qlen", _TND)),
    rule(
        INVALID,
        _parameters,
        "rank",
        ranks({**dict.fromkeys(_ATTENTIONS, 3), "actual_seq_qlen": 1}),
        when(_SBH, ranks(dict.fromkeys(_STATISTICS, 4))),
        when(_TND, ranks(dict.fromkeys(_STATISTICS, 3))),
    ),
    rule(INVALID, _return_value, "empty_input", not_empty(*_ATTENTIONS, *_STATISTICS)),
    rule(INVALID, _parameters, "softmax_lanes", size("the number of lanes", _LANES, *_at(-1, _STATISTICS))),
    rule(
        INVALID,
        _parameters,
        "shapes_agree",
        when(_SBH, agree("S", *_at(0, _ATTENTIONS), *_at(2, _STATISTICS))),
        when(_SBH, agree("B", *_at(1, _ATTENTIONS), *_at(0, _STATISTICS))),
        when(_SBH, agree("N", *_at(1, _STATISTICS))),
        when(_TND, agree("T", *_at(0, _ATTENTIONS), *_at(0, _STATISTICS))),
        when(_TND, agree("N", *_at(1, _ATTENTIONS), *_at(1, _STATISTICS))),
        agree("H or D", *_at(2, _ATTENTIONS)),
    ),
    rule(TILING, _return_value, "softmax_layout", _SOFTMAX_LAYOUTS),
    rule(TILING, _GE, "heads_divide", when(_SBH, _undivided_heads)),
    rule(
        TILING,
        f"{_SEED}, Constraints",
        "heads",
        when(_TND, size("N", range(257), *_at(1, _ATTENTIONS))),
        products=_A2_A3,
    ),
    bounded(
        TILING,
        f"{_SEED}, Constraints",
        "head_dim",
        "head_dim",
        "D",
        range(64, 769, 64),
        *_at(2, _ATTENTIONS),
        condition=_TND,
        products=_A2_A3,
    ),
)

# --- The operator -----------------------------------------------------------------------------------------------------

_ATTENTION_SHAPE = "(S, B, H) or (T, N, D)"
_STATISTIC_SHAPE = "(B, N, S, 8) or (T, N, 8)"

_EXAMPLE = """
import numpy as np
import onnxruntime
from onnxscript import FLOAT, script

import ascend_onnx
from ascend_onnx import op


@script(opset_version=18)
def merge(
    prev_out: FLOAT["S", "B", 256],
    prev_max: FLOAT["B", 2, "S", 8],
    prev_sum: FLOAT["B", 2, "S", 8],
    cur_out: FLOAT["S", "B", 256],
    cur_max: FLOAT["B", 2, "S", 8],
    cur_sum: FLOAT["B", 2, "S", 8],
):
    attn_out, softmax_max, softmax_sum = op.RingAttentionUpdateV2(
        prev_out, prev_max, prev_sum, cur_out, cur_max, cur_sum, input_layout="SBH"
    )
    return attn_out, softmax_max, softmax_sum


model = ascend_onnx.attach_functions(merge.to_model_proto())
session = onnxruntime.InferenceSession(model.SerializeToString())
feeds = {
    value.name: np.ones([{"S": 5, "B": 1}.get(dim, dim) for dim in value.shape], np.float32)
    for value in session.get_inputs()
}
feeds["cur_out"] *= 3  # the attention over the new keys, which weigh as much as those so far
attn_out, softmax_max, softmax_sum = session.run(None, feeds)
assert np.all(attn_out == 2)
assert np.all(softmax_sum == 2)
"""

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
    example=_EXAMPLE,
)
