"""An output that attributes and scenario do not produce is empty when a node lists it nevertheless."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases import case_called
from tests.oracles import ORACLES

from .harness import run_body, run_reference, single_node_model

UNPRODUCED = [
    ("MlaPreprocess-float_mode0_float32", "q_rope_out", np.float32),
    ("MlaPreprocess-float_mode0_float32", "kr_cache_out", np.float32),
    ("MlaPreprocess-int8_mode0_float16", "kr_cache_out", np.float16),
    ("MlaPrologV2WeightNz-float32_pa_bsnd_th_nd", "dequant_scale_q_nope", np.float32),
    ("SparseFlashAttention-no_statistics", "softmax_max", np.float32),
    ("SparseFlashAttention-no_statistics", "softmax_sum", np.float32),
    ("SparseFlashAttention-no_statistics_paged", "softmax_sum", np.float32),
    ("MoeInitRoutingV3-no_counts", "expert_tokens_count_or_cumsum", np.int64),
    ("MoeInitRoutingV3-no_counts_drop_pad", "expert_tokens_count_or_cumsum", np.int64),
    ("MoeInitRoutingV3-no_counts", "expanded_scale", np.float32),
]


@pytest.mark.parametrize("form", ["op_run", "static_body", "symbolic_body"])
@pytest.mark.parametrize(("name", "output", "dtype"), UNPRODUCED)
def test_unproduced_output_is_empty(name: str, output: str, dtype: type[Any], form: str) -> None:
    case = case_called(name)
    assert output not in ORACLES[case.operator](case.inputs, case.attributes)
    outputs = {n: e.dtype for n, e in case.expected.items()} | {output: np.dtype(dtype)}
    model = single_node_model(
        case.operator,
        case.inputs,
        case.attributes,
        outputs,
        symbolic=form == "symbolic_body",
        opset=case.opset,
    )
    run = run_reference if form == "op_run" else run_body
    result = run(model, case.inputs)[output]
    assert result.dtype == np.dtype(dtype)
    assert result.size == 0
