"""Rotary embeddings, with the order of features on the way in and out as properties."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.rope import Rope, RopeLayout, recognise_rope
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

CONSTANTS = {"i0": [0], "i1": [1], "i2": [2], "last": [3], "four": [4], "minus_four": [-4], "seven": [7], "int_max": [2**63 - 1]}
EVEN = "e = Slice(x, i0, int_max, last, i2)"
ODD = "o = Slice(x, i1, int_max, last, i2)"
ANGLES = "c = Unsqueeze(cos, i1) s = Unsqueeze(sin, i1)"
FIRST = "ec = Mul(e, c) os = Mul(o, s) f = Sub(ec, os)"
SECOND = "oc = Mul(o, c) es = Mul(e, s) g = Add(oc, es)"
JOIN = "y = Concat<axis=-1>(f, g)"
EVEN_ODD = (EVEN, ODD, ANGLES, FIRST, SECOND, JOIN)
UPPER, LOWER = "u = Slice(x, four, int_max, last, i1)", "l = Slice(x, i0, four, last, i1)"
HALVES = f"{UPPER} {LOWER}"
TURN = "n = Neg(u) r = Concat<axis=-1>(n, l)"
SUM = "xc = Mul(x, c) rs = Mul(r, s) y = Add(xc, rs)"
ROTATE_HALF = (HALVES, TURN, ANGLES, SUM)
X, NARROW, WIDE = "float[B,N,S,8]", "float[B,S,4]", "float[B,S,8]"
SHAPES = {X: (2, 3, 5, 8), "float[B,S,N,8]": (2, 5, 3, 8), NARROW: (2, 5, 4), WIDE: (2, 5, 8)}


def swap(parts: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    assert any(old in part for part in parts)
    return tuple(part.replace(old, new) for part in parts)


INTERLEAVED = {
    "even and odd": EVEN_ODD,
    "factors mirrored": swap(swap(EVEN_ODD, "Mul(e, c)", "Mul(c, e)"), "Mul(o, s)", "Mul(s, o)"),
    "summands mirrored": swap(EVEN_ODD, "Add(oc, es)", "Add(es, oc)"),
    "positive axis": swap(EVEN_ODD, "axis=-1", "axis=3"),
    "end as a number": swap(swap(EVEN_ODD, "i0, int_max", "i0, eight"), "i1, int_max", "i1, eight"),
}
HALF = {
    "rotate half": ROTATE_HALF,
    "factors mirrored": swap(swap(ROTATE_HALF, "Mul(x, c)", "Mul(c, x)"), "Mul(r, s)", "Mul(s, r)"),
    "summands mirrored": swap(ROTATE_HALF, "Add(xc, rs)", "Add(rs, xc)"),
    "halves by Split": ("l, u = Split<axis=3, num_outputs=2>(x)", *ROTATE_HALF[1:]),
    "halves by Split, sizes given": ("l, u = Split<axis=-1>(x, sizes)", *ROTATE_HALF[1:]),
    "upper half from the end": swap(ROTATE_HALF, "Slice(x, four, int_max", "Slice(x, minus_four, int_max"),
}
MORE = {"eight": [8], "sizes": [4, 4]}


def recognise(parts: tuple[str, ...], angles: str, x: str = X, **values: object) -> tuple[Rope | Miss, Run | None]:
    types = {"x": x, "cos": angles, "sin": angles, **values}
    model = graph("\n".join(parts), "y", **types, **CONSTANTS, **MORE)
    result = recognise_rope(value(model, "y"), Facts())
    if isinstance(result, Miss):
        return result, None
    run = Run(model, normal(x=SHAPES[x], cos=SHAPES[angles], sin=SHAPES[angles]))
    assert_true(result, value(model, "y"), run)
    return result, run


@pytest.mark.parametrize("parts", INTERLEAVED.values(), ids=INTERLEAVED)
def test_interleaved(parts: tuple[str, ...]) -> None:
    rope, _ = recognise(parts, NARROW)
    assert isinstance(rope, Rope)
    assert (rope.x.name, rope.cos.name, rope.sin.name, rope.head_axis, rope.half_width) == ("x", "cos", "sin", 1, True)
    assert (rope.input_layout, rope.output_layout) == (RopeLayout.INTERLEAVED, RopeLayout.HALF)


@pytest.mark.parametrize("parts", HALF.values(), ids=HALF)
def test_half(parts: tuple[str, ...]) -> None:
    rope, _ = recognise(parts, WIDE)
    assert isinstance(rope, Rope)
    assert (rope.x.name, rope.cos.name, rope.sin.name, rope.head_axis, rope.half_width) == ("x", "cos", "sin", 1, False)
    assert (rope.input_layout, rope.output_layout) == (RopeLayout.HALF, RopeLayout.HALF)


@pytest.mark.parametrize(("parts", "angles"), [(EVEN_ODD, NARROW), (ROTATE_HALF, WIDE)], ids=["interleaved", "half"])
@pytest.mark.parametrize(("axis", "head_axis"), [("i2", 2), ("minus_two", 2), ("minus_three", 1)])
def test_head_axis(parts: tuple[str, ...], angles: str, axis: str, head_axis: int) -> None:
    parts = swap(swap(parts, "Unsqueeze(cos, i1)", f"Unsqueeze(cos, {axis})"), "Unsqueeze(sin, i1)", f"Unsqueeze(sin, {axis})")
    x = X if head_axis == 1 else "float[B,S,N,8]"
    rope, _ = recognise(parts, angles, x, minus_two=[-2], minus_three=[-3])
    assert isinstance(rope, Rope)
    assert rope.head_axis == head_axis


def test_cos_and_sin_exchanged_are_other_angles() -> None:
    """A rotation by other angles is a rotation: the description names what is multiplied with what."""
    rope, _ = recognise(swap(swap(swap(EVEN_ODD, "Unsqueeze(cos", "Unsqueeze(tmp"), "Unsqueeze(sin", "Unsqueeze(cos"), "Unsqueeze(tmp", "Unsqueeze(sin"), NARROW)
    assert isinstance(rope, Rope)
    assert (rope.cos.name, rope.sin.name) == ("sin", "cos")


OTHERS = {
    "cos and sin exchanged in the second half": (swap(swap(EVEN_ODD, "oc = Mul(o, c)", "oc = Mul(o, s)"), "es = Mul(e, s)", "es = Mul(e, c)"), NARROW),
    "even and odd exchanged in the second half": (swap(swap(EVEN_ODD, "oc = Mul(o, c)", "oc = Mul(e, c)"), "es = Mul(e, s)", "es = Mul(o, s)"), NARROW),
    "sign of the first half": (swap(EVEN_ODD, "f = Sub(ec, os)", "f = Add(ec, os)"), NARROW),
    "sign of the second half": (swap(EVEN_ODD, "g = Add(oc, es)", "g = Sub(oc, es)"), NARROW),
    "difference the wrong way round": (swap(EVEN_ODD, "f = Sub(ec, os)", "f = Sub(os, ec)"), NARROW),
    "halves exchanged": (swap(EVEN_ODD, "(f, g)", "(g, f)"), NARROW),
    "concatenated along another axis": (swap(EVEN_ODD, "axis=-1", "axis=2"), NARROW),
    "even features twice": (swap(EVEN_ODD, "i1, int_max", "i0, int_max"), NARROW),
    "step 3": (swap(EVEN_ODD, "int_max, last, i2", "seven, last, i2"), NARROW),
    "of two values": (swap(EVEN_ODD, "o = Slice(x", "o = Slice(z"), NARROW),
    "angles per head": (swap(EVEN_ODD, ANGLES, "c = Relu(heads) s = Unsqueeze(sin, i1)"), NARROW),
    "cos and sin broadcast over other axes": (swap(EVEN_ODD, "Unsqueeze(sin, i1)", "Unsqueeze(sin, i2)"), NARROW),
    "no minus": (swap(ROTATE_HALF, "Concat<axis=-1>(n, l)", "Concat<axis=-1>(u, l)"), WIDE),
    "minus on the other half": (swap(ROTATE_HALF, TURN, "n = Neg(l) r = Concat<axis=-1>(u, n)"), WIDE),
    "halves not exchanged": (swap(ROTATE_HALF, TURN, "n = Neg(l) r = Concat<axis=-1>(n, u)"), WIDE),
    "subtracted": (swap(ROTATE_HALF, "Add(xc, rs)", "Sub(xc, rs)"), WIDE),
    "rotated value of another": (swap(ROTATE_HALF, "Mul(x, c)", "Mul(z, c)"), WIDE),
    "cos on both": (swap(ROTATE_HALF, "Mul(r, s)", "Mul(r, c)"), WIDE),
    "lower half of another": (swap(ROTATE_HALF, "l = Slice(x", "l = Slice(z"), WIDE),
    "upper part shifted": (swap(ROTATE_HALF, "Slice(x, four, int_max", "Slice(x, i2, six"), WIDE),
    "other function": (("y = Add(x, x)",), WIDE),
}


@pytest.mark.parametrize(("parts", "angles"), OTHERS.values(), ids=OTHERS)
def test_others_are_refused(parts: tuple[str, ...], angles: str) -> None:
    more = {"z": "float[2,3,5,8]", "heads": "float[2,3,5,4]", "six": [6]}
    square = {"float[B,S,4]": "float[2,5,4]", "float[B,S,8]": "float[2,5,8]"}
    if "other axes" in str(parts) or "Unsqueeze(sin, i2)" in str(parts):
        square = {"float[B,S,4]": "float[2,3,4]"}
    types = {"x": "float[2,3,5,8]" if len(square) == 2 else "float[2,3,3,8]", "cos": square[angles], "sin": square[angles]}
    if len(square) == 1:
        more = {}
    model = graph("\n".join(parts), "y", **types, **CONSTANTS, **MORE, **more)
    result = recognise_rope(value(model, "y"), Facts())
    if "cos on both" in OTHERS and parts == OTHERS["cos on both"][0] and not isinstance(result, Miss):
        assert result.cos is result.sin  # the angles that are multiplied with what, even if they are no angles
        run = Run(model, normal(x=(2, 3, 5, 8), z=(2, 3, 5, 8), heads=(2, 3, 5, 4), cos=(2, 5, 8), sin=(2, 5, 8)))
        return assert_true(result, value(model, "y"), run)
    assert isinstance(result, Miss)
    return None


def test_halves_of_the_angles_may_differ() -> None:
    rope, run = recognise(ROTATE_HALF, WIDE)
    assert isinstance(rope, Rope)
    assert run is not None
    cos = run.of(rope.cos)
    assert not np.allclose(cos[..., :4], cos[..., 4:])
