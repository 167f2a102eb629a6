"""Merges of two partial attentions -> RingAttentionUpdateV2: every spelling, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ascend_onnx.storage import load
from ascend_onnx.verify import verify
from fusion_patterns import Report, find, fuse
from tests.fusion_patterns.graphs import graph
from tests.models import CASES, EXPECTED

Corpus = Callable[[str], Path]

RING = "RingAttentionUpdateV2"
MODELS = [name for name, counts in EXPECTED.items() if RING in counts]

# Constants that the graphs below may use. Four heads of size 16 throughout.
CONSTANTS = {
    "zero": [0], "one": [1], "two": [2], "three": [3], "last": [-1], "lane": 0, "first_axis": [0],
    "unit": 1.0, "minus": -1.0, "wide": [1, 1, 16], "wide4": [1, 1, 1, 16], "flat": [0, 0, 64], "heads": [0, 0, 4, 16],
}  # fmt: skip
TND = {
    "pa": "float[T,4,16]", "pm": "float[T,4,8]", "ps": "float[T,4,8]",
    "ca": "float[T,4,16]", "cm": "float[T,4,8]", "cs": "float[T,4,8]",
}  # fmt: skip
SBH = {
    "pa": "float[S,B,64]", "pm": "float[B,4,S,8]", "ps": "float[B,4,S,8]",
    "ca": "float[S,B,64]", "cm": "float[B,4,S,8]", "cs": "float[B,4,S,8]",
}  # fmt: skip
BSND = {"pa": "float[B,S,4,16]", "pl": "float[B,S,4,1]", "ca": "float[B,S,4,16]", "cl": "float[B,4,S]"}
THREE_LANES = {"pm": "lanes", "cm": "lanes", "ps": "positive_lanes", "cs": "positive_lanes"}


def used(body: str, values: Mapping[str, object]) -> dict[str, object]:
    """The inputs and the constants that a body mentions."""
    words = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return {name: value for name, value in {**values, **CONSTANTS}.items() if name in words}


def built(body: str, outputs: str, values: Mapping[str, object], opset: int = 18) -> ir.Model:
    model = graph(body, outputs, opset, **used(body, values))
    RemoveUnusedNodesPass()(model)
    return model


def rules_of(model: ir.Model) -> dict[str, str]:
    """Statistics as they come out of a softmax: equal lanes, positive sums."""
    names = [value.name or "" for value in model.graph.inputs]
    return {name: THREE_LANES[name[:2]] for name in names if name[:2] in THREE_LANES}


def fused(model: ir.Model, **options: object) -> tuple[ir.Model, Report]:
    copy = model.clone()
    return copy, fuse(copy, **options)  # type: ignore[arg-type]


def assert_merged(model: ir.Model, count: int = 1) -> tuple[ir.Model, Report]:
    """Fused without validation, and equal to the original at two sets of dimensions."""
    copy, report = fused(model, validate="none")
    assert report.counts == {RING: count}, report.missed
    verification = verify(model, copy, rules=rules_of(model))
    assert verification.equal, verification.reason
    assert len(verification.runs) == 2
    return copy, report


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


# --- Exported graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_exported_graphs(corpus: Corpus, name: str) -> None:
    model = load(corpus(name))
    report = fuse(model, validate="all")
    assert report.counts == EXPECTED[name]
    assert report.missed == []
    assert report.fused[0].validated is not None
    rules = {input_name: rule for input_name, (_, _, rule) in CASES[name]["inputs"].items()}
    verification = verify(corpus(name), model, rules=rules)
    assert verification.equal, verification.reason
    again = model.graph.num_nodes()
    assert fuse(model, validate="none").counts == {}
    assert model.graph.num_nodes() == again


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("ring_")])
def test_nothing_but_the_operator_is_left(corpus: Corpus, name: str) -> None:
    model = load(corpus(name))
    fuse(model, validate="none")
    around = [] if "sbh" in name else ["Shape", "Concat"]
    assert op_types(model) == [*around, RING]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("ring_")])
def test_equal_lanes_are_assumed(corpus: Corpus, name: str) -> None:
    model = load(corpus(name))
    assert [entry.assumed for entry in find(model).fused] == [["softmax-lanes-equal"]]
    report = find(model, assume=["none"])
    assert report.fused == []
    assert [missed.code for missed in report.missed] == ["assumption-off"]


def test_log_sum_exps_assume_nothing(corpus: Corpus) -> None:
    (entry,) = find(load(corpus("lse_logexp_op18_opt")), assume=["none"]).fused
    assert entry.assumed == []


# --- Maxima and sums --------------------------------------------------------------------------------------------------

STATISTICS = """
    m = Max(pm, cm)
    pd = Sub(pm, m)  pe = Exp(pd)  pw = Mul(ps, pe)
    cd = Sub(cm, m)  ce = Exp(cd)  cw = Mul(cs, ce)
    s = Add(pw, cw)
"""
WEIGHTS = f"{STATISTICS} pr = Div(pw, s)  cr = Div(cw, s)"
SLICED = "pf = Slice(pr, zero, one, two)  cf = Slice(cr, zero, one, two)"
SUM = "px = Mul(pa, pf)  cx = Mul(ca, cf)  o = Add(px, cx)"
HEADS_OF_SBH = """
    pk = Gather<axis=3>(pr, lane)  pu = Unsqueeze(pk, three)  pt = Tile(pu, wide4)
    pp = Transpose<perm=[2,0,1,3]>(pt)  pf = Reshape(pp, flat)
    ck = Gather<axis=3>(cr, lane)  cu = Unsqueeze(ck, three)  ct = Tile(cu, wide4)
    cp = Transpose<perm=[2,0,1,3]>(ct)  cf = Reshape(cp, flat)
"""
RING_SPELLINGS = {
    "slices": f"{WEIGHTS} {SLICED} {SUM}",
    "operands exchanged": """
        m = Max(cm, pm)
        pd = Sub(pm, m)  pe = Exp(pd)  pw = Mul(pe, ps)  cd = Sub(cm, m)  ce = Exp(cd)  cw = Mul(ce, cs)
        s = Add(cw, pw)  pr = Div(pw, s)  cr = Div(cw, s)
        pf = Slice(pr, zero, one, two)  cf = Slice(cr, zero, one, two)
        px = Mul(pf, pa)  cx = Mul(cf, ca)  o = Add(cx, px)""",
    "another lane": f"""{WEIGHTS} pk = Gather<axis=-1>(pr, two)  ck = Gather<axis=-1>(cr, two)
        px = Mul(pa, pk)  cx = Mul(ca, ck)  o = Add(px, cx)""",
    "Split into lanes": f"""{WEIGHTS} pf, p1, p2 = Split<axis=2>(pr, lanes)  cf, c1, c2 = Split<axis=2>(cr, lanes)
        {SUM}""",
    "times the reciprocal": f"""{STATISTICS} i = Reciprocal(s)  pr = Mul(pw, i)  cr = Mul(i, cw) {SLICED} {SUM}""",
    "the rest to 1": f"{STATISTICS} pr = Div(pw, s)  cr = Sub(unit, pr) {SLICED} {SUM}",
    "divided afterwards": f"""{STATISTICS} pf = Slice(pw, zero, one, two)  cf = Slice(cw, zero, one, two)
        sf = Slice(s, zero, one, two)  px = Mul(pa, pf)  cx = Mul(ca, cf)  y = Add(px, cx)  o = Div(y, sf)""",
    "attention times sum first": f"""{STATISTICS} p0 = Slice(ps, zero, one, two)  p1 = Slice(pe, zero, one, two)
        cr = Div(cw, s)  cf = Slice(cr, zero, one, two)  sf = Slice(s, zero, one, two)
        py = Mul(pa, p0)  pz = Mul(py, p1)  px = Div(pz, sf)  cx = Mul(ca, cf)  o = Add(px, cx)""",
    "previous and the difference": f"""{STATISTICS} cr = Div(cw, s)  cf = Slice(cr, zero, one, two)
        d = Sub(ca, pa)  x = Mul(cf, d)  o = Add(pa, x)""",
    "negated difference": f"""m = Max(pm, cm)  pd = Sub(m, pm)  pn = Neg(pd)  pe = Exp(pn)  pw = Mul(ps, pe)
        cd = Sub(m, cm)  cn = Mul(cd, minus)  ce = Exp(cn)  cw = Mul(cs, ce)  s = Add(pw, cw)
        pr = Div(pw, s)  cr = Div(cw, s) {SLICED} {SUM}""",
}  # fmt: skip


@pytest.mark.parametrize("opset", [17, 25])
@pytest.mark.parametrize("body", RING_SPELLINGS.values(), ids=RING_SPELLINGS)
def test_spellings_of_maxima_and_sums(body: str, opset: int) -> None:
    values = {**TND, "lanes": [1, 1, 6]}
    copy, _ = assert_merged(built(body, "o m s", values, opset))
    assert op_types(copy) == ["Shape", "Concat", RING]


SBH_SPELLINGS = {
    "expanded": f"""{WEIGHTS} pk = Slice(pr, zero, one, three)  pt = Expand(pk, wide4)
        pp = Transpose<perm=[2,0,1,3]>(pt)  pf = Reshape(pp, flat)
        ck = Slice(cr, zero, one, three)  ct = Expand(ck, wide4)
        cp = Transpose<perm=[2,0,1,3]>(ct)  cf = Reshape(cp, flat) {SUM}""",
}


@pytest.mark.parametrize("body", SBH_SPELLINGS.values(), ids=SBH_SPELLINGS)
def test_spellings_beside_sbh(body: str) -> None:
    copy, _ = assert_merged(built(body, "o m s", SBH))
    assert op_types(copy) == [RING]
    assert copy.graph.node(0).attributes["input_layout"].as_string() == "SBH"


def test_heads_of_sbh_as_an_axis() -> None:
    body = f"""{WEIGHTS} pk = Slice(pr, zero, one, three)  pf = Transpose<perm=[2,0,1,3]>(pk)
        ck = Slice(cr, zero, one, three)  cf = Transpose<perm=[2,0,1,3]>(ck)
        p4 = Reshape(pa, heads)  c4 = Reshape(ca, heads)
        px = Mul(p4, pf)  cx = Mul(c4, cf)  y = Add(px, cx)  o = Reshape(y, flat)"""
    assert_merged(built(body, "o m s", SBH))


def test_one_lane() -> None:
    body = f"{WEIGHTS} px = Mul(pa, pr)  cx = Mul(ca, cr)  o = Add(px, cx)"
    values = {**TND, **dict.fromkeys(("pm", "ps", "cm", "cs"), "float[T,4,1]")}
    _, report = assert_merged(built(body, "o m s", values))
    assert report.fused[0].assumed == []


def test_statistics_without_lanes_in_another_order() -> None:
    body = f"""{WEIGHTS} pt = Transpose<perm=[1,0]>(pr)  pf = Unsqueeze(pt, last)
        ct = Transpose<perm=[1,0]>(cr)  cf = Unsqueeze(ct, last) {SUM}"""
    assert_merged(built(body, "o m s", {**TND, **dict.fromkeys(("pm", "ps", "cm", "cs"), "float[4,T]")}))


def test_only_the_attention_is_wanted() -> None:
    copy, _ = assert_merged(built(RING_SPELLINGS["slices"], "o", TND))
    assert op_types(copy) == ["Shape", "Concat", RING]


def test_a_model_with_one_row() -> None:
    sizes = {name: spec.replace("S,B", "1,1").replace("B,4,S", "1,4,1") for name, spec in SBH.items()}
    model = built(f"{WEIGHTS} {HEADS_OF_SBH} {SUM}", "o m s", sizes)
    copy, report = fused(model, validate="none")
    assert report.counts == {RING: 1}, report.missed
    assert verify(model, copy, rules=rules_of(model)).equal


# --- Log-sum-exps -----------------------------------------------------------------------------------------------------

OTHER = "ct = Transpose<perm=[0,2,1]>(cl)  c = Unsqueeze(ct, last)"
BY_DIFFERENCES = """
    pd = Sub(pl, l)  pe = Exp(pd)  px = Mul(pe, pa)  cd = Sub(c, l)  ce = Exp(cd)  cx = Mul(ce, ca)  o = Add(px, cx)
"""
LSE_SPELLINGS = {
    "log(1 + exp)": f"{OTHER} d = Sub(c, pl) e = Exp(d) a = Add(unit, e) g = Log(a) l = Add(pl, g) {BY_DIFFERENCES}",
    "softplus": f"{OTHER} d = Sub(c, pl)  g = Softplus(d)  l = Add(g, pl) {BY_DIFFERENCES}",
    "log(exp + exp)": f"{OTHER} x = Exp(pl)  y = Exp(c)  a = Add(x, y)  l = Log(a) {BY_DIFFERENCES}",
    "sigmoid": f"""{OTHER} d = Sub(c, pl)  g = Sigmoid(d)  i = Sub(pa, ca)  x = Mul(g, i)  o = Sub(pa, x)
        n = Sub(pl, c)  h = Sigmoid(n)  j = Log(h)  l = Sub(pl, j)""",
    "sigmoids of both signs": f"""{OTHER} d = Sub(c, pl)  g = Sigmoid(d)  n = Neg(d)  h = Sigmoid(n)
        px = Mul(h, pa)  cx = Mul(ca, g)  o = Add(px, cx)  j = Log(h)  l = Sub(pl, j)""",
    "max and log of the sum": f"""{OTHER} m = Max(pl, c)  pd = Sub(pl, m)  pe = Exp(pd)  cd = Sub(c, m)  ce = Exp(cd)
        s = Add(pe, ce)  g = Log(s)  l = Add(m, g)  pr = Div(pe, s)  cr = Div(ce, s)
        px = Mul(pa, pr)  cx = Mul(ca, cr)  o = Add(px, cx)""",
}


@pytest.mark.parametrize("outputs", ["o l", "o"])
@pytest.mark.parametrize("body", LSE_SPELLINGS.values(), ids=LSE_SPELLINGS)
def test_spellings_of_log_sum_exps(body: str, outputs: str) -> None:
    copy, report = assert_merged(built(body, outputs, BSND))
    assert report.fused[0].assumed == []
    assert not {"Exp", "Sigmoid", "Softplus"} & set(op_types(copy))
    assert ("Log" in op_types(copy)) == (outputs == "o l")


def test_log_sum_exps_with_heads_first() -> None:
    body = """
        m = Max(pl, cl)  pd = Sub(pl, m)  pe = Exp(pd)  cd = Sub(cl, m)  ce = Exp(cd)  s = Add(pe, ce)
        g = Log(s)  l = Add(g, m)  pr = Div(pe, s)  pt = Transpose<perm=[1,0]>(pr)  pf = Unsqueeze(pt, last)
        cr = Div(ce, s)  ct = Transpose<perm=[1,0]>(cr)  cf = Unsqueeze(ct, last)
        px = Mul(pa, pf)  cx = Mul(ca, cf)  o = Add(px, cx)"""
    values = {"pa": "float[T,4,16]", "ca": "float[T,4,16]", "pl": "float[4,T]", "cl": "float[4,T]"}
    copy, _ = assert_merged(built(body, "o l", values))
    assert copy.graph.outputs[1].shape == ir.Shape([4, "T"])


def test_heads_before_tokens() -> None:
    body = f"d = Sub(cl, pl) e = Exp(d) a = Add(unit, e) g = Log(a) l = Add(pl, g) {BY_DIFFERENCES}".replace(
        "c,", "cl,"
    )
    values = {"pa": "float[B,N,S,16]", "ca": "float[B,N,S,16]", "pl": "float[B,N,S,1]", "cl": "float[B,N,S,1]"}
    assert_merged(built(body, "o l", values))


# --- Several merges, types, and readers outside -----------------------------------------------------------------------


def step(number: int, attention: str, maximum: str, total: str) -> str:
    """One more merge, of the values o, m, s of the last one with the inputs caN, cmN, csN."""
    names = {"pa": attention, "pm": maximum, "ps": total, "ca": f"ca{number}", "cm": f"cm{number}", "cs": f"cs{number}"}
    constants = {*CONSTANTS, "Max", "Sub", "Exp", "Mul", "Add", "Div", "Slice"}
    text = RING_SPELLINGS["slices"]
    for mark in "(),=":
        text = text.replace(mark, f" {mark} ")
    words = [names.get(w, w if w in constants or not w.isalpha() else f"{w}{number}") for w in text.split()]
    return " ".join(words)


def test_a_ring_of_three_steps() -> None:
    body = f"{step(1, 'pa', 'pm', 'ps')} {step(2, 'o1', 'm1', 's1')} {step(3, 'o2', 'm2', 's2')}"
    values = {"pa": TND["pa"], "pm": TND["pm"], "ps": TND["ps"]}
    values |= {f"{name}{number}": TND[name] for number in (1, 2, 3) for name in ("ca", "cm", "cs")}
    copy, _ = assert_merged(built(body, "o3 m3 s3", values), 3)
    assert set(op_types(copy)) == {"Shape", "Concat", RING}


def test_a_ring_of_log_sum_exps() -> None:
    body = LSE_SPELLINGS["log(1 + exp)"]
    second = body.replace("pa", "o").replace("pl", "l")
    for name in ("ct", "c", "d", "e", "a", "g", "pd", "pe", "px", "cd", "ce", "cx", "ca", "cl"):
        second = second.replace(f"{name} ", f"{name}2 ").replace(f"({name},", f"({name}2,")
        second = second.replace(f" {name})", f" {name}2)").replace(f"({name})", f"({name}2)")
    second = second.replace("l = Add(l", "l2 = Add(l").replace("o = Add", "o2 = Add")
    second = second.replace("Sub(l, l)", "Sub(l, l2)").replace("Sub(c2, l)  ce2", "Sub(c2, l2)  ce2")
    values = {**BSND, "ca2": BSND["ca"], "cl2": BSND["cl"]}
    assert_merged(built(f"{body} {second}", "o2 l2", values), 2)


CAST_WEIGHTS = f"""{WEIGHTS} {SLICED} ph = Cast<to=10>(pf)  ch = Cast<to=10>(cf)
    px = Mul(pa, ph)  cx = Mul(ca, ch)  o = Add(px, cx)"""
CAST_ATTENTION = f"""{WEIGHTS} {SLICED} pw32 = Cast<to=1>(pa)  cw32 = Cast<to=1>(ca)
    px = Mul(pw32, pf)  cx = Mul(cw32, cf)  y = Add(px, cx)  o = Cast<to=10>(y)"""
MIXED = f"{WEIGHTS} {SLICED} cw32 = Cast<to=1>(ca)  px = Mul(pa, pf)  cx = Mul(cw32, cf)  o = Add(px, cx)"


@pytest.mark.parametrize("body", [CAST_WEIGHTS, CAST_ATTENTION], ids=["weights rounded", "attentions widened"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_attentions(body: str, dtype: str) -> None:
    values = {**TND, "pa": f"{dtype}[T,4,16]", "ca": f"{dtype}[T,4,16]"}
    number = {"float16": "10", "bfloat16": "16"}[dtype]
    copy, _ = assert_merged(built(body.replace("to=10", f"to={number}"), "o m s", values))
    assert op_types(copy) == ["Shape", "Concat", RING]
    assert {value.dtype for value in copy.graph.outputs[1:]} == {ir.DataType.FLOAT}


def test_a_narrow_attention_merged_into_a_wide_one() -> None:
    copy, _ = assert_merged(built(MIXED, "o m s", {**TND, "ca": "float16[T,4,16]"}))
    assert op_types(copy).count("Cast") == 1


@pytest.mark.parametrize("inner", ["pe", "cw", "pr", "cf", "px", "pd"])
def test_values_that_are_outputs_stay(inner: str) -> None:
    copy, report = assert_merged(built(RING_SPELLINGS["slices"], f"o m s {inner}", TND))
    assert [value.name for value in copy.graph.outputs] == ["o", "m", "s", inner]
    assert report.fused[0].kept == [inner]


def test_values_that_others_read_stay() -> None:
    assert_merged(built(f"{RING_SPELLINGS['slices']} z = Sqrt(pw)  y = Add(o, pa)", "o m s z y", TND))


def test_limits_of_a_product() -> None:
    report = find(built(RING_SPELLINGS["slices"], "o m s", TND), target="a2")
    assert [missed.code for missed in report.missed] == ["target"]
    assert "D must be a multiple of 64" in report.missed[0].message


# --- Twins ------------------------------------------------------------------------------------------------------------


def changed(old: str, new: str, body: str = RING_SPELLINGS["slices"]) -> str:
    assert old in body
    return body.replace(old, new)


TWINS = {
    "the smaller maximum": ("merge-maximum", changed("Max", "Min")),
    "a maximum of others": ("merge-maximum", changed("Max(pm, cm)", "Max(pm, cs)")),
    "no maximum": ("merge-maximum", changed("Max(pm, cm)", "Identity(pm)")),
    "the other maximum": ("merge-weights", changed("pd = Sub(pm, m)", "pd = Sub(cm, m)")),
    "difference the other way round": ("merge-weights", changed("pd = Sub(pm, m)", "pd = Sub(m, pm)")),
    "an exponential missing": ("merge-maximum", changed("cw = Mul(cs, ce)", "cw = Mul(cs, cd)")),
    "a sum not rescaled": ("merge-weights", changed("s = Add(pw, cw)", "s = Add(ps, cw)")),
    "sums not rescaled": ("merge-weights", changed("s = Add(pw, cw)", "s = Add(ps, cs)")),
    "a sum in the wrong weight": ("merge-weights", changed("pr = Div(pw, s)", "z = Mul(cs, pe)  pr = Div(z, s)")),
    "not divided by the sum": ("merge-weights", changed("pr = Div(pw, s)", "pr = Identity(pw)")),
    "neither divided by the sum": (
        "merge-weights", f"{STATISTICS} pf = Slice(pw, zero, one, two)  cf = Slice(cw, zero, one, two) {SUM}",
    ),
    "divided by the maximum": ("merge-weights", changed("cr = Div(cw, s)", "cr = Div(cw, m)")),
    "one attention without weight": ("merge-weights", changed("px = Mul(pa, pf)", "px = Identity(pa)")),
    "one attention twice": ("merge-weights", changed("cx = Mul(ca, cf)", "cx = Mul(pa, cf)")),
    "one weight for both": ("merge-weights", changed("cx = Mul(ca, cf)", "cx = Mul(ca, pf)")),
    "difference of both": ("merge-weights", changed("o = Add(px, cx)", "o = Sub(px, cx)")),
    "weights of different lanes": ("merge-weights", changed("Slice(cr, zero, one, two)", "Slice(cr, one, two, two)")),
    "exponentials scaled": ("merge-weights", changed("pe = Exp(pd)", "p2 = Mul(pd, half)  pe = Exp(p2)")),
    "a guard that counts": ("merge-weights", changed("cr = Div(cw, s)", "z = Add(s, half)  cr = Div(cw, z)")),
}  # fmt: skip


def lse(old: str, new: str, name: str = "log(1 + exp)") -> tuple[str, str]:
    return "merge-weights", changed(old, new, LSE_SPELLINGS[name])


VLLM = "max and log of the sum"
LSE_TWINS = {
    "difference the other way round": lse("d = Sub(c, pl)", "d = Sub(pl, c)"),
    "logarithm subtracted": lse("l = Add(pl, g)", "l = Sub(pl, g)"),
    "logarithm added to the other": lse("l = Add(pl, g)", "l = Add(c, g)"),
    "1 not added": lse("a = Add(unit, e)", "a = Identity(e)"),
    "2 added": lse("a = Add(unit, e)", "a = Add(e, double)"),
    "exponential missing": lse("ce = Exp(cd)", "ce = Identity(cd)"),
    "weight rises with the others": lse("pd = Sub(pl, l)", "pd = Sub(l, pl)"),
    "weights of one": lse("cd = Sub(c, l)", "cd = Sub(pl, l)"),
    "logarithm to the base 2": lse("g = Log(a)", "n = Log(a)  g = Mul(n, double)"),
    "other attention added": lse("x = Mul(g, i)  o = Sub(pa, x)", "x = Mul(g, i)  o = Add(pa, x)", "sigmoid"),
    "sum of attentions": lse("i = Sub(pa, ca)", "i = Add(pa, ca)", "sigmoid"),
    "not normalised": lse("pr = Div(pe, s)  cr = Div(ce, s)", "pr = Identity(pe)  cr = Identity(ce)", VLLM),
    "one-sided": lse("cr = Div(ce, s)", "cr = Identity(ce)", VLLM),
}  # fmt: skip


def assert_missed(model: ir.Model, code: str) -> None:
    before = [(node.op_type, node.name) for node in model.graph]
    report = fuse(model, validate="none")
    assert report.counts == {}
    assert {missed.code for missed in report.missed} == {code}, report.missed
    assert all(missed.expected and missed.got and missed.node for missed in report.missed)
    assert [(node.op_type, node.name) for node in model.graph] == before


@pytest.mark.parametrize(("code", "body"), TWINS.values(), ids=TWINS)
def test_twins(code: str, body: str) -> None:
    assert_missed(built(body, "o m s" if "m = " in body and "s = " in body else "o", {**TND, "half": 0.5}), code)


@pytest.mark.parametrize(("code", "body"), LSE_TWINS.values(), ids=LSE_TWINS)
def test_twins_of_log_sum_exps(code: str, body: str) -> None:
    assert_missed(built(body, "o l", {**BSND, "double": 2.0}), code)


SBH_TWINS = {
    "features before heads": changed("perm=[2,0,1,3]", "perm=[2,0,3,1]", HEADS_OF_SBH),
    "tokens as lanes": HEADS_OF_SBH.replace("<axis=3>", "<axis=2>"),
}


@pytest.mark.parametrize("heads", SBH_TWINS.values(), ids=SBH_TWINS)
def test_twins_of_layouts_beside_sbh(heads: str) -> None:
    values = {name: spec.replace("S,B", "8,2").replace("B,4,S", "2,4,8") for name, spec in SBH.items()}
    assert_missed(built(f"{WEIGHTS} {heads} {SUM}", "o m s", values), "merge-layout")


def test_batches_and_heads_exchanged() -> None:
    values = {name: spec.replace("S,B", "8,4").replace("B,4,S", "4,4,8") for name, spec in SBH.items()}
    body = f"{WEIGHTS} {HEADS_OF_SBH} {SUM}"
    assert_merged(built(body, "o m s", values))
    exchanged = built(changed("perm=[2,0,1,3]", "perm=[2,1,0,3]", body), "o m s", values)
    copy, report = fused(exchanged, validate="none")
    assert report.counts in ({}, {RING: 1})
    assert verify(exchanged, copy, rules=rules_of(exchanged)).equal


def test_heads_as_lanes() -> None:
    body = (
        f"{WEIGHTS} pk = Gather<axis=1>(pr, lane)  pf = Unsqueeze(pk, last)  ck = Gather<axis=1>(cr, lane)"
        f"  cf = Unsqueeze(ck, last) {SUM}"
    )
    assert_missed(
        built(body, "o m s", {name: spec.replace("T,4", "T,8") for name, spec in TND.items()}), "merge-layout"
    )


def test_statistics_that_all_heads_share() -> None:
    values = {**TND, **dict.fromkeys(("pm", "ps", "cm", "cs"), "float[T,1,1]")}
    assert_missed(
        built(f"{WEIGHTS} px = Mul(pa, pr)  cx = Mul(ca, cr)  o = Add(px, cx)", "o m s", values), "merge-layout"
    )


def test_double_precision() -> None:
    values = {name: spec.replace("float", "double") for name, spec in TND.items()}
    assert_missed(built(RING_SPELLINGS["slices"], "o m s", values), "dtype")


def test_a_third_attention() -> None:
    model = built(f"{RING_SPELLINGS['slices']} z = Mul(aa, cf)  w = Add(o, z)", "w m s", {**TND, "aa": TND["pa"]})
    _, report = assert_merged(model)
    assert [missed.code for missed in report.missed] == ["merge-weights"]


CONSISTENT = {
    "attentions exchanged": changed("px = Mul(pa, pf)  cx = Mul(ca, cf)", "px = Mul(pa, cf)  cx = Mul(ca, pf)"),
    "sums exchanged": changed("cw = Mul(cs, ce)", "cw = Mul(ps, ce)", changed("pw = Mul(ps, pe)", "pw = Mul(cs, pe)")),
    "one sum for both": changed("cw = Mul(cs, ce)", "cw = Mul(ps, ce)"),
}


@pytest.mark.parametrize("body", CONSISTENT.values(), ids=CONSISTENT)
def test_other_pairs_of_attention_and_statistics_are_merged_as_they_are_paired(body: str) -> None:
    assert_merged(built(body, "o m s", TND))


# --- What is none -----------------------------------------------------------------------------------------------------

OTHERS = {
    "a softmax": "m = ReduceMax<keepdims=1>(pa, last)  d = Sub(pa, m)  e = Exp(d)  s = ReduceSum<keepdims=1>(e, last) "
    " y = Div(e, s)  o = Add(y, ca)",
    "a gate per row": "g = Sigmoid(pl)  px = Mul(g, pa)  h = Sub(unit, g)  cx = Mul(h, ca)  o = Add(px, cx)",
    "a gated linear unit": "d = Sub(pa, ca)  g = Sigmoid(d)  y = Mul(g, pa)  o = Add(y, ca)",
    "a decayed state": "e = Exp(pl)  x = Mul(e, pa)  o = Add(x, ca)",
    "sums alone": "m = Max(pl, cl)  pd = Sub(pl, m)  e = Exp(pd)  cd = Sub(cl, m)  f = Exp(cd)  o = Add(e, f)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_others_are_no_candidates(body: str) -> None:
    values = {"pa": "float[T,4,16]", "ca": "float[T,4,16]", "pl": "float[T,4,1]", "cl": "float[T,4,1]"}
    report = fuse(built(body, "o", values), validate="none")
    assert (report.counts, report.missed) == ({}, [])


def test_a_long_chain_of_sums_takes_linear_time() -> None:
    def seconds(steps: int) -> float:
        body = " ".join(
            f"d{i} = Sub(pl, x{i - 1}) e{i} = Exp(d{i}) y{i} = Mul(h{i - 1}, e{i}) h{i} = Add(y{i}, ca) "
            f"x{i} = Add(x{i - 1}, cl)"
            for i in range(1, steps)
        )
        model = graph(
            f"h0 = Identity(pa) x0 = Identity(cl) {body}",
            f"h{steps - 1}",
            18,
            pa="float[T,4,16]",
            ca="float[T,4,16]",
            pl="float[T,4,1]",
            cl="float[T,4,1]",
        )
        return min(find(model).seconds["match"] for _ in range(2))

    assert seconds(400) < 6 * seconds(100)
