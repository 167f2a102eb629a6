"""Running models on the CPU provider of ONNX Runtime, with numpy arrays of every element type."""

from __future__ import annotations

__all__ = ["CpuSession", "run_model"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from google.protobuf.message import EncodeError

from ascend_onnx.errors import ExecutionError, InputError
from ascend_onnx.ort_values import RUNTIME_ERRORS, Feed, as_value, failure_at, from_runtime, reason, wrapped
from ascend_onnx.tensors import FileMaps, TensorSlot, placeholder, tensor_slots, tensors_replaced

_HANDED_OVER_BYTES = 64 << 10  # larger initializers are handed to the runtime as they lie, not through the protobuf
_SILENT = 4  # what goes wrong is raised; the runtime need not print it as well


@dataclass(frozen=True)
class Signature:
    """Element type and shape of an input or output; a dimension is a number, a name or expression, or None."""

    dtype: ir.DataType
    shape: tuple[int | str | None, ...]


def run_model(
    model: str | Path | onnx.ModelProto | ir.Model,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """Runs a model once on the CPU provider and returns its outputs by name, all of them without `outputs`.

    bfloat16 and float8 tensors go in and come out as `ml_dtypes` arrays.

    Raises:
        ExecutionError: ONNX Runtime does not load or run the model.
        InputError: a feed is missing, unknown, or of another element type or rank than the input.
    """
    return CpuSession(model).run(feeds, outputs)


class CpuSession:
    """A model loaded once into the CPU provider, to be run with several sets of inputs.

    A path is loaded by ONNX Runtime itself. Of a model in memory the large weights are neither copied nor serialised:
    the runtime reads them where they are, external ones through a memory map.
    """

    inputs: dict[str, Signature]
    outputs: dict[str, Signature]

    def __init__(
        self,
        model: str | Path | onnx.ModelProto | ir.Model,
        options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        """Loads the model.

        Raises:
            ExecutionError: ONNX Runtime does not load it; the message has the runtime's reason.
        """
        if options is None:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = _SILENT
        self._weights: list[np.ndarray] = []  # the runtime reads these without owning them
        if isinstance(model, str | Path):
            where = str(model)
            loadable: str | bytes = where
            if not Path(model).is_file():
                raise InputError(f"expected an ONNX model at {model}, but there is no such file; check the path")
        else:
            where = "the model in memory"
            loadable = self._serialise(ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model, options)
        try:
            self._session = self._open(loadable, options)
        except RUNTIME_ERRORS as error:
            raise ExecutionError(f"onnxruntime cannot load {where}: {reason(error)}") from None
        self.inputs = {entry.name: _signature(entry) for entry in self._session.get_inputs()}
        self.outputs = {entry.name: _signature(entry) for entry in self._session.get_outputs()}

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The outputs by name for one set of inputs.

        Raises:
            ExecutionError: ONNX Runtime fails while running.
            InputError: a feed is missing, unknown, or of another element type or rank than the input.
        """
        names = list(self.outputs) if outputs is None else list(outputs)
        self._require_outputs(names)
        given = self._checked(feeds)  # alive until the run is over, because values may share the arrays' memory
        try:
            values = {name: as_value(feed) for name, feed in given.items()}
            results = self._session.run_with_ort_values(names, values)
        except RUNTIME_ERRORS as error:
            raise failure_at(error, f"onnxruntime cannot run the model: {reason(error)}") from None
        return {name: from_runtime(value) for name, value in zip(names, results, strict=True)}

    def _open(self, loadable: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
        """The runtime's session, on the provider that this class is for."""
        return onnxruntime.InferenceSession(loadable, options, providers=["CPUExecutionProvider"])

    def _checked(self, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
        """The feeds in the order of the inputs, what is not on a device as an array that lies in one piece."""
        if not isinstance(feeds, Mapping):
            raise InputError(f"expected the inputs as a mapping from name to array, got a {type(feeds).__name__}")
        checked: dict[str, Feed] = {}
        for name, expected in self.inputs.items():
            if name not in feeds:
                raise InputError(f"no array was given for input {name!r} ({expected.dtype.name} {expected.shape})")
            feed = feeds[name]
            if not isinstance(feed, onnxruntime.OrtValue):
                feed = np.asarray(feed, order="C")
                if feed.dtype != expected.dtype.numpy():
                    raise InputError(f"input {name!r} expects {expected.dtype.name}, but the array is {feed.dtype}")
                if feed.ndim != len(expected.shape):
                    raise InputError(f"input {name!r} expects shape {expected.shape}, but the array has {feed.shape}")
            checked[name] = feed
        surplus = [name for name in feeds if name not in checked]
        if surplus:
            raise InputError(f"the model has no input {surplus[0]!r}; its inputs are {', '.join(self.inputs)}")
        return checked

    def _require_outputs(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.outputs:
                raise InputError(f"the model has no output {name!r}; its outputs are {', '.join(self.outputs)}")

    def _serialise(self, model: ir.Model, options: onnxruntime.SessionOptions) -> bytes:
        """The model's bytes without its large weights, which are handed to the session options instead."""
        handed: dict[str, onnxruntime.OrtValue] = {}
        replacements: list[tuple[TensorSlot, ir.TensorProtocol]] = []
        unread: set[str] = set()
        files = FileMaps()
        for slot in tensor_slots(model):
            tensor, value = slot.tensor, slot.initializer
            external = isinstance(tensor, ir.ExternalTensor)
            if tensor.dtype == ir.DataType.STRING or not (external or tensor.nbytes >= _HANDED_OVER_BYTES):
                continue
            whole_bytes = tensor.dtype.bitwidth >= 8 and tensor.nbytes > 0
            if value is not None and value.name and not value.uses() and not value.is_graph_output():
                unread.add(value.name)  # the runtime drops it, and then knows nothing of the name
                replacements.append((slot, placeholder(tensor, value.name)))
            elif value is not None and value.name and slot.in_main_graph and whole_bytes:
                array = np.require(files.array(tensor), requirements=["C", "A"])
                self._weights.append(array)
                handed[value.name] = wrapped(array, tensor.dtype)
                replacements.append((slot, placeholder(tensor, value.name)))
            elif external:
                replacements.append((slot, _inlined(tensor)))
        if handed:
            options.add_external_initializers(list(handed), list(handed.values()))
        with tensors_replaced(replacements):
            proto = ir.to_proto(model)
        if unread:
            kept = [tensor for tensor in proto.graph.initializer if tensor.name not in unread]
            del proto.graph.initializer[:]
            proto.graph.initializer.extend(kept)
        try:
            serialised: bytes = proto.SerializeToString()
        except EncodeError as error:
            raise ExecutionError(
                f"the model in memory cannot be serialised: {error}; save it and run the file"
            ) from None
        return serialised


def _inlined(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    proto = onnx.TensorProto(
        name=tensor.name or "",
        data_type=tensor.dtype.value,
        dims=tensor.shape.numpy(),
        raw_data=tensor.tobytes(),
    )
    return ir.TensorProtoTensor(proto)


def _signature(entry: onnxruntime.NodeArg) -> Signature:
    return Signature(_element_type(entry.type), tuple(entry.shape))


def _element_type(text: str) -> ir.DataType:
    """The element type in ONNX Runtime's spelling, for example "tensor(float)"."""
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    if name not in ir.DataType.__members__:
        raise ExecutionError(f"expected tensors as inputs and outputs of a model, but one is {text}")
    return ir.DataType[name]
