"""The published vectors as OpRun and as body, with the tolerance that each carries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.oracles import ORACLES, Array

from .compare import compare_within
from .harness import run_body, run_reference, single_node_model
from .vectors import VECTORS, Vector, read_vector

OPSET = 18
OPSET_OF_E8M0 = 24


def disagreements(vector: Vector, actual: dict[str, Array]) -> list[str]:
    """Compares where the vector's masks say so; int8 differences count against the written elements."""
    oracle = ORACLES[vector.operator](vector.inputs, vector.attributes)
    found = []
    for name, published in vector.outputs.items():
        found += compare_within(
            name,
            actual[name],
            published,
            vector.tolerances[name],
            mask=vector.masks.get(name),
            counted=oracle[name].computed,
        )
    return found


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_oracle(path: Path) -> None:
    vector = read_vector(path)
    expected = ORACLES[vector.operator](vector.inputs, vector.attributes)
    assert disagreements(vector, {name: e.rounded() for name, e in expected.items()}) == []
    declared = {name: e.dtype for name, e in expected.items() if name in vector.outputs}
    published = {name: a.dtype for name, a in vector.outputs.items()}
    if vector.operator == "SparseFlashAttention":  # published before it is rounded to the type of the query
        published["attention_out"] = vector.inputs["query"].dtype
    assert declared == published


@pytest.mark.parametrize("form", ["op_run", "static_body", "symbolic_body"])
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_implementation(path: Path, form: str) -> None:
    vector = read_vector(path)
    expected = ORACLES[vector.operator](vector.inputs, vector.attributes)
    outputs: dict[str, np.dtype[np.generic]] = {name: expected[name].dtype for name in vector.outputs}
    opset = OPSET_OF_E8M0 if vector.attributes.get("quant_mode", -1) >= 2 else OPSET
    model = single_node_model(
        vector.operator,
        vector.inputs,
        vector.attributes,
        outputs,
        symbolic=form == "symbolic_body",
        opset=opset,
    )
    run = run_reference if form == "op_run" else run_body
    assert disagreements(vector, run(model, vector.inputs)) == []
