"""Unusual models, files and dimensions: what they must not do. Each test that fails today names the defect."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import ascend_onnx
import fusion_patterns
from ascend_onnx.compare import compare_outputs
from ascend_onnx.errors import InputError
from ascend_onnx.session import run_model
from ascend_onnx.storage import load, save
from tests.models import corpus_feeds

Corpus = Callable[[str], Path]
DECODE = "attn_dsv3_decode_sdpa_op18_opt"


def _renamed_dimension(model: onnx.ModelProto, old: str, new: str | int) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == old and isinstance(new, int):
                dim.dim_value = new
            elif dim.dim_param == old:
                dim.dim_param = str(new)
    return model


def _with_external_entry(folder: Path, source: Path, key: str, value: str) -> Path:
    """A copy of a model in which one external tensor's entry `key` is `value`."""
    path = folder / source.name
    shutil.copyfile(source, path)
    shutil.copyfile(source.with_suffix(".weights"), path.with_suffix(".weights"))
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(model.SerializeToString())
    return path


def test_saving_to_a_special_file_does_not_replace_it(corpus: Corpus, tmp_path: Path) -> None:
    """A pipe stands for every special file: by the same rename a save as root to a device node replaces the node."""
    target = tmp_path / "pipe.onnx"
    os.mkfifo(target)
    with pytest.raises(InputError):
        save(load(corpus(DECODE)), target)
    assert stat.S_ISFIFO(target.stat().st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["pipe.onnx"]


def test_a_length_shorter_than_the_shape_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    path = _with_external_entry(tmp_path, corpus(DECODE), "length", "1")
    with pytest.raises(InputError):
        load(path)


@pytest.mark.parametrize(("key", "value"), [("offset", "-1"), ("offset", "abc"), ("length", "abc"), ("length", "-5")])
def test_malformed_external_entries_are_bad_input(corpus: Corpus, tmp_path: Path, key: str, value: str) -> None:
    path = _with_external_entry(tmp_path, corpus(DECODE), key, value)
    with pytest.raises(InputError):
        load(path)


@pytest.mark.parametrize("name", ["batch size", "?", "B*", "1.5", "-1"])
def test_a_dimension_may_have_any_name(corpus: Corpus, name: str) -> None:
    model = ir.from_proto(_renamed_dimension(onnx.load(corpus(DECODE)), "batch", name))
    assert fusion_patterns.fuse(model, validate="all").counts == {"MlaPrologV2WeightNz": 1}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_fixed_batch_fuses_like_a_symbolic_one(corpus: Corpus, batch: int) -> None:
    model = ir.from_proto(_renamed_dimension(onnx.load(corpus(DECODE)), "batch", batch))
    assert fusion_patterns.fuse(model, validate="none").counts == {"MlaPrologV2WeightNz": 1}


@pytest.mark.parametrize(
    ("name", "dims"), [(DECODE, {"batch": 0}), (DECODE, {"past": 0}), ("attn_dsv3_prefill_sdpa_op18_opt", {"batch": 0})]
)
def test_an_empty_dimension_runs_fused_where_it_ran_before(corpus: Corpus, name: str, dims: dict[str, int]) -> None:
    feeds = corpus_feeds(name, dims)
    expected, model = run_model(corpus(name), feeds), load(corpus(name))
    fusion_patterns.fuse(model, validate="none")
    actual = run_model(model, feeds)
    assert {n: a.shape for n, a in actual.items()} == {n: a.shape for n, a in expected.items()}
    assert all(comparison.within for comparison in compare_outputs(expected, actual))


def test_an_empty_selection_runs_fused_where_it_ran_before(corpus: Corpus) -> None:
    name = "sfa_valid_op18_opt"
    feeds = corpus_feeds(name, {"s57": 0})
    expected, model = run_model(corpus(name), feeds), load(corpus(name))
    fusion_patterns.fuse(model, validate="none")
    assert {n: a.shape for n, a in run_model(model, feeds).items()} == {n: a.shape for n, a in expected.items()}


def test_a_progress_callback_that_raises_leaves_the_model_as_it_was(corpus: Corpus) -> None:
    model = load(corpus("lm_deepseek_v3_hf_decode"))
    before = model.graph.num_nodes(), set(model.graph.initializers)

    def stop(phase: str, done: int, _total: int) -> None:
        if phase == "apply" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fusion_patterns.fuse(model, validate="none", progress=stop)
    assert (model.graph.num_nodes(), set(model.graph.initializers)) == before


def test_functions_of_the_domain_that_are_not_its_operators_stay(corpus: Corpus) -> None:
    model = onnx.load(corpus(DECODE))
    identity = helper.make_node("Identity", ["x"], ["y"])
    imports = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("ai.ascend", "Mine", ["x"], ["y"], [identity], imports))
    assert [function.name for function in ascend_onnx.strip_functions(model).functions] == ["Mine"]


def test_training_information_survives_fusing_a_proto(corpus: Corpus) -> None:
    model = onnx.load(corpus(DECODE))
    model.training_info.add().algorithm.name = "step"
    fusion_patterns.fuse(model, validate="none")
    assert len(model.training_info) == 1


def test_weights_in_constant_nodes_fuse(corpus: Corpus) -> None:
    model = onnx.load(corpus(DECODE))
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    nodes = list(model.graph.node)
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend([*constants, *nodes])
    assert fusion_patterns.fuse(model, validate="none").counts == {"MlaPrologV2WeightNz": 1}


@pytest.mark.parametrize("kind", [np.nan, np.inf])
def test_weights_that_are_not_finite_give_the_same_results(corpus: Corpus, kind: float) -> None:
    model, feeds = load(corpus(DECODE)), corpus_feeds(DECODE)
    value = model.graph.initializers["val_116"]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array.reshape(-1)[5] = kind
    value.const_value = ir.tensor(array, name="val_116")
    expected = run_model(model, feeds)
    assert fusion_patterns.fuse(model, validate="none").counts == {"MlaPrologV2WeightNz": 1}
    actual = run_model(model, feeds)
    for name, array_before in expected.items():
        np.testing.assert_allclose(actual[name], array_before, rtol=1e-3, atol=1e-4, equal_nan=True)
