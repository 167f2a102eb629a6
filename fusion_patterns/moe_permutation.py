"""A permutation of tokens by expert, whatever reads its results -> MoeInitRoutingV3.

ids -> sort -> order -> x[order // K] [-> quantisation]
                     -> inverse permutation
    -> histogram [-> prefix sums]

The operator yields the inverse permutation, or the order itself where more than these reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match
from fusion_patterns.graph import Facts, is_op
from fusion_patterns.lift.histogram import PrefixSums, recognise_histogram, recognise_prefix_sums
from fusion_patterns.lift.permutation import Permutation, RowGather, derived, inverses, sorted_gathers
from fusion_patterns.lift.quantised_rows import DynamicQuantisation, StaticQuantisation, recognise_quantisation
from fusion_patterns.lift.router import recognise_router
from fusion_patterns.miss import Miss, miss
from fusion_patterns.moe_routed_experts import (
    Tokens,
    known,
    route,
    routing_attributes,
    routing_call,
    sorted_tokens,
    validation_sizes,
    wrong_dtype,
)

__all__ = ["permutation_match"]


@dataclass(frozen=True)
class _Routed:
    """What the operator computes of a permutation: the sorted rows, maybe quantised, and the values around them.

    `positions` are the inverses of the permutation, or its order where `order_is_read` by others. Of counts and their
    prefix sums only one kind is listed: the operator yields one.
    """

    permutation: Permutation
    tokens: Tokens
    gather: RowGather
    quantised: StaticQuantisation | DynamicQuantisation | None
    positions: tuple[ir.Value, ...]
    order_is_read: bool
    counts: tuple[ir.Value, ...]
    ends: tuple[ir.Value, ...]


def permutation_match(fusion: str, permutation: Permutation, facts: Facts) -> Match | Miss:
    """The match that replaces a permutation alone; a Miss where nothing tells the number of experts."""
    routed = _recognise(permutation, facts)
    if isinstance(routed, Miss):
        return routed
    tokens = routed.tokens
    return Match(
        fusion,
        permutation.node,
        (routing_call(tokens, _attributes(routed), facts),),
        _results(routed),
        tokens.boundary() | _quantisation_inputs(routed),
        lambda emit: _emit(emit, routed, facts),
        absorbed=(permutation.sorted_keys, routed.gather.rows, permutation.order),
        assumed=tokens.assumed,
        sizes=validation_sizes(tokens, facts),
    )


def _recognise(permutation: Permutation, facts: Facts) -> _Routed | Miss:
    gather = next((g for g in sorted_gathers(permutation, facts) if facts.rank(g.source) == 2), None)
    if gather is None:
        return miss("permutation-unrecognised", permutation.node, "a gather of tokens (N, H) by order // K", "none")
    router = recognise_router(permutation.ids, facts)
    counted = _histograms(permutation, facts)
    experts = next(iter(counted.values()), router.experts if router is not None else None)
    if experts is None:
        found = "no histogram of the ids, and no router that they come from"
        return miss("expert-count-unknown", permutation.node, "the number of experts", found)
    if router is not None and router.experts > experts:
        return miss("experts-missing", permutation.node, f"the {router.experts} experts of the router", f"{experts}")
    reason = wrong_dtype(gather.source, permutation.node)
    if reason is not None:
        return reason
    tokens = sorted_tokens(gather.source, permutation, experts, facts)
    quantised = recognise_quantisation(gather.rows, permutation.sorted_keys, facts)
    return _results_that_are_read(permutation, tokens, gather, quantised, tuple(counted), facts)


def _histograms(permutation: Permutation, facts: Facts) -> dict[ir.Value, int]:
    """The histograms of the ids in the graph, each with the number of experts it counts."""
    keys = (facts.plain(permutation.keys), permutation.sorted_keys)
    found: dict[ir.Value, int] = {}
    for key in keys:
        for value in derived(key):
            experts = facts.size(value, 0) if facts.rank(value) == 1 else None
            if experts is None or not is_op(value.producer(), "ScatterElements", "ReduceSum"):
                continue
            if recognise_histogram(value, keys, experts, facts) is None:
                found[value] = experts
    return found


def _results_that_are_read(
    permutation: Permutation,
    tokens: Tokens,
    gather: RowGather,
    quantised: StaticQuantisation | DynamicQuantisation | None,
    counts: tuple[ir.Value, ...],
    facts: Facts,
) -> _Routed:
    """Which of the values that the operator can yield the rest of the graph needs."""
    ends = tuple(end for value in counts for end in _prefix_sums(value, facts))
    inverse = tuple(inverses(permutation, facts))
    rows = _rows_results(gather, quantised)
    order_is_read = _escapes(permutation.order, {*rows, *inverse, *counts, *ends})
    positions = (permutation.order,) if order_is_read else inverse
    if any(_escapes(value, set(ends)) for value in counts):
        ends = ()
    else:
        counts = () if ends else counts
    return _Routed(permutation, tokens, gather, quantised, positions, order_is_read, counts, ends)


def _prefix_sums(counts: ir.Value, facts: Facts) -> list[ir.Value]:
    sums = [(value, recognise_prefix_sums(value, facts)) for value in derived(counts)]
    return [value for value, found in sums if isinstance(found, PrefixSums) and found.node is value.producer()]


def _rows_results(
    gather: RowGather, quantised: StaticQuantisation | DynamicQuantisation | None
) -> tuple[ir.Value, ...]:
    if quantised is None:
        return (gather.rows,)
    return (quantised.value, quantised.scale) if isinstance(quantised, DynamicQuantisation) else (quantised.value,)


_FARTHEST = 64


def _escapes(value: ir.Value, results: set[ir.Value]) -> bool:
    """Whether anything but `results` is computed from a value, as far as `_FARTHEST` values show."""
    queue, seen = [value], {value}
    while queue:
        current = queue.pop()
        if current.is_graph_output() or len(seen) > _FARTHEST:
            return True
        for use in current.uses():
            fresh = [output for output in use.node.outputs if output not in seen and output not in results]
            seen.update(fresh)
            queue.extend(fresh)
    return False


def _results(routed: _Routed) -> tuple[ir.Value, ...]:
    return (*_rows_results(routed.gather, routed.quantised), *routed.positions, *routed.counts, *routed.ends)


def _quantisation_inputs(routed: _Routed) -> dict[ir.Value, str | None]:
    found = routed.quantised
    if isinstance(found, StaticQuantisation):
        return {value: None for value in (found.scale, found.offset) if not value.is_initializer()}
    smooth = None if found is None else found.smooth
    return {} if smooth is None or smooth.is_initializer() else {smooth: None}


def _attributes(routed: _Routed) -> dict[str, int]:
    modes = {type(None): -1, StaticQuantisation: 0, DynamicQuantisation: 1}
    return routing_attributes(
        routed.tokens.experts,
        expert_tokens_num_type=0 if routed.ends else 1,
        row_idx_type=int(routed.order_is_read),
        quant_mode=modes[type(routed.quantised)],
    )


def _emit(emit: Emitter, routed: _Routed, facts: Facts) -> dict[ir.Value, ir.Value]:
    quantised = routed.quantised
    made = route(emit, routed.tokens, _attributes(routed), facts, _scales(emit, quantised, facts))
    replaced: dict[ir.Value, ir.Value] = {}
    if isinstance(quantised, DynamicQuantisation):
        column = emit.op("Unsqueeze", made["expanded_scale"], emit.integers([1]), shape=facts.shape(quantised.scale))
        replaced[quantised.scale] = _typed(emit, column, quantised.scale, facts)
    replaced[routed.gather.rows if quantised is None else quantised.value] = made["expanded_x"]
    for value in routed.positions:
        replaced[value] = _typed(emit, made["expanded_row_idx"], value, facts)
    for value in (*routed.counts, *routed.ends):
        replaced[value] = _typed(emit, made["expert_tokens_count_or_cumsum"], value, facts)
    return replaced


def _typed(emit: Emitter, made: ir.Value, wanted: ir.Value, facts: Facts) -> ir.Value:
    """What was made, in the type of the value that it stands for."""
    if wanted.dtype is None or made.dtype == wanted.dtype:
        return made
    return emit.op("Cast", made, to=wanted.dtype, dtype=wanted.dtype, shape=facts.shape(wanted))


def _scales(
    emit: Emitter, quantised: StaticQuantisation | DynamicQuantisation | None, facts: Facts
) -> dict[str, ir.Value]:
    """The inputs of the operator that quantise, in float32: scale and offset (1), or factors (E, H) or (1, H)."""
    if isinstance(quantised, StaticQuantisation):
        return {
            name: _float32(emit, emit.op("Reshape", value, emit.integers([1]), shape=(1,)), facts)
            for name, value in (("scale", quantised.scale), ("offset", quantised.offset))
        }
    if quantised is None or quantised.smooth is None:
        return {}
    width = facts.dim(quantised.smooth, -1)
    if quantised.by_expert:
        return {"scale": _float32(emit, quantised.smooth, facts)}
    row = emit.op("Reshape", quantised.smooth, emit.integers([1, -1]), shape=known(1, width))
    return {"scale": _float32(emit, row, facts)}


def _float32(emit: Emitter, value: ir.Value, facts: Facts) -> ir.Value:
    if value.dtype == ir.DataType.FLOAT:
        return value
    return emit.op("Cast", value, to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=facts.shape(value))
