"""Concatenations, also written as slice assignments into an empty buffer."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.concat import Concat, recognise_concat
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

PARTS = {"a": "float[2,3,5,4]", "b": "float[2,3,5,2]"}
FEEDS = normal(a=(2, 3, 5, 4), b=(2, 3, 5, 2))
SPELLINGS = {
    "Concat": ("y = Concat<axis=3>(a, b)", ("a", "b"), 3, (0, 1, 2, 3)),
    "negative axis": ("y = Concat<axis=-1>(b, a)", ("b", "a"), 3, (0, 1, 2, 3)),
    "transposed afterwards": (
        "c = Concat<axis=-1>(a, b) y = Transpose<perm=[0,1,3,2]>(c)",
        ("a", "b"),
        3,
        (0, 1, 3, 2),
    ),
    "three parts": ("y = Concat<axis=3>(a, b, a)", ("a", "b", "a"), 3, (0, 1, 2, 3)),
}


@pytest.mark.parametrize(("body", "parts", "axis", "perm"), SPELLINGS.values(), ids=SPELLINGS)
def test_concat(body: str, parts: tuple[str, ...], axis: int, perm: tuple[int, ...]) -> None:
    model = graph(body, "y", **PARTS)
    concat = recognise_concat(value(model, "y"), Facts())
    assert isinstance(concat, Concat)
    assert tuple(part.name for part in concat.parts) == parts
    assert (concat.axis, concat.perm, concat.rank) == (axis, perm, 4)
    assert_true(concat, value(model, "y"), Run(model, FEEDS))


def write(
    buffer: str, update: str, result: str, start: str, end: str, *, limit: str = "width", perm: str = "3,1,2,0"
) -> str:
    """result = buffer with `update` assigned to [..., start:end], as torch's exporter writes it."""
    return f"""
    {result}_all = Range(zero, {limit}, one)
    {result}_cut = Slice({result}_all, {start}, {end}, first, step)
    {result}_index = Unsqueeze({result}_cut, minus_one)
    {result}_update = Transpose<perm=[{perm}]>({update})
    {result}_buffer = Transpose<perm=[{perm}]>({buffer})
    {result}_written = ScatterND({result}_buffer, {result}_index, {result}_update)
    {result} = Transpose<perm=[{perm}]>({result}_written)
    """


BUFFER = "empty = ConstantOfShape(shape)"
CONSTANTS = {
    "shape": [2, 3, 5, 6],
    "zero": 0,
    "one": 1,
    "width": 6,
    "five": 5,
    "minus_one": [-1],
    "first": [0],
    "step": [1],
    "two_steps": [2],
    "i0": [0],
    "i1": [1],
    "i2": [2],
    "i4": [4],
    "i5": [5],
    "i6": [6],
    "end": [2**63 - 1],
}
FRONT_A, BACK_B = ("a", "i0", "i4"), ("b", "i4", "end")


def assigned(*writes: tuple[str, str, str], **options: str) -> str:
    """A buffer, and one write after the other; the result is y."""
    lines, buffer = [BUFFER], "empty"
    for number, (update, start, end) in enumerate(writes):
        result = "y" if number == len(writes) - 1 else f"w{number}"
        lines.append(write(buffer, update, result, start, end, **options))
        buffer = result
    return "\n".join(lines)


ASSIGNMENTS = {
    "front, then the rest": (assigned(FRONT_A, BACK_B), ("a", "b")),
    "the rest, then the front": (assigned(BACK_B, FRONT_A), ("a", "b")),
    "the end as a number": (assigned(FRONT_A, ("b", "i4", "i6")), ("a", "b")),
    "small part first": (assigned(("b", "i0", "i2"), ("a", "i2", "end")), ("b", "a")),
    "another transpose": (assigned(FRONT_A, BACK_B, perm="3,2,1,0"), ("a", "b")),
}


@pytest.mark.parametrize(("body", "parts"), ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_slice_assignments(body: str, parts: tuple[str, ...]) -> None:
    model = graph(body, "y", **PARTS, **CONSTANTS)
    concat = recognise_concat(value(model, "y"), Facts())
    assert isinstance(concat, Concat)
    assert tuple(part.name for part in concat.parts) == parts
    assert (concat.axis, concat.perm) == (3, (0, 1, 2, 3))
    assert_true(concat, value(model, "y"), Run(model, FEEDS))


def test_slice_assignments_transposed_afterwards() -> None:
    body = assigned(FRONT_A, BACK_B).replace("y = Transpose<perm=[3,1,2,0]>", "y = Transpose<perm=[3,1,0,2]>")
    model = graph(body, "y", **PARTS, **CONSTANTS)
    concat = recognise_concat(value(model, "y"), Facts())
    assert isinstance(concat, Concat)
    assert_true(concat, value(model, "y"), Run(model, FEEDS))


ROWS = """
empty = ConstantOfShape(shape)
front = Transpose<perm=[3,1,2,0]>(a) back = Transpose<perm=[3,1,2,0]>(b) buffer = Transpose<perm=[3,1,2,0]>(empty)
w = ScatterND(buffer, front_rows, front) z = ScatterND(w, back_rows, back) y = Transpose<perm=[3,1,2,0]>(z)
"""
COORDINATES = """
empty = ConstantOfShape(shape)
c0 = Expand(along_0, front_shape) c1 = Expand(along_1, front_shape) c2 = Expand(along_2, front_shape)
c3 = Expand(front_along_3, front_shape)
u0 = Unsqueeze(c0, minus_one) u1 = Unsqueeze(c1, minus_one) u2 = Unsqueeze(c2, minus_one) u3 = Unsqueeze(c3, minus_one)
front_index = Concat<axis=-1>(u0, u1, u2, u3) w = ScatterND(empty, front_index, a)
d0 = Expand(along_0, back_shape) d1 = Expand(along_1, back_shape) d2 = Expand(along_2, back_shape)
d3 = Expand(back_along_3, back_shape)
v0 = Unsqueeze(d0, minus_one) v1 = Unsqueeze(d1, minus_one) v2 = Unsqueeze(d2, minus_one) v3 = Unsqueeze(d3, minus_one)
back_index = Concat<axis=-1>(v0, v1, v2, v3) y = ScatterND(w, back_index, b)
"""
FIXED_INDICES = {
    "front_rows": np.arange(4)[:, None],
    "back_rows": np.arange(4, 6)[:, None],
    "along_0": np.arange(2).reshape(2, 1, 1, 1),
    "along_1": np.arange(3).reshape(3, 1, 1),
    "along_2": np.arange(5).reshape(5, 1),
    "front_along_3": np.arange(4),
    "back_along_3": np.arange(4, 6),
    "front_shape": [2, 3, 5, 4],
    "back_shape": [2, 3, 5, 2],
}


@pytest.mark.parametrize("body", [ROWS, COORDINATES], ids=["rows", "coordinates"])
def test_slice_assignments_at_constant_indices(body: str) -> None:
    """What exports of fixed sizes have: every index is a number."""
    model = graph(body, "y", **PARTS, **CONSTANTS, **FIXED_INDICES)
    concat = recognise_concat(value(model, "y"), Facts())
    assert isinstance(concat, Concat)
    assert tuple(part.name for part in concat.parts) == ("a", "b")
    assert (concat.axis, concat.perm) == (3, (0, 1, 2, 3))
    assert_true(concat, value(model, "y"), Run(model, FEEDS))


OTHER_INDICES = {
    "rows in another order": (ROWS, {"back_rows": np.array([[5], [4]])}),
    "rows that leave a gap": (ROWS, {"back_rows": np.array([[4], [6]]), "shape": [2, 3, 5, 7]}),
    "rows from the end": (ROWS, {"back_rows": np.array([[-2], [-1]])}),
    "coordinates of every second column": (COORDINATES, {"back_along_3": np.array([3, 5])}),
    "coordinates of other heads": (COORDINATES, {"along_1": np.array([0, 2, 1]).reshape(3, 1, 1)}),
    "a coordinate along another axis": (COORDINATES, {"back_along_3": np.array([[4]] * 4 + [[5]])}),
}


@pytest.mark.parametrize(("body", "changed"), OTHER_INDICES.values(), ids=OTHER_INDICES)
def test_other_constant_indices_are_refused(body: str, changed: dict) -> None:
    model = graph(body, "y", **{**PARTS, **CONSTANTS, **FIXED_INDICES, **changed})
    assert isinstance(recognise_concat(value(model, "y"), Facts()), Miss)


LAST = "y_written = ScatterND(y_buffer"
OTHERS = {
    "a gap": assigned(("b", "i0", "i2"), BACK_B),
    "an overlap": assigned(FRONT_A, ("a", "i2", "end")),
    "the front missing": assigned(BACK_B),
    "the rest missing": assigned(FRONT_A),
    "the same slice twice": assigned(FRONT_A, FRONT_A),
    "added instead of assigned": assigned(FRONT_A, BACK_B).replace(
        LAST, LAST.replace("ScatterND", 'ScatterND<reduction="add">')
    ),
    "rows of another axis": assigned(FRONT_A, BACK_B)
    .replace("y_buffer = Transpose<perm=[3,1,2,0]>(w0)", "y_buffer = Transpose<perm=[3,2,1,0]>(w0)")
    .replace("y_update = Transpose<perm=[3,1,2,0]>", "y_update = Transpose<perm=[3,2,1,0]>"),
    "every second row": assigned(FRONT_A, ("b", "i1", "i5")).replace(
        "y_cut = Slice(y_all, i1, i5, first, step)", "y_cut = Slice(y_all, i1, i5, first, two_steps)"
    ),
    "rows that begin at one": assigned(("b", "i0", "i2"), ("a", "i2", "end")).replace(
        "y_all = Range(zero", "y_all = Range(one"
    ),
    "fewer rows than the width": assigned(FRONT_A, ("one_column", "i4", "end"), limit="five"),
    "not a concatenation": "y = Add(a, a)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_others_are_refused(body: str) -> None:
    model = graph(body, "y", **PARTS, one_column="float[2,3,5,1]", **CONSTANTS)
    assert isinstance(recognise_concat(value(model, "y"), Facts()), Miss)


def test_a_graph_input_is_refused() -> None:
    model = graph("y = Relu(a)", "y", **PARTS)
    assert isinstance(recognise_concat(value(model, "a"), Facts()), Miss)
