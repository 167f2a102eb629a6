"""The argument rules of the five operators: one valid call each, and what makes it invalid.

`check` and the emulator agree on the case tables (`test_emulator_cases`); these are the rules that no table breaks, or
that a node does not show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.cases import mla_preprocess_calls as preprocess
from tests.cases import mla_prolog_v2_weight_nz as prolog
from tests.cases import sparse_flash_attention as attention
from tests.cases.case import BFLOAT16, FLOAT16, Case
from tests.oracles import ORACLES, Array

from .acl import AclError, device, library_path
from .emulated import Prepared, prepare
from .launches import Packed, launch

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")

NULL, INVALID, TILING, NO_PACKAGE = 161001, 161002, 561002, 561112
Edit = Callable[[Prepared], None]


def routing(quant_mode: int, **attributes: Any) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Array]:
        inputs: dict[str, Array] = {"x": rng.standard_normal((6, 32)).astype(np.float16)}
        inputs["expert_idx"] = rng.integers(0, 8, (6, 2)).astype(np.int32)
        if quant_mode == 0:
            inputs |= {"scale": np.ones(1, np.float32), "offset": np.zeros(1, np.float32)}
        return inputs

    values = {"expert_num": 8, "expert_tokens_num_flag": 1, "expert_tokens_num_type": 1, "quant_mode": quant_mode}
    return Case(f"routing_{quant_mode}", "MoeInitRoutingV3", build, {**values, **attributes})


def merging(layout: str) -> Case:
    tnd = layout == "TND"
    shapes = ((5, 2, 64), (5, 2, 8)) if tnd else ((5, 3, 128), (3, 2, 5, 8))

    def build(rng: np.random.Generator) -> dict[str, Array]:
        inputs: dict[str, Array] = {}
        for side in ("prev", "cur"):
            inputs[f"{side}_attn_out"] = rng.standard_normal(shapes[0]).astype(np.float32)
            inputs[f"{side}_softmax_max"] = rng.standard_normal(shapes[1]).astype(np.float32)
            inputs[f"{side}_softmax_sum"] = np.ones(shapes[1], np.float32)
        return inputs | ({"actual_seq_qlen": np.array([0, 2, 5], np.int64)} if tnd else {})

    return Case(f"merging_{layout}", "RingAttentionUpdateV2", build, {"input_layout": layout})


PROLOG = prolog.case("valid", replace(prolog.REAL, dtype=BFLOAT16))
QUANTISED = prolog.case("valid_int8", replace(prolog.REAL, dtype=BFLOAT16, scenario="full_quant_kv", smooth=True))
PREPROCESS = preprocess.case("valid", replace(preprocess.REAL, dtype=BFLOAT16, int8=True, mode=preprocess.NZ_INT8))
DECODE = replace(attention.Attention(width=512, rope=64), dtype=FLOAT16)
DENSE = attention.case("valid", DECODE)
PAGED = attention.case("valid_paged", replace(DECODE, layout_query="TND", layout_kv="PA_BSND"), statistics=False)
ROUTING, STATIC = routing(-1), routing(0)
SBH, TND = merging("SBH"), merging("TND")


def absent(name: str) -> Edit:
    def edit(call: Prepared) -> None:
        call.inputs.pop(name, None)
        call.outputs.pop(name, None)

    return edit


def set_to(name: str, value: Any) -> Edit:
    def edit(call: Prepared) -> None:
        call.attributes[name] = value

    return edit


def resized(name: str, *shape: int) -> Edit:
    """Another shape, filled with ones."""

    def edit(call: Prepared) -> None:
        if name in call.outputs:
            output = call.outputs[name]
            assert isinstance(output, tuple)
            call.outputs[name] = (shape, output[1])
        else:
            given = call.inputs[name]
            array = given.storage if isinstance(given, Packed) else given
            assert isinstance(array, np.ndarray)
            call.inputs[name] = np.ones(shape, array.dtype)

    return edit


def retyped(name: str, dtype: Any) -> Edit:
    def edit(call: Prepared) -> None:
        if name in call.outputs:
            output = call.outputs[name]
            assert isinstance(output, tuple)
            call.outputs[name] = (output[0], np.dtype(dtype))
        else:
            given = call.inputs[name]
            assert isinstance(given, np.ndarray)
            call.inputs[name] = given.astype(dtype)

    return edit


def unpacked(name: str) -> Edit:
    """The weight as a plain matrix."""

    def edit(call: Prepared) -> None:
        given = call.inputs[name]
        assert isinstance(given, Packed)
        call.inputs[name] = np.ones(given.shape, given.storage.dtype)

    return edit


def stored_as(name: str, *storage: int) -> Edit:
    """The weight with other storage dimensions."""

    def edit(call: Prepared) -> None:
        given = call.inputs[name]
        assert isinstance(given, Packed)
        call.inputs[name] = Packed(np.resize(given.storage, storage), given.shape)

    return edit


@dataclass(frozen=True)
class Rule:
    valid: Case
    edit: Edit
    code: int
    sentence: str
    product: str = "a2"


RULES = [
    Rule(SBH, absent("prev_softmax_sum"), NULL, "prevSoftmaxSum must be given"),
    Rule(SBH, absent("softmax_max"), NULL, "softmaxMaxOut must be given"),
    Rule(TND, absent("actual_seq_qlen"), NULL, "actualSeqQlenOptional must be given"),
    Rule(SBH, retyped("prev_softmax_max", np.float16), INVALID, "prevSoftmaxMax must have a type out of"),
    Rule(SBH, retyped("attn_out", np.float16), INVALID, "attnOutOut must have a type out of"),
    Rule(TND, retyped("actual_seq_qlen", np.int32), INVALID, "actualSeqQlenOptional must have a type out of"),
    Rule(SBH, set_to("input_layout", "BSH"), INVALID, "inputLayoutOptional must be SBH or TND, got BSH"),
    Rule(SBH, set_to("input_softmax_layout", "BNS"), TILING, "inputSoftmaxLayoutOptional must be empty"),
    Rule(SBH, resized("cur_attn_out", 5, 3, 64), INVALID, "curAttnOut must have the shape"),
    Rule(SBH, resized("cur_softmax_sum", 3, 2, 5, 1), INVALID, "curSoftmaxSum must have the shape"),
    Rule(SBH, resized("softmax_sum", 3, 2, 5), INVALID, "softmaxSumOut must have the shape"),
    Rule(PAGED, absent("block_table"), NULL, "blockTable must be given"),
    Rule(PAGED, absent("actual_seq_lengths_kv"), NULL, "actualSeqLengthsKv must be given"),
    Rule(PAGED, absent("actual_seq_lengths_query"), NULL, "actualSeqLengthsQuery must be given"),
    Rule(PAGED, absent("key_rope"), NULL, "keyRope must be given"),
    Rule(PAGED, absent("softmax_max"), NULL, "softmaxMaxOut must be given"),
    Rule(PAGED, set_to("layout_kv", None), NULL, "layoutKv must be given"),
    Rule(PAGED, retyped("value", BFLOAT16), INVALID, "value must have a type out of"),
    Rule(PAGED, retyped("sparse_indices", np.int64), INVALID, "sparseIndices must have a type out of"),
    Rule(PAGED, set_to("layout_query", "BNSD"), INVALID, "layoutQuery must be BSND or TND"),
    Rule(PAGED, set_to("sparse_mode", 1), INVALID, "sparseMode must be 0 or 3, got 1"),
    Rule(PAGED, set_to("pre_tokens", 5), INVALID, "preTokens must be 9223372036854775807"),
    Rule(PAGED, set_to("attention_mode", 0), INVALID, "attentionMode must be 2, got 0"),
    Rule(PAGED, set_to("return_softmax_lse", 1), INVALID, "returnSoftmaxLse must be false with layoutKv PA_BSND"),
    Rule(PAGED, set_to("sparse_block_size", 3), INVALID, "sparseBlockSize must be a power of two"),
    Rule(PAGED, set_to("sparse_block_size", 2), INVALID, "sparseBlockSize must be 1, got 2", product="950"),
    Rule(PAGED, resized("block_table", 3, 1), TILING, "blockTable must have a row for each of 2 batches"),
    Rule(PAGED, resized("actual_seq_lengths_kv", 3), TILING, "actualSeqLengthsKv must have the shape [2]"),
    Rule(PAGED, resized("sparse_indices", 5, 2, 4), TILING, "sparseIndices must have the shape"),
    Rule(PAGED, resized("attention_out", 5, 4, 64), TILING, "attentionOut must have the shape"),
    Rule(DENSE, resized("query_rope", 2, 3, 4, 32), TILING, "the last dimension of queryRope must be 64"),
    Rule(DENSE, resized("softmax_sum", 2, 1, 3), TILING, "softmaxSumOut must have the shape"),
    Rule(DENSE, resized("sparse_indices", 2, 3, 1, 0), INVALID, "sparseIndices must not be empty"),
    Rule(ROUTING, absent("expanded_row_idx"), NULL, "expandedRowIdxOut must be given"),
    Rule(ROUTING, absent("expanded_scale"), NULL, "expandedScaleOut must be given"),
    Rule(ROUTING, set_to("active_expert_range", None), NULL, "activeExpertRangeOptional must be given"),
    Rule(ROUTING, set_to("active_expert_range", []), TILING, "activeExpertRangeOptional must have 2 elements"),
    Rule(ROUTING, set_to("active_expert_range", [3, 9]), TILING, "must lie within 0 and expertNum 8, got [3, 9]"),
    Rule(ROUTING, retyped("expert_idx", np.int64), INVALID, "expertIdx must have a type out of"),
    Rule(ROUTING, retyped("expanded_x", np.int8), INVALID, "expandedXOut must have a type out of [FLOAT16]"),
    Rule(ROUTING, resized("expert_idx", 5, 2), TILING, "expertIdx must have as many rows as x, 6, got 5"),
    Rule(ROUTING, resized("expert_tokens_count_or_cumsum", 7), TILING, "expertTokensCountOrCumsumOut must have the"),
    Rule(ROUTING, resized("expanded_x", 11, 32), TILING, "expandedXOut must have the shape [12, 32]"),
    Rule(ROUTING, set_to("active_num", -2), TILING, "activeNum must be at least -1"),
    Rule(ROUTING, set_to("active_num", 5), TILING, "activeNum must be NUM_ROWS * K = 12", product="950"),
    Rule(ROUTING, set_to("expert_num", 10241), TILING, "expertNum must be from 0 to 10240"),
    Rule(ROUTING, set_to("drop_pad_mode", 2), TILING, "dropPadMode must be 0 or 1, got 2"),
    Rule(ROUTING, set_to("drop_pad_mode", 1), TILING, "expertCapacity must be from 1 to 6 with dropPadMode 1"),
    Rule(ROUTING, set_to("expert_tokens_num_flag", 0), TILING, "expertTokensNumFlag must be 1", product="950"),
    Rule(STATIC, absent("scale"), TILING, "scaleOptional must be given with quantMode 0"),
    Rule(STATIC, absent("offset"), TILING, "offsetOptional must be given with quantMode 0"),
    Rule(STATIC, set_to("row_idx_type", 2), TILING, "rowIdxType must be 0 or 1, got 2"),
    Rule(PROLOG, set_to("cache_mode", "PA_BSND"), NO_PACKAGE, "no kernel package of MlaPrologV2", product="950"),
    Rule(PROLOG, absent("rope_cos"), NULL, "ropeCos must be given"),
    Rule(PROLOG, set_to("cache_mode", None), NULL, "cacheModeOptional must be given"),
    Rule(PROLOG, set_to("cache_mode", "BNSD"), INVALID, "cacheModeOptional must be PA_BSND or PA_NZ, got BNSD"),
    Rule(PROLOG, unpacked("weight_dq"), INVALID, "weightDq must have the format FRACTAL_NZ (29), got 2"),
    Rule(PROLOG, stored_as("weight_dq", 64, 1536), INVALID, "weightDq must be stored as fractals [96, 4, 16, 16]"),
    Rule(PROLOG, retyped("weight_uk", FLOAT16), INVALID, "weightUk must have a type out of [BFLOAT16]"),
    Rule(PROLOG, retyped("kv_cache", np.int8), INVALID, "no quantisation scenario has exactly these INT8 inputs"),
    Rule(PROLOG, retyped("cache_index", np.int32), INVALID, "cacheIndex must have a type out of [INT64]"),
    Rule(PROLOG, resized("cache_index", 4), INVALID, "cacheIndex must have the shape [5]"),
    Rule(PROLOG, resized("rope_sin", 5, 32), INVALID, "ropeSin must have the shape [5, 64]"),
    Rule(PROLOG, resized("kr_cache", 3, 32, 1, 64), INVALID, "kvCacheRef and krCacheRef must have the same blocks"),
    Rule(PROLOG, resized("query", 5, 2, 128), INVALID, "queryOut must have the shape [5, 2, 512]"),
    Rule(QUANTISED, absent("dequant_scale_x"), INVALID, "dequantScaleXOptional must be given in this scenario"),
    Rule(QUANTISED, absent("dequant_scale_q_nope"), NULL, "dequantScaleQNopeOutOptional must be given"),
    Rule(QUANTISED, resized("dequant_scale_x", 5), INVALID, "dequantScaleXOptional must have the shape [5, 1]"),
    Rule(PREPROCESS, absent("q_out"), NO_PACKAGE, "no kernel package of MlaPreprocess", product="950"),
    Rule(PREPROCESS, absent("beta_0"), NULL, "beta0 must be given, got a null pointer"),
    Rule(PREPROCESS, absent("kr_cache_out"), NULL, "krCacheOut must be given"),
    Rule(PREPROCESS, resized("q_nope_scale", 0), NULL, "qNopeScale must be given with cacheMode 2"),
    Rule(PREPROCESS, resized("quant_offset_1", 0), NULL, "quantOffset1 must be given with INT8 weights"),
    Rule(PREPROCESS, set_to("wdq_dim", 128), INVALID, "wdqDim must be 1536, got 128"),
    Rule(PREPROCESS, set_to("transpose_wuk", 0), INVALID, "the transpose flags must be true"),
    Rule(PREPROCESS, set_to("quant_mode", 1), INVALID, "quantMode must be 0, got 1"),
    Rule(PREPROCESS, set_to("cache_mode", 4), INVALID, "cacheMode must be 0, 1, 2 or 3, got 4"),
    Rule(PREPROCESS, unpacked("wuq"), INVALID, "wuq must have the format FRACTAL_NZ (29), got 2"),
    Rule(PREPROCESS, retyped("descale_0", np.int64), INVALID, "deScale0 must have a type out of [FLOAT]"),
    Rule(PREPROCESS, retyped("slot_mapping", np.int64), INVALID, "slotMapping must have a type out of [INT32]"),
    Rule(PREPROCESS, resized("kv_cache", 2, 16, 64, 32), TILING, "kvCache must have the shape [2, 16, 128, 32]"),
    Rule(PREPROCESS, resized("sin", 4, 64), TILING, "sin must have the shape [5, 64]"),
    Rule(PREPROCESS, resized("bias_1", 383), TILING, "bias1 must have 384 elements, got 383"),
    Rule(PREPROCESS, resized("q_rope_out", 5, 2, 32), TILING, "qRopeOut must have the shape [5, 2, 64]"),
]


@pytest.mark.parametrize("rule", RULES, ids=[f"{rule.valid.operator}-{rule.sentence}" for rule in RULES])
def test_rule(rule: Rule) -> None:
    case = rule.valid
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    with device(rule.product, relax=("hidden",)) as acl:
        call = prepare(acl, case.operator, case.inputs, case.attributes, expected)
        rule.edit(call)
        with pytest.raises(AclError) as refused:
            launch(acl, case.operator, call.inputs, call.attributes, call.outputs)
    assert refused.value.function == f"aclnn{case.operator}GetWorkspaceSize"
    assert (refused.value.code, rule.sentence in refused.value.message) == (rule.code, True), refused.value.message


@pytest.mark.parametrize("case", [SBH, TND, DENSE, PAGED, ROUTING, STATIC, PROLOG, QUANTISED, PREPROCESS], ids=str)
def test_valid(case: Case) -> None:
    """Without these, a rule could refuse whatever it is given."""
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    with device("a2", relax=("hidden",)) as acl:
        call = prepare(acl, case.operator, case.inputs, case.attributes, expected)
        launch(acl, case.operator, call.inputs, call.attributes, call.outputs)
