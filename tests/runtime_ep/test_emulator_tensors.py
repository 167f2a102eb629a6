"""Tensors that are not contiguous, and numbers that only the device sees to be wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cases import mla_preprocess_calls as preprocess
from tests.cases import mla_prolog_v2_weight_nz as prolog
from tests.cases import sparse_flash_attention as attention
from tests.cases.case import BFLOAT16, FLOAT16, Case
from tests.operators.compare import compare_all
from tests.oracles import ORACLES, Array

from .acl import AclError, device, library_path
from .emulated import Prepared, prepare
from .launches import Strided, launch
from .merge import OUTPUTS, merge_inputs

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")

DENSE = attention.case("dense", replace(attention.Attention(width=512, rope=64), dtype=FLOAT16))
PAGED = attention.case(
    "paged",
    replace(attention.Attention(width=512, rope=64), dtype=FLOAT16, layout_query="TND", layout_kv="PA_BSND"),
    statistics=False,
)
PROLOG = prolog.case("prolog", replace(prolog.REAL, dtype=BFLOAT16))
PREPROCESS = preprocess.case("split", replace(preprocess.REAL, dtype=BFLOAT16, int8=True))
AICORE_EXCEPTION = 507015


def run(case: Case, **changed: Array | Strided) -> dict[str, Array]:
    """The case on the device with other inputs."""
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    with device(relax=("hidden",)) as acl:
        call: Prepared = prepare(acl, case.operator, case.inputs, case.attributes, expected)
        call.inputs.update(changed)
        return launch(acl, case.operator, call.inputs, call.attributes, call.outputs)


def columns_first(array: Array) -> Strided:
    """The elements of a matrix, stored column by column behind three others."""
    rows, columns = array.shape[0], array.shape[-1]
    buffer = np.concatenate([np.full(3, np.nan, array.dtype), array.reshape(rows, columns).T.reshape(-1)])
    return Strided(buffer, array.shape, (1, 1, rows), offset=3)


def test_merged_attentions_may_be_strided() -> None:
    inputs = merge_inputs() | {"prev_attn_out": np.arange(128, dtype=np.float32).reshape(2, 1, 64)}
    with device() as acl:
        expected = launch(acl, "RingAttentionUpdateV2", inputs, {}, OUTPUTS)
        strided = inputs | {"prev_attn_out": columns_first(inputs["prev_attn_out"])}
        actual = launch(acl, "RingAttentionUpdateV2", strided, {}, OUTPUTS)
    assert np.array_equal(actual["attn_out"], expected["attn_out"])


def test_a_query_may_not_be_strided() -> None:
    query = DENSE.inputs["query"]
    _, tokens, heads, width = query.shape
    strides = (tokens * heads * width * 2, heads * width * 2, width * 2, 2)
    with pytest.raises(AclError, match="query must be contiguous") as refused:
        run(DENSE, query=Strided(np.repeat(query.reshape(-1), 2), query.shape, strides))
    assert refused.value.code == 161002


def test_blocks_of_a_cache_may_lie_apart() -> None:
    """The room between two blocks stays as it was."""
    cache = PREPROCESS.inputs["kv_cache"]
    blocks, size, _, width = cache.shape
    block, gap = size * width, 2 * width
    apart = np.full((blocks, block + gap), 9, cache.dtype)
    apart[:, :block] = cache.reshape(blocks, -1)
    view = Strided(apart, cache.shape, (block + gap, width, width, 1))
    with device(relax=("hidden",)) as acl:
        call = prepare(acl, PREPROCESS.operator, PREPROCESS.inputs, PREPROCESS.attributes, PREPROCESS.expected)
        call.inputs["kv_cache"] = call.outputs["kv_cache_out"] = view
        actual = launch(acl, PREPROCESS.operator, call.inputs, call.attributes, call.outputs)
    assert np.all(actual["kv_cache_out"][:, block:] == 9)
    actual["kv_cache_out"] = actual["kv_cache_out"][:, :block].reshape(cache.shape)
    assert compare_all(actual, PREPROCESS.expected) == []


def test_a_merged_attention_may_be_written_strided() -> None:
    inputs = merge_inputs() | {"prev_attn_out": np.arange(128, dtype=np.float32).reshape(2, 1, 64)}
    target = Strided(np.zeros(3 + 128, np.float32), (2, 1, 64), (1, 1, 2), offset=3)
    with device() as acl:
        expected = launch(acl, "RingAttentionUpdateV2", inputs, {}, OUTPUTS)["attn_out"]
        actual = launch(acl, "RingAttentionUpdateV2", inputs, {}, {**OUTPUTS, "attn_out": target})["attn_out"]
    assert np.array_equal(actual, np.concatenate([np.zeros(3, np.float32), expected.reshape(2, 64).T.reshape(-1)]))


@pytest.mark.parametrize(
    ("case", "name", "value", "sentence"),
    [
        (PROLOG, "cache_index", 48, "cacheIndex must be below the 48 slots of the cache, got 48"),
        (PREPROCESS, "slot_mapping", 256, "slotMapping must be below the 256 slots of the cache, got 256"),
        (PAGED, "block_table", 99, "blockTable must name pages below"),
        (PAGED, "sparse_indices", -7, "sparseIndices must not be negative but for -1, got -7"),
        (DENSE, "actual_seq_lengths_kv", 12, "the length of batch 0 must be from 0 to 11, got 12"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_device_notices(case: Case, name: str, value: int, sentence: str) -> None:
    with pytest.raises(AclError, match=sentence) as failed:
        run(case, **{name: np.full_like(case.inputs[name], value)})
    assert (failed.value.function, failed.value.code) == ("aclrtSynchronizeStream", AICORE_EXCEPTION)


def test_lengths_that_do_not_cover_the_tokens() -> None:
    statistics = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")
    inputs: dict[str, Array] = {name: np.ones((4, 2, 8), np.float32) for name in statistics}
    inputs |= {name: np.ones((4, 2, 64), np.float32) for name in ("prev_attn_out", "cur_attn_out")}
    inputs["actual_seq_qlen"] = np.array([2, 4], np.int64)
    outputs = {"attn_out": ((4, 2, 64), np.dtype(np.float32))}
    outputs |= {name: ((4, 2, 8), np.dtype(np.float32)) for name in ("softmax_max", "softmax_sum")}
    with device() as acl, pytest.raises(AclError, match="prefix sums from 0 to T = 4") as failed:
        launch(acl, "RingAttentionUpdateV2", inputs, {"input_layout": "TND"}, outputs)
    assert failed.value.code == AICORE_EXCEPTION
