"""Ascend operators for ONNX: what they are, how they run on a stock ONNX Runtime, and what a device accepts."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascend_onnx import layout, quantisation
    from ascend_onnx.check import Finding, check
    from ascend_onnx.convert import to_float32
    from ascend_onnx.errors import InputError
    from ascend_onnx.functions import attach_functions, strip_functions
    from ascend_onnx.inference import Session, create_session
    from ascend_onnx.operators import OPERATORS
    from ascend_onnx.opset import op
    from ascend_onnx.reference import reference_ops
    from ascend_onnx.schema import register, unregister
    from ascend_onnx.verify import verify

__all__ = [
    "OPERATORS",
    "Finding",
    "InputError",
    "Session",
    "attach_functions",
    "check",
    "create_session",
    "layout",
    "op",
    "quantisation",
    "reference_ops",
    "register",
    "strip_functions",
    "to_float32",
    "unregister",
    "verify",
]

_HOMES = {
    "OPERATORS": "operators",
    "Finding": "check",
    "InputError": "errors",
    "Session": "inference",
    "attach_functions": "functions",
    "check": "check",
    "create_session": "inference",
    "op": "opset",
    "reference_ops": "reference",
    "register": "schema",
    "strip_functions": "functions",
    "to_float32": "convert",
    "unregister": "schema",
    "verify": "verify",
}
"""Which module has each public name. They are imported at the first use, so that the command line starts at once."""
_MODULES = ("layout", "quantisation")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A package whose modules do not hide its functions of the same name (`check`, `verify`) when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
