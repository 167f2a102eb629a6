"""What every expert computes of its rows, read from all experts at once: the same steps, each with its own weights.

The experts of a graph may be spelled one by one (E values that stand in the same place) or all together (one value with
a row per assignment). Either way the network is one list of steps that can be rebuilt on rows (M, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from fusion_patterns.graph import Facts, is_op, same_dim
from fusion_patterns.lift.expert_weight import ExpertWeight
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss

__all__ = ["ON_ROWS", "Cut", "Experts", "FoundProduct", "Network", "Product", "RowWise", "Step", "recognise_network"]

Values = tuple[ir.Value, ...]


@dataclass(frozen=True)
class Product:
    """(M, n): the rows of value `rows` times the weight of their expert, plus its bias."""

    rows: int
    weights: tuple[ExpertWeight, ...]
    bias: tuple[ExpertWeight, ...] | None
    width: int


@dataclass(frozen=True)
class Cut:
    """(M, size): columns start, start + step, .. of value `rows`."""

    rows: int
    start: int
    size: int
    step: int

    @property
    def width(self) -> int:
        return self.size


@dataclass(frozen=True)
class RowWise:
    """(M, width): an element-wise node; an operand is the number of a value, or a constant."""

    node: ir.Node
    operands: tuple[int | ir.Value, ...]
    width: int


Step = Product | Cut | RowWise


@dataclass(frozen=True)
class Network:
    """Step i makes value i + 1; value 0 is the rows (M, H). The last value is the result.

    `computed` are the graph's values that the steps stand for.
    """

    steps: tuple[Step, ...]
    computed: Values


@dataclass(frozen=True)
class FoundProduct:
    """A product in the graph: what it multiplies, and the weights and biases of all experts."""

    rows: Values
    weights: tuple[ExpertWeight, ...]
    bias: tuple[ExpertWeight, ...] | None
    width: int


class Experts(Protocol):
    """How the experts of one form are spelled."""

    def are_rows(self, values: Values, facts: Facts) -> bool:
        """Whether these are the rows that go into the experts."""
        ...

    def product(self, values: Values, facts: Facts) -> FoundProduct | None:
        """The product with the experts' weights that computes these values."""
        ...


_UNARY = frozenset(
    (
        *("Sigmoid", "Tanh", "Relu", "Erf", "Exp", "Neg", "Abs", "Sqrt", "Reciprocal", "Gelu", "Swish", "Softplus"),
        *("Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Selu", "Mish", "Cast", "Clip"),
    )
)
_BINARY = frozenset(("Mul", "Add", "Sub", "Div", "Pow", "Min", "Max"))
_REGROUPING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
_MOST_STEPS = 48

ON_ROWS = _UNARY | _BINARY | {*_REGROUPING, "Split", "Slice", "SplitToSequence", "SequenceAt"}
"""Operators that may stand between the products of an expert."""


def recognise_network(results: Values, experts: Experts, facts: Facts) -> Network | Miss:
    """The steps from the rows that go into the experts to `results`, one value per expert or one for all."""
    walk = _Walk(experts, facts)
    last = walk.number(results)
    if isinstance(last, Miss):
        return last
    if not any(isinstance(step, Product) for step in walk.steps) or last != len(walk.steps):
        return miss("experts-unrecognised", results[0], "products with the experts' weights", "none")
    return Network(tuple(walk.steps), tuple(walk.computed))


class _Walk:
    """Upwards through the same places of all experts; every place is numbered once."""

    def __init__(self, experts: Experts, facts: Facts) -> None:
        self._experts, self._facts = experts, facts
        self._numbers: dict[Values, int] = {}
        self.steps: list[Step] = []
        self.computed: list[ir.Value] = []

    def number(self, values: Values) -> int | Miss:
        values = self._below_regrouping(values)
        if values in self._numbers:
            return self._numbers[values]
        number = 0 if self._experts.are_rows(values, self._facts) else self._add(values)
        if isinstance(number, int):
            self._numbers[values] = number
        return number

    def _add(self, values: Values) -> int | Miss:
        step = self._step(values)
        if isinstance(step, Miss):
            return step
        self.steps.append(step)
        self.computed.extend(values)
        return len(self.steps)

    def _step(self, values: Values) -> Step | Miss:
        if len(self.steps) >= _MOST_STEPS:
            return miss("experts-unrecognised", values[0], f"experts of at most {_MOST_STEPS} steps", "more")
        found = self._experts.product(values, self._facts)
        if found is not None:
            rows = self.number(found.rows)
            return rows if isinstance(rows, Miss) else Product(rows, found.weights, found.bias, found.width)
        return self._cut(values) or self._row_wise(values)

    def _below_regrouping(self, values: Values) -> Values:
        """The values before axes of size 1 are added or removed, or leading axes are folded: the rows are the same."""
        facts = self._facts
        values = tuple(facts.plain(value) for value in values)
        while all(is_op(value.producer(), *_REGROUPING) for value in values):
            below = tuple(facts.input(node, 0) for value in values if (node := value.producer()) is not None)
            same = all(_features(a, facts) == _features(b, facts) for a, b in zip(values, below, strict=True))
            if not same or _features(values[0], facts) is None:
                break
            values = below
        return values

    def _cut(self, values: Values) -> Cut | Miss | None:
        cuts = [recognise_slice(value, self._facts) for value in values]
        first = cuts[0]
        if first is None:
            return None
        sources: list[ir.Value] = []
        for value, cut in zip(values, cuts, strict=True):
            if cut is None or (cut.start, cut.size, cut.step) != (first.start, first.size, first.step):
                return miss("experts-unrecognised", value, "the same columns of every expert", "others")
            if _feature_axis(cut.source, self._facts) != cut.axis:
                return miss("experts-unrecognised", value, "a cut of the columns", f"one along axis {cut.axis}")
            sources.append(cut.source)
        rows = self.number(tuple(sources))
        return rows if isinstance(rows, Miss) else Cut(rows, first.start, first.size, first.step)

    def _row_wise(self, values: Values) -> RowWise | Miss:
        nodes = [self._facts.producer(value) for value in values]
        first = nodes[0]
        if not is_op(first, *_UNARY, *_BINARY):
            found = first.op_type if first is not None else "a graph input or weight"
            return miss("experts-unrecognised", values[0], "element-wise operators between the products", found)
        for value, node in zip(values, nodes, strict=True):
            if node is None or _kind(node) != _kind(first):
                return miss(
                    "experts-unrecognised", value, f"{first.op_type} as in the first expert", "another operator"
                )
        width = _features(values[0], self._facts)
        operands: list[int | ir.Value] = []
        for place in range(len(first.inputs)):
            operand = self._operand(values, [node for node in nodes if node is not None], place)
            if isinstance(operand, Miss):
                return operand
            operands.append(operand)
        if width is None:
            return miss("experts-unrecognised", values[0], "a known number of columns", "unknown")
        return RowWise(first, tuple(operands), width)

    def _operand(self, values: Values, nodes: Sequence[ir.Node], place: int) -> int | ir.Value | Miss:
        facts = self._facts
        operands = tuple(facts.input(node, place) for node in nodes)
        constant = facts.constant(operands[0])
        if constant is not None or nodes[0].inputs[place] is None:
            equal = all(_same_constant(constant, facts.constant(operand)) for operand in operands)
            if not equal or (constant is not None and constant.size != 1):
                return miss("experts-unrecognised", nodes[0], "one number, the same for all experts", "other constants")
            return operands[0]
        for value, operand in zip(values, operands, strict=True):
            if not _alike(value, operand, facts):
                return miss("experts-unrecognised", value, "operands of one shape", "broadcasting")
        return self.number(operands)


def _kind(node: ir.Node) -> tuple[str, str, int, dict[str, Any]]:
    return node.domain, node.op_type, len(node.inputs), {name: given.value for name, given in node.attributes.items()}


def _same_constant(left: np.ndarray[Any, Any] | None, right: np.ndarray[Any, Any] | None) -> bool:
    return left is right or (left is not None and right is not None and np.array_equal(left, right))


def _alike(value: ir.Value, operand: ir.Value, facts: Facts) -> bool:
    """Whether an operand is not broadcast along its columns or its rows, as far as that is known."""
    made, given = facts.shape(value), facts.shape(operand)
    if made is None or given is None or len(made) != len(given):
        return False
    columns = _feature_axis(value, facts)
    if columns is None or columns != _feature_axis(operand, facts) or not same_dim(made[columns], given[columns]):
        return False
    return not any(a != b and 1 in (a, b) for a, b in zip(made, given, strict=True))


def _feature_axis(value: ir.Value, facts: Facts) -> int | None:
    """The last axis that is not of size 1; the last one when all are."""
    shape = facts.shape(value)
    if not shape:
        return None
    return next((axis for axis in reversed(range(len(shape))) if shape[axis] != 1), len(shape) - 1)


def _features(value: ir.Value, facts: Facts) -> int | None:
    """The number of columns, None where it is not a number."""
    axis = _feature_axis(value, facts)
    return None if axis is None else facts.size(value, axis)
