"""The schemas: what onnx's checker and shape inference make of the operators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import defs

import ascend_onnx
from ascend_onnx.operator import DOMAIN, Dim, Operator
from ascend_onnx.operators import OPERATORS
from ascend_onnx.schema import schema
from tests.cases import ALL_CASES
from tests.cases.case import Case
from tests.operators.harness import model_of

BF16, F16, F32, I32, I64 = (
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT16,
    ir.DataType.FLOAT,
    ir.DataType.INT32,
    ir.DataType.INT64,
)
Signature = Mapping[str, tuple[ir.DataType, tuple[Dim, ...]]]

PROLOG_WEIGHTS: Signature = {
    "weight_dq": (BF16, (7168, 1536)),
    "weight_uq_qr": (BF16, (1536, 6144)),
    "weight_uk": (BF16, (32, 128, 512)),
    "weight_dkv_kr": (BF16, (7168, 576)),
    "rmsnorm_gamma_cq": (BF16, (1536,)),
    "rmsnorm_gamma_ckv": (BF16, (512,)),
    "kv_cache": (BF16, ("blocks", 128, 1, 512)),
    "kr_cache": (BF16, ("blocks", 128, 1, 64)),
}
SYMBOLIC: list[tuple[str, Signature, Mapping[str, object], Signature]] = [
    (
        "MlaPrologV2WeightNz",
        {
            "token_x": (BF16, ("batch", "sequence", 7168)),
            "rope_sin": (BF16, ("batch", "sequence", 64)),
            "rope_cos": (BF16, ("batch", "sequence", 64)),
            "cache_index": (I64, ("batch", "sequence")),
            **PROLOG_WEIGHTS,
        },
        {},
        {
            "query": (BF16, ("batch", "sequence", 32, 512)),
            "query_rope": (BF16, ("batch", "sequence", 32, 64)),
            "kv_cache_out": (BF16, ("blocks", 128, 1, 512)),
            "kr_cache_out": (BF16, ("blocks", 128, 1, 64)),
        },
    ),
    (
        "MlaPrologV2WeightNz",
        {
            "token_x": (BF16, ("tokens", 7168)),
            "rope_sin": (BF16, ("tokens", 64)),
            "rope_cos": (BF16, ("tokens", 64)),
            "cache_index": (I64, ("tokens",)),
            **PROLOG_WEIGHTS,
        },
        {"cache_mode": "PA_NZ"},
        {"query": (BF16, ("tokens", 32, 512)), "query_rope": (BF16, ("tokens", 32, 64))},
    ),
    (
        "SparseFlashAttention",
        {
            "query": (F16, ("batch", "sequence", 16, 512)),
            "key": (F16, ("batch", "past + sequence", 1, 512)),
            "value": (F16, ("batch", "past + sequence", 1, 512)),
            "sparse_indices": (I32, ("batch", "sequence", 1, 8)),
            "query_rope": (F16, ("batch", "sequence", 16, 64)),
            "key_rope": (F16, ("batch", "past + sequence", 1, 64)),
        },
        {"scale_value": 0.1, "return_softmax_lse": 1},
        {
            "attention_out": (F16, ("batch", "sequence", 16, 512)),
            "softmax_max": (F32, ("batch", 1, "sequence", 16)),
            "softmax_sum": (F32, ("batch", 1, "sequence", 16)),
        },
    ),
    (
        "MoeInitRoutingV3",
        {"x": (F32, ("tokens", 64)), "expert_idx": (I32, ("tokens", 8))},
        {"expert_num": 16, "expert_tokens_num_flag": 1, "expert_tokens_num_type": 1},
        {"expert_tokens_count_or_cumsum": (I64, (16,))},
    ),
]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ascend_onnx.register()
    yield
    ascend_onnx.unregister()


def symbolic_model(operator: str, inputs: Signature, attributes: Mapping[str, object], outputs: Signature) -> ir.Model:
    values = {n: ir.Value(name=n, type=ir.TensorType(dtype), shape=ir.Shape(s)) for n, (dtype, s) in inputs.items()}
    described = OPERATORS[operator]
    required = [o.name for o in described.outputs if not o.optional]
    names = [o.name for o in described.outputs if o.name in {*required, *outputs}]
    node = described.node(values, names, attributes)
    for value, name in zip(node.outputs, [o.name for o in described.outputs], strict=False):
        value.name = name if name in names else ""
    graph = ir.Graph(
        list(values.values()),
        [value for value in node.outputs if value.name],
        nodes=[node],
        opset_imports={"": 18, DOMAIN: 1},
        name=operator,
    )
    return ir.Model(graph, ir_version=10)


def without_output_types(model: ir.Model) -> onnx.ModelProto:
    """Only the element type and rank of the outputs, so that the dimensions come from inference."""
    for value in model.graph.outputs:
        assert value.shape is not None
        value.shape = ir.Shape([None] * len(value.shape))
    return ir.to_proto(model)


@pytest.mark.parametrize("bodies", [False, True], ids=["bare", "with_bodies"])
@pytest.mark.parametrize(("operator", "inputs", "attributes", "outputs"), SYMBOLIC)
def test_symbolic_dims_are_kept(
    operator: str, inputs: Signature, attributes: Mapping[str, object], outputs: Signature, bodies: bool
) -> None:
    proto = without_output_types(symbolic_model(operator, inputs, attributes, outputs))
    if bodies:
        ascend_onnx.attach_functions(proto)
    onnx.checker.check_model(proto, full_check=True)
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True))
    found = {value.name: value for value in inferred.graph.outputs}
    for name, (dtype, shape) in outputs.items():
        assert found[name].dtype == dtype
        assert found[name].shape == ir.Shape(shape)


@pytest.mark.parametrize("case", ALL_CASES[::7], ids=str)
def test_inferred_shapes_are_the_real_ones(case: Case) -> None:
    proto = model_of(case, symbolic=False)
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    for value in ir.from_proto(inferred).graph.outputs:
        assert value.name is not None
        expected = case.expected[value.name]
        assert value.dtype == ir.DataType.from_numpy(expected.dtype)
        assert value.shape == ir.Shape(expected.value.shape)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_schema_says_what_the_operator_says(operator: Operator) -> None:
    made = schema(operator)
    optional = defs.OpSchema.FormalParameterOption.Optional
    assert [p.name for p in made.inputs] == [i.name for i in operator.inputs]
    assert [p.option == optional for p in made.inputs] == [i.optional for i in operator.inputs]
    assert [p.name for p in made.outputs] == [o.name for o in operator.outputs]
    assert {a.name: a.required for a in made.attributes.values()} == {a.name: a.required for a in operator.attributes}
    for attribute in operator.attributes:
        default = made.attributes[attribute.name].default_value
        if attribute.default is not None:
            value = ir.serde.deserialize_attribute(default).value
            assert value == pytest.approx(attribute.default) if isinstance(value, float) else value == attribute.default


def test_register_and_unregister_are_idempotent() -> None:
    ascend_onnx.register()
    assert all(defs.has(name, DOMAIN) for name in OPERATORS)
    ascend_onnx.unregister()
    ascend_onnx.unregister()
    assert not any(defs.has(name, DOMAIN) for name in OPERATORS)


def test_unknown_ranks_stay_unknown() -> None:
    operator, inputs, attributes, outputs = SYMBOLIC[0]
    proto = ir.to_proto(symbolic_model(operator, inputs, attributes, outputs))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    assert not any(value.type.tensor_type.HasField("shape") for value in inferred.graph.output)


def test_missing_attribute_does_not_break_inference() -> None:
    proto = ir.to_proto(symbolic_model(*SYMBOLIC[3]))
    del proto.graph.node[0].attribute[:]
    onnx.shape_inference.infer_shapes(proto, data_prop=True)


def test_interpreter_exits_cleanly_with_schemas_registered() -> None:
    code = "import ascend_onnx; ascend_onnx.register()"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
