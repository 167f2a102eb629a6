"""The published vectors through a session with the provider, with the bounds relaxed that their sizes are below."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import runtime_ep
from ascend_onnx import check
from ascend_onnx.operator import Product
from tests.operators.compare import compare_within
from tests.operators.harness import from_ort, single_node_model, to_ort
from tests.operators.vectors import VECTORS, read_vector
from tests.oracles import ORACLES

from .provider import is_built, npu_session, provider

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")

RELAX = "ASCEND_EMULATOR_RELAX"
BOUNDS = "hidden,head_dim,rank"
OPSET, OPSET_OF_E8M0 = 18, 24


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vector(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = read_vector(path)
    oracle = ORACLES[vector.operator](vector.inputs, vector.attributes)
    outputs: dict[str, np.dtype[np.generic]] = {name: oracle[name].dtype for name in vector.outputs}
    mx = vector.attributes.get("quant_mode", -1) >= 2
    model = single_node_model(
        vector.operator,
        vector.inputs,
        vector.attributes,
        outputs,
        symbolic=False,
        opset=OPSET_OF_E8M0 if mx else OPSET,
    )
    monkeypatch.setenv(RELAX, BOUNDS)
    product = Product.ASCEND_950.value if mx else Product.A2.value
    findings = check(model, product)
    with provider(product, RELAX=BOUNDS):
        session = npu_session(model)
        claimed = any(g.ep_name == runtime_ep.get_ep_name() for g in session.get_provider_graph_assignment_info())
        names = list(vector.outputs)
        results = session.run_with_ort_values(names, {name: to_ort(array) for name, array in vector.inputs.items()})
        actual = {name: from_ort(value) for name, value in zip(names, results, strict=True)}
        del session, results
    assert claimed == (not findings)
    for name, published in vector.outputs.items():
        found = compare_within(
            name,
            actual[name],
            published,
            vector.tolerances[name],
            mask=vector.masks.get(name),
            counted=oracle[name].computed,
        )
        assert found == []
