"""Values that a graph computes twice."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.duplicates import common_sources
from tests.fusion_patterns.graphs import graph, value

VALUES = {"x": "float[2,5]", "other": "float[2,5]", "two": 2.0, "same_two": 2.0, "three": 3.0, "i1": [1], "i0": [0]}
DUPLICATES = {
    "itself": ("a = Cos(x) b = Identity(a) y = Add(a, b)", ["a"]),
    "one operator": ("a = Cos(x) b = Cos(x) y = Add(a, b)", ["x"]),
    "a chain": ("m = Mul(x, two) a = Cos(m) n = Mul(x, two) b = Cos(n) y = Add(a, b)", ["x"]),
    "equal constants": ("a = Mul(x, two) b = Mul(x, same_two) y = Add(a, b)", ["x"]),
    "two sources": ("a = Mul(x, other) b = Mul(x, other) y = Add(a, b)", ["x", "other"]),
    "an optional input left out": ("a = Clip(x, , two) b = Clip(x, , two) y = Add(a, b)", ["x"]),
    "the same part": ("a, u = Split<num_outputs=2>(z) b, w = Split<num_outputs=2>(z) y = Add(a, b)", ["z"]),
}
OTHERS = {
    "another operator": "a = Cos(x) b = Sin(x) y = Add(a, b)",
    "another input": "a = Cos(x) b = Cos(other) y = Add(a, b)",
    "another constant": "a = Mul(x, two) b = Mul(x, three) y = Add(a, b)",
    "another attribute": "a = Softmax<axis=0>(x) b = Softmax<axis=1>(x) y = Add(a, b)",
    "exchanged inputs": "a = Sub(x, other) b = Sub(other, x) y = Add(a, b)",
    "another part": "a, u = Split<num_outputs=2>(z) v, b = Split<num_outputs=2>(z) y = Add(a, b)",
    "another input left out": "a = Clip(x, two) b = Clip(x, , two) y = Add(a, b)",
    "random numbers": "a = RandomNormalLike(x) b = RandomNormalLike(x) y = Add(a, b)",
    "an input and a computed value": "a = Identity(x) b = Cos(x) y = Add(a, b)",
}


@pytest.mark.parametrize(("body", "sources"), DUPLICATES.values(), ids=DUPLICATES)
def test_duplicates(body: str, sources: list[str]) -> None:
    model = graph(body, "y", **VALUES, z="float[4,5]")
    found = common_sources(value(model, "a"), value(model, "b"), Facts())
    assert found is not None
    assert [source.name for source in found] == sources


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_others(body: str) -> None:
    model = graph(body, "y", **VALUES, z="float[4,5]")
    assert common_sources(value(model, "a"), value(model, "b"), Facts()) is None


def test_equal_constants_have_no_source() -> None:
    model = graph("y = Mul(a, b)", "y", a=np.arange(3.0), b=np.arange(3.0))
    assert common_sources(value(model, "a"), value(model, "b"), Facts()) == ()
