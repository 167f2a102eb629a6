"""The operators as schemas of `onnx.defs`, with type and shape inference, derived from their descriptions."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs
from onnx.shape_inference import InferenceContext

from ascend_onnx.operator import DOMAIN, VERSION, Attribute, Call, Dim, Input, Operator, Output, Tensor
from ascend_onnx.operators import OPERATORS
from ascend_onnx.tensors import proto_without_data

__all__ = ["domain_nodes", "infer_types", "register", "schema", "unregister", "untyped_input"]

_ATTRIBUTE_TYPES = {
    ir.AttributeType.FLOAT: defs.OpSchema.AttrType.FLOAT,
    ir.AttributeType.INT: defs.OpSchema.AttrType.INT,
    ir.AttributeType.INTS: defs.OpSchema.AttrType.INTS,
    ir.AttributeType.STRING: defs.OpSchema.AttrType.STRING,
}


def register() -> None:
    """Make the operators known to onnx's checker, shape inference and version converter. Idempotent."""
    for operator in OPERATORS.values():
        if not defs.has(operator.name, DOMAIN):
            defs.register_schema(schema(operator))


def unregister() -> None:
    """Undo `register`. Idempotent."""
    for operator in OPERATORS.values():
        if defs.has(operator.name, DOMAIN):
            defs.deregister_schema(operator.name, VERSION, DOMAIN)


# A callback that is still registered when the interpreter is torn down may crash it.
atexit.register(unregister)


def schema(operator: Operator) -> defs.OpSchema:
    """The `OpSchema` of an operator."""
    tensors: tuple[Input | Output, ...] = (*operator.inputs, *operator.outputs)
    result = defs.OpSchema(
        operator.name,
        DOMAIN,
        VERSION,
        operator.description,
        inputs=[_parameter(declared) for declared in operator.inputs],
        outputs=[_parameter(declared) for declared in operator.outputs],
        type_constraints=[
            (_variable(declared), [_type_string(dtype) for dtype in declared.types], f"Types of {declared.name}.")
            for declared in tensors
        ],
        attributes=[_attribute(declared) for declared in operator.attributes],
    )
    result.set_type_and_shape_inference_function(_INFERENCE[operator.name])
    return result


def domain_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of the domain, in subgraphs too: each node before those of its subgraphs."""
    return (node for node in model.graph.all_nodes() if node.domain == DOMAIN and node.op_type in OPERATORS)


def untyped_input(node: ir.Node) -> ir.Value | None:
    """The first input of which the model does not state element type and rank, if there is one."""
    return next((v for v in node.inputs if v is not None and v.name and (v.dtype is None or v.shape is None)), None)


@contextmanager
def _registered() -> Iterator[None]:
    """The schemas for the length of a `with` block; those that were registered before stay."""
    fresh = [operator.name for operator in OPERATORS.values() if not defs.has(operator.name, DOMAIN)]
    register()
    try:
        yield
    finally:
        for name in fresh:
            defs.deregister_schema(name, VERSION, DOMAIN)


def infer_types(model: ir.Model) -> None:
    """Fill in types and shapes that the model leaves out by shape inference, in place; weights are not read.

    What the model states stays. (onnx_ir's own pass overwrites it, and makes tensors of sequences.)
    """
    with _registered():
        inferred = ir.from_proto(onnx.shape_inference.infer_shapes(proto_without_data(model), data_prop=True))
    for graph, inferred_graph in zip(model.graphs(), inferred.graphs(), strict=True):
        found = ir.convenience.create_value_mapping(inferred_graph)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            if name in found and value.type is None:
                value.type = found[name].type
            if name in found and value.shape is None:
                value.shape = found[name].shape


def _variable(declared: Input | Output) -> str:
    return f"T_{declared.name}"


def _parameter(declared: Input | Output) -> defs.OpSchema.FormalParameter:
    option = defs.OpSchema.FormalParameterOption
    return defs.OpSchema.FormalParameter(
        declared.name,
        _variable(declared),
        f"{declared.shape}: {declared.description}",
        param_option=option.Optional if declared.optional else option.Single,
    )


def _type_string(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


def _attribute(declared: Attribute) -> defs.OpSchema.Attribute:
    if declared.default is None:
        kind = _ATTRIBUTE_TYPES[declared.type]
        return defs.OpSchema.Attribute(declared.name, kind, declared.description, required=declared.required)
    default = onnx.helper.make_attribute(declared.name, declared.default)
    return defs.OpSchema.Attribute(declared.name, default, declared.description)


def _inference(operator: Operator) -> Callable[[InferenceContext], None]:
    def infer(context: InferenceContext) -> None:
        call = _call(operator, context)
        if call.missing:
            return
        inferred = operator.infer(call)
        for index, declared in enumerate(operator.outputs[: context.get_num_outputs()]):
            tensor = inferred.get(declared.name, Tensor())
            if tensor.dtype is not None and context.has_output(index):
                context.set_output_type(index, _type_proto(tensor, tensor.dtype))

    return infer


# The callbacks belong to the module: onnx's registry keeps none of them alive.
_INFERENCE = {operator.name: _inference(operator) for operator in OPERATORS.values()}


def _call(operator: Operator, context: InferenceContext) -> Call:
    inputs = {
        declared.name: _tensor(context.get_input_type(index))
        for index, declared in enumerate(operator.inputs[: context.get_num_inputs()])
        if context.has_input(index)
    }
    outputs = tuple(
        declared.name
        for index, declared in enumerate(operator.outputs[: context.get_num_outputs()])
        if context.has_output(index)
    )
    attributes: dict[str, Any] = {}
    for declared in operator.attributes:
        attribute = context.get_attribute(declared.name)
        if attribute is not None:
            attributes[declared.name] = ir.serde.deserialize_attribute(attribute).value
    return Call(operator, inputs, outputs, operator.attribute_values(attributes))


def _tensor(type_proto: onnx.TypeProto | None) -> Tensor:
    if type_proto is None or not type_proto.HasField("tensor_type"):
        return Tensor()
    tensor_type = type_proto.tensor_type
    dtype = ir.DataType(tensor_type.elem_type) if tensor_type.elem_type else None
    if not tensor_type.HasField("shape"):
        return Tensor(dtype)
    return Tensor(dtype, tuple(_dim(dim) for dim in tensor_type.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or None


def _type_proto(tensor: Tensor, dtype: ir.DataType) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(int(dtype), tensor.shape)
