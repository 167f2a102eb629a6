"""Rotary embeddings, with the order of features on the way in and out as properties."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.rope import Rope, RopeLayout, recognise_rope, recognise_rope_of
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Array, Run, graph, normal, value

CONSTANTS = {
    "i0": [0],
    "i1": [1],
    "i2": [2],
    "last": [3],
    "four": [4],
    "six": [6],
    "seven": [7],
    "eight": [8],
    "minus_one": [-1],
    "minus_four": [-4],
    "int_max": [2**63 - 1],
    "halves": [4, 4],
    "pairs": [2, 3, 5, 4, 2],
    "wide": [2, 3, 5, 8],
    "end_axis": [4],
}
HALF, INTERLEAVED = RopeLayout.HALF, RopeLayout.INTERLEAVED
ANGLES = "c = Unsqueeze(cos, i1) s = Unsqueeze(sin, i1)"
EVEN, ODD = "e = Slice(x, i0, int_max, last, i2)", "o = Slice(x, i1, int_max, last, i2)"
FIRST, SECOND = "ec = Mul(e, c) os = Mul(o, s) f = Sub(ec, os)", "oc = Mul(o, c) es = Mul(e, s) g = Add(oc, es)"
EVEN_ODD = f"{EVEN} {ODD} {ANGLES} {FIRST} {SECOND} y = Concat<axis=-1>(f, g)"
STACKED = EVEN_ODD.replace(
    "y = Concat<axis=-1>(f, g)",
    "fu = Unsqueeze(f, minus_one) gu = Unsqueeze(g, minus_one) t = Concat<axis=-1>(fu, gu) y = Reshape(t, wide)",
)
COMPLEX = f"""
p = Reshape(x, pairs) e = Slice(p, i0, i1, end_axis, i1) o = Slice(p, i1, i2, end_axis, i1)
c4 = Unsqueeze(cos, i1) s4 = Unsqueeze(sin, i1) c = Unsqueeze(c4, minus_one) s = Unsqueeze(s4, minus_one)
{FIRST} {SECOND} t = Concat<axis=-1>(f, g) y = Reshape(t, wide)
"""
SUM = "xc = Mul(x, c) rs = Mul(r, s) y = Add(xc, rs)"
ROTATE_HALF = f"""
u = Slice(x, four, int_max, last, i1) l = Slice(x, i0, four, last, i1) n = Neg(u) r = Concat<axis=-1>(n, l)
{ANGLES} {SUM}
"""
DRAWN_APART = "p = Reshape(z, pairs) q = Transpose<perm=[0,1,2,4,3]>(p) x = Reshape(q, wide)" + ROTATE_HALF
SHAPES = {"x": (2, 3, 5, 8), "z": (2, 3, 5, 8), "narrow": (2, 5, 4), "wide": (2, 5, 8)}


def swap(body: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    return body


def feeds(model: object, seed: int = 0) -> dict[str, Array]:
    shapes = {v.name: tuple(v.shape) for v in model.graph.inputs}  # type: ignore[attr-defined]
    return normal(seed, **shapes)


def recognise(body: str, wide_angles: bool, opset: int = 20, **values: object) -> Rope | Miss:
    """The rotation that y is; when it is one, what it says has been compared with ONNX Runtime."""
    angles = "float[2,5,8]" if wide_angles else "float[2,5,4]"
    source = {"z" if body.startswith("p = Reshape(z") else "x": "float[2,3,5,8]"}
    model = graph(body, "y", opset, **{**CONSTANTS, **source, "cos": angles, "sin": angles, **values})
    result = recognise_rope(value(model, "y"), Facts())
    if isinstance(result, Rope):
        assert_true(result, value(model, "y"), Run(model, feeds(model)))
    return result


SPELLINGS = {
    "even and odd": (EVEN_ODD, False, INTERLEAVED, HALF),
    "even and odd, factors mirrored": (
        swap(EVEN_ODD, ("Mul(e, c)", "Mul(c, e)"), ("Mul(o, s)", "Mul(s, o)")),
        False,
        INTERLEAVED,
        HALF,
    ),
    "even and odd, summands mirrored": (swap(EVEN_ODD, ("Add(oc, es)", "Add(es, oc)")), False, INTERLEAVED, HALF),
    "even and odd, positive axis": (swap(EVEN_ODD, ("axis=-1", "axis=3")), False, INTERLEAVED, HALF),
    "even and odd, end as a number": (
        swap(EVEN_ODD, ("i0, int_max", "i0, eight"), ("i1, int_max", "i1, eight")),
        False,
        INTERLEAVED,
        HALF,
    ),
    "even until seven": (swap(EVEN_ODD, ("i0, int_max", "i0, seven")), False, INTERLEAVED, HALF),
    "rotate half": (ROTATE_HALF, True, HALF, HALF),
    "rotate half, factors mirrored": (
        swap(ROTATE_HALF, ("Mul(x, c)", "Mul(c, x)"), ("Mul(r, s)", "Mul(s, r)")),
        True,
        HALF,
        HALF,
    ),
    "rotate half, summands mirrored": (swap(ROTATE_HALF, ("Add(xc, rs)", "Add(rs, xc)")), True, HALF, HALF),
    "rotate half, by Split": (
        "l, u = Split<axis=3, num_outputs=2>(x)" + ROTATE_HALF[ROTATE_HALF.index(" n = Neg") :],
        True,
        HALF,
        HALF,
    ),
    "rotate half, sizes given": (
        "l, u = Split<axis=-1>(x, halves)" + ROTATE_HALF[ROTATE_HALF.index(" n = Neg") :],
        True,
        HALF,
        HALF,
    ),
    "rotate half, from the end": (swap(ROTATE_HALF, ("Slice(x, four", "Slice(x, minus_four")), True, HALF, HALF),
    "pairs drawn apart": (DRAWN_APART, True, INTERLEAVED, HALF),
    "stacked": (STACKED, False, INTERLEAVED, INTERLEAVED),
    "complex": (COMPLEX, False, INTERLEAVED, INTERLEAVED),
}


@pytest.mark.parametrize(("body", "wide", "given", "made"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, wide: bool, given: RopeLayout, made: RopeLayout) -> None:
    rope = recognise(body, wide)
    assert isinstance(rope, Rope)
    assert rope.x.name == ("z" if body is DRAWN_APART else "x")
    assert (rope.input_layout, rope.output_layout, rope.half_width) == (given, made, not wide)
    assert rope.cos.fits(1)
    assert not rope.cos.fits(2)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_one_operator(interleaved: int) -> None:
    rope = recognise(f"y = RotaryEmbedding<interleaved={interleaved}>(x, cos, sin)", False, 23)
    assert isinstance(rope, Rope)
    layout = INTERLEAVED if interleaved else HALF
    assert (rope.input_layout, rope.output_layout, rope.half_width) == (layout, layout, True)


def test_the_operator_rotates_heads_on_the_second_axis() -> None:
    """RotaryEmbedding reads four axes as (B, heads, S, D), whatever they are called."""
    rope = recognise("y = RotaryEmbedding(x, cos, sin)", False, 23)
    assert isinstance(rope, Rope)
    assert rope.cos.fits(1)
    assert not rope.cos.fits(2)


@pytest.mark.parametrize(("body", "wide"), [(EVEN_ODD, False), (ROTATE_HALF, True)], ids=["interleaved", "half"])
@pytest.mark.parametrize(("axis", "head_axis"), [([2], 2), ([-2], 2), ([1], 1), ([-3], 1)], ids=str)
def test_head_axis(body: str, wide: bool, axis: list[int], head_axis: int) -> None:
    body = swap(body, ("Unsqueeze(cos, i1)", "Unsqueeze(cos, ha)"), ("Unsqueeze(sin, i1)", "Unsqueeze(sin, ha)"))
    rope = recognise(body, wide, ha=axis, x="float[2,3,5,8]" if head_axis == 1 else "float[2,5,3,8]")
    assert isinstance(rope, Rope)
    assert rope.cos.fits(head_axis)
    assert rope.sin.fits(head_axis)
    assert not rope.cos.fits(3 - head_axis)


def test_two_halves_without_their_concat() -> None:
    model = graph(
        swap(EVEN_ODD, ("y = Concat<axis=-1>(f, g)", "y = Concat<axis=-1>(x, f, g)")),
        "y",
        **CONSTANTS,
        x="float[2,3,5,8]",
        cos="float[2,5,4]",
        sin="float[2,5,4]",
    )
    parts = value(model, "f"), value(model, "g")
    rope = recognise_rope_of(parts, Facts())
    assert isinstance(rope, Rope)
    run = Run(model, feeds(model))
    np.testing.assert_allclose(run.of(value(model, "y"))[..., 8:], np.concatenate([run.of(p) for p in parts], -1))
    assert isinstance(recognise_rope_of(parts[::-1], Facts()), Miss)


@pytest.mark.parametrize(
    ("body", "wide", "made"),
    [(COMPLEX, False, INTERLEAVED), (DRAWN_APART.replace("(z,", "(x0,"), True, HALF)],
    ids=["complex", "pairs drawn apart"],
)
@pytest.mark.parametrize(("axis", "tokens"), [(1, 5), (2, 5), (1, 1)])
def test_rows_that_become_a_head_as_they_become_pairs(
    body: str, wide: bool, made: RopeLayout, axis: int, tokens: int
) -> None:
    """(B, S, D) reshaped to (B, 1, S, D/2, 2) or (B, S, 1, D/2, 2) at once."""
    rows = "x0" if wide else "x"
    pairs, whole = [2, tokens, 4, 2], [2, tokens, 8]
    pairs.insert(axis, 1)
    whole.insert(axis, 1)
    for angles in ("cos", "sin"):
        body = body.replace(f"Unsqueeze({angles}, i1)", f"Unsqueeze({angles}, axis)")
    model = graph(
        body,
        "y",
        **{**CONSTANTS, "pairs": pairs, "wide": whole, "axis": [axis]},
        **{rows: f"float[2,{tokens},8]"},
        cos=f"float[2,{tokens},{8 if wide else 4}]",
        sin=f"float[2,{tokens},{8 if wide else 4}]",
    )
    rope = recognise_rope(value(model, "y"), Facts())
    assert isinstance(rope, Rope)
    assert (rope.x.name, rope.added_axis) == (rows, axis if tokens > 1 else 1)
    assert (rope.input_layout, rope.output_layout) == (INTERLEAVED, made)
    assert_true(rope, value(model, "y"), Run(model, feeds(model)))


def test_cos_and_sin_exchanged_are_other_angles() -> None:
    """The description names what is multiplied with what."""
    rope = recognise(swap(EVEN_ODD, (ANGLES, "c = Unsqueeze(sin, i1) s = Unsqueeze(cos, i1)")), False)
    assert isinstance(rope, Rope)


def test_halves_of_wide_angles_may_differ() -> None:
    """`recognise` has compared with angles whose halves are unrelated."""
    assert isinstance(recognise(ROTATE_HALF, True), Rope)


OTHERS = {
    "cos and sin exchanged in the second half": swap(
        EVEN_ODD, ("oc = Mul(o, c)", "oc = Mul(o, s)"), ("es = Mul(e, s)", "es = Mul(e, c)")
    ),
    "even and odd exchanged in the second half": swap(
        EVEN_ODD, ("oc = Mul(o, c)", "oc = Mul(e, c)"), ("es = Mul(e, s)", "es = Mul(o, s)")
    ),
    "even and odd exchanged": swap(
        EVEN_ODD, ("e = Slice(x, i0", "e = Slice(x, i1"), ("o = Slice(x, i1", "o = Slice(x, i0")
    ),
    "sign of the first half": swap(EVEN_ODD, ("f = Sub(ec, os)", "f = Add(ec, os)")),
    "sign of the second half": swap(EVEN_ODD, ("g = Add(oc, es)", "g = Sub(oc, es)")),
    "difference the wrong way round": swap(EVEN_ODD, ("f = Sub(ec, os)", "f = Sub(os, ec)")),
    "results exchanged": swap(EVEN_ODD, ("(f, g)", "(g, f)")),
    "concatenated along another axis": swap(EVEN_ODD, ("axis=-1", "axis=2")),
    "even features twice": swap(EVEN_ODD, ("i1, int_max", "i0, int_max")),
    "halves for even and odd": swap(
        EVEN_ODD, (EVEN, "e = Slice(x, i0, four, last, i1)"), (ODD, "o = Slice(x, four, eight, last, i1)")
    ),
    "features of two values": swap(EVEN_ODD, ("o = Slice(x", "o = Slice(other")),
    "angles per head": swap(EVEN_ODD, ("c = Unsqueeze(cos, i1)", "c = Relu(per_head)")),
    "stacked the other way round": swap(STACKED, ("(fu, gu)", "(gu, fu)")),
    "stacked before the pairs": swap(
        STACKED,
        ("Unsqueeze(f, minus_one)", "Unsqueeze(f, last)"),
        ("Unsqueeze(g, minus_one)", "Unsqueeze(g, last)"),
        ("t = Concat<axis=-1>", "t = Concat<axis=3>"),
    ),
    "stacked, not folded": swap(STACKED, ("y = Reshape(t, wide)", "y = Relu(t)")),
    "stacked, folded into the tokens": swap(STACKED, ("y = Reshape(t, wide)", "y = Reshape(t, tokens)")),
    "complex, real part twice": swap(COMPLEX, ("o = Slice(p, i1, i2", "o = Slice(p, i0, i1")),
    "complex, of halves": swap(COMPLEX, ("Reshape(x, pairs)", "Reshape(x, halved)"), ("end_axis", "last")).replace(
        "y = Reshape(t, wide)", "y = Relu(t)"
    ),
}
WIDE_OTHERS = {
    "no minus": swap(ROTATE_HALF, ("(n, l)", "(u, l)")),
    "minus on the other half": swap(
        ROTATE_HALF, ("n = Neg(u) r = Concat<axis=-1>(n, l)", "n = Neg(l) r = Concat<axis=-1>(u, n)")
    ),
    "halves not exchanged": swap(
        ROTATE_HALF, ("n = Neg(u) r = Concat<axis=-1>(n, l)", "n = Neg(l) r = Concat<axis=-1>(n, u)")
    ),
    "subtracted": swap(ROTATE_HALF, ("Add(xc, rs)", "Sub(xc, rs)")),
    "rotated value of another": swap(ROTATE_HALF, ("Mul(x, c)", "Mul(other, c)")),
    "lower half of another": swap(ROTATE_HALF, ("l = Slice(x", "l = Slice(other")),
    "upper part shifted": swap(ROTATE_HALF, ("Slice(x, four, int_max", "Slice(x, i2, six")),
    "upper part of every second": swap(
        ROTATE_HALF, ("Slice(x, four, int_max, last, i1)", "Slice(x, i0, int_max, last, i2)")
    ),
    "halves along the tokens": swap(
        ROTATE_HALF,
        ("axis=-1", "axis=2"),
        ("last, i1", "i2, i1"),
        ("four, int_max", "i2, int_max"),
        ("i0, four", "i0, i2"),
    ),
    "another function": "y = Add(x, x)",
}


@pytest.mark.parametrize(
    ("body", "wide"),
    [*((b, False) for b in OTHERS.values()), *((b, True) for b in WIDE_OTHERS.values())],
    ids=[*OTHERS, *WIDE_OTHERS],
)
def test_others_are_refused(body: str, wide: bool) -> None:
    tokens = "halves along the tokens"
    more = {"other": "float[2,3,5,8]", "per_head": "float[2,3,5,4]", "tokens": [2, 3, 10, 4], "halved": [2, 3, 5, 2, 4]}
    if body == WIDE_OTHERS[tokens]:
        more |= {"x": "float[2,3,4,8]", "cos": "float[2,4,8]", "sin": "float[2,4,8]"}
    if body == OTHERS["complex, of halves"]:
        more |= {"cos": "float[2,5,1]", "sin": "float[2,5,1]", "last": [3]}
    assert isinstance(recognise(body, wide, **more), Miss)


def test_the_middle_of_pairs_drawn_apart_is_not_exchanged() -> None:
    """Without the transpose nothing was drawn apart: half in, half out."""
    body = swap(DRAWN_APART, ("q = Transpose<perm=[0,1,2,4,3]>(p)", "q = Identity(p)"))
    rope = recognise(body, True)
    assert isinstance(rope, Rope)
    assert rope.input_layout is HALF


def test_angles_of_another_width_are_refused() -> None:
    """One angle for all pairs."""
    assert isinstance(recognise(EVEN_ODD, False, cos="float[2,5,1]", sin="float[2,5,1]"), Miss)


def test_part_of_the_features_rotated_by_the_operator_is_refused() -> None:
    result = recognise(
        "y = RotaryEmbedding<rotary_embedding_dim=4, num_heads=3>(x, cos, sin)",
        False,
        23,
        cos="float[2,5,2]",
        sin="float[2,5,2]",
    )
    assert isinstance(result, Miss)


def test_tables_looked_up_by_the_operator_are_refused() -> None:
    result = recognise(
        "y = RotaryEmbedding(x, cos, sin, positions)",
        False,
        23,
        cos="float[9,4]",
        sin="float[9,4]",
        positions=np.arange(10).reshape(2, 5),
    )
    assert isinstance(result, Miss)
