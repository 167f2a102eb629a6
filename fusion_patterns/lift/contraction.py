"""Products of two tensors over one shared axis, with every axis named: MatMul and Einsum alike."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op
from fusion_patterns.lift.permuted import recognise_permuted
from fusion_patterns.lift.scale import without_scale

__all__ = ["Contraction", "Labelled", "recognise_contraction"]

_BROADCAST = "1"


@dataclass(frozen=True)
class Labelled:
    """A value with one label per axis. The label "1" is an axis of size 1 that broadcasts."""

    value: ir.Value
    labels: str

    def order(self, wanted: str) -> tuple[int, ...] | None:
        """The permutation of axes that puts the labels in this order, None when they are not exactly these."""
        if sorted(self.labels) != sorted(wanted):
            return None
        return tuple(self.labels.index(label) for label in wanted)


@dataclass(frozen=True)
class Contraction:
    """value[labels] = factor * sum over `shared` of left * right."""

    left: Labelled
    right: Labelled
    labels: str
    shared: str
    factor: float
    node: ir.Node


def recognise_contraction(value: ir.Value, facts: Facts) -> Contraction | None:
    """The product that computes a value, its operands without transposes and scalar factors.

    Spellings
    ---------
    1. MatMul; batch axes of size 1 broadcast.
    2. Einsum of two operands with explicit output, each label once per operand.
    """
    return facts.remember("contraction", value, _contraction)


def _contraction(value: ir.Value, facts: Facts) -> Contraction | None:
    node = facts.producer(value)
    if is_op(node, "MatMul"):
        labels = _matmul_labels(node, facts)
    elif is_op(node, "Einsum") and len(node.inputs) == 2:
        labels = _einsum_labels(attribute(node, "equation"))
    else:
        return None
    if labels is None:
        return None
    left, left_factor = _operand(facts.input(node, 0), labels[0], facts)
    right, right_factor = _operand(facts.input(node, 1), labels[1], facts)
    shared = (set(labels[0]) & set(labels[1])) - set(labels[2]) - {_BROADCAST}
    if len(shared) != 1:
        return None
    return Contraction(left, right, labels[2], shared.pop(), left_factor * right_factor, node)


def _matmul_labels(node: ir.Node, facts: Facts) -> tuple[str, str, str] | None:
    """Batch axes a, b, .. from the back, rows m, columns n, shared k."""
    left, right = facts.shape(facts.input(node, 0)), facts.shape(facts.input(node, 1))
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    depth = max(len(left), len(right)) - 2
    batch = "abcdefgh"[:depth]
    sides = []
    for shape, other, matrix in ((left, right, "mk"), (right, left, "kn")):
        own = len(shape) - 2
        names = batch[depth - own :]
        beside = [other[axis] if -len(other) <= axis else 1 for axis in range(-own - 2, -2)]
        spread = [shape[i] == 1 and _is_wider(beside[i]) for i in range(own)]
        sides.append("".join(_BROADCAST if spread[i] else names[i] for i in range(own)) + matrix)
    out = "".join(label if any(label in side for side in sides) else _BROADCAST for label in batch)
    return sides[0], sides[1], f"{out}mn"


def _is_wider(dim: Dimension) -> bool:
    """Whether a dimension is not 1 as far as its number or name tells; inference made a name up where it knew none."""
    return dim != 1 if isinstance(dim, int) else dim.value is not None and not dim.value.startswith("unk__")


def _einsum_labels(equation: str | bytes) -> tuple[str, str, str] | None:
    text = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    operands, arrow, out = text.partition("->")
    sides = operands.split(",")
    if not arrow or len(sides) != 2 or "." in text or any(len(set(side)) != len(side) for side in (*sides, out)):
        return None
    return sides[0], sides[1], out


def _operand(value: ir.Value, labels: str, facts: Facts) -> tuple[Labelled, float]:
    """The operand below its scalar factors and transposes."""
    base, factor = without_scale(value, facts)
    while (permuted := recognise_permuted(base, facts)) is not None:
        below, more = without_scale(permuted.base, facts)
        if permuted.is_identity and below is base:
            break
        named = [""] * len(labels)
        for axis, source in enumerate(permuted.perm):
            named[source] = labels[axis]
        base, labels, factor = below, "".join(named), factor * more
    return Labelled(base, labels), factor
