"""Oracle of MoeInitRoutingV3: dropless, active and drop/pad routing in every quantisation mode.

Source: aclnnMoeInitRoutingV3, formulas 1 to 6 and the parameter table, corrected by the operator specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .mxfp8 import quantise_mxfp8
from .numerics import dynamic_quantise, quantise, widen
from .result import Array, Expected

__all__ = ["moe_init_routing_v3"]

STATIC, DYNAMIC = 0, 1
MXFP8 = {2: np.dtype(ml_dtypes.float8_e5m2), 3: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class _Routing:
    """Row i of the expanded tensor is assignment `source[i]`, of expert `expert[i]`; -1 is an empty row."""

    source: NDArray[np.int64]
    expert: NDArray[np.int64]


def moe_init_routing_v3(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Expected]:
    """Every output that the mode produces, by name; rows past the routed count hold the portable zeros."""
    x, ids = inputs["x"], inputs["expert_idx"].reshape(-1).astype(np.int64)
    experts = int(attributes["expert_num"])
    start, end = attributes.get("active_expert_range") or (0, experts)
    routed = [i for expert in range(start, end) for i in np.flatnonzero(ids == expert)]
    order = np.array(routed, np.int64)

    results: dict[str, Expected] = {}
    if attributes.get("drop_pad_mode", 0) == 1:
        capacity = int(attributes["expert_capacity"])
        routing = _drop_pad(ids, experts, capacity)
        leading: tuple[int, ...] = (experts, capacity)
        results["expanded_row_idx"] = Expected.exact(_gather_index(routing, ids.size))
        filled = np.ones(routing.source.shape, np.bool_)
    else:
        active = int(attributes.get("active_num", -1))
        rows = min(active, ids.size) if active > 0 else ids.size
        routing = _dropless(ids, order, rows)
        leading = (rows,)
        results["expanded_row_idx"] = _row_index(order, ids.size, int(attributes.get("row_idx_type", 0)))
        filled = routing.source >= 0

    results |= _expanded(inputs, attributes, routing, leading, filled, x.shape[0], start)
    if attributes.get("expert_tokens_num_flag", 0):
        kind = int(attributes.get("expert_tokens_num_type", 0))
        results["expert_tokens_count_or_cumsum"] = _counts(ids, start, end, experts, kind)
    return results


def _dropless(ids: NDArray[np.int64], order: NDArray[np.int64], rows: int) -> _Routing:
    source = np.full(rows, -1, np.int64)
    kept = order[:rows]
    source[: kept.size] = kept
    expert = np.full(rows, -1, np.int64)
    expert[: kept.size] = ids[kept]
    return _Routing(source, expert)


def _drop_pad(ids: NDArray[np.int64], experts: int, capacity: int) -> _Routing:
    """Each expert has `capacity` rows for its first assignments; the rest is dropped, unused rows are empty."""
    source = np.full((experts, capacity), -1, np.int64)
    for expert in range(experts):
        kept = np.flatnonzero(ids == expert)[:capacity]
        source[expert, : kept.size] = kept
    return _Routing(source.reshape(-1), np.repeat(np.arange(experts), capacity))


def _gather_index(routing: _Routing, assignments: int) -> NDArray[np.int32]:
    index = np.full(assignments, -1, np.int32)
    for row, source in enumerate(routing.source):
        if source >= 0:
            index[source] = row
    return index


def _row_index(order: NDArray[np.int64], assignments: int, kind: int) -> Expected:
    """`expanded_row_idx` without drop/pad; neither kind is shortened by active_num."""
    index = np.full(assignments, -1, np.int32)
    if kind == 1:
        index[: order.size] = order
        return Expected.exact(index, specified=np.arange(assignments) < order.size)
    index[order] = np.arange(order.size)
    return Expected.exact(index)


def _expanded(
    inputs: Mapping[str, Array],
    attributes: Mapping[str, Any],
    routing: _Routing,
    leading: tuple[int, ...],
    specified: NDArray[np.bool_],
    tokens: int,
    start: int,
) -> dict[str, Expected]:
    """`expanded_x`, and `expanded_scale` where the mode has one."""
    x, scale = inputs["x"], inputs.get("scale")
    hidden = x.shape[1]
    mode = int(attributes.get("quant_mode", -1))
    filled = routing.source >= 0
    token = routing.source[filled] // (inputs["expert_idx"].shape[1] or 1)
    taken = x[token]

    rows: dict[str, Array] = {}
    if mode == -1:
        rows["expanded_x"] = taken
        if scale is not None:
            rows["expanded_scale"] = scale.reshape(tokens)[token]
    elif mode == STATIC:
        assert scale is not None, "static quantisation needs a scale"
        rows["expanded_x"] = quantise(widen(taken), scale, inputs["offset"])
    elif mode == DYNAMIC:
        smooth = widen(taken)
        if scale is not None:
            row = routing.expert[filled] - start if scale.shape[0] > 1 else np.zeros(token.size, np.int64)
            smooth = widen((taken.astype(np.float32) * scale[row]).astype(np.float32))
        rows["expanded_x"], per_row = dynamic_quantise(smooth)
        rows["expanded_scale"] = per_row[:, 0]
    else:
        rows["expanded_x"], rows["expanded_scale"] = quantise_mxfp8(taken, MXFP8[mode])

    quantised_from_floats = mode in (STATIC, DYNAMIC)
    results = {}
    for name, values in rows.items():
        shape = (filled.size, *values.shape[1:])
        whole = np.zeros(shape, values.dtype)
        whole[filled] = values
        defined = np.broadcast_to(specified.reshape(-1, *[1] * (values.ndim - 1)), shape)
        computed = np.broadcast_to(filled.reshape(-1, *[1] * (values.ndim - 1)), shape) & quantised_from_floats
        if name == "expanded_x":
            final: tuple[int, ...] = (*leading, hidden)
        else:
            final = shape
        results[name] = Expected(whole.reshape(final), whole.dtype, computed.reshape(final), defined.reshape(final))
    return results


def _counts(ids: NDArray[np.int64], start: int, end: int, experts: int, kind: int) -> Expected:
    """Assignments per expert of the range, before anything is dropped: running sum, count, or (expert, count)."""
    histogram = np.array([np.count_nonzero(ids == expert) for expert in range(start, end)], np.int64)
    if kind == 0:
        return Expected.exact(np.cumsum(histogram, dtype=np.int64))
    if kind == 1:
        return Expected.exact(histogram)
    pairs = [(start + e, count) for e, count in enumerate(histogram) if count]
    table = np.zeros((experts, 2), np.int64)
    table[: len(pairs)] = np.array(pairs, np.int64).reshape(-1, 2)
    # The device zero-fills up to min(end - start + 1, experts) rows and leaves the rest.
    specified = np.zeros(table.shape, np.bool_)
    specified[: min(end - start + 1, experts)] = True
    return Expected.exact(table, specified=specified)
