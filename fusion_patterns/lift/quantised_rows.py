"""Rows quantised to int8: by one scale and offset for all, or by the largest magnitude of each row."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.router import reshaped_from
from fusion_patterns.lift.row_gather import gathered_rows

__all__ = ["DynamicQuantisation", "StaticQuantisation", "recognise_quantisation"]


@dataclass(frozen=True)
class StaticQuantisation:
    """value = int8(clip(round(rows * scale + offset))), scale and offset of one element."""

    rows: ir.Value
    scale: ir.Value
    offset: ir.Value
    value: ir.Value


@dataclass(frozen=True)
class DynamicQuantisation:
    """value = int8(round(s / scale)) with s = rows * smooth and scale = max |s| / 127 of every row, (M, 1).

    `smooth` (E, H) gives each row the factors of its expert, (1, H) or (H) all rows the same; None: no factors.
    """

    rows: ir.Value
    smooth: ir.Value | None
    by_expert: bool
    scale: ir.Value
    value: ir.Value


def recognise_quantisation(
    rows: ir.Value, sorted_keys: ir.Value, facts: Facts
) -> StaticQuantisation | DynamicQuantisation | None:
    """The quantisation that reads `rows` (M, H), whose experts are `sorted_keys` (M).

    Mul -> Add -> Round -> Clip(-128, 127) -> Cast(int8), or [Mul ->] (Abs -> ReduceMax -> Div(127)), Div -> the same.
    """
    queue, seen = [rows], {rows}
    while queue:
        value = queue.pop(0)
        found = _quantisation(value, facts.plain(rows), sorted_keys, facts)
        if found is not None:
            return found
        for node, _ in facts.readers(value):
            if is_op(node, "Cast", "Mul", "Add", "Div", "Round", "Clip"):
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return None


def _quantisation(
    value: ir.Value, rows: ir.Value, sorted_keys: ir.Value, facts: Facts
) -> StaticQuantisation | DynamicQuantisation | None:
    node = value.producer()
    if not is_op(node, "Cast") or attribute(node, "to") != ir.DataType.INT8:
        return None
    clip = facts.producer(facts.input(node, 0))
    if not is_op(clip, "Clip") or [facts.scalar(facts.input(clip, i)) for i in (1, 2)] != [-128, 127]:
        return None
    rounded = facts.producer(facts.input(clip, 0))
    scaled = facts.producer(facts.input(rounded, 0)) if is_op(rounded, "Round") else None
    if is_op(scaled, "Add"):
        return _static(scaled, rows, value, facts)
    return _dynamic(scaled, rows, sorted_keys, value, facts) if is_op(scaled, "Div") else None


def _static(node: ir.Node, rows: ir.Value, value: ir.Value, facts: Facts) -> StaticQuantisation | None:
    for product, offset in facts.either_way(node):
        times = facts.producer(product)
        if not is_op(times, "Mul") or not _is_single(offset, facts):
            continue
        for source, scale in facts.either_way(times):
            if source is rows and _is_single(scale, facts):
                return StaticQuantisation(rows, scale, offset, value)
    return None


def _is_single(value: ir.Value, facts: Facts) -> bool:
    shape = facts.shape(value)
    return shape is not None and len(shape) <= 2 and all(dim == 1 for dim in shape)


def _dynamic(
    node: ir.Node, rows: ir.Value, sorted_keys: ir.Value, value: ir.Value, facts: Facts
) -> DynamicQuantisation | None:
    smoothed, scale = facts.input(node, 0), facts.input(node, 1)
    part = facts.producer(scale)
    if not is_op(part, "Div") or facts.scalar(facts.input(part, 1)) != 127 or facts.size(scale, -1) != 1:
        return None
    largest = facts.producer(facts.input(part, 0))
    axes = facts.integers(facts.input(largest, 1)) if is_op(largest, "ReduceMax") and facts.has(largest, 1) else None
    if is_op(largest, "ReduceMax") and axes is None:
        axes = list(attribute(largest, "axes") or [])
    magnitude = None if largest is None or axes not in ([-1], [1]) else facts.producer(facts.input(largest, 0))
    if not is_op(magnitude, "Abs") or facts.input(magnitude, 0) is not smoothed:
        return None
    if smoothed is rows:
        return DynamicQuantisation(rows, None, False, scale, value)
    times = smoothed.producer()
    if not is_op(times, "Mul"):
        return None
    for source, factors in facts.either_way(times):
        if source is rows:
            return _smoothed(rows, factors, sorted_keys, scale, value, facts)
    return None


def _smoothed(
    rows: ir.Value, factors: ir.Value, sorted_keys: ir.Value, scale: ir.Value, value: ir.Value, facts: Facts
) -> DynamicQuantisation | None:
    reader = facts.producer(factors)
    gather = None if reader is None else gathered_rows(reader, facts)
    if gather is not None and gather.indices is sorted_keys and facts.rank(gather.source) == 2:
        return DynamicQuantisation(rows, gather.source, True, scale, value)
    shared = reshaped_from(factors, facts)
    shape, width = facts.shape(factors), facts.dim(rows, -1)
    if shape is not None and shape[-1] == width and all(dim == 1 for dim in shape[:-1]):
        return DynamicQuantisation(rows, shared, False, scale, value)
    return None
