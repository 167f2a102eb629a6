"""MoeInitRoutingV3 in numpy, for onnx's ReferenceEvaluator; written independently of the function body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from onnx.reference.op_run import OpRun

from ascend_onnx.operator import DOMAIN

__all__ = ["MoeInitRoutingV3"]

Array = np.ndarray[Any, np.dtype[Any]]

_FLOAT8 = {2: (ml_dtypes.float8_e5m2, 57344.0, 15), 3: (ml_dtypes.float8_e4m3fn, 448.0, 8)}
"""Element type, its largest value and the exponent of that, by quant_mode."""


class MoeInitRoutingV3(OpRun):
    """The operator in numpy: a list of assignments in expanded order, and one pass over it per output."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Array,
        expert_idx: Array,
        scale: Array | None = None,
        offset: Array | None = None,
        *,
        expert_num: int,
        active_num: int = -1,
        expert_capacity: int = -1,
        drop_pad_mode: int = 0,
        expert_tokens_num_type: int = 0,
        expert_tokens_num_flag: int = 0,
        quant_mode: int = -1,
        active_expert_range: Sequence[int] | None = None,
        row_idx_type: int = 0,
    ) -> tuple[Array, ...]:
        start, end = active_expert_range if active_expert_range else (0, expert_num)
        ids = expert_idx.reshape(-1).astype(np.int64)
        routed = np.flatnonzero((ids >= start) & (ids < end))
        order = routed[np.argsort(ids[routed], kind="stable")]
        counts = np.bincount(ids[routed], minlength=end)[start:end]

        rows = np.arange(order.size)
        if drop_pad_mode == 1:
            first = np.cumsum(counts) - counts
            slots = rows - first[ids[order]]
            rows = np.where(slots < expert_capacity, ids[order] * expert_capacity + slots, -1)
            leading: tuple[int, ...] = (expert_num, expert_capacity)
        else:
            leading = (min(active_num, ids.size) if active_num > 0 else ids.size,)
        row_idx = np.full(ids.size, -1, np.int32)
        if row_idx_type == 1:
            row_idx[: order.size] = order
        else:
            row_idx[order] = rows

        size = int(np.prod(leading))
        written = (rows >= 0) & (rows < size)
        sources = order[written]
        values, scales = _rows(
            x, sources // max(expert_idx.shape[1], 1), ids[sources] - start, scale, offset, quant_mode
        )
        expanded = _placed(values, rows[written], size).reshape(*leading, x.shape[1])
        expanded_scale = np.zeros(0, np.float32) if scales is None else _placed(scales, rows[written], size)
        tokens = _tokens(counts, start, expert_num, expert_tokens_num_type) if expert_tokens_num_flag else counts[:0]
        results = (expanded, row_idx, tokens.astype(np.int64), expanded_scale)
        return results[: len(self.onnx_node.output)]


def _placed(values: Array, rows: Array, size: int) -> Array:
    """`values` at `rows` of an array of `size` rows, zeros elsewhere."""
    result = np.zeros((size, *values.shape[1:]), values.dtype)
    result[rows] = values
    return result


def _tokens(counts: Array, start: int, experts: int, kind: int) -> Array:
    """Tokens per expert: running sum, count, or rows (expert, count) of the experts that have any."""
    if kind == 0:
        return np.cumsum(counts)
    if kind == 1:
        return counts
    found = np.flatnonzero(counts)
    pairs = np.zeros((experts, 2), np.int64)
    pairs[: found.size] = np.stack((found + start, counts[found]), axis=1)
    return pairs


def _rows(
    x: Array, tokens: Array, experts: Array, scale: Array | None, offset: Array | None, quant_mode: int
) -> tuple[Array, Array | None]:
    """The values (R, H) and the scales of the rows that hold `tokens` for `experts`, both of size R."""
    if quant_mode == -1:
        return x[tokens], None if scale is None else scale[tokens]
    values = x[tokens].astype(np.float32)
    if quant_mode == 0:
        if scale is None or offset is None:
            raise ValueError("MoeInitRoutingV3 with quant_mode 0 needs the inputs scale and offset")
        return _int8(values * scale + offset), None
    if quant_mode == 1:
        if scale is not None:
            values = values * (scale if scale.shape[0] == 1 else scale[experts])
        largest = np.abs(values).max(axis=1, initial=0.0)
        scales = largest / np.float32(127.0)
        return _int8(values / np.where(scales == 0, np.float32(1.0), scales)[:, None]), scales
    return _mxfp8(values, *_FLOAT8[quant_mode])


def _int8(values: Array) -> Array:
    return np.clip(np.rint(values), -128, 127).astype(np.int8)


def _mxfp8(values: Array, dtype: type[Any], limit: float, largest_exponent: int) -> tuple[Array, Array]:
    """float8 elements and E8M0 scales of blocks of 32 columns; an even number of blocks, the last one perhaps empty."""
    rows, width = values.shape
    padded = np.zeros((rows, -(-width // 64) * 64), np.float32)
    padded[:, :width] = values
    blocks = padded.reshape(rows, padded.shape[1] // 32, 32)
    finite = np.logical_and.reduce(np.isfinite(blocks), axis=-1)
    # frexp gives a fraction in [0.5, 1), hence 126 where the stored exponent of float32 is biased by 127.
    biased = np.frexp(np.abs(blocks).max(axis=-1))[1] + 126
    biased = np.where(blocks.any(axis=-1), biased, 0)
    shared = np.maximum(biased - largest_exponent, 0)
    with np.errstate(invalid="ignore"):
        scaled = np.clip(np.ldexp(blocks, 127 - shared[..., None]), -limit, limit)
    elements = np.where(finite[..., None], scaled, 0.0).reshape(padded.shape)[:, :width]
    return elements.astype(dtype), np.where(finite, shared, 255).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
