"""Ascend operators for ONNX: what they are, how they run on a stock ONNX Runtime, and what a device accepts."""

from ascend_onnx import layout, quantisation
from ascend_onnx.check import Finding, check
from ascend_onnx.convert import to_float32
from ascend_onnx.errors import ExecutionError, InputError
from ascend_onnx.functions import attach_functions, strip_functions
from ascend_onnx.inference import Session, create_session
from ascend_onnx.operators import OPERATORS
from ascend_onnx.opset import op
from ascend_onnx.reference import reference_ops
from ascend_onnx.schema import register, unregister
from ascend_onnx.verify import Verification, verify

__all__ = [
    "OPERATORS",
    "ExecutionError",
    "Finding",
    "InputError",
    "Session",
    "Verification",
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
