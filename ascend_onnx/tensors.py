"""The tensors that a model stores, wherever they are, and a way to put others in their place."""

from __future__ import annotations

__all__ = ["TensorSlot", "external_path", "tensor_slots", "tensors_replaced"]

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import onnx_ir as ir


@dataclass(frozen=True)
class TensorSlot:
    """A place in a model that holds a tensor: an initializer, or an attribute of a node.

    `initializer` is the initializer's value, None for an attribute; `in_main_graph` is False in subgraphs and bodies.
    """

    tensor: ir.TensorProtocol
    put: Callable[[ir.TensorProtocol], None]
    initializer: ir.Value | None = None
    in_main_graph: bool = False


def tensor_slots(model: ir.Model) -> Iterator[TensorSlot]:
    """Every stored tensor of the model: initializers and tensor attributes, in subgraphs and function bodies too."""
    functions = model.functions.values()
    for graph in chain(model.graphs(), *(function.subgraphs() for function in functions)):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield TensorSlot(value.const_value, _put_initializer(value), value, graph is model.graph)
    for node in chain(model.graph.all_nodes(), *(function.all_nodes() for function in functions)):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                yield TensorSlot(attribute.as_tensor(), _put_attribute(node, attribute))


@contextmanager
def tensors_replaced(replacements: Iterable[tuple[TensorSlot, ir.TensorProtocol]]) -> Iterator[None]:
    """Puts other tensors into slots for the length of the `with` block, then the original ones back.

    Serialising names a tensor after its initializer, so a replacement belongs to one slot only.
    """
    replaced: list[TensorSlot] = []
    try:
        for slot, tensor in replacements:
            replaced.append(slot)
            slot.put(tensor)
        yield
    finally:
        for slot in replaced:
            slot.put(slot.tensor)


def external_path(tensor: ir.ExternalTensor) -> Path:
    """The file that holds an external tensor, as an absolute path without links."""
    return Path(tensor.path).resolve()


def _put_initializer(value: ir.Value) -> Callable[[ir.TensorProtocol], None]:
    def put(tensor: ir.TensorProtocol) -> None:
        value.const_value = tensor

    return put


def _put_attribute(node: ir.Node, original: ir.Attr) -> Callable[[ir.TensorProtocol], None]:
    def put(tensor: ir.TensorProtocol) -> None:
        unchanged = tensor is original.value
        node.attributes[original.name] = original if unchanged else ir.AttrTensor(original.name, tensor)

    return put
