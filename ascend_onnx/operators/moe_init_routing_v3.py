"""MoeInitRoutingV3: the tokens of a mixture of experts, copied and put in the order of their experts.

    expert_idx -> stable sort by expert -> expanded_row_idx
    x[token of the sorted assignment] [-> quantisation] -> expanded_x, expanded_scale
    assignments per expert -> expert_tokens_count_or_cumsum

Letters: N tokens, H hidden size, K experts per token, E experts, C = expert_capacity rows per expert. An assignment
is one of the N * K pairs of a token and one of its experts; it is routed if its expert lies in the active range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

_NULL, _INVALID, _TILING = 161001, 161002, 561002
_PARAMETERS = "aclnnMoeInitRoutingV3, parameters"
_BY_PRODUCT = "aclnnMoeInitRoutingV3, differences between products"
_GE = "GE operator MoeInitRoutingV3, tiling"
_A2_A3 = frozenset({Product.A2, Product.A3})
_950 = frozenset({Product.ASCEND_950})


def _infer(call: Call) -> Mapping[str, Tensor]:
    """Rows: (E, C, H) with drop and pad, else (R, H) with R = N*K or at most active_num of them."""
    attributes = call.attributes
    x, expert_idx = call.input("x"), call.input("expert_idx")
    assignments = _product(expert_idx.dim(0), expert_idx.dim(1))
    experts, capacity = attributes["expert_num"], attributes["expert_capacity"]
    mode = attributes["quant_mode"]
    if attributes["drop_pad_mode"] == 1:
        leading: tuple[Dim, ...] = (experts, capacity)
        rows: Dim = experts * capacity
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
    start, end = attributes.get("active_expert_range") or (0, attributes["expert_num"])
    return (end - start,)


def _product(left: Dim, right: Dim) -> Dim:
    """The product of two dimensions; symbolic where a factor is."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if 0 in (left, right):
        return 0
    if left is None or right is None:
        return None
    return (_symbol(left) * _symbol(right)).value


def _at_most(limit: int, dim: Dim) -> Dim:
    """`dim`, or `limit` where that is positive and smaller."""
    if limit <= 0 or dim is None:
        return dim
    return min(limit, dim) if isinstance(dim, int) else f"Min({limit}, {dim})"


def _symbol(dim: int | str) -> int | ir.SymbolicDim:
    return dim if isinstance(dim, int) else ir.SymbolicDim(dim)
