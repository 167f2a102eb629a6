"""Calls in the sizes and types that the device takes, all scenarios and layouts; only hidden sizes are small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.cases import mla_preprocess_calls as preprocess
from tests.cases import mla_prolog_v2_weight_nz as prolog
from tests.cases import sparse_flash_attention as attention
from tests.cases.case import BFLOAT16, FLOAT16, Case

__all__ = ["CASES"]

SCENARIOS = ("no_quant", "partial_quant", "partial_quant_kv", "full_quant", "full_quant_kv")
DEEP = 2048
"""More products of int8 numbers than float32 adds exactly."""


def prologs() -> list[Case]:
    real = replace(prolog.REAL, dtype=BFLOAT16)
    found = []
    for scenario in SCENARIOS:
        for mode in ("PA_BSND", "PA_NZ"):
            for form, leading in (("th", (5,)), ("bsh", (2, 3))):
                call = replace(real, scenario=scenario, leading=leading, smooth=form == "th", skipped=(1,))
                found.append(prolog.case(f"{scenario}_{mode.lower()}_{form}", call, cache_mode=mode))
    quantised = replace(real, scenario="full_quant_kv", smooth=True)
    return [
        *found,
        prolog.case("no_tokens", replace(real, leading=(0,))),
        prolog.case("no_sequence", replace(real, leading=(2, 0))),
        prolog.case("no_blocks", replace(real, blocks=0)),
        prolog.case("one_head_epsilons", replace(real, heads=1), rmsnorm_epsilon_cq=1.0, rmsnorm_epsilon_ckv=3.0),
        prolog.case("eight_heads", replace(quantised, heads=8)),
        prolog.case("many_tokens", replace(real, leading=(70,), blocks=5)),
        prolog.case("zero_row", quantised, edit=prolog.zero_row),
    ]


def preprocesses() -> list[Case]:
    found = []
    for mode in preprocess.MODES:
        for type_name, dtype in (("float16", FLOAT16), ("bfloat16", BFLOAT16)):
            call = replace(preprocess.REAL, mode=mode, dtype=dtype, int8=True, skipped=(2,))
            found.append(preprocess.case(f"int8_mode{mode}_{type_name}", call, to_device))
        call = replace(preprocess.REAL, mode=mode, dtype=BFLOAT16)
        found.append(preprocess.case(f"float_mode{mode}", call))
    quantised = replace(preprocess.REAL, dtype=BFLOAT16, int8=True)
    return [
        *found,
        preprocess.case("no_norm", quantised, to_device, do_rms_norm=0),
        preprocess.case("no_bias", quantised, to_device, without_bias),
        preprocess.case("packed", replace(quantised, packed=preprocess.WEIGHTS), to_device),
        preprocess.case("no_tokens", replace(quantised, tokens=0), to_device),
        preprocess.case("deep", replace(quantised, hidden=DEEP, tokens=2), to_device, may_tie=True),
    ]


def to_device(inputs: dict[str, Any]) -> None:
    """float16 calls carry their column scales as the low halves of int64."""
    if inputs["input"].dtype == FLOAT16:
        for name in ("descale_0", "descale_1"):
            inputs[name] = inputs[name].view(np.uint32).astype(np.int64)


def without_bias(inputs: dict[str, Any]) -> None:
    for name in ("beta_0", "bias_0", "beta_1", "bias_1"):
        inputs[name] = np.zeros(0, inputs[name].dtype)


def attentions() -> list[Case]:
    real = attention.Attention(width=512, rope=64, scores=0.3)
    found = []
    for layout_query, layout_kv in attention.LAYOUTS:
        paged = layout_kv == "PA_BSND"
        for mode in (0, 3):
            for block in (1, 4, 16):
                dtype = FLOAT16 if block == 4 else BFLOAT16
                call = replace(
                    real, layout_query=layout_query, layout_kv=layout_kv, mode=mode, block=block, dtype=dtype
                )
                name = f"{layout_query}_{layout_kv}_mode{mode}_block{block}".lower()
                found.append(attention.case(name, call, statistics=not paged))
    half = replace(real, dtype=FLOAT16)
    lists = {
        "future": attention.future,
        "nothing": attention.nothing,
        "only_future": attention.only_future,
        "ended_early": attention.ended_early,
        "ended_at_once": attention.ended_at_once,
        "repeated": attention.repeated,
    }
    return [
        *found,
        *(attention.case(name, replace(half, lists=entries)) for name, entries in lists.items()),
        attention.case("one_head", replace(half, heads=1)),
        attention.case("all_heads", replace(half, heads=128, selected=9)),
        attention.case("padded", replace(half, query_size=5, kv_size=13)),
        attention.case("more_queries_than_keys", replace(half, query_lengths=(6, 2), kv_lengths=(3, 7))),
        attention.case("no_lengths", half, absent=("actual_seq_lengths_query", "actual_seq_lengths_kv")),
    ]


CASES = [*prologs(), *preprocesses(), *attentions()]
