"""Facts about the values of a graph, computed on demand and remembered: constants, shapes, shape arithmetic.

Everything here only reads. Dimensions are numbers or symbolic expressions; two dimensions are equal when their
normalised expressions are (equal names mean equal sizes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeGuard, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from ascend_onnx.symbols import expression

__all__ = ["ABSENT", "Dimension", "Facts", "attribute", "is_op", "only_reader", "same_dim", "static", "stored_tensor"]

_T = TypeVar("_T")

Dimension = int | ir.SymbolicDim

_SMALL = 4096
"""Constants up to this many elements are read while matching; larger ones are weights and stay on disk."""

_DEEPEST = 64
"""How many steps of shape arithmetic are followed upwards."""


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether `node` is one of these operators of the default ONNX domain."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in op_types


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The attribute's value; where the node leaves it out, the default of the operator's schema, else `default`."""
    given = node.attributes.get(name)
    if given is not None:
        return given.value
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return default
    declared = schema.attributes.get(name)
    if declared is None or declared.default_value.type == onnx.AttributeProto.UNDEFINED:
        return default
    value = onnx.helper.get_attribute_value(declared.default_value)
    return value.decode() if isinstance(value, bytes) else value


def stored_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of a constant: an initializer that is no input, or the output of a Constant node; not read."""
    node = value.producer()
    if is_op(node, "Constant"):
        given = node.attributes.get("value")
        return None if given is None else given.as_tensor()
    return value.const_value if value.is_initializer() and not value.is_graph_input() else None


def only_reader(value: ir.Value) -> tuple[ir.Node, int] | None:
    """The one node that reads a value, and at which input; None when several read it, or the graph's outputs do."""
    uses = list(value.uses())
    return (uses[0].node, uses[0].idx) if len(uses) == 1 and not value.is_graph_output() else None


def static(shape: ir.Shape | None) -> tuple[int, ...]:
    """A shape whose dimensions are known to be numbers, as a weight's are."""
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        raise ValueError(f"a shape of numbers was expected, got {shape}")
    return tuple(dim for dim in shape if isinstance(dim, int))


def same_dim(left: Dimension | None, right: Dimension | None) -> bool:
    """Whether two dimensions are provably equal."""
    if left is None or right is None:
        return False
    left, right = _number(left), _number(right)
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if any(isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in (left, right)):
        return False
    if left == right:
        return True
    return _symbols(left) == _symbols(right) and _simplest(left) == _simplest(right)


def _symbols(dim: Dimension) -> set[str]:
    return set() if isinstance(dim, int) else set(re.findall(r"[A-Za-z_]\w*", dim.value or ""))


def _simplest(dim: Dimension) -> Dimension:
    return _number(dim.simplify()) if isinstance(dim, ir.SymbolicDim) else dim


ABSENT = ir.Value(name="")
"""Stands for an optional input that a node leaves out: no type, no shape, no producer."""


class Facts:
    """What is known about the values of one graph."""

    def __init__(
        self,
        shapes: Mapping[ir.Value, ir.Shape] | None = None,
        assumed: Collection[str] = frozenset(),
        only: str | None = None,
    ) -> None:
        """`shapes` say more than the values do of themselves; `assumed` names what may be taken for granted.

        `only` is the one operator that may be used, None for all.
        """
        self.assumed = frozenset(assumed)
        self.only = only
        self.better_shapes = shapes or {}
        self._memory: dict[tuple[Hashable, int], Any] = {}
        self._order: list[tuple[Hashable, ir.Value]] = []

    def remember(self, kind: Hashable, value: ir.Value, compute: Callable[[ir.Value, Facts], _T]) -> _T:
        """`compute(value, self)`, done once per value and kind."""
        key = (kind, id(value))
        if key not in self._memory:
            self._memory[key] = compute(value, self)
            self._order.append((kind, value))  # also keeps id(value) from being reused
        answer: _T = self._memory[key]
        return answer

    def input(self, node: ir.Node, index: int) -> ir.Value:
        """An input of a node without the nodes above it that change nothing; `ABSENT` where the node has none."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return ABSENT if value is None else self.plain(value)

    def has(self, node: ir.Node, index: int) -> bool:
        """Whether a node is given the optional input at `index`."""
        return index < len(node.inputs) and node.inputs[index] is not None

    def either_way(self, node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]:
        """The two operands of a commutative node in both orders."""
        left, right = self.input(node, 0), self.input(node, 1)
        return (left, right), (right, left)

    def producer(self, value: ir.Value) -> ir.Node | None:
        """The node that computes a value, without nodes that change nothing."""
        return self.plain(value).producer()

    def plain(self, value: ir.Value) -> ir.Value:
        """The value before nodes that change nothing: see `_unchanged`."""
        return self.remember("plain", value, _plain)

    def readers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Every node that reads a value, directly or through nodes that change nothing, and at which input."""
        found: list[tuple[ir.Node, int]] = []
        for use in value.uses():
            through = [output for output in use.node.outputs if self.plain(output) is self.plain(value)]
            found.extend(reader for output in through for reader in self.readers(output))
            if not through:
                found.append((use.node, use.idx))
        return found

    def trace(self) -> list[tuple[Hashable, ir.Value, Any]]:
        """Everything remembered so far, in the order it was found out: kind, value, answer."""
        return [(kind, value, self._memory[kind, id(value)]) for kind, value in self._order]

    def constant(self, value: ir.Value | None) -> np.ndarray[Any, Any] | None:
        """The value of a small constant (initializer or Constant node), else None."""
        if value is None:
            return None
        return self.remember("constant", value, _constant)

    def scalar(self, value: ir.Value | None) -> float | None:
        """The value of a constant with one element, else None."""
        array = self.constant(value)
        if array is None:
            computed = self.integers(value)
            return float(computed[0]) if computed is not None and len(computed) == 1 else None
        return float(array.reshape(-1)[0]) if array.size == 1 else None

    def integers(self, value: ir.Value | None) -> list[int] | None:
        """A constant integer scalar or vector as a list, also where shape arithmetic computes it; else None."""
        array = self.constant(value)
        if array is None:
            computed = self.symbolic(value)
            known = [dim for dim in computed or [] if isinstance(dim, int)]
            return known if computed is not None and len(known) == len(computed) else None
        return [int(i) for i in array.reshape(-1)] if np.issubdtype(array.dtype, np.integer) else None

    def shape(self, value: ir.Value) -> tuple[Dimension, ...] | None:
        """The shape, None when the rank is unknown. Dimensions about which nothing is known are nameless symbols."""
        return self.remember("shape", value, _shape)

    def rank(self, value: ir.Value) -> int | None:
        return None if value.shape is None else len(value.shape)

    def dim(self, value: ir.Value, axis: int) -> Dimension | None:
        """The dimension at `axis`, None when the shape is unknown or too short."""
        shape = self.shape(value)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        return shape[axis]

    def size(self, value: ir.Value, axis: int) -> int | None:
        """The dimension at `axis` when it is a number."""
        dim = self.dim(value, axis)
        return dim if isinstance(dim, int) else None

    def axis(self, node: ir.Node, value: ir.Value, default: int = -1) -> int | None:
        """The node's `axis` attribute, counted from the front."""
        rank = self.rank(value)
        given = attribute(node, "axis", default)
        return None if rank is None else (given + rank if given < 0 else given)

    def symbolic(self, value: ir.Value | None) -> list[Dimension] | None:
        """The elements of an integer scalar or vector as dimensions, following shape arithmetic; None if unknown."""
        return None if value is None else self._symbolic(value, 0)

    def _symbolic(self, value: ir.Value, depth: int) -> list[Dimension] | None:
        if depth > _DEEPEST:
            return None
        return self.remember("symbolic", value, lambda v, _: _evaluate(self, v, depth))


def _shape(value: ir.Value, facts: Facts) -> tuple[Dimension, ...] | None:
    shape = facts.better_shapes.get(value, value.shape)
    return None if shape is None else tuple(dim if type(dim) is int else _number(dim) for dim in shape)


def _number(dim: Dimension) -> Dimension:
    """A dimension to compute with: a number where the symbol is one (some exporters write "512" as a name)."""
    if not isinstance(dim, ir.SymbolicDim) or dim.value is None:
        return dim
    if dim.value.isdigit():
        return int(dim.value)
    name = expression(dim.value)
    return dim if name == dim.value else ir.SymbolicDim(name)


def _plain(value: ir.Value, facts: Facts) -> ir.Value:
    while (source := _unchanged(value, facts)) is not None:
        value = source
    return value


def _unchanged(value: ir.Value, facts: Facts) -> ir.Value | None:
    """The input that a node passes on as it is.

    1. Identity.
    2. Cast and CastLike to the type it has.
    3. Mul or Div by 1, Add or Sub of 0, where that broadcasts nothing.
    4. Expand and Reshape to the shape it has.
    5. Transpose that leaves every axis in place.
    6. Concat of one input.
    """
    node = value.producer()
    if not is_op(node, *_MAY_CHANGE_NOTHING) or node.inputs[0] is None:
        return None
    source = node.inputs[0]
    if node.op_type == "Identity":
        return source
    if node.op_type in ("Cast", "CastLike"):
        target = attribute(node, "to") if node.op_type == "Cast" else value.dtype
        return source if source.dtype is not None and target == source.dtype else None
    if node.op_type in ("Expand", "Reshape"):
        return source if _same_shape(facts.shape(source), facts.shape(value)) else None
    if node.op_type == "Transpose":
        return source if list(attribute(node, "perm", ())) == list(range(facts.rank(source) or 0)) else None
    if node.op_type == "Concat":
        return source if len(node.inputs) == 1 else None
    neutral = 1 if node.op_type in ("Mul", "Div") else 0
    operands: list[tuple[ir.Value | None, ir.Value | None]] = [(source, node.inputs[1])]
    if node.op_type in ("Mul", "Add"):
        operands.append((node.inputs[1], source))
    for given, constant in operands:
        if (
            given is not None
            and facts.scalar(constant) == neutral
            and facts.rank(given) == facts.rank(value) is not None
        ):
            return given
    return None


_MAY_CHANGE_NOTHING = (
    "Identity",
    "Cast",
    "CastLike",
    "Mul",
    "Div",
    "Add",
    "Sub",
    "Expand",
    "Reshape",
    "Transpose",
    "Concat",
)


def _same_shape(left: tuple[Dimension, ...] | None, right: tuple[Dimension, ...] | None) -> bool:
    if left is None or right is None or len(left) != len(right):
        return False
    return all(same_dim(a, b) for a, b in zip(left, right, strict=True))


def _constant(value: ir.Value, facts: Facts) -> np.ndarray[Any, Any] | None:
    tensor = value.const_value
    node = value.producer()
    if tensor is None and is_op(node, "Constant"):
        return _constant_node(node)
    if tensor is None and is_op(node, *_FOLDED):
        return _folded(node, facts)
    if tensor is None or (node is None and not value.is_initializer()) or value.is_graph_input():
        return None
    return tensor.numpy() if tensor.size <= _SMALL else None


def _constant_node(node: ir.Node) -> np.ndarray[Any, Any] | None:
    for name, given in node.attributes.items():
        if name == "value":
            return given.value.numpy() if given.value.size <= _SMALL else None
        if name in ("value_int", "value_ints"):
            return np.array(given.value, np.int64)
        if name in ("value_float", "value_floats"):
            return np.array(given.value, np.float32)
    return None


def _folded(node: ir.Node, facts: Facts) -> np.ndarray[Any, Any] | None:
    """Arithmetic on constants that an exporter left to the runtime."""
    operands = [facts.constant(value) for value in node.inputs]
    if node.op_type == "CastLike" and operands[0] is not None and node.outputs[0].dtype is not None:
        return operands[0].astype(node.outputs[0].dtype.numpy())
    known = [operand for operand in operands if operand is not None]
    if len(known) != len(operands):
        return None
    result: np.ndarray[Any, Any] = np.asarray(_FOLDED[node.op_type](*known), known[0].dtype)
    return result


_FOLDED: dict[str, Callable[..., Any]] = {
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Neg": np.negative,
    "Mul": np.multiply,
    "Div": lambda a, b: a // b if np.issubdtype(a.dtype, np.integer) else a / b,
    "Add": np.add,
    "Sub": np.subtract,
    "Pow": np.power,
    "CastLike": lambda a, b: a.astype(b.dtype),
}


def _evaluate(facts: Facts, value: ir.Value, depth: int) -> list[Dimension] | None:
    """One step of symbolic evaluation of an integer scalar or vector."""
    constant = facts.constant(value)
    if constant is not None:
        return [int(i) for i in constant.reshape(-1)] if np.issubdtype(constant.dtype, np.integer) else None
    node = value.producer()
    if node is None or not is_op(node, *_STEPS):
        return None
    return _STEPS[node.op_type](facts, node, depth + 1)


def _operand(facts: Facts, node: ir.Node, index: int, depth: int) -> list[Dimension] | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else facts._symbolic(value, depth)


def _shape_step(facts: Facts, node: ir.Node, _: int) -> list[Dimension] | None:
    source = node.inputs[0]
    shape = None if source is None else facts.shape(source)
    return None if shape is None else list(shape[attribute(node, "start", 0) : attribute(node, "end")])


def _same_elements(facts: Facts, node: ir.Node, depth: int) -> list[Dimension] | None:
    return _operand(facts, node, 0, depth)


def _gather_step(facts: Facts, node: ir.Node, depth: int) -> list[Dimension] | None:
    data, picks = _operand(facts, node, 0, depth), facts.integers(node.inputs[1])
    if data is None or picks is None or any(not -len(data) <= i < len(data) for i in picks):
        return None
    return [data[i] for i in picks]


def _slice_step(facts: Facts, node: ir.Node, depth: int) -> list[Dimension] | None:
    data = _operand(facts, node, 0, depth)
    bounds = [facts.integers(i) for i in node.inputs[1:3]]
    steps = facts.integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if data is None or None in bounds or steps is None:
        return None
    (start,), (end,) = bounds[0] or [0], bounds[1] or [0]
    return data[slice(start, end, steps[0])]


def _concat_step(facts: Facts, node: ir.Node, depth: int) -> list[Dimension] | None:
    parts = [_operand(facts, node, i, depth) for i in range(len(node.inputs))]
    return None if None in parts else [dim for part in parts if part is not None for dim in part]


def _quotient(numerator: Any, divisor: Any) -> Any:
    """The integer division of sizes, which are never negative; unknown where the divisor is no positive number."""
    whole = isinstance(divisor, int) and divisor > 0 and not (isinstance(numerator, int) and numerator < 0)
    return numerator // divisor if whole else ir.SymbolicDim(None)


def _one_hot_step(facts: Facts, node: ir.Node, depth: int) -> list[Dimension] | None:
    positions, length = facts.integers(node.inputs[0]), facts.integers(node.inputs[1])
    off_on = _operand(facts, node, 2, depth)
    if positions is None or length is None or off_on is None or len(positions) != 1 or len(off_on) != 2:
        return None
    return [off_on[index == positions[0] % length[0]] for index in range(length[0])]


def _arithmetic(combine: Callable[[Any, Any], Any]) -> Callable[[Facts, ir.Node, int], list[Dimension] | None]:
    def step(facts: Facts, node: ir.Node, depth: int) -> list[Dimension] | None:
        left, right = _operand(facts, node, 0, depth), _operand(facts, node, 1, depth)
        if left is None or right is None or (len(left) != len(right) and 1 not in (len(left), len(right))):
            return None
        count = max(len(left), len(right))
        return [combine(left[i if len(left) > 1 else 0], right[i if len(right) > 1 else 0]) for i in range(count)]

    return step


_STEPS: dict[str, Callable[[Facts, ir.Node, int], list[Dimension] | None]] = {
    "Shape": _shape_step,
    "Squeeze": _same_elements,
    "Unsqueeze": _same_elements,
    "Reshape": _same_elements,
    "Identity": _same_elements,
    "Cast": _same_elements,
    "Gather": _gather_step,
    "Slice": _slice_step,
    "Concat": _concat_step,
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _arithmetic(_quotient),
    "OneHot": _one_hot_step,
}
