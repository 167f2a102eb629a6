"""What the descriptions of quantised rows, their projections, heads of tokens and slot writes claim, in numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.quantised import (
    OtherwiseQuantised,
    PerTensor,
    PerToken,
    quantised_again,
    recognise_quantised,
    row_maximum,
)
from fusion_patterns.lift.quantised_linear import (
    QuantisedLinear,
    recognise_quantised_linear,
    recognise_quantised_product,
)
from fusion_patterns.lift.slot_write import SlotWrite, recognise_slot_write
from fusion_patterns.lift.token_heads import TokenHeads, recognise_token_heads
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import claimed
from tests.fusion_patterns.graphs import Array, Run, graph, normal, value

ROWS, WIDTH, COLUMNS = 5, 16, 6


@claimed.register
def _(description: PerTensor, run: Run) -> Array:
    """The codes for int8."""
    x = run.of(description.x)
    return np.clip(np.rint(x / np.float32(description.scale)) + description.zero_point, -128, 127)


@claimed.register
def _(description: PerToken, run: Run) -> Array:
    x = run.of(description.x)
    x = x if description.smooth is None else x * run.of(description.smooth)
    largest = np.abs(x).max(-1, keepdims=True)
    np.testing.assert_array_equal(run.of(description.largest), largest)
    return np.clip(np.rint(x / (largest / np.float32(127))), -128, 127)


@claimed.register
def _(description: QuantisedLinear, run: Run) -> Array:
    product = description.product
    weight = claimed(product.weight, run).astype(np.int64)
    exact = (claimed(product.rows, run).astype(np.int64) - product.shift) @ weight
    if description.bias is not None:
        exact = exact + run.of(description.bias).reshape(-1).astype(np.int64)
    real = exact.astype(np.float32) * description.column_scales()
    if description.by_row:
        assert isinstance(product.rows, PerToken)
        real = real * (run.of(product.rows.largest) / np.float32(127))
    return real


@claimed.register
def _(description: TokenHeads, run: Run) -> Array:
    source = run.of(description.source)
    heads = source.reshape(len(source), description.heads, description.width)
    cut = heads[..., description.start : description.start + description.size]
    return cut.transpose(1, 0, 2) if description.heads_first else cut


@claimed.register
def _(description: SlotWrite, run: Run) -> Array:
    cache = run.of(description.cache).copy()
    cache[run.of(description.slots).reshape(-1)] = run.of(description.rows)
    return cache


# --------------------------------------------------------------------------------------------------------------- rows

PER_TENSOR = {
    "divided": "d = Div(x, s) r = Round(d) z = Add(r, zp) c = Clip(z, low, high) q = Cast<to=3>(c)",
    "multiplied": "d = Mul(inverse, x) r = Round(d) z = Add(zp, r) c = Clip(z, low, high) q = Cast<to=3>(c)",
    "shifted before rounding": "d = Div(x, s) z = Add(d, zp) r = Round(z) c = Clip(r, low, high) q = Cast<to=3>(c)",
    "shift subtracted": "d = Div(x, s) r = Round(d) z = Sub(r, zp) c = Clip(z, low, high) q = Cast<to=3>(c)",
    "not shifted": "d = Div(x, s) r = Round(d) c = Clip(r, low, high) q = Cast<to=3>(c)",
    "not cast": "d = Div(x, s) r = Round(d) q = Clip(r, low, high)",
    "cast twice": "d = Div(x, s) r = Round(d) c = Clip(r, low, high) i = Cast<to=3>(c) q = Cast<to=6>(i)",
    "Min, Max": "d = Div(x, s) r = Round(d) m = Min(r, high) c = Max(low, m) q = Cast<to=3>(c)",
    "Max, Min": "d = Div(x, s) r = Round(d) m = Max(r, low) c = Min(m, high) q = Cast<to=3>(c)",
    "QuantizeLinear": "q = QuantizeLinear(x, s, zp8)",
    "QuantizeLinear to uint8": "q = QuantizeLinear(x, s, zpu)",
    "QuantizeLinear without zero point": "q = QuantizeLinear(x, s)",
    "uint8": "d = Div(x, s) r = Round(d) z = Add(r, zpu_f) c = Clip(z, zero, top) q = Cast<to=2>(c)",
}
CONSTANTS: dict[str, Any] = {
    "s": 0.02,
    "inverse": 50.0,
    "zp": 5.0,
    "low": -128.0,
    "high": 127.0,
    "zero": 0.0,
    "top": 255.0,
    "zp8": np.int8(5),
    "zpu": np.uint8(133),
    "zpu_f": 133.0,
    "code": 127.0,
    "part": np.float32(1 / 127),
    "tiny": 1e-6,
    "large": 0.5,
    "half": 0.5,
    "below": -127.0,
    "last": [-1],
    "one": 1.0,
    "smooth": np.linspace(0.5, 2, WIDTH).astype(np.float32),
}


def read_in(body: str, known: dict[str, Any]) -> dict[str, Any]:
    """The constants whose names are operands in a body."""
    operands = set(re.findall(r"(?<=[(,\s])\w+(?=[,)])", body))
    return {name: constant for name, constant in known.items() if name in operands}


def rows(body: str) -> tuple[ir.Model, ir.Value]:
    model = graph(body, "q", x=f"float[T,{WIDTH}]", **read_in(body, CONSTANTS))
    return model, value(model, "q")


@pytest.mark.parametrize("body", PER_TENSOR.values(), ids=PER_TENSOR)
def test_one_scale(body: str) -> None:
    model, q = rows(body)
    found = recognise_quantised(q, Facts())
    assert isinstance(found, PerTensor)
    run = Run(model, normal(x=(ROWS, WIDTH)))
    stored = run.of(q).astype(np.int64) - (128 if q.dtype == ir.DataType.UINT8 else 0)
    np.testing.assert_array_equal(stored, claimed(found, run))


LARGEST = "a = Abs(x) m = ReduceMax<keepdims=1>(a, last)"
CODES = "r = Round(d) c = Clip(r, low, high) q = Cast<to=3>(c)"
PER_TOKEN = {
    "divided": f"{LARGEST} t = Div(m, code) d = Div(x, t) {CODES}",
    "a part": f"{LARGEST} t = Mul(m, part) d = Div(x, t) {CODES}",
    "multiplied": f"{LARGEST} t = Div(code, m) d = Mul(x, t) {CODES}",
    "multiplied by the inverse": f"{LARGEST} u = Div(m, code) t = Div(one, u) d = Mul(x, t) {CODES}",
    "Reciprocal": f"{LARGEST} u = Div(m, code) t = Reciprocal(u) d = Mul(x, t) {CODES}",
    "guarded": f"{LARGEST} g = Max(m, tiny) t = Div(g, code) d = Div(x, t) {CODES}",
    "scale guarded": f"{LARGEST} t = Div(m, code) g = Clip(t, tiny) d = Div(x, g) {CODES}",
    "smoothed": "y = Mul(x, smooth) a = Abs(y) m = ReduceMax<keepdims=1>(a, last) t = Div(m, code) "
    f"d = Div(y, t) {CODES}",
}


@pytest.mark.parametrize("body", PER_TOKEN.values(), ids=PER_TOKEN)
def test_a_scale_for_each_token(body: str) -> None:
    model, q = rows(body)
    found = recognise_quantised(q, Facts())
    assert isinstance(found, PerToken)
    run = Run(model, normal(x=(ROWS, WIDTH)))
    off = np.abs(run.of(q).astype(np.int64) - claimed(found, run))
    assert off.max() <= 1
    assert np.mean(off) < 0.02


ODD = {
    "clipped to -127": ("d = Div(x, s) r = Round(d) c = Clip(r, below, high) q = Cast<to=3>(c)", "clipped"),
    "rounded down": ("d = Div(x, s) r = Floor(d) c = Clip(r, low, high) q = Cast<to=3>(c)", "Floor"),
    "not rounded": ("d = Div(x, s) c = Clip(d, low, high) q = Cast<to=3>(c)", "not rounded"),
    "half a zero point": (
        "d = Div(x, s) r = Round(d) z = Add(r, half) c = Clip(z, low, high) q = Cast<to=3>(c)",
        "0.5",
    ),
    "maximum of all": ("a = Abs(x) m = ReduceMax<keepdims=1>(a) t = Div(m, code) d = Div(x, t) " + CODES, "neither"),
    "maximum of other rows": (
        "y = Add(x, x) a = Abs(y) m = ReduceMax<keepdims=1>(a, last) t = Div(m, code) d = Div(x, t) " + CODES,
        "neither",
    ),
    "a floor that counts": (f"{LARGEST} g = Max(m, large) t = Div(g, code) d = Div(x, t) {CODES}", "neither"),
    "at run time": ("q, t, z = DynamicQuantizeLinear(x)", "run time"),
    "wrapped": ("d = Div(x, s) r = Round(d) c = Clip(r, zero, top) u = Cast<to=2>(c) q = Cast<to=3>(u)", "uint8"),
}


@pytest.mark.parametrize(("body", "how"), ODD.values(), ids=ODD)
def test_otherwise(body: str, how: str) -> None:
    _, q = rows(body)
    found = recognise_quantised(q, Facts())
    assert isinstance(found, OtherwiseQuantised)
    assert how in found.how
    assert found.x.name == "x"


def test_no_codes_at_all() -> None:
    model = graph("r = Round(x) q = Neg(r)", "q", x=f"float[T,{WIDTH}]")
    assert isinstance(recognise_quantised(value(model, "q"), Facts()), Miss)


def test_quantised_again() -> None:
    model = graph("q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)", "y", x="float[T,8]", s=0.1, z=np.int8(1))
    assert quantised_again(value(model, "y"), Facts()) is value(model, "x")
    assert quantised_again(value(model, "x"), Facts()) is None


def test_row_maximum_of_something_else() -> None:
    model = graph("y = Div(x, c)", "y", x="float[T,1]", c=128.0)
    assert row_maximum(value(model, "y"), Facts()) is None


# ------------------------------------------------------------------------------------------------------- projections

QUANTISED = "u = Div(x, s) r = Round(u) z = Add(r, zp) k = Clip(z, low, high) q = Cast<to=3>(k)"
BY_ROW = f"{LARGEST} t = Div(m, code) d_ = Div(x, t) r = Round(d_) k = Clip(r, low, high) q = Cast<to=3>(k)"
EXPLICIT = "i = Cast<to=6>(q) v = Cast<to=6>(w)"
PRODUCT = f"{EXPLICIT} p = MatMul(i, v) f = Cast<to=1>(p)"
QDQ = "q = QuantizeLinear(x, s, zp8) e = DequantizeLinear(q, s, zp8)"
LINEAR = {
    "integers": f"{QUANTISED} {EXPLICIT} p = MatMul(i, v) b = Add(p, bias) f = Cast<to=1>(b) y = Mul(f, d)",
    "no bias": f"{QUANTISED} {PRODUCT} y = Mul(f, d)",
    "scaled twice": f"{QUANTISED} {PRODUCT} g = Mul(s, f) y = Mul(g, d)",
    "floats": f"{QUANTISED} i = Cast<to=1>(q) v = Cast<to=1>(w) p = MatMul(i, v) b = Add(float_bias, p) y = Mul(d, b)",
    "bias after the cast": f"{QUANTISED} {PRODUCT} b = Add(f, float_bias) y = Mul(b, d)",
    "zero point subtracted": f"{QUANTISED} {EXPLICIT} j = Sub(i, zp32) p = MatMul(j, v) f = Cast<to=1>(p) "
    "y = Mul(f, d)",
    "transposed weight": f"{QUANTISED} i = Cast<to=1>(q) v = Cast<to=1>(wt) o = Transpose<perm=[1,0]>(v) "
    "p = MatMul(i, o) y = Mul(p, d)",
    "Gemm": f"{QUANTISED} i = Cast<to=1>(q) v = Cast<to=1>(wt) p = Gemm<transB=1>(i, v, float_bias) y = Mul(p, d)",
    "QDQ": f"{QDQ} v = DequantizeLinear<axis=1>(w, d) y = MatMul(e, v)",
    "QDQ, transposed weight": f"{QDQ} v = DequantizeLinear<axis=0>(wt, d) o = Transpose(v) y = MatMul(e, o)",
    "QDQ of uint8": "q = QuantizeLinear(x, s, zpu) e = DequantizeLinear(q, s, zpu) "
    "v = DequantizeLinear(w, s) y = MatMul(e, v)",
    "MatMulInteger": "q = QuantizeLinear(x, s, zp8) p = MatMulInteger(q, w, zp8) f = Cast<to=1>(p) y = Mul(f, d)",
    "MatMulInteger of uint8": "q = QuantizeLinear(x, s, zpu) p = MatMulInteger(q, w, zpu) f = Cast<to=1>(p) "
    "y = Mul(f, d)",
    "by row": f"{BY_ROW} {PRODUCT} g = Mul(f, t) y = Mul(g, d)",
    "by row, columns first": f"{BY_ROW} {PRODUCT} g = Mul(f, d) y = Mul(t, g)",
}
ODD_LINEAR = {
    "bias after scaling": (
        f"{QUANTISED} {PRODUCT} g = Mul(f, d) y = Add(g, d)",
        "bias",
    ),
    "fractions added": (
        f"{QUANTISED} {PRODUCT} g = Add(f, d) y = Mul(g, d)",
        "bias",
    ),
    "divided by the scale": (
        f"{QUANTISED} {PRODUCT} y = Div(f, d)",
        "quantisation-unsupported",
    ),
    "not by the row's scale": (
        f"{BY_ROW} {PRODUCT} y = Mul(f, d)",
        "quantisation-unsupported",
    ),
    "by a row's scale too many": (
        f"{QUANTISED} a = Abs(x) m = ReduceMax<keepdims=1>(a, last) t = Div(m, code) {EXPLICIT} p = MatMul(i, v) "
        "f = Cast<to=1>(p) g = Mul(f, t) y = Mul(g, d)",
        "quantisation-unsupported",
    ),
    "weight with zero points": (
        f"{QDQ} v = DequantizeLinear<axis=1>(w, d, zps) y = MatMul(e, v)",
        "quantisation-unsupported",
    ),
    "weight scaled by rows": (
        f"{QDQ} v = DequantizeLinear<axis=0>(w, smooth) y = MatMul(e, v)",
        "quantisation-unsupported",
    ),
    "QLinearMatMul": (
        "q = QuantizeLinear(x, s, zp8) p = QLinearMatMul(q, s, zp8, w, s, zero8, s, zp8) "
        "y = DequantizeLinear(p, s, zp8)",
        "quantisation-unsupported",
    ),
}


def projection(body: str) -> ir.Model:
    generator = np.random.default_rng(1)
    weight = generator.integers(-127, 128, (WIDTH, COLUMNS)).astype(np.int8)
    known: dict[str, Any] = {
        **CONSTANTS,
        "w": weight,
        "wt": np.ascontiguousarray(weight.T),
        "d": generator.uniform(0.001, 0.002, COLUMNS).astype(np.float32),
        "bias": generator.integers(-500, 500, COLUMNS).astype(np.int32),
        "float_bias": generator.integers(-500, 500, COLUMNS).astype(np.float32),
        "zp32": np.int32(5),
        "zps": np.array([0, 0, 1, 0, 0, 0], np.int8),
        "zero8": np.int8(0),
    }
    return graph(body, "y", x=f"float[T,{WIDTH}]", **read_in(body, known))


@pytest.mark.parametrize("body", LINEAR.values(), ids=LINEAR)
def test_projection(body: str) -> None:
    model = projection(body)
    found = recognise_quantised_linear(value(model, "y"), Facts())
    assert isinstance(found, QuantisedLinear)
    run = Run(model, normal(x=(ROWS, WIDTH)))
    np.testing.assert_allclose(run.of(value(model, "y")), claimed(found, run), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("body", "code"), ODD_LINEAR.values(), ids=ODD_LINEAR)
def test_projection_that_is_none(body: str, code: str) -> None:
    found = recognise_quantised_linear(value(projection(body), "y"), Facts())
    assert isinstance(found, Miss)
    assert found.code == code


def test_product_of_real_numbers() -> None:
    model = graph("y = MatMul(x, w)", "y", x="float[T,4]", w=np.eye(4, dtype=np.float32))
    node = value(model, "y").producer()
    assert node is not None
    assert recognise_quantised_product(node, Facts()) is None


# -------------------------------------------------------------------------------------------------- heads and caches

HEADS = {
    "rows": "y = Identity(x)",
    "heads": "y = Reshape(x, to_heads)",
    "cut": "h = Reshape(x, to_heads) n, y = Split<axis=-1>(h, parts)",
    "turned": "h = Reshape(x, to_heads) t = Transpose<perm=[1,0,2]>(h) y, r = Split<axis=2>(t, parts)",
    "cut, then turned": "h = Reshape(x, to_heads) n, r = Split<axis=2>(h, parts) y = Transpose<perm=[1,0,2]>(r)",
    "one head": "y = Unsqueeze(x, one)",
}


@pytest.mark.parametrize("body", HEADS.values(), ids=HEADS)
def test_heads_of_tokens(body: str) -> None:
    constants = {"to_heads": [-1, 3, 4], "parts": [1, 3], "one": [1]}
    model = graph(body, "y", x="float[T,12]", **read_in(body, constants))
    found = recognise_token_heads(value(model, "y"), Facts())
    assert isinstance(found, TokenHeads)
    run = Run(model, normal(x=(ROWS, 12)))
    expected = run.of(value(model, "y"))
    np.testing.assert_array_equal(claimed(found, run).reshape(expected.shape), expected)


@pytest.mark.parametrize(
    "body",
    [
        "y = Reshape(x, other)",
        "h = Reshape(x, to_heads) y = Transpose<perm=[2,0,1]>(h)",
        "n = Neg(x) y = Unsqueeze(n, axes)",
    ],
    ids=["tokens as heads", "features first", "four axes"],
)
def test_no_heads_of_tokens(body: str) -> None:
    constants = {"other": [3, -1, 4], "to_heads": [-1, 3, 4], "axes": [1, 2]}
    model = graph(body, "y", x="float[T,12]", **read_in(body, constants))
    assert isinstance(recognise_token_heads(value(model, "y"), Facts()), Miss)


WRITES = {
    "ScatterND": "i = Unsqueeze(slots, last) y = ScatterND(cache, i, rows)",
    "ScatterND, reshaped": "i = Reshape(slots, column) y = ScatterND(cache, i, rows)",
    "ScatterElements": "i = Unsqueeze(slots, last) j = Expand(i, wide) y = ScatterElements<axis=0>(cache, j, rows)",
    "computed indices": "i = Unsqueeze(slots, last) j = Mod(i, count) y = ScatterND(cache, j, rows)",
}
NO_WRITES = {
    "added": 'i = Unsqueeze(slots, last) y = ScatterND<reduction="add">(cache, i, rows)',
    "along the features": "i = Unsqueeze(slots, last) j = Expand(i, wide) y = ScatterElements<axis=1>(cache, j, rows)",
    "something else": "y = Neg(cache)",
}


def write(body: str) -> ir.Model:
    constants = {"last": [-1], "column": [-1, 1], "wide": [1, 4], "count": [1000]}
    return graph(body, "y", cache="float[P,4]", rows="float[T,4]", slots="int64[T]", **read_in(body, constants))


@pytest.mark.parametrize("body", WRITES.values(), ids=WRITES)
def test_slot_write(body: str) -> None:
    model = write(body)
    found = recognise_slot_write(value(model, "y"), Facts())
    assert isinstance(found, SlotWrite)
    given = {**normal(cache=(9, 4), rows=(3, 4)), "slots": np.array([7, 0, 4])}
    run = Run(model, given)
    np.testing.assert_array_equal(claimed(found, run), run.of(value(model, "y")))


@pytest.mark.parametrize("body", NO_WRITES.values(), ids=NO_WRITES)
def test_no_slot_write(body: str) -> None:
    found = recognise_slot_write(value(write(body), "y"), Facts())
    assert isinstance(found, Miss)
    assert found.code == "cache-unrecognised"
