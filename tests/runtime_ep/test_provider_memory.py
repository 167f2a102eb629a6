"""Device memory as ONNX Runtime sees it: copies, streams, caches in place, nothing allocated in steady state."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ascend_onnx
import runtime_ep
from tests.cases import ALL_CASES
from tests.operators.compare import compare_all
from tests.operators.harness import DOMAIN, model_of, run_body
from tests.oracles import ORACLES, Array

from .provider import Emulator, is_built, npu_session, provider, ring_chain, ring_feeds

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")


def assert_equal(actual: list[Array], expected: dict[str, Array]) -> None:
    for got, (name, wanted) in zip(actual, expected.items(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_values_between_claimed_nodes_never_visit_the_host() -> None:
    model, feeds = ring_chain(5), ring_feeds()
    with provider() as emulator:
        session = npu_session(model, require_npu=True)
        session.run(None, feeds)
        emulator.reset_faults()
        results = session.run(None, feeds)
        assert emulator.calls("aclnnRingAttentionUpdateV2") == 5
        # One copy to the device for each of the 6 inputs, one to the host for each of the 3 outputs.
        assert emulator.calls("aclrtMemcpyAsync") == 6
        assert emulator.calls("aclrtMemcpy") == 3
        del session
    assert_equal(results, run_body(model, feeds))


def test_a_claimed_node_behind_a_cpu_node_gets_device_memory() -> None:
    """The emulator refuses host addresses, and so does the provider; this is the chain where they would come."""
    model, feeds = ring_chain(2, between="Neg"), ring_feeds()
    with provider(DELAY_US="200"):
        session = npu_session(model, require_npu=True)
        results = session.run(None, feeds)
        again = session.run(None, feeds)
        del session
    expected = run_body(model, feeds)
    assert_equal(results, expected)
    assert_equal(again, expected)


def test_claimed_nodes_inside_a_branch() -> None:
    inner = ring_chain(2).graph
    branch = helper.make_graph(list(inner.node), "then", [], [helper.make_tensor_value_info("attn_out", 1, (2, 1, 64))])
    other = helper.make_graph(
        [helper.make_node("Neg", ["prev_attn_out"], ["negated"])],
        "else",
        [],
        [helper.make_tensor_value_info("negated", 1, (2, 1, 64))],
    )
    node = helper.make_node("If", ["flag"], ["result"], then_branch=branch, else_branch=other)
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, ())
    result = helper.make_tensor_value_info("result", 1, (2, 1, 64))
    graph = helper.make_graph([node], "branches", [flag, *inner.input], [result])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    feeds = {"flag": np.array(True), **ring_feeds()}
    expected = run_body(model, feeds)["result"]
    with provider(DELAY_US="200") as emulator:
        session = npu_session(model)
        (actual,) = session.run(["result"], feeds)
        assert emulator.calls("aclnnRingAttentionUpdateV2") == 2
        del session
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_nothing_is_allocated_in_steady_state() -> None:
    with provider() as emulator:
        session = npu_session(ring_chain(8), require_npu=True)
        for seed in range(3):
            session.run(None, ring_feeds(seed))
        emulator.reset_faults()
        for seed in range(20):
            session.run(None, ring_feeds(seed))
        assert emulator.calls("aclrtMalloc") == 0
        assert emulator.calls("aclrtMallocHost") == 0
        assert emulator.calls("aclrtCreateEvent") == 0
        del session


def test_constants_are_uploaded_once_for_all_nodes() -> None:
    feeds = ring_feeds()
    constants = {name: feeds[name] for name in feeds if name.startswith("cur")}
    varying = {name: feeds[name] for name in feeds if name.startswith("prev")}
    model = ring_chain(4, constants=constants)
    with provider() as emulator:
        session = npu_session(model, require_npu=True)
        assert emulator.calls("aclrtMemcpy") == len(constants)
        emulator.reset_faults()
        results = session.run(None, varying)
        assert emulator.calls("aclrtMemcpyAsync") == len(varying)
        del session
    assert_equal(results, run_body(model, varying))


def prolog_model(tokens: int, block_count: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """MlaPrologV2WeightNz with one head, its weights constant; and the arrays of its inputs."""
    import ml_dtypes

    rng = np.random.default_rng(1)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return (rng.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

    weights = {
        "weight_dq": normal(1024, 1536, scale=0.03),
        "weight_uq_qr": normal(1536, 192, scale=0.03),
        "weight_uk": normal(1, 128, 512, scale=0.1),
        "weight_dkv_kr": normal(1024, 576, scale=0.03),
        "rmsnorm_gamma_cq": normal(1536),
        "rmsnorm_gamma_ckv": normal(512),
    }
    feeds = {
        "token_x": normal(tokens, 1024),
        "rope_sin": normal(tokens, 64),
        "rope_cos": normal(tokens, 64),
        "cache_index": np.arange(tokens, dtype=np.int64) + 3,
        "kv_cache": normal(block_count, 16, 1, 512),
        "kr_cache": normal(block_count, 16, 1, 64),
    }
    operator = ascend_onnx.OPERATORS["MlaPrologV2WeightNz"]
    inputs = [declared.name for declared in operator.inputs if not declared.optional]
    outputs = [declared.name for declared in operator.outputs if not declared.optional]
    node = helper.make_node(operator.name, inputs, outputs, name="prolog", domain=DOMAIN)

    def info(name: str, array: Array) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    initializers = [
        helper.make_tensor(name, TensorProto.BFLOAT16, a.shape, a.tobytes(), raw=True) for name, a in weights.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, None) for name in outputs]
    graph = helper.make_graph([node], "prolog", [info(n, a) for n, a in feeds.items()], results, initializers)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return ascend_onnx.attach_functions(model), {**feeds, **weights}


def copies(emulator: Emulator) -> int:
    """Copies since the last reset, of whatever direction; versions of ONNX Runtime differ in which are asynchronous."""
    return emulator.calls("aclrtMemcpy") + emulator.calls("aclrtMemcpyAsync")


def test_caches_are_updated_in_place_where_one_value_is_fed_and_named() -> None:
    model, arrays = prolog_model(tokens=3, block_count=4)
    expected = ORACLES["MlaPrologV2WeightNz"](arrays, {})
    feeds = {value.name: arrays[value.name] for value in model.graph.input}
    with provider() as emulator:
        session = ascend_onnx.create_session(model, device="npu", require_npu=True)
        emulator.reset_faults()
        unbound = dict(zip(session.outputs, session.run(None, feeds), strict=True))
        assert copies(emulator) == len(feeds) + 2 + len(unbound)  # in, one for each cache on the device, out
        caches = {name: session.to_device(feeds[name]) for name in ("kv_cache", "kr_cache")}
        into = {f"{name}_out": value for name, value in caches.items()}
        emulator.reset_faults()
        query, query_rope = session.run(["query", "query_rope"], {**feeds, **caches}, into=into)
        assert copies(emulator) == (len(feeds) - 2) + 2  # in and out, and no cache
        in_place = {
            "query": query,
            "query_rope": query_rope,
            **{f"{name}_out": session.to_host(value) for name, value in caches.items()},
        }
        del session, caches, into
    assert compare_all(unbound, expected) == []
    assert compare_all(in_place, expected) == []


def test_outputs_that_nobody_reads_are_written_somewhere_all_the_same() -> None:
    model, arrays = prolog_model(tokens=2, block_count=2)
    expected = ORACLES["MlaPrologV2WeightNz"](arrays, {})
    feeds = {value.name: arrays[value.name] for value in model.graph.input}
    del model.graph.output[1:]
    with provider():
        session = ascend_onnx.create_session(model, device="npu", require_npu=True)
        (query,) = session.run(None, feeds)
        del session
    assert compare_all({"query": query}, {"query": expected["query"]}) == []


def test_placement_says_where_nodes_run_and_why() -> None:
    model = ring_chain(2, between="Neg")
    ascend_onnx.attach_functions(model)
    declined = next(case for case in ALL_CASES if "float32" in str(case) and case.operator == "SparseFlashAttention")
    unsupported = model_of(declined, symbolic=False)
    ascend_onnx.attach_functions(unsupported)
    with provider():
        session = ascend_onnx.create_session(model, device="npu")
        placed = {(p.node, p.operator): p.device for p in session.placement()}
        del session
        (refused, *_) = ascend_onnx.create_session(unsupported, device="npu").placement()
    assert placed == {
        ("merge_0", "RingAttentionUpdateV2"): "npu",
        ("merge_1", "RingAttentionUpdateV2"): "npu",
        ("on_cpu", "Neg"): "cpu",
    }
    assert (refused.operator, refused.device) == ("SparseFlashAttention", "cpu")
    assert "must be float16 or bfloat16, got float" in refused.reason


def test_without_a_device_a_session_says_what_to_do() -> None:
    runtime_ep.unregister()
    with pytest.raises(ascend_onnx.InputError, match=r"call runtime_ep\.register\(\) first"):
        ascend_onnx.create_session(ring_chain(1), device="npu")
