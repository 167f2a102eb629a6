"""Limits: every rule of every operator, with a model that breaks it and one that just meets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import ascend_onnx
from ascend_onnx.operator import DOMAIN, Dim, Operator, Product
from ascend_onnx.operators import OPERATORS

BF16, F16, F32, I8, I32, I64 = (
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT16,
    ir.DataType.FLOAT,
    ir.DataType.INT8,
    ir.DataType.INT32,
    ir.DataType.INT64,
)
Described = tuple[ir.DataType, tuple[Dim, ...]]


@dataclass(frozen=True)
class Node:
    """One call that a product accepts, to be changed: `inputs` and `attributes` of None are taken away."""

    operator: str
    inputs: Mapping[str, Described]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    target: str = "a2"

    def model(
        self,
        inputs: Mapping[str, Described | None] | None = None,
        attributes: Mapping[str, Any] | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> ir.Model:
        operator = OPERATORS[self.operator]
        described = {n: d for n, d in {**self.inputs, **(inputs or {})}.items() if d is not None}
        values = {n: ir.Value(name=n, type=ir.TensorType(d), shape=ir.Shape(s)) for n, (d, s) in described.items()}
        given = {n: v for n, v in {**self.attributes, **(attributes or {})}.items() if v is not None}
        wanted = self.outputs if outputs is None else outputs
        names = [o.name if o.name in wanted else "" for o in operator.outputs]
        node = ir.Node(
            DOMAIN,
            self.operator,
            [values.get(declared.name) for declared in operator.inputs],
            ir.convenience.convert_attributes(given),
            num_outputs=len(names),
            name="the_node",
        )
        for value, name in zip(node.outputs, names, strict=True):
            value.name = name
        results = [value for value in node.outputs if value.name]
        graph = ir.Graph(list(values.values()), results, nodes=[node], opset_imports={"": 18, DOMAIN: 1}, name="one")
        return ir.Model(graph, ir_version=10)


def renamed(**changes: Described | None) -> Mapping[str, Described | None]:
    return changes


PROLOG = Node(
    "MlaPrologV2WeightNz",
    {
        "token_x": (BF16, ("B", 1, 7168)),
        "weight_dq": (BF16, (7168, 1536)),
        "weight_uq_qr": (BF16, (1536, 6144)),
        "weight_uk": (BF16, (32, 128, 512)),
        "weight_dkv_kr": (BF16, (7168, 576)),
        "rmsnorm_gamma_cq": (BF16, (1536,)),
        "rmsnorm_gamma_ckv": (BF16, (512,)),
        "rope_sin": (BF16, ("B", 1, 64)),
        "rope_cos": (BF16, ("B", 1, 64)),
        "cache_index": (I64, ("B", 1)),
        "kv_cache": (BF16, ("blocks", 128, 1, 512)),
        "kr_cache": (BF16, ("blocks", 128, 1, 64)),
    },
    ("query", "query_rope", "kv_cache_out", "kr_cache_out"),
)
PARTIAL = {"weight_uq_qr": (I8, (1536, 6144)), "dequant_scale_w_uq_qr": (F32, (1, 6144))}
PARTIAL_KV = {
    **PARTIAL,
    "kv_cache": (I8, ("blocks", 128, 1, 512)),
    "kr_cache": (I8, ("blocks", 128, 1, 64)),
    "quant_scale_ckv": (F32, (1, 512)),
    "quant_scale_ckr": (F32, (1, 64)),
}
FULL = {
    **PARTIAL,
    "token_x": (I8, ("B", 1, 7168)),
    "weight_dq": (I8, (7168, 1536)),
    "weight_dkv_kr": (I8, (7168, 576)),
    "dequant_scale_x": (F32, ("B*1", 1)),
    "dequant_scale_w_dq": (F32, (1, 1536)),
    "dequant_scale_w_dkv_kr": (F32, (1, 576)),
}
FULL_KV = {**FULL, "kv_cache": (I8, ("blocks", 128, 1, 512)), "quant_scale_ckv": (F32, (1, 512))}
ALL_PROLOG_OUTPUTS = (*PROLOG.outputs, "dequant_scale_q_nope")


def hidden(size: int) -> dict[str, Described]:
    return {
        "token_x": (BF16, ("B", 1, size)),
        "weight_dq": (BF16, (size, 1536)),
        "weight_dkv_kr": (BF16, (size, 576)),
    }


def heads(count: int) -> dict[str, Described]:
    return {"weight_uk": (BF16, (count, 128, 512)), "weight_uq_qr": (BF16, (1536, count * 192))}


def tokens(*dims: Dim) -> dict[str, Described]:
    return {
        "token_x": (BF16, (*dims, 7168)),
        "rope_sin": (BF16, (*dims, 64)),
        "rope_cos": (BF16, (*dims, 64)),
        "cache_index": (I64, dims),
    }


def caches(block_size: int) -> dict[str, Described]:
    return {"kv_cache": (BF16, (4, block_size, 1, 512)), "kr_cache": (BF16, (4, block_size, 1, 64))}


ATTENTION = Node(
    "SparseFlashAttention",
    {
        "query": (F16, ("B", "S", 16, 512)),
        "key": (F16, ("B", "P", 1, 512)),
        "value": (F16, ("B", "P", 1, 512)),
        "sparse_indices": (I32, ("B", "S", 1, 2048)),
        "query_rope": (F16, ("B", "S", 16, 64)),
        "key_rope": (F16, ("B", "P", 1, 64)),
    },
    ("attention_out",),
    {"scale_value": 0.04},
)
PAGED = {
    "key": (F16, ("pages", 128, 1, 512)),
    "value": (F16, ("pages", 128, 1, 512)),
    "key_rope": (F16, ("pages", 128, 1, 64)),
    "block_table": (I32, ("B", "most")),
    "actual_seq_lengths_kv": (I32, ("B",)),
}


def pages(size: int) -> dict[str, Described]:
    changed = {
        name: (F16, ("pages", size, 1, 64 if name == "key_rope" else 512)) for name in ("key", "value", "key_rope")
    }
    return {**PAGED, **changed}


ROUTING = Node(
    "MoeInitRoutingV3",
    {"x": (BF16, (32, 7168)), "expert_idx": (I32, (32, 8))},
    ("expanded_x", "expanded_row_idx", "expert_tokens_count_or_cumsum"),
    {"expert_num": 256, "expert_tokens_num_flag": 1, "expert_tokens_num_type": 1},
)
ROUTING_950 = replace(ROUTING, target="950")
ATTENTION_950 = replace(ATTENTION, target="950")
STATIC = {"scale": (F32, (1,)), "offset": (F32, (1,))}


def query_heads(count: int) -> dict[str, Described]:
    return {"query": (F16, ("B", "S", count, 512)), "query_rope": (F16, ("B", "S", count, 64))}


def lists_for(tokens: int, lists: int) -> dict[str, Described]:
    return {
        "query": (F16, (1, tokens, 16, 512)),
        "query_rope": (F16, (1, tokens, 16, 64)),
        "sparse_indices": (I32, (1, lists, 1, 2048)),
    }


DROP_PAD = {"drop_pad_mode": 1, "expert_capacity": 4}
Change = dict[str, Any]


def change(
    inputs: Mapping[str, Described | None] | None = None, outputs: tuple[str, ...] | None = None, **attributes: Any
) -> Change:
    return {"inputs": inputs, "outputs": outputs, "attributes": attributes}


RULES: list[tuple[Node, str, Change, Change]] = [
    # node, rule, what breaks it, what just meets it
    (PROLOG, "type", change(renamed(rope_sin=(F16, ("B", 1, 64)))), change()),
    (PROLOG, "type", change(renamed(weight_uk=(F32, (32, 128, 512)))), change()),
    (PROLOG, "scenario", change({**PARTIAL_KV, "kr_cache": (BF16, ("blocks", 128, 1, 64))}), change(PARTIAL_KV)),
    (PROLOG, "scenario", change({**FULL_KV, "kr_cache": (I8, ("blocks", 128, 1, 64))}), change(FULL_KV)),
    (PROLOG, "scale", change({**PARTIAL, "dequant_scale_w_uq_qr": None}), change(PARTIAL)),
    (
        PROLOG,
        "scale",
        change(renamed(smooth_scales_cq=(F32, (1, 1536)))),
        change({**PARTIAL, "smooth_scales_cq": (F32, (1, 1536))}),
    ),
    (PROLOG, "scale", change({**FULL_KV, "quant_scale_ckr": (F32, (1, 64))}), change(FULL_KV)),
    (PROLOG, "scale_shape", change({**PARTIAL, "dequant_scale_w_uq_qr": (F32, (6144,))}), change(PARTIAL)),
    (PROLOG, "scale_shape", change({**FULL, "dequant_scale_w_dq": (F32, (1, 1535))}), change(FULL)),
    (PROLOG, "rank", change(renamed(cache_index=(I64, ("B",)))), change()),
    (
        PROLOG,
        "rank",
        change(renamed(weight_dq=(BF16, (7168, 96, 16)))),
        change(renamed(weight_dq=(BF16, (96, 448, 16, 16)))),
    ),
    (PROLOG, "rank", change(renamed(token_x=(BF16, (1, "B", 1, 7168)))), change(tokens("T"))),
    (PROLOG, "tokens", change({**tokens(8, 1), "rope_cos": (BF16, (8, 2, 64))}), change(tokens(8, 1))),
    (PROLOG, "tokens", change({**tokens(8), "cache_index": (I64, (7,))}), change(tokens(8))),
    (PROLOG, "sizes", change({**hidden(6144), "weight_dkv_kr": (BF16, (7168, 576))}), change(hidden(6144))),
    (PROLOG, "sizes", change({**caches(64), "kr_cache": (BF16, (4, 128, 1, 64))}), change(caches(64))),
    (
        PROLOG,
        "empty_input",
        change({**heads(1), "weight_uk": (BF16, (0, 128, 512))}),
        change({**heads(1), **tokens(0, 0)}),
    ),
    (PROLOG, "token_count", change(tokens(1048577)), change(tokens(1048576))),
    (PROLOG, "token_count", change(tokens(65537, 1)), change(tokens(65536, 1))),
    (PROLOG, "hidden", change(hidden(8704)), change(hidden(8192))),
    (PROLOG, "heads", change(heads(24)), change(heads(128))),
    (PROLOG, "hcq", change(renamed(rmsnorm_gamma_cq=(BF16, (1024,)))), change()),
    (
        PROLOG,
        "hcq",
        change(renamed(weight_uq_qr=(BF16, (384, 64, 16, 16)))),
        change(renamed(weight_uq_qr=(BF16, (384, 96, 16, 16)))),
    ),
    (PROLOG, "hckv", change(renamed(rmsnorm_gamma_ckv=(BF16, (256,)))), change()),
    (PROLOG, "head_dim", change(renamed(weight_uk=(BF16, (32, 192, 512)))), change()),
    (PROLOG, "rope_dim", change(renamed(rope_sin=(BF16, ("B", 1, 32)))), change()),
    (PROLOG, "query_width", change(renamed(weight_uq_qr=(BF16, (1536, 6143)))), change()),
    (PROLOG, "kv_width", change(renamed(weight_dkv_kr=(BF16, (7168, 640)))), change()),
    (PROLOG, "kv_heads", change(renamed(kv_cache=(BF16, (4, 128, 2, 512)))), change()),
    (PROLOG, "block_size", change(caches(8)), change(caches(16))),
    (PROLOG, "block_size", change(caches(1040)), change(caches(1024))),
    (PROLOG, "attribute_value", change(cache_mode="BNSD"), change(cache_mode="PA_NZ")),
    (PROLOG, "missing", change(renamed(weight_uk=None)), change()),
    (PROLOG, "input_type", change(renamed(cache_index=(I32, ("B", 1)))), change()),
    (PROLOG, "unproduced_output", change(FULL, ALL_PROLOG_OUTPUTS), change(FULL_KV, ALL_PROLOG_OUTPUTS)),
    (ATTENTION, "type", change(renamed(key=(BF16, ("B", "P", 1, 512)))), change()),
    (ATTENTION, "missing_input", change(renamed(query_rope=None)), change()),
    (
        ATTENTION,
        "missing_input",
        change({**PAGED, "block_table": None}, layout_kv="PA_BSND"),
        change(PAGED, layout_kv="PA_BSND"),
    ),
    (ATTENTION, "layouts", change(layout_kv="TND"), change()),
    (ATTENTION, "block_table", change(renamed(block_table=(I32, ("B", 4)))), change(PAGED, layout_kv="PA_BSND")),
    (ATTENTION, "sparse_block_size", change(sparse_block_size=256), change(sparse_block_size=128)),
    (ATTENTION, "sparse_block_size", change(sparse_block_size=3), change(sparse_block_size=2)),
    (ATTENTION_950, "sparse_block_size_950", change(sparse_block_size=2), change()),
    (ATTENTION, "block_size", change(pages(8), layout_kv="PA_BSND"), change(pages(16), layout_kv="PA_BSND")),
    (ATTENTION, "block_size", change(pages(1040), layout_kv="PA_BSND"), change(pages(1024), layout_kv="PA_BSND")),
    (
        ATTENTION,
        "block_size",
        change(pages(16), layout_kv="PA_BSND", sparse_block_size=32),
        change(pages(32), layout_kv="PA_BSND", sparse_block_size=32),
    ),
    (ATTENTION, "rank", change(renamed(sparse_indices=(I32, ("B", "S", 2048)))), change()),
    (ATTENTION, "shapes_agree", change(renamed(key_rope=(F16, ("B", "P", 2, 64)))), change()),
    (ATTENTION, "shapes_agree", change(lists_for(8, 7)), change(lists_for(8, 8))),
    (ATTENTION, "head_dim", change(renamed(query=(F16, ("B", "S", 16, 576)))), change()),
    (ATTENTION, "rope_dim", change(renamed(key_rope=(F16, ("B", "P", 1, 32)))), change()),
    (ATTENTION, "kv_heads", change(renamed(key=(F16, ("B", "P", 2, 512)))), change()),
    (ATTENTION, "heads", change(query_heads(65)), change(query_heads(64))),
    (ATTENTION, "heads", change(query_heads(127)), change(query_heads(128))),
    (
        ATTENTION,
        "empty_input",
        change(renamed(key=(F16, ("B", 0, 1, 512)))),
        change(renamed(key=(F16, ("B", 1, 1, 512)))),
    ),
    (
        ATTENTION,
        "return_softmax_lse_pages",
        change(PAGED, layout_kv="PA_BSND", return_softmax_lse=1),
        change(return_softmax_lse=1),
    ),
    (
        ATTENTION,
        "unproduced_output",
        change(outputs=("attention_out", "softmax_max", "softmax_sum")),
        change(outputs=("attention_out", "softmax_max", "softmax_sum"), return_softmax_lse=1),
    ),
    (ATTENTION, "attribute_value", change(sparse_mode=1), change(sparse_mode=0)),
    (ATTENTION, "missing", change(scale_value=None), change()),
    (ROUTING, "type", change(renamed(x=(I8, (32, 7168))), quant_mode=1), change(renamed(x=(I8, (32, 7168))))),
    (ROUTING, "rank", change(renamed(x=(BF16, (31, 7168)))), change()),
    (ROUTING, "rank", change(renamed(expert_idx=(I32, (32,)))), change()),
    (ROUTING, "scale", change(renamed(scale=(F32, (31,)))), change(renamed(scale=(F32, (32,))))),
    (ROUTING, "scale", change(renamed(offset=(F32, (1,))), quant_mode=0), change(STATIC, quant_mode=0)),
    (
        ROUTING,
        "scale",
        change(renamed(scale=(F32, (2, 7168))), quant_mode=1),
        change(renamed(scale=(F32, (1, 7168))), quant_mode=1),
    ),
    (ROUTING, "offset", change(renamed(offset=(F32, (1,)))), change()),
    (ROUTING, "offset", change({**STATIC, "offset": (F32, (2,))}, quant_mode=0), change(STATIC, quant_mode=0)),
    (ROUTING, "expert_num", change(expert_num=10241), change(expert_num=10240)),
    (
        ROUTING,
        "expert_num",
        change(expert_num=5121, expert_tokens_num_type=2),
        change(expert_num=5120, expert_tokens_num_type=2),
    ),
    (ROUTING, "active_expert_range", change(active_expert_range=[8, 257]), change(active_expert_range=[8, 256])),
    (
        ROUTING,
        "active_expert_range",
        change(active_expert_range=[0, 255], **DROP_PAD),
        change(active_expert_range=[0, 256], **DROP_PAD),
    ),
    (ROUTING, "active_num", change(active_num=-2), change(active_num=0)),
    (ROUTING_950, "active_num", change(active_num=255), change(active_num=256)),
    (
        ROUTING,
        "expert_capacity",
        change(drop_pad_mode=1, expert_capacity=0),
        change(drop_pad_mode=1, expert_capacity=1),
    ),
    (
        ROUTING,
        "expert_capacity",
        change(drop_pad_mode=1, expert_capacity=33),
        change(drop_pad_mode=1, expert_capacity=32),
    ),
    (ROUTING, "drop_pad", change(row_idx_type=1, **DROP_PAD), change(**DROP_PAD)),
    (ROUTING, "drop_pad", change(expert_tokens_num_type=2, **DROP_PAD), change(expert_tokens_num_type=1, **DROP_PAD)),
    (ROUTING, "drop_pad_mode", change(drop_pad_mode=2), change(**DROP_PAD)),
    (ROUTING_950, "drop_pad_mode", change(**DROP_PAD), change()),
    (ROUTING, "expert_tokens_num_type", change(expert_tokens_num_type=3), change(expert_tokens_num_type=2)),
    (ROUTING_950, "expert_tokens_num_type", change(expert_tokens_num_type=0), change(expert_tokens_num_type=1)),
    (ROUTING, "expert_tokens_num_flag", change(expert_tokens_num_flag=2), change(expert_tokens_num_flag=1)),
    (ROUTING_950, "expert_tokens_num_flag", change(outputs=ROUTING.outputs[:2], expert_tokens_num_flag=0), change()),
    (ROUTING, "quant_mode", change(quant_mode=2), change(quant_mode=1)),
    (ROUTING_950, "quant_mode", change(STATIC, quant_mode=0), change(quant_mode=2)),
    (ROUTING, "row_idx_type", change(row_idx_type=2), change(row_idx_type=1)),
    (
        ROUTING,
        "unproduced_output",
        change(expert_tokens_num_flag=0),
        change(outputs=ROUTING.outputs[:2], expert_tokens_num_flag=0),
    ),
    (
        ROUTING,
        "unproduced_output",
        change(outputs=(*ROUTING.outputs, "expanded_scale")),
        change(outputs=(*ROUTING.outputs, "expanded_scale"), quant_mode=1),
    ),
    (ROUTING, "missing", change(expert_num=None), change()),
    (ROUTING, "input_type", change(renamed(expert_idx=(I64, (32, 8)))), change()),
]


@pytest.mark.parametrize(("node", "rule", "breaking", "meeting"), RULES)
def test_rule(node: Node, rule: str, breaking: Change, meeting: Change) -> None:
    findings = ascend_onnx.check(node.model(**breaking), target=node.target)
    assert rule in {finding.rule for finding in findings}
    assert {(finding.node, finding.operator) for finding in findings} == {("the_node", node.operator)}
    assert ascend_onnx.check(node.model(**meeting), target=node.target) == []


@pytest.mark.parametrize("name", sorted({node.operator for node, *_ in RULES}))
def test_every_rule_is_tested(name: str) -> None:
    tested = {(rule, Product(node.target)) for node, rule, *_ in RULES if node.operator == name}
    operator: Operator = OPERATORS[name]
    for constraint in operator.constraints:
        assert any((constraint.rule, product) in tested for product in constraint.products), constraint.rule
        assert constraint.source
        assert constraint.code in (161001, 161002, 561002)


@pytest.mark.parametrize("node", [PROLOG, ATTENTION, ROUTING], ids=lambda node: node.operator)
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
