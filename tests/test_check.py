"""Limits: every rule of every operator, with a model that breaks it and one that just meets it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import ascend_onnx
from ascend_onnx.check import RELAX
from ascend_onnx.operator import Operator, Product
from ascend_onnx.operators import OPERATORS
from tests.limits import RELAXED, RULES
from tests.limits.mla_preprocess import PREPROCESS
from tests.limits.mla_prolog_v2_weight_nz import FULL, FULL_KV, PARTIAL, PARTIAL_KV, PROLOG, hidden, tokens
from tests.limits.moe_init_routing_v3 import DROP_PAD, ROUTING
from tests.limits.node import BF16, F16, F32, Change, Described, Node, change
from tests.limits.ring_attention_update_v2 import RING
from tests.limits.sparse_flash_attention import ATTENTION


@pytest.fixture(autouse=True)
def no_lifted_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RELAX, raising=False)


@pytest.mark.parametrize(("node", "rule", "breaking", "meeting"), RULES)
def test_rule(node: Node, rule: str, breaking: Change, meeting: Change) -> None:
    findings = ascend_onnx.check(node.model(**breaking), target=node.target)
    assert rule in {finding.rule for finding in findings}
    assert {(finding.node, finding.operator) for finding in findings} == {("the_node", node.operator)}
    assert ascend_onnx.check(node.model(**meeting), target=node.target) == []


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_every_rule_is_tested(operator: Operator) -> None:
    tested = {(rule, Product(node.target)) for node, rule, *_ in RULES if node.operator == operator.name}
    assert {rule for rule, _ in tested} >= {"missing", "input_type"}
    for constraint in operator.constraints:
        assert any((constraint.rule, product) in tested for product in constraint.products), constraint.rule
        assert constraint.source
        assert constraint.code in (161001, 161002, 561002)


@pytest.mark.parametrize(("node", "bound", "passing", "failing"), RELAXED)
def test_lifted_bound(
    node: Node, bound: str, passing: Change, failing: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lifted, a bound lets any size pass that is the same everywhere; no other bound does, and it lifts no other."""
    operator = OPERATORS[node.operator]
    bounded = {constraint.rule for constraint in operator.constraints if constraint.bound == bound}
    findings = ascend_onnx.check(node.model(**passing), target=node.target)
    assert findings
    assert {finding.rule for finding in findings} <= bounded
    others = sorted({"hidden", "head_dim", "rank"} - {bound})
    monkeypatch.setenv(RELAX, ",".join(others))
    assert ascend_onnx.check(node.model(**passing), target=node.target) == findings
    monkeypatch.setenv(RELAX, bound)
    assert ascend_onnx.check(node.model(**passing), target=node.target) == []
    assert ascend_onnx.check(node.model(**failing), target=node.target) != []


def test_every_bound_is_lifted_in_a_test() -> None:
    bounds = {
        (o.name, constraint.bound) for o in OPERATORS.values() for constraint in o.constraints if constraint.bound
    }
    assert bounds == {(node.operator, bound) for node, bound, *_ in RELAXED}


def test_small_vectors_pass_with_all_bounds_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden size is all that the vectors of MlaProlog change."""
    model = PROLOG.model(hidden(64))
    assert ascend_onnx.check(model, "a2") != []
    monkeypatch.setenv(RELAX, "hidden,head_dim,rank")
    assert ascend_onnx.check(model, "a2") == []


def test_unknown_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RELAX, "hidden,width")
    with pytest.raises(ascend_onnx.InputError, match="takes hidden, head_dim, rank, got hidden, width"):
        ascend_onnx.check(PROLOG.model())


@pytest.mark.parametrize("node", [PROLOG, ATTENTION, ROUTING, RING, PREPROCESS], ids=lambda node: node.operator)
def test_sound_calls_have_no_findings(node: Node) -> None:
    for target in ("any", "a2", "a3"):
        assert ascend_onnx.check(node.model(), target=target) == []


@pytest.mark.parametrize("scenario", [{}, PARTIAL, PARTIAL_KV, FULL, FULL_KV])
def test_every_scenario_of_the_prolog_launches(scenario: Mapping[str, Described]) -> None:
    for dims in (("B", 1), ("T",)):
        given = {name: (scenario.get(name, PROLOG.inputs.get(name)) or ())[0] for name in ("token_x",)}
        changed = {**tokens(*dims), **scenario, "token_x": (given["token_x"], (*dims, 7168))}
        assert ascend_onnx.check(PROLOG.model(changed), target="a3") == []


def test_product_without_the_operator() -> None:
    (finding,) = ascend_onnx.check(PROLOG.model(), target="950")
    assert (finding.rule, finding.code) == ("product", 561112)
    assert "950" in finding.message


def test_a_finding_explains_itself() -> None:
    (finding,) = ascend_onnx.check(PROLOG.model(hidden(2000)), target="a2")
    assert finding.rule == "hidden"
    assert finding.code == 561002
    assert "He" in finding.message
    assert "2000" in finding.message
    assert finding.source.startswith("aclnnMlaPrologV2WeightNz")


@pytest.mark.parametrize("dtype", [F16, F32])
def test_types_of_the_cpu_are_161002_on_every_product(dtype: ir.DataType) -> None:
    changed = {name: (dtype if d == BF16 else d, shape) for name, (d, shape) in PROLOG.inputs.items()}
    for target in ("a2", "a3"):
        findings = ascend_onnx.check(PROLOG.model(changed), target=target)
        assert [(finding.rule, finding.code) for finding in findings] == [("type", 161002)]
    (finding,) = ascend_onnx.check(PROLOG.model(changed), target="any")
    assert finding.rule == "type"
    assert "(on" not in finding.message


def test_any_is_satisfied_by_one_product() -> None:
    only_950 = change(quant_mode=2)
    assert ascend_onnx.check(ROUTING.model(**only_950), target="any") == []
    assert ascend_onnx.check(ROUTING.model(**only_950), target="a2") != []


def test_any_names_the_products_of_a_limit() -> None:
    findings = ascend_onnx.check(ROUTING.model(**change(quant_mode=2, **DROP_PAD)), target="any")
    assert {finding.rule for finding in findings} == {"quant_mode", "drop_pad_mode"}
    assert all("a2, a3" in finding.message or "950" in finding.message for finding in findings)


def test_unknown_target() -> None:
    with pytest.raises(ascend_onnx.InputError, match="any, a2, a3, 950, got 'a5'"):
        ascend_onnx.check(PROLOG.model(), target="a5")


def test_model_forms_agree(tmp_path: Path) -> None:
    model = PROLOG.model(hidden(2000))
    proto = ir.to_proto(model)
    for value, rank in zip(proto.graph.output, (4, 4, 4, 4), strict=True):
        value.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.BFLOAT16, [None] * rank))
    onnx.save(proto, tmp_path / "model.onnx")
    expected = ascend_onnx.check(model, "a2")
    assert len(expected) == 1
    assert ascend_onnx.check(proto, "a2") == expected
    assert ascend_onnx.check(tmp_path / "model.onnx", "a2") == expected
    assert ascend_onnx.check(str(tmp_path / "model.onnx"), "a2") == expected


def test_untyped_values_are_inferred_and_the_model_stays() -> None:
    proto = ir.to_proto(PROLOG.model(hidden(2000)))
    proto.graph.node.insert(0, helper.make_node("Neg", ["x"], ["token_x"]))
    proto.graph.input[0].name = "x"
    before = proto.SerializeToString(deterministic=True)
    model = ir.from_proto(proto)
    assert [finding.rule for finding in ascend_onnx.check(model, "a2")] == ["hidden"]
    assert model.graph[0].outputs[0].dtype is None
    assert [finding.rule for finding in ascend_onnx.check(proto, "a2")] == ["hidden"]
    assert proto.SerializeToString(deterministic=True) == before


def test_nodes_in_subgraphs_are_checked() -> None:
    inner = PROLOG.model(hidden(2000))
    outputs = list(inner.graph.outputs)
    proto = ir.to_proto(inner)
    for value in proto.graph.output:
        value.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.BFLOAT16, [None] * 4))
    branch = helper.make_graph(proto.graph.node, "branch", [], proto.graph.output)
    choose = helper.make_node(
        "If", ["choose"], [f"r_{v.name}" for v in outputs], then_branch=branch, else_branch=branch
    )
    condition = helper.make_tensor_value_info("choose", onnx.TensorProto.BOOL, [])
    results = [onnx.ValueInfoProto(name=f"r_{v.name}", type=v.type) for v in proto.graph.output]
    graph = helper.make_graph([choose], "outer", [*proto.graph.input, condition], results)
    outer = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10)
    assert [finding.rule for finding in ascend_onnx.check(outer, "a2")] == ["hidden", "hidden"]


def test_attached_bodies_change_nothing() -> None:
    model = ascend_onnx.attach_functions(PROLOG.model(hidden(2000)))
    assert [finding.rule for finding in ascend_onnx.check(model, "a2")] == ["hidden"]


def test_an_operator_that_the_domain_lacks() -> None:
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    node = helper.make_node("MlaProlog", ["x"], ["y"], "the_node", domain="ai.ascend")
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.ascend", 1)]
    (finding,) = ascend_onnx.check(helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets))
    assert (finding.node, finding.rule, finding.code) == ("the_node", "operator", 561112)
    assert "ai.ascend has no operator MlaProlog; it has MlaPreprocess, MlaPrologV2WeightNz" in finding.message
