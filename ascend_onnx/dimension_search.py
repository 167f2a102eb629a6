"""Finding out which dimensions of a model depend on each other when its graph gives one size several names.

Exporters name a size anew wherever they cannot prove that it equals another: `total` for `past + 1`, `seq_len` and
`sequence_len`, the number of slots for batch times sequence. No shape in the file says so, only running does: where the
runtime stops tells how far a guess carried.
"""

from __future__ import annotations

__all__ = ["Relation", "apply_relations", "find_relations"]

import difflib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Relation:
    """Dimension `name` has the size `expression`, which is over other dimensions."""

    name: str
    expression: str

    def __str__(self) -> str:
        return f"{self.name} = {self.expression}"


_PAIRED = 12  # of that many likely equalities every two are tried together

Attempt = Callable[[Sequence[Relation]], int | None]
"""Runs the model under relations: None if it runs, else how far it came (the place of the failing node)."""


def find_relations(names: Sequence[str], fixed: Collection[str], attempt: Attempt) -> tuple[Relation, ...] | None:
    """The fewest relations found under which the model runs, None if there are none.

    Adds what carries the run furthest, step by step; among equals the more plausible one. Dimensions in `fixed` are not
    redefined.
    """
    found: tuple[Relation, ...] = ()
    reached = attempt(found)
    while reached is not None:
        further: tuple[int, tuple[Relation, ...]] | None = None
        for relations in _next_steps(names, fixed, found):
            outcome = attempt((*found, *relations))
            if outcome is None:
                return (*found, *relations)
            if outcome > (reached if further is None else further[0]):
                further = outcome, relations
        if further is None:
            return None
        reached, found = further[0], (*found, *further[1])
    return found


def apply_relations(relations: Sequence[Relation], sizes: Mapping[str, int]) -> dict[str, int]:
    """`sizes` with every related dimension computed from the others."""
    related = dict(sizes)
    for relation in relations:
        value = ir.SymbolicDim(relation.expression).evaluate(related)
        if isinstance(value, int):
            related[relation.name] = value
    return related


def _next_steps(
    names: Sequence[str], fixed: Collection[str], found: Sequence[Relation]
) -> Iterator[tuple[Relation, ...]]:
    """Relations to try next, the most plausible first: equal sizes, one more, products, sums, two equalities at once.

    Dimensions with like names come first.
    """
    defined = {relation.name for relation in found}
    bases = [name for name in names if name not in defined]
    free = [name for name in bases if name not in fixed]
    pairs = [(name, other) for name in free for other in bases if name != other]
    pairs.sort(key=lambda pair: -difflib.SequenceMatcher(None, *pair).ratio())
    equalities = [Relation(name, other) for name, other in pairs]
    yield from ((relation,) for relation in equalities)
    yield from ((Relation(name, f"{other} + 1"),) for name, other in pairs)
    for sign in "*+":
        for name in free:
            others = [other for other in bases if other != name]
            yield from ((Relation(name, f"{a} {sign} {b}"),) for a, b in itertools.combinations(others, 2))
    for first, second in itertools.combinations(equalities[:_PAIRED], 2):
        if len({first.name, first.expression, second.name, second.expression}) == 4:
            yield first, second
