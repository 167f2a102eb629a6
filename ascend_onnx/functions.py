"""Function bodies: what lets a model with operators of the domain run where no device claims them.

A body depends on the configuration of its node, so every node names one in its `overload`, and the model carries one
model-local function per (domain, name, overload).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import overload

import onnx
import onnx_ir as ir
from onnxscript import build_function

from ascend_onnx.errors import InputError
from ascend_onnx.operator import DOMAIN, VERSION, Body, Call, Tensor
from ascend_onnx.operators import OPERATORS
from ascend_onnx.schema import domain_nodes, infer_types, untyped_input
from ascend_onnx.storage import MINIMUM_OPSET, load

__all__ = ["attach_functions", "specialise", "strip_functions"]

_OVERLOADS_IR_VERSION = 10
"""The first IR version in which a function has an overload."""
_FLOAT8_OPSET = 19
_E8M0_OPSET = 24
_FLOAT8 = frozenset(
    {
        ir.DataType.FLOAT8E4M3FN,
        ir.DataType.FLOAT8E4M3FNUZ,
        ir.DataType.FLOAT8E5M2,
        ir.DataType.FLOAT8E5M2FNUZ,
        ir.DataType.FLOAT8E8M0,
    }
)

_Key = tuple[str, str, int, tuple[str, ...]]
_functions: dict[_Key, ir.Function] = {}


def specialise(call: Call, opset: int) -> ir.Function:
    """The function body for one configuration, built once per process; clone it before changing it.

    `opset` is the version of the default domain, which model and body share. The function declares every attribute
    that the call has, and as many outputs as reach to the last one that the call names.

    Raises `InputError` for a call that lacks a required input or attribute or has an unknown attribute value, for an
    opset below 17, and for float8 values in an opset that does not know their type.
    """
    _require_complete(call)
    _require_opset(call, opset)
    body = call.operator.body(call)  # refuses what has no meaning, also where the body itself is known already
    key = (call.operator.name, _overload(call), opset, tuple(call.attributes))
    if key not in _functions:
        _functions[key] = _build(call, body, opset)
    return _functions[key]


@overload
def attach_functions(model: str | Path) -> ir.Model: ...
@overload
def attach_functions(model: onnx.ModelProto) -> onnx.ModelProto: ...
@overload
def attach_functions(model: ir.Model) -> ir.Model: ...
def attach_functions(model: str | Path | onnx.ModelProto | ir.Model) -> onnx.ModelProto | ir.Model:
    """Give every node of the domain, in subgraphs too, the body that it needs.

    An `ir.Model` or `ModelProto` is changed in place and returned; a path is loaded. Bodies attached before are
    replaced. Types and ranks that the model does not state are inferred first.

    Raises `InputError` where a type stays unknown, a node is incomplete or the opset is below 17; no body has been
    attached or removed then.
    """
    if isinstance(model, onnx.ModelProto):
        attached = attach_functions(ir.from_proto(model))
        _copy_overloads(attached, model)
        return model
    loaded = model if isinstance(model, ir.Model) else load(model)
    nodes = list(domain_nodes(loaded))
    _require_types(loaded, nodes)
    opset = loaded.opset_imports.get("", loaded.opset_imports.get("ai.onnx", 0))
    bodies = [_body_of(node, opset) for node in nodes]
    strip_functions(loaded)
    if not nodes:
        return loaded
    for node, body in zip(nodes, bodies, strict=True):
        _trim_outputs(node)
        node.overload = body.overload
        if body.identifier() not in loaded.functions:
            loaded.functions[body.identifier()] = body.clone()
    loaded.opset_imports.setdefault(DOMAIN, VERSION)
    loaded.ir_version = max(loaded.ir_version, _OVERLOADS_IR_VERSION)
    return loaded


@overload
def strip_functions(model: str | Path) -> ir.Model: ...
@overload
def strip_functions(model: onnx.ModelProto) -> onnx.ModelProto: ...
@overload
def strip_functions(model: ir.Model) -> ir.Model: ...
def strip_functions(model: str | Path | onnx.ModelProto | ir.Model) -> onnx.ModelProto | ir.Model:
    """Take the bodies of the domain out again: a model for the device alone. In place; a path is loaded."""
    if isinstance(model, onnx.ModelProto):
        kept = [function for function in model.functions if not _is_body(function.domain, function.name)]
        del model.functions[:]
        model.functions.extend(kept)
        for proto_node in _proto_nodes(model.graph):
            proto_node.ClearField("overload")
        return model
    loaded = model if isinstance(model, ir.Model) else load(model)
    for identifier in [identifier for identifier in loaded.functions if _is_body(*identifier[:2])]:
        del loaded.functions[identifier]
    for node in domain_nodes(loaded):
        node.overload = ""
    return loaded


def _is_body(domain: str, name: str) -> bool:
    """Whether a function is the body of an operator, rather than somebody's own function in the domain."""
    return domain == DOMAIN and name in OPERATORS


def _body_of(node: ir.Node, opset: int) -> ir.Function:
    try:
        return specialise(OPERATORS[node.op_type].call(node), opset)
    except InputError as error:
        raise InputError(f"node {node.name!r}: {error}") from None


def _require_complete(call: Call) -> None:
    if call.missing:
        raise InputError(f"{call.operator.name} requires {', '.join(call.missing)}, which a node does not give")
    unknown = set(call.attributes) - {attribute.name for attribute in call.operator.attributes}
    if unknown:
        raise InputError(f"{call.operator.name} has no attribute {', '.join(sorted(unknown))}, which a node gives")
    for declared in call.operator.inputs:
        tensor = call.input(declared.name)
        if tensor.dtype is not None and tensor.dtype not in declared.types and tensor.shape != (0,):
            expected = ", ".join(accepted.name.lower() for accepted in declared.types)
            got = tensor.dtype.name.lower()
            raise InputError(f"{declared.name} of {call.operator.name} must be one of {expected}, got {got}")
    for attribute in call.operator.attributes:
        value = call.attributes.get(attribute.name)
        if value is not None and attribute.choices and value not in attribute.choices:
            expected = ", ".join(map(str, attribute.choices))
            raise InputError(f"{attribute.name} of {call.operator.name} must be one of {expected}, got {value}")


def _require_opset(call: Call, opset: int) -> None:
    if opset < MINIMUM_OPSET:
        raise InputError(
            f"a body for {call.operator.name} needs opset {MINIMUM_OPSET} or newer, the model has {opset}: "
            "convert it with onnx.version_converter.convert_version"
        )
    types = {tensor.dtype for tensor in (*call.inputs.values(), *_outputs(call))}
    needed = _E8M0_OPSET if ir.DataType.FLOAT8E8M0 in types else _FLOAT8_OPSET if types & _FLOAT8 else opset
    if opset < needed:
        raise InputError(
            f"{call.operator.name} yields float8 values here, which need opset {needed} or newer, the model has "
            f"{opset}: convert it with onnx.version_converter.convert_version"
        )


def _outputs(call: Call) -> list[Tensor]:
    inferred = call.operator.infer(call)
    return [inferred[name] for name in call.outputs if name in inferred]


def _overload(call: Call) -> str:
    """The operator's name for the configuration, and the number of outputs where even required ones are left out."""
    name = call.operator.overload(call)
    required = sum(not declared.optional for declared in call.operator.outputs)
    return name if call.output_count >= required else f"{name}_first_{call.output_count}"


def _build(call: Call, body: Body, opset: int) -> ir.Function:
    operator = call.operator
    inputs = [
        ir.Value(name=declared.name, type=ir.TensorType(dtype)) if (dtype := call.input(declared.name).dtype) else None
        for declared in operator.inputs
    ]
    function = build_function(
        lambda op, *values: list(body(op, *values))[: call.output_count],
        inputs,
        domain=DOMAIN,
        name=operator.name,
        attributes=[
            ir.Attr(declared.name, declared.type, declared.default)
            for declared in operator.attributes
            if declared.name in call.attributes
        ],
        opset_imports={"": opset},
    )
    for value, declared in zip(function.inputs, operator.inputs, strict=True):
        value.name = declared.name  # the builder calls absent ones input_0, input_1, ...
    for value, result in zip(function.outputs, operator.outputs, strict=False):
        value.name = result.name
    _forget_types(function)
    function.overload = _overload(call)
    return function


def _forget_types(function: ir.Function) -> None:
    """What tracing inferred holds for one call; the body serves others, and runtimes infer anew."""
    for value in (*function.inputs, *(output for node in function for output in node.outputs)):
        value.type = value.shape = None


def _require_types(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Infer what the inputs of `nodes` do not say of themselves; `InputError` where that does not help."""
    if all(untyped_input(node) is None for node in nodes):
        return
    infer_types(model)
    for node in nodes:
        if (value := untyped_input(node)) is not None:
            raise InputError(
                f"the body of {node.op_type} node {node.name!r} depends on the element type and the rank of its input "
                f"{value.name!r}, which shape inference does not find: add a value_info for it"
            )


def _trim_outputs(node: ir.Node) -> None:
    """Drop unnamed outputs at the end: a call must list exactly as many outputs as its function declares."""
    count = len(node.outputs)
    while count and node.outputs[count - 1].name == "":
        count -= 1
    node.resize_outputs(count)


def _copy_overloads(source: ir.Model, target: onnx.ModelProto) -> None:
    """Carry what `attach_functions` did to `source` over to the proto it was made from, weights untouched."""
    strip_functions(target)
    for node, proto_node in zip(domain_nodes(source), _proto_nodes(target.graph), strict=True):
        proto_node.overload = node.overload
        del proto_node.output[len(node.outputs) :]
    bodies = [function for function in source.functions.values() if _is_body(function.domain, function.name)]
    if not bodies:
        return
    target.functions.extend(ir.to_proto(function) for function in bodies)
    target.ir_version = source.ir_version
    if all(opset.domain != DOMAIN for opset in target.opset_import):
        target.opset_import.add(domain=DOMAIN, version=VERSION)


def _proto_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of the domain, in the order of `domain_nodes`: each node, then its subgraphs."""
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type in OPERATORS:
            yield node
        for attribute in node.attribute:
            for subgraph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _proto_nodes(subgraph)
