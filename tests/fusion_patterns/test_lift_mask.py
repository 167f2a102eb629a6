"""Masks: what is visible, causal, selected, guarded, and what of that can be proved."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.mask import (
    CausalMask,
    EmptyRowGuard,
    Selection,
    recognise_additive,
    recognise_causal,
    recognise_guard,
    recognise_selection,
)
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

LOWEST = float(np.finfo(np.float32).min)
ADDITIVE = {
    "Mul(Cast(Not))": "h = Not(v) f = Cast<to=1>(h) y = Mul(f, low)",
    "mirrored": "h = Not(v) f = Cast<to=1>(h) y = Mul(low, f)",
    "Where": "y = Where(v, zero, low)",
    "Where, infinity": "y = Where(v, zero, inf)",
}
NUMBERS = {"low": LOWEST, "zero": 0.0, "inf": -np.inf, "one": 1.0, "mild": -1000.0, "positive": 1e9}


@pytest.mark.parametrize("body", ADDITIVE.values(), ids=ADDITIVE)
def test_additive(body: str) -> None:
    model = graph(body, "y", v="bool[2,1,5,7]", **NUMBERS)
    visible = recognise_additive(value(model, "y"), Facts())
    assert visible is not None
    assert visible.name == "v"
    shown = np.random.default_rng(0).random((2, 1, 5, 7)) > 0.5
    added = Run(model, {"v": shown}).of(value(model, "y"))
    assert np.array_equal(added == 0, shown)
    assert np.all(added[~shown] <= -65504)


NOT_ADDITIVE = {
    "not inverted": "f = Cast<to=1>(v) y = Mul(f, low)",
    "mild": "h = Not(v) f = Cast<to=1>(h) y = Mul(f, mild)",
    "positive": "h = Not(v) f = Cast<to=1>(h) y = Mul(f, positive)",
    "branches exchanged": "y = Where(v, low, zero)",
    "visible ones shifted": "y = Where(v, one, low)",
    "mild Where": "y = Where(v, zero, mild)",
    "other": "y = Cast<to=1>(v)",
}


@pytest.mark.parametrize("body", NOT_ADDITIVE.values(), ids=NOT_ADDITIVE)
def test_other_additions(body: str) -> None:
    model = graph(body, "y", v="bool[2,1,5,7]", **NUMBERS)
    assert recognise_additive(value(model, "y"), Facts()) is None


SIZES = """
ss = Shape<start=1, end=2>(x) s = Squeeze(ss) ps = Shape<start=1, end=2>(past) p = Squeeze(ps) t = Add(p, s)
"""
KEYS = "kr = Range(zero, t, one) k1 = Unsqueeze(kr, i0) k2 = Unsqueeze(k1, i0) k = Unsqueeze(k2, i0)"
QUERIES = "qr = Range(zero, s, one) qp = Add(qr, p) q1 = Unsqueeze(qp, i1) q2 = Unsqueeze(q1, i0) q = Unsqueeze(q2, i0)"
BASE = SIZES + KEYS + QUERIES
INTS = {
    "zero": 0,
    "one": 1,
    "two": 2,
    "i0": [0],
    "i1": [1],
    "i2": [2],
    "first": 0,
    "int_max": [2**63 - 1],
    "last": [-1],
}
INPUTS = {"x": "float[B,S,4]", "past": "float[B,P,4]"}
FEEDS = normal(x=(2, 5, 4), past=(2, 3, 4))
CAUSAL = {
    "LessOrEqual": (BASE + "y = LessOrEqual(k, q)", 0),
    "GreaterOrEqual": (BASE + "y = GreaterOrEqual(q, k)", 0),
    "Less": (BASE + "y = Less(k, q)", -1),
    "Greater": (BASE + "y = Greater(q, k)", -1),
    "Less of one later": (BASE.replace("qp = Add(qr, p)", "pp = Add(p, one) qp = Add(pp, qr)") + "y = Less(k, q)", 0),
    "two too many": (BASE.replace("qp = Add(qr, p)", "pp = Add(p, two) qp = Add(pp, qr)") + "y = LessOrEqual(k, q)", 2),
    "keys from one on": (
        BASE.replace("kr = Range(zero, t, one)", "tt = Add(t, one) kr = Range(one, tt, one)") + "y = LessOrEqual(k, q)",
        -1,
    ),
    "start of the range": (
        BASE.replace("qr = Range(zero, s, one) qp = Add(qr, p)", "qp = Range(p, t, one)") + "y = LessOrEqual(k, q)",
        0,
    ),
    "expanded": (
        BASE
        + "c = LessOrEqual(k, q) bs = Shape<end=1>(x) sh = Concat<axis=0>(bs, i1, ss, tt) y = Expand(c, sh)".replace(
            "tt", "ts"
        ).replace("sh =", "ts = Reshape(t, last) sh ="),
        0,
    ),
    "without the head axis": (BASE + "c = LessOrEqual(k, q) y = Squeeze(c, i1)", 0),
    "head picked": (BASE + "c = LessOrEqual(k, q) y = Gather<axis=1>(c, first)", 0),
}


@pytest.mark.parametrize(("body", "shift"), CAUSAL.values(), ids=CAUSAL)
def test_causal(body: str, shift: int) -> None:
    model = graph(body, "y", **INPUTS, **INTS)
    causal = recognise_causal(value(model, "y"), Facts())
    assert isinstance(causal, CausalMask), causal
    run = Run(model, FEEDS)
    assert run.size(causal.offset) == 3 + shift
    assert_true(causal, value(model, "y"), run)


def test_one_query() -> None:
    """A decode step: the only query's position is the number of cached tokens."""
    body = (
        SIZES.replace("t = Add(p, s)", "t = Add(p, one)")
        + KEYS
        + "qp = Add(i0, p) q = Unsqueeze(qp, i3) y = LessOrEqual(k, q)"
    )
    model = graph(body, "y", **INPUTS, **INTS, i3=[0, 1, 3])
    causal = recognise_causal(value(model, "y"), Facts())
    assert isinstance(causal, CausalMask)
    run = Run(model, FEEDS)
    assert (run.size(causal.offset), run.size(causal.queries), run.size(causal.keys)) == (3, 1, 4)


def test_constant_positions() -> None:
    model = graph("y = LessOrEqual(k, q)", "y", k=np.arange(7)[None], q=np.arange(2, 7)[:, None])
    causal = recognise_causal(value(model, "y"), Facts())
    assert causal == CausalMask(2, 5, 7)
    assert_true(causal, value(model, "y"), Run(model, {}))


NOT_CAUSAL = {
    "keys after queries": BASE + "y = GreaterOrEqual(k, q)",
    "exchanged": BASE + "y = LessOrEqual(q, k)",
    "keys along the queries": BASE.replace("k1 = Unsqueeze(kr, i0)", "k1 = Unsqueeze(kr, i1)")
    + "y = LessOrEqual(k, q)",
    "steps of two": BASE.replace("Range(zero, t, one)", "Range(zero, t, two)") + "y = LessOrEqual(k, q)",
    "negated": BASE + "c = LessOrEqual(k, q) y = Not(c)",
    "equal": BASE + "y = Equal(k, q)",
    "and more": BASE + "c = LessOrEqual(k, q) y = And(c, pad)",
    "positions from outside": KEYS.replace("Range(zero, t, one)", "Range(zero, n, one)") + "y = LessOrEqual(k, given)",
    "a query picked": BASE + "c = LessOrEqual(k, q) y = Gather<axis=2>(c, first)",
    "a graph input": "y = Identity(pad)",
}


@pytest.mark.parametrize("body", NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_not_causal(body: str) -> None:
    more = {"pad": "bool[B,1,1,T]", "n": "int64[]", "given": "int64[B,1,S,1]"}
    model = graph(body, "y", **INPUTS, **INTS, **more)
    assert isinstance(recognise_causal(value(model, "y"), Facts()), Miss)


@pytest.mark.parametrize(
    "constant",
    [np.array([[0, 2, 1]]), np.array([[0, 1], [1, 2]]), np.array([[0.0, 1.0]])],
    ids=["unordered", "table", "floats"],
)
def test_constants_that_are_no_positions(constant: np.ndarray) -> None:
    model = graph("y = LessOrEqual(k, q)", "y", k=constant, q=constant[:, :1])
    assert isinstance(recognise_causal(value(model, "y"), Facts()), Miss)


GUARD = "f = Cast<to=1>(v) n = ReduceSum<keepdims=1>(f, last) e = Less(n, one_f) y = Where(e, zero_f, x)"
GUARDS = {
    "guard": (GUARD, True),
    "axis from the front": (GUARD.replace("last", "third"), True),
    "over the queries": (GUARD.replace("(f, last)", "(f, i2)"), False),
    "fewer than two": (GUARD.replace("one_f", "two_f"), False),
    "another fill": (GUARD.replace("zero_f, x", "one_f, x"), False),
    "branches exchanged": (GUARD.replace("zero_f, x", "x, zero_f"), False),
    "more than": (GUARD.replace("Less", "Greater"), False),
    "maximum": (GUARD.replace("ReduceSum", "ReduceMax"), False),
    "read elsewhere": (GUARD + "z = Relu(x)", False),
}


@pytest.mark.parametrize(("body", "is_guard"), GUARDS.values(), ids=GUARDS)
def test_guards(body: str, is_guard: bool) -> None:
    numbers = {"one_f": 1.0, "two_f": 2.0, "zero_f": 0.0, "third": [3]}
    model = graph("x = Relu(a)" + body, "y", a="float[2,1,5,7]", v="bool[2,1,5,7]", **INTS, **numbers)
    guard = recognise_guard(value(model, "x"), Facts())
    assert isinstance(guard, EmptyRowGuard) == is_guard
    if guard is not None:
        shown = np.random.default_rng(0).random((2, 1, 5, 7)) > 0.8
        shown[0, 0, 2] = False
        assert_true(guard, guard.out, Run(model, {**normal(a=(2, 1, 5, 7)), "v": shown}))


SCORES = "c3 = Squeeze(c, i1) hidden = Not(c3) masked = Where(hidden, inf, scores)"
TOP = "best, chosen = TopK<axis=-1, largest=1, sorted=1>(masked, three)"
SELECTED = """
full = Shape(scores) ones_f = Expand(one_f, full) ones = Cast<to=9>(ones_f)
cut = Shape(chosen) none_f = ConstantOfShape(cut) none = Cast<to=9>(none_f)
left_out = ScatterElements<axis=-1>(ones, chosen, none) four = Unsqueeze(left_out, i1) picked = Not(four)
"""
AND = "y = And(e, picked) no = Not(y) nf = Cast<to=1>(no) m = Mul(nf, low)"
EXPANDED = """
c = LessOrEqual(k, q) bs = Shape<end=1>(x) ts = Reshape(t, last) sh = Concat<axis=0>(bs, i1, ss, ts) e = Expand(c, sh)
"""
SELECTION = BASE + EXPANDED + SCORES + TOP + SELECTED + AND
SELECTIONS = {
    "selection": SELECTION,
    "mirrored": SELECTION.replace("And(e, picked)", "And(picked, e)"),
    "written, not left out": SELECTION.replace("ones_f = Expand(one_f, full)", "ones_f = Expand(zero_f, full)")
    .replace("none_f = ConstantOfShape(cut)", "none_f = Expand(one_f, cut)")
    .replace("picked = Not(four)", "picked = Identity(four)"),
    "visible Where": SELECTION.replace("masked = Where(hidden, inf, scores)", "masked = Where(c3, scores, inf)"),
    "added mask": SELECTION.replace(
        "masked = Where(hidden, inf, scores)", "hf = Cast<to=1>(hidden) hm = Mul(hf, low) masked = Add(scores, hm)"
    ),
    "32-bit indices": SELECTION.replace(
        "ScatterElements<axis=-1>(ones, chosen, none)", "ScatterElements<axis=-1>(ones, back, none)"
    ).replace("full = Shape", "narrow = Cast<to=6>(chosen) back = Cast<to=7>(narrow) full = Shape"),
}
SELECTION_INPUTS = {"x": "float[B,S,4]", "past": "float[B,P,4]", "scores": "float[B,S,T]"}
SELECTION_NUMBERS = {"inf": -np.inf, "three": [3], "one_f": 1.0, "zero_f": 0.0, "low": LOWEST, "mild": -1.0}


def selection(body: str) -> Selection | Miss | None:
    model = graph(body, "m", **SELECTION_INPUTS, **INTS, **SELECTION_NUMBERS)
    result = recognise_selection(value(model, "m"), Facts())
    if isinstance(result, Selection):
        feeds = {
            **normal(x=(2, 5, 4), past=(2, 3, 4)),
            "scores": np.random.default_rng(3).permutation(80).astype(np.float32).reshape(2, 5, 8),
        }
        assert_true(result, value(model, "m"), Run(model, feeds))
    return result


@pytest.mark.parametrize("body", SELECTIONS.values(), ids=SELECTIONS)
def test_selections(body: str) -> None:
    result = selection(body)
    assert isinstance(result, Selection), result
    assert result.scores.name == "scores"


UNSORTED = {
    "not sorted": SELECTION.replace("sorted=1", "sorted=0"),
    "smallest": SELECTION.replace("largest=1", "largest=0"),
    "over the queries": SELECTION.replace("TopK<axis=-1", "TopK<axis=1"),
    "scores not masked": SELECTION.replace("(masked, three)", "(scores, three)"),
    "masked mildly": SELECTION.replace("Where(hidden, inf", "Where(hidden, mild"),
    "masked with zero": SELECTION.replace("Where(hidden, inf", "Where(hidden, zero_f"),
    "visible ones masked": SELECTION.replace("Where(hidden, inf, scores)", "Where(hidden, scores, inf)"),
    "masked by another mask": SELECTION.replace("c3 = Squeeze(c, i1)", "other = Less(k, q) c3 = Squeeze(other, i1)"),
    "indices from outside": SELECTION.replace("(ones, chosen, none)", "(ones, arg, none)")
    .replace("full = Shape", "arg = ArgMax<axis=-1, keepdims=1>(scores) full = Shape")
    .replace("cut = Shape(chosen)", "cut = Shape(arg)"),
}


@pytest.mark.parametrize("body", UNSORTED.values(), ids=UNSORTED)
def test_selections_that_are_not_sorted(body: str) -> None:
    result = selection(body)
    assert isinstance(result, Miss)
    assert result.code == "selection-unsorted"


def test_a_selection_under_another_mask() -> None:
    result = selection(
        SELECTION.replace("And(e, picked)", "And(other, picked)").replace("y = And", "other = Not(e) y = And")
    )
    assert isinstance(result, Miss)
    assert result.code == "selection-not-causal"


NO_SELECTION = {
    "what is left out": SELECTION.replace("And(e, picked)", "And(e, four)"),
    "either": SELECTION.replace("y = And", "y = Or"),
    "along the queries": SELECTION.replace("ScatterElements<axis=-1>", "ScatterElements<axis=1>"),
    "nothing written": SELECTION.replace("none_f = ConstantOfShape(cut)", "none_f = Expand(one_f, cut)"),
    "selection for every head alike": SELECTION.replace(
        "four = Unsqueeze(left_out, i1) picked = Not(four)", "picked = Not(left_out)"
    ),
    "heads for batches": SELECTION.replace("Unsqueeze(left_out, i1)", "Unsqueeze(left_out, i0)"),
    "no selection": BASE + "y = LessOrEqual(k, q)" + AND[AND.index(" no =") :],
}


@pytest.mark.parametrize("body", NO_SELECTION.values(), ids=NO_SELECTION)
def test_other_conjunctions(body: str) -> None:
    model = graph(
        body,
        "m",
        **{**SELECTION_INPUTS, "x": "float[5,5,4]", "past": "float[5,3,4]", "scores": "float[5,5,8]"},
        **INTS,
        **SELECTION_NUMBERS,
    )
    assert not isinstance(recognise_selection(value(model, "m"), Facts()), Selection)
