"""Oracle of SparseFlashAttention: one query token and one head at a time.

Source: aclnnSparseFlashAttention; limits, block truncation and rows without a key as in the operator specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .numerics import Float64, widen
from .result import Array, Expected

__all__ = ["sparse_flash_attention"]


@dataclass(frozen=True)
class _Sequence:
    """One batch entry: flat rows of its query tokens, and flat key rows of its cached tokens."""

    query_rows: range
    key_rows: Sequence[int]


def sparse_flash_attention(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Expected]:
    """`attention_out`, `softmax_max` and `softmax_sum`; the statistics only with `return_softmax_lse`."""
    query = inputs["query"]
    heads, width = query.shape[-2:]
    kv_heads = inputs["key"].shape[-2]
    group = heads // kv_heads
    block = int(attributes.get("sparse_block_size", 1))
    scale = float(np.float32(attributes["scale_value"]))

    flat_query = _with_rope(query, inputs.get("query_rope"))
    flat_key = _with_rope(inputs["key"], inputs.get("key_rope"))
    flat_value = widen(inputs["value"]).reshape(-1, kv_heads, width)
    indices = inputs["sparse_indices"].reshape(-1, kv_heads, inputs["sparse_indices"].shape[-1])

    rows = flat_query.shape[0]
    out = np.zeros((rows, heads, width))
    largest = np.zeros((rows, heads))
    total = np.zeros((rows, heads))
    # The device leaves the statistics of a row open that has keys but selects none of them.
    specified = np.ones((rows, heads), np.bool_)
    for sequence in _sequences(inputs, attributes):
        for position, row in enumerate(sequence.query_rows):
            limit = len(sequence.key_rows)
            if attributes.get("sparse_mode", 3) == 3:
                limit += position + 1 - len(sequence.query_rows)
            for head in range(heads):
                selected = [sequence.key_rows[j] for j in _tokens(indices[row, head // group], block, limit)]
                if not selected:
                    specified[row, head] = limit <= 0
                    continue
                scores = scale * (flat_key[selected, head // group] @ flat_query[row, head])
                largest[row, head] = scores.max()
                weights = np.exp(scores - scores.max())
                total[row, head] = weights.sum()
                out[row, head] = (weights / weights.sum()) @ flat_value[selected, head // group]

    results = {"attention_out": Expected.maths(out.reshape(query.shape), query.dtype)}
    if attributes.get("return_softmax_lse", 0):
        for name, statistic in (("softmax_max", largest), ("softmax_sum", total)):
            results[name] = Expected.maths(
                _by_kv_head(statistic, query.shape, kv_heads),
                np.float32,
                specified=_by_kv_head(specified, query.shape, kv_heads),
            )
    return results


def _with_rope(nope: Array, rope: Array | None) -> Float64:
    """Rows (T, N, D + Dr): a score over the joined features is the sum of the two products."""
    parts = [widen(nope)] if rope is None else [widen(nope), widen(rope)]
    joined = np.concatenate(parts, axis=-1)
    return joined.reshape(-1, *joined.shape[-2:])


def _tokens(entries: Array, block: int, limit: int) -> Iterator[int]:
    """The tokens that a list of block ids selects: -1 ends the list, tokens from `limit` on are left out."""
    for entry in entries:
        if entry == -1:
            return
        yield from range(int(entry) * block, min((int(entry) + 1) * block, limit))


def _sequences(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> list[_Sequence]:
    query_ranges = _ranges(
        inputs["query"].shape, attributes.get("layout_query", "BSND"), inputs.get("actual_seq_lengths_query")
    )
    kv_lengths = inputs.get("actual_seq_lengths_kv")
    key_rows: list[Sequence[int]]
    if attributes.get("layout_kv", "BSND") == "PA_BSND":
        block_table, page = inputs["block_table"], inputs["key"].shape[1]
        lengths = _lengths(kv_lengths, len(query_ranges), block_table.shape[1] * page)
        key_rows = [
            [int(block_table[b, j // page]) * page + j % page for j in range(length)]
            for b, length in enumerate(lengths)
        ]
    else:
        key_rows = list(_ranges(inputs["key"].shape, attributes.get("layout_kv", "BSND"), kv_lengths))
    return [_Sequence(q, k) for q, k in zip(query_ranges, key_rows, strict=True)]


def _ranges(shape: tuple[int, ...], layout: str, lengths: Array | None) -> list[range]:
    """The flat rows of every batch entry: prefix sums in TND, lengths of a padded batch in BSND."""
    if layout == "TND":
        assert lengths is not None, "TND needs prefix sums"
        ends = [int(end) for end in lengths]
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    batch, padded = shape[:2]
    return [range(b * padded, b * padded + n) for b, n in enumerate(_lengths(lengths, batch, padded))]


def _lengths(lengths: Array | None, batch: int, full: int) -> list[int]:
    if lengths is None:
        return [full] * batch
    return [int(n) for n in np.broadcast_to(lengths, (batch,))]


def _by_kv_head(rows: Array, query_shape: tuple[int, ...], kv_heads: int) -> Any:
    """(T, N1) as (B, N2, S1, N1 / N2), or as (N2, T1, N1 / N2) in TND."""
    split = rows.reshape(*query_shape[:-2], kv_heads, query_shape[-2] // kv_heads)
    return np.moveaxis(split, -2, -3)
