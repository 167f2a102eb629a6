"""A decoder small enough to run anywhere, with every stage of a DeepSeek-style layer as an operator of the domain.

    token, position -> embedding -> 2 x [latent attention over paged caches, mixture of experts] -> logits -> next_token

One token a step, bfloat16 in the operators, float32 around them, because the CPU provider of ONNX Runtime has no
bfloat16 maths. Sizes: He 1024, 4 heads, 8 experts of which 2 are chosen, 4 cache pages of 16 slots. Attention
looks at the 16 positions whose rotary keys answer best to the rotary query.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ascend_onnx import attach_functions

__all__ = ["CACHES", "LAYERS", "PAGES", "PAGE_SIZE", "VOCABULARY", "build", "empty_caches"]

LAYERS, HIDDEN, HEADS, NOPE, ROPE, LATENT, QUERY_RANK = 2, 1024, 4, 128, 64, 512, 1536
EXPERTS, CHOSEN, INNER = 8, 2, 256
PAGES, PAGE_SIZE, SELECTED, VOCABULARY = 4, 16, 16, 32
SLOTS = PAGES * PAGE_SIZE
SEED = 10
"""With these weights the best logit leads by more than ten times what rounding changes, at 32 steps from token 1."""
SCALE = (NOPE + ROPE) ** -0.5
CACHES = {f"{kind}_cache_{layer}": width for layer in range(LAYERS) for kind, width in (("kv", LATENT), ("kr", ROPE))}
"""The caches, inputs and with `_out` behind their names outputs, and how wide each is."""

_HEADER = f"""
<ir_version: 10, opset_import: ["" : 18, "ai.ascend" : 1]>
small_decoder (int64[1] token, int64[1] position{{cache_inputs}})
    => (int64[1] next_token, float[1,{VOCABULARY}] logits{{cache_outputs}}) {{{{
  hidden_0 = Gather (embedding, token)
  sin = Gather (sin_table, position)
  cos = Gather (cos_table, position)
  seen = Add (position, one)
  kv_length = Cast <to = {TensorProto.INT32}> (seen)
"""

_LAYER = f"""
  variance_{{n}} = ReduceMean (square_{{n}}, last_axis)
  deviation_{{n}} = Sqrt (variance_{{n}})
  normal_{{n}} = Div (hidden_{{n}}, deviation_{{n}})
  x_{{n}} = Cast <to = {TensorProto.BFLOAT16}> (normal_{{n}})
  query_{{n}}, query_rope_{{n}}, kv_cache_{{n}}_out, kr_cache_{{n}}_out = ai.ascend.MlaPrologV2WeightNz (
    x_{{n}}, weight_dq_{{n}}, weight_uq_qr_{{n}}, weight_uk_{{n}}, weight_dkv_kr_{{n}}, gamma_cq_{{n}}, gamma_ckv_{{n}},
    sin, cos, position, kv_cache_{{n}}, kr_cache_{{n}})

  rotary_query_{{n}} = Cast <to = {TensorProto.FLOAT}> (query_rope_{{n}})
  summed_query_{{n}} = ReduceSum <keepdims = 0> (rotary_query_{{n}}, heads_axis)
  rotary_keys_{{n}} = Cast <to = {TensorProto.FLOAT}> (kr_cache_{{n}}_out)
  keys_{{n}} = Reshape (rotary_keys_{{n}}, keys_shape)
  keys_as_columns_{{n}} = Transpose <perm = [1, 0]> (keys_{{n}})
  scores_{{n}} = MatMul (summed_query_{{n}}, keys_as_columns_{{n}})
  written_{{n}} = Less (slots, seen)
  masked_{{n}} = Where (written_{{n}}, scores_{{n}}, minus_infinity)
  best_{{n}}, chosen_{{n}} = TopK <axis = -1> (masked_{{n}}, selected)
  filled_{{n}} = Greater (best_{{n}}, minus_infinity)
  packed_{{n}} = Where (filled_{{n}}, chosen_{{n}}, nothing)
  list_{{n}} = Cast <to = {TensorProto.INT32}> (packed_{{n}})
  indices_{{n}} = Unsqueeze (list_{{n}}, heads_axis)
  attended_{{n}} = ai.ascend.SparseFlashAttention <scale_value = {SCALE}, layout_query = "TND", layout_kv = "PA_BSND"> (
    query_{{n}}, kv_cache_{{n}}_out, kv_cache_{{n}}_out, indices_{{n}}, block_table, query_length, kv_length,
    query_rope_{{n}}, kr_cache_{{n}}_out)

  latent_{{n}} = Cast <to = {TensorProto.FLOAT}> (attended_{{n}})
  by_head_{{n}} = Transpose <perm = [1, 0, 2]> (latent_{{n}})
  values_{{n}} = MatMul (by_head_{{n}}, weight_uv_{{n}})
  by_token_{{n}} = Transpose <perm = [1, 0, 2]> (values_{{n}})
  joined_{{n}} = Reshape (by_token_{{n}}, joined_shape)
  attention_{{n}} = MatMul (joined_{{n}}, weight_o_{{n}})
  middle_{{n}} = Add (hidden_{{n}}, attention_{{n}})

  middle_square_{{n}} = Mul (middle_{{n}}, middle_{{n}})
  middle_variance_{{n}} = ReduceMean (middle_square_{{n}}, last_axis)
  middle_deviation_{{n}} = Sqrt (middle_variance_{{n}})
  routed_{{n}} = Div (middle_{{n}}, middle_deviation_{{n}})
  routed_bf16_{{n}} = Cast <to = {TensorProto.BFLOAT16}> (routed_{{n}})
  affinity_{{n}} = MatMul (routed_{{n}}, router_{{n}})
  strength_{{n}}, expert_{{n}} = TopK <axis = -1> (affinity_{{n}}, chosen_experts)
  share_{{n}} = Softmax <axis = -1> (strength_{{n}})
  expert_ids_{{n}} = Cast <to = {TensorProto.INT32}> (expert_{{n}})
  expanded_{{n}}, row_{{n}}, count_{{n}} = ai.ascend.MoeInitRoutingV3 <expert_num = {EXPERTS},
    expert_tokens_num_type = 1, expert_tokens_num_flag = 1> (routed_bf16_{{n}}, expert_ids_{{n}})
  rows_{{n}} = Cast <to = {TensorProto.FLOAT}> (expanded_{{n}})
  end_{{n}} = CumSum (count_{{n}}, first_axis)
  begin_{{n}} = Sub (end_{{n}}, count_{{n}})
{{experts}}
  sorted_{{n}} = Concat <axis = 0> ({{expert_outputs}})
  unsorted_{{n}} = Gather (sorted_{{n}}, row_{{n}})
  shares_{{n}} = Unsqueeze (share_{{n}}, last_axis)
  by_choice_{{n}} = Unsqueeze (unsorted_{{n}}, first)
  weighed_{{n}} = Mul (by_choice_{{n}}, shares_{{n}})
  mixture_{{n}} = ReduceSum <keepdims = 0> (weighed_{{n}}, heads_axis)
  hidden_{{m}} = Add (middle_{{n}}, mixture_{{n}})
"""

_EXPERT = """
  from_{n}_{e} = Slice (begin_{n}, place_{e}, place_{e}_end)
  to_{n}_{e} = Slice (end_{n}, place_{e}, place_{e}_end)
  part_{n}_{e} = Slice (rows_{n}, from_{n}_{e}, to_{n}_{e}, first)
  gate_{n}_{e} = MatMul (part_{n}_{e}, gate_weight_{n}_{e})
  open_{n}_{e} = Sigmoid (gate_{n}_{e})
  active_{n}_{e} = Mul (gate_{n}_{e}, open_{n}_{e})
  up_{n}_{e} = MatMul (part_{n}_{e}, up_weight_{n}_{e})
  inner_{n}_{e} = Mul (active_{n}_{e}, up_{n}_{e})
  down_{n}_{e} = MatMul (inner_{n}_{e}, down_weight_{n}_{e})
"""

_END = f"""
  logits = MatMul (hidden_{LAYERS}, head)
  next_token = ArgMax <axis = -1, keepdims = 0> (logits)
}}
"""


def build(seed: int = SEED) -> onnx.ModelProto:
    """The model with weights drawn from `seed`, bodies attached."""
    model = onnx.parser.parse_model(_text())
    rng = np.random.default_rng(seed)
    arrays = {**_constants(), **_weights(rng)}
    model.graph.initializer.extend(_tensor(name, array) for name, array in arrays.items())
    return attach_functions(model)


def empty_caches() -> dict[str, NDArray[ml_dtypes.bfloat16]]:
    """The caches before the first token."""
    return {name: np.zeros((PAGES, PAGE_SIZE, 1, width), ml_dtypes.bfloat16) for name, width in CACHES.items()}


def _text() -> str:
    def listed(suffix: str) -> str:
        return "".join(f", bfloat16[{PAGES},{PAGE_SIZE},1,{width}] {name}{suffix}" for name, width in CACHES.items())

    parts = [_HEADER.format(cache_inputs=listed(""), cache_outputs=listed("_out"))]
    for n in range(LAYERS):
        experts = "".join(_EXPERT.format(n=n, e=e) for e in range(EXPERTS))
        outputs = ", ".join(f"down_{n}_{e}" for e in range(EXPERTS))
        parts.append(f"  square_{n} = Mul (hidden_{n}, hidden_{n})\n")
        parts.append(_LAYER.format(n=n, m=n + 1, experts=experts, expert_outputs=outputs))
    return "".join([*parts, _END])


def _constants() -> dict[str, NDArray[np.generic]]:
    angle = np.arange(SLOTS)[:, None] / 10000 ** (np.arange(ROPE // 2) / (ROPE // 2))
    angle = np.concatenate([angle, angle], axis=1)

    def int64(*values: int) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    return {
        "sin_table": np.sin(angle).astype(ml_dtypes.bfloat16),
        "cos_table": np.cos(angle).astype(ml_dtypes.bfloat16),
        "slots": np.arange(SLOTS, dtype=np.int64)[None],
        "minus_infinity": np.array([-np.inf], np.float32),
        "block_table": np.arange(PAGES, dtype=np.int32)[None],
        "query_length": np.array([1], np.int32),
        "one": int64(1),
        "first": int64(0),
        "first_axis": np.array(0, np.int64),
        "last_axis": int64(-1),
        "heads_axis": int64(1),
        "selected": int64(SELECTED),
        "chosen_experts": int64(CHOSEN),
        "nothing": int64(-1),
        "keys_shape": int64(SLOTS, ROPE),
        "joined_shape": int64(1, HEADS * NOPE),
        **{f"place_{e}": int64(e) for e in range(EXPERTS)},
        **{f"place_{e}_end": int64(e + 1) for e in range(EXPERTS)},
    }


def _weights(rng: np.random.Generator) -> dict[str, NDArray[np.generic]]:
    def drawn(*shape: int, fan_in: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) / np.sqrt(np.float32(fan_in))

    weights: dict[str, NDArray[np.generic]] = {
        "embedding": drawn(VOCABULARY, HIDDEN, fan_in=1),
        "head": drawn(HIDDEN, VOCABULARY, fan_in=HIDDEN),
    }
    for n in range(LAYERS):
        packed = {
            "weight_dq": drawn(HIDDEN, QUERY_RANK, fan_in=HIDDEN),
            "weight_uq_qr": drawn(QUERY_RANK, HEADS * (NOPE + ROPE), fan_in=QUERY_RANK),
            "weight_uk": drawn(HEADS, NOPE, LATENT, fan_in=NOPE),
            "weight_dkv_kr": drawn(HIDDEN, LATENT + ROPE, fan_in=HIDDEN),
            "gamma_cq": np.ones(QUERY_RANK, np.float32),
            "gamma_ckv": np.ones(LATENT, np.float32),
        }
        weights |= {f"{name}_{n}": array.astype(ml_dtypes.bfloat16) for name, array in packed.items()}
        weights[f"weight_uv_{n}"] = drawn(HEADS, LATENT, NOPE, fan_in=LATENT)
        weights[f"weight_o_{n}"] = drawn(HEADS * NOPE, HIDDEN, fan_in=HEADS * NOPE)
        weights[f"router_{n}"] = drawn(HIDDEN, EXPERTS, fan_in=HIDDEN)
        for e in range(EXPERTS):
            weights[f"gate_weight_{n}_{e}"] = drawn(HIDDEN, INNER, fan_in=HIDDEN)
            weights[f"up_weight_{n}_{e}"] = drawn(HIDDEN, INNER, fan_in=HIDDEN)
            weights[f"down_weight_{n}_{e}"] = drawn(INNER, HIDDEN, fan_in=INNER)
    return weights


def _tensor(name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)
