"""Every code that a candidate can miss with, provoked by a graph; and the page that explains the codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors

from ascend_onnx.storage import load
from fusion_patterns import FUSIONS, Report, find, fuse, weights
from fusion_patterns.documentation import ADVICE, EVERY_FUSION, misses_markdown
from fusion_patterns.miss import CODES
from tests.fusion_patterns.edits import Edit, Editor, edited
from tests.fusion_patterns.graphs import graph
from tests.fusion_patterns.moe_blocks import ROUTER, block
from tests.fusion_patterns.w8a8 import Spelling, layer

ROOT = Path(__file__).resolve().parents[2]
Corpus = Callable[[str], Path]
Provocation = Callable[[Corpus, pytest.MonkeyPatch], Report]

ATTENTION = "attn_dsv3_decode_sdpa_op18_opt"
V3, V32 = "lm_deepseek_v3_hf_decode", "lm_deepseek_v32_hf_prefill"


def in_graph(name: str, edit: Edit = lambda e: None, **options: Any) -> Provocation:
    """Look at a graph of `models/` after an edit."""
    return lambda corpus, _: find(edited(corpus(name), edit), **options)


def in_model(make: Callable[[], ir.Model], edit: Edit = lambda e: None, **options: Any) -> Provocation:
    """Look at a small graph after an edit."""
    return lambda _corpus, _: find(edited(make, edit), **options)


def scaled(value: str, *readers: str) -> Edit:
    return lambda e: e.instead_of(value, e.add("Mul", value, 2.0), readers)


def reads(result: str, index: int, operand: Any) -> Edit:
    return lambda e: e.read(result, index, operand)


# ------------------------------------------------------------------------------------------ multi-head latent attention


def with_bias(e: Editor) -> None:
    e.instead_of("linear_1", e.add("Add", "linear_1", np.ones(768, np.float32)))


def weight_from_outside(e: Editor) -> None:
    e.graph.inputs.append(e["val_116"])


def cos_and_sin_exchanged_for_the_query(e: Editor) -> None:
    e.exchange("unsqueeze_1", "unsqueeze_2", ("mul_77", "mul_80", "mul_85", "mul_88"))


def rope_columns_first(e: Editor) -> None:
    latent, rope = "split_with_sizes_1_split_0", "split_with_sizes_1_split_1"
    e.exchange(latent, rope)
    e.read(latent, 1, [64, 512])
    e[latent].shape, e[rope].shape = e[rope].shape, e[latent].shape


def keys_for_values(e: Editor) -> None:
    e.read("scaled_dot_product_attention", 1, "split_with_sizes_2_split_0")


def rotated_key_of_this_token(e: Editor) -> None:
    """Cached latents beside rotated keys without their past."""
    e.read("expand", 0, "cat_2")
    e.shape("expand", "batch", 4, 1, 64)


def wide_keys(e: Editor) -> None:
    """Two heads of 384 unrotated features where the query has four of 128."""
    e.read("view_3", 1, [0, -1, 2, 512])
    e.read("split_with_sizes_2_split_0", 1, [384, 128])
    for name, heads, width in (
        ("view_3", None, 512),
        ("transpose_1", 2, 512),
        ("split_with_sizes_2_split_0", 2, 384),
        ("split_with_sizes_2_split_1", 2, 128),
    ):
        dims = list(e[name].shape or ())
        tokens = "past + 1"
        e.shape(name, dims[0], *((tokens, 2) if heads is None else (heads, tokens)), width)


def mask_of_five_axes(e: Editor) -> None:
    e.shape("attention_mask", 1, "batch", 1, 1, "past + 1")


def second_attention(e: Editor) -> None:
    softmax = e.add("Softmax", e.add("Mul", "val_203", 1.0), axis=-1)
    e.graph.outputs.append(e.add("MatMul", softmax, "split_with_sizes_2_split_1", like="scaled_dot_product_attention"))


def double_precision(e: Editor) -> None:
    e["hidden_states"].type = ir.TensorType(ir.DataType.DOUBLE)


# -------------------------------------------------------------------------------------------- 8-bit projections


def w8a8(edit: Edit = lambda e: None, **spelling: Any) -> Provocation:
    return in_model(lambda: layer(replace(Spelling(), **spelling)), edit)


# ------------------------------------------------------------------------------------------------ mixture of experts

SORTED = (
    "keys = Reshape(ids, minus) ks = Shape(keys) sorted_keys, order = TopK<axis=-1, largest=0, sorted=1>(keys, ks)"
    " token = Div(order, two) rows = Gather<axis=0>(x, token)"
)
COUNTS = ' ones = Expand(one_scalar, ks) counts = ScatterElements<axis=0, reduction="add">(empty, keys, ones)'
EMPTY = [0, 0, 0, 0]
IDS = "int64[N,2]"


def small_experts(body: str, outputs: str, **values: Any) -> Provocation:
    return in_model(lambda: block(body, outputs, **values))


# ------------------------------------------------------------------------------------------------- merged attentions

MERGE = """
    m = Max(pm, cm) pd = Sub(pm, m) pe = Exp(pd) pw = Mul(ps, pe) cd = Sub(cm, m) ce = Exp(cd) cw = Mul(cs, ce)
    s = Add(pw, cw) pr = Div(pw, s) cr = Div(cw, s)
    pf = Slice(pr, zero, one, two) cf = Slice(cr, zero, one, two) px = Mul(pa, pf) cx = Mul(ca, cf) o = Add(px, cx)
"""


def merged(old: str = "", new: str = "", kind: str = "float", heads: int = 4, **options: Any) -> Provocation:
    assert old in MERGE
    statistics = dict.fromkeys(("pm", "ps", "cm", "cs"), f"{kind}[T,{heads},8]")
    values = {"pa": f"{kind}[T,4,16]", "ca": f"{kind}[T,4,16]", **statistics, "zero": [0], "one": [1], "two": [2]}
    return in_model(lambda: graph(MERGE.replace(old, new), "o m s", 18, **values), **options)


# --------------------------------------------------------------------------------------------------------- every fusion

FUNCTION = """
<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
g (float[2,3] x) => (float[2,3] y) { y = local.attend(x) }
<domain: "local", opset_import: ["" : 20]>
attend (a) => (b) { b = Softmax(a) }
"""


def wrong_replacement(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Report:
    split = weights.split_kv_b
    monkeypatch.setattr(weights, "split_kv_b", lambda *given: tuple(1.01 * part for part in split(*given)))
    return fuse(load(corpus(ATTENTION)), validate="all")


def runtime_that_cannot_load(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Report:
    def refuse(*_: object, **__: object) -> onnxruntime.InferenceSession:
        raise runtime_errors.NotImplemented("no kernel for MatMul")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    return fuse(load(corpus(ATTENTION)), validate="all")


PROVOKED: dict[str, tuple[str, Provocation]] = {
    "attention-unrecognised": (
        "mla_prolog",
        in_graph(ATTENTION, lambda e: e.set_attributes("val_204", axis=1)),
    ),
    "keys-not-latent": ("mla_prolog", in_graph(ATTENTION, weight_from_outside)),
    "expanded-cache": ("mla_prolog", in_graph("t457_attn_deepseek_v3_decode_sdpa_op18_opt")),
    "value-not-latent": ("mla_prolog", in_graph(ATTENTION, keys_for_values)),
    "query-unrecognised": ("mla_prolog", in_graph(ATTENTION, lambda e: e.swap_inputs("cat_5"))),
    "no-query-low-rank": ("mla_prolog", in_graph("attn_dsv3_decode_sdpa_op18_opt_noqlora")),
    "latent-unrecognised": ("mla_prolog", in_graph(ATTENTION, lambda e: e.swap_inputs("present_ckv"))),
    "key-rope-unrecognised": ("mla_prolog", in_graph(ATTENTION, scaled("view_2"))),
    "rope-unrecognised": ("mla_prolog", in_graph(ATTENTION, lambda e: e.set_op("sub_49", "Add"))),
    "rope-differs": ("mla_prolog", in_graph(ATTENTION, cos_and_sin_exchanged_for_the_query)),
    "cache-mismatch": ("mla_prolog", in_graph(ATTENTION, rotated_key_of_this_token)),
    "hidden-differs": ("mla_prolog", in_graph(ATTENTION, scaled("hidden_states", "linear_2"))),
    "split-sizes": ("mla_prolog", in_graph(ATTENTION, rope_columns_first)),
    "head-count": ("mla_prolog", in_graph(ATTENTION, wide_keys)),
    "quantisation-unsupported": ("mla_preprocess", w8a8(lambda e: e.set_op("xq_r", "Floor"))),
    "quantisation-differs": ("mla_preprocess", w8a8(reads("cq_q_d", 1, 0.031), joint=False, shared=False)),
    "query-not-absorbed": ("mla_preprocess", in_graph("qdq_decode_op18_inputs_only")),
    "cache-unrecognised": ("mla_preprocess", w8a8(scaled("latent", "latent_rows"))),
    "slots-differ": (
        "mla_preprocess",
        w8a8(lambda e: e.read("rope_cache", 1, e.add("Sub", "index", 1))),
    ),
    "epsilon": ("mla_preprocess", w8a8(epsilon=1e-5)),
    "bias": ("mla_prolog", in_graph(ATTENTION, with_bias)),
    "dtype": ("mla_prolog", in_graph(ATTENTION, double_precision)),
    "mask-unrecognised": ("mla_prolog", in_graph(ATTENTION, mask_of_five_axes)),
    "selection-not-causal": ("sparse_flash_attention", in_graph("attn_deepseek_v32_decode_sdpa_op18_opt")),
    "selection-unrecognised": (
        "selected_attention",
        in_graph("sfa_gather_op18_opt", scaled("gather", "transpose")),
    ),
    "selection-unsorted": (
        "sparse_flash_attention",
        in_graph(V32, lambda e: e.set_attributes("getitem_11", sorted=0)),
    ),
    "experts-missing": (
        "moe_init_routing",
        small_experts(f"{ROUTER} {SORTED} {COUNTS}", "rows counts", router=np.ones((6, 5), np.float32), empty=EMPTY),
    ),
    "expert-count-unknown": ("moe_init_routing", small_experts(SORTED, "rows order", ids=IDS)),
    "permutation-unrecognised": (
        "moe_init_routing",
        small_experts(SORTED.replace("order, two", "order, three") + COUNTS, "rows counts", ids=IDS, empty=EMPTY),
    ),
    "permutation-absent": ("moe_init_routing", in_graph("unperm_op18_opt")),
    "experts-unrecognised": ("moe_init_routing", in_graph(V3, scaled("val_571", "val_572"))),
    "combine-unrecognised": ("moe_init_routing", in_graph(V3, reads("val_694", 0, "grouped_mm_fallback_1"))),
    "merge-weights": ("ring_attention", merged("cr = Div(cw, s)", "cr = Div(cw, m)")),
    "merge-maximum": ("ring_attention", merged("Max", "Min")),
    "merge-layout": ("ring_attention", merged(heads=1)),
    "function-body": ("all", in_model(lambda: ir.from_proto(onnx.parser.parse_model(FUNCTION)))),
    "target": ("ring_attention", merged(target="a2")),
    "validation-failed": ("mla_prolog", wrong_replacement),
    "validation-error": ("mla_prolog", runtime_that_cannot_load),
    "assumption-off": ("ring_attention", merged(assume=["none"])),
    "not-requested": ("sparse_flash_attention", in_graph(V32, only="MlaPrologV2WeightNz")),
    "overlap": ("mla_prolog", in_graph(ATTENTION, second_attention)),
}


@pytest.mark.parametrize("code", CODES)
def test_every_code_can_be_provoked(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    fusion, provoke = PROVOKED[code]
    report = provoke(corpus, monkeypatch)
    (missed, *_) = [entry for entry in report.missed if entry.fusion == fusion]
    assert missed.code == code, missed
    assert missed.expected
    assert missed.got
    assert missed.node
    assert fusion in ADVICE[code].fusions or ADVICE[code].fusions == EVERY_FUSION


def test_advice_is_about_the_codes_and_the_fusions_that_there_are() -> None:
    assert list(ADVICE) == list(CODES)
    known = {*(fusion.name for fusion in FUSIONS), "sparse_flash_attention", *EVERY_FUSION}
    assert {name for advice in ADVICE.values() for name in advice.fusions} <= known


def test_the_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "misses.md"
    assert page.read_text(encoding="utf-8") == misses_markdown(), (
        "write it anew: python -m fusion_patterns.documentation docs/misses.md"
    )
