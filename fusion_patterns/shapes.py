"""Shapes for graphs that come without them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from ascend_onnx.schema import infer_types
from ascend_onnx.tensors import proto_without_data

__all__ = ["complete_shapes", "has_shapes"]


def complete_shapes(model: ir.Model) -> dict[ir.Value, ir.Shape]:
    """Give every value of the main graph a type and a shape, in place, where the model leaves some out.

    Shapes come from ONNX Runtime's symbolic inference, which follows shape arithmetic, and from onnx's where that finds
    none. What the model states stays; where it states less than was found (an output's dimensions under names of their
    own), the better shape is returned. A model that states all its shapes is left alone, and nothing is returned:
    inference takes longer than fusing.
    """
    if has_shapes(model):
        return {}
    proto = proto_without_data(model)
    found = {info.name: info for info in _symbolically_inferred(proto)}
    better: dict[ir.Value, ir.Shape] = {}
    for value in _computed(model):
        info = found.get(value.name or "")
        if info is None or not info.type.tensor_type.HasField("shape"):
            continue
        shape = ir.Shape([_dim(dim) for dim in info.type.tensor_type.shape.dim])
        if value.shape is not None:
            better[value] = shape
            continue
        value.shape = shape
        value.type = value.type or ir.TensorType(ir.DataType(info.type.tensor_type.elem_type))
    infer_types(model)
    return better


def has_shapes(model: ir.Model) -> bool:
    """Whether the model states the shapes of all values of its main graph."""
    return all(value.shape is not None for value in _computed(model))


def _computed(model: ir.Model) -> Iterator[ir.Value]:
    """Every value that a node of the main graph computes, but for sequences."""
    for node in model.graph:
        if node.op_type not in ("SplitToSequence", "SequenceConstruct", "SequenceEmpty", "SequenceInsert"):
            yield from (output for output in node.outputs if output.name)


def _symbolically_inferred(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """What ONNX Runtime's symbolic inference finds; nothing where it gives up.

    It gives up by raising whatever goes wrong inside, from assertions to plain Exception, so all of it is caught:
    shapes that stay unknown only make matches fewer, with their reasons reported.
    """
    _weights_as_inputs(proto.graph)
    for node in proto.graph.node:
        if node.op_type == "Constant":
            _as_tensor_constant(node)
        elif node.op_type in _SAME_SHAPE:
            node.op_type = "Identity"  # younger than the symbolic inference, which would know nothing behind it
            del node.input[1:]
            del node.attribute[:]
    log = logging.getLogger(SymbolicShapeInference.__module__)
    log.addFilter(_nothing)  # it warns of what it cannot tell, which is no news to a user
    try:
        inferred = SymbolicShapeInference.infer_shapes(proto, auto_merge=True, guess_output_rank=False)
    except Exception:
        return []
    finally:
        log.removeFilter(_nothing)
    return [*inferred.graph.value_info, *inferred.graph.output]


_SAME_SHAPE = ("RMSNormalization", "RotaryEmbedding")


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def _weights_as_inputs(graph: onnx.GraphProto) -> None:
    """Declare external initializers as inputs, because the symbolic inference would try to read them."""
    weights = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in weights:
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        graph.initializer.remove(tensor)


def _as_tensor_constant(node: onnx.NodeProto) -> None:
    """Rewrite a Constant given as number or numbers, which the symbolic inference does not read, as a tensor."""
    (given,) = node.attribute
    dtype = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}.get(
        given.name
    )
    if dtype is not None:
        value = np.array(onnx.helper.get_attribute_value(given), dtype)
        given.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(value)))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
