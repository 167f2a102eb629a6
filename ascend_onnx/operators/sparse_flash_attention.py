"""SparseFlashAttention: latent attention in which every query token attends to the keys that a list selects.

    sparse_indices -> positions < limit -> rows of key, key_rope, value
    softmax(scale_value * (query . key + query_rope . key_rope)) . value -> attention_out

Letters: B batches; S1, T1 query tokens per batch and in all; S2, T2 the same of the keys; N1 and N2 query and key
heads, G = N1 / N2; D and Dr the head sizes without and with rotary embedding; K entries of a list.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ascend_onnx.operator import Attribute, Call, Constraint, Dim, Input, Operator, Output, Product, Tensor
from ascend_onnx.operators.sparse_flash_attention_body import body, overload
from ascend_onnx.operators.sparse_flash_attention_reference import SparseFlashAttention

__all__ = ["OPERATOR"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_INT32 = (ir.DataType.INT32,)
_FLOAT32 = (ir.DataType.FLOAT,)
_FLOAT_INPUTS = ("query", "key", "value", "query_rope", "key_rope")
_UNLIMITED = 2**63 - 1

_NULL, _INVALID, _TILING = 161001, 161002, 561002
_DOCUMENT = "aclnnSparseFlashAttention"


def _infer(call: Call) -> Mapping[str, Tensor]:
    """attention_out is query with value's width; the statistics are (B, N2, S1, G) or (N2, T1, G), or (0) unasked."""
    query, value, kv_heads = call.input("query"), call.input("value"), call.input("key").dim(-2)
    width = query.dim(-1) if value.dim(-1) is None else value.dim(-1)
    statistics: tuple[Dim, ...] | None = None
    if not call.attributes["return_softmax_lse"]:
        statistics = (0,)
    elif query.shape is not None:
        statistics = (*query.shape[:-3], kv_heads, query.dim(-3), _group(query.dim(-2), kv_heads))
    return {
        "attention_out": Tensor(query.dtype, None if query.shape is None else (*query.shape[:-1], width)),
        "softmax_max": Tensor(ir.DataType.FLOAT, statistics),
        "softmax_sum": Tensor(ir.DataType.FLOAT, statistics),
    }


def _group(heads: Dim, kv_heads: Dim) -> Dim:
    """Query heads per key head, where that can be said."""
    if kv_heads == 1:
        return heads
    return heads // kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads else None


def _wrong_type(call: Call) -> str | None:
    for name in _FLOAT_INPUTS:
        dtype, expected = call.input(name).dtype, call.input("query").dtype
        if dtype == ir.DataType.FLOAT:
            return f"{name} must be float16 or bfloat16, got float"
        if dtype is not None and expected is not None and dtype != expected:
            return f"{name} must have the type of query, {expected.name.lower()}, got {dtype.name.lower()}"
    return None


def _missing_input(call: Call) -> str | None:
    layout_query, layout_kv = call.attributes["layout_query"], call.attributes["layout_kv"]
    needed = {
        "block_table": (layout_kv == "PA_BSND", "layout_kv PA_BSND"),
        "actual_seq_lengths_query": (layout_query == "TND", "layout_query TND"),
        "actual_seq_lengths_kv": (layout_kv in ("TND", "PA_BSND"), f"layout_kv {layout_kv}"),
        "query_rope": (True, "attention_mode 2"),
        "key_rope": (True, "attention_mode 2"),
    }
    for name, (is_needed, reason) in needed.items():
        if is_needed and not call.has(name):
            return f"{name} must be given with {reason}, got none"
    return None


def _stray_block_table(call: Call) -> str | None:
    layout = call.attributes["layout_kv"]
    if call.has("block_table") and layout != "PA_BSND":
        return f"block_table must be given with layout_kv PA_BSND only, got layout_kv {layout}"
    return None


def _wrong_layouts(call: Call) -> str | None:
    query, kv = call.attributes["layout_query"], call.attributes["layout_kv"]
    return None if kv in (query, "PA_BSND") else f"layout_kv must be {query}, like layout_query, or PA_BSND, got {kv}"


def _wrong_sparse_block(call: Call) -> str | None:
    size = call.attributes["sparse_block_size"]
    allowed = tuple(2**power for power in range(8))
    return None if size in allowed else f"sparse_block_size must be a power of two from 1 to 128, got {size}"


def _wrong_sparse_block_950(call: Call) -> str | None:
    size = call.attributes["sparse_block_size"]
    return None if size == 1 else f"sparse_block_size must be 1, got {size}"


def _wrong_page(call: Call) -> str | None:
    size, sparse = call.input("key").dim(1), call.attributes["sparse_block_size"]
    if call.attributes["layout_kv"] != "PA_BSND" or not isinstance(size, int):
        return None
    if size % 16 or not 16 <= size <= 1024:
        return f"the block size of key must be a multiple of 16 up to 1024, got {size}"
    if sparse > 0 and size % sparse:
        return f"the block size of key must be divisible by sparse_block_size {sparse}, got {size}"
    return None


def _wrong_rank(call: Call) -> str | None:
    query, kv = call.attributes["layout_query"], call.attributes["layout_kv"]
    ranks = {
        **dict.fromkeys(
            ("query", "query_rope", "sparse_indices"), (3 if query == "TND" else 4, f"layout_query {query}")
        ),
        **dict.fromkeys(("key", "value", "key_rope"), (3 if kv == "TND" else 4, f"layout_kv {kv}")),
        "block_table": (2, "layout_kv PA_BSND"),
        "actual_seq_lengths_query": (1, "every layout"),
        "actual_seq_lengths_kv": (1, "every layout"),
    }
    for name, (rank, reason) in ranks.items():
        if call.input(name).rank not in (None, rank):
            return f"{name} must have rank {rank} with {reason}, got {call.input(name).rank}"
    return None


def _unequal_shapes(call: Call) -> str | None:
    """Tensors of one layout that differ in more than their width."""
    for first, *others in (("query", "query_rope"), ("key", "value", "key_rope")):
        for other in others:
            expected, given = call.input(first).shape, call.input(other).shape
            if expected is not None and given is not None and _unequal(expected[:-1], given[:-1]):
                return f"{other} must have the shape of {first} but for the width, {expected[:-1]}, got {given[:-1]}"
    query, lists = call.input("query").shape, call.input("sparse_indices").shape
    if query is not None and lists is not None and _unequal(query[:-2], lists[:-2]):
        return f"sparse_indices must have a list for each query token, {query[:-2]}, got {lists[:-2]}"
    return None


def _unequal(left: tuple[Dim, ...], right: tuple[Dim, ...]) -> bool:
    """Whether two shapes are known to differ."""
    return len(left) != len(right) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(left, right, strict=True)
    )


def _wrong_head_dim(call: Call) -> str | None:
    widths = dict.fromkeys(("query", "key", "value"), 512) | dict.fromkeys(("query_rope", "key_rope"), 64)
    for name, width in widths.items():
        given = call.input(name).dim(-1)
        if isinstance(given, int) and given != width:
            return f"the last dimension of {name} must be {width}, got {given}"
    return None


def _wrong_kv_heads(call: Call) -> str | None:
    for name in ("key", "value", "key_rope"):
        heads = call.input(name).dim(-2)
        if isinstance(heads, int) and heads != 1:
            return f"{name} must have 1 head, got {heads}"
    return None


def _wrong_heads(call: Call) -> str | None:
    heads = call.input("query").dim(-2)
    if isinstance(heads, int) and not (1 <= heads <= 64 or heads == 128):
        return f"query must have 1 to 64 or 128 heads, got {heads}"
    return None


def _empty_input(call: Call) -> str | None:
    for name, tensor in call.inputs.items():
        if tensor.shape is not None and 0 in tensor.shape:
            return f"{name} must not be empty, got shape {tensor.shape}"
    return None


def _statistics_with_pages(call: Call) -> str | None:
    if call.attributes["return_softmax_lse"] and call.attributes["layout_kv"] == "PA_BSND":
        return "return_softmax_lse must be 0 with layout_kv PA_BSND, got 1"
    return None


def _unproduced_output(call: Call) -> str | None:
    for name in ("softmax_max", "softmax_sum"):
        if call.has(name) and not call.attributes["return_softmax_lse"]:
            return f"{name} is produced with return_softmax_lse 1 only, got 0"
    return None


OPERATOR = Operator(
    name="SparseFlashAttention",
    description=(
        "Attention of every query token to the keys that its list selects, in the latent space of MLA. A list holds "
        "blocks of sparse_block_size keys and ends at its first -1; what lies beyond the batch's keys, or with "
        "sparse_mode 3 in the token's future, does not count. A token without any key gives zeros."
    ),
    source="GE operator SparseFlashAttention, aclnnSparseFlashAttention",
    inputs=(
        Input("query", _FLOATS, "(B, S1, N1, D) or (T1, N1, D)", "Queries in the latent space."),
        Input("key", _FLOATS, "(B, S2, N2, D), (T2, N2, D) or (block_num, block_size, N2, D)", "Latent keys."),
        Input("value", _FLOATS, "like key", "Values; devices may read key instead, so feed the same tensor."),
        Input("sparse_indices", _INT32, "(B, S1, N2, K) or (T1, N2, K)", "Blocks of keys per token, -1 behind them."),
        Input("block_table", _INT32, "(B, blocks)", "Pages of each batch, for PA_BSND.", optional=True),
        Input(
            "actual_seq_lengths_query",
            _INT32,
            "(B) or (1)",
            "Query tokens of each batch; inclusive prefix sums in TND. Absent: all.",
            optional=True,
        ),
        Input(
            "actual_seq_lengths_kv",
            _INT32,
            "(B) or (1)",
            "Keys of each batch; inclusive prefix sums in TND. Absent: all.",
            optional=True,
        ),
        Input("query_rope", _FLOATS, "(B, S1, N1, Dr) or (T1, N1, Dr)", "Rotary part of the queries.", optional=True),
        Input("key_rope", _FLOATS, "like key, with width Dr", "Rotary part of the keys.", optional=True),
    ),
    outputs=(
        Output("attention_out", _FLOATS, "like query", "The attention, in query's type."),
        Output(
            "softmax_max",
            _FLOAT32,
            "(B, N2, S1, N1/N2) or (N2, T1, N1/N2)",
            "Largest scaled score of each row; 0 where a row has no key.",
            optional=True,
        ),
        Output(
            "softmax_sum",
            _FLOAT32,
            "like softmax_max",
            "Sum of exp(score - softmax_max); 0 where a row has no key.",
            optional=True,
        ),
    ),
    attributes=(
        Attribute("scale_value", ir.AttributeType.FLOAT, "Factor of the scores.", required=True),
        Attribute("sparse_block_size", ir.AttributeType.INT, "Keys per entry of a list.", 1),
        Attribute("layout_query", ir.AttributeType.STRING, "Layout of query.", "BSND", choices=("BSND", "TND")),
        Attribute("layout_kv", ir.AttributeType.STRING, "Layout of key.", "BSND", choices=("BSND", "TND", "PA_BSND")),
        Attribute(
            "sparse_mode", ir.AttributeType.INT, "0: all keys, 3: causal from the right bottom.", 3, choices=(0, 3)
        ),
        Attribute(
            "pre_tokens", ir.AttributeType.INT, "Only the default is supported.", _UNLIMITED, choices=(_UNLIMITED,)
        ),
        Attribute(
            "next_tokens", ir.AttributeType.INT, "Only the default is supported.", _UNLIMITED, choices=(_UNLIMITED,)
        ),
        Attribute("attention_mode", ir.AttributeType.INT, "2: MLA with absorbed projections.", 2, choices=(2,)),
        Attribute("return_softmax_lse", ir.AttributeType.INT, "Whether statistics are produced.", 0, choices=(0, 1)),
    ),
    aclnn="aclnnSparseFlashAttention",
    infer=_infer,
    overload=overload,
    body=body,
    reference=SparseFlashAttention,
    constraints=(
        Constraint("type", _INVALID, f"{_DOCUMENT}, parameters", _wrong_type),
        Constraint("missing_input", _NULL, f"{_DOCUMENT}, parameters", _missing_input),
        Constraint("layouts", _TILING, "GE operator SparseFlashAttention, tiling", _wrong_layouts),
        Constraint("block_table", _TILING, "GE operator SparseFlashAttention, tiling", _stray_block_table),
        Constraint("sparse_block_size", _INVALID, f"{_DOCUMENT}, constraints", _wrong_sparse_block),
        Constraint(
            "sparse_block_size_950",
            _INVALID,
            f"{_DOCUMENT}, constraints",
            _wrong_sparse_block_950,
            frozenset({Product.ASCEND_950}),
        ),
        Constraint("block_size", _TILING, f"{_DOCUMENT}, constraints", _wrong_page),
        Constraint("rank", _TILING, f"{_DOCUMENT}, parameters", _wrong_rank),
        Constraint("shapes_agree", _TILING, f"{_DOCUMENT}, parameters", _unequal_shapes),
        Constraint("head_dim", _TILING, f"{_DOCUMENT}, constraints", _wrong_head_dim),
        Constraint("kv_heads", _TILING, "GE operator SparseFlashAttention, tiling", _wrong_kv_heads),
        Constraint("heads", _TILING, f"{_DOCUMENT}, constraints", _wrong_heads),
        Constraint("empty_input", _INVALID, f"{_DOCUMENT}, parameters", _empty_input),
        Constraint("return_softmax_lse_pages", _INVALID, f"{_DOCUMENT}, parameters", _statistics_with_pages),
        Constraint("unproduced_output", _INVALID, f"{_DOCUMENT}, parameters", _unproduced_output),
    ),
)
