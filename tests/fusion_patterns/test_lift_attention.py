"""Softmax attention: softmax(q k^T * scale + mask) v."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns.graph import Facts
from fusion_patterns.lift.attention import Attention, recognise_attention
from fusion_patterns.miss import Miss
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.graphs import Run, graph, normal

SHAPES = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, 6), "mask": (2, 1, 5, 7)}
INPUTS = {"q": "float[B,3,S,4]", "k": "float[B,3,T,4]", "v": "float[B,3,T,6]", "mask": "float[B,1,S,T]"}
KT = "kt = Transpose<perm=[0,1,3,2]>(k)"
P = "p = Softmax<axis=-1>"
V = "y = MatMul(p, v)"
NUMBERS = {"half": 0.5, "root": 0.7, "zero": 0.0}
SPELLINGS = {
    "plain": (f"{KT} s = MatMul(q, kt) {P}(s) {V}", 1.0, False),
    "scaled by Mul": (f"{KT} s = MatMul(q, kt) c = Mul(s, half) {P}(c) {V}", 0.5, False),
    "scaled by Mul, mirrored": (f"{KT} s = MatMul(q, kt) c = Mul(half, s) {P}(c) {V}", 0.5, False),
    "scaled by Div": (f"{KT} s = MatMul(q, kt) c = Div(s, half) {P}(c) {V}", 2.0, False),
    "roots on both sides": (f"{KT} a = Mul(q, root) b = Mul(kt, root) s = MatMul(a, b) {P}(s) {V}", 0.49, False),
    "root before the transpose": (
        f"b = Mul(k, root) kt = Transpose<perm=[0,1,3,2]>(b) s = MatMul(q, kt) {P}(s) {V}",
        0.7,
        False,
    ),
    "scaled twice": (f"{KT} a = Mul(q, half) s = MatMul(a, kt) c = Mul(s, half) {P}(c) {V}", 0.25, False),
    "masked": (f"{KT} s = MatMul(q, kt) c = Mul(s, half) m = Add(c, mask) {P}(m) {V}", 0.5, True),
    "masked, mirrored": (f"{KT} s = MatMul(q, kt) m = Add(mask, s) {P}(m) {V}", 1.0, True),
    "axis 3": (f"{KT} s = MatMul(q, kt) p = Softmax<axis=3>(s) {V}", 1.0, False),
    "Einsum": (
        f's = Einsum<equation="bhsd,bhtd->bhst">(q, k) {P}(s) y = Einsum<equation="bhst,bhtd->bhsd">(p, v)',
        1.0,
        False,
    ),
    "Einsum, keys first": (f's = Einsum<equation="bhtd,bhsd->bhst">(k, q) {P}(s) {V}', 1.0, False),
    "no number for no key": (
        f"{KT} s = MatMul(q, kt) m = Add(s, mask) {P}(m) nan = IsNaN(p) w = Where(nan, zero, p) y = MatMul(w, v)",
        1.0,
        True,
    ),
}


def softmax(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type in ("Softmax", "Attention"))


def recognise(body: str, opset: int = 20, hide: bool = False, **values: object) -> Attention | Miss | None:
    """What the Softmax stands in; an attention has been compared with ONNX Runtime."""
    model = graph(body, "y", opset, **{**INPUTS, **NUMBERS, **values})
    result = recognise_attention(softmax(model), Facts())
    if isinstance(result, Attention):
        feeds = {v.name: normal(**{v.name: SHAPES.get(v.name, tuple(v.shape))})[v.name] for v in model.graph.inputs}
        if hide:
            feeds["mask"][1, :, 2] = -np.inf
        assert_true(result, result.out, Run(model, feeds))
    return result


@pytest.mark.parametrize(("body", "scale", "masked"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, scale: float, masked: bool) -> None:
    attention = recognise(body)
    assert isinstance(attention, Attention)
    assert [side.base.name for side in (attention.query, attention.key, attention.value)] == ["q", "k", "v"]
    assert attention.scale == pytest.approx(scale)
    assert (attention.mask is not None) == masked
    assert (attention.out.name, attention.heads_first) == ("y", True)
    assert attention.empty_rows_zero == ("IsNaN" in body)


def test_rows_without_a_key_count_as_zero() -> None:
    attention = recognise(SPELLINGS["no number for no key"][0], hide=True)
    assert isinstance(attention, Attention)
    assert attention.empty_rows_zero


def test_heads_behind_the_tokens() -> None:
    body = f's = Einsum<equation="bshd,bthd->bsht">(q, k) {P}(s) y = Einsum<equation="bsht,bthd->bshd">(p, v)'
    model = graph(body, "y", q="float[2,5,3,4]", k="float[2,7,3,4]", v="float[2,7,3,6]")
    attention = recognise_attention(softmax(model), Facts())
    assert isinstance(attention, Attention)
    assert not attention.heads_first
    assert_true(attention, attention.out, Run(model, normal(q=(2, 5, 3, 4), k=(2, 7, 3, 4), v=(2, 7, 3, 6))))


@pytest.mark.parametrize("mask", ["float[5,7]", "float[1,1,1,7]", "float[3,5,7]", "float[2,3,5,7]", "float[7]"])
def test_masks_of_every_shape(mask: str) -> None:
    model = graph(SPELLINGS["masked"][0], "y", **{**INPUTS, **NUMBERS, "mask": mask})
    attention = recognise_attention(softmax(model), Facts())
    assert isinstance(attention, Attention)
    shape = tuple(int(n) for n in mask[6:-1].split(","))
    assert_true(attention, attention.out, Run(model, normal(**{**SHAPES, "mask": shape})))


OPERATOR = {
    "default scale": ("y = Attention(q, k, v)", 0.5, False),
    "scale": ("y = Attention<scale=0.3>(q, k, v)", 0.3, False),
    "mask": ("y = Attention<scale=0.3>(q, k, v, mask)", 0.3, True),
    "boolean mask": ("m = Greater(mask, zero) y = Attention<scale=0.3>(q, k, v, m)", 0.3, True),
    "causal": ("y = Attention<is_causal=1>(q, k, v)", 0.5, False),
    "causal and a mask": ("y = Attention<is_causal=1>(q, k, v, mask)", 0.5, True),
    "factor on the queries": ("a = Mul(q, half) y = Attention<scale=0.3>(a, k, v)", 0.15, False),
}


@pytest.mark.parametrize(("body", "scale", "masked"), OPERATOR.values(), ids=OPERATOR)
def test_the_operator(body: str, scale: float, masked: bool) -> None:
    attention = recognise(body, 23)
    assert isinstance(attention, Attention)
    assert attention.scale == pytest.approx(scale)
    assert (attention.mask is not None) == masked
    assert attention.causal == ("is_causal" in body)


@pytest.mark.parametrize("name", ["mask", "boolean mask"])
def test_the_operator_yields_zero_where_no_key_is_visible(name: str) -> None:
    attention = recognise(OPERATOR[name][0], 23, hide=True)
    assert isinstance(attention, Attention)
    assert attention.empty_rows_zero


OTHERS = {
    "scaled after the mask": (f"{KT} s = MatMul(q, kt) m = Add(s, mask) c = Mul(m, half) {P}(c) {V}", {}),
    "two masks": (f"{KT} s = MatMul(q, kt) m = Add(s, mask) n = Add(m, mask) {P}(n) {V}", {}),
    "scale per head": (
        f"{KT} s = MatMul(q, kt) c = Mul(s, per_head) {P}(c) {V}",
        {"per_head": np.ones((3, 1, 1), np.float32)},
    ),
    "softmax over the queries": (f"{KT} s = MatMul(q, kt) p = Softmax<axis=2>(s) {V}", {}),
    "softmax over the heads": (f"{KT} s = MatMul(q, kt) p = Softmax<axis=1>(s) {V}", {}),
    "three axes": (
        f"kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) {P}(s) {V}",
        {"q": "float[3,5,4]", "k": "float[3,7,4]", "v": "float[3,7,6]"},
    ),
    "shared keys": (
        f"{KT} s = MatMul(q, kt) {P}(s) {V}",
        {"k": "float[2,1,7,4]", "v": "float[2,1,7,6]", "q": "float[2,3,5,4]"},
    ),
    "keys that broadcast over the batch": (
        f"{KT} s = MatMul(q, kt) {P}(s) {V}",
        {"k": "float[1,3,7,4]", "v": "float[1,3,7,6]", "q": "float[2,3,5,4]"},
    ),
    "no product below": (f"s = Relu(q) {P}(s) y = MatMul(p, w)", {"w": "float[2,3,4,6]"}),
    "one scaling too many": (f"{KT} s = MatMul(q, kt) e = Exp(s) {P}(e) {V}", {}),
    "probabilities scaled": (f"{KT} s = MatMul(q, kt) {P}(s) d = Mul(p, half) y = MatMul(d, v)", {}),
    "probabilities transposed": (
        f"{KT} s = MatMul(q, kt) {P}(s) t = Transpose<perm=[0,1,3,2]>(p) y = MatMul(t, w)",
        {"w": "float[B,3,S,6]"},
    ),
    "probabilities on the right": (f"{KT} s = MatMul(q, kt) {P}(s) y = MatMul(w, p)", {"w": "float[B,3,6,S]"}),
    "two products": (f"{KT} s = MatMul(q, kt) {P}(s) {V} z = MatMul(p, v)", {}),
    "nothing reads the probabilities": (f"{KT} s = MatMul(q, kt) {P}(s) y = Relu(p)", {}),
    "another guard": (f"{KT} s = MatMul(q, kt) {P}(s) nan = IsNaN(s) w = Where(nan, zero, p) y = MatMul(w, v)", {}),
    "another guarded number": (
        f"{KT} s = MatMul(q, kt) {P}(s) nan = IsNaN(p) w = Where(nan, half, p) y = MatMul(w, v)",
        {},
    ),
    "heads of the result exchanged with tokens": (
        f'{KT} s = MatMul(q, kt) {P}(s) y = Einsum<equation="bhst,bhtd->bshd">(p, v)',
        {},
    ),
    "summed over two axes": (
        f's = Einsum<equation="bhsd,bhtd->bhst">(q, k) {P}(s) y = Einsum<equation="bhst,bhtd->bsd">(p, v)',
        {},
    ),
}


@pytest.mark.parametrize(("body", "values"), OTHERS.values(), ids=OTHERS)
def test_others_are_refused(body: str, values: dict) -> None:
    assert not isinstance(recognise(body, **values), Attention)


def test_an_attention_sink_is_named() -> None:
    """A column beside the scores takes its share of the weights and is cut off again."""
    body = (
        f"{KT} s = MatMul(q, kt) c = Concat<axis=-1>(s, sink) {P}(c) w = Slice(p, i0, minus_one, last) y = MatMul(w, v)"
    )
    numbers = {"i0": [0], "minus_one": [-1], "last": [3]}
    result = recognise(body, sink="float[B,3,S,1]", **numbers)
    assert isinstance(result, Miss)
    assert result.code == "attention-unrecognised"
    assert "sink" in result.got


OPERATOR_OTHERS = {
    "softcap": "y = Attention<softcap=2.0>(q, k, v)",
    "cache": "y, pk, pv = Attention(q, k, v, , k, v)",
    "scores": "y, , , s = Attention(q, k, v)",
    "three axes": "y = Attention<q_num_heads=2, kv_num_heads=2>(q3, q3, q3)",
}


@pytest.mark.parametrize("body", OPERATOR_OTHERS.values(), ids=OPERATOR_OTHERS)
def test_other_forms_of_the_operator_are_refused(body: str) -> None:
    assert isinstance(recognise(body, 23, q3="float[2,5,8]"), Miss)


def test_scores_of_three_axes_that_the_mask_widens_are_refused() -> None:
    """(N, S, T) + (B, 1, S, T): four axes come out of the mask alone."""
    body = f"kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) m = Add(s, mask) {P}(m) {V}"
    result = recognise(body, q="float[3,5,4]", k="float[3,7,4]", v="float[2,3,7,6]", mask="float[2,1,5,7]")
    assert not isinstance(result, Attention)
