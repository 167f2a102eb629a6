"""Oracle of RingAttentionUpdateV2: two attention results over parts of the keys, joined by their softmax statistics.

Source: aclnnRingAttentionUpdateV2, formulas; memory order of the statistics as in the operator specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numerics import Float64, widen
from .result import Array, Expected

__all__ = ["ring_attention_update_v2"]


def ring_attention_update_v2(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Expected]:
    """`attn_out`, `softmax_max` and `softmax_sum`, the statistics in the memory order in which they came.

    Maxima of -inf on both sides and sums of zero give NaN, as the formulas do.
    """
    prev_max, cur_max = widen(inputs["prev_softmax_max"]), widen(inputs["cur_softmax_max"])
    largest = np.maximum(prev_max, cur_max)
    with np.errstate(invalid="ignore", divide="ignore"):
        prev_weight = widen(inputs["prev_softmax_sum"]) * np.exp(prev_max - largest)
        cur_weight = widen(inputs["cur_softmax_sum"]) * np.exp(cur_max - largest)
        total = prev_weight + cur_weight
        prev_share = _by_attention_row(prev_weight / total, inputs, attributes)
        cur_share = _by_attention_row(cur_weight / total, inputs, attributes)
        attention = inputs["prev_attn_out"]
        by_head = (*prev_share.shape[:-1], _head_size(attention, prev_share))
        out = widen(attention).reshape(by_head) * prev_share
        out += widen(inputs["cur_attn_out"]).reshape(by_head) * cur_share
    return {
        "attn_out": Expected.maths(out.reshape(attention.shape), attention.dtype),
        "softmax_max": Expected.exact(largest.astype(np.float32)),
        "softmax_sum": Expected.maths(total, np.float32),
    }


def _head_size(attention: Array, share: Float64) -> int:
    """D: the last axis holds the N heads of a row in SBH, and one head in TND."""
    width = int(attention.shape[-1])
    return width if share.ndim == attention.ndim else width // int(share.shape[-2])


def _by_attention_row(share: Float64, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> Float64:
    """The first of the equal lanes of each row, in the order of the attention: (S, B, N, 1), or (T, N, 1) in TND."""
    if attributes.get("input_layout", "SBH") == "SBH":
        return share[..., :1].transpose(2, 0, 1, 3)
    tokens, heads = share.shape[:2]
    # With one head both orders are the same, and the sequence lengths have no say.
    if attributes.get("input_softmax_layout", "") == "TND" or heads == 1:
        return share[..., :1]
    flat = share.reshape(tokens * heads, share.shape[-1])
    return flat[_ragged_rows(inputs["actual_seq_qlen"], tokens, heads), :1]


def _ragged_rows(actual_seq_qlen: Array, tokens: int, heads: int) -> NDArray[np.int64]:
    """(T, N): the row of a token and head where memory joins one (N, S_b) table after the other, batch by batch."""
    rows = np.zeros((tokens, heads), np.int64)
    for start, end in pairwise(int(bound) for bound in actual_seq_qlen):
        for token in range(start, end):
            for head in range(heads):
                rows[token, head] = start * heads + head * (end - start) + token - start
    return rows
