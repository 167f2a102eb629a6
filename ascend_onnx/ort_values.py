"""Arrays of every element type as values of ONNX Runtime, and back; its failures as `ExecutionError`."""

from __future__ import annotations

import ctypes
import re
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors

from ascend_onnx.errors import ExecutionError

__all__ = [
    "RUNTIME_ERRORS",
    "Feed",
    "as_value",
    "failure_at",
    "from_runtime",
    "is_numpys_own",
    "reason",
    "to_runtime",
    "wrapped",
]

Feed: TypeAlias = np.ndarray | onnxruntime.OrtValue
"""What an input is given as: an array, or a value that the runtime already has."""

RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    runtime_errors.Fail,
    runtime_errors.InvalidArgument,
    runtime_errors.InvalidGraph,
    runtime_errors.InvalidProtobuf,
    runtime_errors.NoSuchFile,
    runtime_errors.NotImplemented,
    runtime_errors.RuntimeException,
)
_FAILING_NODE = re.compile(r"while running \w+ node\. Name:'([^']*)'")
_CODES = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")


def to_runtime(array: np.ndarray) -> onnxruntime.OrtValue:
    """A value in host memory. Types that numpy lacks share the array's memory, so the array must live as long."""
    contiguous = np.asarray(array, order="C")
    if is_numpys_own(array.dtype):
        return onnxruntime.OrtValue.ortvalue_from_numpy(contiguous)
    return wrapped(contiguous, ir.DataType.from_numpy(array.dtype))


def as_value(feed: Feed) -> onnxruntime.OrtValue:
    """A value that a session takes; one that is a value already stays as it is."""
    return feed if isinstance(feed, onnxruntime.OrtValue) else to_runtime(feed)


def wrapped(array: np.ndarray, dtype: ir.DataType) -> onnxruntime.OrtValue:
    """An OrtValue on the array's own memory; types that numpy lacks go by their bit patterns."""
    bits = array.view(np.dtype(f"u{array.dtype.itemsize}")) if not is_numpys_own(array.dtype) else array
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype.value)


def from_runtime(value: onnxruntime.OrtValue) -> np.ndarray:
    """A value in host memory as an array."""
    dtype = ir.DataType(value.element_type())
    if is_numpys_own(dtype.numpy()):
        array: np.ndarray = value.numpy()
        return array
    count = value.tensor_size_in_bytes()
    raw = (ctypes.c_uint8 * count).from_address(value.data_ptr()) if count else b""
    return np.frombuffer(bytes(raw), dtype=dtype.numpy()).reshape(value.shape())


def is_numpys_own(dtype: np.dtype) -> bool:
    """Whether numpy itself knows the element type; those of `ml_dtypes` are user-defined (2) to numpy."""
    return dtype.isbuiltin != 2


def reason(error: Exception) -> str:
    """The runtime's reason in one line, without its codes in front."""
    return _CODES.sub("", " ".join(str(error).split()))


def failure_at(error: Exception, message: str) -> ExecutionError:
    """An `ExecutionError` that knows the node at which a run stopped."""
    named = _FAILING_NODE.search(str(error))
    return ExecutionError(message, named.group(1) if named else "")
