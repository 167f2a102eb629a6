"""`from ascend_onnx import op`: the domain inside onnxscript functions."""

# ruff: noqa: F821, UP037 - names of dimensions in onnxscript's annotations are strings, not forward references

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx import defs
from onnxscript import FLOAT, INT32, INT64, OnnxFunction, opset18, script
from onnxscript.values import Opset

import ascend_onnx
from ascend_onnx import op
from ascend_onnx.operator import DOMAIN, VERSION
from ascend_onnx.operators import OPERATORS


@script()
def routed(x: FLOAT["tokens", 64], scores: FLOAT["tokens", 8]):
    count = opset18.Constant(value_ints=[2])
    _best, experts = opset18.TopK(scores, count)
    expert_idx = opset18.Cast(experts, to=6)
    expanded_x, row_idx, counts = op.MoeInitRoutingV3(
        x, expert_idx, expert_num=8, expert_tokens_num_flag=1, active_expert_range=[2, 6]
    )
    return expanded_x, row_idx, counts


@script(opset_version=18)
def attended(
    query: FLOAT["B", "S", 4, 512],
    latents: FLOAT["B", "P", 1, 512],
    indices: INT32["B", "S", 1, 8],
    query_rope: FLOAT["B", "S", 4, 64],
    key_rope: FLOAT["B", "P", 1, 64],
):
    return op.SparseFlashAttention(
        query, latents, latents, indices, None, None, None, query_rope, key_rope, scale_value=0.5, layout_query="BSND"
    )


@script(opset_version=18)
def merged(
    out: FLOAT["T", 4, 128], softmax_max: FLOAT["T", 4, 8], softmax_sum: FLOAT["T", 4, 8], lengths: INT64["batches"]
):
    a, b, c = op.RingAttentionUpdateV2(
        out, softmax_max, softmax_sum, out, softmax_max, softmax_sum, actual_seq_qlen=lengths, input_layout="TND"
    )
    return a, b, c


def node_of(function: OnnxFunction[..., Any]) -> onnx.NodeProto:
    (node,) = [node for node in function.to_model_proto().graph.node if node.domain == DOMAIN]
    return node


def test_it_is_an_opset() -> None:
    assert isinstance(op, Opset)
    assert (op.domain, op.version) == (DOMAIN, VERSION)
    assert set(OPERATORS) <= set(dir(op))
    assert all(name in op for name in OPERATORS)
    assert "Relu" not in op


def test_no_registration_is_needed() -> None:
    ascend_onnx.unregister()
    assert not defs.has("MoeInitRoutingV3", DOMAIN)
    assert op.MoeInitRoutingV3.op_schema is not None


def test_attributes_go_by_name_and_keep_their_defaults() -> None:
    node = node_of(routed)
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert given == {"expert_num": 8, "expert_tokens_num_flag": 1, "active_expert_range": [2, 6]}


def test_absent_inputs_keep_their_places() -> None:
    assert list(node_of(attended).input) == [
        *("query", "latents", "latents", "indices", "", "", "", "query_rope", "key_rope")
    ]


def test_the_first_optional_input_may_be_named() -> None:
    assert list(node_of(merged).input)[-1] == "lengths"


@pytest.mark.parametrize("function", [routed, attended, merged], ids=lambda function: function.name)
def test_model_runs_once_bodies_are_attached(function: OnnxFunction[..., Any]) -> None:
    model = ascend_onnx.attach_functions(function.to_model_proto())
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 18, DOMAIN: 1}
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def unknown_operator() -> None:
    @script()
    def function(x: FLOAT["tokens", 64]):
        return op.MoeInitRouting(x)


def unknown_attribute() -> None:
    @script()
    def function(x: FLOAT["tokens", 64], expert_idx: INT32["tokens", 8]):
        a, b = op.MoeInitRoutingV3(x, expert_idx, experts=64)
        return a, b


def input_behind_a_gap_by_name() -> None:
    """onnxscript would put `offset` into the place of `scale`."""

    @script()
    def function(x: FLOAT["tokens", 64], expert_idx: INT32["tokens", 8], o: FLOAT[1]):
        a, b = op.MoeInitRoutingV3(x, expert_idx, offset=o, expert_num=64, quant_mode=0)
        return a, b


@pytest.mark.parametrize(
    ("define", "error", "message"),
    [
        (unknown_operator, AttributeError, "no operator MoeInitRouting, but .*MoeInitRoutingV3"),
        (unknown_attribute, TypeError, "experts"),
        (input_behind_a_gap_by_name, TypeError, "offset"),
    ],
)
def test_mistakes_are_found_in_the_script(define: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        define()
