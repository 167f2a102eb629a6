"""Ascend operators for ONNX: what they are, how they run on a stock ONNX Runtime, and what a device accepts."""

from __future__ import annotations

from ascend_onnx.check import Finding, check
from ascend_onnx.convert import to_float32
from ascend_onnx.errors import InputError
from ascend_onnx.functions import attach_functions, strip_functions
from ascend_onnx.operators import OPERATORS
from ascend_onnx.reference import reference_ops
from ascend_onnx.schema import register, unregister
from ascend_onnx.verify import verify

__all__ = [
    "OPERATORS",
    "Finding",
    "InputError",
    "attach_functions",
    "check",
    "reference_ops",
    "register",
    "strip_functions",
    "to_float32",
    "unregister",
    "verify",
]
