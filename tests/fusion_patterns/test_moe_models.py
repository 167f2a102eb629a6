"""Mixtures of experts as exporters write them: what fuses, why not, and that each graph computes what it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ascend_onnx.storage import load, save
from ascend_onnx.verify import verify
from fusion_patterns import find, fuse
from tests.fusion_patterns.moe_blocks import MOE, codes
from tests.models import EXPECTED, corpus_feeds

Corpus = Callable[[str], Path]

SIZES: dict[str, list[dict[str, int]]] = {
    "lm_mixtral_hf_decode": [{"s44": 2, "s36": 3}, {"s44": 9, "s36": 1}],
    "lm_deepseek_v3_plain_op18": [{"batch": 2, "seq": 3}, {"batch": 3, "seq": 11}],
    "moe_deepseek_v3_batched_mm_op17_ts": [{"batch": 2, "seq": 3}, {"batch": 3, "seq": 11}],
    "moe_deepseek_v3_batched_mm_op18_noopt": [{"batch": 2, "seq": 3}, {"batch": 1, "seq": 40}],
    "moe_deepseek_v3_batched_mm_op18_opt": [{"batch": 2, "seq": 3}, {"batch": 1, "seq": 40}],
    "moe_mixtral_batched_mm_op18_opt": [{"batch": 1, "seq": 2}, {"batch": 3, "seq": 11}],
    "perm_eqsum_op17_ts": [{}],
    "perm_full_ns_op18_opt": [{"s77": 5, "s95": 5}, {"s77": 21, "s95": 20}],
    "perm_scatter_op18_opt": [{"s77": 5, "s95": 5}, {"s77": 21, "s95": 20}],
    "t457_moe_deepseek_v3_op17_ts": [{"batch": 2, "seq": 3}, {"batch": 3, "seq": 11}],
}
"""Two sets of dimensions for every graph that has any; with one token the loop's experts are mostly idle."""

ASSUMING = {name for name in SIZES if name.startswith("perm_")}
MISSES = {
    "perm_repeat_op18_opt": "expert-count-unknown",
    "perm_quant_static_op18_opt": "expert-count-unknown",
    "perm_quant_dyn_op18_opt": "expert-count-unknown",
    "unperm_op18_opt": "permutation-absent",
    "unperm_indexadd_op18_opt": "permutation-absent",
}


@pytest.mark.parametrize("name", SIZES)
def test_counts_and_outputs(corpus: Corpus, tmp_path: Path, name: str) -> None:
    model = load(corpus(name))
    report = fuse(model, validate="all")
    assert report.counts == EXPECTED[name]
    routed = [entry for entry in report.fused if entry.operator == MOE]
    assert all(entry.validated is not None and entry.validated < 1e-5 for entry in routed)
    assert {tuple(entry.assumed) for entry in routed} == {("expert-ids-in-range",) if name in ASSUMING else ()}
    path = tmp_path / "fused.onnx"
    save(model, path, source=corpus(name))
    for seed, sizes in enumerate(SIZES[name]):
        verification = verify(corpus(name), path, inputs=corpus_feeds(name, sizes, seed))
        assert verification.equal, verification.reason
        assert all(np.isfinite(output.max_abs or 0) for run in verification.runs for output in run.outputs)


@pytest.mark.parametrize("name", SIZES)
def test_nothing_of_the_old_form_is_left(corpus: Corpus, name: str) -> None:
    model = load(corpus(name))
    fuse(model, validate="none")
    left = {node.op_type for node in model.graph}
    assert not left & {"NonZero", "Mod", "CumSum"}
    stacks = [v.name for v in model.graph.initializers.values() if v.shape and len(v.shape) == 3 and v.shape[0] == 8]
    assert not stacks
    assert not any(node.op_type == "TopK" and node.attributes.get_int("largest", 1) == 0 for node in model.graph)


@pytest.mark.parametrize(("name", "code"), MISSES.items(), ids=MISSES)
def test_misses(corpus: Corpus, name: str, code: str) -> None:
    report = fuse(load(corpus(name)))
    assert (report.counts, codes(report)) == ({}, [code]) == (EXPECTED[name], [code])
    assert report.missed[0].expected
    assert report.missed[0].got


@pytest.mark.parametrize("name", ["moe_mixtral_batched_mm_op18_opt", "t457_moe_deepseek_v3_op17_ts"])
def test_find_says_the_same(corpus: Corpus, name: str) -> None:
    report = find(load(corpus(name)))
    assert report.counts == EXPECTED[name]
