"""All experts on all tokens, weighted by shares: spellings that fuse, and graphs that only look like them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fusion_patterns import fuse
from tests.fusion_patterns.moe_blocks import EXPERTS, MOE, ROUTER, block, codes, domain_node, fused, swap, tokens

NUMBERS = {f"e{expert}": expert for expert in range(EXPERTS)} | {"four": [4], "off_on": [0, 1], "four_scalar": 4}


def expert(e: int, x: str = "x") -> str:
    return (
        f"ga{e} = MatMul({x}, g{e}) sg{e} = Sigmoid(ga{e}) si{e} = Mul(ga{e}, sg{e}) up{e} = MatMul({x}, u{e})"
        f" hi{e} = Mul(si{e}, up{e}) out{e} = MatMul(hi{e}, d{e}) "
    )


def share_by_mul(e: int) -> str:
    return (
        f"eq{e} = Equal(ids, e{e}) ca{e} = Cast<to=1>(eq{e}) ma{e} = Mul(chosen, ca{e})"
        f" sh{e} = ReduceSum<keepdims=1>(ma{e}, minus) "
    )


def share_by_where(e: int) -> str:
    return (
        f"eq{e} = Equal(e{e}, ids) ma{e} = Where(eq{e}, chosen, nothing) sq{e} = ReduceSum<keepdims=0>(ma{e}, minus)"
        f" sh{e} = Unsqueeze(sq{e}, minus) "
    )


def term(e: int) -> str:
    return f"te{e} = Mul(out{e}, sh{e}) "


CHAIN = "a1 = Add(te0, te1) a2 = Add(a1, te2) y = Add(a2, te3)"
TREE = "a1 = Add(te2, te1) a2 = Add(te3, te0) y = Add(a1, a2)"
FROM_ZEROS = (
    "size = Shape(x) base = ConstantOfShape(size) a0 = Add(base, te0) a1 = Add(a0, te1) a2 = Add(a1, te2)"
    " y = Add(a2, te3)"
)


def dense(share: Callable[[int], str], total: str = CHAIN, router: str = ROUTER) -> str:
    return router + "".join(expert(e) + share(e) + term(e) for e in range(EXPERTS)) + total


MASKED = dense(share_by_mul)
ROUTING = (
    ROUTER
    + " size_s = Shape(scores) none = Expand(nothing, size_s) table = ScatterElements<axis=-1>(none, ids, chosen)"
)
ONE_HOT = (
    ROUTER + " oh = OneHot<axis=-1>(ids, four_scalar, off_on) hot = Cast<to=1>(oh) col = Unsqueeze(chosen, minus)"
    " hw = Mul(hot, col) table = ReduceSum<keepdims=0>(hw, axis_k)"
)
SPELLINGS = {
    "masked": MASKED,
    "Where": dense(share_by_where),
    "tree": dense(share_by_mul, TREE),
    "Sum": dense(share_by_mul, "y = Sum(te0, te1, te2, te3)"),
    "from zeros": dense(share_by_where, FROM_ZEROS),
    "routing table, Slice": dense(lambda e: f"sh{e} = Slice(table, at{e}, at{e + 1}, minus) ", router=ROUTING),
    "routing table, Gather": dense(
        lambda e: f"sq{e} = Gather<axis=1>(table, e{e}) sh{e} = Unsqueeze(sq{e}, minus) ", router=ROUTING
    ),
    "routing table, Split": dense(
        lambda e: "sh0, sh1, sh2, sh3 = Split<axis=1, num_outputs=4>(table) " if e == 0 else "", router=ROUTING
    ),
    "one-hot routing table": dense(lambda e: f"sh{e} = Slice(table, at{e}, at{e + 1}, minus) ", router=ONE_HOT),
    "Gemm": MASKED.replace("MatMul(hi", "Gemm(hi"),
    "Gemm, transposed weights": swap(
        MASKED, *((f"MatMul(x, g{e})", f"Gemm<transB=1>(x, gt{e})") for e in range(EXPERTS))
    ),
    "weights transposed in the graph": swap(
        MASKED,
        *((f"ga{e} = MatMul(x, g{e})", f"tr{e} = Transpose(gt{e}) ga{e} = MatMul(x, tr{e})") for e in range(EXPERTS)),
    ),
    "biases": swap(
        MASKED,
        *(
            (f"out{e} = MatMul(hi{e}, d{e})", f"no{e} = MatMul(hi{e}, d{e}) out{e} = Add(db{e}, no{e})")
            for e in range(EXPERTS)
        ),
    ),
    "entries of a stack": swap(
        MASKED,
        *(
            (f"out{e} = MatMul(hi{e}, d{e})", f"en{e} = Gather<axis=0>(down_kn, e{e}) out{e} = MatMul(hi{e}, en{e})")
            for e in range(EXPERTS)
        ),
    ),
}
VALUES = NUMBERS | {f"at{e}": [e] for e in range(EXPERTS + 1)} | {"axis_k": [-2], "half": 0.5, "third": 0.3}


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str) -> None:
    model, report = fused(lambda: block(body, **VALUES), tokens(9), tokens(1, seed=1))
    assert (report.counts, codes(report)) == ({MOE: 1}, [])
    assert report.fused[0].assumed == []
    assert domain_node(model).attributes["expert_num"].value == EXPERTS
    again = fuse(model, validate="none")
    assert (again.counts, codes(again)) == ({}, [])


@pytest.mark.parametrize("body", [MASKED, SPELLINGS["one-hot routing table"]], ids=["masked", "one-hot"])
def test_validation_agrees(body: str) -> None:
    report = fuse(block(body, **VALUES), validate="all")
    assert report.counts == {MOE: 1}
    assert report.fused[0].validated is not None
    assert report.fused[0].validated < 1e-6


def test_batches_of_sequences() -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 6), dtype=np.float32)}
    model, report = fused(lambda: block(MASKED, x="float[B,S,6]", **VALUES), feeds)
    assert report.counts == {MOE: 1}
    assert model.graph.outputs[0].name == "y"


def test_a_shared_expert_is_added_behind() -> None:
    shared = "sg = MatMul(x, gt9) so = MatMul(sg, gt9t) y2 = Add(y, so)"
    wide = np.random.default_rng(3).standard_normal((6, 5), dtype=np.float32)
    values = VALUES | {"gt9": wide, "gt9t": np.ascontiguousarray(wide.T)}
    _, report = fused(lambda: block(f"{MASKED} {shared}", "y2", **values), tokens(7))
    assert report.counts == {MOE: 1}


def test_ids_from_outside_are_assumed_in_range() -> None:
    body = MASKED.replace(ROUTER, "")
    given = VALUES | {"ids": "int64[N,2]", "chosen": "float[N,2]"}
    feeds = tokens(4) | {
        "ids": np.array([[1, 1], [3, 0], [2, 3], [0, 1]]),
        "chosen": np.random.default_rng(0).random((4, 2), dtype=np.float32),
    }
    _, report = fused(lambda: block(body, **given), feeds)
    assert (report.counts, report.fused[0].assumed) == ({MOE: 1}, ["expert-ids-in-range"])


TWINS: dict[str, tuple[str, str | None]] = {
    "an expert of another activation": (swap(MASKED, ("sg2 = Sigmoid", "sg2 = Tanh")), "experts-unrecognised"),
    "an expert of other tokens": (
        swap(MASKED, ("up1 = MatMul(x, u1)", "x1 = Mul(x, half) up1 = MatMul(x1, u1)")),
        "experts-unrecognised",
    ),
    "an expert scaled": (
        swap(MASKED, ("te3 = Mul(out3, sh3)", "sc3 = Mul(out3, half) te3 = Mul(sc3, sh3)")),
        "experts-unrecognised",
    ),
    "gate and up exchanged in one expert": (
        swap(MASKED, ("hi1 = Mul(si1, up1)", "ex1 = Mul(up1, sg1) hi1 = Mul(ex1, ga1)")),
        None,
    ),
    "weights of another expert": (swap(MASKED, ("MatMul(x, g2)", "MatMul(x, g1)")), None),
    "experts exchanged": (
        swap(MASKED, ("Equal(ids, e1)", "Equal(ids, five)"), ("Equal(ids, e2)", "Equal(ids, e1)"), ("five", "e2")),
        None,
    ),
    "one routing weight scaled": (
        swap(MASKED, ("ma2 = Mul(chosen, ca2)", "c2 = Mul(chosen, half) ma2 = Mul(c2, ca2)")),
        "combine-unrecognised",
    ),
    "a share scaled": (swap(MASKED, ("te2 = Mul(out2, sh2)", "s2 = Mul(sh2, half) te2 = Mul(out2, s2)")), None),
    "all routing weights scaled": (
        swap(MASKED, *((f"Mul(chosen, ca{e})", f"Mul(scaled, ca{e})") for e in range(4))).replace(
            ROUTER, ROUTER + " scaled = Mul(chosen, third)"
        ),
        None,
    ),
    "an expert twice": (swap(MASKED, ("y = Add(a2, te3)", "a3 = Add(a2, te3) y = Add(a3, te3)")), None),
    "an expert not added": (
        swap(MASKED, ("a2 = Add(a1, te2) y = Add(a2, te3)", "y = Add(a1, te3)")),
        "combine-unrecognised",
    ),
    "a shared expert in between": (
        swap(MASKED, ("a2 = Add(a1, te2)", "a0 = Add(a1, x) a2 = Add(a0, te2)")),
        "combine-unrecognised",
    ),
    "one expert subtracted": (swap(MASKED, ("a2 = Add(a1, te2)", "a2 = Sub(a1, te2)")), "combine-unrecognised"),
    "one compared otherwise": (swap(MASKED, ("eq3 = Equal(ids, e3)", "eq3 = Greater(ids, e2)")), "experts-missing"),
    "scores, not chosen": (
        swap(MASKED, *((f"Mul(chosen, ca{e})", f"Mul(first_two, ca{e})") for e in range(4))).replace(
            ROUTER, ROUTER + " first_two = Slice(scores, zero, two, one)"
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins(name: str) -> None:
    body, code = TWINS[name]
    _, report = fused(lambda: block(body, **VALUES), tokens(8), tokens(4, seed=2))
    if code is not None:
        assert (report.counts, codes(report)) == ({}, [code])


def test_a_router_of_more_experts() -> None:
    router = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    report = fuse(block(MASKED, router=router, **VALUES), validate="none")
    assert (report.counts, codes(report)) == ({}, ["experts-missing"])
    assert (report.missed[0].expected, report.missed[0].got) == ("the 6 experts of the router", "4")


def test_two_experts_exchanged_in_order_of_the_sum() -> None:
    """The number an expert is compared with says which it is, not its place in the sum."""
    total = "a1 = Add(te3, te1) a2 = Add(te0, a1) y = Add(te2, a2)"
    model, report = fused(lambda: block(dense(share_by_mul, total), **VALUES), tokens(11))
    assert report.counts == {MOE: 1}
    first = next(node for node in model.graph if node.op_type == "MatMul" and node.inputs[1].name == "g0")  # type: ignore[union-attr]
    assert first.inputs[0].producer().op_type == "Split"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["out1", "te2", "a1", "sh3", "hi0"])
def test_values_that_are_outputs(name: str) -> None:
    _, report = fused(lambda: block(MASKED, f"y {name}", **VALUES), tokens(7))
    assert report.counts == {MOE: 1}


def test_comparisons_elsewhere_are_no_candidates() -> None:
    body = (
        "mask = Equal(tokens, e1) f = Cast<to=1>(mask) m = Mul(f, w) s = ReduceSum<keepdims=1>(m, minus) y = Mul(s, w)"
    )
    report = fuse(block(body, tokens="int64[N,5]", w="float[N,5]", **VALUES), validate="none")
    assert (report.counts, codes(report)) == ({}, [])
