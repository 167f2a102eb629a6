"""Tokens sorted by expert, whatever follows: every value that is read elsewhere keeps what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns import fuse
from tests.fusion_patterns.moe_blocks import MOE, ROUTER, block, codes, domain_node, fused, swap

FLAT = "keys = Reshape(ids, minus)"
SORT = (
    "ks = Shape(keys) sorted_keys, order = TopK<axis=-1, largest=0, sorted=1>(keys, ks)"
    " n = Squeeze(ks) all = Range(zero_scalar, n, one_scalar)"
)
TOKENS = "token = Div(order, two) rows = Gather<axis=0>(x, token)"
INVERSE = (
    "os = Shape(order) buffer = Expand(zero_scalar, os) col = Unsqueeze(order, minus)"
    " inverse = ScatterND(buffer, col, all)"
)
COUNTS = 'ones = Expand(one_scalar, ks) counts = ScatterElements<axis=0, reduction="add">(empty, keys, ones)'
ENDS = "ends = CumSum(counts, zero_scalar)"
SORTED = f"{FLAT} {SORT} {TOKENS}"
GIVEN: dict[str, Any] = {
    "ids": "int64[N,2]",
    "x": "float[N,6]",
    "empty": [0, 0, 0, 0],
    "numbers": [[0, 1, 2, 3]],
    "float_two": 2.0,
    "axis_0": [0],
    "four_scalar": 4,
    "off_on": [0, 1],
    "low": -128.0,
    "high": 127.0,
    "levels": 127.0,
    "factor": 12.0,
    "shift": 3.0,
    "two_of": [2, 2],
}
IDS = np.array([[3, 2], [2, 1], [1, 0], [0, 1], [0, 3], [2, 3], [2, 2]])


def feeds(kind: type = np.float32) -> dict[str, np.ndarray]:
    return {"ids": IDS, "x": np.random.default_rng(0).standard_normal((len(IDS), 6)).astype(kind)}


# name -> (body, outputs, row_idx_type, expert_tokens_num_type)
FORMS = {
    "rows and counts": (f"{SORTED} {COUNTS}", "rows counts", None, 1),
    "inverse": (f"{SORTED} {INVERSE} {COUNTS}", "rows inverse counts", 0, 1),
    "order": (f"{SORTED} {COUNTS}", "rows order counts", 1, 1),
    "order and inverse": (f"{SORTED} {INVERSE} {COUNTS}", "rows inverse order counts", 1, 1),
    "prefix sums": (f"{SORTED} {INVERSE} {COUNTS} {ENDS}", "rows inverse ends", 0, 0),
    "counts and prefix sums": (f"{SORTED} {COUNTS} {ENDS}", "rows counts ends", None, 1),
    "sorted keys": (f"{SORTED} {COUNTS}", "rows sorted_keys counts", None, 1),
    "order used otherwise": (
        f"{SORTED} {INVERSE} {COUNTS} w = Gather<axis=0>(keys, order)",
        "rows inverse w counts",
        1,
        1,
    ),
    "int32 results": (
        f"{SORTED} {INVERSE} {COUNTS} i32 = Cast<to=6>(inverse) c32 = Cast<to=6>(counts)"
        " e32 = CumSum(c32, zero_scalar)",
        "rows i32 e32",
        0,
        0,
    ),
    "inverse by a second sort": (
        f"{SORTED} {COUNTS} other, inverse = TopK<axis=-1, largest=0, sorted=1>(order, ks)",
        "rows inverse counts",
        0,
        1,
    ),
    "inverse by ScatterElements": (
        swap(
            f"{SORTED} {INVERSE} {COUNTS}",
            (
                "col = Unsqueeze(order, minus) inverse = ScatterND(buffer, col, all)",
                "inverse = ScatterElements<axis=0>(buffer, order, all)",
            ),
        ),
        "rows inverse counts",
        0,
        1,
    ),
    "rows repeated first": (
        swap(
            SORTED,
            (
                TOKENS,
                "u = Unsqueeze(x, one) e = Expand(u, spread) r = Reshape(e, shape_of_rows)"
                " rows = Gather<axis=0>(r, order)",
            ),
        )
        + COUNTS,
        "rows counts",
        None,
        1,
    ),
    "division by floats": (
        swap(
            SORTED,
            (
                "token = Div(order, two)",
                "of = Cast<to=1>(order) od = Div(of, float_two) fl = Floor(od) token = Cast<to=7>(fl)",
            ),
        )
        + COUNTS,
        "rows counts",
        None,
        1,
    ),
    "division by remainder": (
        swap(SORTED, ("token = Div(order, two)", "re = Mod(order, two) wh = Sub(order, re) token = Div(wh, two)"))
        + COUNTS,
        "rows counts",
        None,
        1,
    ),
    "counts by comparison": (
        f"{SORTED} kc = Unsqueeze(keys, minus) eq = Equal(kc, numbers) ei = Cast<to=7>(eq)"
        " counts = ReduceSum<keepdims=0>(ei, axis_0)",
        "rows counts",
        None,
        1,
    ),
    "counts by one-hot": (
        f"{SORTED} oh = OneHot<axis=-1>(keys, four_scalar, off_on) counts = ReduceSum<keepdims=0>(oh, axis_0)",
        "rows counts",
        None,
        1,
    ),
    "counts of sorted keys, in floats": (
        f"{SORTED} ones = Expand(one_scalar, ks) fones = Cast<to=1>(ones)"
        ' counts = ScatterElements<axis=0, reduction="add">(fempty, sorted_keys, fones)',
        "rows counts",
        None,
        1,
    ),
}
VALUES = GIVEN | {"shape_of_rows": [-1, 6], "fempty": np.zeros(4, np.float32)}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    body, outputs, positions, counted = FORMS[name]
    model, report = fused(lambda: block(body, outputs, **VALUES), feeds())
    assert (report.counts, codes(report)) == ({MOE: 1}, [])
    assert report.fused[0].assumed == ["expert-ids-in-range"]
    given = {attribute.name: attribute.value for attribute in domain_node(model).attributes.values()}
    assert given["expert_num"] == 4
    assert given.get("row_idx_type", 0) == (positions or 0)
    assert given.get("expert_tokens_num_type", 0) == counted
    assert [v.name for v in model.graph.outputs] == outputs.split()
    sorts = sum(node.op_type == "TopK" for node in model.graph)
    assert sorts == (1 if name == "sorted keys" else 0)
    again = fuse(model, validate="none")
    assert again.counts == {}


@pytest.mark.parametrize("name", ["order and inverse", "prefix sums", "counts by comparison"])
def test_validation_agrees(name: str) -> None:
    body, outputs, _, _ = FORMS[name]
    report = fuse(block(body, outputs, **VALUES), validate="all")
    assert (report.counts, report.fused[0].validated) == ({MOE: 1}, 0)


def test_more_tokens_than_ids() -> None:
    """Tokens behind those that have ids are never gathered."""
    body, outputs, _, _ = FORMS["inverse"]
    longer = feeds() | {"x": np.random.default_rng(0).standard_normal((len(IDS) + 3, 6)).astype(np.float32)}
    _, report = fused(lambda: block(body, outputs, **VALUES | {"x": "float[M,6]"}), longer)
    assert report.counts == {MOE: 1}


def test_the_router_says_how_many_experts_there_are() -> None:
    body = f"{ROUTER} {SORTED}"
    values = {name: v for name, v in VALUES.items() if name not in ("ids",)}
    model, report = fused(lambda: block(body, "rows order", **values), {"x": feeds()["x"]})
    assert (report.counts, report.fused[0].assumed) == ({MOE: 1}, [])
    assert domain_node(model).attributes["expert_num"].value == 4


def test_an_unknown_number_of_experts() -> None:
    report = fuse(block(SORTED, "rows order", **VALUES), validate="none")
    assert (report.counts, codes(report)) == ({}, ["expert-count-unknown"])


def test_a_histogram_of_fewer_experts_than_the_router() -> None:
    router = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    values = {name: v for name, v in VALUES.items() if name != "ids"}
    report = fuse(block(f"{ROUTER} {SORTED} {COUNTS}", "rows counts", router=router, **values), validate="none")
    assert (report.counts, codes(report)) == ({}, ["experts-missing"])


INTEGER_TOKENS = "int64[N,6]"
TWINS: dict[str, tuple[str, str, str | None]] = {
    "sorted downwards": (swap(SORTED, ("largest=0", "largest=1")) + COUNTS, "rows counts", None),
    "not all sorted": (
        swap(
            SORTED, ("TopK<axis=-1, largest=0, sorted=1>(keys, ks)", "TopK<axis=-1, largest=0, sorted=1>(keys, two)")
        ).replace(" n = Squeeze(ks) all = Range(zero_scalar, n, one_scalar)", "")
        + COUNTS,
        "rows counts",
        None,
    ),
    "another divisor": (
        swap(SORTED, ("Div(order, two)", "Div(order, three)")) + COUNTS,
        "rows counts",
        "permutation-unrecognised",
    ),
    "order itself": (
        swap(
            SORTED,
            ("Gather<axis=0>(x, token)", "Gather<axis=0>(x2, order)"),
            ("rows =", "x2 = Concat<axis=0>(x, x) rows ="),
        )
        + COUNTS,
        "rows counts",
        "permutation-unrecognised",
    ),
    "remainder of the order": (
        swap(SORTED, ("Div(order, two)", "Mod(order, two)")) + COUNTS,
        "rows counts",
        "permutation-unrecognised",
    ),
    "order of other keys": (
        swap(SORTED, (FLAT, "turned = Transpose(ids) keys = Reshape(turned, minus)")) + COUNTS,
        "rows counts",
        "permutation-unrecognised",
    ),
    "the order as its inverse": (
        swap(
            f"{SORTED} {INVERSE} {COUNTS}",
            ("inverse = ScatterND(buffer, col, all)", "inverse = ScatterND(all, col, order)"),
        ),
        "rows inverse counts",
        None,
    ),
    "an inverse in reverse": (
        swap(
            f"{SORTED} {INVERSE} {COUNTS}",
            (
                "inverse = ScatterND(buffer, col, all)",
                "last = Sub(n, one_scalar) back = Sub(last, all) inverse = ScatterND(buffer, col, back)",
            ),
        ),
        "rows inverse counts",
        None,
    ),
    "an inverse that adds": (
        swap(
            f"{SORTED} {INVERSE} {COUNTS}",
            ("inverse = ScatterND(buffer", 'inverse = ScatterND<reduction="add">(buffer'),
        ),
        "rows inverse counts",
        None,
    ),
    "counted twice": (
        f"{SORTED} {swap(COUNTS, ('Expand(one_scalar, ks)', 'Expand(two_scalar, ks)'))}",
        "rows counts",
        "expert-count-unknown",
    ),
    "counted over other numbers": (
        f"{SORTED} {swap(COUNTS, ('(empty, keys, ones)', '(two_more, keys, ones)'))}",
        "rows counts",
        "expert-count-unknown",
    ),
    "exclusive prefix sums": (
        f"{SORTED} {COUNTS} {swap(ENDS, ('CumSum(', 'CumSum<exclusive=1>('))}",
        "rows ends",
        None,
    ),
    "suffix sums": (f"{SORTED} {COUNTS} {swap(ENDS, ('CumSum(', 'CumSum<reverse=1>('))}", "rows ends", None),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins(name: str) -> None:
    body, outputs, code = TWINS[name]
    _, report = fused(lambda: block(body, outputs, two_more=[2, 2, 2, 2], **VALUES), feeds())
    if code is not None:
        assert (report.counts, codes(report)) == ({}, [code])


# -------------------------------------------------------------------------------------------------------- quantisation

TO_INT8 = "rounded = Round(scaled) clipped = Clip(rounded, low, high) quantised = Cast<to=3>(clipped)"
STATIC = f"product = Mul(rows, factor) scaled = Add(product, shift) {TO_INT8}"
DYNAMIC = (
    "size = Abs(rows) most = ReduceMax<keepdims=1>(size, minus) scale = Div(most, levels)"
    f" scaled = Div(rows, scale) {TO_INT8}"
)
SMOOTH = DYNAMIC.replace("(rows", "(smoothed")
QUANTISED = {
    "static": (f"{SORTED} {COUNTS} {STATIC}", "quantised counts", 0),
    "static, operands exchanged": (
        swap(
            f"{SORTED} {COUNTS} {STATIC}",
            ("Mul(rows, factor)", "Mul(factor, rows)"),
            ("Add(product, shift)", "Add(shift, product)"),
        ),
        "quantised counts",
        0,
    ),
    "dynamic": (f"{SORTED} {INVERSE} {COUNTS} {DYNAMIC}", "quantised scale inverse counts", 1),
    "dynamic, scales as a vector": (
        f"{SORTED} {COUNTS} {DYNAMIC} flat = Squeeze(scale, minus)",
        "quantised flat order counts",
        1,
    ),
    "smoothed by expert": (
        f"{SORTED} {COUNTS} factors = Gather<axis=0>(smooth, sorted_keys) smoothed = Mul(rows, factors) {SMOOTH}",
        "quantised scale counts",
        1,
    ),
    "smoothed alike": (f"{SORTED} {COUNTS} smoothed = Mul(rows, smooth_row) {SMOOTH}", "quantised scale counts", 1),
    "rows are read as well": (f"{SORTED} {COUNTS} {STATIC}", "quantised rows counts", 0),
}
SMOOTH_FACTORS = np.random.default_rng(7).random((4, 6), dtype=np.float32) + np.float32(0.5)
FACTORS = VALUES | {"smooth": SMOOTH_FACTORS, "smooth_row": SMOOTH_FACTORS[0]}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised(name: str) -> None:
    body, outputs, mode = QUANTISED[name]
    model, report = fused(lambda: block(body, outputs, **FACTORS), feeds())
    assert (report.counts, codes(report)) == ({MOE: 1}, [])
    assert domain_node(model).attributes["quant_mode"].value == mode
    assert not any(node.op_type == "Round" for node in model.graph)


def test_quantised_with_scales_from_outside() -> None:
    body, outputs, _ = QUANTISED["static"]
    values = {name: v for name, v in FACTORS.items() if name not in ("factor", "shift")} | {
        "factor": "float[1]",
        "shift": "float[1]",
    }
    given = feeds() | {"factor": np.array([9], np.float32), "shift": np.array([-2], np.float32)}
    _, report = fused(lambda: block(body, outputs, **values), given)
    assert report.counts == {MOE: 1}
    assert fuse(block(body, outputs, **values), validate="all").counts == {MOE: 1}


def test_quantised_float16() -> None:
    body, outputs, _ = QUANTISED["dynamic"]
    half = {name: np.float16(v) for name, v in (("low", -128), ("high", 127), ("levels", 127))}
    values = FACTORS | {"x": "float16[N,6]"} | half
    report = fuse(block(body, outputs, **values), validate="none")
    assert report.counts == {MOE: 1}


NOT_QUANTISED = {
    "scale of other rows": (
        swap(f"{SORTED} {COUNTS} {DYNAMIC}", ("size = Abs(rows)", "d = Mul(rows, factor) size = Abs(d)")),
        "quantised counts",
    ),
    "another number of levels": (f"{SORTED} {COUNTS} {DYNAMIC.replace('levels', 'factor')}", "quantised counts"),
    "clipped otherwise": (f"{SORTED} {COUNTS} {STATIC.replace('low, high', 'shift, high')}", "quantised counts"),
    "a scale per column": (
        f"{SORTED} {COUNTS} {STATIC.replace('(rows, factor)', '(rows, smooth_row)')}",
        "quantised counts",
    ),
    "smoothed by unsorted ids": (
        f"{SORTED} {COUNTS} factors = Gather<axis=0>(smooth, keys) smoothed = Mul(rows, factors) {SMOOTH}",
        "quantised counts",
    ),
    "largest, not magnitude": (
        f"{SORTED} {COUNTS} {DYNAMIC.replace('size = Abs(rows)', 'size = Identity(rows)')}",
        "quantised counts",
    ),
    "largest of each column": (
        f"{SORTED} {COUNTS} {DYNAMIC.replace('(size, minus)', '(size, axis_0)')}",
        "quantised counts",
    ),
}


@pytest.mark.parametrize("name", NOT_QUANTISED)
def test_other_quantisations_stay(name: str) -> None:
    body, outputs = NOT_QUANTISED[name]
    model, report = fused(lambda: block(body, outputs, **FACTORS), feeds())
    assert report.counts == {MOE: 1}
    assert domain_node(model).attributes["quant_mode"].value == -1


def test_integer_rows_are_no_tokens() -> None:
    report = fuse(block(f"{SORTED} {COUNTS}", "rows counts", **VALUES | {"x": INTEGER_TOKENS}), validate="none")
    assert (report.counts, codes(report)) == ({}, ["dtype"])


def test_sorts_of_floats_are_no_candidates() -> None:
    body = SORT.replace("keys", "scores")
    report = fuse(block(body, "order", scores="float[M]", **VALUES), validate="none")
    assert (report.counts, codes(report)) == ({}, [])


def test_tokens_of_another_type() -> None:
    body, outputs, _, _ = FORMS["inverse"]
    model, report = fused(lambda: block(body, outputs, **VALUES | {"x": "float16[N,6]"}), feeds(np.float16))
    assert report.counts == {MOE: 1}
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT16
