"""Sorting by expert: the permutation, what gathers by it, and its inverse."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.permutation import (
    Permutation,
    inverses,
    recognise_inverse,
    recognise_permutation,
    sorted_gathers,
)
from fusion_patterns.lift.router import reshaped_from
from fusion_patterns.lift.row_gather import gathered_rows
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

COUNT = "sh = Shape(keys) m = Gather<axis=0>(sh, last) count = Reshape(m, one)"
SORT = "sorted_keys, order = TopK<axis=-1, largest=0, sorted=1>(keys, count)"
FLAT = "keys = Reshape(ids, minus)"
CONSTANTS = {"minus": [-1], "one": [1], "last": -1, "two": 2, "k": 2, "zero": 0, "step": 1, "front": [0], "axis": [1]}
IDS = {"ids": np.random.default_rng(0).integers(0, 4, (9, 2))}
SPELLINGS = {
    "Reshape": (FLAT + COUNT + SORT, "int64[N,2]"),
    "default attributes": (FLAT + COUNT + SORT.replace("axis=-1, largest=0, sorted=1", "largest=0"), "int64[N,2]"),
    "Flatten and Squeeze": ("f = Flatten<axis=0>(ids) keys = Squeeze(f, front)" + COUNT + SORT, "int64[N,2]"),
    "a number as count": (FLAT + SORT.replace("count", "eighteen"), "int64[9,2]"),
}


def node(model: ir.Model, op_type: str) -> ir.Node:
    return next(n for n in model.graph if n.op_type == op_type)


@pytest.mark.parametrize(("body", "ids"), SPELLINGS.values(), ids=SPELLINGS)
def test_permutations(body: str, ids: str) -> None:
    model = graph(body, "order", ids=ids, eighteen=[18], **CONSTANTS)
    permutation = recognise_permutation(node(model, "TopK"), Facts())
    assert isinstance(permutation, Permutation)
    assert (permutation.ids.name, permutation.choices) == ("ids", 2)
    assert_true(permutation, permutation.order, Run(model, IDS))


NO_SORT = {
    "downwards": SORT.replace("largest=0", "largest=1"),
    "not sorted": SORT.replace("sorted=1", "sorted=0"),
    "not all": SORT.replace("count", "one"),
    "of a table": "sorted_keys, order = TopK<axis=-1, largest=0, sorted=1>(ids, one)",
}


@pytest.mark.parametrize("body", NO_SORT.values(), ids=NO_SORT)
def test_other_top_ks_were_never_candidates(body: str) -> None:
    model = graph(FLAT + COUNT + body, "order", ids="int64[N,2]", **CONSTANTS)
    assert recognise_permutation(node(model, "TopK"), Facts()) is None


@pytest.mark.parametrize(
    ("flat", "ids"),
    [
        (FLAT, "int64[N,K]"),
        (FLAT, "int64[N,3,2]"),
        ("t = Transpose(ids) keys = Reshape(t, minus)", "int64[N,2]"),
        ("s = Add(ids, two) t = Reshape(s, minus) keys = Sub(t, two)", "int64[N,2]"),
    ],
    ids=["unknown number of choices", "three axes", "transposed", "arithmetic"],
)
def test_sorts_of_other_keys(flat: str, ids: str) -> None:
    model = graph(flat + COUNT + SORT, "order", ids=ids, **CONSTANTS)
    permutation = recognise_permutation(node(model, "TopK"), Facts())
    if isinstance(permutation, Permutation):  # what it says must still be so
        assert_true(permutation, permutation.order, Run(model, IDS))
    else:
        assert isinstance(permutation, Miss)


def test_reshaped_from() -> None:
    body = "a = Reshape(x, minus) b = Unsqueeze(a, axis) c = Squeeze(b, axis) y = Flatten<axis=0>(c) z = Transpose(x)"
    model = graph(body, "y z", x="float[3,4]", **CONSTANTS)
    facts = Facts()
    assert reshaped_from(value(model, "y"), facts).name == "x"
    assert reshaped_from(value(model, "z"), facts).name == "z"


ROWS = {
    "Gather": ("y = Gather<axis=0>(x, i)", True),
    "Gather, default axis": ("y = Gather(x, i)", True),
    "GatherND": ("u = Unsqueeze(i, minus) y = GatherND(x, u)", True),
    "columns": ("y = Gather<axis=1>(x, i)", False),
    "table of indices": ("u = Unsqueeze(i, minus) y = Gather(x, u)", False),
    "elements": ("u = Concat<axis=-1>(j, j) y = GatherND(x, u)", False),
    "batched": ("y = GatherND<batch_dims=1>(x, j)", False),
    "another operator": ("y = Relu(x)", False),
}


@pytest.mark.parametrize(("body", "is_rows"), ROWS.values(), ids=ROWS)
def test_rows(body: str, is_rows: bool) -> None:
    model = graph(body, "y", x="float[6,5]", i="int64[6]", j="int64[6,1]", **CONSTANTS)
    gather = gathered_rows(list(model.graph)[-1], Facts())
    assert (gather is not None) == is_rows
    if gather is not None:
        indices = np.array([3, 1, 1, 0, 4, 2])
        run = Run(model, {**normal(x=(6, 5)), "i": indices, "j": indices[:, None]})
        assert_true(gather, gather.rows, run)


ORDER = FLAT + SORT.replace("count", "eighteen")
REPEATED = "xu = Unsqueeze(x, axis) xr = Expand(xu, twice) rows = Reshape(xr, folded)"
GATHERS = {
    "by order // K": ("d = Div(order, k) y = Gather<axis=0>(x, d)", 1),
    "by order // K, GatherND": ("d = Div(order, k) u = Unsqueeze(d, minus) y = GatherND(x, u)", 1),
    "two of them": ("d = Div(order, k) y = Gather<axis=0>(x, d) z = Gather<axis=0>(x, d)", 2),
    "by the order, of repeated rows": (f"{REPEATED} y = Gather<axis=0>(rows, order)", 1),
    "divided by another number": ("d = Div(order, three) y = Gather<axis=0>(x, d)", 0),
    "by the order, not repeated": ("y = Gather<axis=0>(more, order)", 0),
    "by order // K, of repeated rows": (f"{REPEATED} d = Div(order, k) y = Gather<axis=0>(rows, d)", None),
    "rows tiled, not repeated": ("rows = Tile(x, tiles) y = Gather<axis=0>(rows, order)", 0),
}


@pytest.mark.parametrize(("body", "count"), GATHERS.values(), ids=GATHERS)
def test_gathers_of_tokens(body: str, count: int | None) -> None:
    numbers = {"eighteen": [18], "three": 3, "twice": [1, 2, 1], "folded": [-1, 5], "tiles": [2, 1]}
    model = graph(ORDER + body, "y", ids="int64[9,2]", x="float[9,5]", more="float[18,5]", **numbers, **CONSTANTS)
    facts = Facts()
    permutation = recognise_permutation(node(model, "TopK"), facts)
    assert isinstance(permutation, Permutation)
    found = sorted_gathers(permutation, facts)
    assert count is None or len(found) == count
    run = Run(model, {**IDS, **normal(x=(9, 5), more=(18, 5))})
    for gather in found:
        tokens = run.of(permutation.order) // 2
        np.testing.assert_array_equal(run.of(gather.rows), run.of(gather.source)[tokens])


COUNTED = "ms = Shape<end=1>(keys) all = Range(zero, n, step)"
BUFFER = "b = Expand(zero, ms)"
INVERSES = {
    "ScatterND": (f"{BUFFER} u = Unsqueeze(order, minus) y = ScatterND(b, u, all)", True),
    "ScatterElements": (f"{BUFFER} y = ScatterElements<axis=0>(b, order, all)", True),
    "ScatterElements over another buffer": ("b = Identity(keys) y = ScatterElements<axis=0>(b, order, all)", True),
    "the order of the order": ("again, y = TopK<axis=-1, largest=0, sorted=1>(order, eighteen)", True),
    "the order of the order, downwards": ("again, y = TopK<axis=-1, largest=1, sorted=1>(order, eighteen)", False),
    "the order of the keys": ("again, y = TopK<axis=-1, largest=0, sorted=1>(keys, eighteen)", False),
    "the sorted order": ("y, again = TopK<axis=-1, largest=0, sorted=1>(order, eighteen)", False),
    "added": (f'{BUFFER} y = ScatterElements<axis=0, reduction="add">(b, order, all)', False),
    "of another order": (f"{BUFFER} y = ScatterElements<axis=0>(b, keys, all)", False),
    "other numbers": (f"{BUFFER} y = ScatterElements<axis=0>(b, order, keys)", False),
    "numbers from one on": (
        f"{BUFFER} o = Add(n, step) from_one = Range(step, o, step) y = ScatterElements<axis=0>(b, order, from_one)",
        False,
    ),
    "the order itself": ("y = Identity(order)", False),
}


@pytest.mark.parametrize(("body", "is_inverse"), INVERSES.values(), ids=INVERSES)
def test_inverses(body: str, is_inverse: bool) -> None:
    model = graph(ORDER + COUNTED + body, "y", ids="int64[9,2]", eighteen=[18], n=18, **CONSTANTS)
    assert recognise_inverse(value(model, "y"), value(model, "order"), Facts()) == is_inverse
    if is_inverse:
        run = Run(model, IDS)
        order = run.of(value(model, "order"))
        np.testing.assert_array_equal(run.of(value(model, "y"))[order], np.arange(18))


def test_an_inverse_over_a_longer_buffer_is_refused() -> None:
    """Its last elements are no positions."""
    body = "twice = Mul(ms, two) b = Expand(zero, twice) u = Unsqueeze(order, minus) y = ScatterND(b, u, all)"
    model = graph(ORDER + COUNTED + body, "y", ids="int64[9,2]", eighteen=[18], **CONSTANTS)
    assert not recognise_inverse(value(model, "y"), value(model, "order"), Facts())


def test_all_inverses_of_a_permutation() -> None:
    body = INVERSES["ScatterND"][0] + "again, z = TopK<axis=-1, largest=0, sorted=1>(order, eighteen)"
    model = graph(ORDER + COUNTED + body, "y z", ids="int64[9,2]", eighteen=[18], n=18, **CONSTANTS)
    facts = Facts()
    permutation = recognise_permutation(node(model, "TopK"), facts)
    assert isinstance(permutation, Permutation)
    assert sorted(v.name for v in inverses(permutation, facts)) == ["y", "z"]
