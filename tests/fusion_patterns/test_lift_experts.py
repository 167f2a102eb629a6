"""Products per expert over rows sorted by expert, and the counts that cut the rows."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.experts import GroupedProduct, recognise_counts, recognise_grouped_product
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

EXPERTS, WIDTH, OUT = 3, 4, 5
STACK = np.random.default_rng(0).standard_normal((EXPERTS, WIDTH, OUT), dtype=np.float32)
CONSTANTS = {
    "zero": 0,
    "one": 1,
    "two": 2,
    "front": [0],
    "ones": [1, 1, 1],
    "stack": STACK,
    **{f"w{e}": STACK[e] for e in range(3)},
}
ENDS = "e0, e1, e2 = Split<axis=0, num_outputs=3>(ends) " + " ".join(f"t{e} = Squeeze(e{e}, front)" for e in range(3))
SPANS = "r0 = Range(zero, t0, one) r1 = Range(t0, t1, one) r2 = Range(t1, t2, one)"
ROWS = "x0 = Gather<axis=0>(x, r0) x1 = Gather<axis=0>(x, r1) x2 = Gather<axis=0>(x, r2)"
WEIGHTS = "s0, s1, s2 = Split<axis=0, num_outputs=3>(stack) " + " ".join(
    f"m{e} = Squeeze(s{e}, front)" for e in range(3)
)
PRODUCTS = "p0 = MatMul(x0, m0) p1 = MatMul(x1, m1) p2 = MatMul(x2, m2)"
JOIN = "y = Concat<axis=0>(p0, p1, p2)"
GROUPED = "\n".join((ENDS, SPANS, ROWS, WEIGHTS, PRODUCTS, JOIN))
INPUTS = {"x": "float[M,4]", "ends": "int64[3]"}


def swap(body: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    return body


def recognise(body: str, **values: object) -> GroupedProduct | Miss:
    model = graph(body, "y", **{**INPUTS, **CONSTANTS, **values})
    result = recognise_grouped_product(value(model, "x"), Facts())
    if isinstance(result, GroupedProduct):
        for ends in ([2, 2, 9], [0, 4, 9], [9, 9, 9]):
            assert_true(result, result.out, Run(model, {**normal(x=(9, 4)), "ends": np.array(ends)}))
    return result


SPELLINGS = {
    "stack": (GROUPED, (0, 1, 2)),
    "stack in another order": (
        swap(GROUPED, ("MatMul(x0, m0)", "MatMul(x0, m2)"), ("MatMul(x2, m2)", "MatMul(x2, m0)")),
        (2, 1, 0),
    ),
    "one expert for all": (
        swap(GROUPED, ("MatMul(x1, m1)", "MatMul(x1, m0)"), ("MatMul(x2, m2)", "MatMul(x2, m0)")),
        (0, 0, 0),
    ),
    "weights of their own": (
        swap(GROUPED, (WEIGHTS, ""), ("m0)", "w0)"), ("m1)", "w1)"), ("m2)", "w2)")),
        (None, None, None),
    ),
    "sizes given": (swap(GROUPED, ("Split<axis=0, num_outputs=3>(ends)", "Split<axis=0>(ends, ones)")), (0, 1, 2)),
    "axis -2": (swap(GROUPED, ("Concat<axis=0>", "Concat<axis=-2>")), (0, 1, 2)),
    "rows by GatherND": (
        swap(GROUPED, ("x1 = Gather<axis=0>(x, r1)", "u1 = Unsqueeze(r1, minus) x1 = GatherND(x, u1)")),
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize(("body", "order"), SPELLINGS.values(), ids=SPELLINGS)
def test_grouped_products(body: str, order: tuple) -> None:
    product = recognise(body, minus=[-1])
    assert isinstance(product, GroupedProduct)
    assert tuple(weight.index for weight in product.weights) == order
    assert (product.rows.name, product.ends.name, product.out.name) == ("x", "ends", "y")


OTHERS = {
    "an expert's rows twice": swap(GROUPED, ("MatMul(x2, m2)", "MatMul(x1, m2)")),
    "products in another order": swap(GROUPED, ("(p0, p1, p2)", "(p1, p0, p2)")),
    "an expert left out": swap(GROUPED, ("(p0, p1, p2)", "(p0, p1)")),
    "starts at one": swap(GROUPED, ("Range(zero, t0, one)", "Range(one, t0, one)")),
    "a gap": swap(GROUPED, ("r2 = Range(t1, t2, one)", "q = Add(t1, one) r2 = Range(q, t2, one)")),
    "an overlap": swap(GROUPED, ("Range(t1, t2, one)", "Range(t0, t2, one)")),
    "ends exchanged": swap(GROUPED, ("Range(t0, t1, one)", "Range(t0, t2, one)")),
    "every second row": swap(GROUPED, ("Range(t0, t1, one)", "Range(t0, t1, two)")),
    "rows of another value": swap(GROUPED, ("x1 = Gather<axis=0>(x, r1)", "x1 = Gather<axis=0>(other, r1)")),
    "columns": swap(GROUPED, ("Concat<axis=0>", "Concat<axis=1>")),
    "a computed weight": swap(GROUPED, ("p1 = MatMul(x1, m1)", "v = Add(m1, m1) p1 = MatMul(x1, v)")),
    "a weight from outside": swap(GROUPED, ("MatMul(x1, m1)", "MatMul(x1, given)")),
    "an activation in between": swap(
        GROUPED, ("y = Concat", "a1 = Relu(p1) y = Concat"), ("(p0, p1, p2)", "(p0, a1, p2)")
    ),
    "ends two by two": swap(
        GROUPED, ("e0, e1, e2 = Split<axis=0, num_outputs=3>(ends)", "e0, e1, e2 = Split<axis=0, num_outputs=3>(six)")
    )
    .replace("Squeeze(e0, front)", "ReduceMax<keepdims=0>(e0)")
    .replace("Squeeze(e1, front)", "ReduceMax<keepdims=0>(e1)")
    .replace("Squeeze(e2, front)", "ReduceMax<keepdims=0>(e2)"),
    "ends of two splits": swap(
        GROUPED, ("t2 = Squeeze(e2, front)", "f0, f1, f2 = Split<axis=0, num_outputs=3>(ends) t2 = Squeeze(f2, front)")
    ),
    "not gathered": "y = MatMul(x, w0)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_other_products_are_refused(body: str) -> None:
    more = {"other": "float[M,4]", "given": "float[4,5]", "six": "int64[6]"}
    model = graph(body, "y", **{**INPUTS, **CONSTANTS, **more, "x": "float[9,4]", "other": "float[9,4]"})
    result = recognise_grouped_product(value(model, "x"), Facts())
    assert isinstance(result, Miss)


IDS = np.array([0, 2, 2, 1, 0, 2, 2])
HISTOGRAM = (
    'sh = Shape(index) adds = Expand(one_f, sh) n = ScatterElements<axis=0, reduction="add">(empty, index, adds)'
)
SUMS = "c = Cast<to=6>(n) s = CumSum(c, zero) y = Cast<to=7>(s)"
BINS = "f = Cast<to=1>(ids) b = Div(f, bin) j = Cast<to=7>(b) index = Clip(j, zero, two)"
COUNTS = {
    "of the ids": ("index = Identity(ids)" + HISTOGRAM + SUMS, 1.0, True),
    "by bins of 2/3": (BINS + HISTOGRAM + SUMS, 2 / 3, True),
    "by bins of 0.9": (BINS + HISTOGRAM + SUMS, 0.9, True),
    "in integers": (
        "index = Identity(ids)" + HISTOGRAM.replace("one_f", "one").replace("(empty,", "(empty_i,") + SUMS,
        1.0,
        True,
    ),
    "by wide bins": (BINS + HISTOGRAM + SUMS, 2.0, False),
    "by narrow bins": (BINS + HISTOGRAM + SUMS, 0.5, False),
    "clipped": (BINS.replace("zero, two", "zero, one") + HISTOGRAM + SUMS, 2 / 3, False),
    "shifted": ("index = Sub(two, ids)" + HISTOGRAM + SUMS, 1.0, False),
    "of other ids": ("index = Identity(others)" + HISTOGRAM + SUMS, 1.0, False),
    "squared": ("index = Mul(ids, ids)" + HISTOGRAM + SUMS, 1.0, False),
    "exclusive": ("index = Identity(ids)" + HISTOGRAM + SUMS.replace("CumSum", "CumSum<exclusive=1>"), 1.0, False),
    "from the end": ("index = Identity(ids)" + HISTOGRAM + SUMS.replace("CumSum", "CumSum<reverse=1>"), 1.0, False),
    "not summed up": ("index = Identity(ids)" + HISTOGRAM + "y = Cast<to=7>(n)", 1.0, False),
    "of twos": ("index = Identity(ids)" + HISTOGRAM.replace("one_f", "two_f") + SUMS, 1.0, False),
    "into ones": ("index = Identity(ids)" + HISTOGRAM.replace("(empty,", "(filled,") + SUMS, 1.0, False),
    "largest": ("index = Identity(ids)" + HISTOGRAM.replace('"add"', '"max"') + SUMS, 1.0, False),
    "of one expert more": ("index = Identity(ids)" + HISTOGRAM.replace("(empty,", "(empty_4,") + SUMS, 1.0, False),
}


@pytest.mark.parametrize(("body", "width", "is_count"), COUNTS.values(), ids=COUNTS)
def test_counts(body: str, width: float, is_count: bool) -> None:
    zeros = {
        "empty": np.zeros(3, np.float32),
        "empty_4": np.zeros(4, np.float32),
        "filled": np.ones(3, np.float32),
        "empty_i": np.zeros(3, np.int64),
    }
    numbers = {"zero": 0, "one": 1, "two": 2, "one_f": 1.0, "two_f": 2.0, "bin": width}
    model = graph(body, "y", ids="int64[M]", others="int64[M]", **zeros, **numbers)
    missed = recognise_counts(value(model, "y"), (value(model, "ids"),), EXPERTS, Facts())
    assert (missed is None) == is_count, missed
    if missed is None:
        ends = Run(model, {"ids": IDS, "others": IDS}).of(value(model, "y"))
        np.testing.assert_array_equal(ends, np.cumsum(np.bincount(IDS, minlength=EXPERTS)))
    else:
        assert missed.code == "expert-count-unknown"
