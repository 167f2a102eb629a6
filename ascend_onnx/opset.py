"""The domain as an onnxscript opset: `op.MlaPrologV2WeightNz(...)` inside a function under `@onnxscript.script()`.

    from ascend_onnx import op

Inputs go by position, `None` for one that is absent in between; attributes go by name, and one that is left out has its
default. Names and defaults come from the operators' descriptions; nothing has to be registered with onnx.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from onnx import defs
from onnxscript.values import Op, Opset

from ascend_onnx.operator import DOMAIN, VERSION
from ascend_onnx.operators import OPERATORS
from ascend_onnx.schema import schema

__all__ = ["op"]


class _AscendOpset(Opset):
    """The operators of the domain, with schemas from their descriptions instead of onnx's registry."""

    def __new__(cls) -> _AscendOpset:
        opset = super().__new__(cls, DOMAIN, VERSION)
        assert isinstance(opset, cls)
        return opset

    def __contains__(self, name: object) -> bool:
        return name in OPERATORS

    def __getitem__(self, name: str) -> Op | None:
        return Op(self, name, _script_schema(name)) if name in OPERATORS else None

    def __getattr__(self, name: str) -> Op:
        found = self[name]
        if found is None:
            raise AttributeError(f"{DOMAIN} has no operator {name}, but {', '.join(OPERATORS)}")
        return found

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPERATORS]


@cache
def _script_schema(name: str) -> defs.OpSchema:
    """The schema by which onnxscript reads a call: every positional argument is an input, every named one an attribute.

    With the inputs declared one by one, onnxscript would also take them by name, but close the gaps that absent ones
    leave, so that those behind would become other inputs.
    """
    full = schema(OPERATORS[name])
    types = sorted({dtype for constraint in full.type_constraints for dtype in constraint.allowed_type_strs})
    inputs = defs.OpSchema.FormalParameter(
        "inputs",
        "T",
        "The inputs in order, None where one is absent.",
        param_option=defs.OpSchema.FormalParameterOption.Variadic,
        is_homogeneous=False,
    )
    constraints = [(c.type_param_str, c.allowed_type_strs, c.description) for c in full.type_constraints]
    return defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        full.doc,
        inputs=[inputs],
        outputs=full.outputs,
        type_constraints=[("T", types, "Any type of an input."), *constraints],
        attributes=list(full.attributes.values()),
    )


op = _AscendOpset()
"""`ai.ascend`, version 1."""
