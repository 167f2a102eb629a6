"""Limits of MlaPreprocess."""

from __future__ import annotations

from collections.abc import Mapping

from ascend_onnx.operator import Dim

from .node import BF16, F16, F32, I8, I32, I64, Change, Described, Node, Rule, change, renamed

PREPROCESS = Node(
    "MlaPreprocess",
    {
        "input": (BF16, ("T", 7168)),
        "gamma_0": (BF16, (7168,)),
        "beta_0": (BF16, (7168,)),
        "quant_scale_0": (BF16, (1,)),
        "quant_offset_0": (I8, (1,)),
        "wdqkv": (I8, (2112, 7168)),
        "descale_0": (F32, (2112,)),
        "bias_0": (I32, (2112,)),
        "gamma_1": (BF16, (1536,)),
        "beta_1": (BF16, (1536,)),
        "quant_scale_1": (BF16, (1,)),
        "quant_offset_1": (I8, (1,)),
        "wuq": (I8, (6144, 1536)),
        "descale_1": (F32, (6144,)),
        "bias_1": (I32, (6144,)),
        "gamma_2": (BF16, (512,)),
        "cos": (BF16, ("T", 64)),
        "sin": (BF16, ("T", 64)),
        "wuk": (BF16, (32, 128, 512)),
        "kv_cache": (BF16, (192, 128, 1, 576)),
        "slot_mapping": (I32, ("T",)),
    },
    ("q_out", "kv_cache_out"),
)
ALL_OUTPUTS = ("q_out", "kv_cache_out", "q_rope_out", "kr_cache_out")
SPLIT: Mapping[str, Described] = {"kv_cache": (BF16, (192, 128, 1, 512)), "kv_cache_rope": (BF16, (192, 128, 1, 64))}
NZ_INT8: Mapping[str, Described] = {
    "kv_cache": (I8, (192, 16, 128, 32)),
    "kv_cache_rope": (BF16, (192, 4, 128, 16)),
    "ctkv_scale": (BF16, (1,)),
    "q_nope_scale": (BF16, (32,)),
}
NZ: Mapping[str, Described] = {"kv_cache": (BF16, (192, 32, 128, 16)), "kv_cache_rope": (BF16, (192, 4, 128, 16))}
FLOAT_WEIGHTS: Mapping[str, Described] = {"wdqkv": (BF16, (2112, 7168)), "wuq": (BF16, (6144, 1536))}
IN_FLOAT16: Mapping[str, Described] = {
    **{name: (F16, shape) for name, (dtype, shape) in PREPROCESS.inputs.items() if dtype == BF16},
    "descale_0": (I64, (2112,)),
    "descale_1": (I64, (6144,)),
}


def split(**changes: Described | None) -> Change:
    return change({**SPLIT, **changes}, ALL_OUTPUTS, cache_mode=1)


def int8_cache(**changes: Described | None) -> Change:
    return change({**NZ_INT8, **changes}, ALL_OUTPUTS, cache_mode=2)


def nz_cache(**changes: Described | None) -> Change:
    return change({**NZ, **changes}, ALL_OUTPUTS, cache_mode=3)


def tokens(count: Dim) -> dict[str, Described]:
    return {
        "input": (BF16, (count, 7168)),
        "cos": (BF16, (count, 64)),
        "sin": (BF16, (count, 64)),
        "slot_mapping": (I32, (count,)),
    }


def hidden(size: int) -> dict[str, Described]:
    vectors = dict.fromkeys(("gamma_0", "beta_0"), (BF16, (size,)))
    return {**vectors, "input": (BF16, ("T", size)), "wdqkv": (I8, (2112, size))}


def query_rank(size: int) -> dict[str, Described]:
    vectors = dict.fromkeys(("gamma_1", "beta_1"), (BF16, (size,)))
    down = {"wdqkv": (I8, (576 + size, 7168)), "descale_0": (F32, (576 + size,)), "bias_0": (I32, (576 + size,))}
    return {**vectors, **down, "wuq": (I8, (6144, size))}


def heads(count: int, nope: int = 128) -> dict[str, Described]:
    rows = count * (nope + 64)
    up: dict[str, Described] = {"wuq": (I8, (rows, 1536)), "descale_1": (F32, (rows,)), "bias_1": (I32, (rows,))}
    return {**up, "wuk": (BF16, (count, nope, 512))}


RULES: list[Rule] = [
    (PREPROCESS, "type", change(renamed(gamma_2=(F16, (512,)))), change()),
    (PREPROCESS, "type", change(renamed(input=(F32, ("T", 7168)))), change(IN_FLOAT16)),
    (PREPROCESS, "type", change(renamed(beta_0=(F16, (7168,)))), change(renamed(beta_0=(F16, (0,))))),
    (PREPROCESS, "weight_types", change(renamed(wuq=(BF16, (6144, 1536)))), change(FLOAT_WEIGHTS)),
    (
        PREPROCESS,
        "float_weights",
        change({**IN_FLOAT16, **FLOAT_WEIGHTS, "wdqkv": (F16, (2112, 7168)), "wuq": (F16, (6144, 1536))}),
        change(FLOAT_WEIGHTS),
    ),
    (PREPROCESS, "descale_type", change(renamed(descale_0=(I64, (2112,)))), change()),
    (PREPROCESS, "descale_type", change({**IN_FLOAT16, "descale_1": (F32, (6144,))}), change(IN_FLOAT16)),
    (PREPROCESS, "cache_type", change(renamed(kv_cache=(I8, (192, 128, 1, 576)))), change()),
    (PREPROCESS, "cache_type", int8_cache(kv_cache=(BF16, (192, 16, 128, 32))), int8_cache()),
    (PREPROCESS, "missing_input", change(renamed(quant_scale_0=None)), change(FLOAT_WEIGHTS)),
    (PREPROCESS, "missing_input", change(renamed(quant_offset_1=None)), change(renamed(beta_0=None, bias_1=None))),
    (PREPROCESS, "missing_input", change(renamed(descale_1=(F32, (0,)))), change()),
    (PREPROCESS, "missing_input", split(kv_cache_rope=None), split()),
    (PREPROCESS, "missing_input", int8_cache(q_nope_scale=None), int8_cache()),
    (PREPROCESS, "reserved_attribute", change(wdq_dim=128), change(wdq_dim=1536)),
    (PREPROCESS, "reserved_attribute", change(transpose_wuq=0), change(transpose_wuq=1)),
    (PREPROCESS, "quant_mode", change(quant_mode=1), change(quant_mode=0)),
    (PREPROCESS, "epsilon", change(epsilon=1e-5), change(epsilon=1e-6)),
    (PREPROCESS, "unproduced_output", change(outputs=ALL_OUTPUTS), split()),
    (PREPROCESS, "rank", change(renamed(cos=(BF16, ("T", 1, 64)))), change()),
    (
        PREPROCESS,
        "rank",
        change(renamed(wdqkv=(I8, (1, 224, 132, 16, 32)))),
        change(renamed(wdqkv=(I8, (224, 132, 16, 32)))),
    ),
    (
        PREPROCESS,
        "storage",
        change(renamed(wuq=(I8, (96, 6144, 16)))),
        change(renamed(wuq=(I8, (48, 6144, 32)))),
    ),
    (
        PREPROCESS,
        "storage",
        change(renamed(wuq=(I8, (48, 192, 32, 32)))),
        change(renamed(wuq=(I8, (48, 384, 16, 32)))),
    ),
    (
        PREPROCESS,
        "storage",
        change(renamed(wuk=(BF16, (32, 16, 128, 32)))),
        change(renamed(wuk=(BF16, (32, 32, 128, 16)))),
    ),
    (PREPROCESS, "shapes_agree", change({**tokens(8), "slot_mapping": (I32, (7,))}), change(tokens(8))),
    (PREPROCESS, "shapes_agree", change(renamed(gamma_0=(BF16, (6144,)))), change(hidden(6144))),
    (PREPROCESS, "shapes_agree", change(renamed(gamma_1=(BF16, (1024,)))), change(query_rank(1024))),
    (PREPROCESS, "shapes_agree", change(renamed(gamma_2=(BF16, (256,)))), change()),
    (PREPROCESS, "shapes_agree", change(renamed(sin=(BF16, ("T", 32)))), change()),
    (PREPROCESS, "shapes_agree", int8_cache(q_nope_scale=(BF16, (1,))), int8_cache()),
    (
        PREPROCESS,
        "shapes_agree",
        change(renamed(descale_0=(F32, (2048,)))),
        change(renamed(descale_0=(F32, (1, 2112)))),
    ),
    (PREPROCESS, "shapes_agree", change(renamed(bias_1=(I32, (6143,)))), change()),
    (
        PREPROCESS,
        "weight_rows",
        change(
            {**query_rank(1536), "wdqkv": (I8, (2048, 7168)), "descale_0": (F32, (2048,)), "bias_0": (I32, (2048,))}
        ),
        change(),
    ),
    (PREPROCESS, "weight_rows", change({**heads(32), "wuk": (BF16, (16, 128, 512))}), change(heads(16))),
    (PREPROCESS, "token_count", change(tokens(257)), change(tokens(256))),
    (PREPROCESS, "hidden", change(hidden(10496)), change(hidden(10240))),
    (PREPROCESS, "hidden", change(hidden(2304 + 128)), change(hidden(2048))),
    (PREPROCESS, "hcq", change(query_rank(4128)), change(query_rank(4096))),
    (PREPROCESS, "hcq", change(query_rank(48)), change(query_rank(32))),
    (PREPROCESS, "hckv", change(renamed(wuk=(BF16, (32, 128, 256)), gamma_2=(BF16, (256,)))), change()),
    (PREPROCESS, "rope_dim", change(renamed(cos=(BF16, ("T", 32)), sin=(BF16, ("T", 32)))), change()),
    (PREPROCESS, "heads", change(heads(129)), change(heads(128))),
    (PREPROCESS, "head_dim", change(heads(32, nope=272)), change(heads(32, nope=256))),
    (PREPROCESS, "head_dim", change(heads(32, nope=24)), change(heads(32, nope=16))),
    (PREPROCESS, "scale_shape", change(renamed(quant_scale_0=(BF16, (2,)))), change()),
    (PREPROCESS, "scale_shape", int8_cache(ctkv_scale=(BF16, (512,))), int8_cache()),
    (PREPROCESS, "block_count", change(renamed(kv_cache=(BF16, (191, 128, 1, 576)))), change()),
    (PREPROCESS, "block_count", split(kv_cache_rope=(BF16, (64, 128, 1, 64))), split()),
    (PREPROCESS, "block_size", change(renamed(kv_cache=(BF16, (192, 64, 1, 576)))), change()),
    (PREPROCESS, "block_size", split(kv_cache_rope=(BF16, (192, 16, 1, 64))), split()),
    (PREPROCESS, "block_size", nz_cache(kv_cache=(BF16, (192, 32, 64, 16))), nz_cache()),
    (PREPROCESS, "cache_shape", change(renamed(kv_cache=(BF16, (192, 128, 1, 512)))), change()),
    (PREPROCESS, "cache_shape", change(renamed(kv_cache=(BF16, (192, 128, 2, 576)))), change()),
    (PREPROCESS, "cache_shape", split(kv_cache=(BF16, (192, 128, 1, 576))), split()),
    (PREPROCESS, "cache_shape", split(kv_cache_rope=(BF16, (192, 128, 1, 32))), split()),
    (PREPROCESS, "cache_shape", split(kv_cache_rope=(BF16, (192, 128, 2, 64))), split()),
    (PREPROCESS, "cache_shape", int8_cache(kv_cache=(I8, (192, 32, 128, 16))), int8_cache()),
    (PREPROCESS, "cache_shape", int8_cache(kv_cache_rope=(BF16, (192, 2, 128, 32))), int8_cache()),
    (PREPROCESS, "cache_shape", nz_cache(kv_cache=(BF16, (192, 16, 128, 16))), nz_cache()),
    (PREPROCESS, "cache_shape", nz_cache(kv_cache=(BF16, (192, 16, 128, 32))), nz_cache()),
    (PREPROCESS, "cache_shape", nz_cache(kv_cache_rope=(BF16, (192, 8, 128, 16))), nz_cache()),
    (PREPROCESS, "attribute_value", change(cache_mode=4), change(cache_mode=0)),
    (PREPROCESS, "missing", change(renamed(wuk=None)), change()),
    (PREPROCESS, "input_type", change(renamed(slot_mapping=(I64, ("T",)))), change()),
]

RELAXED: list[tuple[Node, str, Change, Change]] = [
    (PREPROCESS, "hidden", change(hidden(64)), change({**hidden(64), "gamma_0": (BF16, (32,))})),
    (PREPROCESS, "head_dim", change(heads(32, nope=8)), change(renamed(wuk=(BF16, (32, 8, 512))))),
    (PREPROCESS, "rank", change(query_rank(48)), change(renamed(gamma_1=(BF16, (48,))))),
]
