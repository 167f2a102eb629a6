"""SparseFlashAttention in numpy, for onnx's ReferenceEvaluator; written independently of the function body."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from ascend_onnx.operator import DOMAIN

__all__ = ["SparseFlashAttention"]

Array = np.ndarray[Any, np.dtype[Any]]


class SparseFlashAttention(OpRun):
    """The operator in numpy, token by token."""

    op_domain = DOMAIN

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        sparse_indices: Array,
        block_table: Array | None = None,
        actual_seq_lengths_query: Array | None = None,
        actual_seq_lengths_kv: Array | None = None,
        query_rope: Array | None = None,
        key_rope: Array | None = None,
        *,
        scale_value: float,
        sparse_block_size: int = 1,
        layout_query: str = "BSND",
        layout_kv: str = "BSND",
        sparse_mode: int = 3,
        return_softmax_lse: int = 0,
        **_: object,
    ) -> tuple[Array, ...]:
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


def _flat(x: Array, rope: Array | None, leading: tuple[int, ...]) -> Array:
    """`x`, with its rotary part behind it, as (*leading, width)."""
    joined = x if rope is None else np.concatenate((x, rope), axis=-1)
    return joined.reshape(*leading, joined.shape[-1])


def _query_spans(layout: str, query: Array, lengths: Array | None) -> list[range]:
    """The numbers of each batch's valid query tokens."""
    if layout == "TND":
        return _spans(lengths, query.shape[0])
    batches, size = query.shape[:2]
    given = np.broadcast_to(size if lengths is None else lengths, batches)
    return [range(b * size, b * size + int(length)) for b, length in enumerate(given)]


def _key_rows(layout: str, key: Array, lengths: Array | None, table: Array | None, batches: int) -> list[Array]:
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


def _spans(ends: Array | None, tokens: int) -> list[range]:
    """The ranges between inclusive prefix sums."""
    bounds = [0, tokens] if ends is None else [0, *ends.tolist()]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _selected(entries: Array, block_size: int, limit: int) -> Array:
    """The key positions below `limit` of the blocks in a list that ends at the first -1."""
    valid = entries[: int(np.argmax(np.append(entries < 0, True)))].astype(np.int64)
    positions = (valid[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return positions[positions < limit]
