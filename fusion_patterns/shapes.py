"""Shapes for graphs that come without them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from ascend_onnx.schema import infer_types
from ascend_onnx.tensors import proto_without_data

__all__ = ["complete_shapes"]


def complete_shapes(model: ir.Model) -> None:
    """Give every value of the main graph a shape, in place, where the model leaves some out.

    Shapes come from onnx's inference and, for what shape arithmetic leaves open there, from ONNX Runtime's symbolic
    inference, which follows it. A model that states all its shapes is left alone: inference takes longer than fusing.
    """
    if not any(value.shape is None for value in _tensors(model)):
        return
    infer_types(model)
    values = {value.name: value for value in _tensors(model) if _is_open(value.shape)}
    if not values:
        return
    for info in _symbolically_inferred(proto_without_data(model)):
        value = values.get(info.name)
        if value is not None and info.type.tensor_type.HasField("shape"):
            value.shape = ir.Shape([_dim(dim) for dim in info.type.tensor_type.shape.dim])


def _symbolically_inferred(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """What ONNX Runtime's symbolic inference finds; nothing where it gives up.

    It gives up by raising whatever goes wrong inside, from assertions to plain Exception, so all of it is caught:
    shapes that stay unknown only make matches fewer, with their reasons reported.
    """
    for node in proto.graph.node:
        if node.op_type == "Constant":
            _as_tensor_constant(node)
    try:
        inferred = SymbolicShapeInference.infer_shapes(proto, auto_merge=True, guess_output_rank=False)
    except Exception:
        return []
    return list(inferred.graph.value_info)


def _as_tensor_constant(node: onnx.NodeProto) -> None:
    """Rewrite a Constant given as number or numbers, which the symbolic inference does not read, as a tensor."""
    (given,) = node.attribute
    dtype = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}.get(
        given.name
    )
    if dtype is not None:
        value = np.array(onnx.helper.get_attribute_value(given), dtype)
        given.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(value)))


def _tensors(model: ir.Model) -> Iterator[ir.Value]:
    """Every value that a node of the main graph computes, but for sequences."""
    for node in model.graph:
        if node.op_type not in ("SplitToSequence", "SequenceConstruct", "SequenceEmpty", "SequenceInsert"):
            yield from (output for output in node.outputs if output.name)


def _is_open(shape: ir.Shape | None) -> bool:
    return shape is None or any(isinstance(dim, ir.SymbolicDim) and _says_nothing(dim.value) for dim in shape)


def _says_nothing(name: str | None) -> bool:
    return name is None or name.startswith("unk__")


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
