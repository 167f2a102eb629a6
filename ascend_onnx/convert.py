"""bfloat16 models as float32 models, which a CPU can run.

The CPU provider of ONNX Runtime has no bfloat16 MatMul, Add, Mul or Softmax. In float32 the same graph runs, with more
digits than on a device: it serves to compare a fused model with its original, not to predict the last digit.
"""

from __future__ import annotations

__all__ = ["has_bfloat16", "to_float32", "widened"]

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np
import onnx
import onnx_ir as ir

from ascend_onnx.functions import attach_functions, strip_functions
from ascend_onnx.operator import DOMAIN
from ascend_onnx.storage import load
from ascend_onnx.tensors import FileMaps, tensor_slots

_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type", "softmax_precision", "precision"})
"""Integer attributes of standard operators whose value is an element type."""

_EAGER_BYTES = 1024  # smaller tensors are converted at once, larger ones whenever they are read


@overload
def to_float32(model: onnx.ModelProto) -> onnx.ModelProto: ...
@overload
def to_float32(model: str | Path | ir.Model) -> ir.Model: ...
def to_float32(model: str | Path | onnx.ModelProto | ir.Model) -> onnx.ModelProto | ir.Model:
    """A new model in which everything bfloat16 is float32: inputs, outputs, weights, constants, casts and bodies.

    Weights are converted one at a time, when they are read; external ones stay on disk until then. Other types stay as
    they are. The given model is not changed.

    Raises:
        InputError: the model cannot be loaded, or a body cannot be made for its converted node.
    """
    if isinstance(model, onnx.ModelProto):
        return ir.to_proto(to_float32(ir.from_proto(model)))
    return widened(model if isinstance(model, ir.Model) else load(model), ir.DataType.BFLOAT16)


def widened(model: ir.Model, narrow: ir.DataType) -> ir.Model:
    """A new model in which everything of the type `narrow` is float32, as `to_float32` makes it for bfloat16."""
    converted = model.clone()
    had_bodies = any(identifier[0] == DOMAIN for identifier in converted.functions)
    strip_functions(converted)
    for value in _values(converted):
        value.type = None if value.type is None else _float_type(value.type, narrow)
    for node in _nodes(converted):
        _convert_type_attributes(node, narrow)
    for slot in list(tensor_slots(converted)):
        if slot.tensor.dtype == narrow:
            slot.put(_float_tensor(slot.tensor))
    return attach_functions(converted) if had_bodies else converted


def has_bfloat16(model: ir.Model) -> bool:
    """Whether any input, output, weight, constant or cast of the model is bfloat16."""
    if any(slot.tensor.dtype == ir.DataType.BFLOAT16 for slot in tensor_slots(model)):
        return True
    if any(value.dtype == ir.DataType.BFLOAT16 for value in _values(model)):
        return True
    return any(
        node.op_type == "Cast" and node.attributes.get_int("to", 0) == ir.DataType.BFLOAT16 for node in _nodes(model)
    )


def _float_type(type_: ir.TypeProtocol, narrow: ir.DataType) -> ir.TypeProtocol:
    if isinstance(type_, ir.SequenceType | ir.OptionalType):
        return type(type_)(_float_type(type_.elem_type, narrow), denotation=type_.denotation)
    if isinstance(type_, ir.TensorType | ir.SparseTensorType) and type_.dtype == narrow:
        return type(type_)(ir.DataType.FLOAT, denotation=type_.denotation)
    return type_


def _convert_type_attributes(node: ir.Node, narrow: ir.DataType) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.INT and name in _TYPE_ATTRIBUTES:
            if attribute.as_int() == narrow:
                node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
        elif attribute.type == ir.AttributeType.TYPE_PROTO:
            held = attribute.value
            node.attributes[name] = ir.AttrTypeProto(name, ir.TypeAndShape(_float_type(held.type, narrow), held.shape))


def _float_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    def convert() -> ir.TensorProtocol:
        return ir.Tensor(FileMaps().array(tensor).astype(np.float32), name=tensor.name)

    if tensor.nbytes <= _EAGER_BYTES:
        return convert()
    return ir.LazyTensor(convert, ir.DataType.FLOAT, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from chain(model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values()))


def _values(model: ir.Model) -> Iterator[ir.Value]:
    functions = model.functions.values()
    for graph in chain(model.graphs(), (f.graph for f in functions), *(f.subgraphs() for f in functions)):
        yield from graph.inputs
        yield from graph.initializers.values()
    for node in _nodes(model):
        yield from node.outputs
