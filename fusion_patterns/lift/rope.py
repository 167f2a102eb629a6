"""Rotary position embeddings, with the order of features on the way in and on the way out as properties."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss

__all__ = ["Angles", "Rope", "RopeLayout", "recognise_rope", "recognise_rope_of"]


class RopeLayout(enum.Enum):
    """Where the two members of a rotated pair lie: next to each other, or half the width apart."""

    INTERLEAVED = "interleaved"
    HALF = "half"


@dataclass(frozen=True)
class Angles:
    """cos or sin of the angles: `value` is (B, 1, S, W), (B, S, 1, W) or (B, S, W), perhaps with a last axis of size 1.

    `head_axes` are the axes of the rotated value that may be the heads (two where S is 1 as well). For rows without
    batch, x (T, N, D) or (T, D), `value` is (T, 1, W) or (T, W).
    """

    value: ir.Value
    head_axes: tuple[int, ...]

    def fits(self, head_axis: int) -> bool:
        """Whether these angles are broadcast over heads that lie on `head_axis` of the rotated value."""
        return head_axis in self.head_axes


@dataclass(frozen=True)
class Rope:
    """`x` (..., D) rotated by the angles of `cos` and `sin`, which are D/2 wide when `half_width`, else D.

    `added_axis` is an axis of size 1 that the rotated value has and `x` lacks: the head axis of rows (B, S, D).
    """

    x: ir.Value
    cos: Angles
    sin: Angles
    half_width: bool
    input_layout: RopeLayout
    output_layout: RopeLayout
    node: ir.Node
    added_axis: int | None = None


def recognise_rope(value: ir.Value, facts: Facts) -> Rope | Miss:
    """The rotation that computes a value (B, heads, S, D) or (B, S, heads, D).

    Spellings
    ---------
    1. e, o = x[::2], x[1::2]; Concat(e * cos - o * sin, o * cos + e * sin): interleaved in, half out.
    2. x * cos + Concat(-x[D/2:], x[:D/2]) * sin: half in, half out.
    3. 2 on x whose pairs were drawn apart before (Reshape, Transpose, Reshape): interleaved in, half out.
    4. The halves of 1 stacked on a new last axis, then Reshape: interleaved in and out.
    5. Complex product: x as (.., D/2, 2), parts sliced off the last axis, Concat, Reshape: interleaved in and out.
       Here and in 3, the Reshape to pairs may add a head axis of size 1 as well.
    6. RotaryEmbedding on four axes with angles (B, S, D/2).
    """
    return facts.remember("rope", value, _rope)


def recognise_rope_of(parts: tuple[ir.Value, ...], facts: Facts) -> Rope | Miss:
    """The rotation that one value is, or that two values are the halves of (spelling 1 without its Concat)."""
    if len(parts) == 1:
        return recognise_rope(parts[0], facts)
    rotated = _pair(parts[0], parts[1], RopeLayout.HALF, facts)
    return rotated if rotated is not None else _no_rotation(parts[0], "halves e c - o s and o c + e s", "other values")


def _rope(value: ir.Value, facts: Facts) -> Rope | Miss:
    node = facts.producer(value)
    rotated: Rope | None = None
    if is_op(node, "Concat") and len(node.inputs) == 2 and facts.axis(node, node.outputs[0]) == _last(node, facts):
        rotated = _pair(facts.input(node, 0), facts.input(node, 1), RopeLayout.HALF, facts)
    elif is_op(node, "Add"):
        rotated = _rotate_half(node, facts)
    elif is_op(node, "Reshape"):
        rotated = _joined_pairs(node, facts)
    elif is_op(node, "RotaryEmbedding"):
        rotated = _single_node(node, facts)
    if rotated is None:
        return _no_rotation(value, "a rotation", node.op_type if node is not None else "a graph input")
    width = facts.size(rotated.x, -1)
    expected = width // 2 if rotated.half_width and width else width
    found = [_width(angles, facts) for angles in (rotated.cos, rotated.sin)]
    if expected is None or any(width not in (expected, None) for width in found):  # unknown: the product fits it
        return _no_rotation(value, f"cos and sin {expected} wide", f"{found[0]} and {found[1]} wide")
    return rotated


def _no_rotation(value: ir.Value, expected: str, found: str) -> Miss:
    return miss("rope-unrecognised", value, expected, found)


def _last(node: ir.Node, facts: Facts) -> int:
    return (facts.rank(node.outputs[0]) or 0) - 1


def _width(angles: Angles, facts: Facts) -> int | None:
    rank = facts.rank(angles.value)
    return facts.size(angles.value, 3 if rank == 5 else -1)


def _pair(first: ir.Value, second: ir.Value, output: RopeLayout, facts: Facts) -> Rope | None:
    """first = e * cos - o * sin and second = o * cos + e * sin, with e and o the members of interleaved pairs of x."""
    difference, total = facts.producer(first), facts.producer(second)
    if not is_op(difference, "Sub") or not is_op(total, "Add"):
        return None
    minuend, subtrahend = (_factors(facts.input(difference, index), facts) for index in (0, 1))
    products = [_factors(facts.input(total, index), facts) for index in (0, 1)]
    if minuend is None or subtrahend is None or products[0] is None or products[1] is None:
        return None
    for even, cos in (minuend, minuend[::-1]):
        for odd, sin in (subtrahend, subtrahend[::-1]):
            pairs = _member(even, 0, facts)
            if pairs is None or _member(odd, 1, facts) != pairs:
                continue
            if not _is_pair_of_products(products[0], products[1], (odd, cos), (even, sin)):
                return None
            rank = pairs.rank(facts)
            angles = _angles(cos, rank, facts), _angles(sin, rank, facts)
            if angles[0] is None or angles[1] is None:
                return None
            added = pairs.added_axis
            return Rope(pairs.x, angles[0], angles[1], True, RopeLayout.INTERLEAVED, output, difference, added)
    return None


def _rotate_half(node: ir.Node, facts: Facts) -> Rope | None:
    products = [_factors(facts.input(node, index), facts) for index in (0, 1)]
    if products[0] is None or products[1] is None:
        return None
    for direct, crossed in ((products[0], products[1]), (products[1], products[0])):
        for rotated, sin in (crossed, crossed[::-1]):
            x = _rotated_half(rotated, facts)
            cos = None if x is None else _other_factor(direct, x)
            if x is None or cos is None:
                continue
            rank = facts.rank(x)
            angles = _angles(cos, rank, facts), _angles(sin, rank, facts)
            if angles[0] is None or angles[1] is None:
                return None
            pairs = _drawn_apart(x, facts)
            if pairs is None:
                return Rope(x, angles[0], angles[1], False, RopeLayout.HALF, RopeLayout.HALF, node)
            layouts = RopeLayout.INTERLEAVED, RopeLayout.HALF
            return Rope(pairs.x, angles[0], angles[1], False, *layouts, node, pairs.added_axis)
    return None


def _other_factor(factors: _Product, x: ir.Value) -> ir.Value | None:
    return factors[1] if factors[0] is x else factors[0] if factors[1] is x else None


def _joined_pairs(reshape: ir.Node, facts: Facts) -> Rope | None:
    """Reshape(Concat of both results along a new or a unit last axis): pairs next to each other again."""
    join = facts.producer(facts.input(reshape, 0))
    if not is_op(join, "Concat") or len(join.inputs) != 2 or facts.axis(join, join.outputs[0]) != _last(join, facts):
        return None
    if facts.size(join.outputs[0], -1) != 2 or not _folds_last_two(reshape, facts):
        return None
    halves = [_without_last_axis(facts.input(join, index), facts) for index in (0, 1)]
    return _pair(halves[0], halves[1], RopeLayout.INTERLEAVED, facts)


def _without_last_axis(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before Unsqueeze added a last axis; as it is where its last axis came otherwise."""
    node = facts.producer(value)
    if is_op(node, "Unsqueeze") and facts.integers(facts.input(node, 1)) in ([-1], [(facts.rank(value) or 0) - 1]):
        return facts.input(node, 0)
    return value


def _folds_last_two(reshape: ir.Node, facts: Facts) -> bool:
    """Whether the last two axes become the last one; those before may be folded as well."""
    source, result = facts.shape(facts.input(reshape, 0)), facts.shape(reshape.outputs[0])
    if source is None or result is None or len(source) < 3 or len(result) < 2:
        return False
    return result[-1] == _product(source[-2], source[-1])


def _product(left: object, right: object) -> int | None:
    return left * right if isinstance(left, int) and isinstance(right, int) else None


def _single_node(node: ir.Node, facts: Facts) -> Rope | None:
    x = facts.input(node, 0)
    if facts.rank(x) != 4 or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    if attribute(node, "rotary_embedding_dim", 0) not in (0, facts.size(x, -1)):
        return None
    cos, sin = (Angles(facts.input(node, index), (1,)) for index in (1, 2))  # it takes axis 1 for the heads
    layout = RopeLayout.INTERLEAVED if attribute(node, "interleaved", 0) else RopeLayout.HALF
    return Rope(x, cos, sin, True, layout, layout, node)


def _angles(value: ir.Value, rank: int | None, facts: Facts) -> Angles | None:
    """Angles of as many axes as what they rotate, or a fifth of size 1, and those that may be broadcast over heads."""
    shape = facts.shape(value)
    if rank in (2, 3):
        if shape is None or len(shape) != rank:
            return None
        return Angles(value, tuple(axis for axis in range(rank - 1) if shape[axis] == 1))
    if shape is None or len(shape) not in (4, 5) or (len(shape) == 5 and shape[4] != 1):
        return None
    head_axes = tuple(axis for axis in (1, 2) if shape[axis] == 1)
    return Angles(value, head_axes) if head_axes else None


_Product = tuple[ir.Value, ir.Value]


def _factors(value: ir.Value, facts: Facts) -> _Product | None:
    node = facts.producer(value)
    return (facts.input(node, 0), facts.input(node, 1)) if is_op(node, "Mul") else None


def _is_pair_of_products(left: _Product, right: _Product, one: _Product, other: _Product) -> bool:
    def same(a: _Product, b: _Product) -> bool:
        return (a[0] is b[0] and a[1] is b[1]) or (a[0] is b[1] and a[1] is b[0])

    return (same(left, one) and same(right, other)) or (same(left, other) and same(right, one))


@dataclass(frozen=True)
class _Pairs:
    """`x` (.., D) seen as pairs of neighbours; `added_axis` as in Rope."""

    x: ir.Value
    added_axis: int | None = None

    def rank(self, facts: Facts) -> int | None:
        """How many axes the rotated value has."""
        rank = facts.rank(self.x)
        return rank if rank is None or self.added_axis is None else rank + 1


def _member(value: ir.Value, which: int, facts: Facts) -> _Pairs | None:
    """x of x[..., which::2], or of x as (.., D/2, 2) with member `which` cut from the last axis."""
    cut = recognise_slice(value, facts)
    rank = facts.rank(value)
    if cut is None or rank is None or cut.axis != rank - 1 or cut.start != which:
        return None
    width = facts.size(cut.source, -1)
    if cut.step == 2 and width is not None and cut.size == width // 2 and width % 2 == 0:
        return _Pairs(cut.source)
    if cut.step == 1 and cut.size == 1 and width == 2:
        return _unfolded(cut.source, facts)
    return None


def _unfolded(pairs: ir.Value, facts: Facts) -> _Pairs | None:
    """x (.., D) of Reshape(x, (.., D/2, 2)), which may add one axis of size 1."""
    reshape = facts.producer(pairs)
    if not is_op(reshape, "Reshape"):
        return None
    x = facts.input(reshape, 0)
    wide, narrow = facts.shape(x), facts.shape(pairs)
    if wide is None or narrow is None or narrow[-1] != 2 or _product(narrow[-2], narrow[-1]) != wide[-1]:
        return None
    outer = list(narrow[:-2])
    if outer == list(wide[:-1]):
        return _Pairs(x)
    for axis in range(1, len(outer)):
        if outer[axis] == 1 and outer[:axis] + outer[axis + 1 :] == list(wide[:-1]):
            return _Pairs(x, axis)
    return None


def _drawn_apart(value: ir.Value, facts: Facts) -> _Pairs | None:
    """x of Reshape(Transpose(Reshape(x, (.., D/2, 2)), last two), (.., D)): interleaved pairs put in half order."""
    fold = facts.producer(value)
    swap = facts.producer(facts.input(fold, 0)) if is_op(fold, "Reshape") else None
    if fold is None or not is_op(swap, "Transpose"):
        return None
    pairs = _unfolded(facts.input(swap, 0), facts)
    rank = facts.rank(swap.outputs[0])
    if pairs is None or rank is None:
        return None
    narrow, folded = facts.shape(facts.input(swap, 0)), facts.shape(value)
    exchanged = [*range(rank - 2), rank - 1, rank - 2]
    fits = narrow is not None and folded == (*narrow[:-2], facts.dim(pairs.x, -1))
    return pairs if fits and list(attribute(swap, "perm") or ()) == exchanged else None


def _rotated_half(value: ir.Value, facts: Facts) -> ir.Value | None:
    """x of Concat(-x[D/2:], x[:D/2])."""
    node = facts.producer(value)
    if not is_op(node, "Concat") or len(node.inputs) != 2 or facts.axis(node, node.outputs[0]) != _last(node, facts):
        return None
    negated = facts.producer(facts.input(node, 0))
    if not is_op(negated, "Neg"):
        return None
    sources = set(_half(facts.input(negated, 0), True, facts)) & set(_half(facts.input(node, 1), False, facts))
    return sources.pop() if sources else None


def _half(value: ir.Value, upper: bool, facts: Facts) -> Iterator[ir.Value]:
    """x where the value is x[..., D/2:] or x[..., :D/2]."""
    cut = recognise_slice(value, facts)
    rank = facts.rank(value)
    width = None if cut is None else facts.size(cut.source, -1)
    if cut is None or rank is None or width is None or width % 2 or cut.axis != rank - 1:
        return
    if (cut.start, cut.size, cut.step) == (width // 2 if upper else 0, width // 2, 1):
        yield cut.source
