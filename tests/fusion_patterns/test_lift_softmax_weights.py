"""Elements seen through views, weights as ratios of exponentials, statistics: what is claimed is computed."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.exponentials import Ratio, Term
from fusion_patterns.lift.indexed import Element, Entry, trace
from fusion_patterns.lift.softmax_weights import (
    LogSumExp,
    RowMax,
    SoftmaxSum,
    carries_exponential,
    recognise_statistic,
    recognise_weight,
)
from tests.fusion_patterns.graphs import Array, Run, graph, normal, value


def index_array(entry: Entry, shape: tuple[int, ...], run: Run) -> Array:
    """The index along one axis of an element's value, for every place of the shape it is expressed in."""
    if isinstance(entry, int):
        return np.full(shape, entry)
    places, total = np.indices(shape), np.zeros(shape, np.int64)
    for digit in entry:
        over = run.size(digit.over if isinstance(digit.over, int) else ir.SymbolicDim(digit.over))
        limit = -(-shape[digit.axis] // over) if digit.size is None else digit.size
        size = run.size(limit if isinstance(limit, int) else ir.SymbolicDim(limit))
        total = total * size + places[digit.axis] // over % size
    return total


def array_of(element: Element, shape: tuple[int, ...], run: Run) -> Array:
    return run.of(element.value)[tuple(index_array(entry, shape, run) for entry in element.index)].reshape(shape)


def term_of(term: Term, shape: tuple[int, ...], run: Run) -> Array:
    product = np.ones(shape)
    for element, power in term.factors:
        product = product * array_of(element, shape, run).astype(float) ** power
    return product * np.exp(sum(count * array_of(e, shape, run).astype(float) for e, count in term.exponent))


def ratio_of(ratio: Ratio, shape: tuple[int, ...], run: Run) -> Array:
    above, below = (
        sum(factor * term_of(term, shape, run) for term, factor in terms.items())
        for terms in (ratio.numerator, ratio.denominator)
    )
    return np.asarray(above / below)


# --- Elements ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "perm": [2, 0, 1, 3], "flat": [0, 0, -1], "split": [0, 0, 2, 2, 8], "rows": [-1, 24], "wide": [1, 1, 1, 5],
    "zero": [0], "one": [1], "two": [2], "three": [3], "lane": 2, "last": [-1], "kept": [0, 0, 0, 24], "pair": [16, 12],
    "front": [6, 4, 8],
}  # fmt: skip
VIEWS = {
    "transposed": ("y = Transpose<perm=[2,0,1,3]>(x)", "x"),
    "reversed": ("y = Transpose(x)", "x"),
    "merged": ("y = Reshape(x, flat)", "x"),
    "merged after a transpose": ("a = Transpose<perm=[2,0,1,3]>(x)  y = Reshape(a, flat)", "x"),
    "merged and split again": ("a = Reshape(x, flat)  y = Reshape(a, split)", "x"),
    "two merges": ("a = Reshape(x, front)  y = Flatten<axis=1>(a)", "x"),
    "one lane": ("a = Slice(x, two, three, last)  y = Transpose<perm=[2,0,1,3]>(a)", "x"),
    "one lane, tiled": ("a = Gather<axis=3>(x, lane)  b = Unsqueeze(a, last)  y = Tile(b, wide)", "x"),
    "one lane, expanded and merged": (
        "a = Gather<axis=-1>(x, lane)  b = Unsqueeze(a, last)  c = Expand(b, wide)  y = Reshape(c, flat)", "x",
    ),
    "squeezed": ("a = Slice(x, zero, one, zero)  y = Squeeze(a, zero)", "x"),
    "split off": ("a, y = Split<axis=2, num_outputs=2>(x)", "y"),
    "one of the split": ("a, b, y = Split<axis=1, num_outputs=3>(x)", "x"),
    "widened": ("h = Cast<to=10>(x)  y = Cast<to=1>(h)", "h"),
    "several lanes": ("y = Slice(x, zero, two, last)", "y"),
    "tiled over": ("y = Tile(x, wide)", "y"),
    "axes regrouped": ("a = Transpose<perm=[0,1,3,2]>(x)  y = Reshape(a, pair)", None),
}  # fmt: skip


@pytest.mark.parametrize(("body", "base"), VIEWS.values(), ids=VIEWS)
def test_elements_come_from_where_they_are_said_to(body: str, base: str | None) -> None:
    model = graph(body, "y", 18, x="float[2,3,4,8]", **{k: v for k, v in SHAPES.items() if k in body})
    run, y = Run(model, normal(x=(2, 3, 4, 8))), value(model, "y")
    element = trace(y, Facts())
    assert base is None or element.value.name == base
    expected = run.of(y)
    np.testing.assert_array_equal(array_of(element, expected.shape, run), expected)


def test_symbolic_axes_are_merged() -> None:
    model = graph("a = Transpose<perm=[1,0,2]>(x)  y = Reshape(a, rows)", "y", 18, x="float[N,T,8]", rows=[-1, 8])
    run, y = Run(model, normal(x=(3, 5, 8))), value(model, "y")
    element = trace(y, Facts())
    np.testing.assert_array_equal(array_of(element, (15, 8), run), run.of(y))


# --- Weights ----------------------------------------------------------------------------------------------------------

WEIGHTS = {
    "exponential": "d = Sub(a, b)  y = Exp(d)",
    "sigmoid": "d = Sub(a, b)  y = Sigmoid(d)",
    "scaled exponent": "d = Sub(a, b)  e = Mul(d, half)  n = Neg(e)  y = Exp(n)",
    "constant in the exponent": "d = Sub(a, half)  y = Exp(d)",
    "softmax weight": "d = Sub(a, b)  e = Exp(d)  f = Exp(b)  s = Add(e, f)  y = Div(e, s)",
    "reciprocal": "d = Sub(a, b)  e = Exp(d)  y = Reciprocal(e)",
    "rest to 1": "d = Sub(a, b)  g = Sigmoid(d)  y = Sub(one, g)",
    "logarithm undone": "d = Sub(a, b)  g = Sigmoid(d)  l = Log(g)  n = Neg(l)  y = Exp(n)",
    "softplus undone": "d = Sub(a, b)  g = Softplus(d)  e = Sub(a, g)  y = Exp(e)",
    "broadcast": "d = Sub(a, b)  e = Exp(d)  s = Slice(e, zero, first, last)  y = Mul(s, a)",
    "laid out": "d = Sub(a, b)  e = Exp(d)  t = Transpose<perm=[1,0,2]>(e)  y = Neg(t)",
    "an exponential of a product": "d = Mul(a, b)  y = Exp(d)",
    "a rounded one": "d = Sub(a, b)  e = Exp(d)  h = Cast<to=10>(e)  y = Cast<to=1>(h)",
    "beyond all bounds": "".join(f"p{i} = Sub(a, b)  q{i} = Sub(p{i}, half)  e{i} = Exp(q{i})" for i in range(3))
    + "s0 = Add(e0, a) s1 = Mul(s0, s0) s2 = Add(s1, b) s3 = Mul(s2, s2) s4 = Mul(s3, s2) y = Add(s4, e1)",
}  # fmt: skip


@pytest.mark.parametrize("body", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_what_is_computed(body: str) -> None:
    constants = {"half": 0.5, "one": 1.0, "zero": [0], "first": [1], "last": [-1]}
    given = {name: constant for name, constant in constants.items() if name in body}
    model = graph(body, "y", 18, a="float[T,4,8]", b="float[T,4,8]", **given)
    run, y = Run(model, normal(a=(3, 4, 8), b=(3, 4, 8))), value(model, "y")
    facts = Facts()
    assert carries_exponential(y, facts)
    expected = run.of(y)
    np.testing.assert_allclose(ratio_of(recognise_weight(y, facts), expected.shape, run), expected, rtol=1e-4)


STATISTICS = {
    "maximum": ("y = Max(a, b)", RowMax),
    "sum": ("m = Max(a, b)  d = Sub(a, m)  e = Exp(d)  f = Sub(b, m)  g = Exp(f)  y = Add(e, g)", SoftmaxSum),
    "log of a sum": ("d = Sub(a, b)  s = Softplus(d)  y = Add(s, b)", LogSumExp),
    "log of exponentials": ("d = Exp(a)  e = Exp(b)  s = Add(d, e)  y = Log(s)", LogSumExp),
    "minimum": ("y = Min(a, b)", type(None)),
    "log of a difference": ("d = Exp(a)  e = Exp(b)  s = Sub(d, e)  y = Log(s)", type(None)),
    "log of three": ("d = Exp(a)  e = Exp(b)  s = Add(d, e)  t = Add(s, d)  y = Log(t)", type(None)),
}


@pytest.mark.parametrize(("body", "kind"), STATISTICS.values(), ids=STATISTICS)
def test_statistics_are_what_is_computed(body: str, kind: type) -> None:
    model = graph(body, "y", 18, a="float[T,4]", b="float[T,4]")
    run, y = Run(model, normal(a=(3, 4), b=(3, 4))), value(model, "y")
    statistic = recognise_statistic(y, Facts())
    assert isinstance(statistic, kind)
    expected = run.of(y)
    if isinstance(statistic, RowMax):
        sides = [array_of(side, expected.shape, run) for side in (statistic.first, statistic.second)]
        np.testing.assert_array_equal(np.maximum(*sides), expected)
    elif statistic is not None:
        definition = ratio_of(statistic.definition, expected.shape, run)
        found = np.log(definition) if isinstance(statistic, LogSumExp) else definition
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def test_ratios_are_equal_however_they_are_written() -> None:
    a, b = (Element(ir.Value(name=name), ()) for name in "ab")
    exponential = Ratio.term(Term(exponent=frozenset({(a, 1.0), (b, -1.0)})))
    one = Ratio.number(1)
    sigmoid = exponential.over(one.plus(exponential))
    assert sigmoid is not None
    inverse = one.over(exponential)
    assert inverse is not None
    other = one.over(one.plus(inverse))
    assert other is not None
    assert sigmoid.equals(other)
    assert sigmoid.plus(one.minus(sigmoid)).equals(one)
    assert not sigmoid.equals(exponential)
    quotient = sigmoid.over(one.minus(sigmoid))
    assert quotient is not None
    assert quotient.is_term() == Term(exponent=frozenset({(a, 1.0), (b, -1.0)}))
    assert sigmoid.is_term() is None
    assert one.over(Ratio.number(0)) is None


def test_an_exponential_of_a_sum_with_a_number() -> None:
    a = Element(ir.Value(name="a"), ())
    power = Ratio.of(a).plus(Ratio.number(2)).exponential()
    assert power is not None
    assert power.equals(Ratio.term(Term(exponent=frozenset({(a, 1.0)}))).scaled(math.exp(2)))
    assert Ratio.of(a).times(Ratio.of(a)).exponential() is None
