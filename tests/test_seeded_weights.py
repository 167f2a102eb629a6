"""Seeded weights: the same values everywhere, complete files or none."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx import seeded_weights
from ascend_onnx.errors import InputError
from tests.models import graph_path

NAME = "attn_dsv3_decode_sdpa_op18_opt_fp16"


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return Path(shutil.copy(graph_path(NAME), tmp_path))


def model_with(tmp_path: Path, tensor: ir.TensorProtocol) -> Path:
    """A model that multiplies its input with one matrix."""
    weight = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    x = ir.Value(name="x", shape=ir.Shape((1, tensor.shape.numpy()[0])), type=ir.TensorType(tensor.dtype))
    node = ir.node("MatMul", [x, weight])
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 18}, name="g")
    path = tmp_path / "model.onnx"
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def external(location: str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.ExternalTensor:
    return ir.ExternalTensor(location, 0, 64, dtype, shape=ir.Shape((4, 4)), name="w")


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        (ir.DataType.FLOAT, "f7944add3817f3b8"),
        (ir.DataType.FLOAT16, "a7ba3f838a53992c"),
        (ir.DataType.BFLOAT16, "595cc254fa3f94dd"),
        (ir.DataType.INT8, "0152ec3587e4cf78"),
        (ir.DataType.UINT8, "10939c87cb7128fd"),
    ],
)
def test_values_are_the_same_on_every_machine(dtype: ir.DataType, digest: str) -> None:
    drawn = seeded_weights.values(ir.Tensor(np.zeros((64, 32), dtype.numpy()), dtype=dtype, name="model.weight"))
    assert drawn.shape == (64, 32)
    assert drawn.dtype == dtype.numpy()
    assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == digest


def test_floats_keep_the_scale_of_what_they_multiply() -> None:
    drawn = seeded_weights.values(ir.Tensor(np.zeros((8, 1024, 256), np.float32), name="experts"))
    assert np.std(drawn) == pytest.approx(1 / 32, rel=0.01)


def test_values_depend_on_the_name() -> None:
    zeros = np.zeros((4, 4), np.float32)
    one, other = (seeded_weights.values(ir.Tensor(zeros, name=name)) for name in ("one", "other"))
    assert not np.any(one == other)


def test_fill_writes_what_is_missing_and_nothing_else(graph: Path) -> None:
    weights = graph.with_suffix(".weights")
    assert seeded_weights.fill(graph) == [weights]
    tensors = [v.const_value for v in ir.load(graph).graph.initializers.values()]
    external_tensors = [t for t in tensors if isinstance(t, ir.ExternalTensor)]
    assert external_tensors
    for tensor in external_tensors:
        assert np.array_equal(tensor.numpy(), seeded_weights.values(tensor))
    weights.write_bytes(b"mine")
    assert seeded_weights.fill(graph) == []
    assert weights.read_bytes() == b"mine"
    assert sorted(path.name for path in graph.parent.iterdir()) == [graph.name, weights.name]


def test_strip_and_fill_give_the_same_model_again(graph: Path) -> None:
    seeded_weights.fill(graph)
    stripped = graph.with_name("stripped.onnx")
    size = seeded_weights.strip(graph, stripped)
    assert [path.stat().st_size for path in seeded_weights.fill(stripped)] == [size]
    for name, value in ir.load(graph).graph.initializers.items():
        again = ir.load(stripped).graph.initializers[name].const_value
        assert value.const_value is not None
        assert again is not None
        assert np.array_equal(value.const_value.numpy(), again.numpy())


def test_strip_keeps_masks_and_tables(tmp_path: Path) -> None:
    rows = np.tile(np.arange(128, dtype=np.float32), (64, 1))
    source = model_with(tmp_path, ir.Tensor(rows, name="table"))
    assert seeded_weights.strip(source, tmp_path / "stripped.onnx") == 0


def test_strip_removes_notes(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).standard_normal((128, 128)).astype(ml_dtypes.bfloat16)
    source = model_with(tmp_path, ir.Tensor(drawn, dtype=ir.DataType.BFLOAT16, name="w"))
    model = ir.load(source)
    model.graph.node(0).doc_string = "a stack trace"
    model.graph.node(0).metadata_props["path"] = "somewhere"
    ir.save(model, source)
    seeded_weights.strip(source, tmp_path / "stripped.onnx")
    assert b"stack trace" not in (tmp_path / "stripped.onnx").read_bytes()
    assert b"somewhere" not in (tmp_path / "stripped.onnx").read_bytes()


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    path = model_with(tmp_path, external("w.bin", ir.DataType.INT32))
    with pytest.raises(InputError, match="INT32"):
        seeded_weights.fill(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("location", ["../w.bin", "/w.bin"])
def test_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    with pytest.raises(InputError, match="outside"):
        seeded_weights.fill(model_with(tmp_path, external(location)))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(InputError, match="not an ONNX protobuf"):
        seeded_weights.fill(tmp_path / "text.onnx")
    with pytest.raises(InputError, match=r"absent\.onnx"):
        seeded_weights.fill(tmp_path / "absent.onnx")
