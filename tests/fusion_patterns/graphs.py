"""Small graphs in few lines, and the value of every tensor in them when ONNX Runtime runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

from ascend_onnx.session import CpuSession

Array = np.ndarray[Any, Any]


def graph(body: str, outputs: str, opset: int = 20, **values: Any) -> ir.Model:
    """A model of `body` in ONNX's text format, with inferred shapes and the `outputs` named (blank-separated).

    `values` are its inputs, as types such as "float[B,S,8]", and its constants: an array, a float (float32), or an int
    or a list of ints (int64).
    """
    nodes = onnx.parser.parse_function(f'<opset_import: ["" : {opset}], domain: "t"> f () => () {{ {body} }}').node
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes,
            "small",
            [_typed(name, spec) for name, spec in values.items() if isinstance(spec, str)],
            [onnx.ValueInfoProto(name=name) for name in outputs.split()],
            [_initializer(name, value) for name, value in values.items() if not isinstance(value, str)],
        ),
        ir_version=10,
        opset_imports=[onnx.helper.make_opsetid("", opset)],
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True))


def _typed(name: str, spec: str) -> onnx.ValueInfoProto:
    return onnx.parser.parse_graph(f"g ({spec} {name}) => () {{}}").input[0]


def _initializer(name: str, value: Any) -> onnx.TensorProto:
    kind = np.float32 if isinstance(value, float) else np.int64 if isinstance(value, int | list) else None
    return onnx.numpy_helper.from_array(np.array(value, kind), name)


def value(model: ir.Model, name: str) -> ir.Value:
    """The value called `name`: an input, an initializer, or what a node computes."""
    found = {v.name: v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    found.update({output.name: output for node in model.graph for output in node.outputs})
    return found[name]


def normal(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, Array]:
    """float32 inputs by name."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


class Run:
    """One run of a model, with every value in it at hand, and the numbers its symbolic dimensions had."""

    def __init__(self, model: ir.Model, feeds: Mapping[str, Array]) -> None:
        computed = (v for node in model.graph for v in node.outputs if v.name)
        wanted = [v for v in computed if isinstance(v.type, ir.TensorType) and v.shape is not None]
        given = list(model.graph.outputs)
        model.graph.outputs.clear()
        model.graph.outputs.extend(wanted)
        try:
            arrays = CpuSession(model, _unoptimised()).run(feeds)
        finally:
            model.graph.outputs.clear()
            model.graph.outputs.extend(given)
        self._arrays = {**feeds, **arrays}
        self.dims: dict[str, int] = {}
        for declared in model.graph.inputs:
            for dim, size in zip(declared.shape or (), feeds[declared.name or ""].shape, strict=True):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    self.dims[dim.value] = size

    def of(self, v: ir.Value) -> Array:
        """The array that a value held."""
        return v.const_value.numpy() if v.const_value is not None else self._arrays[v.name]

    def size(self, dim: int | ir.SymbolicDim) -> int | None:
        """A dimension as a number; None where it names something that no input has."""
        if isinstance(dim, int):
            return dim
        if dim.value is None or not set(re.findall(r"[A-Za-z_]\w*", dim.value)) <= {*self.dims, "Min", "Max", "floor"}:
            return None
        return int(dim.evaluate(self.dims))


def _unoptimised() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return options
