"""Linear projections: y = x W (+ b), the weight always seen as (k, n)."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.linear import Linear, recognise_linear
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

KN = np.random.default_rng(1).standard_normal((6, 5), dtype=np.float32)
NK = np.ascontiguousarray(KN.T)
SQUARE = np.random.default_rng(2).standard_normal((6, 6), dtype=np.float32)
BIAS = np.arange(5, dtype=np.float32)
X3, X2 = "float[B,S,6]", "float[B,6]"
SPELLINGS = {
    "MatMul": ("y = MatMul(x, w)", X3, {"w": KN}, False),
    "MatMul of Transpose": ("t = Transpose<perm=[1,0]>(w) y = MatMul(x, t)", X3, {"w": NK}, True),
    "MatMul of Transpose, default perm": ("t = Transpose(w) y = MatMul(x, t)", X3, {"w": NK}, True),
    "MatMul of an identity Transpose": ("t = Transpose<perm=[0,1]>(w) y = MatMul(x, t)", X3, {"w": KN}, False),
    "MatMul of a square Transpose": ("t = Transpose(w) y = MatMul(x, t)", X3, {"w": SQUARE}, True),
    "Gemm": ("y = Gemm(x, w)", X2, {"w": KN}, False),
    "Gemm(transB)": ("y = Gemm<transB=1>(x, w)", X2, {"w": NK}, True),
    "Gemm(transB) of Transpose": ("t = Transpose(w) y = Gemm<transB=1>(x, t)", X2, {"w": KN}, False),
    "Gemm with C": ("y = Gemm<transB=1>(x, w, b)", X2, {"w": NK, "b": BIAS}, True),
    "Gemm, beta without C": ("y = Gemm<beta=0.5>(x, w)", X2, {"w": KN}, False),
    "MatMul + bias": ("p = MatMul(x, w) y = Add(p, b)", X3, {"w": KN, "b": BIAS}, False),
    "bias + MatMul": ("p = MatMul(x, w) y = Add(b, p)", X3, {"w": KN, "b": BIAS}, False),
}


@pytest.mark.parametrize(("body", "x", "values", "transposed"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, x: str, values: dict, transposed: bool) -> None:
    model = graph(body, "y", x=x, **values)
    linear = recognise_linear(value(model, "y"), Facts())
    assert isinstance(linear, Linear)
    assert linear.x.name == "x"
    assert (linear.weight.initializer.name, linear.weight.transposed) == ("w", transposed)
    assert (None if linear.bias is None else linear.bias.name) == ("b" if "b" in values else None)
    assert_true(linear, value(model, "y"), Run(model, normal(x=(2, 3, 6) if x == X3 else (2, 6))))


OTHERS = {
    "weight on the left": ("y = MatMul(w, x)", "float[B,5,7]", {"w": KN}),
    "weight that a caller can override": ("y = MatMul(x, w)", X3, {"w": KN, "also_input": True}),
    "computed weight": ("v = Mul(w, w) y = MatMul(x, v)", X3, {"w": KN}),
    "batched weight": ("y = MatMul(x, w)", X3, {"w": KN[None]}),
    "vector": ("y = MatMul(x, w)", X3, {"w": KN[:, 0]}),
    "Gemm, alpha": ("y = Gemm<alpha=2.0>(x, w)", X2, {"w": KN}),
    "Gemm, transA": ("y = Gemm<transA=1>(x, w)", "float[6,B]", {"w": KN}),
    "Gemm, beta": ("y = Gemm<beta=0.5>(x, w, b)", X2, {"w": KN, "b": BIAS}),
    "two biases": ("p = MatMul(x, w) q = Add(p, b) y = Add(q, b)", X3, {"w": KN, "b": BIAS}),
    "residual": ("p = MatMul(x, w) y = Add(p, r)", X3, {"w": KN, "r": "float[B,S,5]"}),
    "bias per token": ("p = MatMul(x, w) y = Add(p, b)", "float[B,2,6]", {"w": KN, "b": np.ones((2, 5), np.float32)}),
    "graph input": ("y = Relu(x)", X3, {}),
}


@pytest.mark.parametrize(("body", "x", "values"), OTHERS.values(), ids=OTHERS)
def test_others_are_refused(body: str, x: str, values: dict) -> None:
    values = dict(values)
    overridable = values.pop("also_input", False)
    model = graph(body, "y", x=x, **values)
    if overridable:
        model.graph.inputs.append(model.graph.initializers["w"])
    result = recognise_linear(value(model, "y"), Facts())
    assert isinstance(result, Miss)
    assert result.expected
    assert result.got
