"""Per-head views and cuts along the last axis."""

from __future__ import annotations

import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.heads import Cut, HeadView, recognise_heads, recognise_split
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

X = "float[B,S,24]"
CONSTANTS = {
    "heads": [0, 0, 4, 6],
    "inferred": [-1, 3, 4, 6],
    "one_head": [0, 1, -1, 24],
    "sizes": [4, 2],
    "start": [4],
    "end": [6],
    "int_max": [2**63 - 1],
    "minus_two": [-2],
    "last": [3],
    "step": [1],
    "i1": [1],
    "i2": [2],
    "i0": [0],
}
RESHAPE, TURN, CUT = "r = Reshape(x, heads)", "t = Transpose<perm=[0,2,1,3]>", "u, y = Split<axis=3>"
SPELLINGS = {
    "reshape": ("y = Reshape(x, heads)", (4, 6, 0, 6, False)),
    "transposed": (f"{RESHAPE} y = Transpose<perm=[0,2,1,3]>(r)", (4, 6, 0, 6, True)),
    "transposed, cut by Split": (f"{RESHAPE} {TURN}(r) {CUT}(t, sizes)", (4, 6, 4, 2, True)),
    "cut, then transposed": (
        f"{RESHAPE} u, c = Split<axis=-1>(r, sizes) y = Transpose<perm=[0,2,1,3]>(c)",
        (4, 6, 4, 2, True),
    ),
    "first part of a Split": (f"{RESHAPE} {TURN}(r) y, u = Split<axis=3>(t, sizes)", (4, 6, 0, 4, True)),
    "cut by Slice": (f"{RESHAPE} {TURN}(r) y = Slice(t, start, end, last, step)", (4, 6, 4, 2, True)),
    "cut to the end": (f"{RESHAPE} {TURN}(r) y = Slice(t, start, int_max, last)", (4, 6, 4, 2, True)),
    "cut from the end": (f"{RESHAPE} y = Slice(r, minus_two, int_max, last)", (4, 6, 4, 2, False)),
    "cut twice": (
        f"{RESHAPE} {CUT.replace('y', 'c')}(r, sizes) y, v = Split<axis=3, num_outputs=2>(c)",
        (4, 6, 4, 1, False),
    ),
    "transposed there and back": (f"{RESHAPE} {TURN}(r) y = Transpose<perm=[0,2,1,3]>(t)", (4, 6, 0, 6, False)),
    "one head by Unsqueeze": ("y = Unsqueeze(x, i1)", (1, 24, 0, 24, True)),
    "one head behind the tokens": ("y = Unsqueeze(x, i2)", (1, 24, 0, 24, False)),
    "one head, turned": ("r = Unsqueeze(x, i2) y = Transpose<perm=[0,2,1,3]>(r)", (1, 24, 0, 24, True)),
    "one head by Reshape": ("y = Reshape(x, one_head)", (1, 24, 0, 24, True)),
}


@pytest.mark.parametrize(("body", "expected"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, expected: tuple) -> None:
    static = "one_head" in body
    model = graph(body, "y", x="float[2,3,24]" if static else X, **CONSTANTS)
    view = recognise_heads(value(model, "y"), Facts())
    assert isinstance(view, HeadView)
    assert view.source.name == "x"
    assert (view.heads, view.width, view.start, view.size, view.heads_first) == expected
    assert_true(view, value(model, "y"), Run(model, normal(x=(2, 3, 24))))


def test_rows_with_a_head_axis_of_one() -> None:
    model = graph(
        "r = Reshape(x, shape) y = Transpose<perm=[0,2,1,3]>(r)", "y", x="float[2,1,5,24]", shape=[2, 5, 4, 6]
    )
    view = recognise_heads(value(model, "y"), Facts())
    assert isinstance(view, HeadView)
    assert (view.heads, view.width, view.heads_first) == (4, 6, True)
    assert_true(view, value(model, "y"), Run(model, normal(x=(2, 1, 5, 24))))


@pytest.mark.parametrize("tokens", [1, 4])
def test_as_many_tokens_as_heads(tokens: int) -> None:
    model = graph(
        "r = Reshape(x, s) y = Transpose<perm=[0,2,1,3]>(r)", "y", x=f"float[2,{tokens},24]", s=[2, tokens, 4, 6]
    )
    view = recognise_heads(value(model, "y"), Facts())
    assert isinstance(view, HeadView)
    assert_true(view, value(model, "y"), Run(model, normal(x=(2, tokens, 24))))


OTHERS = {
    "three axes": ("y = Relu(x)", {}),
    "heads before tokens": ("y = Reshape(x, s)", {"s": [2, 4, 3, 6]}),
    "tokens folded into the batch": ("y = Reshape(x, s)", {"s": [6, 1, 4, 6]}),
    "two tokens a row": ("y = Reshape(x, s)", {"s": [2, 1, 4, 18]}),
    "another transpose": (f"{RESHAPE} y = Transpose<perm=[0,1,3,2]>(r)", {}),
    "batch and heads exchanged": (f"{RESHAPE} y = Transpose<perm=[2,1,0,3]>(r)", {}),
    "cut along the tokens": (f"{RESHAPE} y = Slice(r, i0, i2, i1, step)", {}),
    "every second column": (f"{RESHAPE} y = Slice(r, i0, int_max, last, i2)", {}),
    "backwards": (
        f"{RESHAPE} y = Slice(r, minus_one, int_min, last, minus_one)",
        {"minus_one": [-1], "int_min": [-(2**63)]},
    ),
    "scaled": (f"{RESHAPE} y = Mul(r, r)", {}),
}


@pytest.mark.parametrize(("body", "values"), OTHERS.values(), ids=OTHERS)
def test_others_are_refused(body: str, values: dict) -> None:
    model = graph(body, "y", **{"x": "float[2,3,24]", **CONSTANTS, **values})
    assert isinstance(recognise_heads(value(model, "y"), Facts()), Miss)


CUTS = {
    "Split": ("u, y = Split<axis=2>(x, parts)", 20, 4),
    "Split, negative axis": ("y, u = Split<axis=-1>(x, parts)", 0, 20),
    "Split in equal parts": ("u, v, y = Split<axis=2, num_outputs=3>(x)", 16, 8),
    "Slice": ("y = Slice(x, i2, start, i2)", 2, 2),
    "Slice, axis from the end": ("y = Slice(x, i2, start, minus_one)", 2, 2),
    "Slice from the end": ("y = Slice(x, minus_two, int_max, i2)", 22, 2),
    "Slice beyond the end": ("y = Slice(x, start, int_max, i2, step)", 4, 20),
    "Slice, start before the front": ("y = Slice(x, far_left, start, i2)", 0, 4),
}


@pytest.mark.parametrize(("body", "start", "size"), CUTS.values(), ids=CUTS)
def test_cuts(body: str, start: int, size: int) -> None:
    model = graph(body, "y", **{"x": X, **CONSTANTS, "parts": [20, 4], "minus_one": [-1], "far_left": [-100]})
    cut = recognise_split(value(model, "y"), Facts())
    assert isinstance(cut, Cut)
    assert (cut.source.name, cut.start, cut.size) == ("x", start, size)
    assert_true(cut, value(model, "y"), Run(model, normal(x=(2, 3, 24))))


NO_CUTS = {
    "another axis": "y, u = Split<axis=1, num_outputs=2>(x)",
    "Slice of another axis": "y = Slice(x, i0, i2, i1)",
    "Slice of two axes": "y = Slice(x, two_starts, two_ends, two_axes)",
    "Slice, default axes": "y = Slice(x, i0, i1)",
    "every second": "y = Slice(x, i0, int_max, i2, i2)",
    "no cut": "y = Relu(x)",
}


@pytest.mark.parametrize("body", NO_CUTS.values(), ids=NO_CUTS)
def test_other_values_are_no_cut(body: str) -> None:
    two = {"two_starts": [0, 1], "two_ends": [2, 5], "two_axes": [1, 2]}
    model = graph(body, "y", x="float[2,4,24]", **CONSTANTS, **two)
    assert recognise_split(value(model, "y"), Facts()) is None
