"""Experts in routed form: tokens sorted by expert, one product per expert on its slice, results put back in order.

x, ids -> MoeInitRoutingV3 -> Split by the counts -> per expert: product -> Concat -> activation on all rows
       -> Split by the counts -> per expert: product -> Concat -> gather back [-> weigh -> sum over choices]

Each expert's weight is used where it lies: a Gemm reads it transposed, and an entry of a stack is an initializer at an
offset of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match
from fusion_patterns.graph import Dimension, Facts, same_dim
from fusion_patterns.lift.expert_network import Cut, Network, Product, RowWise
from fusion_patterns.lift.expert_weight import ExpertWeight
from fusion_patterns.lift.permutation import Permutation
from fusion_patterns.lift.router import Router, recognise_router, same_rows
from fusion_patterns.miss import Miss, miss
from fusion_patterns.weights import stacked_slice

__all__ = [
    "OPERATOR",
    "RoutedExperts",
    "Tokens",
    "experts_missing",
    "known",
    "products",
    "route",
    "routed_match",
    "routed_tokens",
    "routing_attributes",
    "routing_call",
    "slices",
    "sorted_tokens",
    "validation_sizes",
    "wrong_dtype",
]

OPERATOR = OPERATORS["MoeInitRoutingV3"]
_OUTPUTS = ("expanded_x", "expanded_row_idx", "expert_tokens_count_or_cumsum")
_IN_RANGE = "expert-ids-in-range"


@dataclass(frozen=True)
class Tokens:
    """What is routed: `x` (.., H), and for each of its rows `choices` expert ids below `experts`.

    `ids` have the order of the assignments in any shape. `router` is what proves them in range and distinct, if
    anything does. Where `x` `may_be_longer` than the rows of `ids` (N, K), its surplus is not routed.
    `begin_at` is where the replaced subgraph begins: the scores of the router, unless sizes of tokens and scores are
    not known to be equal; the ids otherwise.
    """

    x: ir.Value
    ids: ir.Value
    choices: int
    experts: int
    router: Router | None
    begin_at: ir.Value
    may_be_longer: bool = False

    @property
    def assumed(self) -> tuple[str, ...]:
        return () if self.router is not None else (_IN_RANGE,)

    def boundary(self, weights: ir.Value | None = None) -> dict[ir.Value, str | None]:
        """Where the replaced subgraph begins, with the rules for random inputs; `weights` begin there too.

        Weights that the router's TopK itself yields are inside, as its scores are the beginning.
        """
        found: dict[ir.Value, str | None] = {self.x: None, self.begin_at: None}
        from_scores = self.router is not None and self.begin_at is self.router.scores
        if not from_scores:
            last = (self.begin_at.shape or (None,))[-1]
            distinct = last == self.choices and self.choices <= self.experts
            found[self.begin_at] = f"{'distinct' if distinct else 'ids'}:{self.experts}"
        if weights is not None and not (from_scores and self.router and weights.producer() is self.router.node):
            found[weights] = None
        return found


@dataclass(frozen=True)
class RoutedExperts:
    """Tokens, the network of every expert, and the value that it is for.

    With `weights` (.., K), `result` (.., n) is the weighted sum over the choices; without, it has a row per assignment.
    `first_rows` are known to have at most one row.
    """

    tokens: Tokens
    network: Network
    weights: ir.Value | None
    result: ir.Value
    anchor: ir.Node
    first_rows: tuple[ir.Value, ...] = ()


_TOKENS_PER_EXPERT, _MOST_TOKENS, _FEWEST_TOKENS = 4, 256, 8
_MOST_GATHERED = 2**28
"""Bytes of weight matrices that a validation run may gather for its assignments."""


def validation_sizes(tokens: Tokens, facts: Facts, gathered: int = 0) -> dict[str, int]:
    """Sizes with which every expert gets some tokens and no order is its own inverse by chance.

    `gathered` are the bytes that the original gathers for each assignment; they limit the number of tokens.
    """
    count = min(_TOKENS_PER_EXPERT * tokens.experts, _MOST_TOKENS)
    if gathered:
        count = min(count, max(_MOST_GATHERED // (gathered * tokens.choices), _FEWEST_TOKENS))
    rows = _rows(tokens.x, facts)
    symbols = sorted(rows.free_symbols()) if isinstance(rows, ir.SymbolicDim) and rows.value is not None else []
    return {name: max(math.ceil(count ** (1 / len(symbols))), 2) for name in symbols}


def _gathered_bytes(block: RoutedExperts) -> int:
    """What experts of which every assignment gathers the matrices read per assignment, else 0."""
    if block.weights is not None:
        return 0
    products = [step.weights[0] for step in block.network.steps if isinstance(step, Product)]
    types = [weight.initializer.dtype or ir.DataType.FLOAT for weight in products]
    return sum(math.prod(weight.shape) * int(dtype.itemsize) for weight, dtype in zip(products, types, strict=True))


def routed_tokens(x: ir.Value, ids: ir.Value, choices: int, experts: int, facts: Facts) -> Tokens:
    """The tokens and their ids, with the router that the ids come from."""
    router = recognise_router(ids, facts)
    known = router is not None and same_rows(x, router.scores, facts)
    return Tokens(x, ids, choices, experts, router, router.scores if router is not None and known else ids)


def sorted_tokens(x: ir.Value, permutation: Permutation, experts: int, facts: Facts) -> Tokens:
    """The tokens that a permutation sorts. It may leave some out: x is only indexed."""
    tokens = routed_tokens(x, permutation.ids, permutation.choices, experts, facts)
    return replace(tokens, may_be_longer=not same_rows(x, permutation.ids, facts))


def wrong_dtype(x: ir.Value, anchor: ir.Node) -> Miss | None:
    """A reason where the operator does not take tokens of this type, as it takes floats of 16 and 32 bits."""
    if x.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    return miss("dtype", anchor, "tokens in float32, float16 or bfloat16", str(x.dtype))


def routed_match(fusion: str, block: RoutedExperts, facts: Facts) -> Match | Miss:
    """The match that puts a block into routed form."""
    tokens = block.tokens
    reason = wrong_dtype(tokens.x, block.anchor) or experts_missing(tokens.router, tokens.experts, block.anchor)
    if reason is not None:
        return reason
    return Match(
        fusion,
        block.anchor,
        (routing_call(tokens, routing_attributes(tokens.experts), facts),),
        (block.result,),
        tokens.boundary(block.weights),
        lambda emit: _emit(emit, block, facts),
        absorbed=tuple(value for value in block.network.computed if value is not block.result),
        assumed=tokens.assumed,
        sizes=validation_sizes(tokens, facts, _gathered_bytes(block)),
        shapes={row: ir.Shape([1, *(facts.shape(row) or ())[1:]]) for row in block.first_rows},
    )


def experts_missing(router: Router | None, experts: int, anchor: ir.Node) -> Miss | None:
    """A reason where the router knows more experts than the graph has."""
    if router is None or router.experts <= experts:
        return None
    return miss("experts-missing", anchor, f"the {router.experts} experts of the router", f"{experts}")


def routing_attributes(experts: int, **others: int) -> dict[str, int]:
    """Rows by assignment and counts by expert, unless `others` says otherwise."""
    given = {"expert_num": experts, "expert_tokens_num_type": 1, "expert_tokens_num_flag": 1, "row_idx_type": 0}
    return given | others


def routing_call(tokens: Tokens, attributes: dict[str, int], facts: Facts) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    x = Tensor(tokens.x.dtype, _names(_rows(tokens.x, facts), facts.dim(tokens.x, -1)))
    ids = Tensor(ir.DataType.INT32, _names(_rows(tokens.x, facts), tokens.choices))
    return Call(OPERATOR, {"x": x, "expert_idx": ids}, _OUTPUTS, OPERATOR.attribute_values(attributes))


def _names(*dims: Dimension | None) -> tuple[int | str | None, ...]:
    return tuple(dim.value if isinstance(dim, ir.SymbolicDim) else dim for dim in dims)


def _rows(x: ir.Value, facts: Facts) -> Dimension:
    """How many tokens there are, a nameless symbol where that is unknown."""
    shape = facts.shape(x)
    rows: Dimension = 1
    for dim in (ir.SymbolicDim(None),) if shape is None else shape[:-1]:
        rows = rows * dim
    return rows


def route(
    emit: Emitter,
    tokens: Tokens,
    attributes: dict[str, int],
    facts: Facts,
    scales: Mapping[str, ir.Value] | None = None,
) -> dict[str, ir.Value]:
    """The operator's node, its inputs brought to (N, H) and (N, K) in int32; its outputs by name."""
    rows, width = _rows(tokens.x, facts), facts.dim(tokens.x, -1)
    x = _matrix(emit, tokens.x, (rows, width), facts)
    if tokens.may_be_longer:
        rows = facts.dim(tokens.ids, 0) or rows
        end = emit.op("Shape", tokens.ids, end=1, dtype=ir.DataType.INT64, shape=(1,))
        x = emit.op("Slice", x, emit.integers([0]), end, emit.integers([0]), shape=known(rows, width))
    ids = _matrix(emit, tokens.ids, (rows, tokens.choices), facts)
    if ids.dtype != ir.DataType.INT32:
        ids = emit.op("Cast", ids, to=ir.DataType.INT32, dtype=ir.DataType.INT32, shape=facts.shape(ids))
    inputs = {"x": x, "expert_idx": ids, **(scales or {})}
    outputs = (*_OUTPUTS, "expanded_scale") if attributes.get("quant_mode") == 1 else _OUTPUTS
    return emit.fused(OPERATOR, inputs, outputs, attributes)


def _matrix(emit: Emitter, value: ir.Value, shape: tuple[Dimension, Dimension | None], facts: Facts) -> ir.Value:
    """A value as rows of its last axis."""
    width = shape[1]
    if facts.rank(value) == 2 and same_dim(facts.dim(value, 1), width):
        return value
    return emit.op("Reshape", value, emit.integers([-1, int(str(width))]), shape=known(*shape))


def known(*dims: Dimension | None) -> tuple[Dimension, ...]:
    """Dimensions with a nameless symbol for what is unknown."""
    return tuple(ir.SymbolicDim(None) if dim is None else dim for dim in dims)


def _emit(emit: Emitter, block: RoutedExperts, facts: Facts) -> dict[ir.Value, ir.Value]:
    tokens = block.tokens
    routed = route(emit, tokens, routing_attributes(tokens.experts), facts)
    assignments = _rows(tokens.x, facts) * tokens.choices
    counts = routed["expert_tokens_count_or_cumsum"]
    rows = _Rebuilt(emit, counts, assignments, facts).run(block.network, routed["expanded_x"])
    width = facts.size(block.result, -1) if block.weights is not None else block.network.steps[-1].width
    back = emit.op("Gather", rows, routed["expanded_row_idx"], axis=0, shape=known(assignments, width))
    if block.weights is None:
        return {block.result: _as_result(emit, back, block.result, facts)}
    return {block.result: _weighted_sum(emit, back, block, facts)}


def _as_result(emit: Emitter, rows: ir.Value, result: ir.Value, facts: Facts) -> ir.Value:
    """Rows (M, n) in the shape of the result, which has the same elements in the same order."""
    shape = facts.shape(result)
    if shape is None or len(shape) == 2:
        return rows
    target = [dim if isinstance(dim, int) else -1 for dim in shape]
    if target.count(-1) > 1:
        return emit.op("Reshape", rows, emit.op("Shape", result), shape=shape)
    return emit.op("Reshape", rows, emit.integers(target), shape=shape)


def _weighted_sum(emit: Emitter, rows: ir.Value, block: RoutedExperts, facts: Facts) -> ir.Value:
    """Sum over choices of weights (.., K) times rows (N * K, n), in the shape of the result (.., n)."""
    tokens, weights = block.tokens, block.weights
    assert weights is not None  # the caller has looked
    count, width, choices = _rows(tokens.x, facts), facts.dim(rows, 1), tokens.choices
    per_choice = emit.op(
        "Reshape", rows, emit.integers([-1, choices, int(str(width))]), shape=known(count, choices, width)
    )
    column = emit.op("Reshape", weights, emit.integers([-1, choices, 1]), shape=known(count, choices, 1))
    weighted = emit.op("Mul", per_choice, column, shape=known(count, choices, width))
    total = emit.op("ReduceSum", weighted, emit.integers([1]), keepdims=0, shape=known(count, width))
    shape = facts.shape(block.result)
    if shape is None or len(shape) == 2:
        return total
    lead = emit.op("Shape", tokens.x, end=-1, dtype=ir.DataType.INT64, shape=(len(shape) - 1,))
    target = emit.op("Concat", lead, emit.integers([int(str(width))]), axis=0, shape=(len(shape),))
    return emit.op("Reshape", total, target, shape=shape)


class _Rebuilt:
    """A network on rows (M, width) that are sorted by expert."""

    def __init__(self, emit: Emitter, counts: ir.Value, assignments: Dimension, facts: Facts) -> None:
        self._emit, self._counts, self._assignments, self._facts = emit, counts, assignments, facts
        self._slices: dict[ir.Value, list[ir.Value]] = {}

    def run(self, network: Network, rows: ir.Value) -> ir.Value:
        values = [rows]
        for step in network.steps:
            if isinstance(step, Product):
                values.append(self._product(step, values[step.rows]))
            elif isinstance(step, Cut):
                values.append(self._cut(step, values[step.rows]))
            else:
                values.append(self._row_wise(step, values))
        return values[-1]

    def _product(self, step: Product, rows: ir.Value) -> ir.Value:
        if rows not in self._slices:
            self._slices[rows] = slices(self._emit, rows, self._counts, len(step.weights), self._facts)
        shape = known(self._assignments, step.width)
        return products(self._emit, self._slices[rows], step.weights, step.bias, shape)

    def _cut(self, step: Cut, rows: ir.Value) -> ir.Value:
        bounds = (step.start, step.start + (step.size - 1) * step.step + 1, 1, step.step)
        shape = known(self._assignments, step.size)
        return self._emit.op("Slice", rows, *(self._emit.integers([bound]) for bound in bounds), shape=shape)

    def _row_wise(self, step: RowWise, values: Sequence[ir.Value]) -> ir.Value:
        operands = [
            values[operand] if isinstance(operand, int) else self._constant(operand) for operand in step.operands
        ]
        attributes = {name: given.value for name, given in step.node.attributes.items()}
        shape, dtype = known(self._assignments, step.width), step.node.outputs[0].dtype
        return self._emit.op(step.node.op_type, *operands, shape=shape, dtype=dtype, **attributes)

    def _constant(self, value: ir.Value) -> ir.Value | None:
        """A constant of one element without axes that would add to those of the rows."""
        if not value.name:
            return None
        if len(value.shape or ()) <= 2:
            return value
        number, dtype = self._facts.scalar(value), value.dtype
        assert number is not None  # a step's constants have one element
        assert dtype is not None
        return self._emit.scalar(number, dtype)


def slices(emit: Emitter, rows: ir.Value, counts: ir.Value, experts: int, facts: Facts) -> list[ir.Value]:
    """The rows of each expert; they are contiguous, so one Split cuts them all."""
    width = facts.dim(rows, 1)
    return emit.split(rows, counts, 0, [known(None, width)] * experts)


def products(
    emit: Emitter,
    rows: Sequence[ir.Value],
    weights: Sequence[ExpertWeight],
    bias: Sequence[ExpertWeight] | None,
    shape: Sequence[Dimension],
) -> ir.Value:
    """The rows of each expert times its weight plus its bias, put together again."""
    parts = []
    for expert, (piece, weight) in enumerate(zip(rows, weights, strict=True)):
        matrix, part = stored(emit, weight), known(None, shape[1])
        added = [] if bias is None else [stored(emit, bias[expert])]
        if weight.transposed or added:
            parts.append(emit.op("Gemm", piece, matrix, *added, transB=int(weight.transposed), shape=part))
        else:
            parts.append(emit.op("MatMul", piece, matrix, shape=part))
    return emit.op("Concat", *parts, axis=0, shape=shape)


def stored(emit: Emitter, weight: ExpertWeight) -> ir.Value:
    """The initializer as it lies."""
    return weight.initializer if weight.index is None else stacked_slice(emit, weight.initializer, weight.index)
