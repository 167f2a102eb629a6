"""One call of an operator through its two aclnn functions, from arrays by the names of the ONNX signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import Array

from .acl import FORMAT_ND, FORMAT_NZ, Acl

__all__ = ["DEFAULTS", "PARAMETERS", "Input", "Launch", "Output", "Packed", "Strided", "first_phase", "launch"]

PARAMETERS: Mapping[str, str] = {
    # The arguments in order: inputs, attributes (int, bool, double, string or int array), and outputs.
    "RingAttentionUpdateV2": (
        "in:prev_attn_out in:prev_softmax_max in:prev_softmax_sum in:cur_attn_out in:cur_softmax_max in:cur_softmax_sum"
        " in:actual_seq_qlen string:input_layout string:input_softmax_layout"
        " out:attn_out out:softmax_max out:softmax_sum"
    ),
    "MoeInitRoutingV3": (
        "in:x in:expert_idx in:scale in:offset int:active_num int:expert_capacity int:expert_num int:drop_pad_mode"
        " int:expert_tokens_num_type bool:expert_tokens_num_flag int:quant_mode ints:active_expert_range"
        " int:row_idx_type out:expanded_x out:expanded_row_idx out:expert_tokens_count_or_cumsum out:expanded_scale"
    ),
    "SparseFlashAttention": (
        "in:query in:key in:value in:sparse_indices in:block_table in:actual_seq_lengths_query"
        " in:actual_seq_lengths_kv in:query_rope in:key_rope double:scale_value int:sparse_block_size"
        " string:layout_query string:layout_kv int:sparse_mode int:pre_tokens int:next_tokens int:attention_mode"
        " bool:return_softmax_lse out:attention_out out:softmax_max out:softmax_sum"
    ),
    "MlaPrologV2WeightNz": (
        "in:token_x in:weight_dq in:weight_uq_qr in:weight_uk in:weight_dkv_kr in:rmsnorm_gamma_cq in:rmsnorm_gamma_ckv"
        " in:rope_sin in:rope_cos in:cache_index in:kv_cache in:kr_cache in:dequant_scale_x in:dequant_scale_w_dq"
        " in:dequant_scale_w_uq_qr in:dequant_scale_w_dkv_kr in:quant_scale_ckv in:quant_scale_ckr in:smooth_scales_cq"
        " double:rmsnorm_epsilon_cq double:rmsnorm_epsilon_ckv string:cache_mode"
        " out:query out:query_rope out:dequant_scale_q_nope"
    ),
    "MlaPreprocess": (
        "in:input in:gamma_0 in:beta_0 in:quant_scale_0 in:quant_offset_0 in:wdqkv in:descale_0 in:bias_0 in:gamma_1"
        " in:beta_1 in:quant_scale_1 in:quant_offset_1 in:wuq in:descale_1 in:bias_1 in:gamma_2 in:cos in:sin in:wuk"
        " in:kv_cache in:kv_cache_rope in:slot_mapping in:ctkv_scale in:q_nope_scale int:wdq_dim int:q_rope_dim"
        " int:k_rope_dim double:epsilon int:q_rotary_coeff int:k_rotary_coeff bool:transpose_wdq bool:transpose_wuq"
        " bool:transpose_wuk int:cache_mode int:quant_mode bool:do_rms_norm int:wdkv_split_count"
        " out:q_out out:kv_cache_out out:q_rope_out out:kr_cache_out"
    ),
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "RingAttentionUpdateV2": {"input_layout": "SBH", "input_softmax_layout": ""},
    "MoeInitRoutingV3": {
        "active_num": -1,
        "expert_capacity": -1,
        "drop_pad_mode": 0,
        "expert_tokens_num_type": 0,
        "expert_tokens_num_flag": 0,
        "quant_mode": -1,
        "row_idx_type": 0,
    },
    "SparseFlashAttention": {
        "sparse_block_size": 1,
        "layout_query": "BSND",
        "layout_kv": "BSND",
        "sparse_mode": 3,
        "pre_tokens": 2**63 - 1,
        "next_tokens": 2**63 - 1,
        "attention_mode": 2,
        "return_softmax_lse": 0,
    },
    "MlaPrologV2WeightNz": {
        "rmsnorm_epsilon_cq": 1e-5,
        "rmsnorm_epsilon_ckv": 1e-5,
        "cache_mode": "PA_BSND",
    },
    "MlaPreprocess": {
        "wdq_dim": 1536,
        "q_rope_dim": 64,
        "k_rope_dim": 64,
        "epsilon": 1e-6,
        "q_rotary_coeff": 2,
        "k_rotary_coeff": 2,
        "transpose_wdq": 1,
        "transpose_wuq": 1,
        "transpose_wuk": 1,
        "cache_mode": 0,
        "quant_mode": 0,
        "do_rms_norm": 1,
        "wdkv_split_count": 1,
    },
}

IN_PLACE = {
    "MlaPrologV2WeightNz": {"kv_cache": "kv_cache_out", "kr_cache": "kr_cache_out"},
    "MlaPreprocess": {"kv_cache": "kv_cache_out", "kv_cache_rope": "kr_cache_out"},
}
"""Inputs that the operator changes, and the ONNX outputs that are what has become of them."""


@dataclass
class Strided:
    """A view of a contiguous `buffer`; `strides` and `offset` in elements. An output that is one gives the buffer."""

    buffer: Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass
class Packed:
    """A weight in storage order; `shape` is the matrix that the operator sees."""

    storage: Array
    shape: tuple[int, ...]


Input = Array | Packed | Strided | None
Output = tuple[Sequence[int], np.dtype[Any]] | Strided
"""Shape and element type, or a view."""


@dataclass
class Launch:
    """Handles and addresses of one call between its two phases."""

    acl: Acl
    operator: str
    stack: ExitStack
    outputs: Mapping[str, Output]
    addresses: dict[str, int]
    tensors: dict[str, int]
    executor: int
    workspace_size: int
    repeatable: bool = False
    executor_alive: bool = True

    def set_repeatable(self) -> None:
        self.acl.call("aclSetAclOpExecutorRepeatable", self.executor)
        self.repeatable = True

    def destroy_executor(self) -> None:
        """Destroys the executor, if no second phase has freed it."""
        if self.executor_alive:
            self.executor_alive = False
            self.acl.call("aclDestroyAclOpExecutor", self.executor)

    def second_phase(self, stream: int) -> None:
        """Puts the kernel on `stream`, with a workspace that lives until the stack is closed."""
        workspace = self.acl.malloc(self.workspace_size) if self.workspace_size else None
        if workspace is not None:
            self.stack.callback(self.acl.free, workspace)
        function = getattr(self.acl.library, f"aclnn{self.operator}")
        self.executor_alive = self.repeatable
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
        self.acl.call(f"aclnn{self.operator}", workspace, self.workspace_size, self.executor, stream)

    def result(self, name: str) -> Array:
        output = self.outputs[name]
        shape, dtype = (output.buffer.shape, output.buffer.dtype) if isinstance(output, Strided) else output
        return self.acl.download(self.addresses[name], shape, dtype)


def first_phase(
    acl: Acl,
    stack: ExitStack,
    operator: str,
    inputs: Mapping[str, Input],
    attributes: Mapping[str, Any],
    outputs: Mapping[str, Output],
) -> Launch:
    """The first phase. What it makes is released when `stack` is closed."""
    in_place = IN_PLACE.get(operator, {})
    values = {**DEFAULTS[operator], **attributes}
    addresses: dict[str, int] = {}
    tensors: dict[str, int] = {}

    def keep_tensor(name: str, *arguments: Any, **options: Any) -> int:
        handle = acl.tensor(*arguments, **options)
        stack.callback(acl.call, "aclDestroyTensor", handle)
        tensors[name] = handle
        return handle

    def strided_tensor(name: str, view: Strided) -> int:
        layout = {"strides": view.strides, "offset": view.offset, "storage": view.buffer.shape}
        return keep_tensor(name, addresses[name], view.shape, view.buffer.dtype, **layout)

    def input_tensor(name: str) -> ctypes.c_void_p:
        given = inputs.get(name)
        if given is None:
            return ctypes.c_void_p(None)
        array = given.storage if isinstance(given, Packed) else given.buffer if isinstance(given, Strided) else given
        address = acl.upload(array)
        stack.callback(acl.free, address)
        addresses[name] = addresses[in_place.get(name, name)] = address
        if isinstance(given, Packed):
            handle = keep_tensor(name, address, given.shape, array.dtype, format=FORMAT_NZ, storage=array.shape)
        elif isinstance(given, Strided):
            handle = strided_tensor(name, given)
        else:
            handle = keep_tensor(name, address, array.shape, array.dtype, format=FORMAT_ND)
        return ctypes.c_void_p(handle)

    def output_tensor(name: str) -> ctypes.c_void_p:
        if name not in outputs:
            return ctypes.c_void_p(None)
        output = outputs[name]
        if isinstance(output, Strided):
            if name not in addresses:
                addresses[name] = acl.upload(output.buffer)
                stack.callback(acl.free, addresses[name])
            return ctypes.c_void_p(strided_tensor(name, output))
        shape, dtype = output
        if name not in addresses:
            addresses[name] = acl.malloc(max(1, int(np.prod(shape)) * dtype.itemsize))
            stack.callback(acl.free, addresses[name])
        return ctypes.c_void_p(keep_tensor(name, addresses[name], shape, dtype))

    def int_array(name: str) -> ctypes.c_void_p:
        if values.get(name) is None:
            return ctypes.c_void_p(None)
        handle = acl.int_array(values[name])
        stack.callback(acl.call, "aclDestroyIntArray", handle)
        return ctypes.c_void_p(handle)

    convert: Mapping[str, Callable[[str], Any]] = {
        "in": input_tensor,
        "out": output_tensor,
        "ints": int_array,
        "int": lambda name: ctypes.c_int64(values[name]),
        "bool": lambda name: ctypes.c_bool(values[name]),
        "double": lambda name: ctypes.c_double(values[name]),
        "string": lambda name: ctypes.c_char_p(None if values[name] is None else values[name].encode()),
    }
    parameters = (parameter.split(":") for parameter in PARAMETERS[operator].split())
    arguments = [convert[kind](name) for kind, name in parameters]
    workspace_size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
    acl.call(f"aclnn{operator}GetWorkspaceSize", *arguments, ctypes.byref(workspace_size), ctypes.byref(executor))
    assert executor.value is not None
    called = Launch(acl, operator, stack, outputs, addresses, tensors, executor.value, workspace_size.value)
    stack.callback(called.destroy_executor)
    return called


def launch(
    acl: Acl,
    operator: str,
    inputs: Mapping[str, Input],
    attributes: Mapping[str, Any],
    outputs: Mapping[str, Output],
) -> dict[str, Array]:
    """Both phases on a stream of their own, and the outputs; inputs that are changed in place count as such."""
    with ExitStack() as stack:
        stream = acl.stream()
        stack.callback(acl.call, "aclrtDestroyStream", stream)
        called = first_phase(acl, stack, operator, inputs, attributes, outputs)
        called.second_phase(stream)
        acl.call("aclrtSynchronizeStream", stream)
        return {name: called.result(name) for name in outputs}
