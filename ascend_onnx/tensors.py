"""The tensors that a model stores, wherever they are, and a way to put others in their place."""

from __future__ import annotations

__all__ = [
    "FileMaps",
    "TensorSlot",
    "external_path",
    "placeholder",
    "proto_without_data",
    "tensor_slots",
    "tensors_replaced",
]

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from ascend_onnx.errors import InputError

_SMALL_BYTES = 4096  # shape arithmetic and scalars, which shape inference reads


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


def placeholder(tensor: ir.TensorProtocol, name: str) -> ir.ExternalTensor:
    """An external tensor of the same type and shape whose data lies in no file."""
    return ir.ExternalTensor(
        location="in-memory",
        offset=0,
        length=tensor.nbytes,
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=name,
    )


def proto_without_data(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto in which placeholders stand for all but small tensors, so that it is small itself."""
    large = [
        (slot, placeholder(slot.tensor, slot.tensor.name or ""))
        for slot in tensor_slots(model)
        if slot.tensor.nbytes > _SMALL_BYTES and not isinstance(slot.tensor, ir.ExternalTensor)
    ]
    with tensors_replaced(large):
        return ir.to_proto(model)


def external_path(tensor: ir.ExternalTensor) -> Path:
    """The file that holds an external tensor, as an absolute path without links."""
    return Path(tensor.path).resolve()


class FileMaps:
    """Values of many external tensors at once: each file is mapped into memory, and kept open, one time only."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.memmap] = {}

    def array(self, tensor: ir.TensorProtocol) -> np.ndarray:
        """The tensor's values; those of an external tensor are read from the file whenever they are used."""
        if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8 or not tensor.nbytes:
            return tensor.numpy()
        file = external_path(tensor)
        start = tensor.offset or 0
        if file not in self._maps:
            self._maps[file] = _mapped(file)
        if len(self._maps[file]) < start + tensor.nbytes:
            raise InputError(f"tensor {tensor.name!r} ends behind the end of {file}; the file was cut off")
        values = self._maps[file][start : start + tensor.nbytes].view(tensor.dtype.numpy())
        return values.reshape(tensor.shape.numpy())


def _mapped(file: Path) -> np.memmap:
    try:
        return np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise InputError(f"the weights in {file} cannot be read: {error}") from None


def _put_initializer(value: ir.Value) -> Callable[[ir.TensorProtocol], None]:
    def put(tensor: ir.TensorProtocol) -> None:
        value.const_value = tensor

    return put


def _put_attribute(node: ir.Node, original: ir.Attr) -> Callable[[ir.TensorProtocol], None]:
    def put(tensor: ir.TensorProtocol) -> None:
        unchanged = tensor is original.value
        node.attributes[original.name] = original if unchanged else ir.AttrTensor(original.name, tensor)

    return put
