"""Limits of MlaPrologV2WeightNz."""

from __future__ import annotations

from ascend_onnx.operator import Dim

from .node import BF16, F16, F32, I8, I32, I64, Change, Described, Node, Rule, change, renamed

PROLOG = Node(
    "MlaPrologV2WeightNz",
    {
        "token_x": (BF16, ("B", 1, 7168)),
        "weight_dq": (BF16, (7168, 1536)),
        "weight_uq_qr": (BF16, (1536, 6144)),
        "weight_uk": (BF16, (32, 128, 512)),
        "weight_dkv_kr": (BF16, (7168, 576)),
        "rmsnorm_gamma_cq": (BF16, (1536,)),
        "rmsnorm_gamma_ckv": (BF16, (512,)),
        "rope_sin": (BF16, ("B", 1, 64)),
        "rope_cos": (BF16, ("B", 1, 64)),
        "cache_index": (I64, ("B", 1)),
        "kv_cache": (BF16, ("blocks", 128, 1, 512)),
        "kr_cache": (BF16, ("blocks", 128, 1, 64)),
    },
    ("query", "query_rope", "kv_cache_out", "kr_cache_out"),
)
PARTIAL = {"weight_uq_qr": (I8, (1536, 6144)), "dequant_scale_w_uq_qr": (F32, (1, 6144))}
PARTIAL_KV = {
    **PARTIAL,
    "kv_cache": (I8, ("blocks", 128, 1, 512)),
    "kr_cache": (I8, ("blocks", 128, 1, 64)),
    "quant_scale_ckv": (F32, (1, 512)),
    "quant_scale_ckr": (F32, (1, 64)),
}
FULL = {
    **PARTIAL,
    "token_x": (I8, ("B", 1, 7168)),
    "weight_dq": (I8, (7168, 1536)),
    "weight_dkv_kr": (I8, (7168, 576)),
    "dequant_scale_x": (F32, ("B*1", 1)),
    "dequant_scale_w_dq": (F32, (1, 1536)),
    "dequant_scale_w_dkv_kr": (F32, (1, 576)),
}
FULL_KV = {**FULL, "kv_cache": (I8, ("blocks", 128, 1, 512)), "quant_scale_ckv": (F32, (1, 512))}
ALL_PROLOG_OUTPUTS = (*PROLOG.outputs, "dequant_scale_q_nope")


def hidden(size: int) -> dict[str, Described]:
    return {
        "token_x": (BF16, ("B", 1, size)),
        "weight_dq": (BF16, (size, 1536)),
        "weight_dkv_kr": (BF16, (size, 576)),
    }


def heads(count: int) -> dict[str, Described]:
    return {"weight_uk": (BF16, (count, 128, 512)), "weight_uq_qr": (BF16, (1536, count * 192))}


def tokens(*dims: Dim) -> dict[str, Described]:
    return {
        "token_x": (BF16, (*dims, 7168)),
        "rope_sin": (BF16, (*dims, 64)),
        "rope_cos": (BF16, (*dims, 64)),
        "cache_index": (I64, dims),
    }


def scaled_tokens(count: int, scales: int) -> dict[str, Described]:
    return {**FULL, **tokens(count), "token_x": (I8, (count, 7168)), "dequant_scale_x": (F32, (scales, 1))}


def caches(block_size: int) -> dict[str, Described]:
    return {"kv_cache": (BF16, (4, block_size, 1, 512)), "kr_cache": (BF16, (4, block_size, 1, 64))}


RULES: list[Rule] = [
    (PROLOG, "type", change(renamed(rope_sin=(F16, ("B", 1, 64)))), change()),
    (PROLOG, "type", change(renamed(weight_uk=(F32, (32, 128, 512)))), change()),
    (PROLOG, "scenario", change({**PARTIAL_KV, "kr_cache": (BF16, ("blocks", 128, 1, 64))}), change(PARTIAL_KV)),
    (PROLOG, "scenario", change({**FULL_KV, "kr_cache": (I8, ("blocks", 128, 1, 64))}), change(FULL_KV)),
    (PROLOG, "scale", change({**PARTIAL, "dequant_scale_w_uq_qr": None}), change(PARTIAL)),
    (
        PROLOG,
        "scale",
        change(renamed(smooth_scales_cq=(F32, (1, 1536)))),
        change({**PARTIAL, "smooth_scales_cq": (F32, (1, 1536))}),
    ),
    (PROLOG, "scale", change({**FULL_KV, "quant_scale_ckr": (F32, (1, 64))}), change(FULL_KV)),
    (PROLOG, "scale_shape", change({**PARTIAL, "dequant_scale_w_uq_qr": (F32, (6144,))}), change(PARTIAL)),
    (PROLOG, "scale_shape", change({**FULL, "dequant_scale_w_dq": (F32, (1, 1535))}), change(FULL)),
    (PROLOG, "rank", change(renamed(cache_index=(I64, ("B",)))), change()),
    (
        PROLOG,
        "rank",
        change(renamed(weight_dq=(BF16, (7168, 96, 16)))),
        change(renamed(weight_dq=(BF16, (96, 448, 16, 16)))),
    ),
    (PROLOG, "rank", change(renamed(token_x=(BF16, (1, "B", 1, 7168)))), change(tokens("T"))),
    (PROLOG, "tokens", change({**tokens(8, 1), "rope_cos": (BF16, (8, 2, 64))}), change(tokens(8, 1))),
    (PROLOG, "tokens", change({**tokens(8), "cache_index": (I64, (7,))}), change(tokens(8))),
    (PROLOG, "sizes", change({**hidden(6144), "weight_dkv_kr": (BF16, (7168, 576))}), change(hidden(6144))),
    (PROLOG, "sizes", change({**caches(64), "kr_cache": (BF16, (4, 128, 1, 64))}), change(caches(64))),
    (
        PROLOG,
        "empty_input",
        change({**heads(1), "weight_uk": (BF16, (0, 128, 512))}),
        change({**heads(1), **tokens(0, 0)}),
    ),
    (PROLOG, "token_count", change(tokens(1048577)), change(tokens(1048576))),
    (PROLOG, "token_count", change(tokens(65537, 1)), change(tokens(65536, 1))),
    (PROLOG, "hidden", change(hidden(8704)), change(hidden(8192))),
    (PROLOG, "heads", change(heads(24)), change(heads(128))),
    (PROLOG, "hcq", change(renamed(rmsnorm_gamma_cq=(BF16, (1024,)))), change()),
    (
        PROLOG,
        "hcq",
        change(renamed(weight_uq_qr=(BF16, (384, 64, 16, 16)))),
        change(renamed(weight_uq_qr=(BF16, (384, 96, 16, 16)))),
    ),
    (PROLOG, "hckv", change(renamed(rmsnorm_gamma_ckv=(BF16, (256,)))), change()),
    (PROLOG, "head_dim", change(renamed(weight_uk=(BF16, (32, 192, 512)))), change()),
    (PROLOG, "rope_dim", change(renamed(rope_sin=(BF16, ("B", 1, 32)))), change()),
    (PROLOG, "query_width", change(renamed(weight_uq_qr=(BF16, (1536, 6143)))), change()),
    (PROLOG, "kv_width", change(renamed(weight_dkv_kr=(BF16, (7168, 640)))), change()),
    (PROLOG, "kv_heads", change(renamed(kv_cache=(BF16, (4, 128, 2, 512)))), change()),
    (PROLOG, "block_size", change(caches(8)), change(caches(16))),
    (PROLOG, "block_size", change(caches(1040)), change(caches(1024))),
    (PROLOG, "attribute_value", change(cache_mode="BNSD"), change(cache_mode="PA_NZ")),
    (PROLOG, "missing", change(renamed(weight_uk=None)), change()),
    (PROLOG, "input_type", change(renamed(cache_index=(I32, ("B", 1)))), change()),
    (PROLOG, "unproduced_output", change(FULL, ALL_PROLOG_OUTPUTS), change(FULL_KV, ALL_PROLOG_OUTPUTS)),
    (PROLOG, "tokens", change({**tokens(8, 1), "rope_sin": (BF16, (7, 1, 64))}), change(tokens(8, 1))),
    (PROLOG, "sizes", change({**caches(64), "kr_cache": (BF16, (5, 64, 1, 64))}), change(caches(64))),
    (PROLOG, "scale_shape", change(scaled_tokens(8, 7)), change(scaled_tokens(8, 8))),
    (PROLOG, "scale_shape", change({**PARTIAL_KV, "quant_scale_ckr": (F32, (1, 512))}), change(PARTIAL_KV)),
]

RELAXED: list[tuple[Node, str, Change, Change]] = [
    # node, bound, what it lets pass, what it does not
    (PROLOG, "hidden", change(hidden(64)), change({**hidden(64), "weight_dq": (BF16, (96, 1536))})),
    (
        PROLOG,
        "head_dim",
        change(renamed(weight_uk=(BF16, (32, 16, 512)), weight_uq_qr=(BF16, (1536, 32 * 80)))),
        change(renamed(weight_uk=(BF16, (32, 16, 512)))),
    ),
    (
        PROLOG,
        "rank",
        change(
            {"weight_dq": (BF16, (7168, 64)), "weight_uq_qr": (BF16, (64, 6144)), "rmsnorm_gamma_cq": (BF16, (64,))}
        ),
        change(renamed(weight_dq=(BF16, (7168, 64)))),
    ),
]
