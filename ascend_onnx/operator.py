"""The vocabulary in which an operator of the domain `ai.ascend` is described.

An `Operator` is data: inputs, outputs, attributes, limits, and four functions that say what a call of it means
(`infer`, `overload`, `body`, `reference`). Schema, checker, function bodies and fused nodes are derived from it, so a
new operator is one new file in `ascend_onnx/operators/`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeVar

import onnx_ir as ir
from onnx.reference.op_run import OpRun

__all__ = [
    "DOMAIN",
    "VERSION",
    "Attribute",
    "Bound",
    "Call",
    "Constraint",
    "Dim",
    "Input",
    "Operator",
    "Output",
    "Product",
    "Tensor",
    "merged",
    "product",
]

_T = TypeVar("_T")

DOMAIN = "ai.ascend"
VERSION = 1

Dim = int | str | None
"""One dimension: a number, a symbolic name or expression ("past + 1"), or None when nothing is known."""

Bound = Literal["hidden", "head_dim", "rank"]
"""The bounds that can be lifted, for tests with small tensors: hidden size, sizes of a head, ranks of the latents."""


def product(*dims: Dim) -> Dim:
    """The product of dimensions: symbolic where a factor is, None where nothing can be said."""
    if 0 in dims:
        return 0
    if None in dims:
        return None
    number = prod(dim for dim in dims if isinstance(dim, int))
    symbols = [dim for dim in dims if isinstance(dim, str)]
    if not symbols:
        return number
    try:
        return prod((ir.SymbolicDim(symbol) for symbol in symbols), start=ir.SymbolicDim("1") * number).value
    except ValueError:  # a name that is no expression, such as "batch size"
        return None


def merged(shapes: Iterable[tuple[Dim, ...] | None]) -> tuple[Dim, ...] | None:
    """What several statements of one shape say together: each dimension from the first one that knows it."""
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return None
    return tuple(next((dim for dim in dims if dim is not None), None) for dims in zip(*known, strict=False))


class Product(enum.Enum):
    """An Ascend product family; its value is the spelling of `--target`."""

    A2 = "a2"
    A3 = "a3"
    ASCEND_950 = "950"


@dataclass(frozen=True)
class Tensor:
    """What is known of one tensor of a call: element type and shape, each None when unknown."""

    dtype: ir.DataType | None = None
    shape: tuple[Dim, ...] | None = None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def dim(self, axis: int) -> Dim:
        """The dimension at `axis`, None when the shape is unknown or too short."""
        if self.shape is None or not -len(self.shape) <= axis < len(self.shape):
            return None
        return self.shape[axis]

    @classmethod
    def of(cls, value: ir.Value) -> Tensor:
        """What an `onnx_ir` value says of itself."""
        shape = None
        if value.shape is not None:
            shape = tuple(d if isinstance(d, int) else d.value for d in value.shape)
        return cls(value.dtype, shape)


@dataclass(frozen=True)
class Input:
    """One input. `shape` is documentation in the field's letters, for example "(T, He) or (B, S, He)"."""

    name: str
    types: tuple[ir.DataType, ...]
    shape: str
    description: str
    optional: bool = False


@dataclass(frozen=True)
class Output:
    """One output. An optional output exists in a call exactly if the node names it."""

    name: str
    types: tuple[ir.DataType, ...]
    shape: str
    description: str
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """One attribute. `default` None with `required` False means that the attribute may be absent."""

    name: str
    type: ir.AttributeType
    description: str
    default: int | float | str | tuple[int, ...] | None = None
    required: bool = False
    choices: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One use of an operator, as much as the graph says of it: the configuration a body is specialised for.

    Absent optional inputs are not in `inputs`; absent optional outputs are not in `outputs`. `attributes` holds every
    attribute that has a value, defaults filled in.
    """

    operator: Operator
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def input(self, name: str) -> Tensor:
        """What is known of input `name`; an empty description when it is absent."""
        return self.inputs.get(name, Tensor())

    @property
    def output_count(self) -> int:
        """How many outputs a body has: all up to the last one that the call names."""
        return max(
            (i for i, declared in enumerate(self.operator.outputs, 1) if declared.name in self.outputs), default=0
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """The required inputs and attributes that the call lacks."""
        inputs = (declared.name for declared in self.operator.inputs if not declared.optional)
        attributes = (declared.name for declared in self.operator.attributes if declared.required)
        return (
            *(name for name in inputs if name not in self.inputs),
            *(name for name in attributes if name not in self.attributes),
        )

    def has(self, name: str) -> bool:
        """Whether the node feeds the input, or names the output, called `name`."""
        return name in self.inputs or name in self.outputs


@dataclass(frozen=True)
class Constraint:
    """A limit of the device. `broken` returns one sentence that says what was expected and what came, or None.

    A limit whose facts are unknown (a symbolic dimension) is not broken. Where `bound` is lifted, `relaxed` is what
    remains of the limit.
    """

    rule: str
    code: int
    source: str
    broken: Callable[[Call], str | None]
    products: frozenset[Product] = frozenset(Product)
    bound: Bound | None = None
    relaxed: Callable[[Call], str | None] | None = None

    @property
    def words(self) -> str:
        """What the limit is, for people: the docstring of `broken`."""
        return (self.broken.__doc__ or "").strip()


Body = Callable[..., Sequence[ir.Value]]
"""`body(op, *inputs)`: traces the maths with an onnxscript `OpBuilder` and returns one value per declared output of the
operator, in order, at least up to the last one in `call.outputs`; the ones behind it are cut off.

There is one argument per declared input of the operator, in order, None where the call has no such input; the others
carry their element type, not their shape, because one body serves every shape of its overload. The attributes of the
node are attributes of the function: a body refers to one with `ir.RefAttr` (then the overload need not name its value)
or bakes it in (then it must).
"""


@dataclass(frozen=True)
class Operator:
    """One operator of the domain: the single source of its schema, inference, checks, bodies and documentation."""

    name: str
    description: str
    source: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: tuple[Attribute, ...]
    aclnn: str
    infer: Callable[[Call], Mapping[str, Tensor]]
    """Types and shapes of the outputs; symbolic dimensions are kept, unknown stays unknown."""
    overload: Callable[[Call], str]
    """A readable name of the configuration: two calls with one name have the same body.

    It also tells apart which optional outputs the body has; required ones need not be told apart.
    """
    body: Callable[[Call], Body]
    """The reference body for that configuration, authored with onnxscript."""
    reference: type[OpRun]
    """A numpy implementation for onnx's ReferenceEvaluator, independent of the body."""
    products: frozenset[Product] = frozenset(Product)
    constraints: tuple[Constraint, ...] = field(default=())
    example: str = ""
    """A program that builds a model with the operator and runs it, for the documentation."""

    def named(self, values: Sequence[_T | None]) -> dict[str, _T]:
        """The inputs of a body by name, without those that are absent."""
        return {declared.name: value for declared, value in zip(self.inputs, values, strict=False) if value is not None}

    def call(self, node: ir.Node) -> Call:
        """The call that an `onnx_ir` node makes."""
        inputs = {
            declared.name: Tensor.of(value)
            for declared, value in zip(self.inputs, node.inputs, strict=False)
            if value is not None and value.name != ""
        }
        outputs = tuple(
            declared.name for declared, value in zip(self.outputs, node.outputs, strict=False) if value.name != ""
        )
        return Call(self, inputs, outputs, self.attribute_values({a.name: a.value for a in node.attributes.values()}))

    def attribute_values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` with the defaults of the attributes that were not given."""
        values = {a.name: a.default for a in self.attributes if a.default is not None}
        values.update({name: tuple(v) if isinstance(v, list | tuple) else v for name, v in given.items()})
        return values

    def node(
        self,
        inputs: Mapping[str, ir.Value],
        outputs: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> ir.Node:
        """A node of this operator: inputs put in order by name, outputs typed by `infer`.

        Optional outputs that are not in `outputs` and stand behind the last one named are left out; those before it
        get the empty name.
        """
        unknown = set(inputs) - {i.name for i in self.inputs} | set(outputs) - {o.name for o in self.outputs}
        if unknown:
            raise ValueError(f"{self.name} has no input or output called {', '.join(sorted(unknown))}")
        ordered = _trimmed([inputs.get(declared.name) for declared in self.inputs])
        named = _trimmed([declared if declared.name in outputs else None for declared in self.outputs])
        node = ir.Node(
            DOMAIN,
            self.name,
            ordered,
            ir.convenience.convert_attributes(dict(attributes or {})),
            num_outputs=len(named),
            name=name,
        )
        for value, output in zip(node.outputs, named, strict=True):
            if output is None:
                value.name = ""
        inferred = self.infer(self.call_with(node, tuple(outputs)))
        for value, output in zip(node.outputs, named, strict=True):
            if output is None:
                continue
            tensor = inferred.get(output.name, Tensor())
            value.type = None if tensor.dtype is None else ir.TensorType(tensor.dtype)
            value.shape = None if tensor.shape is None else ir.Shape(tensor.shape)
        return node

    def call_with(self, node: ir.Node, outputs: tuple[str, ...]) -> Call:
        """Like `call`, with the outputs given by name (a fresh node's outputs have no names yet)."""
        call = self.call(node)
        return Call(self, call.inputs, outputs, call.attributes)


def _trimmed(items: list[_T | None]) -> list[_T | None]:
    while items and items[-1] is None:
        items.pop()
    return items
