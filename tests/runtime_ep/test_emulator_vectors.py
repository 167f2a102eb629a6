"""The published vectors on the emulated device, within the tolerance that each carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators.compare import compare_within
from tests.operators.vectors import VECTORS, Vector, read_vector
from tests.oracles import ORACLES, Array, Expected

from .acl import device, library_path
from .emulated import product_of, run_on_device

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")


def disagreements(
    vector: Vector, published: set[str], actual: dict[str, Array], oracle: dict[str, Expected]
) -> list[str]:
    return [
        sentence
        for name in published
        for sentence in compare_within(
            name,
            actual[name],
            vector.outputs[name],
            vector.tolerances[name],
            mask=vector.masks.get(name),
            counted=oracle[name].computed,
        )
    ]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vector(path: Path) -> None:
    vector = read_vector(path)
    attributes = dict(vector.attributes)
    published = set(vector.outputs)
    if attributes.get("layout_kv") == "PA_BSND":
        attributes["return_softmax_lse"] = 0  # the device gives statistics with unpaged keys only
        published = {"attention_out"}
    oracle = ORACLES[vector.operator](vector.inputs, attributes)
    with device(product_of(vector.operator, vector.attributes), relax=("hidden", "head_dim", "rank")) as acl:
        actual = run_on_device(acl, vector.operator, vector.inputs, attributes, oracle)
    assert disagreements(vector, published, actual, oracle) == []
