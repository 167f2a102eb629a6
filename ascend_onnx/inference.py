"""Sessions on a device: the CPU, or the NPU that a registered execution provider offers.

session = create_session("model.onnx", device="npu")
kv = session.to_device(numpy_cache)                        # stays on the device between runs
session.run(["logits"], {"x": x, "kv_cache": kv}, into={"kv_cache_out": kv})     # updated in place
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from ascend_onnx.errors import ExecutionError, InputError
from ascend_onnx.ort_values import RUNTIME_ERRORS, Feed, as_value, failure_at, from_runtime, reason, to_runtime
from ascend_onnx.placement import Placement, noted_declines, placements
from ascend_onnx.session import CpuSession, Signature

__all__ = ["Device", "Session", "create_session"]

Device = Literal["cpu", "npu"]
DeviceValue: TypeAlias = onnxruntime.OrtValue
"""A tensor on the device; numpy cannot read it, `Session.to_host` can."""

_PROVIDER = "AscendExecutionProvider"
_VENDOR_ID = 0x19E5
_SILENT = 4
_RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"
_MESSAGE = "Status Message: "
_CODES = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_FAILURES: tuple[type[Exception], ...] = (*RUNTIME_ERRORS, RuntimeError)


class Session:
    """A model loaded once on one device. Threads may run it at the same time.

    `device` is "cpu" or "npu"; `inputs` and `outputs` say the element type and shape of each.
    """

    device: Device

    def __init__(self, loaded: _Loaded, device: Device) -> None:
        self.device = device
        self._loaded = loaded

    @property
    def inputs(self) -> Mapping[str, Signature]:
        return self._loaded.inputs

    @property
    def outputs(self) -> Mapping[str, Signature]:
        return self._loaded.outputs

    def run(
        self,
        names: Sequence[str] | None,
        feeds: Mapping[str, Feed],
        *,
        into: Mapping[str, DeviceValue] | None = None,
    ) -> list[np.ndarray]:
        """The outputs called `names`, all of them with None, for one set of inputs.

        Arrays go in and come out with the model's element types, those of `ml_dtypes` included. Inputs may also be
        values made by `to_device`, which are not copied. `into` names outputs that are written to such values and not
        returned; a cache that is fed and named there is updated in place.

        Raises:
            ExecutionError: a node fails; the message says which one, with what, and what to do.
            InputError: a feed is missing, unknown, or of another element type or rank than the input.
        """
        return self._loaded.run_named(names, feeds, into or {})

    def placement(self) -> list[Placement]:
        """Which node runs where, first those on the NPU, then those that it declines, each with the reason."""
        return self._loaded.placement()

    def to_device(self, array: np.ndarray) -> DeviceValue:
        """A copy of an array on the session's device, in host memory for the CPU."""
        return self._loaded.to_device(array)

    def to_host(self, value: DeviceValue) -> np.ndarray:
        """A copy of a value made by `to_device` as an array."""
        return self._loaded.to_host(value)


def create_session(
    model: str | Path | onnx.ModelProto | ir.Model,
    device: Device = "cpu",
    *,
    device_id: int = 0,
    require_npu: bool = False,
    session_options: onnxruntime.SessionOptions | None = None,
) -> Session:
    """Loads a model on the CPU, or on the NPU number `device_id`.

    Nodes of the domain that the NPU declines run on the CPU, from their bodies; `Session.placement` says why. With
    `require_npu` they are an error instead.

    Raises:
        ExecutionError: ONNX Runtime does not load the model, or `require_npu` does not hold; the message says why.
        InputError: there is no such device, no provider is registered, or there is no such model.
    """
    if device == "cpu":
        if require_npu:
            raise InputError("require_npu is for sessions on an NPU: pass device='npu' too, or leave it out")
        return Session(_Loaded(model, session_options), device)
    if device != "npu":
        raise InputError(f"the device must be cpu or npu, got {device!r}")
    return Session(_OnNpu(model, session_options, device_id, require_npu), device)


class _Loaded(CpuSession):
    """What a session does on the CPU."""

    _provider = ""

    def __init__(
        self, model: str | Path | onnx.ModelProto | ir.Model, options: onnxruntime.SessionOptions | None
    ) -> None:
        if options is None:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = _SILENT
        options.add_session_config_entry(_RECORD_PLACEMENT, "1")
        with noted_declines() as declines:
            super().__init__(model, options)
        self._declines = tuple(declines)
        self._node_names = _node_names(model)

    def run_named(
        self,
        names: Sequence[str] | None,
        feeds: Mapping[str, Feed],
        into: Mapping[str, DeviceValue],
    ) -> list[np.ndarray]:
        wanted = [name for name in self.outputs if name not in into] if names is None else list(names)
        self._require_outputs([*wanted, *into])
        given = self._checked(feeds)  # alive until the run is over, because values may share the arrays' memory
        binding = self._session.io_binding()
        kept = []
        try:
            for name, feed in given.items():
                kept.append(as_value(feed))
                binding.bind_ortvalue_input(name, kept[-1])
            for name, value in into.items():
                self._bind_into(binding, name, value)
            for name in wanted:
                binding.bind_output(name, "cpu")
            self._session.run_with_iobinding(binding)
        except _FAILURES as error:
            raise failure_at(error, _sentence(error)) from None
        results = binding.get_outputs()
        self._finish_into(list(into.values()), results[: len(into)])
        return [from_runtime(value) for value in results[len(into) :]]

    def placement(self) -> list[Placement]:
        return placements(self._session, self._provider, self._node_names, self._declines)

    def _bind_into(self, binding: Any, name: str, value: DeviceValue) -> None:
        # A body may read its inputs after it has begun to write its outputs, so that the value is only written later.
        binding.bind_output(name, "cpu")

    def _finish_into(self, values: Sequence[DeviceValue], results: Sequence[DeviceValue]) -> None:
        for value, result in zip(values, results, strict=True):
            _write(value, from_runtime(result))

    def to_device(self, array: np.ndarray) -> DeviceValue:
        dtype = ir.DataType.from_numpy(array.dtype)
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), dtype.value)
        _write(value, array)
        return value

    def to_host(self, value: DeviceValue) -> np.ndarray:
        return np.array(from_runtime(value))


class _OnNpu(_Loaded):
    """What is different on the NPU."""

    _provider = _PROVIDER

    def __init__(
        self,
        model: str | Path | onnx.ModelProto | ir.Model,
        options: onnxruntime.SessionOptions | None,
        device_id: int,
        require_npu: bool,
    ) -> None:
        self._device = _registered_device(device_id)
        self._device_id = device_id
        self._options = {"require_npu": str(int(require_npu))}
        super().__init__(model, options)

    def _open(self, loadable: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
        options.add_provider_for_devices([self._device], self._options)
        # Without this, a failure would move the whole session to the CPU without a word.
        return onnxruntime.InferenceSession(loadable, options, enable_fallback=0)

    def _bind_into(self, binding: Any, name: str, value: DeviceValue) -> None:
        binding.bind_ortvalue_output(name, value)

    def _finish_into(self, values: Sequence[DeviceValue], results: Sequence[DeviceValue]) -> None:
        pass  # the run has written them

    def to_device(self, array: np.ndarray) -> DeviceValue:
        # ONNX Runtime has no way from numpy to an NPU but this one.
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), ir.DataType.from_numpy(array.dtype).value, "npu", self._device_id, _VENDOR_ID
        )
        if array.size and not value.data_ptr():
            raise ExecutionError(f"the NPU has no memory left for {array.nbytes} bytes; free other device values")
        onnxruntime.copy_tensors([to_runtime(array)], [value])
        return value

    def to_host(self, value: DeviceValue) -> np.ndarray:
        host = onnxruntime.OrtValue.ortvalue_from_shape_and_type(value.shape(), value.element_type())
        onnxruntime.copy_tensors([value], [host])
        return np.array(from_runtime(host))


def _write(value: DeviceValue, array: np.ndarray) -> None:
    """Write an array to a value in host memory of the same size."""
    if array.shape != tuple(value.shape()):
        raise InputError(f"expected room for shape {array.shape}, but the value has {tuple(value.shape())}")
    contiguous = np.ascontiguousarray(array)
    ctypes.memmove(value.data_ptr(), contiguous.ctypes.data, contiguous.nbytes)


def _registered_device(device_id: int) -> Any:
    devices = {
        int(device.ep_metadata["device_id"]): device
        for device in onnxruntime.get_ep_devices()
        if device.ep_name == _PROVIDER
    }
    if not devices:
        raise InputError(
            "no NPU is registered: call runtime_ep.register() first, or runtime_ep.register('emulator') on a machine "
            "without one; `ascend-onnx doctor` says what is missing"
        )
    if device_id not in devices:
        raise InputError(f"there is no NPU number {device_id}; there are {', '.join(map(str, sorted(devices)))}")
    return devices[device_id]


def _node_names(model: str | Path | onnx.ModelProto | ir.Model) -> set[str]:
    """The names of the model's nodes, without those of function bodies."""
    if isinstance(model, ir.Model):
        return {node.name for node in model.graph.all_nodes() if node.name}
    if isinstance(model, str | Path):
        model = onnx.load(str(model), load_external_data=False)
    return {node.name for node in model.graph.node if node.name}


def _sentence(error: Exception) -> str:
    """What the provider said, without what ONNX Runtime puts around it."""
    text = reason(error)
    _, found, said = text.rpartition(_MESSAGE)
    if not found:
        said = _CODES.split(text)[-1]
    return said if found or said != text else f"onnxruntime cannot run the model: {text}"
