"""A range cut out of one axis."""

from __future__ import annotations

import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.slices import Sliced, recognise_slice
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

CONSTANTS = {
    "three": [3],
    "seven": [7],
    "axis": [1],
    "minus_one": [-1],
    "minus_two": [-2],
    "step": [2],
    "far": [100],
    "parts": [3, 5, 2],
    "equal": 4,
    "i0": 0,
    "i1": 1,
    "back": -1,
    "two_starts": [1, 2],
    "two_ends": [2, 4],
    "two_axes": [0, 1],
    "int_min": [-(2**63)],
}
SPELLINGS = {
    "Slice": ("y = Slice(x, three, seven, axis)", (1, 3, 4, 1)),
    "Slice by two": ("y = Slice(x, three, far, axis, step)", (1, 3, 4, 2)),
    "Slice from the end": ("y = Slice(x, minus_two, far, axis)", (1, 8, 2, 1)),
    "Slice up to the last": ("y = Slice(x, three, minus_one, axis)", (1, 3, 6, 1)),
    "axis from the end": ("y = Slice(x, three, seven, minus_two)", (1, 3, 4, 1)),
    "Split": ("a, y, b = Split<axis=1>(x, parts)", (1, 3, 5, 1)),
    "Split, last part": ("a, b, y = Split<axis=-2>(x, parts)", (1, 8, 2, 1)),
    "Split in equal parts": ("a, y = Split<axis=1, num_outputs=2>(x)", (1, 5, 5, 1)),
    "Split, uneven": ("a, b, y = Split<axis=1, num_outputs=3>(x)", (1, 8, 2, 1)),
    "SplitToSequence": ("s = SplitToSequence<axis=1>(x, parts) y = SequenceAt(s, i1)", (1, 3, 5, 1)),
    "SplitToSequence, from the end": ("s = SplitToSequence<axis=-2>(x, parts) y = SequenceAt(s, back)", (1, 8, 2, 1)),
    "SplitToSequence, one size": ("s = SplitToSequence<axis=1>(x, equal) y = SequenceAt(s, back)", (1, 8, 2, 1)),
    "SplitToSequence, first of one size": ("s = SplitToSequence<axis=1>(x, equal) y = SequenceAt(s, i0)", (1, 0, 4, 1)),
}


@pytest.mark.parametrize(("body", "expected"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, expected: tuple[int, int, int, int]) -> None:
    model = graph(body, "y", x="float[2,10,3]", **CONSTANTS)
    cut = recognise_slice(value(model, "y"), Facts())
    assert isinstance(cut, Sliced)
    assert (cut.axis, cut.start, cut.size, cut.step) == expected
    assert_true(cut, value(model, "y"), Run(model, normal(x=(2, 10, 3))))


OTHERS = {
    "two axes": "y = Slice(x, two_starts, two_ends, two_axes)",
    "backwards": "y = Slice(x, minus_one, int_min, axis, minus_one)",
    "bounds from outside": "y = Slice(x, start, seven, axis)",
    "parts from outside": "s = SplitToSequence<axis=1>(x, sizes) y = SequenceAt(s, i1)",
    "a part from outside": "s = SplitToSequence<axis=1>(x, parts) y = SequenceAt(s, which)",
    "no cut": "y = Relu(x)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_others_are_refused(body: str) -> None:
    more = {"start": "int64[1]", "sizes": "int64[3]", "which": "int64[]"}
    model = graph(body, "y", x="float[2,10,3]", **CONSTANTS, **more)
    assert recognise_slice(value(model, "y"), Facts()) is None


def test_a_cut_of_an_unknown_axis_is_refused() -> None:
    model = graph("y = Slice(x, minus_two, far, axis)", "y", x="float[2,T,3]", **CONSTANTS)
    assert recognise_slice(value(model, "y"), Facts()) is None
