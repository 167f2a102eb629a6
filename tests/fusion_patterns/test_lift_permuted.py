"""Transposes: every spelling, seen through as one permutation."""

from __future__ import annotations

import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.permuted import recognise_permuted
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

X = "float[B,S,4,6]"
FOLD = "f = Reshape(x, fold) t = Transpose<perm=[0,2,1]>(f) y = Reshape(t, unfold)"
COMPUTED = """
s = Shape(x)
last = Slice(s, [-1], int_max) second = Slice(s, [-2], [-1]) lead = Slice(s, int_min, [-2])
""".replace("[-1]", "m1").replace("[-2]", "m2")
SPELLINGS = {
    "none": ("y = Relu(x)", {}, "y", (0, 1, 2, 3)),
    "transpose": ("y = Transpose<perm=[0,2,1,3]>(x)", {}, "x", (0, 2, 1, 3)),
    "default perm": ("y = Transpose(x)", {}, "x", (3, 2, 1, 0)),
    "chain": ("a = Transpose<perm=[3,1,2,0]>(x) y = Transpose<perm=[1,2,3,0]>(a)", {}, "x", (1, 2, 0, 3)),
    "undone": ("a = Transpose<perm=[1,3,0,2]>(x) y = Transpose<perm=[2,0,3,1]>(a)", {}, "x", (0, 1, 2, 3)),
    "reversed twice": ("a = Transpose(x) y = Transpose<perm=[0,1,3,2]>(a)", {}, "x", (3, 2, 0, 1)),
    "folded by numbers": (FOLD, {"fold": [-1, 4, 6], "unfold": [2, 3, 6, 4], "x": "float[2,3,4,6]"}, "x", (0, 1, 3, 2)),
    "folded, batch inferred": (
        FOLD,
        {"fold": [-1, 4, 6], "unfold": [-1, 3, 6, 4], "x": "float[2,3,4,6]"},
        "x",
        (0, 1, 3, 2),
    ),
    "folded by shape arithmetic": (
        COMPUTED + "fold = Concat<axis=0>(m1, second, last) unfold = Concat<axis=0>(lead, last, second)" + FOLD,
        {"m1": [-1], "m2": [-2], "int_max": [2**63 - 1], "int_min": [-(2**63)]},
        "x",
        (0, 1, 3, 2),
    ),
    "folded, then transposed": (
        FOLD.replace("y =", "u =") + " y = Transpose<perm=[0,2,1,3]>(u)",
        {"fold": [-1, 4, 6], "unfold": [2, 3, 6, 4], "x": "float[2,3,4,6]"},
        "x",
        (0, 3, 1, 2),
    ),
}


@pytest.mark.parametrize(("body", "values", "base", "perm"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, values: dict, base: str, perm: tuple[int, ...]) -> None:
    model = graph(body, "y", **{"x": X, **values})
    permuted = recognise_permuted(value(model, "y"), Facts())
    assert permuted is not None
    assert (permuted.base.name, permuted.perm) == (base, perm)
    assert permuted.is_identity == (perm == (0, 1, 2, 3))
    assert_true(permuted, value(model, "y"), Run(model, normal(x=(2, 3, 4, 6))))


STATIC = {"x": "float[2,3,4,6]"}
OTHERS = {
    "another fold": (FOLD, {"fold": [2, 12, 6], "unfold": [2, 3, 4, 6]}),
    "rows and columns not exchanged back": (FOLD, {"fold": [-1, 4, 6], "unfold": [2, 3, 4, 6]}),
    "leading axes exchanged": (FOLD, {"fold": [-1, 4, 6], "unfold": [3, 2, 6, 4]}),
    "another transpose": (FOLD.replace("[0,2,1]", "[2,1,0]"), {"fold": [-1, 4, 6], "unfold": [2, 3, 6, 4]}),
    "no transpose": ("f = Reshape(x, fold) y = Reshape(f, unfold)", {"fold": [-1, 4, 6], "unfold": [2, 3, 6, 4]}),
}


@pytest.mark.parametrize(("body", "values"), OTHERS.values(), ids=OTHERS)
def test_other_reshapes_stay(body: str, values: dict) -> None:
    model = graph(body, "y", **STATIC, **values)
    permuted = recognise_permuted(value(model, "y"), Facts())
    assert permuted is not None
    assert permuted.base.name != "x"
    assert_true(permuted, value(model, "y"), Run(model, normal(x=(2, 3, 4, 6))))
