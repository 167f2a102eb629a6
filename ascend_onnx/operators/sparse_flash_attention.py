"""SparseFlashAttention: latent attention in which every query token attends to the keys that a list selects.

    sparse_indices -> positions < limit -> rows of key, key_rope, value
    softmax(scale_value * (query . key + query_rope . key_rope)) . value -> attention_out

Letters: B batches; S1, T1 query tokens per batch and in all; S2, T2 the same of the keys; N1 and N2 query and key
heads, G = N1 / N2; D and Dr the head sizes without and with rotary embedding; K entries of a list, J positions that
they cover; C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
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
    absent,
    agree,
    attribute,
    bounded,
    given,
    not_empty,
    of_type,
    produced,
    ranks,
    require,
    rule,
    same_type,
    size,
    when,
)
from ascend_onnx.operator import DOMAIN, Attribute, Body, Call, Dim, Input, Operator, Output, Product, Tensor, product

__all__ = ["OPERATOR"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_INT32 = (ir.DataType.INT32,)
_FLOAT32 = (ir.DataType.FLOAT,)
_FLOAT_INPUTS = ("query", "key", "value", "query_rope", "key_rope")
_UNLIMITED = 2**63 - 1
_WITHOUT_LOOP = 32
"""The most query tokens that are served at once, where their number is known."""
_CHUNK = 8
"""Query tokens per turn of the loop. More are no faster, and every one keeps K keys and values in memory."""
_NEVER = 2**62
"""A key position beyond every limit; block offsets may still be added to it in int64."""

# --- What a call means ------------------------------------------------------------------------------------------------


def _overload(call: Call) -> str:
    """Layouts, mask and block size, then what is present: "bsnd_pa_bsnd_causal_block1_rope_lengths_kv_float16_once"."""
    attributes = call.attributes
    present = {
        "rope": call.has("query_rope") and call.has("key_rope"),
        "lengths_q": call.has("actual_seq_lengths_query"),
        "lengths_kv": call.has("actual_seq_lengths_kv"),
        f"{'softmax' if attributes['return_softmax_lse'] else 'empty'}{call.output_count}": call.output_count > 1,
    }
    return "_".join(
        (
            attributes["layout_query"].lower(),
            attributes["layout_kv"].lower(),
            "causal" if attributes["sparse_mode"] == 3 else "full",
            f"block{attributes['sparse_block_size']}",
            *(word for word, is_present in present.items() if is_present),
            *_types(call),
            "once" if _fits_one_chunk(call) else "loop",
        )
    )


def _types(call: Call) -> list[str]:
    """The type of the float inputs, or the type of each where they differ."""
    dtypes = [call.input(name).dtype for name in _FLOAT_INPUTS if call.has(name)]
    names = ["unknown" if dtype is None else dtype.name.lower() for dtype in dtypes]
    return names if len(set(names)) > 1 else names[:1]


def _fits_one_chunk(call: Call) -> bool:
    """Whether the query tokens are known to be few enough to do without a loop."""
    tokens = product(*(call.input("query").shape or (None,) * 3)[:-2])
    return isinstance(tokens, int) and tokens <= _WITHOUT_LOOP


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


# --- Body -------------------------------------------------------------------------------------------------------------


def _body(call: Call) -> Body:
    """The attention over chunks of a few query tokens; each chunk gathers the keys of its own lists only.

    Query tokens are numbered through all batches, and so are the rows of the key tensors: one gather serves every
    layout, and a token needs to know no more than its batch and its place in it.
    """
    attributes = call.attributes
    require(call, given("block_table", _PAGED))
    outputs = call.output_count
    dtype = call.input("query").dtype or ir.DataType.FLOAT
    statistics = outputs > 1 and bool(attributes["return_softmax_lse"])

    def trace(
        op: OpBuilder,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        sparse_indices: ir.Value,
        block_table: ir.Value | None,
        actual_seq_lengths_query: ir.Value | None,
        actual_seq_lengths_kv: ir.Value | None,
        query_rope: ir.Value | None,
        key_rope: ir.Value | None,
    ) -> Sequence[ir.Value]:
        queries = _Queries(op, attributes["layout_query"], query, actual_seq_lengths_query)
        keys = _Keys(op, attributes["layout_kv"], key, actual_seq_lengths_kv, block_table)
        lists = queries.rows(op, sparse_indices)
        list_shape = op.Concat(keys.heads, numerics.dim(op, sparse_indices, -1), axis=0)
        list_end = op.Mul(numerics.dim(op, sparse_indices, -1), keys.any)
        group = op.Div(numerics.dim(op, query, -2), op.Max(keys.heads, 1))
        pairs = [
            (queries.rows(op, q), op.Concat(keys.heads, group, numerics.dim(op, q, -1), axis=0), keys.rows(op, k))
            for q, k in ((query, key), (query_rope, key_rope))
            if q is not None and k is not None
        ]
        value_rows = keys.rows(op, value)
        scale = numerics.attribute(op, "scale_value")

        def attend(op: OpBuilder, token: ir.Value) -> list[ir.Value]:
            """attention_out (C, N2, G, D) of the C tokens numbered `token`, and their statistics (C, N2, G)."""
            batch, place, length = queries.place(op, token)
            begin, limit = keys.span(op, batch)
            if attributes["sparse_mode"] == 3:
                limit = op.Add(op.Sub(limit, length), op.Add(place, 1))
            limit = op.Where(op.Less(place, length), limit, 0)
            entries = _int64(op, op.Slice(_gather(op, lists, token, list_shape), [0], list_end, [-1]))
            positions = _positions(op, entries, attributes["sparse_block_size"])
            valid = op.Less(positions, op.Unsqueeze(limit, [1, 2]))
            rows = keys.row_numbers(op, begin, op.Where(valid, positions, 0), valid)
            score = None
            for query_rows, shape, key_rows in pairs:
                scaled = op.Mul(numerics.widen(op, _gather(op, query_rows, token, shape)), scale)
                part = _scores(op, scaled, numerics.widen(op, op.Gather(key_rows, rows)))
                score = part if score is None else op.Add(score, part)
            score = op.Where(op.Unsqueeze(valid, [2]), score, -np.inf)
            peak = numerics.reduce(op, "ReduceMax", score)
            nothing = op.Equal(peak, -np.inf)
            peak = op.Where(nothing, 0.0, peak)
            weight = op.Exp(op.Sub(score, peak))
            total = numerics.reduce(op, "ReduceSum", weight)
            mixed = op.MatMul(weight, numerics.widen(op, op.Gather(value_rows, rows)))
            out = op.Where(nothing, 0.0, op.Div(mixed, total))
            out = numerics.narrow(op, out, dtype)
            return [out, op.Squeeze(peak, [-1]), op.Squeeze(total, [-1])] if statistics else [out]

        if _fits_one_chunk(call):
            results = attend(op, op.Range(0, op.Squeeze(queries.count, [0]), 1))
        else:
            results = _in_chunks(op, attend, queries.count, [dtype, *[ir.DataType.FLOAT] * 2 * statistics])
        out_shape = op.Concat(op.Shape(query, end=-1), numerics.dim(op, value, -1), axis=0)
        out = op.Reshape(results[0], out_shape, allowzero=1)
        if not statistics:
            return [out, *(op.ConstantOfShape([0]) for _ in range(outputs - 1))]
        return [out, *(queries.statistic(op, statistic) for statistic in results[1:outputs])]

    return trace


class _Queries:
    """The query tokens, (count, N1 * D) whatever the layout.

    `lengths`: of each batch in BSND, prefix sums in TND; absent means all tokens, a single one counts for every batch.
    """

    def __init__(self, op: OpBuilder, layout: str, query: ir.Value, lengths: ir.Value | None) -> None:
        self._batched = layout == "BSND"
        self._leading_shape = op.Shape(query, end=2 if self._batched else 1)
        self._per_batch = numerics.dim(op, query, 1 if self._batched else 0)
        self._lengths = self._per_batch if lengths is None else _int64(op, lengths)
        self.count = op.Mul(numerics.dim(op, query, 0), self._per_batch) if self._batched else self._per_batch

    def rows(self, op: OpBuilder, tensor: ir.Value) -> ir.Value:
        """A tensor of this layout as one row per token."""
        flat: ir.Value = op.Flatten(tensor, axis=2 if self._batched else 1)
        return flat

    def place(self, op: OpBuilder, token: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The batch of each token, its place in the batch, and the number of valid tokens of that batch."""
        if self._batched:
            size = op.Max(self._per_batch, 1)  # no token divides by it where it is 0, but the division would fail
            batch = op.Div(token, size)
            return batch, op.Sub(token, op.Mul(batch, size)), _of_batch(op, self._lengths, batch)
        ended = op.LessOrEqual(op.Unsqueeze(self._lengths, [0]), op.Unsqueeze(token, [1]))
        batch = op.ReduceSum(op.Cast(ended, to=ir.DataType.INT64), [1], keepdims=0)
        batch = op.Min(batch, op.Sub(op.Shape(self._lengths), 1))
        begin, length = _segment(op, self._lengths, batch)
        return batch, op.Sub(token, begin), length

    def statistic(self, op: OpBuilder, statistic: ir.Value) -> ir.Value:
        """A statistic (count, N2, G) in the shape of the output: (B, N2, S1, G) or (N2, T1, G)."""
        shaped = op.Reshape(
            statistic, op.Concat(self._leading_shape, op.Shape(statistic, start=1), axis=0), allowzero=1
        )
        by_head: ir.Value = op.Transpose(shaped, perm=[0, 2, 1, 3] if self._batched else [1, 0, 2])
        return by_head


class _Keys:
    """The rows of the key tensors, (tokens * N2, D) whatever the layout.

    `lengths`: of each batch in BSND and PA_BSND, prefix sums in TND; absent means all, one counts for every batch.
    """

    def __init__(
        self, op: OpBuilder, layout: str, key: ir.Value, lengths: ir.Value | None, block_table: ir.Value | None
    ) -> None:
        self._packed = layout == "TND"
        self._table = _int64(op, block_table) if layout == "PA_BSND" and block_table is not None else None
        self._block = numerics.dim(op, key, 0 if self._packed else 1)
        self.heads = numerics.dim(op, key, -2)
        capacity, stored = self._block, _size(op, key)
        if self._table is not None:
            capacity = op.Mul(capacity, numerics.dim(op, self._table, 1))
            stored = op.Min(stored, _size(op, self._table))
        self._lengths = capacity if lengths is None else _int64(op, lengths)
        self.any: ir.Value = op.Min(stored, 1)
        """1, or 0 where no key is stored at all, so that there is no row to point an unused entry at."""

    def rows(self, op: OpBuilder, tensor: ir.Value) -> ir.Value:
        """A tensor of this layout as one row per key token and head."""
        flat: ir.Value = op.Flatten(tensor, axis=-1)
        return flat

    def span(self, op: OpBuilder, batch: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first row of each batch, its first block number with a block table, and the number of its tokens."""
        if self._packed:
            return _segment(op, self._lengths, batch)
        stride = self._block if self._table is None else numerics.dim(op, self._table, 1)
        return op.Mul(batch, stride), _of_batch(op, self._lengths, batch)

    def row_numbers(self, op: OpBuilder, begin: ir.Value, positions: ir.Value, valid: ir.Value) -> ir.Value:
        """Row numbers (C, N2, J) of the key positions (C, N2, J) behind `begin` (C).

        What is not valid repeats a valid row of the same list, so that rows which nobody selected, perhaps never
        written, are not read; where a list has none it is row 0, whose products are then discarded.
        """
        begin = op.Unsqueeze(begin, [1, 2])
        if self._table is None:
            token = op.Add(begin, positions)
        else:
            size = op.Max(self._block, 1)
            slot = op.Div(positions, size)
            page = op.Gather(op.Reshape(self._table, [-1]), op.Add(begin, slot))
            token = op.Add(op.Mul(page, size), op.Sub(positions, op.Mul(slot, size)))
        token = op.Where(valid, token, -1)
        token = op.Where(valid, token, op.Max(numerics.reduce(op, "ReduceMax", token), 0))
        head = op.Unsqueeze(op.Range(0, op.Squeeze(self.heads, [0]), 1), [1])
        rows: ir.Value = op.Add(op.Mul(token, self.heads), head)
        return rows


def _positions(op: OpBuilder, entries: ir.Value, block_size: int) -> ir.Value:
    """Key positions (C, N2, K * block_size) of the lists (C, N2, K); what follows a -1 lies beyond every limit."""
    ended = op.CumSum(op.Cast(op.Less(entries, 0), to=ir.DataType.INT64), -1)
    first: ir.Value = op.Where(op.Equal(ended, 0), op.Mul(entries, block_size), _NEVER)
    if block_size == 1:
        return first
    blocks = op.Add(op.Unsqueeze(first, [3]), op.Range(0, block_size, 1))
    shape = op.Concat(op.Shape(first, end=2), op.Mul(numerics.dim(op, first, 2), [block_size]), axis=0)
    positions: ir.Value = op.Reshape(blocks, shape, allowzero=1)
    return positions


def _scores(op: OpBuilder, query: ir.Value, key: ir.Value) -> ir.Value:
    """(C, N2, G, J) products of query (C, N2, G, D) and key (C, N2, J, D); only small tensors are transposed."""
    scores: ir.Value = op.Transpose(op.MatMul(key, op.Transpose(query, perm=[0, 1, 3, 2])), perm=[0, 1, 3, 2])
    return scores


def _in_chunks(
    op: OpBuilder,
    attend: Callable[[OpBuilder, ir.Value], list[ir.Value]],
    count: ir.Value,
    dtypes: Sequence[ir.DataType],
) -> list[ir.Value]:
    """`attend` over all `count` tokens in a Loop of equal chunks; the last one repeats the last token."""
    chunks = op.Max(op.Div(op.Add(count, [_CHUNK - 1]), [_CHUNK]), [1])
    size = op.Div(op.Add(count, op.Sub(chunks, [1])), chunks)
    offsets = op.Range(0, op.Squeeze(size, [0]), 1)
    last = op.Sub(count, [1])

    def chunk(op: OpBuilder, number: ir.Value, condition: ir.Value) -> list[ir.Value]:
        op.builder.push_module("chunk")
        return [op.Identity(condition), *attend(op, op.Min(op.Add(op.Mul(number, size), offsets), last))]

    graph = op.builder.subgraph(
        chunk,
        [ir.val("chunk_number", ir.DataType.INT64, []), ir.val("chunk_condition", ir.DataType.BOOL, [])],
        [ir.val("chunk_goes_on", ir.DataType.BOOL, []), *(ir.val(None, dtype) for dtype in dtypes)],
        name="chunk",
    )
    stacked = op.Loop(op.Squeeze(chunks, [0]), True, body=graph, _outputs=len(dtypes))
    return [
        op.Slice(
            op.Reshape(s, op.Concat(op.Mul(chunks, size), op.Shape(s, start=2), axis=0), allowzero=1), [0], count, [0]
        )
        for s in ([stacked] if len(dtypes) == 1 else stacked)
    ]


def _gather(op: OpBuilder, rows: ir.Value, token: ir.Value, shape: ir.Value) -> ir.Value:
    """The rows of the C tokens `token`, reshaped to (C, *shape)."""
    gathered: ir.Value = op.Reshape(op.Gather(rows, token), op.Concat(op.Shape(token), shape, axis=0), allowzero=1)
    return gathered


def _of_batch(op: OpBuilder, lengths: ir.Value, batch: ir.Value) -> ir.Value:
    """`lengths[batch]`, the last one for batches beyond it: a single length counts for all."""
    length: ir.Value = op.Gather(lengths, op.Min(batch, op.Sub(op.Shape(lengths), 1)))
    return length


def _segment(op: OpBuilder, ends: ir.Value, batch: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Begin and length of each batch, from inclusive prefix sums."""
    begin = _of_batch(op, op.Concat([0], op.Slice(ends, [0], [-1], [0]), axis=0), batch)
    return begin, op.Sub(_of_batch(op, ends, batch), begin)


def _int64(op: OpBuilder, x: ir.Value) -> ir.Value:
    cast: ir.Value = op.Cast(x, to=ir.DataType.INT64)
    return cast


def _size(op: OpBuilder, x: ir.Value) -> ir.Value:
    """The number of elements, as a tensor of shape (1); ONNX Runtime has no Size of bfloat16."""
    size: ir.Value = op.ReduceProd(op.Shape(x), keepdims=1)
    return size


# --- Reference --------------------------------------------------------------------------------------------------------

_Array = np.ndarray[Any, np.dtype[Any]]


class SparseFlashAttention(OpRun):
    """The operator in numpy, token by token; written independently of the body."""

    op_domain = DOMAIN

    def _run(
        self,
        query: _Array,
        key: _Array,
        value: _Array,
        sparse_indices: _Array,
        block_table: _Array | None = None,
        actual_seq_lengths_query: _Array | None = None,
        actual_seq_lengths_kv: _Array | None = None,
        query_rope: _Array | None = None,
        key_rope: _Array | None = None,
        *,
        scale_value: float,
        sparse_block_size: int = 1,
        layout_query: str = "BSND",
        layout_kv: str = "BSND",
        sparse_mode: int = 3,
        return_softmax_lse: int = 0,
        **_: object,
    ) -> tuple[_Array, ...]:
        tokens, kv_heads = prod(query.shape[:-2]), key.shape[-2]
        per_head = (tokens, kv_heads, query.shape[-2] // max(kv_heads, 1))
        queries = _flat(query, query_rope, per_head)
        keys = _flat(key, key_rope, (prod(key.shape[:-2]), kv_heads))
        values = _flat(value, None, (prod(value.shape[:-2]), kv_heads))
        lists = _flat(sparse_indices, None, per_head[:2])
        out = np.zeros((*per_head, value.shape[-1]), np.float32)
        peak, total = np.zeros((2, *per_head), np.float32)
        spans = _query_spans(layout_query, query, actual_seq_lengths_query)
        key_rows = _key_rows(layout_kv, key, actual_seq_lengths_kv, block_table, len(spans))
        for span, rows in zip(spans, key_rows, strict=True):
            for place, token in enumerate(span):
                limit = len(rows) if sparse_mode == 0 else len(rows) - len(span) + place + 1
                for head in range(kv_heads):
                    selected = rows[_selected(lists[token, head], sparse_block_size, limit)]
                    if selected.size:
                        scores = queries[token, head].astype(np.float32) @ keys[selected, head].astype(np.float32).T
                        scores *= np.float32(scale_value)
                        peak[token, head] = scores.max(axis=-1)
                        weights = np.exp(scores - peak[token, head, :, None])
                        total[token, head] = weights.sum(axis=-1)
                        mixed = weights @ values[selected, head].astype(np.float32)
                        out[token, head] = mixed / total[token, head, :, None]
        results = [out.reshape(*query.shape[:-1], value.shape[-1]).astype(query.dtype)]
        for statistic in (peak, total):
            by_head = np.swapaxes(statistic.reshape(*query.shape[:-2], *per_head[1:]), -3, -2)
            results.append(by_head if return_softmax_lse else np.zeros(0, np.float32))
        return tuple(results[: len(self.onnx_node.output)])


def _flat(x: _Array, rope: _Array | None, leading: tuple[int, ...]) -> _Array:
    """`x`, with its rotary part behind it, as (*leading, width)."""
    joined = x if rope is None else np.concatenate((x, rope), axis=-1)
    return joined.reshape(*leading, joined.shape[-1])


def _query_spans(layout: str, query: _Array, lengths: _Array | None) -> list[range]:
    """The numbers of each batch's valid query tokens."""
    if layout == "TND":
        return _spans(lengths, query.shape[0])
    batches, size = query.shape[:2]
    given = np.broadcast_to(size if lengths is None else lengths, batches)
    return [range(b * size, b * size + int(length)) for b, length in enumerate(given)]


def _key_rows(layout: str, key: _Array, lengths: _Array | None, table: _Array | None, batches: int) -> list[_Array]:
    """The row of each of a batch's key tokens, in a key tensor flattened to one row per token."""
    if layout == "TND":
        spans = _spans(lengths, key.shape[0])
        return [np.asarray(span, np.int64) for span in spans * (batches if len(spans) == 1 else 1)]
    size = key.shape[1]
    if table is None:
        given = np.broadcast_to(size if lengths is None else lengths, batches)
        return [b * size + np.arange(length) for b, length in enumerate(given)]
    given = np.broadcast_to(size * table.shape[1] if lengths is None else lengths, batches)
    tokens = [np.arange(length) for length in given]
    return [table[b].astype(np.int64)[token // size] * size + token % size for b, token in enumerate(tokens)]


def _spans(ends: _Array | None, tokens: int) -> list[range]:
    """The ranges between inclusive prefix sums."""
    bounds = [0, tokens] if ends is None else [0, *ends.tolist()]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _selected(entries: _Array, block_size: int, limit: int) -> _Array:
    """The key positions below `limit` of the blocks in a list that ends at the first -1."""
    valid = entries[: int(np.argmax(np.append(entries < 0, True)))].astype(np.int64)
    positions = (valid[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return positions[positions < limit]


# --- The limits of the device -----------------------------------------------------------------------------------------

_DOCUMENT = "aclnnSparseFlashAttention"
_GE = "GE operator SparseFlashAttention, tiling"
_QUERIES, _KEYS = ("query", "query_rope"), ("key", "value", "key_rope")
_PAGED = With("layout_kv", "PA_BSND")
_BSND, _TND, _MLA = With("layout_query", "BSND"), With("layout_query", "TND"), With("attention_mode", 2)


def _at(axis: int, *names: str) -> list[Place]:
    return [Place(name, axis) for name in names]


def _undivided_page(call: Call) -> str | None:
    """The block size is divisible by sparse_block_size."""
    page, block = Place("key", 1)(call), call.attributes["sparse_block_size"]
    if page is None or block < 1 or page % block == 0:
        return None
    return f"the block size of key must be divisible by sparse_block_size {block}, got {page}"


_invalid = partial(rule, INVALID, f"{_DOCUMENT}, parameters")
_tiling = partial(rule, TILING, f"{_DOCUMENT}, parameters")
_limits = partial(rule, TILING, f"{_DOCUMENT}, constraints")
_bounded = partial(bounded, TILING, f"{_DOCUMENT}, constraints")
_block_sizes = partial(rule, INVALID, f"{_DOCUMENT}, constraints")
_CONSTRAINTS = (
    _invalid("type", of_type(_FLOAT_INPUTS, ir.DataType.FLOAT16, ir.DataType.BFLOAT16), same_type(*_FLOAT_INPUTS)),
    rule(
        NULL,
        f"{_DOCUMENT}, parameters",
        "missing_input",
        given("block_table", _PAGED),
        given("actual_seq_lengths_query", _TND),
        given("actual_seq_lengths_kv", With("layout_kv", "TND", "PA_BSND")),
        given("query_rope", _MLA),
        given("key_rope", _MLA),
    ),
    rule(
        TILING,
        _GE,
        "layouts",
        when(_BSND, attribute("layout_kv", ("BSND", "PA_BSND"))),
        when(_TND, attribute("layout_kv", ("TND", "PA_BSND"))),
    ),
    rule(TILING, _GE, "block_table", absent("block_table", _PAGED)),
    _block_sizes("sparse_block_size", attribute("sparse_block_size", tuple(2**power for power in range(8)))),
    _block_sizes("sparse_block_size_950", attribute("sparse_block_size", 1), products=frozenset({Product.ASCEND_950})),
    _limits(
        "block_size",
        when(_PAGED, size("the block size", range(16, 1025, 16), Place("key", 1))),
        when(_PAGED, _undivided_page),
    ),
    _tiling(
        "rank",
        when(_BSND, ranks(dict.fromkeys((*_QUERIES, "sparse_indices"), 4))),
        when(_TND, ranks(dict.fromkeys((*_QUERIES, "sparse_indices"), 3))),
        when(With("layout_kv", "BSND", "PA_BSND"), ranks(dict.fromkeys(_KEYS, 4))),
        when(With("layout_kv", "TND"), ranks(dict.fromkeys(_KEYS, 3))),
        ranks({"block_table": 2, "actual_seq_lengths_query": 1, "actual_seq_lengths_kv": 1}),
    ),
    _tiling(
        "shapes_agree",
        agree("B or T1", *_at(0, *_QUERIES, "sparse_indices")),
        agree("S1 or T1", *_at(-3, *_QUERIES, "sparse_indices")),
        agree("N1", *_at(-2, *_QUERIES)),
        agree("B, T2 or block_num", *_at(0, *_KEYS)),
        agree("S2, T2 or block_size", *_at(-3, *_KEYS)),
        agree("N2", *_at(-2, *_KEYS, "sparse_indices")),
    ),
    _bounded("head_dim", "head_dim", "D", 512, *_at(-1, "query", "key", "value")),
    _bounded("rope_dim", "head_dim", "Dr", 64, *_at(-1, "query_rope", "key_rope")),
    rule(TILING, _GE, "kv_heads", size("N2", 1, *_at(-2, *_KEYS, "sparse_indices"))),
    _limits("heads", size("N1", (range(1, 65), 128), Place("query", -2))),
    _invalid("empty_input", not_empty()),
    _invalid("return_softmax_lse_pages", when(_PAGED, attribute("return_softmax_lse", 0))),
    _invalid(
        "unproduced_output", *(produced(name, With("return_softmax_lse", 1)) for name in ("softmax_max", "softmax_sum"))
    ),
)

# --- The operator -----------------------------------------------------------------------------------------------------

_EXAMPLE = """
import numpy as np
import onnxruntime
from onnxscript import FLOAT, opset18, script

import ascend_onnx
from ascend_onnx import op


@script()
def attend_to_the_best(
    query: FLOAT["B", "S1", 16, 512],
    query_rope: FLOAT["B", "S1", 16, 64],
    latents: FLOAT["B", "S2", 1, 512],
    key_rope: FLOAT["B", "S2", 1, 64],
    scores: FLOAT["B", "S1", 1, "S2"],
):
    count = opset18.Constant(value_ints=[8])
    best_scores, positions = opset18.TopK(scores, count)
    sparse_indices = opset18.Cast(positions, to=6)  # int32
    return op.SparseFlashAttention(
        query, latents, latents, sparse_indices, None, None, None, query_rope, key_rope,
        scale_value=0.0722,
        sparse_mode=0,
    )


model = ascend_onnx.attach_functions(attend_to_the_best.to_model_proto())
session = onnxruntime.InferenceSession(model.SerializeToString())
generator = np.random.default_rng(0)
sizes = {"B": 1, "S1": 2, "S2": 100}
feeds = {
    value.name: generator.standard_normal([sizes.get(dim, dim) for dim in value.shape], dtype=np.float32)
    for value in session.get_inputs()
}
(attention,) = session.run(None, feeds)
assert attention.shape == (1, 2, 16, 512)
"""

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
        Input(
            "sparse_indices",
            _INT32,
            "(B, S1, N2, K) or (T1, N2, K)",
            "Distinct blocks per token, -1 behind them.",
        ),
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
    overload=_overload,
    body=_body,
    reference=SparseFlashAttention,
    constraints=_CONSTRAINTS,
    example=_EXAMPLE,
)
