"""Weights of partial softmaxes as ratios of exponentials, and the statistics that merging two of them makes.

Exp(Sub(prev_max, max)) * prev_sum / sum        is  prev_sum * sum^-1 * e^(prev_max - max)
Add(Mul(prev_sum, ..), Mul(cur_sum, ..))        is  a SoftmaxSum, and stands for itself wherever it is read
Add(lse, Log(Add(1, Exp(Sub(other, lse)))))     is  a LogSumExp of lse and other, and stands for itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.exponentials import Ratio, Term
from fusion_patterns.lift.indexed import (
    Digit,
    Element,
    Index,
    Size,
    broadcast_index,
    itself,
    recognise_view,
    sizes,
    trace,
)

__all__ = [
    "LONGEST",
    "LogSumExp",
    "RowMax",
    "SoftmaxSum",
    "Statistic",
    "carries_exponential",
    "reads_last_axis",
    "recognise_statistic",
    "recognise_weight",
    "seen_from",
    "unfolded",
    "unrounded",
]

_DEEPEST = 64
"""How many nodes upwards an exponential is searched."""

LONGEST = 20
"""Ratios of more terms and elements than this are not written out: no softmax weight has so many."""

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Reciprocal", "Log", "Softplus")
_LAYOUT = (
    "Identity",
    "Cast",
    "Transpose",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Expand",
    "Tile",
    "Gather",
    "Slice",
    "Split",
)


@dataclass(frozen=True)
class RowMax:
    """value = max(first, second), in terms of its own axes."""

    value: ir.Value
    first: Element
    second: Element


@dataclass(frozen=True)
class SoftmaxSum:
    """value = definition: two terms with an exponential each, in terms of its own axes."""

    value: ir.Value
    definition: Ratio


@dataclass(frozen=True)
class LogSumExp:
    """value = log(definition), where definition = e^first + e^second, in terms of its own axes."""

    value: ir.Value
    definition: Ratio


Statistic = RowMax | SoftmaxSum | LogSumExp

_Exponent = Callable[[ir.Value, Facts], Ratio | None]


# --- Weights ----------------------------------------------------------------------------------------------------------


def recognise_weight(value: ir.Value, facts: Facts) -> Ratio:
    """What a value is, in terms of its own axes. What holds no exponential, or is a statistic, stands for itself.

    Spellings
    ---------
    1. Exp, Sigmoid, Reciprocal, Neg, and Add, Sub, Mul, Div with broadcasting.
    2. The exponent as sums, differences, negations and multiples; logarithms in it cancel the Exp.
    3. Everything laid out anew, or cast to a wider type, in between: see `lift.indexed`. What is rounded to a narrower
       type stands for itself: see `unrounded`.
    """
    return facts.remember("weight", value, _weight)


def _weight(value: ir.Value, facts: Facts) -> Ratio:
    number = facts.scalar(value)
    if number is not None:
        return Ratio.number(number)
    if not carries_exponential(value, facts):
        return Ratio.of(trace(value, facts))
    statistic = recognise_statistic(value, facts)
    written_out = None if statistic is not None else _written_out(value, facts)
    return (
        Ratio.of(Element(facts.plain(value), itself(sizes(value, facts) or ()))) if written_out is None else written_out
    )


def _written_out(value: ir.Value, facts: Facts) -> Ratio | None:
    """One node written out; None where that is beyond this arithmetic."""
    node = facts.producer(value)
    if is_op(node, "Exp"):
        return _power_of_input(node, 1, facts)
    if is_op(node, "Sigmoid"):
        falling = _power_of_input(node, -1, facts)
        return None if falling is None else Ratio.number(1).over(Ratio.number(1).plus(falling))
    if is_op(node, "Add", "Sub", "Mul", "Div"):
        left, right = (_broadcast(facts.input(node, i), value, facts) for i in (0, 1))
        return None if left is None or right is None else _combined(node.op_type, left, right)
    if is_op(node, "Neg"):
        return recognise_weight(facts.input(node, 0), facts).scaled(-1)
    if is_op(node, "Reciprocal"):
        return Ratio.number(1).over(recognise_weight(facts.input(node, 0), facts))
    view = recognise_view(value, facts)
    if view is not None:
        source, index = view
        return seen_from(recognise_weight(source, facts), index, sizes(value, facts) or ())
    return None


def _combined(op_type: str, left: Ratio, right: Ratio) -> Ratio | None:
    if left.size + right.size > LONGEST:
        return None
    if op_type == "Add":
        return left.plus(right)
    if op_type == "Sub":
        return left.minus(right)
    return left.times(right) if op_type == "Mul" else left.over(right)


def _broadcast(operand: ir.Value, value: ir.Value, facts: Facts) -> Ratio | None:
    """An operand of an elementwise node in terms of the axes of the node's result."""
    return _on_axes_of(recognise_weight(operand, facts), operand, value, facts)


def _on_axes_of(ratio: Ratio, operand: ir.Value, value: ir.Value, facts: Facts) -> Ratio | None:
    before, after = sizes(operand, facts), sizes(value, facts)
    index = None if before is None or after is None else broadcast_index(before, after)
    return None if index is None else seen_from(ratio, index, after or ())


def seen_from(ratio: Ratio, outer: Index, dims: Sequence[Size | None]) -> Ratio | None:
    """A ratio in terms of new axes of sizes `dims`, where `outer` gives the present axes in terms of them."""
    return ratio.replaced(lambda term: _term_seen_from(term, outer, dims))


def _term_seen_from(term: Term, outer: Index, dims: Sequence[Size | None]) -> Ratio | None:
    factors = [(element.seen_from(outer, dims), power) for element, power in term.factors]
    exponent = [(element.seen_from(outer, dims), count) for element, count in term.exponent]
    known_factors = frozenset((element, power) for element, power in factors if element is not None)
    known_exponent = frozenset((element, count) for element, count in exponent if element is not None)
    complete = len(known_factors) == len(factors) and len(known_exponent) == len(exponent)
    return Ratio.term(Term(known_factors, known_exponent)) if complete else None


# --- Exponents --------------------------------------------------------------------------------------------------------


def _power_of_input(node: ir.Node, sign: int, facts: Facts) -> Ratio | None:
    """e^x or e^-x for the input x of a node."""
    x = facts.input(node, 0)
    exponent = _exponent(x, facts)
    return None if exponent is None else _power(exponent.scaled(sign), sizes(x, facts) or (), facts)


def _exponent(value: ir.Value, facts: Facts) -> Ratio | None:
    """What is under an Exp as a sum of multiples of elements. One sum is taken apart, what is added are elements."""
    node = facts.producer(value)
    if is_op(node, "Add", "Sub"):
        sides = [_summand(facts.input(node, i), facts) for i in (0, 1)]
        left, right = (
            None if side is None else _on_axes_of(side, facts.input(node, i), value, facts)
            for i, side in enumerate(sides)
        )
        return None if left is None or right is None else _combined(node.op_type, left, right)
    return _through(value, facts, _exponent) or _summand(value, facts)


def _summand(value: ir.Value, facts: Facts) -> Ratio | None:
    number = facts.scalar(value)
    if number is not None:
        return Ratio.number(number)
    if carries_exponential(value, facts):
        return recognise_weight(value, facts)
    return _through(value, facts, _summand) or Ratio.of(trace(value, facts))


def _through(value: ir.Value, facts: Facts, inner: _Exponent) -> Ratio | None:
    """A multiple of, or a new layout of, what `inner` recognises."""
    node = facts.producer(value)
    if is_op(node, "Neg"):
        source = inner(facts.input(node, 0), facts)
        return None if source is None else source.scaled(-1)
    if is_op(node, "Mul", "Div"):
        factor = facts.scalar(facts.input(node, 1))
        source = None if not factor else inner(facts.input(node, 0), facts)
        if source is None or not factor or facts.rank(facts.input(node, 0)) != facts.rank(value):
            return None
        return source.scaled(factor if node.op_type == "Mul" else 1 / factor)
    view = recognise_view(value, facts)
    if view is None:
        return None
    source = inner(view[0], facts)
    return None if source is None else seen_from(source, view[1], sizes(value, facts) or ())


def _power(linear: Ratio, dims: Sequence[Size | None], facts: Facts) -> Ratio | None:
    """e^linear, where logarithms of something that is known here are undone."""
    coefficients = linear.linear()
    if coefficients is None:
        return None
    rest, undone = linear, Ratio.number(1)
    for element, factor in coefficients.items():
        argument = None if element is None else _argument_of_logarithm(element, dims, facts)
        if element is None or argument is None or factor not in (1, -1):
            continue
        rest = rest.minus(Ratio.of(element).scaled(factor))
        multiplied = undone.times(argument) if factor == 1 else undone.over(argument)
        if multiplied is None:
            return None
        undone = multiplied
    power = rest.exponential()
    return None if power is None else power.times(undone)


def _argument_of_logarithm(element: Element, dims: Sequence[Size | None], facts: Facts) -> Ratio | None:
    node = facts.producer(element.value)
    if not carries_exponential(element.value, facts) or recognise_statistic(element.value, facts) is not None:
        return None
    if is_op(node, "Log"):
        return seen_from(recognise_weight(facts.input(node, 0), facts), element.index, dims)
    if is_op(node, "Softplus"):
        rising = _power_of_input(node, 1, facts)
        return None if rising is None else seen_from(rising.plus(Ratio.number(1)), element.index, dims)
    return None


def carries_exponential(value: ir.Value, facts: Facts) -> bool:
    """Whether a value is computed, row by row, from an Exp, or from a Sigmoid or Softplus of a difference."""
    return _carries(value, facts, 0)


def _carries(value: ir.Value, facts: Facts, depth: int) -> bool:
    if depth > _DEEPEST or not is_op(value.producer(), "Exp", "Sigmoid", *_ARITHMETIC, *_LAYOUT):
        return False
    return facts.remember("carries_exponential", value, lambda v, f: _computes_exponential(v, f, depth))


def _computes_exponential(value: ir.Value, facts: Facts, depth: int) -> bool:
    node = value.producer()
    assert node is not None  # `_carries` looked
    if node.op_type == "Exp":
        return True
    if node.op_type in ("Sigmoid", "Softplus") and _is_difference(node.inputs[0]):
        return True
    read = node.inputs[:1] if node.op_type in _LAYOUT else node.inputs
    return any(_carries(given, facts, depth + 1) for given in read if given is not None)


def _is_difference(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    while is_op(node, "Neg", *_LAYOUT):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return is_op(node, "Sub", "Add")


# --- Statistics -------------------------------------------------------------------------------------------------------


def recognise_statistic(value: ir.Value, facts: Facts) -> Statistic | None:
    """The statistic of two merged softmaxes that a value is, None for anything else.

    Spellings
    ---------
    1. RowMax: Max of two values.
    2. SoftmaxSum: a sum of two exponentials, each perhaps times another value.
    3. LogSumExp: any sum or logarithm L with e^L = e^a + e^b: a + log(1 + e^(b-a)), a - log(sigmoid(a-b)),
       max + log(e^(a-max) + e^(b-max)), log(e^a + e^b), a + softplus(b-a).
    """
    return facts.remember("softmax_statistic", value, _statistic)


def _statistic(value: ir.Value, facts: Facts) -> Statistic | None:
    node = facts.producer(value)
    if is_op(node, "Max") and len(node.inputs) == 2:
        sides = [_broadcast(facts.input(node, i), value, facts) for i in (0, 1)]
        first, second = (None if side is None else _element(side) for side in sides)
        return None if first is None or second is None else RowMax(value, first, second)
    if not is_op(node, "Add", "Sub", "Log") or not carries_exponential(value, facts):
        return None
    dims = sizes(value, facts) or ()
    if is_op(node, "Log"):
        power: Ratio | None = recognise_weight(facts.input(node, 0), facts)
    else:
        written_out = _written_out(value, facts)
        if written_out is None:
            return None
        if _is_softmax_sum(written_out, dims):
            return SoftmaxSum(value, written_out)
        power = _power(written_out, dims, facts)
    definition = None if power is None else _sum_of_two_exponentials(power, dims, facts)
    return None if definition is None else LogSumExp(value, definition)


def _element(ratio: Ratio) -> Element | None:
    term = ratio.is_term()
    return None if term is None else term.element()


def _is_softmax_sum(ratio: Ratio, dims: Sequence[Size | None]) -> bool:
    """Two terms, each with an exponential for every element: not one per row of features."""
    exponents = [term.exponent for term in ratio.numerator]
    every = all(any(reads_last_axis(element, dims) for element, _ in exponent) for exponent in exponents)
    return ratio.is_sum and len(exponents) == 2 and every


def reads_last_axis(element: Element, dims: Sequence[Size | None]) -> bool:
    """Whether the element is another one at every place along the last axis that is not of size 1."""
    last = max((axis for axis, size in enumerate(dims) if size != 1), default=-1)
    return any(Digit(last) in entry for entry in element.index if not isinstance(entry, int))


def _sum_of_two_exponentials(power: Ratio, dims: Sequence[Size | None], facts: Facts) -> Ratio | None:
    """`power` as e^a + e^b, perhaps after writing out a sum in it."""
    forms = [power, *(unfolded(power, element, dims, facts) for element in power.elements)]
    for form in forms:
        if form is None or not form.is_sum or len(form.numerator) != 2:
            continue
        terms = list(form.numerator)
        pure = all(not term.factors and [count for _, count in term.exponent] == [1] for term in terms)
        if pure and form.equals(Ratio.term(terms[0]).plus(Ratio.term(terms[1]))):
            return form
    return None


def unfolded(ratio: Ratio, element: Element, dims: Sequence[Size | None], facts: Facts) -> Ratio | None:
    """The ratio with the definition of a statistic, sum or log-sum-exp, instead of the statistic `element`."""
    statistic = recognise_statistic(element.value, facts)
    if statistic is None or isinstance(statistic, RowMax):
        return None
    definition = seen_from(statistic.definition, element.index, dims)
    if definition is None:
        return None
    in_exponent = isinstance(statistic, LogSumExp)
    return ratio.replaced(lambda term: _term_with(term, element, definition, in_exponent))


def unrounded(ratio: Ratio, dtype: ir.DataType | None, dims: Sequence[Size | None], facts: Facts) -> Ratio:
    """The ratio with what was cast to `dtype` instead of the results of the casts."""
    for element in ratio.elements:
        cast = element.value.producer()
        if not is_op(cast, "Cast") or element.value.dtype != dtype:
            continue
        source = seen_from(recognise_weight(facts.input(cast, 0), facts), element.index, dims)
        exact = None if source is None else ratio.replaced(partial(_with_factor, element=element, definition=source))
        ratio = ratio if exact is None else exact
    return ratio


def _with_factor(term: Term, element: Element, definition: Ratio) -> Ratio | None:
    return _term_with(term, element, definition, in_exponent=False)


def _term_with(term: Term, element: Element, definition: Ratio, in_exponent: bool) -> Ratio | None:
    powers = dict(term.exponent) if in_exponent else dict(term.factors)
    power = powers.get(element, 0)
    if power == 0:
        return Ratio.term(term)
    if power not in (1, -1):
        return None
    itself_once = frozenset({(element, int(power))})
    without = Term(exponent=itself_once) if in_exponent else Term(factors=itself_once)
    rest = Ratio.term(term.times(without.inverse()))
    return rest.times(definition) if power == 1 else rest.over(definition)
