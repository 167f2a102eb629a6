"""Runs one call of an operator in every form that a machine without a device has.

- `run_reference`: the operator's `OpRun` in onnx's `ReferenceEvaluator`, which gets the model without functions (it
  does not honour overloads);
- `run_body`: the function body that `attach_functions` adds, in ONNX Runtime's CPU provider.

The node is built from the signatures of the contract, not from the package's own description of its operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from onnx.reference import ReferenceEvaluator

import ascend_onnx
from tests.cases.case import Case
from tests.oracles import Array

__all__ = ["SIGNATURES", "from_ort", "model_of", "run_body", "run_reference", "single_node_model", "to_ort"]

DOMAIN = "ai.ascend"
IR_VERSION = 10
LOG_ERRORS_ONLY = 3

SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "MlaPreprocess": (
        (
            "input",
            "gamma_0",
            "beta_0",
            "quant_scale_0",
            "quant_offset_0",
            "wdqkv",
            "descale_0",
            "bias_0",
            "gamma_1",
            "beta_1",
            "quant_scale_1",
            "quant_offset_1",
            "wuq",
            "descale_1",
            "bias_1",
            "gamma_2",
            "cos",
            "sin",
            "wuk",
            "kv_cache",
            "kv_cache_rope",
            "slot_mapping",
            "ctkv_scale",
            "q_nope_scale",
        ),
        ("q_out", "kv_cache_out", "q_rope_out", "kr_cache_out"),
    ),
    "MlaPrologV2WeightNz": (
        (
            "token_x",
            "weight_dq",
            "weight_uq_qr",
            "weight_uk",
            "weight_dkv_kr",
            "rmsnorm_gamma_cq",
            "rmsnorm_gamma_ckv",
            "rope_sin",
            "rope_cos",
            "cache_index",
            "kv_cache",
            "kr_cache",
            "dequant_scale_x",
            "dequant_scale_w_dq",
            "dequant_scale_w_uq_qr",
            "dequant_scale_w_dkv_kr",
            "quant_scale_ckv",
            "quant_scale_ckr",
            "smooth_scales_cq",
        ),
        ("query", "query_rope", "kv_cache_out", "kr_cache_out", "dequant_scale_q_nope"),
    ),
    "RingAttentionUpdateV2": (
        (
            "prev_attn_out",
            "prev_softmax_max",
            "prev_softmax_sum",
            "cur_attn_out",
            "cur_softmax_max",
            "cur_softmax_sum",
            "actual_seq_qlen",
        ),
        ("attn_out", "softmax_max", "softmax_sum"),
    ),
    "SparseFlashAttention": (
        (
            "query",
            "key",
            "value",
            "sparse_indices",
            "block_table",
            "actual_seq_lengths_query",
            "actual_seq_lengths_kv",
            "query_rope",
            "key_rope",
        ),
        ("attention_out", "softmax_max", "softmax_sum"),
    ),
    "MoeInitRoutingV3": (
        ("x", "expert_idx", "scale", "offset"),
        ("expanded_x", "expanded_row_idx", "expert_tokens_count_or_cumsum", "expanded_scale"),
    ),
}
"""Operator -> inputs and outputs in order."""


def model_of(case: Case, *, symbolic: bool, opset: int | None = None) -> onnx.ModelProto:
    """The single-node model of a case; see `single_node_model`."""
    outputs = {name: expected.dtype for name, expected in case.expected.items()}
    return single_node_model(
        case.operator, case.inputs, case.attributes, outputs, symbolic=symbolic, opset=opset or case.opset
    )


def single_node_model(
    operator: str,
    inputs: Mapping[str, Array],
    attributes: Mapping[str, Any],
    outputs: Mapping[str, np.dtype[Any]],
    *,
    symbolic: bool,
    opset: int,
) -> onnx.ModelProto:
    """A model that calls `operator` once; every input is a graph input and every output a graph output.

    `symbolic` gives every dimension of the graph inputs a name of its own; otherwise they are the sizes of `inputs`.
    Outputs carry an element type only, so that their shapes come from inference.
    """
    input_names, output_names = SIGNATURES[operator]
    node = helper.make_node(operator, _listed(input_names, inputs), _listed(output_names, outputs), domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    values = []
    for name, array in inputs.items():
        shape = [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape
        values.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
    results = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)
        for name, dtype in outputs.items()
    ]
    graph = helper.make_graph([node], operator, values, results)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def run_reference(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of `model` in onnx's ReferenceEvaluator with the operators' numpy implementations."""
    evaluator = ReferenceEvaluator(model, new_ops=ascend_onnx.reference_ops())
    names = [output.name for output in model.graph.output]
    return dict(zip(names, evaluator.run(names, dict(inputs)), strict=True))


def run_body(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of `model` in ONNX Runtime with the operators' bodies attached; `model` stays as it is."""
    with_functions = onnx.ModelProto()
    with_functions.CopyFrom(model)
    ascend_onnx.attach_functions(with_functions)
    options = ort.SessionOptions()
    options.log_severity_level = LOG_ERRORS_ONLY
    session = ort.InferenceSession(
        with_functions.SerializeToString(), sess_options=options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in model.graph.output]
    feeds = {name: to_ort(array) for name, array in inputs.items()}
    return {n: from_ort(v) for n, v in zip(names, session.run_with_ort_values(names, feeds), strict=True)}


def _listed(names: Sequence[str], present: Mapping[str, Any]) -> list[str]:
    """`names` in order, with the empty name for what is absent and nothing behind the last one present."""
    listed = [name if name in present else "" for name in names]
    while listed and not listed[-1]:
        listed.pop()
    return listed


def to_ort(array: Array) -> ort.OrtValue:
    """ONNX Runtime takes types that numpy lacks only as raw bits with an ONNX element type."""
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(contiguous)
    raw = contiguous.view(f"u{array.dtype.itemsize}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, helper.np_dtype_to_tensor_dtype(array.dtype))


def from_ort(value: ort.OrtValue) -> Array:
    """A copy of `value`; `OrtValue.numpy` does not know bfloat16 and float8, so those are read as raw bits."""
    dtype = helper.tensor_dtype_to_np_dtype(value.element_type())
    if dtype.isbuiltin == 1:
        return np.array(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * dtype.itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(raw, dtype).reshape(shape)
