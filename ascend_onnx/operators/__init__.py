"""The operators of the domain, one module each.

A module of this package that defines `OPERATOR` is an operator; nothing else has to be told about it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from ascend_onnx.operator import Operator

__all__ = ["OPERATORS"]


def _operators() -> Iterator[Operator]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        operator = getattr(importlib.import_module(module.name), "OPERATOR", None)
        if isinstance(operator, Operator):
            yield operator


OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _operators()}
"""Every operator of the domain by its ONNX name."""
