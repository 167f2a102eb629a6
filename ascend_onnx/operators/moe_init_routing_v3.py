"""MoeInitRoutingV3: the tokens of a mixture of experts, copied and put in the order of their experts.

    expert_idx -> stable sort by expert -> expanded_row_idx
    x[token of the sorted assignment] [-> quantisation] -> expanded_x, expanded_scale
    assignments per expert -> expert_tokens_count_or_cumsum

Letters: N tokens, H hidden size, K experts per token, E experts, C = expert_capacity rows per expert. An assignment
is one of the N * K pairs of a token and one of its experts; it is routed if its expert lies in the active range.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ascend_onnx.operator import Attribute, Call, Constraint, Dim, Input, Operator, Output, Product, Tensor
from ascend_onnx.operators.moe_init_routing_v3_body import body, overload
from ascend_onnx.operators.moe_init_routing_v3_reference import MoeInitRoutingV3

__all__ = ["OPERATOR"]

_INT32 = (ir.DataType.INT32,)
_INT64 = (ir.DataType.INT64,)
_FLOAT32 = (ir.DataType.FLOAT,)
_X_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.INT8)
_QUANTISED = {
    0: ir.DataType.INT8,
    1: ir.DataType.INT8,
    2: ir.DataType.FLOAT8E5M2,
    3: ir.DataType.FLOAT8E4M3FN,
}
"""The type of expanded_x by quant_mode."""

_INVALID, _TILING = 161002, 561002
_PARAMETERS = "aclnnMoeInitRoutingV3, parameters"
_BY_PRODUCT = "aclnnMoeInitRoutingV3, differences between products"
_GE = "GE operator MoeInitRoutingV3, tiling"
_A2_A3 = frozenset({Product.A2, Product.A3})
_950 = frozenset({Product.ASCEND_950})


def _infer(call: Call) -> Mapping[str, Tensor]:
    """Rows: (E, C, H) with drop and pad, else (R, H) with R = N*K or at most active_num of them."""
    attributes = call.attributes
    x = call.input("x")
    assignments = _assignments(call)
    experts, capacity = attributes["expert_num"], attributes["expert_capacity"]
    mode = attributes["quant_mode"]
    if attributes["drop_pad_mode"] == 1:
        leading: tuple[Dim, ...] = (experts, capacity if capacity > 0 else None)
        rows = _product(*leading)
    else:
        rows = _at_most(attributes["active_num"], assignments)
        leading = (rows,)
    width = x.dim(1)
    if mode in (2, 3):
        blocks = 2 * (-(-width // 64)) if isinstance(width, int) else None
        scale = Tensor(ir.DataType.FLOAT8E8M0, (rows, blocks))
    else:
        scale = Tensor(ir.DataType.FLOAT, (rows,) if _has_scale(call) else (0,))
    return {
        "expanded_x": Tensor(_QUANTISED.get(mode, x.dtype), (*leading, width)),
        "expanded_row_idx": Tensor(ir.DataType.INT32, (assignments,)),
        "expert_tokens_count_or_cumsum": Tensor(ir.DataType.INT64, _count_shape(call)),
        "expanded_scale": scale,
    }


def _has_scale(call: Call) -> bool:
    """Whether the configuration produces expanded_scale."""
    mode = call.attributes["quant_mode"]
    return mode in (1, 2, 3) or (mode == -1 and call.has("scale"))


def _count_shape(call: Call) -> tuple[Dim, ...]:
    attributes = call.attributes
    if not attributes["expert_tokens_num_flag"]:
        return (0,)
    if attributes["expert_tokens_num_type"] == 2:
        return (attributes["expert_num"], 2)
    start, end = _range(call)
    return (end - start,)


def _range(call: Call) -> tuple[int, int]:
    """The active experts; all of them where the attribute is absent."""
    start, end = call.attributes.get("active_expert_range") or (0, call.attributes["expert_num"])
    return start, end


def _product(left: Dim, right: Dim) -> Dim:
    """The product of two dimensions; symbolic where a factor is."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if 0 in (left, right):
        return 0
    if left is None or right is None:
        return None
    factor, symbol = (left, right) if isinstance(right, str) else (right, left)
    try:
        return (ir.SymbolicDim(str(symbol)) * (factor if isinstance(factor, int) else ir.SymbolicDim(factor))).value
    except ValueError:  # a name that is no expression, such as "batch size"
        return None


def _at_most(limit: int, dim: Dim) -> Dim:
    """`dim`, or `limit` where that is positive and smaller."""
    if limit <= 0 or dim is None:
        return dim
    return min(limit, dim) if isinstance(dim, int) else f"Min({limit}, {dim})"


def _assignments(call: Call) -> Dim:
    return _product(call.input("expert_idx").dim(0), call.input("expert_idx").dim(1))


def _only(name: str, values: tuple[int, ...], source: str, products: frozenset[Product]) -> Constraint:
    """The attribute `name` has one of `values`."""

    def broken(call: Call) -> str | None:
        given = call.attributes[name]
        return None if given in values else f"{name} must be {' or '.join(map(str, values))}, got {given}"

    return Constraint(name, _TILING, source, broken, products)


def _wrong_type(call: Call) -> str | None:
    dtype, mode = call.input("x").dtype, call.attributes["quant_mode"]
    if dtype == ir.DataType.INT8 and mode != -1:
        return f"x may be int8 with quant_mode -1 only, got quant_mode {mode}"
    if dtype == ir.DataType.FLOAT and mode in (2, 3):
        return f"x must be float16 or bfloat16 with quant_mode {mode}, got float"
    return None


def _wrong_rank(call: Call) -> str | None:
    for name in ("x", "expert_idx"):
        if call.input(name).rank not in (None, 2):
            return f"{name} must have rank 2, got {call.input(name).rank}"
    tokens, listed = call.input("x").dim(0), call.input("expert_idx").dim(0)
    if isinstance(tokens, int) and isinstance(listed, int) and tokens != listed:
        return f"x and expert_idx must have as many rows as each other, got {tokens} and {listed}"
    return None


def _wrong_scale(call: Call) -> str | None:
    mode, x = call.attributes["quant_mode"], call.input("x")
    if not call.has("scale"):
        return "scale must be given with quant_mode 0, got none" if mode == 0 else None
    if mode in (2, 3):
        return f"scale must be absent with quant_mode {mode}, got one"
    if mode == 1:
        start, end = _range(call)
        shared = call.input("scale").dim(0) == 1
        return _wrong_shape(call, "scale", (1 if shared else end - start, x.dim(1)))
    return _wrong_shape(call, "scale", (1,) if mode == 0 else (x.dim(0),))


def _wrong_offset(call: Call) -> str | None:
    mode = call.attributes["quant_mode"]
    if call.has("offset") != (mode == 0):
        return (
            "offset must be given with quant_mode 0, got none"
            if mode == 0
            else (f"offset must be absent with quant_mode {mode}, got one")
        )
    return _wrong_shape(call, "offset", (1,))


def _wrong_shape(call: Call, name: str, expected: tuple[Dim, ...]) -> str | None:
    given = call.input(name).shape
    if given is None:
        return None
    unequal = len(given) != len(expected) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(given, expected, strict=True)
    )
    return f"{name} must have the shape {expected}, got {given}" if unequal else None


def _wrong_expert_num(call: Call) -> str | None:
    experts = call.attributes["expert_num"]
    largest = 5120 if call.attributes["expert_tokens_num_type"] == 2 else 10240
    return None if 0 <= experts <= largest else f"expert_num must be from 0 to {largest}, got {experts}"


def _wrong_range(call: Call) -> str | None:
    given, experts = call.attributes.get("active_expert_range"), call.attributes["expert_num"]
    if not given:
        return None
    if len(given) != 2 or not 0 <= given[0] <= given[1] <= experts:
        return f"active_expert_range must be [start, end] within 0 and expert_num {experts}, got {list(given)}"
    if call.attributes["drop_pad_mode"] == 1 and tuple(given) != (0, experts):
        return f"active_expert_range must be [0, {experts}] with drop_pad_mode 1, got {list(given)}"
    return None


def _wrong_active_num(call: Call) -> str | None:
    given = call.attributes["active_num"]
    return None if given >= -1 else f"active_num must be -1 or 0 (no limit) or positive, got {given}"


def _limited_rows(call: Call) -> str | None:
    # "No limit" is fine: a launch passes N*K for it, which is known by then.
    given, assignments = call.attributes["active_num"], _assignments(call)
    if given > 0 and isinstance(assignments, int) and given != assignments:
        return f"active_num must be the number of assignments {assignments}, got {given}"
    return None


def _wrong_capacity(call: Call) -> str | None:
    given, tokens = call.attributes["expert_capacity"], call.input("x").dim(0)
    if call.attributes["drop_pad_mode"] != 1:
        return None
    if given < 1 or (isinstance(tokens, int) and given > tokens):
        largest = tokens if isinstance(tokens, int) else "the number of tokens"
        return f"expert_capacity must be from 1 to {largest} with drop_pad_mode 1, got {given}"
    return None


def _wrong_drop_pad(call: Call) -> str | None:
    attributes = call.attributes
    if attributes["drop_pad_mode"] != 1:
        return None
    if attributes["row_idx_type"] != 0:
        return f"row_idx_type must be 0 with drop_pad_mode 1, got {attributes['row_idx_type']}"
    if attributes["expert_tokens_num_flag"] and attributes["expert_tokens_num_type"] != 1:
        return f"expert_tokens_num_type must be 1 with drop_pad_mode 1, got {attributes['expert_tokens_num_type']}"
    return None


def _unproduced_output(call: Call) -> str | None:
    if call.has("expert_tokens_count_or_cumsum") and not call.attributes["expert_tokens_num_flag"]:
        return "expert_tokens_count_or_cumsum is produced with expert_tokens_num_flag 1 only, got 0"
    if call.has("expanded_scale") and not _has_scale(call):
        mode = call.attributes["quant_mode"]
        return f"expanded_scale is produced with quant_mode 1, 2, 3 or, given a scale, -1, got quant_mode {mode}"
    return None


def _attribute(name: str, description: str, default: int) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, description, default)


OPERATOR = Operator(
    name="MoeInitRoutingV3",
    description=(
        "Copies the tokens of a mixture of experts once per chosen expert, sorted stably by expert, and says where "
        "each went and how many every expert got. Only experts of the active range count; rows that hold no token "
        "are zero. Optionally quantises what it copies."
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
            _INT64,
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
    overload=overload,
    body=body,
    reference=MoeInitRoutingV3,
    constraints=(
        Constraint("type", _INVALID, _PARAMETERS, _wrong_type),
        Constraint("rank", _TILING, _PARAMETERS, _wrong_rank),
        Constraint("scale", _TILING, _PARAMETERS, _wrong_scale),
        Constraint("offset", _TILING, _PARAMETERS, _wrong_offset),
        Constraint("expert_num", _TILING, _PARAMETERS, _wrong_expert_num),
        Constraint("active_expert_range", _TILING, _PARAMETERS, _wrong_range),
        Constraint("active_num", _TILING, _PARAMETERS, _wrong_active_num),
        Constraint("active_num", _TILING, _BY_PRODUCT, _limited_rows, _950),
        Constraint("expert_capacity", _TILING, _GE, _wrong_capacity),
        Constraint("drop_pad", _TILING, _GE, _wrong_drop_pad),
        _only("drop_pad_mode", (0, 1), _PARAMETERS, _A2_A3),
        _only("drop_pad_mode", (0,), _BY_PRODUCT, _950),
        _only("expert_tokens_num_type", (0, 1, 2), _PARAMETERS, _A2_A3),
        _only("expert_tokens_num_type", (1, 2), _BY_PRODUCT, _950),
        _only("expert_tokens_num_flag", (0, 1), _PARAMETERS, _A2_A3),
        _only("expert_tokens_num_flag", (1,), _BY_PRODUCT, _950),
        _only("quant_mode", (-1, 0, 1), _BY_PRODUCT, _A2_A3),
        _only("quant_mode", (-1, 1, 2, 3), _BY_PRODUCT, _950),
        _only("row_idx_type", (0, 1), _PARAMETERS, frozenset(Product)),
        Constraint("unproduced_output", _INVALID, _PARAMETERS, _unproduced_output),
    ),
)
