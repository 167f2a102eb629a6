"""Building replacement nodes: names that are free, constants and scaffolding that are shared, shapes that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ascend_onnx.operator import Operator
from fusion_patterns.graph import Dimension

__all__ = ["Emitter"]


class Emitter:
    """Collects new nodes and initializers for one graph; nothing is inserted before `commit`."""

    def __init__(self, graph: ir.Graph, root: ir.Graph) -> None:
        """Nodes go into `graph`, initializers into `root`, which it is nested in or the same as."""
        self._graph = graph
        self._root = root
        self._taken: set[str | None] = set()
        for known in (root,) if graph is root else (root, graph):
            self._taken.update(value.name for value in known.inputs)
            self._taken.update(known.initializers)
            for node in known:
                self._taken.add(node.name)
                self._taken.update(output.name for output in node.outputs)
        self._shared: dict[Any, Any] = {}
        self._counters: dict[str, int] = {}
        self._initializers: list[ir.Value] = []
        self.nodes: list[ir.Node] = []

    def name(self, stem: str) -> str:
        """A name that nothing in the graph has yet."""
        while True:
            count = self._counters.get(stem, 0)
            self._counters[stem] = count + 1
            name = f"{stem}_{count}" if count else stem
            if name not in self._taken:
                self._taken.add(name)
                return name

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[Dimension] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """The only output of a new ONNX node. `dtype` defaults to that of the first input."""
        node = ir.Node("", op_type, list(inputs), ir.convenience.convert_attributes(attributes), num_outputs=1)
        return self._add(
            node, op_type.lower(), [shape], [dtype or (inputs[0].dtype if inputs and inputs[0] else None)]
        )[0]

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """The value in another element type, itself where it has that already."""
        shape = None if value.shape is None else tuple(value.shape)
        return value if value.dtype == dtype else self.op("Cast", value, to=dtype, dtype=dtype, shape=shape)

    def split(
        self, source: ir.Value, sizes: ir.Value, axis: int, shapes: Sequence[Sequence[Dimension]]
    ) -> list[ir.Value]:
        """Split by the sizes in a tensor, which need not be constant; one output per entry of `shapes`."""
        node = ir.Node(
            "", "Split", [source, sizes], ir.convenience.convert_attributes({"axis": axis}), num_outputs=len(shapes)
        )
        return self._add(node, "split", shapes, [source.dtype] * len(shapes))

    def fused(
        self,
        operator: Operator,
        inputs: Mapping[str, ir.Value],
        outputs: Sequence[str],
        attributes: Mapping[str, Any],
    ) -> dict[str, ir.Value]:
        """A node of the domain; its outputs by name."""
        node = operator.node(inputs, outputs, attributes, name=self.name(operator.name))
        for declared, value in zip(operator.outputs, node.outputs, strict=False):
            if value.name is None:
                value.name = self.name(f"{node.name}_{declared.name}")
        self.nodes.append(node)
        return {d.name: v for d, v in zip(operator.outputs, node.outputs, strict=False) if v.name}

    def _add(
        self,
        node: ir.Node,
        stem: str,
        shapes: Sequence[Sequence[Dimension] | None],
        dtypes: Sequence[ir.DataType | None],
    ) -> list[ir.Value]:
        node.name = self.name(f"ascend_{stem}")
        for value, shape, dtype in zip(node.outputs, shapes, dtypes, strict=True):
            value.name = self.name(f"{node.name}_out")
            value.type = None if dtype is None else ir.TensorType(dtype)
            value.shape = None if shape is None else ir.Shape(shape)
        self.nodes.append(node)
        return list(node.outputs)

    def integers(self, values: Sequence[int] | int) -> ir.Value:
        """An int64 constant; equal constants are one initializer."""
        constant: ir.Value = self.shared(
            ("integers", values if isinstance(values, int) else tuple(values)),
            lambda: self._initializer("ascend_ints", ir.tensor(np.array(values, np.int64))),
        )
        return constant

    def scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A float constant without axes; equal constants are one initializer."""
        constant: ir.Value = self.shared(
            ("scalar", value, dtype),
            lambda: self._initializer("ascend_scalar", ir.tensor(np.array(value, dtype.numpy()))),
        )
        return constant

    def typed(self, value: np.ndarray[Any, Any]) -> ir.Value:
        """A small constant of any type; equal constants are one initializer."""
        constant: ir.Value = self.shared(
            ("typed", value.dtype.str, value.shape, value.tobytes()),
            lambda: self._initializer("ascend_constant", ir.tensor(value)),
        )
        return constant

    def weight(self, stem: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A new weight. It may be lazy: its values are computed when the model is written or run."""
        return self._initializer(stem, tensor)

    def _initializer(self, stem: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=self.name(stem),
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape([int(str(dim)) for dim in tensor.shape]),
            const_value=tensor,
        )
        self._initializers.append(value)
        return value

    def shared(self, key: Any, build: Callable[[], Any]) -> Any:
        """What `build` makes, made once per key: scaffolding that all layers can use."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def commit(self) -> None:
        """Put the new nodes, and the initializers that are read, into the graph (order is restored by sorting)."""
        for value in self._initializers:
            if value.uses() or value.is_graph_output():
                self._root.initializers.add(value)
        self._graph.extend(self.nodes)
        self._initializers, self.nodes = [], []
