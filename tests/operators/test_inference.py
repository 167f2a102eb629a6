"""The registered schemas infer what the oracle's outputs are: all of it from sizes, what names allow from names."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

import ascend_onnx
from tests.cases import ALL_CASES
from tests.cases.case import Case

from .harness import model_of


@pytest.fixture(autouse=True)
def schemas() -> None:
    ascend_onnx.register()


def inferred(case: Case, *, symbolic: bool) -> dict[str, onnx.TypeProto.Tensor]:
    model = onnx.shape_inference.infer_shapes(
        model_of(case, symbolic=symbolic), check_type=True, strict_mode=True, data_prop=True
    )
    return {output.name: output.type.tensor_type for output in model.graph.output}


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_sizes(case: Case) -> None:
    for name, tensor in inferred(case, symbolic=False).items():
        expected = case.expected[name]
        assert tensor.elem_type == helper.np_dtype_to_tensor_dtype(expected.dtype)
        assert tuple(dim.dim_value for dim in tensor.shape.dim) == expected.value.shape, name


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_names(case: Case) -> None:
    for name, tensor in inferred(case, symbolic=True).items():
        shape = case.expected[name].value.shape
        assert tensor.HasField("shape"), name
        assert len(tensor.shape.dim) == len(shape), name
        known = {axis: dim.dim_value for axis, dim in enumerate(tensor.shape.dim) if dim.HasField("dim_value")}
        assert known == {axis: shape[axis] for axis in known}, name
