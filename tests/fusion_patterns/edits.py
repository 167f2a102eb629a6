"""Editing real graphs, and whether an edited graph still computes the same after fusing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ascend_onnx.compare import compare_outputs
from ascend_onnx.errors import ExecutionError
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load
from fusion_patterns import Report, fuse

Array = np.ndarray[Any, Any]
Operand = str | ir.Value | Array | float | int | list[int]


class Editor:
    """Changes to one graph. Values go by their names; numbers and arrays become initializers."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph
        self._count = 0
        self._made: set[ir.Node] = set()

    def __getitem__(self, name: str) -> ir.Value:
        found = {v.name: v for v in (*self.graph.inputs, *self.graph.initializers.values())}
        for node in self.graph:
            found.update({output.name: output for output in node.outputs})
        return found[name]

    def node(self, result: str) -> ir.Node:
        """The node that computes a value."""
        producer = self[result].producer()
        assert producer is not None
        return producer

    def add(self, op_type: str, *inputs: Operand, like: str | ir.Value | None = None, **attributes: Any) -> ir.Value:
        """The output of a new node, with the type and shape of `like` (its first input by default)."""
        values = [self._value(operand) for operand in inputs]
        model = values[0] if like is None else self._value(like)
        self._count += 1
        name = f"edit_{self._count}"
        node = ir.node(op_type, values, attributes=attributes, name=f"{op_type}_{name}")
        self._made.add(node)
        (output,) = node.outputs
        output.name, output.type, output.shape = name, model.type, model.shape
        first = next((use.node for use in values[0].uses() if use.node.graph is self.graph), None)
        self.graph.append(node) if first is None else self.graph.insert_before(first, node)
        return output

    def _value(self, operand: Operand) -> ir.Value:
        if isinstance(operand, ir.Value):
            return operand
        if isinstance(operand, str):
            return self[operand]
        kind = np.float32 if isinstance(operand, float) else np.int64 if isinstance(operand, int | list) else None
        self._count += 1
        tensor = ir.tensor(np.array(operand, kind))
        constant = ir.Value(
            name=f"edit_{self._count}",
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
            const_value=tensor,
        )
        self.graph.initializers.add(constant)
        return constant

    def read(self, result: str, index: int, operand: Operand) -> None:
        """The node that computes `result` reads `operand` as its input `index`."""
        self.node(result).replace_input_with(index, self._value(operand))

    def swap_inputs(self, result: str, first: int = 0, second: int = 1) -> None:
        node = self.node(result)
        one, other = node.inputs[first], node.inputs[second]
        node.replace_input_with(first, other)
        node.replace_input_with(second, one)

    def instead_of(self, old: str, new: ir.Value, readers: tuple[str, ...] = ()) -> None:
        """All readers of `old`, or those that compute `readers`, read `new`; nodes that were added do not change."""
        for use in list(self[old].uses()):
            named = not readers or any(output.name in readers for output in use.node.outputs)
            if named and use.node not in self._made:
                use.node.replace_input_with(use.idx, new)

    def exchange(self, one: str, other: str, readers: tuple[str, ...] = ()) -> None:
        """Readers of one value read the other, and the other way round."""
        first, second = self[one], self[other]
        for use in [*first.uses(), *second.uses()]:
            if not readers or any(output.name in readers for output in use.node.outputs):
                use.node.replace_input_with(use.idx, second if use.node.inputs[use.idx] is first else first)

    def set_op(self, result: str, op_type: str, **attributes: Any) -> None:
        node = self.node(result)
        node.op_type = op_type
        self.set_attributes(result, **attributes)

    def set_attributes(self, result: str, **attributes: Any) -> None:
        node = self.node(result)
        for attribute in ir.convenience.convert_attributes(attributes):
            node.attributes[attribute.name] = attribute

    def shape(self, name: str, *dims: int | str | None) -> None:
        """Say of a value what its shape is, after an edit that changed it."""
        self[name].shape = ir.Shape(dims)

    def weight(self, name: str) -> Array:
        tensor = self[name].const_value
        assert tensor is not None
        return tensor.numpy()

    def set_weight(self, name: str, array: Array) -> None:
        """Another value, and perhaps shape, of an initializer."""
        value = self[name]
        value.const_value = ir.tensor(np.ascontiguousarray(array), name=name)
        value.shape = ir.Shape(array.shape)

    def expose(self, *names: str) -> None:
        """Make values graph outputs."""
        self.graph.outputs.extend(v for v in map(self.__getitem__, names) if v not in self.graph.outputs)


Edit = Callable[[Editor], None]


@dataclass(frozen=True)
class Outcome:
    """An edited graph's run before fusing and after it (None: it does not run), and the report."""

    report: Report
    expected: dict[str, Array] | None
    actual: dict[str, Array] | None
    model: ir.Model

    @property
    def counts(self) -> dict[str, int]:
        return self.report.counts

    @property
    def codes(self) -> list[str]:
        return [missed.code for missed in self.report.missed]

    def assert_equal(self) -> None:
        """Fused or not, every output is within 1e-4 of its largest magnitude."""
        if self.expected is None:
            assert self.actual is None, f"a graph that does not run does so after fusing {self.counts}"
            return
        assert self.actual is not None, f"fused {self.counts}, and now it does not run"
        off = [f"{c.name}: {c.reason}" for c in compare_outputs(self.expected, self.actual) if not c.within]
        assert not off, f"fused {self.counts}, but {'; '.join(off)}"


def edited(source: Path | Callable[[], ir.Model], edit: Edit) -> ir.Model:
    """A fresh copy of a graph after an edit, its nodes in order again and without initializers that nothing reads."""
    model = load(source) if isinstance(source, Path) else source()
    edit(Editor(model))
    model.graph.sort()
    for name in [v.name for v in model.graph.initializers.values() if not v.uses() and not v.is_graph_output()]:
        model.graph.initializers.pop(name)
    return model


def fused_after(
    source: Path | Callable[[], ir.Model], edit: Edit, feeds: Mapping[str, Array], **options: Any
) -> Outcome:
    """Edit a graph, run it, fuse it without validation, run it again."""
    expected = _run(edited(source, edit), feeds)
    model = edited(source, edit)
    report = fuse(model, **{"validate": "none", **options})
    return Outcome(report, expected, _run(model, feeds), model)


def _run(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
    try:
        return CpuSession(model).run(feeds)
    except ExecutionError:
        return None


def part(path: Path, inputs: list[str], outputs: list[str]) -> ir.Model:
    """The subgraph between some values of a model, as a model of its own."""
    model = load(path)
    return ir.Model(ir.convenience.extract(model.graph, inputs, outputs), ir_version=model.ir_version)
