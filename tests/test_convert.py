"""bfloat16 models as float32 models."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ascend_onnx.compare import compare
from ascend_onnx.convert import has_bfloat16, to_float32
from ascend_onnx.errors import ExecutionError
from ascend_onnx.functions import attach_functions
from ascend_onnx.session import run_model
from ascend_onnx.storage import load
from tests.models import corpus_feeds

BF16 = "attn_dsv3_decode_sdpa_op23_opt_bf16"
FP32 = "attn_dsv3_decode_sdpa_op23_opt"


def as_float32(feeds):
    return {name: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for name, a in feeds.items()}


def small_model() -> onnx.ModelProto:
    """y = Cast(x, bf16) + constants of every kind, behind a local function with a Cast of its own."""
    weight = np.full(1024, 0.5, ml_dtypes.bfloat16)
    scalar = onnx.numpy_helper.from_array(np.array([2], ml_dtypes.bfloat16), "two")
    function = helper.make_function(
        "local",
        "Down",
        ["x"],
        ["y"],
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)],
        [helper.make_opsetid("", 18)],
    )
    nodes = [
        helper.make_node("Down", ["x"], ["low"], domain="local"),
        helper.make_node("Constant", [], ["two"], value=scalar),
        helper.make_node("Shape", ["low"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["twos"], value=scalar),
        helper.make_node("Add", ["low", "twos"], ["more"]),
        helper.make_node("Mul", ["more", "weight"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "two"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1024])],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [1024])],
        [onnx.numpy_helper.from_array(weight, "weight")],
        value_info=[helper.make_tensor_value_info("more", TensorProto.BFLOAT16, [1024])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)


def test_constants_casts_functions_and_types():
    converted = to_float32(small_model())
    assert isinstance(converted, onnx.ModelProto)
    onnx.checker.check_model(converted, full_check=True)
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    assert np.allclose(run_model(converted, {"x": x})["y"], (x + 2) * 0.5 - 2)


def test_the_original_is_not_changed():
    proto = small_model()
    before = proto.SerializeToString()
    to_float32(proto)
    assert proto.SerializeToString() == before
    model = ir.from_proto(small_model())
    serialised = ir.to_proto(model).SerializeToString()
    converted = to_float32(model)
    assert isinstance(converted, ir.Model)
    assert ir.to_proto(model).SerializeToString() == serialised
    assert has_bfloat16(model)
    assert not has_bfloat16(converted)


def test_other_types_stay():
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT8, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    assert not has_bfloat16(ir.from_proto(model))
    assert to_float32(model).graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_an_exported_bfloat16_model_runs(corpus):
    """Against the float32 export of the same module, given the very weights of the bfloat16 one."""
    path = corpus(BF16)
    feeds = as_float32(corpus_feeds(BF16))
    with pytest.raises(ExecutionError):
        run_model(path, corpus_feeds(BF16))
    results = run_model(to_float32(path), feeds)

    reference = load(corpus(FP32))
    stored = {name: value.const_value for name, value in load(path).graph.initializers.items()}
    renamed = {"rot.inv_freq": "_to_copy_1"}
    for name, value in reference.graph.initializers.items():
        if value.dtype == ir.DataType.FLOAT:
            value.const_value = ir.Tensor(stored[renamed.get(name, name)].numpy().astype(np.float32), name=name)
    for name, array in run_model(reference, feeds).items():
        comparison = compare(name, array, results[name])
        assert comparison.within, comparison.reason


def test_external_weights_are_converted_when_they_are_read(corpus):
    source = load(corpus(BF16))
    converted = to_float32(source)
    lazy = [v.const_value for v in converted.graph.initializers.values() if isinstance(v.const_value, ir.LazyTensor)]
    assert len(lazy) >= 5
    assert all(
        v.const_value.raw is None
        for v in source.graph.initializers.values()
        if isinstance(v.const_value, ir.ExternalTensor)
    )
    assert lazy[0].numpy().dtype == np.float32


def attention_model() -> ir.Model:
    """SparseFlashAttention in bfloat16 with a body."""
    batch, queries, keys, selected = 2, 3, 24, 8
    inputs = {
        "query": (TensorProto.BFLOAT16, [batch, queries, 4, 512]),
        "key": (TensorProto.BFLOAT16, [batch, keys, 1, 512]),
        "value": (TensorProto.BFLOAT16, [batch, keys, 1, 512]),
        "sparse_indices": (TensorProto.INT32, [batch, queries, 1, selected]),
        "query_rope": (TensorProto.BFLOAT16, [batch, queries, 4, 64]),
        "key_rope": (TensorProto.BFLOAT16, [batch, keys, 1, 64]),
    }
    node = helper.make_node(
        "SparseFlashAttention",
        ["query", "key", "value", "sparse_indices", "", "", "", "query_rope", "key_rope"],
        ["attention_out"],
        domain="ai.ascend",
        scale_value=0.1,
        sparse_mode=0,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, *entry) for name, entry in inputs.items()],
        [helper.make_tensor_value_info("attention_out", TensorProto.BFLOAT16, [batch, queries, 4, 512])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.ascend", 1)]
    return attach_functions(ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10)))


def test_bodies_are_made_anew():
    model = attention_model()
    converted = to_float32(model)
    assert len(converted.functions) == 1
    assert not has_bfloat16(converted)
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.standard_normal(value.shape.numpy()).astype(np.float32)
        for value in converted.graph.inputs
        if value.dtype == ir.DataType.FLOAT
    }
    feeds["sparse_indices"] = (
        generator.permuted(np.tile(np.arange(24), (6, 1)), axis=1)[:, :8].reshape(2, 3, 1, 8).astype(np.int32)
    )
    assert np.isfinite(run_model(converted, feeds)["attention_out"]).all()
