"""RMS normalisation: every spelling of exporters, and what only looks like one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.rms_norm import RmsNorm, recognise_rms_norm
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal, value

GAMMA = np.linspace(0.5, 1.5, 8, dtype=np.float32)
CONSTANTS = {
    "g": GAMMA,
    "two": 2.0,
    "one": 1.0,
    "minus_half": -0.5,
    "eps": 0.25,
    "last": [-1],
    "first": [1],
    "three": 3.0,
}
POW, MUL = "s = Pow(x, two)", "s = Mul(x, x)"
MEAN = "m = ReduceMean<keepdims=1>(s, last)"
EPS, EPS_LEFT = "a = Add(m, eps)", "a = Add(eps, m)"
ROOT = "q = Sqrt(a)"
RECIPROCAL, DIVIDED, POWER = f"{ROOT} r = Reciprocal(q)", f"{ROOT} r = Div(one, q)", "r = Pow(a, minus_half)"
SCALED, SCALED_LEFT, QUOTIENT = "n = Mul(x, r)", "n = Mul(r, x)", f"{ROOT} n = Div(x, q)"
GAMMA_LAST, GAMMA_FIRST = "y = Mul(n, g)", "y = Mul(g, n)"
SPELLINGS = {
    "Hugging Face": (POW, MEAN, EPS, RECIPROCAL, SCALED, GAMMA_FIRST),
    "F.rms_norm": (POW, MEAN, EPS, RECIPROCAL, SCALED, GAMMA_LAST),
    "TorchScript": (POW, MEAN, EPS, DIVIDED, SCALED, GAMMA_LAST),
    "x * x": (MUL, MEAN, EPS, RECIPROCAL, SCALED, GAMMA_LAST),
    "everything mirrored": (MUL, MEAN, EPS_LEFT, DIVIDED, SCALED_LEFT, GAMMA_FIRST),
    "power of -1/2": (POW, MEAN, EPS, POWER, SCALED, GAMMA_LAST),
    "division by the root": (POW, MEAN, EPS, QUOTIENT, GAMMA_LAST),
}
X = "float[B,S,8]"


def recognise(
    parts: tuple[str, ...], opset: int = 20, x: str = X, **values: object
) -> tuple[RmsNorm | Miss, Run | None]:
    model = graph("\n".join(parts), "y", opset, **{"x": x, **CONSTANTS, **values})
    result = recognise_rms_norm(value(model, "y"), Facts())
    if isinstance(result, RmsNorm) and x == X:
        run = Run(model, normal(x=(2, 3, 8)))
        assert_true(result, value(model, "y"), run)
        return result, run
    return result, None


@pytest.mark.parametrize("parts", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(parts: tuple[str, ...]) -> None:
    norm, _ = recognise(parts)
    assert isinstance(norm, RmsNorm)
    assert (norm.x.name, norm.gamma.name, norm.epsilon) == ("x", "g", 0.25)


def test_axes_as_an_attribute_before_opset_18() -> None:
    norm, _ = recognise(
        (POW, "m = ReduceMean<axes=[-1], keepdims=1>(s)", EPS, RECIPROCAL, SCALED, GAMMA_FIRST), opset=17
    )
    assert isinstance(norm, RmsNorm)


@pytest.mark.parametrize("axes", [[-1], [2]], ids=str)
def test_either_name_of_the_last_axis(axes: list[int]) -> None:
    norm, _ = recognise(SPELLINGS["Hugging Face"], last=axes)
    assert isinstance(norm, RmsNorm)


@pytest.mark.parametrize("axis", ["", "axis=-1,", "axis=2,"])
def test_one_operator(axis: str) -> None:
    norm, _ = recognise((f"y = RMSNormalization<{axis} epsilon=0.25>(x, g)",), opset=23)
    assert isinstance(norm, RmsNorm)
    assert norm.epsilon == 0.25


def test_one_operator_with_the_default_epsilon() -> None:
    norm, _ = recognise(("y = RMSNormalization(x, g)",), opset=23)
    assert isinstance(norm, RmsNorm)
    assert norm.epsilon == pytest.approx(1e-5)


@pytest.mark.parametrize("gamma", [np.float32, np.float16], ids=["gamma in float32", "gamma after the cast back"])
def test_casts_around_the_maths(gamma: type) -> None:
    to = {np.float32: 1, np.float16: 10}[gamma]
    maths = "\n".join(SPELLINGS["Hugging Face"][:-1]).replace("x", "h")
    body = f"h = Cast<to=1>(x) {maths} c = Cast<to={to}>(n) z = Mul(g, c) y = Cast<to=10>(z)"
    model = graph(body, "y", **{**CONSTANTS, "x": "float16[B,S,8]", "g": GAMMA.astype(gamma)})
    norm = recognise_rms_norm(value(model, "y"), Facts())
    assert isinstance(norm, RmsNorm)
    assert norm.x.name == "x"
    run = Run(model, {"x": normal(x=(2, 3, 8))["x"].astype(np.float16)})
    assert_true(norm, value(model, "y"), run, tolerance=2e-3)


HF = SPELLINGS["Hugging Face"]
OTHERS = {
    "another axis": (HF, {"last": [1]}),
    "two axes": (HF, {"last": [1, 2]}),
    "epsilon outside the root": (
        ("s = Pow(x, two)", MEAN, "q = Sqrt(m)", "a = Add(q, eps)", "r = Reciprocal(a)", SCALED, GAMMA_FIRST),
        {},
    ),
    "epsilon before the mean": (
        (
            "p = Pow(x, two)",
            "s = Add(p, eps)",
            "m = ReduceMean<keepdims=1>(s, last)",
            ROOT.replace("a", "m"),
            "r = Reciprocal(q)",
            SCALED,
            GAMMA_FIRST,
        ),
        {},
    ),
    "no epsilon": ((POW, MEAN, "q = Sqrt(m)", "r = Reciprocal(q)", SCALED, GAMMA_FIRST), {}),
    "epsilon per feature": (HF, {"eps": np.full(8, 0.25, np.float32)}),
    "cubes": (HF, {"two": 3.0}),
    "square of another value": (("o = Mul(x, three)", "s = Pow(o, two)", *HF[1:]), {}),
    "sum for mean": ((POW, "m = ReduceSum<keepdims=1>(s, last)", *HF[2:]), {}),
    "root not inverted": ((POW, MEAN, EPS, ROOT, "n = Mul(x, q)", GAMMA_FIRST), {}),
    "division the wrong way round": ((POW, MEAN, EPS, ROOT, "n = Div(q, x)", GAMMA_FIRST), {}),
    "power of 1/2": ((POW, MEAN, EPS, POWER, SCALED, GAMMA_FIRST), {"minus_half": 0.5}),
    "2 / root": ((POW, MEAN, EPS, DIVIDED, SCALED, GAMMA_FIRST), {"one": 2.0}),
    "another value scaled": ((*HF[:4], "o = Mul(x, three)", "n = Mul(o, r)", GAMMA_FIRST), {}),
    "no gamma": ((*HF[:4], "y = Mul(x, r)"), {}),
    "gamma per token": (HF, {"g": np.ones((3, 8), np.float32), "x": "float[B,3,8]"}),
    "gamma from outside": (HF, {"g": "float[8]"}),
    "layer norm": (("mu = ReduceMean<keepdims=1>(x, last)", "d = Sub(x, mu)", "s = Pow(d, two)", *HF[1:]), {}),
    "layer norm of the difference": (("y = LayerNormalization(x, g)",), {}),
}


@pytest.mark.parametrize(("parts", "values"), OTHERS.values(), ids=OTHERS)
def test_others_are_refused(parts: tuple[str, ...], values: dict) -> None:
    model = graph("\n".join(parts), "y", **{"x": X, **CONSTANTS, **values})
    result = recognise_rms_norm(value(model, "y"), Facts())
    assert isinstance(result, Miss), result


def test_a_norm_over_more_than_the_last_axis_is_refused() -> None:
    model = graph("y = RMSNormalization<axis=1>(x, g)", "y", 23, x="float[B,3,8]", g=np.ones((3, 8), np.float32))
    assert isinstance(recognise_rms_norm(value(model, "y"), Facts()), Miss)


def test_a_gamma_of_one_number_is_no_gamma() -> None:
    result, _ = recognise(HF, g=np.full(1, 1.5, np.float32))
    assert isinstance(result, Miss)


def single_node(op_type: str, domain: str) -> ir.Model:
    model = graph("y = RMSNormalization<axis=-1, epsilon=0.25>(x, g)", "y", 23, x=X, g=GAMMA)
    (node,) = model.graph
    node.op_type, node.domain = op_type, domain
    return model


def test_the_operator_of_onnxruntime() -> None:
    model = single_node("SimplifiedLayerNormalization", "")
    norm = recognise_rms_norm(value(model, "y"), Facts())
    assert isinstance(norm, RmsNorm)
    assert_true(norm, value(model, "y"), Run(model, normal(x=(2, 3, 8))))


@pytest.mark.parametrize("op_type", ["RMSNormalization", "SimplifiedLayerNormalization"])
def test_an_operator_of_the_same_name_in_another_domain_is_refused(op_type: str) -> None:
    model = single_node(op_type, "my.domain")
    assert isinstance(recognise_rms_norm(value(model, "y"), Facts()), Miss)
