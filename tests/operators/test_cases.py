"""Every case of every table in every form: OpRun and body, against the oracle."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cases import ALL_CASES, case_called
from tests.cases.case import Case

from .compare import compare_all
from .harness import model_of, run_body, run_reference

OPSETS = range(17, 26)
OPSET_CASES = {
    "MlaPreprocess-float_mode3_float16_packed",
    "MlaPreprocess-int8_mode0_some_skipped",
    "MlaPreprocess-int8_mode1_int64_descale_packed",
    "MlaPreprocess-int8_mode2_bfloat16",
    "MlaPrologV2WeightNz-bfloat16_pa_nz_bsh_packed",
    "MlaPrologV2WeightNz-pa_bsnd_some_skipped",
    "RingAttentionUpdateV2-bfloat16_sbh",
    "RingAttentionUpdateV2-float16_tnd_default",
    "RingAttentionUpdateV2-tnd_tnd_middle_empty",
    "SparseFlashAttention-ragged_tnd_paged",
    "SparseFlashAttention-block_4_bsnd_bsnd_mode3",
    "SparseFlashAttention-batch_2_by_33",
    "MoeInitRoutingV3-bfloat16_gather_range_scale",
    "MoeInitRoutingV3-float16_drop_pad_scale",
    "MoeInitRoutingV3-active_13_rows1",
}
"""One case of each kind of body; these run at every version of the default domain that bodies are made for."""


def test_names_are_distinct() -> None:
    assert [name for name, times in Counter(map(str, ALL_CASES)).items() if times > 1] == []


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_op_run(case: Case) -> None:
    assert compare_all(run_reference(model_of(case, symbolic=False), case.inputs), case.expected) == []


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_body(case: Case, symbolic: bool) -> None:
    assert compare_all(run_body(model_of(case, symbolic=symbolic), case.inputs), case.expected) == []


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", sorted(OPSET_CASES))
def test_body_at_opset(name: str, opset: int) -> None:
    case = case_called(name)
    assert compare_all(run_body(model_of(case, symbolic=True, opset=opset), case.inputs), case.expected) == []
