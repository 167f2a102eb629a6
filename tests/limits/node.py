"""What a table of limits is made of: a call that a product accepts, and changes that break or just meet a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from ascend_onnx.operator import DOMAIN, Dim
from ascend_onnx.operators import OPERATORS

__all__ = ["BF16", "F16", "F32", "I8", "I32", "I64", "Change", "Described", "Node", "Rule", "change", "renamed"]

BF16, F16, F32, I8, I32, I64 = (
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT16,
    ir.DataType.FLOAT,
    ir.DataType.INT8,
    ir.DataType.INT32,
    ir.DataType.INT64,
)
Described = tuple[ir.DataType, tuple[Dim, ...]]
Change = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """One call that a product accepts, to be changed: `inputs` and `attributes` of None are taken away."""

    operator: str
    inputs: Mapping[str, Described]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    target: str = "a2"

    def model(
        self,
        inputs: Mapping[str, Described | None] | None = None,
        attributes: Mapping[str, Any] | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> ir.Model:
        operator = OPERATORS[self.operator]
        described = {n: d for n, d in {**self.inputs, **(inputs or {})}.items() if d is not None}
        values = {n: ir.Value(name=n, type=ir.TensorType(d), shape=ir.Shape(s)) for n, (d, s) in described.items()}
        given = {n: v for n, v in {**self.attributes, **(attributes or {})}.items() if v is not None}
        wanted = self.outputs if outputs is None else outputs
        names = [o.name if o.name in wanted else "" for o in operator.outputs]
        node = ir.Node(
            DOMAIN,
            self.operator,
            [values.get(declared.name) for declared in operator.inputs],
            ir.convenience.convert_attributes(given),
            num_outputs=len(names),
            name="the_node",
        )
        for value, name in zip(node.outputs, names, strict=True):
            value.name = name
        results = [value for value in node.outputs if value.name]
        graph = ir.Graph(list(values.values()), results, nodes=[node], opset_imports={"": 18, DOMAIN: 1}, name="one")
        return ir.Model(graph, ir_version=10)


Rule = tuple[Node, str, Change, Change]
"""Node, rule, what breaks it, what just meets it."""


def renamed(**changes: Described | None) -> Mapping[str, Described | None]:
    return changes


def change(
    inputs: Mapping[str, Described | None] | None = None, outputs: tuple[str, ...] | None = None, **attributes: Any
) -> Change:
    return {"inputs": inputs, "outputs": outputs, "attributes": attributes}
