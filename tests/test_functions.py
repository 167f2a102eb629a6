"""Bodies: which one a node gets, what a model looks like with and without them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper
from onnxscript import build_function

import ascend_onnx
from ascend_onnx.functions import specialise
from ascend_onnx.operator import DOMAIN, Call, Tensor
from ascend_onnx.operators import OPERATORS
from tests.cases import ALL_CASES, case_called
from tests.cases.case import Case
from tests.operators.harness import model_of, run_body, run_reference, to_ort

CASES = {
    str(case): case
    for case in ALL_CASES
    if str(case)
    in {
        "MlaPrologV2WeightNz-pa_bsnd_some_skipped",
        "SparseFlashAttention-batch_2_by_33",
        "MoeInitRoutingV3-active_13_rows1",
    }
}
PROLOG = CASES["MlaPrologV2WeightNz-pa_bsnd_some_skipped"]
ROUTING = CASES["MoeInitRoutingV3-active_13_rows1"]
ATTENTION = CASES["SparseFlashAttention-batch_2_by_33"]


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy


def state_ranks(proto: onnx.ModelProto, case: Case) -> None:
    """Give the outputs shapes of unknown dimensions, which the checker asks for."""
    for output in proto.graph.output:
        rank = case.expected[output.name].value.ndim
        output.type.tensor_type.shape.SetInParent()
        output.type.tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in range(rank))


def run(proto: onnx.ModelProto, inputs: Mapping[str, Any]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = session.run_with_ort_values(names, {name: to_ort(array) for name, array in inputs.items()})
    return {name: value.numpy() for name, value in zip(names, results, strict=True)}


def overloads(model: ir.Model) -> set[str]:
    return {overload for domain, _, overload in model.functions if domain == DOMAIN}


def call_of(case: Case) -> Call:
    model = ir.from_proto(model_of(case, symbolic=True))
    return OPERATORS[case.operator].call(model.graph[0])


@pytest.mark.parametrize("opset", [17, 18, 20, 23, 25])
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_body_equals_the_reference(case: Case, opset: int) -> None:
    model = model_of(case, symbolic=True, opset=opset)
    expected = run_reference(model, case.inputs)
    for name, array in run_body(model, case.inputs).items():
        tolerance = 0 if array.dtype.kind == "i" else 2e-5 * float(np.abs(expected[name]).max(initial=0))
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_checker_and_strict_inference_accept_bodies(case: Case, registered: bool) -> None:
    proto = ascend_onnx.attach_functions(model_of(case, symbolic=False))
    state_ranks(proto, case)
    if registered:
        ascend_onnx.register()
    try:
        onnx.checker.check_model(proto, full_check=True)
        onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    finally:
        ascend_onnx.unregister()


def test_model_forms_agree(tmp_path: Path) -> None:
    bare = model_of(PROLOG, symbolic=True)
    state_ranks(bare, PROLOG)
    proto, model, path = copied(bare), ir.from_proto(bare), tmp_path / "model.onnx"
    onnx.save(bare, path)
    before = path.read_bytes()

    assert ascend_onnx.attach_functions(proto) is proto
    assert ascend_onnx.attach_functions(model) is model
    from_path = ascend_onnx.attach_functions(path)

    assert path.read_bytes() == before
    assert overloads(ir.from_proto(proto)) == overloads(model) == overloads(from_path)
    assert len(overloads(model)) == 1
    results = [run(form, PROLOG.inputs) for form in (proto, ir.to_proto(model), ir.to_proto(from_path))]
    for name in results[0]:
        assert all(np.array_equal(results[0][name], result[name]) for result in results)


def test_attached_model_imports_the_domain_and_has_overloads() -> None:
    bare = model_of(ROUTING, symbolic=True)
    bare.ir_version = 8
    del bare.opset_import[1:]
    proto = ascend_onnx.attach_functions(bare)
    assert proto.ir_version == 10
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": 18, DOMAIN: 1}
    assert proto.functions[0].overload == proto.graph.node[0].overload != ""


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_strip_undoes_attach(case: Case) -> None:
    bare = model_of(case, symbolic=True)
    proto = ascend_onnx.attach_functions(copied(bare))
    assert proto != bare
    assert ascend_onnx.strip_functions(proto) == bare
    model = ascend_onnx.strip_functions(ascend_onnx.attach_functions(ir.from_proto(bare)))
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(bare))


def test_attach_twice_is_attach_once() -> None:
    once = ascend_onnx.attach_functions(model_of(ROUTING, symbolic=True))
    assert ascend_onnx.attach_functions(copied(once)) == once


def test_stale_bodies_are_replaced() -> None:
    model = ascend_onnx.attach_functions(ir.from_proto(model_of(ROUTING, symbolic=True)))
    before = overloads(model)
    model.graph[0].attributes.add(ir.AttrInt64("row_idx_type", 0))
    after = overloads(ascend_onnx.attach_functions(model))
    assert len(before) == len(after) == 1
    assert before != after


def test_other_functions_stay() -> None:
    proto = model_of(ROUTING, symbolic=True)
    other = helper.make_function("other", "Same", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])], [])
    proto.functions.append(other)
    ascend_onnx.attach_functions(proto)
    ascend_onnx.strip_functions(proto)
    assert [(function.domain, function.name) for function in proto.functions] == [("other", "Same")]


def two_layers(first: Mapping[str, Any], second: Mapping[str, Any]) -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["tokens", 8]))
    experts = ir.Value(name="experts", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["tokens", 2]))
    operator, nodes = OPERATORS["MoeInitRoutingV3"], []
    for attributes in (first, second):
        nodes.append(operator.node({"x": x, "expert_idx": experts}, ["expanded_x", "expanded_row_idx"], attributes))
    outputs = [output for node in nodes for output in node.outputs]
    for number, output in enumerate(outputs):
        output.name = f"out_{number}"
    return ir.Model(ir.Graph([x, experts], outputs, nodes=nodes, opset_imports={"": 18}, name="two"), ir_version=10)


def test_equal_configurations_share_a_body() -> None:
    same = ascend_onnx.attach_functions(two_layers({"expert_num": 4}, {"expert_num": 4}))
    assert len(overloads(same)) == 1
    other = ascend_onnx.attach_functions(two_layers({"expert_num": 4}, {"expert_num": 4, "row_idx_type": 1}))
    assert len(overloads(other)) == 2
    inputs = {
        "x": np.arange(24, dtype=np.float32).reshape(3, 8),
        "experts": np.array([[3, 0], [1, 0], [0, 2]], np.int32),
    }
    results = run(ir.to_proto(other), inputs)
    assert np.array_equal(results["out_0"], results["out_2"])
    assert np.array_equal(np.argsort(results["out_1"]), results["out_3"])


def test_bodies_are_built_once() -> None:
    assert specialise(call_of(PROLOG), 18) is specialise(call_of(PROLOG), 18)
    assert specialise(call_of(PROLOG), 18) is not specialise(call_of(PROLOG), 19)


def test_a_model_cannot_spoil_the_bodies_of_another() -> None:
    first = ascend_onnx.attach_functions(ir.from_proto(model_of(ROUTING, symbolic=True)))
    (body,) = first.functions.values()
    body.name = "Spoilt"
    second = ascend_onnx.attach_functions(ir.from_proto(model_of(ROUTING, symbolic=True)))
    assert [function.name for function in second.functions.values()] == ["MoeInitRoutingV3"]


def test_attributes_of_the_node_reach_the_body() -> None:
    """Two epsilons, one body."""
    expected: dict[float, Any] = {}
    names = set()
    for epsilon in (1e-5, 3.0):
        proto = model_of(PROLOG, symbolic=True)
        (node,) = proto.graph.node
        del node.attribute[:]
        node.attribute.extend(
            [
                helper.make_attribute("rmsnorm_epsilon_cq", epsilon),
                helper.make_attribute("rmsnorm_epsilon_ckv", epsilon),
            ]
        )
        names |= overloads(ascend_onnx.attach_functions(ir.from_proto(proto)))
        expected[epsilon] = run_reference(proto, PROLOG.inputs)["query"]
        np.testing.assert_allclose(run_body(proto, PROLOG.inputs)["query"], expected[epsilon], rtol=1e-4, atol=1e-4)
    assert len(names) == 1
    assert not np.allclose(expected[1e-5], expected[3.0], rtol=1e-2)


def in_both_branches(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The node of a single-node model in the branches of an If, the second one under another configuration."""
    (node,) = proto.graph.node
    branches = []
    for branch in ("then", "else"):
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        del inner.output[:]
        inner.output.extend(f"{branch}_{name}" for name in node.output)
        if branch == "else":
            inner.attribute.append(helper.make_attribute("row_idx_type", 0))
        outputs = []
        types = {output.name: output.type for output in proto.graph.output}
        for name, inner_name in zip(node.output, inner.output, strict=True):
            outputs.append(onnx.ValueInfoProto(name=inner_name, type=types[name]))
        branches.append(helper.make_graph([inner], branch, [], outputs))
    choose = helper.make_node("If", ["choose"], list(node.output), then_branch=branches[0], else_branch=branches[1])
    condition = helper.make_tensor_value_info("choose", onnx.TensorProto.BOOL, [])
    graph = helper.make_graph([choose], "branches", [*proto.graph.input, condition], proto.graph.output)
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10)


def test_nodes_in_subgraphs() -> None:
    plain = model_of(ROUTING, symbolic=True)
    for attribute in list(plain.graph.node[0].attribute):
        if attribute.name == "row_idx_type":
            plain.graph.node[0].attribute.remove(attribute)
    proto = ascend_onnx.attach_functions(in_both_branches(plain))
    inner = [attribute.g.node[0] for attribute in proto.graph.node[0].attribute]
    assert all(node.overload for node in inner)
    expected = run_body(plain, ROUTING.inputs)
    for choose in (True, False):
        results = run(proto, {**ROUTING.inputs, "choose": np.array(choose)})
        for name, array in expected.items():
            assert np.array_equal(results[name], array)
    assert not any(
        attribute.g.node[0].overload for attribute in ascend_onnx.strip_functions(proto).graph.node[0].attribute
    )


def behind(operator: str) -> onnx.ModelProto:
    """A routing whose x comes out of another node, of which the model states no type."""
    proto = model_of(ROUTING, symbolic=True)
    proto.graph.node[0].input[0] = "untyped"
    proto.graph.node.insert(
        0, helper.make_node(operator, ["x"], ["untyped"], domain="" if operator == "Neg" else "far")
    )
    if operator != "Neg":
        proto.opset_import.append(helper.make_opsetid("far", 1))
    return proto


def test_types_are_inferred() -> None:
    negated = {**ROUTING.inputs, "x": -ROUTING.inputs["x"]}
    expected = run_body(model_of(ROUTING, symbolic=True), negated)
    for name, array in run_body(behind("Neg"), ROUTING.inputs).items():
        assert np.array_equal(array, expected[name])


def test_types_that_cannot_be_inferred() -> None:
    with pytest.raises(ascend_onnx.InputError, match=r"'untyped'.*value_info"):
        ascend_onnx.attach_functions(behind("Unknown"))


def test_unnamed_outputs() -> None:
    """An output that is not wanted: in the middle it keeps its place, at the end it goes."""
    model = ir.from_proto(model_of(PROLOG, symbolic=True))
    node = model.graph[0]
    del model.graph.outputs[3]
    del model.graph.outputs[1]
    node.outputs[1].name = node.outputs[3].name = ""
    ascend_onnx.attach_functions(model)
    assert len(node.outputs) == 3
    (body,) = model.functions.values()
    assert len(body.outputs) == 3
    results, expected = (
        run(ir.to_proto(model), PROLOG.inputs),
        run_reference(model_of(PROLOG, symbolic=True), PROLOG.inputs),
    )
    assert set(results) == {"query", "kv_cache_out"}
    np.testing.assert_allclose(results["query"], expected["query"], rtol=1e-4, atol=1e-4)


def test_model_without_nodes_of_the_domain_is_left_alone() -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "plain",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    assert ascend_onnx.attach_functions(copied(plain)) == plain


def test_a_refused_model_keeps_its_bodies() -> None:
    model = ascend_onnx.attach_functions(two_layers({"expert_num": 4}, {"expert_num": 4}))
    before = ir.to_proto(model)
    model.graph[1].attributes.pop("expert_num")
    with pytest.raises(ascend_onnx.InputError, match="requires expert_num"):
        ascend_onnx.attach_functions(model)
    model.graph[1].attributes.add(ir.AttrInt64("expert_num", 4))
    assert ir.to_proto(model) == before


def test_old_opset_names_the_converter() -> None:
    with pytest.raises(ascend_onnx.InputError, match=r"17 .*16.*onnx\.version_converter"):
        ascend_onnx.attach_functions(model_of(ROUTING, symbolic=True, opset=16))


def with_inputs(case: Case, change: Callable[[dict[str, Tensor]], None], **attributes: Any) -> Call:
    call = call_of(case)
    inputs = dict(call.inputs)
    change(inputs)
    return Call(call.operator, inputs, call.outputs, {**call.attributes, **attributes})


def int8(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(inputs: dict[str, Tensor]) -> None:
        for name in names:
            inputs[name] = Tensor(ir.DataType.INT8, inputs[name].shape)

    return change


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (with_inputs(PROLOG, lambda inputs: inputs.pop("weight_uk") and None), "requires weight_uk"),
        (with_inputs(PROLOG, lambda inputs: None, cache_mode="PA_NBSD"), "PA_BSND, PA_NZ, got PA_NBSD"),
        (with_inputs(PROLOG, int8("weight_uq_qr")), "needs the input dequant_scale_w_uq_qr"),
        (with_inputs(PROLOG, int8("kv_cache")), "needs the input quant_scale_ckv"),
        (with_inputs(PROLOG, int8("token_x")), "must be int8 together"),
        (with_inputs(PROLOG, int8("cache_index")), "cache_index of MlaPrologV2WeightNz must be one of int64, got int8"),
        (with_inputs(ROUTING, lambda inputs: None, experts=8), "has no attribute experts"),
        (with_inputs(ROUTING, lambda inputs: None, row_idx_type=2), "row_idx_type must be 0 or 1, got 2"),
        (with_inputs(ROUTING, lambda inputs: None, active_expert_range=(1,)), r"must be \[start, end\]"),
        (with_inputs(ROUTING, lambda inputs: None, drop_pad_mode=1), "expert_capacity must be from 1"),
        (with_inputs(ROUTING, lambda inputs: None, quant_mode=0), "scale must be given with quant_mode 0"),
        (with_inputs(ATTENTION, lambda inputs: None, layout_kv="PA_BSND"), "block_table must be given"),
    ],
)
def test_refused_calls(call: Call, sentence: str) -> None:
    with pytest.raises(ascend_onnx.InputError, match=sentence):
        specialise(call, 18)


def test_a_body_that_is_known_hides_no_refusal() -> None:
    """Both calls have one overload, but the second lacks a scale."""
    case = case_called("MlaPrologV2WeightNz-partial_quant_pa_bsnd_th")
    call = call_of(case)
    specialise(call, 18)
    lacking = {name: tensor for name, tensor in call.inputs.items() if name != "dequant_scale_w_uq_qr"}
    with pytest.raises(ascend_onnx.InputError, match="needs the input dequant_scale_w_uq_qr"):
        specialise(Call(call.operator, lacking, call.outputs, call.attributes), 18)


@pytest.mark.parametrize(("mode", "opset", "needed"), [(2, 18, 24), (3, 23, 24)])
def test_float8_needs_a_newer_opset(mode: int, opset: int, needed: int) -> None:
    call = with_inputs(ROUTING, lambda inputs: inputs.pop("scale", None), quant_mode=mode)
    outputs = ("expanded_x", "expanded_row_idx", "expanded_scale")
    with pytest.raises(ascend_onnx.InputError, match=f"opset {needed}"):
        specialise(Call(call.operator, call.inputs, outputs, call.attributes), opset)


def test_one_name_means_one_body() -> None:
    """Cases whose calls have the same overload trace the same body."""
    bodies: dict[tuple[str, str, int], onnx.FunctionProto] = {}
    for case in ALL_CASES[::3]:
        call = call_of(case)
        function = build_function(
            call.operator.body(call),
            [
                ir.Value(name=i.name, type=ir.TensorType(dtype)) if (dtype := call.input(i.name).dtype) else None
                for i in call.operator.inputs
            ],
            domain=DOMAIN,
            name=case.operator,
            opset_imports={"": case.opset},
        )
        key = (case.operator, call.operator.overload(call), case.opset)
        traced = ir.to_proto(function)
        assert bodies.setdefault(key, traced).node == traced.node, key
