"""Running models on the CPU: element types beyond numpy's, weights that are not copied, and errors in one sentence."""

import resource

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ascend_onnx.errors import ExecutionError, InputError
from ascend_onnx.session import CpuSession, run_model
from ascend_onnx.storage import load
from tests.models import corpus_feeds

DECODE = "attn_dsv3_decode_sdpa_op18_opt"
EXOTIC = {
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: ml_dtypes.float8_e5m2,
}


def one_node_model(node, inputs, outputs, initializers=(), opset=20):
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(*entry) for entry in inputs],
        [helper.make_tensor_value_info(*entry) for entry in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in initializers],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def add_model(shape=("n",), dtype=TensorProto.FLOAT):
    node = helper.make_node("Add", ["a", "b"], ["c"], name="plus")
    return one_node_model(node, [("a", dtype, shape), ("b", dtype, shape)], [("c", dtype, shape)])


@pytest.mark.parametrize("onnx_type", EXOTIC)
def test_types_that_numpy_lacks_go_in_and_come_out(onnx_type):
    node = helper.make_node("Identity", ["x"], ["y"])
    model = one_node_model(node, [("x", onnx_type, [2, None])], [("y", onnx_type, [2, None])])
    x = np.array([[1, -2, 0.5], [3, 0, 8]]).astype(EXOTIC[onnx_type])
    y = run_model(model, {"x": x})["y"]
    assert y.dtype == x.dtype
    assert np.array_equal(y.view(np.uint8), x.view(np.uint8))
    assert run_model(model, {"x": x[:, :0]})["y"].shape == (2, 0)


def test_bfloat16_weights_of_a_model_in_memory():
    weight = np.arange(1 << 16).reshape(256, 256).astype(ml_dtypes.bfloat16)
    node = helper.make_node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)
    model = one_node_model(node, [], [("y", TensorProto.FLOAT, [256, 256])], [("w", weight)])
    assert np.array_equal(run_model(model, {})["y"], weight.astype(np.float32))


def test_scalars_keep_their_rank():
    assert run_model(add_model(shape=()), {"a": np.float32(1), "b": np.float32(2)})["c"].shape == ()


def test_a_path_a_proto_and_a_model_give_the_same(corpus):
    path, feeds = corpus(DECODE), corpus_feeds(DECODE)
    from_path = run_model(path, feeds)
    for model in (load(path), onnx.load(path)):
        for name, array in run_model(model, feeds).items():
            assert np.array_equal(array, from_path[name])


def test_a_model_in_memory_stays_as_it_was(corpus):
    model = load(corpus(DECODE))
    run_model(model, corpus_feeds(DECODE))
    weights = [value.const_value for value in model.graph.initializers.values()]
    assert any(isinstance(weight, ir.ExternalTensor) and weight.location != "in-memory" for weight in weights)
    assert not any(isinstance(weight, ir.ExternalTensor) and weight.location == "in-memory" for weight in weights)


def test_large_new_weights_are_handed_over():
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    proto = one_node_model(
        node, [("x", TensorProto.FLOAT, [1, 256])], [("y", TensorProto.FLOAT, [1, 256])], [("w", weight)]
    )
    model = load(proto)
    model.graph.initializers["w"].const_value = ir.LazyTensor(
        lambda: ir.Tensor(weight), ir.DataType.FLOAT, ir.Shape(weight.shape), name="w"
    )
    x = np.eye(1, 256, dtype=np.float32)
    assert np.allclose(run_model(model, {"x": x})["y"], weight[:1])


def test_a_thousand_external_weights_are_one_open_file(tmp_path):
    count, rows = 1100, 4
    np.arange(count * rows, dtype=np.float32).tofile(tmp_path / "w.bin")
    values = [
        ir.Value(
            name=f"w{index}",
            const_value=ir.ExternalTensor(
                "w.bin",
                index * rows * 4,
                None,
                ir.DataType.FLOAT,
                shape=ir.Shape([rows]),
                name=f"w{index}",
                base_dir=tmp_path,
            ),
        )
        for index in range(count)
    ]
    total = ir.Node("", "Sum", values)
    total.outputs[0].name, total.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    total.outputs[0].shape = ir.Shape([rows])
    graph = ir.Graph([], total.outputs, nodes=[total], initializers=values, opset_imports={"": 18}, name="g")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        y = run_model(ir.Model(graph, ir_version=10), {})["y"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert np.allclose(y, np.arange(count * rows).reshape(count, rows).sum(axis=0), rtol=1e-5)


def test_outputs_can_be_chosen(corpus):
    session = CpuSession(corpus(DECODE))
    name = list(session.outputs)[-1]
    assert list(session.run(corpus_feeds(DECODE), [name])) == [name]
    with pytest.raises(InputError, match="no output 'absent'"):
        session.run(corpus_feeds(DECODE), ["absent"])


def test_one_session_runs_several_shapes():
    session = CpuSession(add_model())
    for count in (1, 3):
        ones = np.ones(count, np.float32)
        assert np.array_equal(session.run({"a": ones, "b": ones})["c"], ones * 2)


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"a": np.ones(2, np.float32)}, "no array was given for input 'b'"),
        ({"a": np.ones(2, np.float32), "b": np.ones(2)}, "input 'b' expects FLOAT, but the array is float64"),
        ({"a": np.ones(2, np.float32), "b": np.ones((2, 2), np.float32)}, r"input 'b' expects shape \('n',\)"),
        (dict.fromkeys("abz", np.ones(2, np.float32)), "no input 'z'"),
    ],
)
def test_wrong_feeds_are_named(feeds, words):
    with pytest.raises(InputError, match=words):
        run_model(add_model(), feeds)


def test_a_run_that_fails_names_its_node():
    with pytest.raises(ExecutionError, match="cannot run the model") as caught:
        run_model(add_model(), {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)})
    assert caught.value.node == "plus"
    assert "\n" not in str(caught.value)


def test_a_model_that_the_runtime_cannot_load_is_an_error(tmp_path):
    with pytest.raises(ExecutionError, match=r"cannot load the model in memory.*Add"):
        CpuSession(add_model(dtype=TensorProto.BFLOAT16))
    with pytest.raises(InputError, match="no such file"):
        CpuSession(tmp_path / "absent.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"bad")
    with pytest.raises(ExecutionError, match=r"bad\.onnx"):
        CpuSession(tmp_path / "bad.onnx")
