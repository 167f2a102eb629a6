"""MlaPrologV2WeightNz: the projections, norms, rotations and cache writes in front of latent attention.

    token_x -> W_DQ -> RmsNorm -> W_UQ|W_QR -> [nope -> W_UK -> query | RoPE -> query_rope]
    token_x -> W_DKV|W_KR -> [RmsNorm -> kv_cache | RoPE -> kr_cache]

Letters: T (or B, S) tokens; He the hidden size; Hcq and Hckv the ranks of query and key-value; N heads; D and Dr the
head sizes without and with rotary embedding. Which tensors are int8 decides the scenario.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ascend_onnx.operator import Attribute, Call, Input, Operator, Output, Product, Tensor
from ascend_onnx.operators.mla_prolog_v2_weight_nz_body import build_body
from ascend_onnx.operators.mla_prolog_v2_weight_nz_form import PACKABLE, TENSORS, Form, product, token_dims
from ascend_onnx.operators.mla_prolog_v2_weight_nz_limits import CONSTRAINTS
from ascend_onnx.operators.mla_prolog_v2_weight_nz_reference import MlaPrologV2WeightNz

__all__ = ["OPERATOR"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_FLOATS_OR_INT8 = (*_FLOATS, ir.DataType.INT8)
_SCALE = (ir.DataType.FLOAT,)
_SEED = "aclnnMlaPrologV2WeightNz"


def _overload(call: Call) -> str:
    form = Form.of(call)
    parts = [
        "bsh" if form.batched else "th",
        str(call.attributes["cache_mode"]).lower(),
        form.scenario,
        form.float_type.short_name(),
    ]
    types = {name: call.input(name).dtype for name in TENSORS}
    odd = [
        f"{name}_{dtype.short_name()}"
        for name, dtype in types.items()
        if dtype is not None and dtype not in (form.float_type, ir.DataType.INT8)
    ]
    if form.packed:
        parts += ["packed", *(() if form.packed == PACKABLE else form.packed)]
    parts += odd
    parts += ["smooth"] if call.has("smooth_scales_cq") else []
    parts += ["scale_q_nope"] if call.has("dequant_scale_q_nope") else []
    return "_".join(parts)


def _infer(call: Call) -> Mapping[str, Tensor]:
    form = Form.of(call)
    tokens = token_dims(call)
    heads, rank, rope = call.input("weight_uk").dim(0), call.input("weight_uk").dim(2), call.input("rope_sin").dim(-1)
    float_type = call.input("weight_uk").dtype
    query = rope_part = scale = None
    if tokens is not None:
        query, rope_part = (*tokens, heads, rank), (*tokens, heads, rope)
        scale = (product(tokens), heads, 1) if form.query_int8 else (0,)
    return {
        "query": Tensor(ir.DataType.INT8 if form.query_int8 else float_type, query),
        "query_rope": Tensor(float_type, rope_part),
        "kv_cache_out": call.input("kv_cache"),
        "kr_cache_out": call.input("kr_cache"),
        "dequant_scale_q_nope": Tensor(ir.DataType.FLOAT, scale),
    }


OPERATOR = Operator(
    name="MlaPrologV2WeightNz",
    description="Query and key-value projections of multi-head latent attention: low-rank projections, RmsNorm, the "
    "absorbed W_UK, rotary embedding (interleaved in, half-split out) and the write of the new latents into the paged "
    "caches. Tokens with a negative cache_index are not written.",
    source=_SEED,
    aclnn="aclnnMlaPrologV2WeightNz",
    inputs=(
        Input("token_x", _FLOATS_OR_INT8, "(T, He) or (B, S, He)", "The hidden states."),
        Input("weight_dq", _FLOATS_OR_INT8, "(He, Hcq)", "W_DQ, also as FRACTAL_NZ storage of rank 4."),
        Input(
            "weight_uq_qr",
            _FLOATS_OR_INT8,
            "(Hcq, N * (D + Dr))",
            "W_UQ and W_QR, head by head [D | Dr], also as FRACTAL_NZ storage of rank 4.",
        ),
        Input("weight_uk", _FLOATS, "(N, D, Hckv)", "W_UK, the absorbed key up-projection."),
        Input(
            "weight_dkv_kr",
            _FLOATS_OR_INT8,
            "(He, Hckv + Dr)",
            "W_DKV and W_KR, [Hckv | Dr], also as FRACTAL_NZ storage of rank 4.",
        ),
        Input("rmsnorm_gamma_cq", _FLOATS, "(Hcq)", "Weight of the norm of the query latent."),
        Input("rmsnorm_gamma_ckv", _FLOATS, "(Hckv)", "Weight of the norm of the key-value latent."),
        Input("rope_sin", _FLOATS, "(T, Dr) or (B, S, Dr)", "Sines of the rotary embedding."),
        Input("rope_cos", _FLOATS, "(T, Dr) or (B, S, Dr)", "Cosines of the rotary embedding."),
        Input("cache_index", (ir.DataType.INT64,), "(T) or (B, S)", "The cache slot of each token; negative: none."),
        Input("kv_cache", _FLOATS_OR_INT8, "(BlockNum, BlockSize, 1, Hckv)", "The paged cache of latents."),
        Input("kr_cache", _FLOATS_OR_INT8, "(BlockNum, BlockSize, 1, Dr)", "The paged cache of rotary keys."),
        Input("dequant_scale_x", _SCALE, "(T, 1) or (B * S, 1)", "Scale per token of an int8 token_x.", optional=True),
        Input("dequant_scale_w_dq", _SCALE, "(1, Hcq)", "Scale per column of an int8 weight_dq.", optional=True),
        Input(
            "dequant_scale_w_uq_qr",
            _SCALE,
            "(1, N * (D + Dr))",
            "Scale per column of an int8 weight_uq_qr.",
            optional=True,
        ),
        Input(
            "dequant_scale_w_dkv_kr",
            _SCALE,
            "(1, Hckv + Dr)",
            "Scale per column of an int8 weight_dkv_kr.",
            optional=True,
        ),
        Input(
            "quant_scale_ckv",
            _SCALE,
            "(1, Hckv)",
            "Factor per lane for an int8 kv_cache; only the first counts when token_x is int8 too.",
            optional=True,
        ),
        Input("quant_scale_ckr", _SCALE, "(1, Dr)", "Factor per lane for an int8 kr_cache.", optional=True),
        Input(
            "smooth_scales_cq",
            _SCALE,
            "(1, Hcq)",
            "Factor per lane of the query latent before its dynamic quantisation.",
            optional=True,
        ),
    ),
    outputs=(
        Output("query", _FLOATS_OR_INT8, "(T, N, Hckv) or (B, S, N, Hckv)", "The query in the latent space."),
        Output("query_rope", _FLOATS, "(T, N, Dr) or (B, S, N, Dr)", "The rotary part of the query."),
        Output("kv_cache_out", _FLOATS_OR_INT8, "as kv_cache", "kv_cache with the new latents."),
        Output("kr_cache_out", _FLOATS_OR_INT8, "as kr_cache", "kr_cache with the new rotary keys."),
        Output(
            "dequant_scale_q_nope",
            _SCALE,
            "(T, N, 1) or (B * S, N, 1)",
            "Scale per token and head of an int8 query.",
            optional=True,
        ),
    ),
    attributes=(
        Attribute("rmsnorm_epsilon_cq", ir.AttributeType.FLOAT, "Epsilon of the query norm.", default=1e-5),
        Attribute("rmsnorm_epsilon_ckv", ir.AttributeType.FLOAT, "Epsilon of the key-value norm.", default=1e-5),
        Attribute(
            "cache_mode",
            ir.AttributeType.STRING,
            "Order inside a cache block: rows (PA_BSND) or fractals (PA_NZ).",
            default="PA_BSND",
            choices=("PA_BSND", "PA_NZ"),
        ),
    ),
    infer=_infer,
    overload=_overload,
    body=build_body,
    reference=MlaPrologV2WeightNz,
    products=frozenset({Product.A2, Product.A3}),
    constraints=CONSTRAINTS,
)
