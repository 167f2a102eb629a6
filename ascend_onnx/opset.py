"""The domain as an onnxscript opset: `op.MlaPrologV2WeightNz(...)` inside a function under `@onnxscript.script()`.

    from ascend_onnx import op

Attributes go by name, and one that is left out has its default. Inputs go by position, None for one that is absent in
between. Names and defaults come from the operators' descriptions; nothing has to be registered with onnx.
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile

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

    def __getitem__(self, name: str) -> Op:
        return self.__getattr__(name)

    def __getattr__(self, name: str) -> Op:
        if name not in OPERATORS:
            raise AttributeError(f"{DOMAIN} has no operator {name}, but {', '.join(OPERATORS)}")
        return Op(self, name, _script_schema(name))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPERATORS]


@cache
def _script_schema(name: str) -> defs.OpSchema:
    """The schema by which onnxscript reads a call: whatever stands behind the first optional input has no name.

    onnxscript takes inputs by name too, but closes the gaps that absent ones leave, so that those behind would silently
    become other inputs. Only the first optional input cannot have a gap before it.
    """
    full = schema(OPERATORS[name])
    option = defs.OpSchema.FormalParameterOption
    required = len(list(takewhile(lambda parameter: parameter.option == option.Single, full.inputs)))
    types = sorted({dtype for constraint in full.type_constraints for dtype in constraint.allowed_type_strs})
    others = defs.OpSchema.FormalParameter(
        "inputs", "T", "The other inputs, None where one is absent.", param_option=option.Variadic, is_homogeneous=False
    )
    constraints = [(c.type_param_str, c.allowed_type_strs, c.description) for c in full.type_constraints]
    return defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        OPERATORS[name].description,
        inputs=[*full.inputs[: required + 1], others],
        outputs=full.outputs,
        type_constraints=[("T", types, "Any type of an input."), *constraints],
        attributes=list(full.attributes.values()),
    )


op = _AscendOpset()
"""`ai.ascend`, version 1."""
