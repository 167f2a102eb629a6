"""Transposes, however many and however spelled: value = Transpose(base, perm)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Dimension, Facts, attribute, is_op, same_dim

__all__ = ["Permuted", "recognise_permuted"]


@dataclass(frozen=True)
class Permuted:
    """`value` is `base` with axis i of the result being axis `perm[i]` of the base. `perm` may be the identity."""

    base: ir.Value
    perm: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        return self.perm == tuple(range(len(self.perm)))


def recognise_permuted(value: ir.Value, facts: Facts) -> Permuted | None:
    """The value without the transposes above it; None only when its rank is unknown.

    Spellings
    ---------
    1. A chain of Transpose nodes.
    2. The last two axes exchanged in three dimensions: Reshape(rank n to 3) -> Transpose(0, 2, 1) -> Reshape(back).
    """
    return facts.remember("permuted", value, _permuted)


def _permuted(value: ir.Value, facts: Facts) -> Permuted | None:
    base, perm = value, None
    while True:
        step = _transpose(base, facts) or _folded_transpose(base, facts)
        if step is None:
            break
        perm = step.perm if perm is None else tuple(step.perm[i] for i in perm)
        base = step.base
    if perm is not None:
        return Permuted(base, perm)
    rank = facts.rank(value)
    return None if rank is None else Permuted(value, tuple(range(rank)))


def _transpose(value: ir.Value, facts: Facts) -> Permuted | None:
    node = facts.producer(value)
    if not is_op(node, "Transpose"):
        return None
    perm = attribute(node, "perm")
    if perm is None:
        rank = facts.rank(facts.input(node, 0))
        if rank is None:
            return None
        perm = tuple(reversed(range(rank)))
    return Permuted(facts.input(node, 0), tuple(perm))


def _folded_transpose(value: ir.Value, facts: Facts) -> Permuted | None:
    unfold = facts.producer(value)
    if not is_op(unfold, "Reshape"):
        return None
    swap = _transpose(facts.input(unfold, 0), facts)
    fold = None if swap is None else facts.producer(swap.base)
    if swap is None or swap.perm != (0, 2, 1) or not is_op(fold, "Reshape"):
        return None
    base = facts.input(fold, 0)
    shape = facts.shape(base)
    if shape is None or len(shape) < 3:
        return None
    folded, unfolded = facts.symbolic(facts.input(fold, 1)), facts.symbolic(facts.input(unfold, 1))
    if folded is None or unfolded is None or len(folded) != 3 or len(unfolded) != len(shape):
        return None
    exchanged = [*shape[:-2], shape[-1], shape[-2]]
    if not _all_same(folded[1:], shape[-2:]) or not _all_same(unfolded, exchanged):
        return None
    return Permuted(base, (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))


def _all_same(given: list[Dimension], wanted: list[Dimension] | tuple[Dimension, ...]) -> bool:
    """Whether a Reshape target spells these dimensions; at most one of them may be left to inference (-1)."""
    inferred = sum(1 for dim in given if dim == -1)
    return inferred <= 1 and all(g == -1 or same_dim(g, w) for g, w in zip(given, wanted, strict=True))
