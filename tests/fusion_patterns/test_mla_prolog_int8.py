"""Projections quantised token by token: MlaPrologV2WeightNz with an int8 W_UQ, or with int8 weights throughout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx.verify import verify
from fusion_patterns import fuse
from tests.fusion_patterns.edits import Edit, Editor, edited

Corpus = Callable[[str], Path]
OPERATOR = "MlaPrologV2WeightNz"
INTERLEAVED, HALF = "attn_dsv3_decode_sdpa_op18_opt", "attn_dsv3_decode_sdpa_op18_opt_nointerleave"
LOW_RANK, UP, KEY = "linear", "linear_1", "linear_2"
"""The results of W_DQ, W_UQ and W_DKV|W_KR."""
SMOOTH = np.linspace(0.5, 1.5, 1536, dtype=np.float32)


def typed(value: ir.Value, dtype: ir.DataType, *dims: int | ir.SymbolicDim) -> ir.Value:
    value.type = ir.TensorType(dtype)
    if dims:
        value.shape = ir.Shape(dims)
    return value


def codes(e: Editor, rows: ir.Value, lowest: float = -128.0) -> tuple[ir.Value, ir.Value]:
    """(int8 codes, scale of each row)."""
    dims = list(rows.shape or ())
    largest = typed(e.add("ReduceMax", e.add("Abs", rows), [-1], keepdims=1), ir.DataType.FLOAT, *dims[:-1], 1)
    scale = e.add("Div", largest, 127.0)
    rounded = e.add("Round", e.add("Div", rows, scale))
    stored = e.add("Cast", e.add("Clip", rounded, lowest, 127.0), to=ir.DataType.INT8)
    return typed(stored, ir.DataType.INT8), scale


def multiplied(e: Editor, result: str, stored: ir.Value, scale: ir.Value) -> None:
    """The product that computes `result`, by an int8 weight."""
    weight = e.weight(e.node(result).inputs[1].name or "")
    columns = (np.abs(weight).max(0) / 127).astype(np.float32)
    matrix = typed(e.add("Cast", np.rint(weight / columns).astype(np.int8), to=ir.DataType.INT32), ir.DataType.INT32)
    rows = typed(e.add("Cast", stored, to=ir.DataType.INT32), ir.DataType.INT32)
    product = typed(e.add("MatMul", rows, matrix, like=result), ir.DataType.INT32)
    real = typed(e.add("Cast", product, to=ir.DataType.FLOAT), ir.DataType.FLOAT)
    e.instead_of(result, e.add("Mul", e.add("Mul", real, scale), columns))


def rows_of(e: Editor, result: str) -> ir.Value:
    rows = e.node(result).inputs[0]
    assert rows is not None
    return rows


def partial(e: Editor) -> None:
    """W_UQ is int8."""
    multiplied(e, UP, *codes(e, rows_of(e, UP)))


def smoothed(e: Editor) -> None:
    multiplied(e, UP, *codes(e, e.add("Mul", rows_of(e, UP), SMOOTH)))


def full(e: Editor) -> None:
    """All three weights are int8; both down projections read the same codes."""
    stored, scale = codes(e, rows_of(e, LOW_RANK))
    multiplied(e, LOW_RANK, stored, scale)
    multiplied(e, KEY, stored, scale)
    partial(e)


def full_each_for_itself(e: Editor) -> None:
    for result in (LOW_RANK, KEY, UP):
        multiplied(e, result, *codes(e, rows_of(e, result)))


FUSED: dict[str, tuple[Edit, str]] = {
    "W_UQ": (partial, "partial_quant"),
    "W_UQ of smoothed rows": (smoothed, "partial_quant"),
    "all weights": (full, "full_quant"),
    "all weights, each quantising its rows": (full_each_for_itself, "full_quant"),
}


@pytest.mark.parametrize("name", [INTERLEAVED, HALF])
@pytest.mark.parametrize(("edit", "scenario"), FUSED.values(), ids=FUSED)
def test_int8_weights_fuse_and_stay_equal(corpus: Corpus, name: str, edit: Edit, scenario: str) -> None:
    original, model = edited(corpus(name), edit), edited(corpus(name), edit)
    report = fuse(model, validate="all")
    assert (report.counts, report.missed) == ({OPERATOR: 1}, [])
    (entry,) = report.fused
    assert f"_{scenario}_" in entry.overload
    assert ("smooth" in entry.overload) == (edit is smoothed)
    assert entry.validated is not None
    assert entry.validated < 1e-5
    for sizes in ({"batch": 2, "past": 3}, {"batch": 3, "past": 17}):
        draws = [verify(original, model, dims=sizes, seed=seed, sets=1) for seed in range(2)]
        assert any(draw.equal for draw in draws), draws[0].reason


def one_scale_for_all(e: Editor) -> None:
    rows = rows_of(e, UP)
    stored = typed(e.add("QuantizeLinear", rows, 0.03, np.int8(0)), ir.DataType.INT8)
    weight = np.rint(e.weight(e.node(UP).inputs[1].name or "") * 500).astype(np.int8)
    product = e.add("MatMulInteger", stored, weight, like=UP)
    real = e.add("Cast", typed(product, ir.DataType.INT32), like=UP, to=ir.DataType.FLOAT)
    e.instead_of(UP, e.add("Mul", real, np.full(768, 6e-5, np.float32)))


def scale_of_another_row(e: Editor) -> None:
    """Dequantised by the scales of the hidden states."""
    stored, _ = codes(e, rows_of(e, UP))
    multiplied(e, UP, stored, codes(e, rows_of(e, LOW_RANK))[1])


def from_minus_127(e: Editor) -> None:
    multiplied(e, UP, *codes(e, rows_of(e, UP), lowest=-100.0))


def one_down_projection(e: Editor) -> None:
    multiplied(e, LOW_RANK, *codes(e, rows_of(e, LOW_RANK)))
    partial(e)


def down_projections_alone(e: Editor) -> None:
    for result in (LOW_RANK, KEY):
        multiplied(e, result, *codes(e, rows_of(e, result)))


MISSED: dict[str, tuple[Edit, str]] = {
    "one scale for all rows": (one_scale_for_all, "quantisation-unsupported"),
    "dequantised by other scales": (scale_of_another_row, "quantisation-unsupported"),
    "codes from -100": (from_minus_127, "quantisation-unsupported"),
    "one of both down projections": (one_down_projection, "quantisation-differs"),
    "down projections without the up projection": (down_projections_alone, "quantisation-unsupported"),
}


@pytest.mark.parametrize(("edit", "code"), MISSED.values(), ids=MISSED)
def test_what_no_scenario_computes_is_missed(corpus: Corpus, edit: Edit, code: str) -> None:
    report = fuse(edited(corpus(INTERLEAVED), edit), validate="none")
    assert report.counts == {}
    assert code in {missed.code for missed in report.missed}
