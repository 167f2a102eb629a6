"""The execution provider for Ascend NPUs: a library that ONNX Runtime loads, and the Python side of it.

    import runtime_ep
    runtime_ep.register()                      # finds CANN; or register("emulator") on a machine without an NPU
    session = ascend_onnx.create_session("model.onnx", device="npu")

Nodes of the domain `ai.ascend` that the device can run are claimed and launched through aclnn; the others run on the
CPU, from their function bodies.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from runtime_ep.judge import judge
from runtime_ep.libraries import find_library

__all__ = [
    "Report",
    "diagnose",
    "get_emulator_path",
    "get_ep_name",
    "get_library_path",
    "make_provider_options",
    "register",
    "unregister",
]

_EP_NAME = "AscendExecutionProvider"
_registered = False


@dataclass(frozen=True)
class Report:
    """What the search for CANN found.

    `reason` says in a sentence why it is not usable. `product` is "a2", "a3" or "950"; `soc` the chip's own name.
    `missing_operators` are operators that this version of CANN does not have.
    """

    usable: bool
    reason: str
    opened: tuple[str, ...]
    not_found: tuple[str, ...]
    missing_functions: tuple[str, ...]
    missing_operators: tuple[str, ...]
    soc: str
    product: str
    devices: int


def get_library_path() -> str:
    """The path of the provider's library, for `onnxruntime.register_execution_provider_library`."""
    return str(find_library("libascend_onnx_ep.so"))


def get_emulator_path() -> str:
    """The path of the emulator's library, a CANN for machines without an NPU."""
    return str(find_library("libascend_emulator.so"))


def get_ep_name() -> str:
    """The name under which ONNX Runtime knows the provider and its devices."""
    return _EP_NAME


def make_provider_options(*, require_npu: bool = False) -> dict[str, str]:
    """The options for `SessionOptions.add_provider_for_devices`.

    `require_npu`: a node of the domain that cannot run on the NPU makes the session fail with the reason, instead of
    running on the CPU.
    """
    return {"require_npu": str(int(require_npu))}


def register(cann: str | Path = "auto", *, device_only: bool = False) -> list[onnxruntime.OrtEpDevice]:
    """Register the provider with ONNX Runtime and return the devices it offers; none where CANN is not usable.

    `cann` is "auto" (ASCEND_HOME_PATH, then the loader's search path), "emulator", or the path of a CANN installation
    or library. With `device_only` the operators are known to ONNX Runtime even in models without function bodies; then
    nothing of the domain falls back to the CPU.

    Registering again replaces the registration; no session on the NPU may be alive then.
    """
    global _registered
    unregister()
    library = _library()
    library.ascend_ep_configure(_where(cann), device_only)
    library.ascend_ep_set_judge(judge)
    onnxruntime.register_execution_provider_library(_EP_NAME, get_library_path())
    _registered = True
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == _EP_NAME]


def unregister() -> None:
    """Undo `register`; no session and no value on the NPU may be alive then. Idempotent."""
    global _registered
    if _registered:
        onnxruntime.unregister_execution_provider_library(_EP_NAME)
        _registered = False


def diagnose(cann: str | Path | None = None) -> Report:
    """What the search for CANN found: the last one's, or with `cann` that of a new one."""
    library = _library()
    if cann is not None:
        library.ascend_ep_configure(_where(cann), False)
    found = json.loads(library.ascend_ep_report())
    return Report(
        usable=found["usable"],
        reason=found["reason"],
        opened=tuple(found["opened"]),
        not_found=tuple(found["not_found"]),
        missing_functions=tuple(found["missing_functions"]),
        missing_operators=tuple(found["missing_operators"]),
        soc=found["soc"],
        product=found["product"],
        devices=found["devices"],
    )


def _where(cann: str | Path) -> bytes:
    """Where the native side looks for CANN, empty for the usual places."""
    if cann == "auto":
        return b""
    return (get_emulator_path() if cann == "emulator" else str(cann)).encode()


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(get_library_path())
    library.ascend_ep_configure.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    library.ascend_ep_configure.restype = None
    library.ascend_ep_report.restype = ctypes.c_char_p
    library.ascend_ep_set_judge.restype = None
    return library
