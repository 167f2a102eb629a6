"""Which nodes the provider claims: the provider describes a node, `ascend_onnx.check` decides.

The limits of the operators stand in one place, `ascend_onnx/operators`; this is how the native side gets at them.
"""

from __future__ import annotations

import atexit
import ctypes
import json
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from ascend_onnx.check import check_call
from ascend_onnx.operator import Call, Product, Tensor
from ascend_onnx.operators import OPERATORS
from ascend_onnx.placement import note_decline

__all__ = ["judge", "reason_to_decline"]

_ACCEPTED, _DECLINED = 0, 1
_JUDGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)


def reason_to_decline(description: dict[str, Any]) -> str | None:
    """The findings of `check` on a described call as one sentence, None if the product would launch it."""
    call = _call(description)
    findings = check_call(call, [Product(description["product"])], description["node"])
    return "; ".join(f"{finding.message} ({finding.code}, {finding.source})" for finding in findings) or None


def _call(description: dict[str, Any]) -> Call:
    operator = OPERATORS[description["operator"]]
    inputs = {
        declared.name: Tensor(_data_type(given["type"]), None if given["shape"] is None else tuple(given["shape"]))
        for declared, given in zip(operator.inputs, description["inputs"], strict=False)
        if given is not None
    }
    outputs = _present(zip((o.name for o in operator.outputs), description["outputs"], strict=False))
    real = {declared.name for declared in operator.attributes if declared.type == ir.AttributeType.FLOAT}
    given = {name: float(value) if name in real else value for name, value in description["attributes"].items()}
    return Call(operator, inputs, outputs, operator.attribute_values(given))


def _present(named: Iterable[tuple[str, bool]]) -> tuple[str, ...]:
    return tuple(name for name, present in named if present)


def _data_type(number: int) -> ir.DataType | None:
    """ONNX Runtime numbers the types like ONNX, but for the newest ones, which no input has."""
    return ir.DataType(number) if 0 < number <= ir.DataType.FLOAT4E2M1.value else None


def _judge(description: bytes, reason: int, capacity: int) -> int:
    """Called by the native side, to which it may not raise."""
    call = json.loads(description)
    try:
        sentence = reason_to_decline(call)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        sentence = f"its limits could not be checked: {error}"
    if sentence is None:
        return _ACCEPTED
    note_decline(call["node"], call["operator"], sentence)
    encoded = sentence.encode()[: capacity - 1] + b"\0"
    ctypes.memmove(reason, encoded, len(encoded))
    return _DECLINED


judge = _JUDGE(_judge)
"""`_judge` as the function pointer that the library takes."""


@atexit.register
def _retire() -> None:
    """Nothing may call into an interpreter that is going away."""
    from runtime_ep.libraries import find_library

    try:
        path = find_library("libascend_onnx_ep.so")
    except FileNotFoundError:
        return
    ctypes.CDLL(str(path)).ascend_ep_set_judge(None)
