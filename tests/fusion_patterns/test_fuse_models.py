"""Real exports: what fuses, that it is still the same model, and what the report says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ascend_onnx
from ascend_onnx.compare import compare_outputs
from ascend_onnx.convert import to_float32
from ascend_onnx.errors import InputError
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load, save
from fusion_patterns import Report, find, fuse
from tests.models import EXPECTED, corpus_feeds

Corpus = Callable[[str], Path]
MLA, SFA, MOE = "MlaPrologV2WeightNz", "SparseFlashAttention", "MoeInitRoutingV3"
V3 = ["lm_deepseek_v3_hf_prefill", "lm_deepseek_v3_hf_decode"]
V32 = ["lm_deepseek_v32_hf_prefill", "lm_deepseek_v32_hf_decode"]
WHOLE = [*V3, *V32]
MODULES = [name for name, counts in EXPECTED.items() if name.startswith("attn_dsv3") and counts]
BFLOAT16 = [name for name in MODULES if name.endswith("bf16")]
NO_LOW_RANK = "attn_dsv3_decode_sdpa_op18_opt_noqlora"
SIZES: dict[str, list[dict[str, int]]] = {
    "lm_deepseek_v3_hf_prefill": [{"s44": 2, "s53": 3}, {"s44": 3, "s53": 18}],
    "lm_deepseek_v3_hf_decode": [{"s44": 2, "s36": 3}, {"s44": 17, "s36": 0}],
    "lm_deepseek_v32_hf_prefill": [{"s44": 2, "s70": 3}, {"s44": 2, "s70": 41}],
    "lm_deepseek_v32_hf_decode": [{"s44": 3, "s27": 0}, {"s44": 2, "s27": 44}],
}
"""Two sets of dimensions for every model: batches of 2 or more, an empty past, and more tokens than are selected."""


def sizes(name: str) -> list[dict[str, int]]:
    if name in SIZES:
        return SIZES[name]
    tokens = "past" if "decode" in name else "seq"
    return [{"batch": 2, tokens: 0 if tokens == "past" else 1}, {"batch": 3, tokens: 21}]


@pytest.fixture(scope="module")
def fused(corpus: Corpus) -> Callable[[str], tuple[ir.Model, Report]]:
    """The fused graph of `models/` by name and its report, every match validated; made once, not to be changed."""
    made: dict[str, tuple[ir.Model, Report]] = {}

    def get(name: str) -> tuple[ir.Model, Report]:
        if name not in made:
            model = load(corpus(name))
            made[name] = (model, fuse(model, validate="all"))
        return made[name]

    return get


Fused = Callable[[str], tuple[ir.Model, Report]]


def signature(values: Any) -> list[tuple[str, Any, str]]:
    return [(v.name, v.dtype, str(v.shape)) for v in values]


@pytest.mark.parametrize("name", [*WHOLE, *MODULES])
def test_counts(fused: Fused, name: str) -> None:
    model, report = fused(name)
    assert report.counts == EXPECTED[name]
    assert not report.missed
    domain = [node.op_type for node in model.graph if node.domain == "ai.ascend"]
    assert {op: domain.count(op) for op in domain} == EXPECTED[name]


@pytest.mark.parametrize("name", [*WHOLE, *MODULES])
def test_every_match_is_validated(fused: Fused, name: str) -> None:
    _, report = fused(name)
    limit = 1e-2 if "fp16" in name else 1e-5
    assert all(entry.validated is not None and entry.validated < limit for entry in report.fused)


@pytest.mark.parametrize("name", [*WHOLE, *MODULES])
def test_inputs_and_outputs_stay(corpus: Corpus, fused: Fused, name: str) -> None:
    before, (after, _) = load(corpus(name)), fused(name)
    assert signature(after.graph.inputs) == signature(before.graph.inputs)
    assert signature(after.graph.outputs) == signature(before.graph.outputs)
    assert after.opset_imports[""] == before.opset_imports[""]
    assert after.metadata_props == before.metadata_props
    assert after.producer_name == before.producer_name


@pytest.mark.parametrize("name", [*WHOLE, *MODULES])
def test_nodes_that_no_fusion_touched_stay(corpus: Corpus, fused: Fused, name: str) -> None:
    before, (after, report) = load(corpus(name)), fused(name)
    gone = {removed for entry in report.fused for removed in entry.nodes}
    kept = {node.name: node for node in after.graph if node.name}
    for node in before.graph:
        if node.name in gone:
            assert node.name not in kept
            continue
        same = kept[node.name]
        assert (same.op_type, same.domain) == (node.op_type, node.domain)
        assert dict(same.attributes).keys() == dict(node.attributes).keys()
        assert same.metadata_props == node.metadata_props
        assert [o.name for o in same.outputs] == [o.name for o in node.outputs]


@pytest.mark.parametrize("name", [*WHOLE, *MODULES])
def test_fused_nodes_say_where_they_come_from(fused: Fused, name: str) -> None:
    model, report = fused(name)
    nodes = [node for node in model.graph if node.domain == "ai.ascend"]
    assert len(nodes) == len(report.fused)
    for node in nodes:
        assert node.metadata_props["ascend_onnx.fusion"]
        assert node.metadata_props["ascend_onnx.anchor"] in {entry.anchor for entry in report.fused}
    assert len({node.name for node in model.graph}) == model.graph.num_nodes()


@pytest.fixture
def schemas() -> Any:
    ascend_onnx.register()
    yield
    ascend_onnx.unregister()


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("name", [*WHOLE, *MODULES])
def test_checker_and_strict_shape_inference(fused: Fused, tmp_path: Path, name: str) -> None:
    model, _ = fused(name)
    path = tmp_path / "fused.onnx"
    save(model, path, source=None)
    onnx.checker.check_model(path, full_check=True)
    inferred = tmp_path / "inferred.onnx"
    onnx.shape_inference.infer_shapes_path(path, inferred, check_type=True, strict_mode=True, data_prop=True)
    graph = onnx.load(inferred, load_external_data=False).graph
    known = {value.name for value in (*graph.value_info, *graph.output) if value.type.tensor_type.HasField("shape")}
    outputs = {output for node in graph.node if node.domain == "ai.ascend" for output in node.output if output}
    assert outputs
    assert outputs <= known


@pytest.mark.parametrize("name", [*WHOLE, *(name for name in MODULES if name not in BFLOAT16)])
def test_equal_at_two_sets_of_dimensions(corpus: Corpus, fused: Fused, name: str) -> None:
    original, after = CpuSession(corpus(name)), CpuSession(fused(name)[0])
    for seed, dims in enumerate(sizes(name)):
        feeds = corpus_feeds(name, dims, seed)
        expected, actual = original.run(feeds), after.run(feeds)
        off = [f"{dims} {c.name}: {c.reason}" for c in compare_outputs(expected, actual) if not c.within]
        assert not off
        assert all(np.isfinite(array.astype(np.float32)).all() for array in actual.values())


@pytest.mark.parametrize("name", BFLOAT16)
def test_equal_in_float32(corpus: Corpus, fused: Fused, name: str) -> None:
    original, after = to_float32(load(corpus(name))), to_float32(fused(name)[0].clone())
    feeds = {
        k: v.astype(np.float32) if v.dtype.kind == "V" or "bfloat" in str(v.dtype) else v
        for k, v in corpus_feeds(name, sizes(name)[1]).items()
    }
    expected, actual = CpuSession(original).run(feeds), CpuSession(after).run(feeds)
    assert all(c.within for c in compare_outputs(expected, actual))


@pytest.mark.parametrize("name", ["lm_deepseek_v3_hf_decode", "lm_deepseek_v32_hf_prefill"])
def test_the_saved_file_runs_without_any_plugin(corpus: Corpus, fused: Fused, tmp_path: Path, name: str) -> None:
    import onnxruntime

    path = tmp_path / "fused.onnx"
    save(fused(name)[0], path, source=None)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = corpus_feeds(name)
    actual = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    assert all(c.within for c in compare_outputs(CpuSession(corpus(name)).run(feeds), actual))


def expansions(model: ir.Model) -> list[str]:
    """Products with a constant (512, N * 256): keys and values expanded from the latent of every token."""
    found = []
    for node in model.graph:
        weights = [v for v in node.inputs if v is not None and v.is_initializer() and v.shape is not None]
        if node.op_type in ("MatMul", "Gemm") and any(
            sorted(map(str, w.shape)) == ["1024", "512"] and len(w.shape) == 2 for w in weights
        ):
            found.append(node.name or "")
    return found


@pytest.mark.parametrize("name", [n for n in [*WHOLE, *MODULES] if "noopt" not in n])
def test_keys_and_values_are_never_expanded(corpus: Corpus, fused: Fused, name: str) -> None:
    layers = EXPECTED[name][MLA]
    outputs = layers if name in WHOLE else 1  # o_proj has the same shape
    assert len(expansions(load(corpus(name)))) == layers + outputs
    assert len(expansions(fused(name)[0])) == outputs


@pytest.mark.parametrize("name", WHOLE)
def test_experts_use_their_weights_where_they_lie(fused: Fused, name: str) -> None:
    model, _ = fused(name)
    assert not any(node.op_type == "GatherND" for node in model.graph)
    for node in model.graph:
        if node.op_type == "Gather":
            data, indices = node.inputs
            assert data is not None
            assert indices is not None
            assert data.name == "model.embed_tokens.weight" or not data.is_initializer()
            producer = indices.producer()
            assert producer is None or producer.op_type != "Range"
    matrices = [
        node
        for node in model.graph
        if node.op_type == "MatMul" and (node.inputs[1].name or "").startswith("transpose_")
    ]
    assert len(matrices) == 16
    assert not any(node.op_type == "Split" and node.inputs[0].is_initializer() for node in model.graph)


@pytest.mark.parametrize("name", V32)
def test_what_the_indexer_reads_is_kept(fused: Fused, name: str) -> None:
    model, report = fused(name)
    for entry in report.fused:
        if entry.operator == MLA:
            normed = [v for v in entry.kept if v.startswith("mul_")]
            assert len(normed) == 1
            readers = [node for node in model.graph for v in node.inputs if v is not None and v.name == normed[0]]
            assert readers


@pytest.mark.parametrize("name", [*V3, *MODULES])
def test_nothing_is_kept_that_nobody_reads(fused: Fused, name: str) -> None:
    assert [entry.kept for entry in fused(name)[1].fused] == [[]] * len(fused(name)[1].fused)


@pytest.mark.parametrize("name", [*WHOLE, "attn_dsv3_decode_sdpa_op23_opt", "attn_dsv3_decode_sdpa_op18_noopt"])
def test_fusing_again_changes_nothing(fused: Fused, name: str) -> None:
    model = fused(name)[0].clone()
    before = [(node.name, node.domain, node.op_type, node.overload) for node in model.graph]
    functions = sorted(map(str, model.functions))
    report = fuse(model, validate="all")
    assert report.fused == []
    assert [(node.name, node.domain, node.op_type, node.overload) for node in model.graph] == before
    assert sorted(map(str, model.functions)) == functions
    assert report.to_json()["nodes"] == {"before": len(before), "after": len(before)}


def test_no_low_rank_query(corpus: Corpus) -> None:
    model = load(corpus(NO_LOW_RANK))
    before = [node.name for node in model.graph]
    report = fuse(model)
    assert report.counts == {}
    (missed,) = report.missed
    assert missed.code == "no-query-low-rank"
    assert "low-rank query projection" in missed.message
    assert missed.anchor
    assert [node.name for node in model.graph] == before
    assert not model.functions


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (MLA, {MLA: 2}),
        (MOE, {MOE: 1}),
        (SFA, {}),
    ],
)
def test_only_one_operator(corpus: Corpus, only: str, expected: dict[str, int]) -> None:
    """SparseFlashAttention needs the query in the latent space, which MlaPrologV2WeightNz makes."""
    name = V32[1]
    model = load(corpus(name))
    report = fuse(model, validate="none", only=only)
    if expected:
        assert report.counts == expected
    feeds = corpus_feeds(name)
    after = CpuSession(model).run(feeds)
    assert all(c.within for c in compare_outputs(CpuSession(corpus(name)).run(feeds), after))


@pytest.mark.parametrize("target", ["a2", "a3", "950"])
@pytest.mark.parametrize("name", ["lm_deepseek_v32_hf_decode", "attn_dsv3_decode_sdpa_op18_opt"])
def test_no_product_takes_float32_attention(corpus: Corpus, name: str, target: str) -> None:
    """MoeInitRoutingV3 is the one that does take float32 tokens."""
    model = load(corpus(name))
    before = model.graph.num_nodes()
    report = fuse(model, target=target, validate="none")
    layers = EXPECTED[name][MLA]
    assert set(report.counts) <= {MOE}
    assert [missed.code for missed in report.missed] == ["target"] * layers
    assert all(target in missed.expected for missed in report.missed)
    assert all("float" in missed.got or "does not exist" in missed.got for missed in report.missed)
    assert bool(report.counts) == (model.graph.num_nodes() != before)


def test_a_half_precision_model_fuses_for_a_product(corpus: Corpus) -> None:
    report = fuse(load(corpus(BFLOAT16[0])), target="a3", validate="none")
    assert report.counts == {MLA: 1} or {missed.code for missed in report.missed} == {"target"}
    assert not any("float32" in missed.got for missed in report.missed)


@pytest.mark.parametrize("name", [*WHOLE, *MODULES, NO_LOW_RANK])
def test_find_changes_nothing_and_says_the_same(corpus: Corpus, name: str) -> None:
    model = load(corpus(name))
    before = onnx.ModelProto.SerializeToString(ir.to_proto(model))
    found = find(model)
    assert onnx.ModelProto.SerializeToString(ir.to_proto(model)) == before
    assert found.nodes_after is None
    assert found.counts == EXPECTED[name]
    assert [entry.anchor for entry in find(corpus(name)).fused] == [entry.anchor for entry in found.fused]


@pytest.mark.parametrize("name", ["attn_dsv3_decode_sdpa_op18_opt", "lm_deepseek_v3_hf_decode"])
def test_a_proto_fuses_like_the_ir(corpus: Corpus, name: str) -> None:
    proto = onnx.load(corpus(name))
    report = fuse(proto, validate="none")
    model = load(corpus(name))
    assert fuse(model, validate="none").counts == report.counts == EXPECTED[name]
    assert [(n.name, n.op_type, n.domain, n.overload) for n in proto.graph.node] == [
        (n.name, n.op_type, n.domain, n.overload) for n in model.graph
    ]
    feeds = corpus_feeds(name)
    after = CpuSession(proto).run(feeds)
    assert all(c.within for c in compare_outputs(CpuSession(model).run(feeds), after))


def test_a_proto_without_its_weights_is_refused_or_fused(corpus: Corpus) -> None:
    """Its weights are named relative to a folder that a proto does not know."""
    proto = onnx.load(corpus("attn_dsv3_decode_sdpa_op18_opt"), load_external_data=False)
    before = proto.SerializeToString()
    try:
        report = fuse(proto, validate="none")
    except InputError:
        assert proto.SerializeToString() == before
    else:
        assert report.counts == {MLA: 1}


def test_report_json(fused: Fused) -> None:
    report = fused(V32[1])[1].to_json()
    assert set(report) == {"counts", "fused", "missed", "nodes", "kv_cache_bytes_per_token", "seconds"}
    assert report["counts"] == EXPECTED[V32[1]]
    for entry in report["fused"]:
        assert set(entry) == {"operator", "overload", "anchor", "nodes", "validated", "assumed", "kept"}
    assert set(report["nodes"]) == {"before", "after"}
    assert {"match", "validate", "apply"} <= set(report["seconds"])


def test_the_report_names_the_overload_of_the_node(fused: Fused) -> None:
    model, report = fused(V32[1])
    nodes = sorted((node.op_type, node.overload) for node in model.graph if node.domain == "ai.ascend")
    assert sorted((entry.operator, entry.overload) for entry in report.fused) == nodes
    assert all(overload for _, overload in nodes)


def test_missed_json(corpus: Corpus) -> None:
    (missed,) = find(corpus(NO_LOW_RANK)).to_json()["missed"]
    assert set(missed) == {"fusion", "anchor", "code", "message", "node", "expected", "got"}


@pytest.mark.parametrize(("name", "layers"), [("attn_dsv3_decode_sdpa_op18_opt", 1), ("lm_deepseek_v3_hf_decode", 2)])
def test_cache_bytes_per_token(fused: Fused, name: str, layers: int) -> None:
    """512 latents and 64 rotated features in float32; per head 128 + 64 for a key and 128 for a value, 4 heads."""
    assert fused(name)[1].to_json()["kv_cache_bytes_per_token"] == {
        "before": layers * 576 * 4,
        "after": layers * 576 * 4,
        "per_head_equivalent": layers * 4 * 320 * 4,
    }
