"""Sums of products of powers and exponentials, and ratios of such sums: the arithmetic of softmax weights.

    prev_sum * exp(prev_max - max) / sum    =    the one term prev_sum * sum^-1 * e^(prev_max - max)
    sigmoid(x)                              =    1 / (1 + e^-x)

However the weights of two partial softmaxes are spelled, they are equal as ratios here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fusion_patterns.lift.indexed import Element

__all__ = ["Ratio", "Term"]

_NEGLIGIBLE = 1e-6
"""Numbers closer to each other than this are equal: the constants of graphs are float32."""

_N = TypeVar("_N", int, float)


@dataclass(frozen=True)
class Term:
    """The product of element^k over `factors`, times e to the sum of c * element over `exponent`."""

    factors: frozenset[tuple[Element, int]] = frozenset()
    exponent: frozenset[tuple[Element, float]] = frozenset()

    def times(self, other: Term) -> Term:
        return Term(_added(self.factors, other.factors), _added(self.exponent, other.exponent))

    def inverse(self) -> Term:
        return Term(
            frozenset((element, -power) for element, power in self.factors),
            frozenset((element, -count) for element, count in self.exponent),
        )

    def element(self) -> Element | None:
        """The element that the term is, None if it is anything else."""
        plain = not self.exponent and len(self.factors) == 1
        return next((element for element, power in self.factors if plain and power == 1), None)


def _added(left: frozenset[tuple[Element, _N]], right: frozenset[tuple[Element, _N]]) -> frozenset[tuple[Element, _N]]:
    total = dict(left)
    for element, count in right:
        total[element] = total[element] + count if element in total else count
    return frozenset((element, count) for element, count in total.items() if abs(count) > _NEGLIGIBLE)


_Sum = Mapping[Term, float]
_NUMBER = Term()


@dataclass(frozen=True, eq=False)
class Ratio:
    """The sum of coefficient * term over `numerator`, divided by that over `denominator`."""

    numerator: _Sum
    denominator: _Sum

    @classmethod
    def number(cls, number: float) -> Ratio:
        return cls({_NUMBER: number} if number else {}, {_NUMBER: 1.0})

    @classmethod
    def of(cls, element: Element) -> Ratio:
        return cls.term(Term(factors=frozenset({(element, 1)})))

    @classmethod
    def term(cls, term: Term) -> Ratio:
        return cls({term: 1.0}, {_NUMBER: 1.0})

    @property
    def size(self) -> int:
        """How much there is to write: terms, and elements in them."""
        terms = (*self.numerator, *self.denominator)
        return len(terms) + sum(len(term.factors) + len(term.exponent) for term in terms)

    @property
    def is_sum(self) -> bool:
        """Whether nothing is divided by a sum."""
        return len(self.denominator) == 1

    @property
    def elements(self) -> set[Element]:
        terms = (*self.numerator, *self.denominator)
        return {element for term in terms for element, _ in (*term.factors, *term.exponent)}

    def plus(self, other: Ratio) -> Ratio:
        if _same(self.denominator, other.denominator):
            return _ratio(_plus(self.numerator, other.numerator), self.denominator)
        left, right = (
            _product(self.numerator, other.denominator),
            _product(other.numerator, self.denominator),
        )
        return _ratio(_plus(left, right), _product(self.denominator, other.denominator))

    def times(self, other: Ratio) -> Ratio:
        return _ratio(
            _product(self.numerator, other.numerator),
            _product(self.denominator, other.denominator),
        )

    def scaled(self, factor: float) -> Ratio:
        return self.times(Ratio.number(factor))

    def minus(self, other: Ratio) -> Ratio:
        return self.plus(other.scaled(-1))

    def over(self, other: Ratio) -> Ratio | None:
        """None where `other` is 0."""
        return self.times(Ratio(other.denominator, other.numerator)) if other.numerator else None

    def equals(self, other: Ratio) -> bool:
        return _same(
            _product(self.numerator, other.denominator),
            _product(other.numerator, self.denominator),
        )

    def linear(self) -> dict[Element | None, float] | None:
        """The coefficients of a sum of multiples of elements, None standing for 1; None for anything else."""
        if self.denominator != {_NUMBER: 1.0}:
            return None
        coefficients = {term.element(): factor for term, factor in self.numerator.items()}
        others = [term for term in self.numerator if term.element() is None and term != _NUMBER]
        return None if others else coefficients

    def exponential(self) -> Ratio | None:
        """e to the power of this; None unless it is a sum of multiples of elements."""
        linear = self.linear()
        if linear is None:
            return None
        exponent = frozenset((element, factor) for element, factor in linear.items() if element is not None)
        return Ratio.term(Term(exponent=exponent)).scaled(math.exp(linear.get(None, 0.0)))

    def is_term(self) -> Term | None:
        """The one term that this is, with coefficient 1; None if it is anything else."""
        for above in self.numerator:
            for below in self.denominator:
                term = above.times(below.inverse())
                if self.equals(Ratio.term(term)):
                    return term
        return None

    def replaced(self, replacement: Callable[[Term], Ratio | None]) -> Ratio | None:
        """Each term replaced by a ratio; None where one cannot be."""
        above, below = (_replaced(terms, replacement) for terms in (self.numerator, self.denominator))
        return None if above is None or below is None else above.over(below)


def _ratio(numerator: _Sum, denominator: _Sum) -> Ratio:
    """The ratio, over 1 if the denominator is a single term."""
    if len(denominator) != 1:
        return Ratio(numerator, denominator)
    ((below, factor),) = denominator.items()
    inverse = below.inverse()
    return Ratio({term.times(inverse): count / factor for term, count in numerator.items()}, {_NUMBER: 1.0})


def _plus(left: _Sum, right: _Sum) -> _Sum:
    total = dict(left)
    for term, factor in right.items():
        total[term] = total.get(term, 0.0) + factor
    return {term: factor for term, factor in total.items() if abs(factor) > _NEGLIGIBLE}


def _product(left: _Sum, right: _Sum) -> _Sum:
    total: _Sum = {}
    for term, factor in left.items():
        total = _plus(total, {term.times(other): factor * count for other, count in right.items()})
    return total


def _same(left: _Sum, right: _Sum) -> bool:
    return not _plus(left, {term: -factor for term, factor in right.items()})


def _replaced(terms: _Sum, replacement: Callable[[Term], Ratio | None]) -> Ratio | None:
    total = Ratio.number(0)
    for term, factor in terms.items():
        other = replacement(term)
        if other is None:
            return None
        total = total.plus(other.scaled(factor))
    return total
