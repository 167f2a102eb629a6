"""The emulator's C ABI in Python: types, functions, and the life of a device in one context manager.

    with device(product="a3") as acl:
        address = acl.upload(array)
        ...

The library is the one that ASCEND_EMULATOR_LIBRARY names, or the one installed in the package `runtime_ep`. A copy of
it is loaded, so that its state is not the one of a provider that runs in the same process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracles import Array

from .controls import Controls, environment

__all__ = ["FORMAT_ND", "FORMAT_NZ", "Acl", "AclError", "device", "library_path"]

LIBRARY = "libascend_emulator.so"
BLAS = "libscipy_openblas.so"
VARIABLES = ("PRODUCT", "RELAX", "NOOP", "DELAY_US")

FORMAT_ND, FORMAT_NZ = 2, 29
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2

DATA_TYPES: Mapping[np.dtype[Any], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(np.int8): 2,
    np.dtype(np.int32): 3,
    np.dtype(np.uint8): 4,
    np.dtype(np.int64): 9,
    np.dtype(np.float64): 11,
    np.dtype(np.bool_): 12,
    np.dtype(ml_dtypes.bfloat16): 27,
    np.dtype(ml_dtypes.float8_e5m2): 35,
    np.dtype(ml_dtypes.float8_e4m3fn): 36,
    np.dtype(ml_dtypes.float8_e8m0fnu): 37,
}

Handle = ctypes.c_void_p
Int64s = ctypes.POINTER(ctypes.c_int64)
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    # Only functions whose arguments ctypes would pass wrongly: those that take 64-bit numbers.
    "aclrtMalloc": (ctypes.POINTER(Handle), ctypes.c_size_t, ctypes.c_int32),
    "aclrtFree": (Handle,),
    "aclrtMallocHost": (ctypes.POINTER(Handle), ctypes.c_size_t),
    "aclrtFreeHost": (Handle,),
    "aclrtMemset": (Handle, ctypes.c_size_t, ctypes.c_int32, ctypes.c_size_t),
    "aclrtMemcpy": (Handle, ctypes.c_size_t, Handle, ctypes.c_size_t, ctypes.c_int32),
    "aclrtMemcpyAsync": (Handle, ctypes.c_size_t, Handle, ctypes.c_size_t, ctypes.c_int32, Handle),
    "aclrtCreateStream": (ctypes.POINTER(Handle),),
    "aclrtDestroyStream": (Handle,),
    "aclrtSynchronizeStream": (Handle,),
    "aclrtSynchronizeStreamWithTimeout": (Handle, ctypes.c_int32),
    "aclrtCreateEvent": (ctypes.POINTER(Handle),),
    "aclrtDestroyEvent": (Handle,),
    "aclrtRecordEvent": (Handle, Handle),
    "aclrtStreamWaitEvent": (Handle, Handle),
    "aclrtSynchronizeEvent": (Handle,),
    "aclrtQueryEventStatus": (Handle, ctypes.POINTER(ctypes.c_int32)),
    "aclDestroyTensor": (Handle,),
    "aclDestroyIntArray": (Handle,),
    "aclSetAclOpExecutorRepeatable": (Handle,),
    "aclDestroyAclOpExecutor": (Handle,),
    "aclSetInputTensorAddr": (Handle, ctypes.c_size_t, Handle, Handle),
    "aclSetOutputTensorAddr": (Handle, ctypes.c_size_t, Handle, Handle),
    "aclSetTensorAddr": (Handle, ctypes.c_size_t, Handle, Handle),
    "aclSetRawTensorAddr": (Handle, Handle),
}


class AclError(Exception):
    """A call that returned another code than 0; `message` is what aclGetRecentErrMsg said."""

    def __init__(self, function: str, code: int, message: str) -> None:
        super().__init__(f"{function} returned {code}: {message}")
        self.function = function
        self.code = code
        self.message = message


def library_path() -> Path | None:
    """Where the emulator is; None if it was not built."""
    named = os.environ.get("ASCEND_EMULATOR_LIBRARY")
    if named:
        return Path(named)
    # The package brings ONNX Runtime along, which a process that knows the path can do without.
    from runtime_ep.libraries import find_library

    try:
        return find_library(LIBRARY)
    except FileNotFoundError:
        return None


@cache
def load_library() -> ctypes.CDLL:
    """The emulator, loaded from a copy of its own."""
    path = library_path()
    if path is None:
        raise FileNotFoundError(f"no {LIBRARY}: install the project, or set ASCEND_EMULATOR_LIBRARY")
    folder = Path(tempfile.mkdtemp(prefix="ascend_emulator_"))
    copy = Path(shutil.copy(path, folder))
    if (blas := path.with_name(BLAS)).exists():
        (folder / BLAS).symlink_to(blas)
    library = ctypes.CDLL(str(copy))
    shutil.rmtree(folder)
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    library.aclrtGetSocName.restype = ctypes.c_char_p
    library.aclCreateTensor.restype = Handle
    library.aclCreateIntArray.restype = Handle
    return library


class Acl(Controls):
    """The functions of the ABI; each method raises `AclError` unless the code is 0."""

    def __init__(self) -> None:
        super().__init__(load_library())

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise AclError(function, code, self.recent_error() or "")

    def recent_error(self) -> str | None:
        message = self.library.aclGetRecentErrMsg()
        return None if message is None else message.decode()

    def soc_name(self) -> str:
        name = self.library.aclrtGetSocName()
        assert name is not None
        return str(name.decode())

    def malloc(self, size: int) -> int:
        """The address of `size` bytes of device memory."""
        address = Handle()
        self.call("aclrtMalloc", ctypes.byref(address), size, 0)
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        self.call("aclrtFree", address)

    def upload(self, array: Array) -> int:
        """The address of a copy of `array`, one byte long where it is empty."""
        contiguous = np.ascontiguousarray(array)
        address = self.malloc(max(1, contiguous.nbytes))
        size = contiguous.nbytes
        try:
            if size:
                self.call("aclrtMemcpy", address, size, contiguous.ctypes.data, size, HOST_TO_DEVICE)
        except AclError:
            self.free(address)
            raise
        return address

    def download(self, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        array = np.empty(shape, dtype)
        if array.nbytes:
            self.call("aclrtMemcpy", array.ctypes.data, array.nbytes, address, array.nbytes, DEVICE_TO_HOST)
        return array

    def copy_back(self, address: int, target: Array, stream: int) -> None:
        """Queues a copy of device memory into `target`."""
        size = target.nbytes
        self.call("aclrtMemcpyAsync", target.ctypes.data, size, address, size, DEVICE_TO_HOST, stream)

    def stream(self) -> int:
        handle = Handle()
        self.call("aclrtCreateStream", ctypes.byref(handle))
        assert handle.value is not None
        return handle.value

    def synchronise(self, stream: int) -> None:
        self.call("aclrtSynchronizeStream", stream)

    def event(self) -> int:
        handle = Handle()
        self.call("aclrtCreateEvent", ctypes.byref(handle))
        assert handle.value is not None
        return handle.value

    def tensor(
        self,
        address: int | None,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        format: int = FORMAT_ND,
        storage: Sequence[int] | None = None,
    ) -> int:
        """A tensor handle; `strides` and `offset` in elements, `storage` the dimensions of the memory."""
        dims = (ctypes.c_int64 * len(shape))(*shape)
        lines = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        stored = shape if storage is None else storage
        held = (ctypes.c_int64 * len(stored))(*stored)
        handle = self.library.aclCreateTensor(
            dims,
            ctypes.c_uint64(len(shape)),
            DATA_TYPES[np.dtype(dtype)],
            lines,
            ctypes.c_int64(offset),
            format,
            held,
            ctypes.c_uint64(len(stored)),
            Handle(address),
        )
        if handle is None:
            raise AclError("aclCreateTensor", -1, self.recent_error() or "")
        return int(handle)

    def int_array(self, values: Sequence[int]) -> int:
        handle = self.library.aclCreateIntArray((ctypes.c_int64 * len(values))(*values), ctypes.c_uint64(len(values)))
        if handle is None:
            raise AclError("aclCreateIntArray", -1, self.recent_error() or "")
        return int(handle)


@contextmanager
def device(product: str = "a2", *, relax: Sequence[str] = (), noop: bool = False, delay_us: int = 0) -> Iterator[Acl]:
    """The emulated device of `product`, set on this thread; at the end nothing may be alive any more."""
    values = dict(zip(VARIABLES, (product, ",".join(relax), str(int(noop)), str(delay_us)), strict=True))
    variables = {f"ASCEND_EMULATOR_{name}": value for name, value in values.items()}
    acl = Acl()
    with environment(variables):
        acl.call("aclInit", None)
    try:
        acl.call("aclrtSetDevice", 0)
        yield acl
        assert acl.ledger() == {}
    finally:
        acl.reset_faults()
        acl.call("aclrtResetDevice", 0)
        acl.call("aclFinalize")
