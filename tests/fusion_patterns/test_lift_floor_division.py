"""Integer division by a constant, of numbers that are never negative."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.floor_division import FloorDivision, recognise_floor_division
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, value

CORRECTED = """
n = Less(p, zero) t = Equal(n, true) r = Mod(p, k) b = Cast<to=9>(r)
a = And(t, b) c = Cast<to=7>(a) d = Div(p, k) y = Sub(d, c)
"""
CONSTANTS = {"zero": 0, "one": 1, "k": 3, "true": np.array(True), "minus": -3, "false": np.array(False), "half": 1.5}
SPELLINGS = {
    "Div": "y = Div(p, k)",
    "corrected": CORRECTED,
    "corrected, mirrored": CORRECTED.replace("And(t, b)", "And(b, t)"),
    "corrected, without Equal": CORRECTED.replace("And(t, b)", "And(n, b)"),
}


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str) -> None:
    model = graph(body, "y", p="int64[M]", **CONSTANTS)
    division = recognise_floor_division(value(model, "y"), Facts())
    assert isinstance(division, FloorDivision)
    assert (division.numerator.name, division.divisor) == ("p", 3)
    assert_true(division, value(model, "y"), Run(model, {"p": np.arange(20)}))


OTHERS = {
    "by a negative number": "y = Div(p, minus)",
    "by zero": "y = Div(p, zero)",
    "by a value": "y = Div(p, q)",
    "by a vector": "y = Div(p, many)",
    "the wrong way round": "y = Div(k, p)",
    "multiplied": "y = Mul(p, k)",
    "of floats": "f = Cast<to=1>(p) y = Div(f, half)",
    "corrected where positive": CORRECTED.replace("Less(", "Greater("),
    "corrected where zero": CORRECTED.replace("Less(p, zero)", "Less(p, one)"),
    "corrected where another is negative": CORRECTED.replace("Less(p, zero)", "Less(q, zero)"),
    "corrected where not negative": CORRECTED.replace("Equal(n, true)", "Equal(n, false)"),
    "either condition": CORRECTED.replace("And(t, b)", "Or(t, b)"),
    "one less": "d = Div(p, k) y = Sub(d, one)",
    "corrected quotient of another": CORRECTED.replace("d = Div(p, k)", "d = Div(q, k)"),
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_others_are_refused(body: str) -> None:
    model = graph(body, "y", p="int64[20]", q="int64[20]", many=[3] * 20, **CONSTANTS)
    assert recognise_floor_division(value(model, "y"), Facts()) is None
