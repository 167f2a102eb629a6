"""Rows written into a cache, each into the slot of its token."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.indexed import Digit, trace
from fusion_patterns.miss import Miss, miss

__all__ = ["SlotWrite", "recognise_slot_write"]


@dataclass(frozen=True)
class SlotWrite:
    """`value` (slots, H) is `cache` (slots, H) with row t of `rows` (T, H) at slot t of `slots`, (T) or (T, 1)."""

    cache: ir.Value
    slots: ir.Value
    rows: ir.Value
    value: ir.Value


def recognise_slot_write(value: ir.Value, facts: Facts) -> SlotWrite | Miss:
    """The write of rows by slot that computes a value.

    Spellings
    ---------
    1. ScatterND(cache, Unsqueeze(slots, -1), rows).
    2. ScatterElements(cache, slots broadcast over the columns, rows) along the first axis.
    """
    return facts.remember("slot_write", value, _slot_write)


def _slot_write(value: ir.Value, facts: Facts) -> SlotWrite | Miss:
    node = facts.producer(value)
    if not is_op(node, "ScatterND", "ScatterElements"):
        return miss("cache-unrecognised", value, "rows scattered by slot", node.op_type if node else "a graph input")
    if attribute(node, "reduction") != "none":
        return miss("cache-unrecognised", node, "rows that replace those in the cache", "a reduction")
    cache, index, rows = (facts.input(node, i) for i in range(3))
    if facts.rank(cache) != 2 or facts.rank(index) != 2 or facts.rank(rows) != 2:
        return miss("cache-unrecognised", node, "a cache (slots, H) and rows (T, H)", "other axes")
    by_row = facts.dim(index, 1) == 1 if node.op_type == "ScatterND" else attribute(node, "axis", 0) in (0, -2)
    slots = _slots(index, facts)
    if not by_row or slots is None:
        return miss("cache-unrecognised", node, "one slot for each row", "other indices")
    return SlotWrite(cache, slots, rows, node.outputs[0])


def _slots(index: ir.Value, facts: Facts) -> ir.Value | None:
    """(T) or (T, 1) of indices (T, 1), or broadcast to (T, H)."""
    element = trace(index, facts)
    if element.index not in (((Digit(0),),), ((Digit(0),), 0)):
        return None
    node = facts.producer(element.value)
    narrow = is_op(node, "Cast") and facts.input(node, 0).dtype == ir.DataType.INT32
    return facts.input(node, 0) if narrow and node is not None else element.value
