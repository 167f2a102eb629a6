"""Two partial attentions over disjoint keys, merged by their softmax statistics.

    out = prev * (prev_weight / sum) + cur * (cur_weight / sum)
    prev_weight = prev_sum * e^(prev_max - max), cur_weight likewise, sum = prev_weight + cur_weight

Where the statistics are log-sum-exps there are no sums: prev_weight = e^(prev_lse - max).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.exponentials import Ratio, Term
from fusion_patterns.lift.indexed import Element, Size, broadcast_index, itself, sizes, trace
from fusion_patterns.lift.softmax_weights import (
    LONGEST,
    RowMax,
    SoftmaxSum,
    carries_exponential,
    reads_last_axis,
    recognise_statistic,
    recognise_weight,
    seen_from,
    unfolded,
    unrounded,
)
from fusion_patterns.miss import Miss, miss

__all__ = ["Partial", "PartialMerge", "recognise_partial_merge", "reference_of"]

_MOST_ATTENTIONS = 4


@dataclass(frozen=True)
class Partial:
    """One partial attention, of the shape of the merged one, perhaps in a narrower float type.

    `maximum` is its row maximum, or its log-sum-exp where `sum` is None, in terms of the axes of the attention.
    """

    attention: ir.Value
    maximum: Element
    sum: Element | None

    @property
    def weight(self) -> Ratio:
        """sum * e^maximum: the part of the softmax's denominator that this attention has."""
        power = Ratio.term(Term(exponent=frozenset({(self.maximum, 1.0)})))
        return power if self.sum is None else Ratio.of(self.sum).times(power)


@dataclass(frozen=True)
class PartialMerge:
    """out = (prev * prev.weight + cur * cur.weight) / (prev.weight + cur.weight), features along the last axis.

    `merged` is the value before it was cast to the type of `out`; the same value where it was not.
    """

    out: ir.Value
    merged: ir.Value
    prev: Partial
    cur: Partial


def recognise_partial_merge(value: ir.Value, facts: Facts) -> PartialMerge | Miss | None:
    """The merge that computes a value; None unless two values are weighted row by row with exponentials of differences.

    Spellings
    ---------
    1. prev * w + cur * u with weights of any spelling: see `lift.softmax_weights`.
    2. The sum divided afterwards: (prev * prev_weight + cur * cur_weight) / sum.
    3. prev - w * (prev - cur).
    """
    return facts.remember("partial_merge", value, _partial_merge)


def _partial_merge(value: ir.Value, facts: Facts) -> PartialMerge | Miss | None:
    if not carries_exponential(value, facts) or recognise_statistic(value, facts) is not None:
        return None
    combination = _taken_apart(value, facts, False)
    if combination is None or not any(_is_softmax_weight(weight) for weight in combination.values()):
        return None
    merge = _merged(value, combination, facts)
    if isinstance(merge, Miss):
        to_the_bottom = _taken_apart(value, facts, True)
        again = None if to_the_bottom is None else _merged(value, to_the_bottom, facts)
        merge = again if isinstance(again, PartialMerge) else merge
    return merge


def _merged(value: ir.Value, combination: _Combination, facts: Facts) -> PartialMerge | Miss:
    if len(combination) != 2:
        return miss("merge-weights", value, "two weighted attentions", f"{len(combination)}")
    dims = sizes(value, facts) or ()
    attentions, weights = list(combination), list(combination.values())
    pair = _partials(attentions, weights, dims, facts)
    if pair is None:
        wanted = "weights sum * e^max, divided by the sum of both"
        return miss("merge-weights", value, wanted, "weights that do not add up to 1 in that ratio")
    prev, cur = pair
    if prev.sum is not None and not _is_stabilised(weights, prev, cur, dims, facts):
        return miss("merge-maximum", value, "exponentials of max minus the larger of both", "another reference")
    return PartialMerge(_cast_behind(value, attentions), value, prev, cur)


def _cast_behind(value: ir.Value, attentions: Sequence[ir.Value]) -> ir.Value:
    """The result in the type of the attentions, where nothing reads the merge before it is cast to that."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or not is_op(uses[0].node, "Cast"):
        return value
    cast = uses[0].node.outputs[0]
    return cast if all(attention.dtype == cast.dtype for attention in attentions) else value


def _is_softmax_weight(weight: Ratio) -> bool:
    """Whether there is the exponential of a difference in it."""
    return any(len(term.exponent) > 1 for term in (*weight.numerator, *weight.denominator))


# --- Attentions and weights -------------------------------------------------------------------------------------------

_Combination = dict[ir.Value, Ratio]
"""A value as a sum of attentions of its shape times weights in terms of its axes."""


def _combination(value: ir.Value, facts: Facts, deep: bool) -> _Combination | None:
    """A value taken apart; None if it has too many parts.

    What is merged already is one attention, and unless `deep` so is what holds no exponential: if it is a product or a
    sum, that is usually its own affair (a gate, a scale), and only sometimes prev * prev_sum or prev - cur.
    """
    return facts.remember(("attention_combination", deep), value, lambda v, f: _whole_or_apart(v, f, deep))


def _whole_or_apart(value: ir.Value, facts: Facts, deep: bool) -> _Combination | None:
    further = carries_exponential(value, facts) or (deep and is_op(facts.producer(value), "Mul", "Add", "Sub"))
    return _taken_apart(value, facts, deep) if further and not _is_merged(value, facts) else _whole(value, facts)


def _whole(value: ir.Value, facts: Facts) -> _Combination:
    """One attention, before it was cast to a wider type."""
    origin = trace(value, facts)
    same = origin.index == itself(sizes(value, facts) or ())
    return {origin.value if same else facts.plain(value): Ratio.number(1)}


def _is_merged(value: ir.Value, facts: Facts) -> bool:
    node = value.producer()
    merged = node.inputs[0] if is_op(node, "Cast") and node.inputs[0] is not None else value
    merge = recognise_partial_merge(merged, facts)
    return isinstance(merge, PartialMerge) and value in (merge.out, merge.merged)


def _taken_apart(value: ir.Value, facts: Facts, deep: bool) -> _Combination | None:
    node = facts.producer(value)
    if is_op(node, "Add", "Sub"):
        dims = sizes(value, facts)
        operands = [facts.input(node, i) for i in (0, 1)]
        left, right = (_combination(v, facts, deep) if sizes(v, facts) == dims else None for v in operands)
        return None if left is None or right is None else _sum(left, right, 1 if node.op_type == "Add" else -1)
    if is_op(node, "Neg"):
        negated = _combination(facts.input(node, 0), facts, deep)
        return None if negated is None else _sum({}, negated, -1)
    if is_op(node, "Cast") and _is_rounding(node):
        return _combination(facts.input(node, 0), facts, deep)
    if is_op(node, "Mul", "Div"):
        orders = facts.either_way(node)[: 2 if node.op_type == "Mul" else 1]
        for attention, factor in orders:
            weight = _row_factor(factor, value, facts)
            if weight is not None and sizes(attention, facts) == sizes(value, facts):
                parts = _combination(attention, facts, deep)
                return None if parts is None else _weighted(parts, weight, node.op_type)
    return _whole(value, facts)


def _is_rounding(cast: ir.Node) -> bool:
    """Whether a Cast goes to a narrower float type, as the sums that read it have then."""
    before, after = (None if value is None else value.dtype for value in (cast.inputs[0], cast.outputs[0]))
    if before is None or after is None or not (before.is_floating_point() and after.is_floating_point()):
        return False
    return before.itemsize > after.itemsize


def _sum(left: _Combination, right: _Combination, sign: int) -> _Combination | None:
    total = dict(left)
    for attention, weight in right.items():
        total[attention] = total.get(attention, Ratio.number(0)).plus(weight.scaled(sign))
    return total if len(total) <= _MOST_ATTENTIONS and _are_short(total) else None


def _are_short(combination: _Combination) -> bool:
    return all(weight.size <= LONGEST for weight in combination.values())


def _row_factor(factor: ir.Value, value: ir.Value, facts: Facts) -> Ratio | None:
    """An operand in terms of the axes of the product, if it is one number per row of features.

    Rounding it to the type that the product has anyway says nothing about it.
    """
    before, dims = sizes(factor, facts), sizes(value, facts)
    index = None if before is None or dims is None else broadcast_index(before, dims)
    weight = None if index is None else seen_from(recognise_weight(factor, facts), index, dims or ())
    if weight is None or dims is None or any(reads_last_axis(element, dims) for element in weight.elements):
        return None
    return unrounded(weight, value.dtype, dims, facts)


def _weighted(parts: _Combination, weight: Ratio, op_type: str) -> _Combination | None:
    factor = weight if op_type == "Mul" else Ratio.number(1).over(weight)
    if factor is None:
        return None
    total = {attention: given.times(factor) for attention, given in parts.items()}
    return total if _are_short(total) else None


# --- Statistics behind the weights ------------------------------------------------------------------------------------


def _partials(
    attentions: Sequence[ir.Value], weights: Sequence[Ratio], dims: Sequence[Size | None], facts: Facts
) -> tuple[Partial, Partial] | None:
    """The statistics that make these weights; None if no two partial softmaxes do."""
    for form in (weights, *_unfolded_forms(weights, dims, facts)):
        ratio = form[1].over(form[0])
        term = None if ratio is None else ratio.is_term()
        if term is None or not form[0].plus(form[1]).equals(Ratio.number(1)):
            continue
        maxima, sums = dict(term.exponent), dict(term.factors)
        if sorted(maxima.values()) != [-1, 1] or sorted(sums.values()) not in ([], [-1, 1]):
            return None
        prev, cur = (
            Partial(attention, _with(maxima, sign), _with(sums, sign) if sums else None)
            for attention, sign in zip(attentions, (-1, 1), strict=True)
        )
        return prev, cur
    return None


def _with(counts: dict[Element, float] | dict[Element, int], count: int) -> Element:
    return next(element for element, given in counts.items() if given == count)


def _unfolded_forms(weights: Sequence[Ratio], dims: Sequence[Size | None], facts: Facts) -> list[list[Ratio]]:
    """The weights with one of the statistics in them written out."""
    forms = []
    for element in set.union(*(weight.elements for weight in weights)):
        written_out = [unfolded(weight, element, dims, facts) for weight in weights]
        known = [weight for weight in written_out if weight is not None]
        if len(known) == len(weights):
            forms.append(known)
    return forms


def _is_stabilised(
    weights: Sequence[Ratio], prev: Partial, cur: Partial, dims: Sequence[Size | None], facts: Facts
) -> bool:
    """Whether the weights are over a sum of exponentials of maximum - max(prev.maximum, cur.maximum)."""
    for element in set.union(*(weight.elements for weight in weights)):
        statistic = recognise_statistic(element.value, facts)
        if isinstance(statistic, SoftmaxSum):
            definition = seen_from(statistic.definition, element.index, dims)
            if definition is not None and reference_of(definition, prev, cur, dims, facts) is not None:
                return True
    return False


def reference_of(
    definition: Ratio, prev: Partial, cur: Partial, dims: Sequence[Size | None], facts: Facts
) -> Element | None:
    """The max(prev.maximum, cur.maximum) with (prev.weight + cur.weight) / e^max = `definition`, if it is that."""
    both = prev.weight.plus(cur.weight)
    for element in definition.elements:
        larger = recognise_statistic(element.value, facts)
        if not isinstance(larger, RowMax):
            continue
        sides = {side.seen_from(element.index, dims) for side in (larger.first, larger.second)}
        falling = Ratio.term(Term(exponent=frozenset({(element, -1.0)})))
        if sides == {prev.maximum, cur.maximum} and definition.equals(both.times(falling)):
            return element
    return None
