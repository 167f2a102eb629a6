"""Every graph of `models/`: what `fuse` makes of it, why not where it makes nothing, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx.compare import compare_outputs
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load
from ascend_onnx.verify import verify
from fusion_patterns import Report, fuse
from tests.models import CASES, EXPECTED, corpus_feeds

Corpus = Callable[[str], Path]

MISSES = {
    "attn_axk2_decode_sdpa_op18_opt": ["query-unrecognised"],
    "attn_deepseek_v32_decode_sdpa_op18_opt": ["selection-not-causal"],
    "attn_deepseek_v32_decode_sdpa_op23_opt": ["selection-not-causal"],
    "attn_deepseek_v32_decode_sdpa_op23_opt_boolmask": ["selection-not-causal"],
    "attn_deepseek_v32_prefill_sdpa_op18_opt": ["selection-not-causal"],
    "attn_dsv3_decode_sdpa_op18_opt_bias": ["bias"],
    "attn_dsv3_decode_sdpa_op18_opt_noqlora": ["no-query-low-rank"],
    "attn_hy_v4_decode_eager_op18_opt": ["attention-unrecognised"],
    "lm_mixtral_hf_decode": ["keys-not-latent"] * 2,
    "mobius_deepseek_v3_num": ["attention-unrecognised"] * 2,
    "mobius_mixtral_num": ["attention-unrecognised"] * 2,
    "perm_quant_dyn_op18_opt": ["expert-count-unknown"],
    "perm_quant_static_op18_opt": ["expert-count-unknown"],
    "perm_repeat_op18_opt": ["expert-count-unknown"],
    "qdq_decode_op18_inputs_only": ["query-not-absorbed"],
    "qdq_prefill_op18_s8s8_mm": ["quantisation-unsupported"],
    "t457_attn_deepseek_v3_decode_sdpa_op18_opt": ["expanded-cache"],
    "unperm_indexadd_op18_opt": ["permutation-absent"],
    "unperm_op18_opt": ["permutation-absent"],
}
"""The reasons given for candidates that stay as they are; models that are not listed have none."""

LISTS_PER_TOKEN = {"sfa_mask_op18_opt": {"s46": 3, "s34": 5, "s24": 60, "s95": 3, "s75": 5, "s57": 7}}
"""Sizes for graphs that name one dimension twice in a way that more than one relation satisfies."""

CAUSAL = {"causal-mask": [name for name in EXPECTED if name.startswith("attn_deepseek_v32")]}


def fused_model(path: Path, **options: object) -> tuple[ir.Model, Report]:
    model = load(path)
    return model, fuse(model, validate="none", **options)  # type: ignore[arg-type]


def unread_initializers(model: ir.Model) -> set[str]:
    values = model.graph.initializers.values()
    return {value.name or "" for value in values if not value.uses() and not value.is_graph_output()}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_fuses_and_what_not(corpus: Corpus, name: str) -> None:
    fused, report = fused_model(corpus(name))
    assert report.counts == EXPECTED[name]
    assert unread_initializers(fused) <= unread_initializers(load(corpus(name)))
    assert [missed.code for missed in report.missed] == MISSES.get(name, [])
    assert all(missed.expected and missed.got and missed.node for missed in report.missed)


FUSING = [name for name, counts in EXPECTED.items() if counts]


@pytest.mark.parametrize("name", FUSING)
def test_it_computes_the_same(corpus: Corpus, name: str) -> None:
    """With the example's sizes and rules, and at two sets of sizes that are drawn (bfloat16 compared as float32)."""
    path = corpus(name)
    fused, _ = fused_model(path)
    case = CASES[name]
    rules = {entry: rule for entry, (_, _, rule) in case["inputs"].items() if "lanes" in rule or ":" in rule}
    example = verify(path, fused, dims=case["dims"], rules=rules, sets=1)
    assert example.equal, example.reason
    drawn = verify(path, fused, dims=LISTS_PER_TOKEN.get(name), rules=_general(rules), sets=2)
    assert drawn.equal, drawn.reason
    assert all(output.within for run in (*example.runs, *drawn.runs) for output in run.outputs)


def _general(rules: dict[str, str]) -> dict[str, str]:
    """The rules that say nothing of sizes."""
    return {entry: rule for entry, rule in rules.items() if "lanes" in rule}


@pytest.mark.parametrize("name", FUSING)
def test_fusing_again_changes_nothing(corpus: Corpus, name: str) -> None:
    model, _ = fused_model(corpus(name))
    nodes = [node.name for node in model.graph]
    again = fuse(model, validate="none")
    assert not again.fused
    assert [node.name for node in model.graph] == nodes


@pytest.mark.parametrize("name", CAUSAL["causal-mask"])
def test_a_mask_that_comes_from_outside_may_be_assumed_causal(corpus: Corpus, name: str) -> None:
    path = corpus(name)
    model, report = fused_model(path, assume=["causal-mask"])
    assert report.counts == {"MlaPrologV2WeightNz": 1, "SparseFlashAttention": 1}
    assert all(entry.assumed == ["causal-mask"] for entry in report.fused)
    many = {"past": 60} if "decode" in name else {"seq": 60}
    verification = verify(path, model, dims={"batch": 2, **many}, sets=1)
    assert verification.equal, verification.reason


def test_padded_lists_of_keys(corpus: Corpus) -> None:
    """Tails of -1 of every length, a list of nothing but -1, and few keys out of many."""
    name = "sfa_valid_op18_opt"
    path = corpus(name)
    feeds = corpus_feeds(name, {"s44": 60, "s24": 60, "s34": 9, "s57": 8})
    for token in range(9):
        feeds["idx"][:, token, token:] = -1
    model, _ = fused_model(path)
    before, after = CpuSession(path).run(feeds), CpuSession(model).run(feeds)
    (output,) = before
    assert np.isnan(before[output][:, 0]).all()
    assert np.isfinite(before[output][:, 1:]).all()
    assert all(comparison.within for comparison in compare_outputs(before, after))
