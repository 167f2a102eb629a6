"""Experts in a loop that tracing unrolled: each gathers its tokens, and adds its weighted results to those rows.

token, choice = NonZero(ids == e)
sum[token] += expert e (x[token]) * weights[token, choice]
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.dense_experts import separate_product
from fusion_patterns.lift.expert_mask import ExpertMask, recognise_expert_mask
from fusion_patterns.lift.expert_network import FoundProduct, Values
from fusion_patterns.lift.mask import uniform_value
from fusion_patterns.lift.router import reshaped_from
from fusion_patterns.lift.row_gather import gathered_rows
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss

__all__ = ["Addition", "ExpertLoop", "Hits", "LoopedExperts", "recognise_addition", "recognise_hits", "recognise_loop"]


@dataclass(frozen=True)
class Hits:
    """value (n) = the tokens (`of_tokens`), or the places among their choices, for which an expert was chosen."""

    mask: ExpertMask
    of_tokens: bool
    node: ir.Node


def recognise_hits(value: ir.Value, facts: Facts) -> Hits | None:
    """One row of NonZero(mask), or one column of its transpose, as a vector."""
    return facts.remember("hits", value, _hits)


def _hits(value: ir.Value, facts: Facts) -> Hits | None:
    value = reshaped_from(value, facts)
    node = value.producer()
    if is_op(node, "Gather"):
        table, place = facts.input(node, 0), facts.integers(facts.input(node, 1))
        axis = facts.axis(node, table, 0)
        if place is None or len(place) != 1:
            return None
        row = place[0] % 2
    else:
        cut = recognise_slice(value, facts)
        if cut is None or cut.size != 1:
            return None
        table, axis, row = cut.source, cut.axis, cut.start
    found = facts.producer(table)
    turned = is_op(found, "Transpose")
    if is_op(found, "Transpose"):
        found = facts.producer(facts.input(found, 0))
    if not is_op(found, "NonZero") or axis != int(turned):
        return None
    mask = recognise_expert_mask(facts.input(found, 0), facts)
    if mask is None or facts.rank(facts.input(found, 0)) != 2:
        return None
    return Hits(mask, (row == 0) != mask.choices_first, found)


@dataclass(frozen=True)
class Addition:
    """value = base with `update` (n, H) added to the rows `tokens` (n).

    `overwrites`: of several updates of one row only the last would count. `one_row` is the first row of the base where
    the update was expanded to the shape of that, which changes nothing.
    """

    base: ir.Value
    tokens: ir.Value
    update: ir.Value
    overwrites: bool
    one_row: ir.Value | None = None


def recognise_addition(value: ir.Value, facts: Facts) -> Addition | None:
    """The addition to some rows that computes a value; `tokens` before any axis was added to them.

    Spellings
    ---------
    1. ScatterND(add) or ScatterElements(add, axis 0).
    2. Add(base, one of these into zeros, adding or not).
    3. ScatterND or ScatterElements of base[tokens] + update.
    """
    return facts.remember("addition", value, _addition)


def _addition(value: ir.Value, facts: Facts) -> Addition | None:
    node = facts.producer(value)
    if is_op(node, "Add"):
        for base, scattered in facts.either_way(node):
            inner = facts.producer(scattered)
            if is_op(inner, *_SCATTERS) and uniform_value(facts.input(inner, 0), facts) == 0:
                tokens = _scattered_rows(inner, facts)
                if tokens is not None:
                    return Addition(base, tokens, *_unspread(facts.input(inner, 2), not _adds(inner), facts))
    if not is_op(node, *_SCATTERS):
        return None
    base, tokens, update = facts.input(node, 0), _scattered_rows(node, facts), facts.input(node, 2)
    if tokens is None:
        return None
    if _adds(node):
        return Addition(base, tokens, *_unspread(update, False, facts))
    return _gathered_addition(base, tokens, update, facts)


def _gathered_addition(base: ir.Value, tokens: ir.Value, update: ir.Value, facts: Facts) -> Addition | None:
    node = update.producer()
    if not is_op(node, "Add"):
        return None
    for old, added in facts.either_way(node):
        gather = None if (reader := facts.producer(old)) is None else gathered_rows(reader, facts)
        if gather is not None and gather.source is base and reshaped_from(gather.indices, facts) is tokens:
            return Addition(base, tokens, added, overwrites=True)
    return None


_SCATTERS = ("ScatterElements", "ScatterND")


def _adds(node: ir.Node) -> bool:
    return bool(attribute(node, "reduction") == "add")


def _scattered_rows(node: ir.Node, facts: Facts) -> ir.Value | None:
    """The vector of rows that a scatter of whole rows writes."""
    if attribute(node, "reduction") not in ("none", "add"):
        return None
    indices = facts.input(node, 1)
    if node.op_type == "ScatterElements":
        spread = indices.producer()
        if attribute(node, "axis") != 0 or not is_op(spread, "Expand"):
            return None
        indices = facts.input(spread, 0)
    if facts.rank(indices) != 2 or facts.size(indices, -1) != 1:
        return None
    return reshaped_from(indices, facts)


def _unspread(value: ir.Value, overwrites: bool, facts: Facts) -> tuple[ir.Value, bool, ir.Value | None]:
    """(value, `overwrites`, one row) with the value before it was expanded to the shape of at most one row.

    Tracing an accumulation writes such an Expand, to the shape of base[0:1]; it leaves the value as it is.
    """
    node = facts.producer(value)
    source = facts.input(node, 0) if is_op(node, "Expand") else value
    target = facts.symbolic(facts.input(node, 1)) if is_op(node, "Expand") else None
    measured = facts.producer(facts.input(node, 1)) if is_op(node, "Expand") else None
    if target is None or len(target) != 2 or facts.rank(source) != 2 or target[1] != facts.size(source, 1):
        return value, overwrites, None
    row = facts.input(measured, 0) if is_op(measured, "Shape") else None
    if row is not None and _is_first_row(row, facts):
        return source, overwrites, row
    return (source if target[0] == 1 else value), overwrites, None


def _is_first_row(value: ir.Value, facts: Facts) -> bool:
    cut = value.producer()
    if not is_op(cut, "Slice"):
        return False
    starts, ends = facts.integers(facts.input(cut, 1)), facts.integers(facts.input(cut, 2))
    axes = facts.integers(facts.input(cut, 3)) if facts.has(cut, 3) else list(range(len(starts or [])))
    if starts is None or ends is None or axes is None or 0 not in axes:
        return False
    return starts[axes.index(0)] == 0 and ends[axes.index(0)] == 1


@dataclass(frozen=True)
class ExpertLoop:
    """total (N, H) = sum over experts e and choices k, for the tokens that chose e as k-th, of outputs[e] * weights.

    `tokens` are the rows of each expert. `overwrites`: it is only right when no token chooses an expert twice.
    `first_rows` are rows of the partial sums that the graph asks the shape of.
    """

    ids: ir.Value
    weights: ir.Value
    outputs: dict[int, ir.Value]
    tokens: dict[int, ir.Value]
    experts: int | None
    hit_of: int | None
    overwrites: bool
    first_rows: tuple[ir.Value, ...]
    base: ir.Value
    total: ir.Value


_TO_ADDITION = ("Unsqueeze", "Reshape", "Squeeze", "Expand", "Split", "Transpose", "Gather", "Slice", *_SCATTERS, "Add")
_FARTHEST = 48


def recognise_loop(start: ir.Node, mask: ExpertMask, facts: Facts) -> ExpertLoop | Miss | None:
    """The loop of which `start` is a NonZero(mask); None when nothing is added to the rows that it finds."""
    last = _last_addition(start, facts)
    if last is None:
        return None
    total = last
    outputs: dict[int, ir.Value] = {}
    tokens: dict[int, ir.Value] = {}
    first_rows: list[ir.Value] = []
    weights: ir.Value | None = None
    overwrites = False
    hit_of: int | None = None
    while (step := recognise_addition(last, facts)) is not None:
        found = _weighted(step, facts)
        if isinstance(found, Miss):
            return found
        hits, output, given = found
        if hits.mask.ids is not mask.ids or (weights is not None and given is not weights):
            return miss("combine-unrecognised", last, "experts that share ids and routing weights", "others")
        if hits.mask.expert in outputs:
            return miss("combine-unrecognised", last, f"one result of expert {hits.mask.expert}", "several")
        outputs[hits.mask.expert], tokens[hits.mask.expert], weights = output, step.tokens, given
        first_rows.extend(row for row in (step.one_row,) if row is not None)
        overwrites, hit_of = overwrites or step.overwrites, hit_of or hits.mask.hit_of
        last = facts.plain(step.base)
    if weights is None or uniform_value(last, facts) != 0:
        return miss("combine-unrecognised", last, "a sum over the experts that starts from zeros", "another start")
    return ExpertLoop(
        mask.ids,
        weights,
        dict(sorted(outputs.items())),
        tokens,
        mask.experts,
        hit_of,
        overwrites,
        tuple(first_rows),
        last,
        total,
    )


def _last_addition(start: ir.Node, facts: Facts) -> ir.Value | None:
    """The last of the additions that follow the first one."""
    queue, seen = [start.outputs[0]], {start.outputs[0]}
    current: ir.Value | None = None
    while queue and current is None:
        value = queue.pop(0)
        step = recognise_addition(value, facts)
        hits = None if step is None else recognise_hits(step.tokens, facts)
        if hits is not None and hits.node is start:
            current = value
        for node, _ in facts.readers(value):
            fresh = [output for output in node.outputs if output not in seen] if is_op(node, *_TO_ADDITION) else []
            if len(seen) < _FARTHEST:
                seen.update(fresh)
                queue.extend(fresh)
    while current is not None and (following := _next_addition(current, facts)) is not None:
        current = following
    return current


def _next_addition(base: ir.Value, facts: Facts) -> ir.Value | None:
    for node, _ in facts.readers(base):
        step = recognise_addition(node.outputs[0], facts) if is_op(node, "Add", *_SCATTERS) else None
        if step is not None and step.base is facts.plain(base) and recognise_hits(step.tokens, facts) is not None:
            return node.outputs[0]
    return None


def _weighted(step: Addition, facts: Facts) -> tuple[Hits, ir.Value, ir.Value] | Miss:
    """(rows of an expert, its unweighted output, all routing weights) of what is added."""
    hits = recognise_hits(step.tokens, facts)
    node = step.update.producer()
    if hits is None or not hits.of_tokens or not is_op(node, "Mul"):
        return miss("combine-unrecognised", step.update, "expert results times routing weights", "another update")
    for output, factor in facts.either_way(node):
        weights = _chosen_weights(factor, step.tokens, hits, facts)
        if weights is not None:
            return hits, output, weights
    return miss("combine-unrecognised", node, "weights of the same tokens and choices", "another factor")


def _chosen_weights(factor: ir.Value, tokens: ir.Value, hits: Hits, facts: Facts) -> ir.Value | None:
    """The routing weights (N, K) of a factor (n, 1) = weights[token, choice].

    Spellings
    ---------
    1. Gather(flattened weights, token * K + choice).
    2. GatherND(weights, pairs), pairs concatenated or the transpose of NonZero's result.
    """
    if facts.size(factor, -1) != 1:
        return None
    value = reshaped_from(factor, facts)
    node = value.producer()
    if is_op(node, "GatherND"):
        return _paired(node, tokens, hits, facts)
    if not is_op(node, "Gather"):
        return None
    weights, place = reshaped_from(facts.input(node, 0), facts), facts.producer(facts.input(node, 1))
    flat = facts.axis(node, facts.input(node, 0), 0) == 0
    choices = facts.size(weights, -1) if facts.rank(weights) == 2 else None
    if not flat or not is_op(place, "Add") or choices is None:
        return None
    for choice, scaled in facts.either_way(place):
        times = facts.producer(scaled)
        if not is_op(times, "Mul") or not _are_choices(choice, hits, facts):
            continue
        if any(
            reshaped_from(a, facts) is tokens and facts.integers(b) == [choices] for a, b in facts.either_way(times)
        ):
            return weights
    return None


def _are_choices(value: ir.Value, hits: Hits, facts: Facts) -> bool:
    found = recognise_hits(value, facts)
    return found is not None and found.node is hits.node and not found.of_tokens


def _paired(node: ir.Node, tokens: ir.Value, hits: Hits, facts: Facts) -> ir.Value | None:
    weights, pairs = facts.input(node, 0), facts.producer(facts.input(node, 1))
    if facts.rank(weights) != 2 or attribute(node, "batch_dims") != 0:
        return None
    if is_op(pairs, "Transpose") and not hits.mask.choices_first:
        return weights if facts.producer(facts.input(pairs, 0)) is hits.node else None
    if not is_op(pairs, "Concat") or attribute(pairs, "axis") not in (-1, 1) or len(pairs.inputs) != 2:
        return None
    first, second = (reshaped_from(facts.input(pairs, index), facts) for index in range(2))
    return weights if first is tokens and _are_choices(second, hits, facts) else None


class LoopedExperts:
    """Experts of a loop, see `fusion_patterns.lift.expert_network.Experts`; `x` (N, H) are the tokens."""

    def __init__(self, tokens: tuple[ir.Value, ...]) -> None:
        self.x: ir.Value | None = None
        self._tokens = tokens

    def are_rows(self, values: Values, facts: Facts) -> bool:
        sources: list[ir.Value] = []
        for value, tokens in zip(values, self._tokens, strict=True):
            node = value.producer()
            gather = None if node is None else gathered_rows(node, facts)
            if gather is None or reshaped_from(gather.indices, facts) is not tokens:
                return False
            sources.append(gather.source)
        if any(source is not sources[0] for source in sources):
            return False
        self.x = self.x or sources[0]
        return self.x is sources[0]

    def product(self, values: Values, facts: Facts) -> FoundProduct | None:
        return separate_product(values, facts)
