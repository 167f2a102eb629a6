"""The scales that MlaPrologV2WeightNz takes for int8 weights and for rows quantised token by token.

Partial quantisation: W_UQ|W_QR is int8, and the operator quantises the query latent. Full: so are W_DQ and W_DKV|W_KR,
and the operator takes the hidden states as int8, with their scales.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ascend_onnx.layout import half_to_interleaved
from ascend_onnx.operator import Tensor
from fusion_patterns.emit import Emitter
from fusion_patterns.lift.projections import Projections
from fusion_patterns.lift.quantised import PerToken
from fusion_patterns.lift.quantised_linear import QuantisedLinear
from fusion_patterns.lift.rope import Rope, RopeLayout

__all__ = ["draws", "quantised_rows", "scale_inputs", "scale_tensors", "token_x"]

_LARGEST_CODE = 127.0
_DRAWS = 3


def draws(paths: Projections) -> int:
    """How many random inputs validation may try: of numbers that are rounded to 8 bits, one may be next to a tie."""
    return _DRAWS if isinstance(paths.query.up, QuantisedLinear) else 1


def token_x(emit: Emitter, paths: Projections) -> ir.Value:
    """The hidden states as the operator takes them."""
    rows = quantised_rows(paths)
    if rows is None or rows.value.dtype == ir.DataType.INT8:
        return paths.x if rows is None else rows.value
    dims = None if rows.value.shape is None else tuple(rows.value.shape)
    return emit.op("Cast", rows.value, to=ir.DataType.INT8, dtype=ir.DataType.INT8, shape=dims)


def quantised_rows(paths: Projections) -> PerToken | None:
    """The hidden states as int8, where the down projections read them so."""
    down = paths.query.down
    return down.rows if isinstance(down, QuantisedLinear) and isinstance(down.rows, PerToken) else None


def scale_tensors(paths: Projections) -> dict[str, Tensor]:
    """The scales as a call describes them."""
    widths = {name: linear.weight.shape[1] for name, linear, _, _ in _quantised(paths)}
    tensors = {name: Tensor(ir.DataType.FLOAT, (1, width)) for name, width in widths.items()}
    if quantised_rows(paths) is not None:
        tensors["dequant_scale_x"] = Tensor(ir.DataType.FLOAT, (None, 1))
    if _smooth(paths) is not None:
        tensors["smooth_scales_cq"] = Tensor(ir.DataType.FLOAT, (1, paths.query.up.weight.shape[0]))
    return tensors


def scale_inputs(emit: Emitter, paths: Projections) -> dict[str, ir.Value]:
    """The scales as inputs of the operator, those of columns in the order of the weight's columns."""
    inputs = {}
    for name, linear, rope, heads in _quantised(paths):
        scales = linear.column_scales()
        if rope is not None and rope.input_layout is RopeLayout.HALF:
            width = _rope_width(rope)
            per_head = scales.reshape(heads, -1)
            scales = np.asarray(half_to_interleaved(per_head, per_head.shape[1] - width), np.float32)
        inputs[name] = emit.typed(scales.reshape(1, -1))
    rows, smooth = quantised_rows(paths), _smooth(paths)
    if rows is not None:
        inputs["dequant_scale_x"] = _row_scales(emit, rows)
    if smooth is not None and smooth.const_value is not None:
        inputs["smooth_scales_cq"] = emit.typed(smooth.const_value.numpy().astype(np.float32).reshape(1, -1))
    return inputs


def _rope_width(rope: Rope) -> int:
    """How many features of a head are rotated."""
    width = rope.x.shape[-1] if rope.x.shape is not None else None
    assert isinstance(width, int)  # recognised by its columns
    return width


def _quantised(paths: Projections) -> list[tuple[str, QuantisedLinear, Rope | None, int]]:
    """(input for the scales, projection, rotation of its last columns, heads) of each int8 weight."""
    query, key = paths.query, paths.key
    candidates = (
        ("dequant_scale_w_dq", query.down, None, 1),
        ("dequant_scale_w_uq_qr", query.up, query.rope, query.heads),
        ("dequant_scale_w_dkv_kr", key.down, key.rope, 1),
    )
    return [(name, down, rope, heads) for name, down, rope, heads in candidates if isinstance(down, QuantisedLinear)]


def _smooth(paths: Projections) -> ir.Value | None:
    up = paths.query.up
    return up.rows.smooth if isinstance(up, QuantisedLinear) and isinstance(up.rows, PerToken) else None


def _row_scales(emit: Emitter, rows: PerToken) -> ir.Value:
    """(T, 1) float32: the largest magnitude of each row / 127."""

    def build() -> ir.Value:
        largest = rows.largest
        dims = None if largest.shape is None else tuple(largest.shape)
        if largest.dtype != ir.DataType.FLOAT:
            largest = emit.op("Cast", largest, to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=dims)
        scales = emit.op("Div", largest, emit.scalar(_LARGEST_CODE, ir.DataType.FLOAT), shape=dims)
        return emit.op("Reshape", scales, emit.integers([-1, 1]), shape=(ir.SymbolicDim(None), 1))

    value: ir.Value = emit.shared(("row scales", rows.largest), build)
    return value
