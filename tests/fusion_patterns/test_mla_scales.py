"""Latent attention with factors on its projections, angles that are computed twice, and masks of Attention nodes.

What multiplies a projection as a whole goes into a weight of the operator, exactly; what multiplies a part of the heads
or features that no input of the operator stands for is a Miss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.fusion_patterns.edits import Edit, Editor, fused_after
from tests.fusion_patterns.graphs import normal
from tests.models import corpus_feeds

Corpus = Callable[[str], Path]
MLA = "MlaPrologV2WeightNz"
DECODE, PREFILL = "attn_dsv3_decode_sdpa_op18_opt", "attn_dsv3_prefill_sdpa_op18_opt"
ABSORBED = "refmla_absorb_pair_manual_op18_opt"
PER_HEAD = np.array([1, 2, 0.5, 3], np.float32).reshape(1, 4, 1, 1)
PER_FEATURE = np.linspace(0.5, 1.5, 64, dtype=np.float32)


def do(*steps: Edit) -> Edit:
    def edit(e: Editor) -> None:
        for step in steps:
            step(e)

    return edit


def times(value: str, factor: float | np.ndarray) -> Edit:
    return lambda e: e.instead_of(value, e.add("Mul", value, factor))


def over(value: str, divisor: float) -> Edit:
    return lambda e: e.instead_of(value, e.add("Div", value, divisor))


def mirrored(value: str, factor: float) -> Edit:
    return lambda e: e.instead_of(value, e.add("Mul", factor, value, like=value))


C_Q, Q_B, NOPE, ROPE, ROTATED = "mul_27", "linear_1", "split_with_sizes_split_0", "split_with_sizes_split_1", "cat_1"
LATENT, LATENT_ROW = "mul_54", "view_1"
FOLDED = {
    "normed query": times(C_Q, 2.0),
    "whole query projection": times(Q_B, 0.75),
    "unrotated heads": times(NOPE, 2.0),
    "heads before their rotation": times(ROPE, 3.0),
    "rotated heads": times(ROTATED, 3.0),
    "both parts alike": do(times(NOPE, 0.8), times(ROPE, 0.8)),
    "each part by a number of its own": do(times(NOPE, 2.0), times(ROPE, 0.5), times(ROTATED, 3.0)),
    "everything": do(times(C_Q, 2.0), times(Q_B, 0.5), times(NOPE, 3.0), times(ROPE, 0.7), times(LATENT, 1.5)),
    "divided": over(NOPE, 4.0),
    "factor first": mirrored(NOPE, 4.0),
    "normed latent": times(LATENT, 1.5),
    "row of the latent": times(LATENT_ROW, 1.5),
    "twice": do(times(LATENT, 1.5), times(LATENT_ROW, -2.0)),
}
REFUSED: dict[str, tuple[Edit, str]] = {
    "one unrotated head": (times(NOPE, PER_HEAD), "query-unrecognised"),
    "one rotated head": (times(ROTATED, PER_HEAD), "rope-unrecognised"),
    "one head before its rotation": (times(ROPE, PER_HEAD), "query-unrecognised"),
    "one feature of the rotated heads": (times(ROTATED, PER_FEATURE), "rope-unrecognised"),
    "one feature of the latent": (times(LATENT, np.linspace(1, 2, 512, dtype=np.float32)), "latent-unrecognised"),
    "rotated key": (times("cat_2", 2.0), "rope-unrecognised"),
    "key before its rotation": (times("view_2", 2.0), "key-rope-unrecognised"),
    "cached latents": (times("present_ckv", 2.0), "latent-unrecognised"),
    "expanded values": (times("split_with_sizes_2_split_1", 2.0), "attention-unrecognised"),
}


@pytest.mark.parametrize("edit", FOLDED.values(), ids=FOLDED)
def test_factors_go_into_weights(corpus: Corpus, edit: Edit) -> None:
    outcome = fused_after(corpus(DECODE), edit, corpus_feeds(DECODE, {"batch": 2, "past": 5}))
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    outcome.assert_equal()


@pytest.mark.parametrize(("edit", "code"), REFUSED.values(), ids=REFUSED)
def test_other_factors_are_refused(corpus: Corpus, edit: Edit, code: str) -> None:
    outcome = fused_after(corpus(DECODE), edit, corpus_feeds(DECODE, {"batch": 2, "past": 5}))
    assert (outcome.counts, outcome.codes) == ({}, [code])
    outcome.assert_equal()


def test_weights_without_a_factor_are_not_copied(corpus: Corpus) -> None:
    outcome = fused_after(corpus(DECODE), do(), corpus_feeds(DECODE, {"past": 5}))
    assert not any("scaled" in name for name in outcome.model.graph.initializers)


ABSORBED_QUERY = {
    "normed query": times("mul_17", 2.0),
    "whole query projection": times("linear_1", 0.75),
    "unrotated heads": times("split_with_sizes_split_0", 2.0),
    "heads before their rotation": times("split_with_sizes_split_1", 3.0),
    "query in the latent space": times("einsum", 2.0),
    "normed latent": times("mul_55", 1.5),
}


@pytest.mark.parametrize("edit", ABSORBED_QUERY.values(), ids=ABSORBED_QUERY)
def test_factors_on_a_query_that_is_absorbed_already(corpus: Corpus, edit: Edit) -> None:
    feeds = normal(x=(2, 3, 1024), a=(3, 32), b_=(3, 32), kvc=(2, 8, 512), pec=(2, 8, 64))
    feeds["slot"] = np.random.default_rng(0).permutation(16)[:6]
    outcome = fused_after(corpus(ABSORBED), edit, feeds)
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    outcome.assert_equal()


# ------------------------------------------------------------------------------------------ one number for each token


def per_token(e: Editor, *, shape: list[int], like: list[int | str], value: str = "cat_3") -> None:
    """The queries times a number that depends on the position."""
    numbers = e.add("Cast", "position_ids", to=ir.DataType.FLOAT)
    numbers.type = ir.TensorType(ir.DataType.FLOAT)
    turned = e.add("Reshape", e.add("Add", numbers, 1.0), shape)
    turned.shape = ir.Shape(like)
    e.instead_of(value, e.add("Mul", value, turned))


def test_queries_scaled_token_by_token(corpus: Corpus) -> None:
    def edit(e: Editor) -> None:
        per_token(e, shape=[0, 1, -1, 1], like=["batch", 1, "seq", 1])

    outcome = fused_after(corpus(PREFILL), edit, corpus_feeds(PREFILL, {"batch": 2, "seq": 5}))
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    outcome.assert_equal()


def test_queries_scaled_feature_by_feature_are_refused(corpus: Corpus) -> None:
    feature = np.linspace(0.5, 1.5, 192, dtype=np.float32).reshape(1, 1, 1, 192)
    outcome = fused_after(corpus(PREFILL), times("cat_3", feature), corpus_feeds(PREFILL, {"seq": 5}))
    assert (outcome.counts, outcome.codes) == ({}, ["query-unrecognised"])
    outcome.assert_equal()


# ----------------------------------------------------------------------------------------- angles computed once a use

QUERY_ROPE, KEY_ROPE = ("mul_77", "mul_80", "mul_85", "mul_88"), ("mul_95", "mul_98", "mul_103", "mul_106")
COS, SIN = "unsqueeze_1", "unsqueeze_2"


def own_angles(e: Editor, factor: float | None = None, function: str = "Cos") -> None:
    """The key is rotated by a cos that is computed again, from angles times `factor`."""
    angles = "cat" if factor is None else e.add("Mul", "cat", factor)
    cut = e.add("Slice", e.add(function, angles, like="cos"), [0], [32], [2], [1], like="slice_1")
    e.instead_of(COS, e.add("Unsqueeze", cut, [1], like=COS), KEY_ROPE)


def test_angles_that_are_computed_twice(corpus: Corpus) -> None:
    outcome = fused_after(corpus(DECODE), own_angles, corpus_feeds(DECODE, {"past": 5}), validate="all")
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    outcome.assert_equal()


@pytest.mark.parametrize(
    "edit",
    [
        lambda e: own_angles(e, 1.5),
        lambda e: own_angles(e, None, "Sin"),
        lambda e: e.instead_of(COS, e.add("Mul", COS, COS), KEY_ROPE),
    ],
    ids=["of other positions", "another function", "squared"],
)
def test_other_angles_for_the_key_are_refused(corpus: Corpus, edit: Edit) -> None:
    outcome = fused_after(corpus(DECODE), edit, corpus_feeds(DECODE, {"past": 5}))
    assert (outcome.counts, outcome.codes) == ({}, ["rope-differs"])
    outcome.assert_equal()


# ------------------------------------------------------------------------------------------------ masks of operators

OPERATOR = "attn_dsv3_prefill_sdpa_op23_opt"


def boolean(e: Editor) -> None:
    """The mask as a boolean one, which the operator takes as well."""
    attention = e.node("scaled_dot_product_attention")
    visible = e.add("GreaterOrEqual", "attention_mask", 0.0)
    visible.type = ir.TensorType(ir.DataType.BOOL)
    attention.replace_input_with(3, visible)


@pytest.mark.parametrize("edit", [do(), boolean], ids=["added", "boolean"])
def test_rows_without_a_visible_key(corpus: Corpus, edit: Edit) -> None:
    """The operator Attention yields zeros there, where a softmax is not a number."""
    feeds = corpus_feeds(OPERATOR, {"batch": 2, "seq": 5})
    feeds["attention_mask"][1, :, 2] = -np.inf
    outcome = fused_after(corpus(OPERATOR), edit, feeds)
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    assert outcome.expected is not None
    assert all(np.isfinite(array).all() for array in outcome.expected.values())
    outcome.assert_equal()


@pytest.mark.parametrize("edit", [do(), boolean], ids=["added", "boolean"])
def test_a_mask_and_a_causal_flag(corpus: Corpus, edit: Edit) -> None:
    def causal(e: Editor) -> None:
        edit(e)
        e.set_attributes("scaled_dot_product_attention", is_causal=1)

    outcome = fused_after(corpus(OPERATOR), causal, corpus_feeds(OPERATOR, {"batch": 2, "seq": 5}))
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    outcome.assert_equal()


# ------------------------------------------------------------------------------------------------- copies of the key


def test_a_key_copied_to_the_heads_in_two_steps(corpus: Corpus) -> None:
    def edit(e: Editor) -> None:
        again = e.add("Expand", "expand", [1, 4, 1, 1])
        again.shape = ir.Shape([None, None, None, 64])
        e.instead_of("expand", e.add("Expand", again, [1, 4, 1, 1], like="expand"))

    outcome = fused_after(corpus(DECODE), edit, corpus_feeds(DECODE, {"past": 5}))
    assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])
    outcome.assert_equal()
