"""Experts whose matrices are gathered per assignment: spellings that fuse, and graphs that only look like them."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns import fuse, moe_routed_experts
from tests.fusion_patterns.moe_blocks import (
    CHOICES,
    EXPERTS,
    MOE,
    ROUTER,
    block,
    codes,
    domain_node,
    fused,
    swap,
    tokens,
    weights,
)

REPEAT = "u = Unsqueeze(x, one) e = Expand(u, spread) r = Reshape(e, flat_rows)"
FLAT = "flat = Reshape(ids, minus) p = Unsqueeze(flat, minus)"
FIRST = "w1 = GatherND(gate_up, p) c = Unsqueeze(r, minus) a = MatMul(w1, c) b = Squeeze(a, minus)"
HALVES = "g, v = Split<axis=1, num_outputs=2>(b)"
SWIGLU = "s = Sigmoid(g) t = Mul(g, s) h = Mul(t, v)"
SECOND = "w2 = GatherND(down, p) hc = Unsqueeze(h, minus) o = MatMul(w2, hc) q = Squeeze(o, minus)"
COMBINE = (
    "fw = Reshape(chosen, minus) wc = Unsqueeze(fw, minus) z = Mul(q, wc)"
    " pc = Reshape(z, choices) y = ReduceSum<keepdims=0>(pc, one)"
)
BATCHED = " ".join([ROUTER, REPEAT, FLAT, FIRST, HALVES, SWIGLU, SECOND, COMBINE])

GATHERED = (
    (FIRST, "w1 = Gather<axis=0>(gate_up, flat) c = Unsqueeze(r, minus) a = MatMul(w1, c) b = Squeeze(a, minus)"),
    (SECOND, "w2 = Gather<axis=0>(down, flat) hc = Unsqueeze(h, minus) o = MatMul(w2, hc) q = Squeeze(o, minus)"),
)
SPELLINGS = {
    "dynamo": BATCHED,
    "Gather": swap(BATCHED, *GATHERED),
    "rows first, matrices as (k, n)": swap(
        BATCHED,
        (FIRST, "w1 = GatherND(gate_up_kn, p) c = Unsqueeze(r, one) a = MatMul(c, w1) b = Squeeze(a, one)"),
        (SECOND, "w2 = GatherND(down_kn, p) hc = Unsqueeze(h, one) o = MatMul(hc, w2) q = Squeeze(o, one)"),
    ),
    "rows first, matrices transposed in the graph": swap(
        BATCHED,
        ("a = MatMul(w1, c)", "wt = Transpose<perm=[0, 2, 1]>(w1) a = MatMul(c, wt)"),
        ("c = Unsqueeze(r, minus)", "c = Unsqueeze(r, one)"),
        ("b = Squeeze(a, minus)", "b = Squeeze(a, one)"),
    ),
    "Einsum": swap(
        BATCHED,
        (FIRST, 'w1 = GatherND(gate_up, p) b = Einsum<equation="mnk,mk->mn">(w1, r)'),
        (SECOND, 'w2 = GatherND(down, p) q = Einsum<equation="mk,mnk->mn">(h, w2)'),
    ),
    "ids (N, K), tokens broadcast": swap(
        " ".join([ROUTER, FIRST, HALVES, SWIGLU, SECOND, COMBINE]),
        (
            FIRST,
            "w1 = Gather<axis=0>(gate_up, ids) r1 = Unsqueeze(x, one) c = Unsqueeze(r1, minus) a = MatMul(w1, c)"
            " b = Squeeze(a, minus)",
        ),
        (HALVES, "g, v = Split<axis=2, num_outputs=2>(b)"),
        ("w2 = GatherND(down, p)", "w2 = Gather<axis=0>(down, ids)"),
        (COMBINE, "wc = Unsqueeze(chosen, minus) z = Mul(q, wc) y = ReduceSum<keepdims=0>(z, one)"),
    ),
    "ids (N, K) in Einsum": swap(
        " ".join([ROUTER, HALVES, SWIGLU]),
        (HALVES, 'w1 = Gather<axis=0>(gate_up, ids) b = Einsum<equation="bkno,bo->bkn">(w1, x) ' + HALVES),
        ("<axis=1, num", "<axis=2, num"),
    )
    + ' w2 = Gather<axis=0>(down, ids) q = Einsum<equation="bkno,bko->bkn">(w2, h)'
    + ' y = Einsum<equation="bkn,bk->bn">(q, chosen)',
    "Tile and Flatten": swap(
        BATCHED, ("e = Expand(u, spread) r = Reshape(e, flat_rows)", "e = Tile(u, spread) r = Flatten<axis=2>(e)")
    ),
    "tokens gathered": swap(
        BATCHED,
        (
            REPEAT,
            "sh = Shape<end=1>(x) n = Squeeze(sh) all = Range(zero_scalar, n, one_scalar) col = Unsqueeze(all, one)"
            " pair = Concat<axis=0>(one, two) wide = Expand(col, pair) idx = Reshape(wide, minus) r = Gather(x, idx)",
        ),
    ),
    "gate and up apart": swap(
        BATCHED,
        (FIRST, "w1 = GatherND(gate_stack, p) c = Unsqueeze(r, minus) a = MatMul(w1, c) g = Squeeze(a, minus)"),
        (HALVES, "w3 = GatherND(up_stack, p) a3 = MatMul(w3, c) v = Squeeze(a3, minus)"),
    ),
    "columns throughout": swap(
        BATCHED,
        ("b = Squeeze(a, minus) g, v = Split<axis=1, num_outputs=2>(b)", "g, v = Split<axis=1, num_outputs=2>(a)"),
        ("hc = Unsqueeze(h, minus) o = MatMul(w2, hc)", "o = MatMul(w2, h)"),
    ),
    "Slice": swap(BATCHED, (HALVES, "g = Slice(b, zero, three, one) v = Slice(b, three, six, one)")),
    "SplitToSequence": swap(
        BATCHED,
        (
            HALVES,
            "seq = SplitToSequence<axis=1>(b, three_scalar)"
            " g = SequenceAt(seq, zero_scalar) v = SequenceAt(seq, one_scalar)",
        ),
    ),
    "interleaved columns": swap(
        BATCHED, (HALVES, "g = Slice(b, zero, six, one, two) v = Slice(b, one, six, one, two)")
    ),
    "GELU in a formula": swap(
        BATCHED,
        (
            "s = Sigmoid(g) t = Mul(g, s)",
            "k = Div(g, root) f = Erf(k) f1 = Add(f, unit) f2 = Mul(g, f1) t = Mul(f2, half)",
        ),
    ),
    "ReLU squared, without gate": swap(
        BATCHED, (HALVES, ""), (SWIGLU, "h0, h1 = Split<axis=1, num_outputs=2>(b) h2 = Relu(h0) h = Mul(h2, h2)")
    ),
    "clamped": swap(BATCHED, ("h = Mul(t, v)", "vc = Clip(v, low, high) v1 = Add(vc, unit) h = Mul(t, v1)")),
    "weights by MatMul": swap(
        BATCHED,
        (COMBINE, "pc = Reshape(q, choices) row = Unsqueeze(chosen, one) m = MatMul(row, pc) y = Squeeze(m, one)"),
    ),
    "int32 ids": swap(
        BATCHED, (FLAT, "small = Cast<to=6>(ids) flat = Reshape(small, minus) p = Unsqueeze(flat, minus)"), *GATHERED
    ),
}
NUMBERS = {"root": 1.4142135, "unit": 1.0, "half": 0.5, "low": -0.5, "high": 0.5}


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str) -> None:
    model, report = fused(lambda: block(body, **NUMBERS), tokens(9), tokens(1, seed=1))
    assert (report.counts, codes(report)) == ({MOE: 1}, [])
    assert report.fused[0].assumed == []
    assert domain_node(model).attributes["expert_num"].value == EXPERTS
    assert not any(node.op_type in ("GatherND", "Einsum") and _is_rank_3(node) for node in model.graph)
    fuse_again = fuse(model, validate="none")
    assert (fuse_again.counts, codes(fuse_again)) == ({}, [])


def _is_rank_3(node: ir.Node) -> bool:
    first = node.inputs[0]
    return first is not None and first.is_initializer() and len(first.shape or ()) == 3


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_tokens_are_routed_once_each(body: str) -> None:
    """What goes into the operator are the tokens themselves, not their repetitions."""
    model, _ = fused(lambda: block(body, **NUMBERS))
    x, ids = domain_node(model).inputs[:2]
    assert x is model.graph.inputs[0]
    assert ids is not None
    assert ids.shape is not None
    assert ids.shape[-1] == CHOICES


def test_validation_agrees() -> None:
    model = block(BATCHED)
    report = fuse(model, validate="all")
    assert report.counts == {MOE: 1}
    assert report.fused[0].validated is not None
    assert report.fused[0].validated < 1e-6


@pytest.mark.parametrize("mode", ["sample", "all"])
def test_a_wrong_replacement_is_noticed(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    right = moe_routed_experts.routing_attributes
    monkeypatch.setattr(moe_routed_experts, "routing_attributes", lambda experts: right(experts) | {"row_idx_type": 1})
    report = fuse(block(BATCHED), validate=mode)
    assert (report.counts, codes(report)) == ({}, ["validation-failed"])
    with pytest.raises(AssertionError, match="largest magnitude"):
        fused(lambda: block(BATCHED), tokens(9))


def test_biases_are_added_in_the_products() -> None:
    body = swap(
        BATCHED,
        (HALVES, "b1 = GatherND(gate_up_bias, p) bb = Add(b, b1) g, v = Split<axis=1, num_outputs=2>(bb)"),
        ("q = Squeeze(o, minus)", "q0 = Squeeze(o, minus) b2 = GatherND(down_bias, p) q = Add(q0, b2)"),
    )
    model, report = fused(lambda: block(body), tokens(9))
    assert report.counts == {MOE: 1}
    assert all(len(node.inputs) == 3 for node in model.graph if node.op_type == "Gemm")
    assert sum(node.op_type == "Gemm" for node in model.graph) == 2 * EXPERTS


def test_weights_lie_where_they_lay() -> None:
    """Every expert's matrix is an entry of the stack, transposed by Gemm and not in the file."""
    model, _ = fused(lambda: block(BATCHED), tokens(9))
    gemms = [node for node in model.graph if node.op_type == "Gemm"]
    assert len(gemms) == 2 * EXPERTS
    stacks = weights()
    for number, node in enumerate(gemms):
        matrix = node.inputs[1]
        assert matrix is not None
        assert matrix.const_value is not None
        stack = stacks["gate_up" if number < EXPERTS else "down"]
        np.testing.assert_array_equal(matrix.const_value.numpy(), stack[number % EXPERTS])
    assert not {"gate_up", "down"} & set(model.graph.initializers)


def test_float16() -> None:
    half = weights(kind=np.float16)
    names = ("router", "gate_up", "down")
    model, report = fused(
        lambda: block(BATCHED, x="float16[N,6]", **{name: half[name] for name in names}), tokens(9, kind=np.float16)
    )
    assert report.counts == {MOE: 1}
    assert all(node.outputs[0].dtype == ir.DataType.FLOAT16 for node in model.graph if node.op_type == "Gemm")


def test_batches_of_sequences() -> None:
    """Tokens (B, S, H) that the graph flattens first."""
    body = "x2 = Reshape(x3, flat_rows) " + BATCHED.replace("(x, ", "(x2, ")
    feeds = {"x3": np.random.default_rng(0).standard_normal((2, 5, 6), dtype=np.float32)}
    _, report = fused(lambda: block(body, x3="float[B,S,6]"), feeds)
    assert report.counts == {MOE: 1}


def test_ids_from_outside_are_assumed_in_range() -> None:
    body = BATCHED.replace(ROUTER, "")
    given = {"x": "float[N,6]", "ids": "int64[N,2]", "chosen": "float[N,2]"}
    generator = np.random.default_rng(0)
    feeds = tokens(5) | {
        "ids": np.array([[1, 1], [3, 0], [2, 3], [0, 1], [3, 2]]),
        "chosen": generator.random((5, 2), dtype=np.float32),
    }
    _, report = fused(lambda: block(body, **given), feeds)
    assert report.counts == {MOE: 1}
    assert report.fused[0].assumed == ["expert-ids-in-range"]
    _, off = fused(lambda: block(body, **given), feeds, assume=["none"])
    assert (off.counts, codes(off)) == ({}, ["assumption-off"])


STILL_RIGHT = {
    "second product of other ids": swap(
        BATCHED, ("w2 = GatherND(down, p)", "p2 = Sub(three, p) w2 = GatherND(down, p2)")
    ),
    "ids the other way round": swap(
        BATCHED, ("flat = Reshape(ids, minus)", "i3 = Sub(three, ids) flat = Reshape(i3, minus)")
    ),
    "ids transposed": swap(BATCHED, ("flat = Reshape(ids, minus)", "it = Transpose(ids) flat = Reshape(it, minus)")),
    "tokens not repeated but tiled whole": swap(
        BATCHED, (REPEAT, "u = Unsqueeze(x, zero) twice = Concat<axis=0>(u, u) r = Reshape(twice, flat_rows)")
    ),
    "halves exchanged": swap(BATCHED, ("g, v = Split", "v, g = Split")),
    "weighted before the second product": swap(
        BATCHED, ("h = Mul(t, v)", "h0 = Mul(t, v) wc = Unsqueeze(fw, minus) h = Mul(h0, wc)"), (COMBINE, "")
    ).replace(REPEAT, REPEAT + " fw = Reshape(chosen, minus)")
    + " pc = Reshape(q, choices) y = ReduceSum<keepdims=0>(pc, one)",
    "activation over the experts' rows": swap(BATCHED, ("s = Sigmoid(g)", "s = Softmax<axis=0>(g)")),
    "outer product": swap(
        BATCHED,
        (
            "h = Mul(t, v)",
            "tc = Unsqueeze(t, minus) vr = Unsqueeze(v, one) hh = Mul(tc, vr) h = ReduceSum<keepdims=0>(hh, one)",
        ),
    ),
    "scaled product": swap(BATCHED, ("b = Squeeze(a, minus)", "a2 = Mul(a, half) b = Squeeze(a2, minus)")),
    "constant vector between": swap(BATCHED, ("h = Mul(t, v)", "h0 = Mul(t, v) h = Add(h0, vector)")),
    "one matrix scaled": swap(BATCHED, ("w2 = GatherND(down, p)", "scaled = Mul(down, half) w2 = GatherND(scaled, p)")),
    "shared expert inside": swap(BATCHED, ("h = Mul(t, v)", "h0 = Mul(t, v) sh = MatMul(r, g0) h = Add(h0, sh)")),
}


@pytest.mark.parametrize("body", STILL_RIGHT.values(), ids=STILL_RIGHT)
def test_twins_compute_the_same(body: str) -> None:
    """Whatever becomes of them: without validation, all outputs stay."""
    vector = np.array([1, -1, 2], np.float32)
    fused(lambda: block(body, **NUMBERS, vector=vector), tokens(8), tokens(1))


MISSES = {
    "activation over the experts' rows": "experts-unrecognised",
    "constant vector between": "experts-unrecognised",
    "shared expert inside": "experts-unrecognised",
}


@pytest.mark.parametrize(("name", "code"), MISSES.items(), ids=MISSES)
def test_misses(name: str, code: str) -> None:
    vector = np.array([1, -1, 2], np.float32)
    _, report = fused(lambda: block(STILL_RIGHT[name], **NUMBERS, vector=vector), tokens(8))
    assert code in codes(report)
    assert report.missed[0].expected
    assert report.missed[0].got


def test_products_with_something_else_between_are_routed_one_by_one() -> None:
    _, report = fused(lambda: block(STILL_RIGHT["outer product"]), tokens(8))
    assert (report.counts, codes(report)) == ({MOE: 2}, [])


def test_fewer_experts_than_the_router_knows() -> None:
    router = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    model = block(BATCHED, router=router)
    report = fuse(model, validate="none")
    assert (report.counts, codes(report)) == ({}, ["experts-missing"])
    assert (report.missed[0].expected, report.missed[0].got) == ("the 6 experts of the router", "4")


@pytest.mark.parametrize("name", ["a", "h", "r", "q", "flat"])
def test_values_that_are_outputs(name: str) -> None:
    _, report = fused(lambda: block(BATCHED, f"y {name}"), tokens(7))
    assert report.counts == {MOE: 1}
    if name in ("a", "h"):
        assert name in report.fused[0].kept


def test_two_layers() -> None:
    """Each block is routed by its own ids, although the weights are the same."""
    results = [name for names in re.findall(r"(\w+(?:, \w+)*) = ", BATCHED) for name in names.split(", ")]
    second = re.sub(rf"\b({'|'.join(results)})\b", r"\1_2", BATCHED)
    second = re.sub(r"\bx\b", "y", second)
    _, report = fused(lambda: block(f"{BATCHED} {second}", "y_2"), tokens(6))
    assert report.counts == {MOE: 2}
