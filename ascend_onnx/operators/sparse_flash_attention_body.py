"""The function body of SparseFlashAttention, and the name of its configuration.

Letters as in `sparse_flash_attention`; C tokens of a chunk, J positions that a list of K blocks covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

from ascend_onnx import numerics
from ascend_onnx.errors import InputError
from ascend_onnx.operator import Body, Call

__all__ = ["body", "overload"]

_FLOAT_INPUTS = ("query", "key", "value", "query_rope", "key_rope")
_WITHOUT_LOOP = 32
"""The most query tokens that are served at once, where their number is known."""
_CHUNK = 8
"""Query tokens per turn of the loop. More are no faster, and every one keeps K keys and values in memory."""
_NEVER = 2**62
"""A key position beyond every limit; block offsets may still be added to it in int64."""


def overload(call: Call) -> str:
    """Layouts, mask and block size, then what is present: "bsnd_pa_bsnd_causal_block1_rope_lengths_kv_float16_once"."""
    attributes = call.attributes
    present = {
        "rope": call.has("query_rope") and call.has("key_rope"),
        "lengths_q": call.has("actual_seq_lengths_query"),
        "lengths_kv": call.has("actual_seq_lengths_kv"),
        ("softmax" if attributes["return_softmax_lse"] else "empty") + str(_outputs(call)): _outputs(call) > 1,
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


def _outputs(call: Call) -> int:
    """How many outputs a body has: all up to the last one that the node names."""
    names = [declared.name for declared in call.operator.outputs]
    return 1 + max(names.index(name) for name in call.outputs)


def _fits_one_chunk(call: Call) -> bool:
    """Whether the query tokens are known to be few enough to do without a loop."""
    query = call.input("query").shape
    if query is None:
        return False
    tokens = 1
    for dim in query[:-2]:
        if not isinstance(dim, int):
            return False
        tokens *= dim
    return tokens <= _WITHOUT_LOOP


def body(call: Call) -> Body:
    """The attention over chunks of a few query tokens; each chunk gathers the keys of its own lists only.

    Query tokens are numbered through all batches, and so are the rows of the key tensors: one gather serves every
    layout, and a token needs to know no more than its batch and its place in it.
    """
    attributes = call.attributes
    if attributes["layout_kv"] == "PA_BSND" and not call.has("block_table"):
        raise InputError("SparseFlashAttention with layout_kv PA_BSND needs the input block_table, which is absent")
    outputs = _outputs(call)
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
        list_shape = op.Concat(keys.heads, _dim(op, sparse_indices, -1), axis=0)
        list_end = op.Mul(_dim(op, sparse_indices, -1), keys.any)
        group = op.Div(_dim(op, query, -2), op.Max(keys.heads, 1))
        pairs = [
            (queries.rows(op, q), op.Concat(keys.heads, group, _dim(op, q, -1), axis=0), keys.rows(op, k))
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
        out_shape = op.Concat(op.Shape(query, end=-1), _dim(op, value, -1), axis=0)
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
        self._per_batch = _dim(op, query, 1 if self._batched else 0)
        self._lengths = self._per_batch if lengths is None else _int64(op, lengths)
        self.count = op.Mul(_dim(op, query, 0), self._per_batch) if self._batched else self._per_batch

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
        self._block = _dim(op, key, 0 if self._packed else 1)
        self.heads = _dim(op, key, -2)
        capacity, stored = self._block, _size(op, key)
        if self._table is not None:
            capacity = op.Mul(capacity, _dim(op, self._table, 1))
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
        stride = self._block if self._table is None else _dim(op, self._table, 1)
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
    shape = op.Concat(op.Shape(first, end=2), op.Mul(_dim(op, first, 2), [block_size]), axis=0)
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


def _dim(op: OpBuilder, x: ir.Value, axis: int) -> ir.Value:
    """The size of one axis, as a tensor of shape (1)."""
    dim: ir.Value = op.Shape(x, start=axis) if axis == -1 else op.Shape(x, start=axis, end=axis + 1)
    return dim
