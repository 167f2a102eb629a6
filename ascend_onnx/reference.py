"""The numpy implementations of the operators, for onnx's reference evaluator."""

from __future__ import annotations

from onnx.reference.op_run import OpRun

from ascend_onnx.operators import OPERATORS

__all__ = ["reference_ops"]


def reference_ops() -> list[type[OpRun]]:
    """The `OpRun` classes of all operators: `ReferenceEvaluator(model, new_ops=reference_ops())`.

    The evaluator knows no function overloads, so it needs these even for a model with bodies; strip the bodies first
    (`strip_functions`), because it prefers a model-local function.
    """
    return [operator.reference for operator in OPERATORS.values()]
