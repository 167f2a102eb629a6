"""Rotary position embeddings, with the order of features on the way in and on the way out as properties."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.heads import slice_parameters
from fusion_patterns.miss import Miss, miss

__all__ = ["Rope", "RopeLayout", "recognise_rope"]


class RopeLayout(enum.Enum):
    """Where the two members of a rotated pair lie: next to each other, or half the width apart."""

    INTERLEAVED = "interleaved"
    HALF = "half"


@dataclass(frozen=True)
class Rope:
    """`x` (..., D) rotated by the angles of `cos` and `sin`.

    `cos` and `sin` are the values before they are broadcast over the heads of axis `head_axis` (1 or 2): (B, S, D/2)
    when `half_width`, else (B, S, D).
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    head_axis: int
    half_width: bool
    input_layout: RopeLayout
    output_layout: RopeLayout
    node: ir.Node


def recognise_rope(value: ir.Value, facts: Facts) -> Rope | Miss:
    """The rotation that computes a value (B, heads, S, D) or (B, S, heads, D).

    Spellings
    ---------
    1. e, o = x[::2], x[1::2]; Concat(e * cos - o * sin, o * cos + e * sin): interleaved in, half out.
    2. x * cos + Concat(-x[D/2:], x[:D/2]) * sin: half in, half out.
    """
    return facts.remember("rope", value, _rope)


def _rope(value: ir.Value, facts: Facts) -> Rope | Miss:
    node = facts.producer(value)
    if is_op(node, "Concat") and len(node.inputs) == 2:
        return _even_odd(node, value, facts)
    if is_op(node, "Add"):
        return _rotate_half(node, value, facts)
    return miss("rope-unrecognised", value, "a rotation", node.op_type if node is not None else "a graph input")


def _even_odd(node: ir.Node, value: ir.Value, facts: Facts) -> Rope | Miss:
    rank = facts.rank(value)
    first, second = (None if i is None else facts.producer(i) for i in node.inputs)
    if rank is None or facts.axis(node, value) != rank - 1 or not is_op(first, "Sub") or not is_op(second, "Add"):
        return miss("rope-unrecognised", value, "Concat(Sub, Add) over the last axis", "other operators")
    assert first is not None  # is_op has looked at both
    assert second is not None
    even_cos, odd_sin = _factors(facts.input(first, 0), facts), _factors(facts.input(first, 1), facts)
    products = [_factors(facts.input(second, 0), facts), _factors(facts.input(second, 1), facts)]
    if even_cos is None or odd_sin is None or products[0] is None or products[1] is None:
        return miss("rope-unrecognised", value, "products of halves with cos and sin", "other operators")
    for even, cos in (even_cos, even_cos[::-1]):
        for odd, sin in (odd_sin, odd_sin[::-1]):
            x = _every_second(even, 0, facts)
            if x is None or _every_second(odd, 1, facts) is not x:
                continue
            if not _is_pair_of_products(products[0], products[1], (odd, cos), (even, sin)):
                return miss("rope-unrecognised", value, "o * cos + e * sin in the second half", "other products")
            return _with_angles(value, x, cos, sin, True, RopeLayout.INTERLEAVED, node, facts)
    return miss("rope-unrecognised", value, "even and odd features of one value", "other factors")


def _rotate_half(node: ir.Node, value: ir.Value, facts: Facts) -> Rope | Miss:
    products = [_factors(facts.input(node, 0), facts), _factors(facts.input(node, 1), facts)]
    if products[0] is None or products[1] is None:
        return miss("rope-unrecognised", value, "x * cos + rotated(x) * sin", "other operators")
    for direct, crossed in ((products[0], products[1]), (products[1], products[0])):
        for rotated, sin in (crossed, crossed[::-1]):
            x = _rotated_half(rotated, facts)
            if x is None:
                continue
            for given, cos in (direct, direct[::-1]):
                if given is x:
                    return _with_angles(value, x, cos, sin, False, RopeLayout.HALF, node, facts)
    return miss("rope-unrecognised", value, "x * cos + rotated(x) * sin", "an Add of other products")


def _with_angles(
    value: ir.Value,
    x: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    half_width: bool,
    input_layout: RopeLayout,
    node: ir.Node,
    facts: Facts,
) -> Rope | Miss:
    cosine, sine = _before_head_axis(cos, facts), _before_head_axis(sin, facts)
    width = facts.size(x, -1)
    expected = width // 2 if half_width and width else width
    if cosine is None or sine is None or cosine[1] != sine[1]:
        return miss("rope-unrecognised", value, "cos and sin (B, S, D) broadcast over heads", "another shape")
    if expected is None or facts.size(cosine[0], -1) != expected or facts.size(sine[0], -1) != expected:
        return miss("rope-unrecognised", value, f"cos and sin {expected} wide", f"{facts.size(cosine[0], -1)} wide")
    return Rope(x, cosine[0], sine[0], cosine[1], half_width, input_layout, RopeLayout.HALF, node)


def _before_head_axis(value: ir.Value, facts: Facts) -> tuple[ir.Value, int] | None:
    """(B, S, D) of a value (B, 1, S, D) or (B, S, 1, D) that Unsqueeze made of it, and the axis of the 1."""
    node = facts.producer(value)
    if not is_op(node, "Unsqueeze") or facts.rank(facts.input(node, 0)) != 3:
        return None
    axes = facts.integers(facts.input(node, 1))
    return (facts.input(node, 0), axes[0] % 4) if axes in ([1], [2], [-3], [-2]) else None


_Product = tuple[ir.Value, ir.Value]


def _factors(value: ir.Value, facts: Facts) -> _Product | None:
    node = facts.producer(value)
    if not is_op(node, "Mul"):
        return None
    return facts.input(node, 0), facts.input(node, 1)


def _is_pair_of_products(left: _Product, right: _Product, one: _Product, other: _Product) -> bool:
    def same(a: _Product, b: _Product) -> bool:
        return (a[0] is b[0] and a[1] is b[1]) or (a[0] is b[1] and a[1] is b[0])

    return (same(left, one) and same(right, other)) or (same(left, other) and same(right, one))


def _every_second(value: ir.Value, first: int, facts: Facts) -> ir.Value | None:
    """x of x[..., first::2]."""
    node = facts.producer(value)
    if not is_op(node, "Slice"):
        return None
    parameters, rank = slice_parameters(node, facts), facts.rank(value)
    if parameters is None or rank is None:
        return None
    start, end, axis, step = parameters
    width = facts.size(facts.input(node, 0), -1)
    whole = width is not None and end >= width
    return facts.input(node, 0) if (start, axis % rank, step) == (first, rank - 1, 2) and whole else None


def _rotated_half(value: ir.Value, facts: Facts) -> ir.Value | None:
    """x of Concat(-x[D/2:], x[:D/2])."""
    node = facts.producer(value)
    rank = facts.rank(value)
    if not is_op(node, "Concat") or len(node.inputs) != 2 or rank is None:
        return None
    negated = facts.producer(facts.input(node, 0))
    if facts.axis(node, value) != rank - 1 or not is_op(negated, "Neg"):
        return None
    upper, lower = facts.input(negated, 0), facts.input(node, 1)
    x = None if upper is None else _half(upper, rank, facts, upper=True)
    return x if x is not None and lower is not None and _half(lower, rank, facts, upper=False) is x else None


def _half(value: ir.Value, rank: int, facts: Facts, *, upper: bool) -> ir.Value | None:
    """x of x[..., D/2:] or x[..., :D/2]: a Slice, or an output of a Split in two."""
    node = facts.producer(value)
    if node is None or not node.inputs:
        return None
    source = facts.input(node, 0)
    width = facts.size(source, -1)
    if width is None or width % 2 or facts.size(value, -1) != width // 2:
        return None
    if is_op(node, "Split") and len(node.outputs) == 2 and attribute(node, "axis") in (-1, rank - 1):
        return source if node.outputs[int(upper)] is value else None
    if is_op(node, "Slice"):
        parameters = slice_parameters(node, facts)
        if parameters is not None and parameters[2] % rank == rank - 1 and parameters[3] == 1:
            return source if parameters[0] in ((width // 2, -(width // 2)) if upper else (0, -width)) else None
    return None
