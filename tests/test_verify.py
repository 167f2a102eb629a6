"""Verification: that equal models pass, and that every kind of difference is found and said."""

import json

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ascend_onnx.errors import ExecutionError, InputError
from ascend_onnx.functions import attach_functions, strip_functions
from ascend_onnx.storage import load
from ascend_onnx.verify import verify
from tests.models import corpus_feeds

DECODE = "attn_dsv3_decode_sdpa_op18_opt"
BF16 = "attn_dsv3_decode_sdpa_op23_opt_bf16"
SELECTING = "lm_deepseek_v32_hf_decode"


def perturbed(path, factor=1.001) -> ir.Model:
    """The model with one of its norm weights scaled."""
    model = load(path)
    value = next(v for v in model.graph.initializers.values() if v.const_value.shape == (1536,))
    array = value.const_value.numpy()
    value.const_value = ir.Tensor((array.astype(np.float32) * factor).astype(array.dtype), name=value.name)
    return model


def scaled_model(factor=2.0, name="y", dtype=TensorProto.FLOAT, size="n") -> onnx.ModelProto:
    """y = x * factor"""
    constant = onnx.numpy_helper.from_array(np.array(factor, helper.tensor_dtype_to_np_dtype(dtype)), "factor")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], [name])],
        "g",
        [helper.make_tensor_value_info("x", dtype, [size, 3])],
        [helper.make_tensor_value_info(name, dtype, [size, 3])],
        [constant],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_a_model_equals_itself_at_two_sets_of_sizes(corpus):
    result = verify(corpus(DECODE), corpus(DECODE))
    assert result.equal
    assert result.reason == ""
    first, second = (run.dims for run in result.runs)
    assert first.keys() == {"batch", "past"}
    assert first != second
    assert min(first["batch"], second["batch"]) >= 2
    assert [output.name for output in result.runs[0].outputs] == ["attn_out", "present_ckv", "present_kpe"]
    assert result.rules["position_ids"] == "arange:past"
    assert not result.converted


def test_a_small_difference_is_found(corpus):
    result = verify(corpus(DECODE), perturbed(corpus(DECODE)))
    assert not result.equal
    assert result.reason.startswith("output 'attn_out' differs (batch=2, past=3): the error at")
    assert not result.runs[1].equal
    assert verify(corpus(DECODE), perturbed(corpus(DECODE)), rtol=0.1).equal


def test_a_selection_leaves_most_tokens_out(corpus):
    result = verify(corpus(SELECTING), corpus(SELECTING))
    assert result.equal
    assert max(run.dims["s27"] for run in result.runs) + 1 >= 5 * 8


def test_sizes_rules_and_the_number_of_sets_can_be_given(corpus):
    result = verify(corpus(DECODE), corpus(DECODE), dims={"past": 11}, rules={"attention_mask": "normal"}, sets=3)
    assert [run.dims["past"] for run in result.runs] == [11, 11, 11]
    assert len({run.dims["batch"] for run in result.runs}) == 3
    assert result.rules["attention_mask"] == "normal"


def test_wrong_options_are_named(corpus):
    path = corpus(DECODE)
    with pytest.raises(InputError, match="no input of the model has a dimension 'absent'"):
        verify(path, path, dims={"absent": 3})
    with pytest.raises(InputError, match="'often'"):
        verify(path, path, rules={"hidden_states": "often"})
    with pytest.raises(InputError, match="no input is called 'absent'"):
        verify(path, path, rules={"absent": "ones"})


def test_bfloat16_is_compared_as_float32(corpus):
    result = verify(corpus(BF16), corpus(BF16))
    assert result.equal
    assert result.converted
    assert {output.dtype for run in result.runs for output in run.outputs} == {"float32"}
    assert not verify(corpus(BF16), perturbed(corpus(BF16), 1.05)).equal


def there_and_back(there, back, number, dtype=TensorProto.FLOAT16) -> onnx.ModelProto:
    """y = x four times side by side, after an operator and another one with the same operand.

    The value in between is copied: ONNX Runtime computes in float32 what is not surrounded by float16 copies.
    """
    array = np.array(number, helper.tensor_dtype_to_np_dtype(dtype))
    nodes = [
        helper.make_node(there, ["x", "number"], ["a"]),
        helper.make_node("Concat", ["a", "a"], ["b"], axis=1),
        helper.make_node("Concat", ["b", "b"], ["c"], axis=1),
        helper.make_node(back, ["c", "number"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, dtype, ["n", size]) for name, size in (("x", 64), ("y", 256)))
    graph = helper.make_graph(nodes, "g", [x], [y], [onnx.numpy_helper.from_array(array, "number")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_float16_is_compared_with_the_float32_run_of_the_original():
    rounds, exact = there_and_back("Add", "Sub", 2), there_and_back("Mul", "Div", 1)
    assert {output.max_abs for run in verify(rounds, exact).runs for output in run.outputs} == {0.0}
    assert {output.max_abs for run in verify(exact, rounds).runs for output in run.outputs} != {0.0}
    assert verify(rounds, exact).equal
    assert not verify(rounds, there_and_back("Mul", "Mul", 1.01)).equal


def test_float16_that_overflows_is_compared_with_the_run_that_does_so():
    overflows, exact = there_and_back("Mul", "Div", 6e4), there_and_back("Mul", "Div", 1)
    assert verify(overflows, overflows).equal
    assert not verify(overflows, exact).equal


def test_inputs_from_arrays_and_files(corpus, tmp_path):
    feeds = [corpus_feeds(DECODE, {"batch": 3, "past": 5}), corpus_feeds(DECODE, {"batch": 2, "past": 7}, seed=1)]
    np.savez(tmp_path / "first.npz", **feeds[0])
    result = verify(corpus(DECODE), corpus(DECODE), inputs=[tmp_path / "first.npz", feeds[1]])
    assert result.equal
    assert [run.source for run in result.runs] == [str(tmp_path / "first.npz"), "given arrays"]
    assert [run.outputs[0].shape[0] for run in result.runs] == [3, 2]
    one = verify(corpus(DECODE), perturbed(corpus(DECODE)), inputs=tmp_path / "first.npz")
    assert "first.npz" in one.reason


def test_bfloat16_inputs_from_a_file(corpus, tmp_path):
    feeds = {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array
        for name, array in corpus_feeds(BF16).items()
    }
    np.savez(tmp_path / "inputs.npz", **feeds)
    assert verify(corpus(BF16), corpus(BF16), inputs=tmp_path / "inputs.npz").equal


def test_files_that_hold_no_inputs_are_refused(corpus, tmp_path):
    path = corpus(DECODE)
    with pytest.raises(InputError, match="no such file"):
        verify(path, path, inputs=tmp_path / "absent.npz")
    (tmp_path / "bad.npz").write_bytes(b"bad")
    with pytest.raises(InputError, match=r"not an \.npz file"):
        verify(path, path, inputs=tmp_path / "bad.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"not an \.npz file"):
        verify(path, path, inputs=tmp_path / "one.npy")
    np.savez(tmp_path / "few.npz", position_ids=np.zeros((1, 1), np.int64))
    with pytest.raises(InputError, match="no array was given for input 'hidden_states'"):
        verify(path, path, inputs=tmp_path / "few.npz")


def test_models_must_have_the_same_interface():
    original = scaled_model()
    assert verify(original, scaled_model(name="z")).reason == "the second model lacks the output 'y'"
    assert "input 'x' is FLOAT16" in verify(original, scaled_model(dtype=TensorProto.FLOAT16)).reason
    more = scaled_model()
    more.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]))
    assert verify(original, more).reason == "the second model has a further output 'x'"
    assert not verify(original, more).runs


def test_other_names_of_sizes_do_not_matter():
    assert verify(scaled_model(), scaled_model(size="tokens")).equal


def test_a_second_model_that_does_not_run_is_unequal():
    broken = scaled_model()
    broken.graph.node[0].op_type = "MatMul"
    del broken.graph.initializer[0].dims[:]
    broken.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "factor"))
    result = verify(scaled_model(), broken)
    assert not result.equal
    assert result.reason.startswith("the second model does not run: onnxruntime cannot")


def test_a_first_model_that_does_not_run_is_bad_input():
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "seven"], ["y"], name="reshape")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [7])],
        [onnx.numpy_helper.from_array(np.array([7]), "seven")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(ExecutionError, match=r"tried with n=2; set dimensions or rules"):
        verify(model, model)


def test_dimensions_that_depend_on_each_other_are_found():
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["past_rows", "row"], ["rows"], axis=0, name="join"),
            helper.make_node("Add", ["rows", "bias"], ["y"], name="add"),
        ],
        "g",
        [
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["total", 3]),
            helper.make_tensor_value_info("past_rows", TensorProto.FLOAT, ["past", 3]),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, 3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    result = verify(model, model)
    assert result.equal
    assert all(run.dims["total"] == run.dims["past"] + 1 for run in result.runs)
    assert result.to_json()["relations"] == ["past = total + 1"] or result.to_json()["relations"] == [
        "total = past + 1"
    ]


def attention_model() -> ir.Model:
    sizes = {"query": ["b", "q", 4, 512], "key": ["b", "k", 1, 512], "value": ["b", "k", 1, 512]}
    sizes |= {"query_rope": ["b", "q", 4, 64], "key_rope": ["b", "k", 1, 64]}
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
        [
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()),
            helper.make_tensor_value_info("sparse_indices", TensorProto.INT32, ["b", "q", 1, 8]),
        ],
        [helper.make_tensor_value_info("attention_out", TensorProto.FLOAT, ["b", "q", 4, 512])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.ascend", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))


def test_operators_without_a_body_get_one_on_a_copy():
    with_body, without = attach_functions(attention_model()), strip_functions(attention_model())
    rules = {"sparse_indices": "distinct:k"}
    result = verify(with_body, without, rules=rules)
    assert result.equal, result.reason
    assert not without.functions
    assert without.graph[0].overload == ""


def test_json(corpus):
    written = json.loads(
        json.dumps(verify(corpus(DECODE), perturbed(corpus(DECODE)), seed=5).to_json(), allow_nan=False)
    )
    assert written["equal"] is False
    assert written["seed"] == 5
    assert written["runs"][0]["dims"] == {"batch": 2, "past": 3}
    assert written["runs"][0]["outputs"][0].keys() >= {"name", "max_abs", "max_rel", "mere", "mare", "mixed", "within"}
