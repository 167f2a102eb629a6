"""Graphs that are almost what a fusion knows: whatever is fused, every output stays what it was.

All edits are fused without validation, so that only matching decides. Where a table gives the code of a Miss, the edit
must become that Miss; elsewhere it may fuse or not, as long as all results stay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx.operator import Operator
from ascend_onnx.storage import load
from fusion_patterns import fuse, weights
from fusion_patterns.emit import Emitter
from tests.fusion_patterns.edits import Edit, Editor, fused_after, part
from tests.models import corpus_feeds

Corpus = Callable[[str], Path]
MLA, SFA, MOE = "MlaPrologV2WeightNz", "SparseFlashAttention", "MoeInitRoutingV3"

# ------------------------------------------------------------------------------------------- one V3 attention, decode

ATTENTION = "attn_dsv3_decode_sdpa_op18_opt"
QUERY_ROPE, KEY_ROPE = ("mul_77", "mul_80", "mul_85", "mul_88"), ("mul_95", "mul_98", "mul_103", "mul_106")
COS, SIN = "unsqueeze_1", "unsqueeze_2"
PER_HEAD = np.array([1, 2, 0.5, 3], np.float32).reshape(1, 4, 1, 1)


def do(*steps: Edit) -> Edit:
    def edit(e: Editor) -> None:
        for step in steps:
            step(e)

    return edit


def scaled(value: str, factor: float | np.ndarray, *readers: str) -> Edit:
    return lambda e: e.instead_of(value, e.add("Mul", value, factor), readers)


def exchanged(one: str, other: str, *readers: str) -> Edit:
    return lambda e: e.exchange(one, other, readers)


def rounded(value: str, *readers: str) -> Edit:
    """A value rounded to float16 and back."""

    def edit(e: Editor) -> None:
        half = e.add("Cast", value, to=ir.DataType.FLOAT16)
        half.type = ir.TensorType(ir.DataType.FLOAT16)
        e.instead_of(value, e.add("Cast", half, like=value, to=ir.DataType.FLOAT), readers)

    return edit


def angles_cut(start: int, end: int, step: int) -> Edit:
    """cos and sin cut from their 64 columns by another slice than the first half."""

    def edit(e: Editor) -> None:
        for cut in ("slice_1", "slice_2"):
            for index, bound in ((1, start), (2, end), (4, step)):
                e.read(cut, index, [bound])

    return edit


def first_token_of_longer_angles(e: Editor) -> None:
    """Positions (B, 2), of which one Slice takes the first token and the first half of the columns."""
    e.instead_of("_to_copy", e.add("Concat", "_to_copy", e.add("Mul", "_to_copy", 3.0), axis=1))
    for name, width in (("edit_3", 1), ("mul_2", 32), ("cat", 64), ("cos", 64), ("sin", 64)):
        e.shape(name, "batch", 2, width)
    for cut in ("slice_1", "slice_2"):
        for index, bound in ((1, [0, 0]), (2, [1, 32]), (3, [1, 2]), (4, [1, 1])):
            e.read(cut, index, bound)


def transposed_weight(product: str) -> Edit:
    """A weight stored as (n, k), transposed in the graph."""

    def edit(e: Editor) -> None:
        name = e.node(product).inputs[1].name
        k, n = e.weight(name).shape
        turned = e.add("Transpose", np.ascontiguousarray(e.weight(name).T), perm=[1, 0])
        turned.shape = ir.Shape([k, n])
        e.read(product, 1, turned)

    return edit


def columns_exchanged(split: tuple[str, str], sizes: list[int]) -> Edit:
    """A Split cuts the other part first."""

    def edit(e: Editor) -> None:
        first, second = (e[name] for name in split)
        first_shape, second_shape = first.shape, second.shape
        e.exchange(*split)
        e.read(split[0], 1, sizes)
        first.shape, second.shape = second_shape, first_shape

    return edit


def with_bias(product: str) -> Edit:
    def edit(e: Editor) -> None:
        width = e.weight(e.node(product).inputs[1].name).shape[1]
        e.instead_of(product, e.add("Add", product, np.linspace(-1, 1, width, dtype=np.float32)))

    return edit


def head_columns_scaled(e: Editor) -> None:
    """One head of the query up projection times 3: other data, same structure."""
    weight = e.weight("val_15").copy()
    weight[:, 192:384] *= 3
    e.set_weight("val_15", weight)


def epsilon(value: float) -> Edit:
    return lambda e: e.set_weight("val_13", np.float32(value))


def query_norm(change: str) -> Edit:
    """The query's norm, spelled differently."""

    def edit(e: Editor) -> None:
        if change == "epsilon outside":
            e.read("val_14", 0, "mean")
            e.read("rsqrt", 0, e.add("Add", "val_14", 0.1))
        elif change == "over tokens":
            e.read("mean", 1, [1])
            e.shape("mean", "batch", 1, 1536)
        elif change == "one gamma":
            e.read("mul_27", 0, np.full(1, 1.5, np.float32))

    return edit


def softmax_over_heads(e: Editor) -> None:
    e.set_attributes("val_204", axis=1)


def scale_after_mask(e: Editor) -> None:
    e.read("val_204", 0, e.add("Mul", "val_203", 0.5))


def second_mask(e: Editor) -> None:
    e.read("val_204", 0, e.add("Add", "val_203", "attention_mask", like="val_203"))


def mask_per_head(e: Editor) -> None:
    e.read("val_203", 1, e.add("Add", "attention_mask", PER_HEAD))
    e.shape("edit_2", "batch", 4, 1, "past + 1")


def mask_without_axes(e: Editor) -> None:
    mask = e.add("ReduceMean", "attention_mask", [0, 1], keepdims=0)
    mask.shape = ir.Shape([1, "past + 1"])
    e.read("val_203", 1, mask)


def no_mask(e: Editor) -> None:
    e.read("val_204", 0, "val_202")


def mask_first(e: Editor) -> None:
    e.swap_inputs("val_203")


def product_of_others_as_mask(e: Editor) -> None:
    """Both operands of the Add are products of two values."""
    e.read(
        "val_203",
        1,
        e.add("MatMul", "attention_mask", e.add("MatMul", "val_201", "val_201", like="val_202"), like="val_202"),
    )


def other_order_of_past(e: Editor) -> None:
    e.swap_inputs("present_ckv")
    e.swap_inputs("present_kpe")


def past_twice(e: Editor) -> None:
    """A past that was scaled on the way in, in both caches."""
    scaled("past_ckv", 2.0, "present_ckv")(e)
    scaled("past_kpe", 2.0, "present_kpe")(e)


def heads_interleaved(e: Editor) -> None:
    """Query columns read as (192, heads)."""
    e.read("view", 1, [-1, 1, 192, 4])
    e.set_attributes("transpose", perm=[0, 3, 1, 2])
    e.shape("view", "batch", 1, 192, 4)


def weight_that_callers_may_set(e: Editor) -> None:
    e.graph.inputs.append(e["val_116"])


def rotated_key_without_cache_order(e: Editor) -> None:
    """The rotated key takes the new row first, the latent the past first."""
    e.swap_inputs("present_kpe")


SOUND_ATTENTION: dict[str, tuple[Edit, str | None]] = {
    "nothing": (do(), None),
    "cos and sin exchanged for the query": (exchanged(COS, SIN, *QUERY_ROPE), "rope-differs"),
    "cos and sin exchanged for the key": (exchanged(COS, SIN, *KEY_ROPE), "rope-differs"),
    "cos and sin exchanged for both": (exchanged(COS, SIN, *QUERY_ROPE, *KEY_ROPE), None),
    "cos and sin exchanged in one product": (exchanged(COS, SIN, "mul_77"), "rope-unrecognised"),
    "cos and sin exchanged in the second half": (exchanged(COS, SIN, "mul_85", "mul_88"), "rope-unrecognised"),
    "query rotated backwards": (lambda e: (e.set_op("sub_41", "Add"), e.set_op("add_195", "Sub")), "rope-unrecognised"),
    "one sign of the key's rotation": (lambda e: e.set_op("sub_49", "Add"), "rope-unrecognised"),
    "even and odd exchanged": (exchanged("slice_3", "slice_4"), "rope-unrecognised"),
    "rotated halves exchanged": (lambda e: e.swap_inputs("cat_1"), "rope-unrecognised"),
    "angles of the second half": (angles_cut(32, 64, 1), None),
    "angles of every second column": (angles_cut(0, 64, 2), None),
    "angles of the middle": (angles_cut(16, 48, 1), None),
    "angles of the first of two tokens": (first_token_of_longer_angles, None),
    "angles scaled": (do(scaled(COS, 1.5), scaled(SIN, 1.5)), None),
    "angles scaled before they are cut": (do(scaled("cos", 1.5), scaled("sin", 1.5)), None),
    "one head of the query scaled": (scaled("transpose", PER_HEAD), "query-unrecognised"),
    "one head of the keys scaled": (scaled("expand", PER_HEAD), "latent-unrecognised"),
    "one head of the values scaled": (scaled("split_with_sizes_2_split_1", PER_HEAD), "value-not-latent"),
    "one head scaled in the weights": (head_columns_scaled, None),
    "one feature of the normed latent scaled": (
        scaled("mul_54", np.linspace(1, 2, 512, dtype=np.float32)),
        "latent-unrecognised",
    ),
    "latent scaled before the norm": (scaled("split_with_sizes_1_split_0", 2.0), "latent-unrecognised"),
    "latent scaled before the expansion": (scaled("present_ckv", 2.0, "linear_3"), "latent-unrecognised"),
    "scores scaled": (scaled("val_202", 2.0), None),
    "query scaled on the way to the scores": (scaled("cat_5", 2.0), None),
    "query scaled before the cut": (scaled("transpose", 2.0), "query-unrecognised"),
    "another hidden state into kv_a": (scaled("hidden_states", 2.0, "linear_2"), "hidden-differs"),
    "another hidden state into both": (scaled("hidden_states", 2.0), None),
    "q_a transposed": (transposed_weight("linear"), None),
    "q_b transposed": (transposed_weight("linear_1"), None),
    "kv_a transposed": (transposed_weight("linear_2"), None),
    "kv_b transposed": (transposed_weight("linear_3"), None),
    "a weight that callers may set": (weight_that_callers_may_set, "keys-not-latent"),
    "q_a with a bias": (with_bias("linear"), "bias"),
    "q_b with a bias": (with_bias("linear_1"), "bias"),
    "kv_a with a bias": (with_bias("linear_2"), "bias"),
    "kv_b with a bias": (with_bias("linear_3"), "bias"),
    "[rope | latent] columns": (
        columns_exchanged(("split_with_sizes_1_split_0", "split_with_sizes_1_split_1"), [64, 512]),
        "split-sizes",
    ),
    "[rope | nope] columns of the query": (
        columns_exchanged(("split_with_sizes_split_0", "split_with_sizes_split_1"), [64, 128]),
        "query-unrecognised",
    ),
    "[value | key] columns": (
        exchanged("split_with_sizes_2_split_0", "split_with_sizes_2_split_1"),
        "value-not-latent",
    ),
    "keys for values": (
        lambda e: e.read("scaled_dot_product_attention", 1, "split_with_sizes_2_split_0"),
        "value-not-latent",
    ),
    "[rope | nope] in the query's product": (lambda e: e.swap_inputs("cat_5"), "query-unrecognised"),
    "heads interleaved": (heads_interleaved, "query-unrecognised"),
    "another epsilon": (epsilon(1e-2), None),
    "epsilon outside the root": (query_norm("epsilon outside"), "no-query-low-rank"),
    "norm over the tokens": (query_norm("over tokens"), "no-query-low-rank"),
    "one gamma for all features": (query_norm("one gamma"), None),
    "softmax over the heads": (softmax_over_heads, "attention-unrecognised"),
    "scale after the mask": (scale_after_mask, "attention-unrecognised"),
    "two masks": (second_mask, "attention-unrecognised"),
    "a mask per head": (mask_per_head, None),
    "a mask of two axes": (mask_without_axes, None),
    "no mask": (no_mask, None),
    "mask plus scores": (mask_first, None),
    "new row before the past": (other_order_of_past, "latent-unrecognised"),
    "new rotated key before the past": (rotated_key_without_cache_order, "rope-unrecognised"),
    "a computed past": (past_twice, None),
    "c_q rounded to float16": (rounded("mul_27"), None),
    "q_a rounded to float16 before its norm": (rounded("linear", "pow_1", "mul_24"), None),
    "latent rounded to float16 before its norm": (rounded("split_with_sizes_1_split_0"), None),
    "normed latent rounded to float16": (rounded("mul_54"), None),
    "keys rounded to float16": (rounded("expand"), None),
}


@pytest.mark.parametrize("name", SOUND_ATTENTION)
def test_attention_twins(corpus: Corpus, name: str) -> None:
    edit, code = SOUND_ATTENTION[name]
    outcome = fused_after(corpus(ATTENTION), edit, corpus_feeds(ATTENTION, {"batch": 2, "past": 5}))
    outcome.assert_equal()
    if code is not None:
        assert (outcome.counts, outcome.codes) == ({}, [code])
    elif not name.startswith(("angles of", "one gamma")) and "rounded" not in name:
        assert (outcome.counts, outcome.codes) == ({MLA: 1}, [])


PREFILL, PREFILL_23 = "attn_dsv3_prefill_sdpa_op18_opt", "attn_dsv3_prefill_sdpa_op23_opt"
HALF_SPLIT = "attn_dsv3_decode_sdpa_op18_opt_nointerleave"


def angles_of_the_first_token(e: Editor) -> None:
    """All tokens are rotated like the first."""
    for name in ("cos", "sin"):
        first = e.add("Slice", name, [0], [1], [1])
        first.shape = ir.Shape(["batch", 1, 64])
        e.instead_of(name, first)
    for name, width in (("slice_1", 32), ("slice_2", 32)):
        e.shape(name, "batch", 1, width)
    for name in (COS, SIN):
        e.shape(name, "batch", 1, 1, 32)


def angles_of_the_first_batch(e: Editor) -> None:
    """All rows of the batch are rotated like the first."""
    for name in ("cos", "sin"):
        first = e.add("Slice", name, [0], [1], [0])
        first.shape = ir.Shape([1, "seq", 64])
        e.instead_of(name, first)
    for name in ("slice_1", "slice_2"):
        e.shape(name, 1, "seq", 32)
    for name in (COS, SIN):
        e.shape(name, 1, 1, "seq", 32)


def rotary_operator(e: Editor) -> None:
    for rotated, x in (("cat_1", "split_with_sizes_split_1"), ("cat_2", "view_2")):
        e.instead_of(rotated, e.add("RotaryEmbedding", x, "slice_1", "slice_2", interleaved=1))


def rotary_operator_over_heads(e: Editor) -> None:
    """The operator reads (B, heads, S, D); given (B, S, heads, D) it rotates every head like a token."""
    key = e.add("RotaryEmbedding", "view_2", "slice_1", "slice_2", interleaved=1)
    e.instead_of("cat_2", key)
    turned = []
    for name, width in (("split_with_sizes_split_0", 128), ("split_with_sizes_split_1", 64)):
        part = e.add("Transpose", name, perm=[0, 2, 1, 3])
        part.shape = ir.Shape(["batch", "seq", 4, width])
        turned.append(part)
    rotated = e.add("RotaryEmbedding", turned[1], "slice_1", "slice_2", interleaved=1)
    whole = e.add("Concat", turned[0], rotated, axis=-1)
    whole.shape = ir.Shape(["batch", "seq", 4, 192])
    e.instead_of("cat_3", e.add("Transpose", whole, like="cat_3", perm=[0, 2, 1, 3]))


def halves_of_the_angles_differ(e: Editor) -> None:
    for name in ("cos", "sin"):
        e.instead_of(name, e.add("Mul", name, np.linspace(0.5, 1.5, 64, dtype=np.float32)))


def heads_behind_tokens(e: Editor) -> None:
    """Scores (B, S, heads, T) by Einsum, under a mask of that order."""
    scores = e.add("Einsum", "val_199", "val_201", like="val_202", equation="bhsd,bhdt->bsht")
    scores.shape = ir.Shape(["batch", 1, 4, "past + 1"])
    mask = e.add("Add", "attention_mask", PER_HEAD.transpose(0, 2, 1, 3))
    mask.shape = ir.Shape(["batch", 1, 4, "past + 1"])
    weights = e.add("Softmax", e.add("Add", scores, mask), axis=-1)
    out = e.add(
        "Einsum", weights, "split_with_sizes_2_split_1", like="scaled_dot_product_attention", equation="bsht,bhtd->bhsd"
    )
    e.instead_of("scaled_dot_product_attention", out)


def nothing_where_no_key_is_visible(e: Editor) -> None:
    nan = e.add("IsNaN", "val_204")
    nan.type = ir.TensorType(ir.DataType.BOOL)
    e.read("scaled_dot_product_attention", 0, e.add("Where", nan, 0.0, "val_204", like="val_204"))


def mask_hides(batch: int, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    feeds["attention_mask"][batch] = -np.inf
    return feeds


OTHER_SPELLINGS: dict[str, tuple[str, dict[str, int], Edit, bool | None]] = {
    "angles of the first token": (PREFILL, {"seq": 5}, angles_of_the_first_token, None),
    "angles of the first batch": (PREFILL, {"seq": 5, "batch": 3}, angles_of_the_first_batch, None),
    "the rotary operator": (PREFILL_23, {"seq": 5}, rotary_operator, True),
    "the rotary operator over heads": (PREFILL_23, {"seq": 4}, rotary_operator_over_heads, None),
    "halves of the angles differ": (HALF_SPLIT, {"past": 5}, halves_of_the_angles_differ, None),
    "heads behind tokens": (ATTENTION, {"past": 5}, heads_behind_tokens, None),
    "nothing where no key is visible": (ATTENTION, {"past": 5}, nothing_where_no_key_is_visible, None),
}


@pytest.mark.parametrize("name", OTHER_SPELLINGS)
def test_other_spellings(corpus: Corpus, name: str) -> None:
    graph, dims, edit, fuses = OTHER_SPELLINGS[name]
    outcome = fused_after(corpus(graph), edit, corpus_feeds(graph, {"batch": 2, **dims}))
    assert outcome.expected is not None
    outcome.assert_equal()
    if fuses is not None:
        assert outcome.counts == ({MLA: 1} if fuses else {})


@pytest.mark.parametrize("edit", [nothing_where_no_key_is_visible, do()], ids=["guarded", "not a number"])
def test_a_row_without_a_visible_key(corpus: Corpus, edit: Edit) -> None:
    outcome = fused_after(corpus(ATTENTION), edit, mask_hides(1, corpus_feeds(ATTENTION, {"batch": 2, "past": 5})))
    outcome.assert_equal()


def test_a_graph_with_batch_one(corpus: Corpus) -> None:
    outcome = fused_after(corpus(ATTENTION), do(), corpus_feeds(ATTENTION, {"batch": 1, "past": 1}))
    outcome.assert_equal()


def test_more_tokens_than_one_block_of_the_scratch_cache(corpus: Corpus) -> None:
    name = "attn_dsv3_prefill_sdpa_op18_opt"
    outcome = fused_after(corpus(name), do(), corpus_feeds(name, {"batch": 3, "seq": 17}))
    assert outcome.counts == {MLA: 1}
    outcome.assert_equal()


# ------------------------------------------------------------------------------------- values that somebody else reads

INSIDE_ATTENTION = {
    "q_a": "linear",
    "c_q": "mul_27",
    "query": "cat_5",
    "rotated query": "cat_1",
    "kv_a": "linear_2",
    "normed latent": "mul_54",
    "new latent": "view_1",
    "new rotated key": "cat_2",
    "expanded keys and values": "linear_3",
    "keys": "slice_scatter_1",
    "values": "split_with_sizes_2_split_1",
    "scores": "val_202",
    "probabilities": "val_204",
    "weighted values": "scaled_dot_product_attention",
}


@pytest.mark.parametrize("name", INSIDE_ATTENTION.values(), ids=INSIDE_ATTENTION)
def test_attention_values_that_are_outputs(corpus: Corpus, name: str) -> None:
    outcome = fused_after(corpus(ATTENTION), lambda e: e.expose(name), corpus_feeds(ATTENTION, {"past": 5}))
    assert outcome.counts == {MLA: 1}
    assert [output.name for output in outcome.model.graph.outputs][-1] == name
    outcome.assert_equal()


@pytest.mark.parametrize("name", INSIDE_ATTENTION.values(), ids=INSIDE_ATTENTION)
def test_attention_values_that_are_read_elsewhere(corpus: Corpus, name: str) -> None:
    def edit(e: Editor) -> None:
        e.graph.outputs.append(e.add("Relu", name))

    outcome = fused_after(corpus(ATTENTION), edit, corpus_feeds(ATTENTION, {"past": 5}))
    assert outcome.counts == {MLA: 1}
    outcome.assert_equal()


def test_everything_inside_attention_is_an_output(corpus: Corpus) -> None:
    edit = do(lambda e: e.expose(*INSIDE_ATTENTION.values()))
    outcome = fused_after(corpus(ATTENTION), edit, corpus_feeds(ATTENTION, {"past": 5}))
    outcome.assert_equal()


def test_kept_names_what_others_read(corpus: Corpus) -> None:
    outcome = fused_after(corpus(ATTENTION), lambda e: e.expose("mul_27"), corpus_feeds(ATTENTION))
    (entry,) = outcome.report.fused
    assert "mul_27" in entry.kept
    assert "linear_3" not in entry.kept


def second_attention(e: Editor) -> None:
    """Another softmax over the same queries, keys and values, at another temperature."""
    softmax = e.add("Softmax", e.add("Mul", "val_203", 1.0), axis=-1)
    e.graph.outputs.append(e.add("MatMul", softmax, "split_with_sizes_2_split_1", like="scaled_dot_product_attention"))


def test_two_attentions_over_one_latent(corpus: Corpus) -> None:
    outcome = fused_after(corpus(ATTENTION), second_attention, corpus_feeds(ATTENTION, {"past": 5}))
    outcome.assert_equal()
    assert outcome.counts[MLA] + len(outcome.codes) >= 2, "the second attention is neither fused nor missed"


# --------------------------------------------------------------------------------------- two layers of a whole model

V3 = "lm_deepseek_v3_hf_decode"
ONE_LAYER: dict[str, tuple[Edit, str]] = {
    "cos and sin exchanged": (
        exchanged("unsqueeze_7", "unsqueeze_8", "mul_364", "mul_367", "mul_372", "mul_375"),
        "rope-differs",
    ),
    "one head of the query scaled": (scaled("transpose_3", PER_HEAD), "query-unrecognised"),
    "another hidden state into kv_a": (scaled("mul_299", 2.0, "linear_10"), "hidden-differs"),
    "kv_b with a bias": (with_bias("linear_11"), "bias"),
}


@pytest.mark.parametrize("name", ONE_LAYER)
def test_the_other_layer_still_fuses(corpus: Corpus, name: str) -> None:
    edit, code = ONE_LAYER[name]
    outcome = fused_after(corpus(V3), edit, corpus_feeds(V3, {"s36": 5}))
    assert (outcome.counts, outcome.codes) == ({MLA: 1, MOE: 1}, [code])
    (missed,) = outcome.report.missed
    assert missed.anchor == "node_Softmax_436"
    assert missed.fusion == "mla_prolog"
    assert missed.expected
    assert missed.got
    outcome.assert_equal()


SHARED = {
    "cos": "cos",
    "mask": "mul_239",
    "empty keys": "val_160",
    "indices of the slices": "val_180",
    "new tokens": "val_0",
}


@pytest.mark.parametrize("name", SHARED.values(), ids=SHARED)
def test_values_that_layers_share(corpus: Corpus, name: str) -> None:
    outcome = fused_after(corpus(V3), lambda e: e.expose(name), corpus_feeds(V3, {"s36": 5}))
    assert outcome.counts == {MLA: 2, MOE: 1}
    outcome.assert_equal()


# -------------------------------------------------------------------------------------- a mixture of experts by itself

EXPERTS_IN, EXPERTS_OUT = ["view_12", "getitem_17", "mul_587", "position_ids"], ["view_20"]


def experts(corpus: Corpus) -> ir.Model:
    return part(corpus(V3), EXPERTS_IN, EXPERTS_OUT)


def expert_feeds(tokens: int = 5, seed: int = 0, ids: np.ndarray | None = None) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    drawn = np.stack([generator.permutation(8)[:2] for _ in range(tokens)]) if ids is None else ids
    return {
        "view_12": generator.standard_normal((tokens, 1024), dtype=np.float32),
        "getitem_17": drawn.astype(np.int64),
        "mul_587": generator.random((tokens, 2), dtype=np.float32),
        "position_ids": np.zeros((tokens, 1), np.int64),
    }


def node_reads(result: str, index: int, operand: object) -> Edit:
    return lambda e: e.read(result, index, operand)


def attribute(result: str, **values: object) -> Edit:
    return lambda e: e.set_attributes(result, **values)


def rows_reshaped(shape: list[int]) -> Edit:
    """The rows (M, 1024) of the experts as other groups, still summed over their second axis."""

    def edit(e: Editor) -> None:
        e.read("view_19", 1, shape)
        e.shape("view_19", None, *shape[1:])
        e.shape("sum_5", None, shape[2])
        e.shape("view_20", None, 1, 1024)

    return edit


def more_tokens_than_ids(e: Editor) -> None:
    doubled = e.add("Concat", "view_12", "view_12", axis=0)
    doubled.shape = ir.Shape(["tokens", 1024])
    e.read("val_513", 0, doubled)


def gathered_in_reverse(e: Editor) -> None:
    e.read("val_687", 2, e.add("Sub", e.add("Sub", "mul_596", 1), "arange_2", like="arange_2"))


def second_counts(e: Editor) -> None:
    """The second product's slices come from a histogram of their own."""
    ends = e.add("Add", "val_536", 0, like="val_536")
    split = ir.node("Split", [ends], attributes={"axis": 0, "num_outputs": 8}, num_outputs=8, name="another_split")
    e.graph.append(split)
    previous = None
    names = ["val_627", "val_633", "val_639", "val_645", "val_651", "val_657", "val_663", "val_669"]
    for number, (output, rows) in enumerate(zip(split.outputs, names, strict=True)):
        output.name, output.type, output.shape = f"another_{number}", ends.type, ir.Shape([1])
        end = e.add("Squeeze", output, [0], like="val_556")
        span = e.add("Range", 0 if previous is None else previous, end, 1, like="val_557")
        e.read(rows, 1, span)
        previous = end


def one_expert_more(e: Editor) -> None:
    """Ids up to 8, of which the histogram counts the last as 7."""
    e.instead_of("getitem_17", e.add("Add", "getitem_17", 1))


def ids_reversed(e: Editor) -> None:
    """Sorted and counted alike, but by 7 - id."""
    e.instead_of("getitem_17", e.add("Sub", 7, "getitem_17", like="getitem_17"))


def keys_reversed(e: Editor) -> None:
    """Sorted by 7 - id, counted by id."""
    e.read("getitem_18", 0, e.add("Sub", 7, "view_17", like="view_17"))
    e.read("_to_copy_6", 0, "view_17")


def counted_before_sorting(e: Editor) -> None:
    e.read("_to_copy_6", 0, "view_17")


def counted_of_other_ids(e: Editor) -> None:
    e.read("_to_copy_6", 0, e.add("Mod", e.add("Add", "view_17", 1), 8))


def rows_between_products_reversed(e: Editor) -> None:
    last = e.add("Sub", e.add("Sub", "mul_596", 1), "arange_2", like="arange_2")
    for rows in ("val_627", "val_633", "val_639", "val_645", "val_651", "val_657", "val_663", "val_669"):
        e.read(rows, 0, e.add("Gather", "mul_629", last, like="mul_629", axis=0))


def weights_along_the_columns(e: Editor) -> None:
    """Routing weights as (1, M): legal only where there are as many rows as columns."""
    e.read("unsqueeze_14", 1, [0])
    e.shape("unsqueeze_14", 1, "2*s44")


def scaled_expert(e: Editor) -> None:
    e.read("val_572", 1, e.add("Mul", "val_571", 2.0))


def one_expert_twice(e: Editor) -> None:
    e.read("val_566", 1, "val_559")


EXPERT_TWINS: dict[str, Edit] = {
    "nothing": do(),
    "experts' weights exchanged": exchanged("val_559", "val_565"),
    "experts' weights of the second product exchanged": exchanged("val_628", "val_634"),
    "one expert twice": one_expert_twice,
    "an expert's weight scaled": scaled_expert,
    "experts' results exchanged": lambda e: e.swap_inputs("grouped_mm_fallback", 2, 5),
    "experts' rows exchanged": exchanged("val_564", "val_570"),
    "every second row of an expert": node_reads("val_569", 2, 2),
    "an expert starts at 0": node_reads("val_569", 0, 0),
    "an expert starts one late": lambda e: e.read("val_569", 0, e.add("Add", "val_562", 1)),
    "slices of another product, same counts": second_counts,
    "routing weights not gathered": node_reads("unsqueeze_14", 0, "view_16"),
    "routing weights gathered by the inverse": node_reads("val_520", 1, "val_692"),
    "routing weights of another shape": weights_along_the_columns,
    "routing weights of other numbers": scaled("mul_587", 2.0),
    "weighted twice": scaled("mul_635", 2.0),
    "not weighted": node_reads("val_694", 0, "grouped_mm_fallback_1"),
    "gathered back by the order": node_reads("val_694", 1, "val_518"),
    "the inverse of another order": node_reads("val_687", 1, "val_511"),
    "gathered back in reverse": gathered_in_reverse,
    "rows regrouped": rows_reshaped([-1, 2, 512]),
    "sorted downwards": attribute("getitem_18", largest=1),
    "not sorted": attribute("getitem_18", sorted=0),
    "exclusive prefix sums": attribute("cumsum", exclusive=1),
    "suffix sums": attribute("cumsum", reverse=1),
    "wide bins": node_reads("div_2", 1, 2.0),
    "narrow bins": node_reads("div_2", 1, 0.5),
    "bins clipped below": node_reads("clamp", 2, 6),
    "counted twice": lambda e: e.read("ones_like", 0, 2.0),
    "counted from one on": node_reads("scatter_add", 0, np.ones(8, np.float32)),
    "counted, not added": attribute("scatter_add", reduction="max"),
    "counted before sorting": counted_before_sorting,
    "other ids counted": counted_of_other_ids,
    "sorted by other keys than counted": keys_reversed,
    "ids reversed": ids_reversed,
    "tokens of order // 4": node_reads("val_506", 1, 4),
    "tokens of order": node_reads("val_513", 1, "val_518"),
    "more tokens than ids": more_tokens_than_ids,
    "rows reversed between the products": rows_between_products_reversed,
    "experts of other widths summed": lambda e: e.set_op("mul_629", "Add"),
}

FUSING_TWINS = {
    "nothing",
    "experts' weights exchanged",
    "experts' weights of the second product exchanged",
    "one expert twice",
    "routing weights of other numbers",
    "counted before sorting",
    "ids reversed",
    "experts of other widths summed",
}
NO_SORTS = {"sorted downwards", "not sorted"}


@pytest.mark.parametrize("name", EXPERT_TWINS)
def test_expert_twins(corpus: Corpus, name: str) -> None:
    outcome = fused_after(lambda: experts(corpus), EXPERT_TWINS[name], expert_feeds())
    outcome.assert_equal()
    if name in FUSING_TWINS:
        assert outcome.counts == {MOE: 1}
    elif name not in NO_SORTS:
        assert outcome.counts or outcome.codes, "a candidate disappeared without a reason"


def test_routing_weights_along_the_columns_where_that_runs(corpus: Corpus) -> None:
    """512 tokens, two choices: 1,024 rows of 1,024 columns."""
    outcome = fused_after(lambda: experts(corpus), weights_along_the_columns, expert_feeds(512))
    assert outcome.expected is not None
    outcome.assert_equal()


ROUTINGS = {
    "one token": np.array([[3, 1]]),
    "one expert has all": np.full((6, 2), 5),
    "an expert twice in a token": np.array([[2, 2], [2, 7], [0, 0]]),
    "first and last expert": np.array([[0, 7], [7, 0], [7, 7]]),
    "falling": np.array([[7, 6], [5, 4], [3, 2], [1, 0]]),
    "no token": np.zeros((0, 2)),
}


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_routings(corpus: Corpus, ids: np.ndarray) -> None:
    outcome = fused_after(lambda: experts(corpus), do(), expert_feeds(len(ids), ids=ids))
    assert outcome.counts == {MOE: 1}
    outcome.assert_equal()


INSIDE_EXPERTS = {
    "order": "getitem_19",
    "sorted ids": "getitem_18",
    "expanded rows": "val_513",
    "counts": "scatter_add",
    "prefix sums": "cumsum",
    "rows of one expert": "val_564",
    "first product": "grouped_mm_fallback",
    "activation": "mul_629",
    "second product": "grouped_mm_fallback_1",
    "weighted rows": "mul_635",
    "inverse": "val_687",
    "rows in token order": "val_694",
    "rows per token": "view_19",
}


@pytest.mark.parametrize("name", INSIDE_EXPERTS.values(), ids=INSIDE_EXPERTS)
def test_expert_values_that_are_outputs(corpus: Corpus, name: str) -> None:
    outcome = fused_after(lambda: experts(corpus), lambda e: e.expose(name), expert_feeds())
    outcome.assert_equal()
    assert outcome.counts == {MOE: 1} or outcome.codes == ["combine-unrecognised"]


def test_ids_from_outside_are_an_assumption(corpus: Corpus) -> None:
    outcome = fused_after(lambda: experts(corpus), do(), expert_feeds())
    (entry,) = outcome.report.fused
    assert entry.assumed == ["expert-ids-in-range"]


def test_without_assumptions_ids_from_outside_do_not_fuse(corpus: Corpus) -> None:
    outcome = fused_after(lambda: experts(corpus), do(), expert_feeds(), assume=["none"])
    assert outcome.counts == {}
    assert len(outcome.codes) == 1


def test_ids_out_of_the_router_need_no_assumption(corpus: Corpus) -> None:
    outcome = fused_after(corpus(V3), do(), corpus_feeds(V3), assume=["none"], only=MOE)
    assert outcome.counts == {MOE: 1}
    assert outcome.report.fused[0].assumed == []


# -------------------------------------------------------------------------------------- attention under a selection

V32 = "lm_deepseek_v32_hf_prefill"


def sparse(corpus: Corpus) -> ir.Model:
    """The first layer's attention, from its normed hidden state."""
    return part(corpus(V32), ["mul_75", "position_ids", "input_ids"], ["where", "past_key_values.layers.0.keys"])


def sparse_feeds(batch: int = 2, tokens: int = 19, seed: int = 0) -> dict[str, np.ndarray]:
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens))
    hidden = np.random.default_rng(seed).standard_normal((batch, tokens, 1024), dtype=np.float32)
    return {
        "mul_75": hidden,
        "position_ids": np.ascontiguousarray(positions),
        "input_ids": np.zeros((batch, tokens), np.int64),
    }


def not_causal(e: Editor) -> None:
    """Every key is visible to every query, for the scores and for the attention."""
    e.instead_of("le", e.add("Or", "le", e.add("Not", "le")))


def other_mask_for_the_scores(e: Editor) -> None:
    """The scores' mask hides the diagonal as well."""
    strict = e.add("Less", "unsqueeze_5", "unsqueeze_2", like="le")
    e.read("bitwise_not", 0, e.add("Squeeze", strict, [1], like="select"))
    e.read("masked_fill", 0, e.add("Not", e.add("Squeeze", strict, [1], like="select")))


def padding_in_the_mask(e: Editor) -> None:
    """The first key is padding."""
    padding = e.add("Greater", "unsqueeze_5", 0, like="unsqueeze_5")
    padding.type = ir.TensorType(ir.DataType.BOOL)
    e.read("bitwise_and", 0, e.add("And", "expand", padding))


def padding_in_both_masks(e: Editor) -> None:
    padding = e.add("Greater", "unsqueeze_5", 0, like="unsqueeze_5")
    padding.type = ir.TensorType(ir.DataType.BOOL)
    e.instead_of("expand", e.add("And", "expand", padding))


def selection_per_head(e: Editor) -> None:
    """Without its head axis the selection (B, S, T) broadcasts as (1, B, S, T): row b counts for head b."""
    e.read("bitwise_not_1", 0, "scatter")
    e.shape("bitwise_not_1", "s44", "s70", "s70")
    for name in ("bitwise_and", "_to_copy_3", "bitwise_not_2", "_to_copy_4", "mul_495"):
        e.shape(name, "s44", "s44", "s70", "s70")
    for name in ("sum_1", "lt_13"):
        e.shape(name, "s44", "s44", "s70", 1)


def shifted_indices(e: Editor) -> None:
    e.read("_to_copy_1", 0, e.add("Mod", e.add("Add", "getitem_11", 1), "sym_size_int_28", like="getitem_11"))


def no_guard(e: Editor) -> None:
    e.instead_of("where", e["scaled_dot_product_attention"])
    e.graph.outputs[0] = e["scaled_dot_product_attention"]


def guard_of_another_mask(e: Editor) -> None:
    e.read("_to_copy_3", 0, "expand")


def guard_reads_the_selection(e: Editor) -> None:
    """Rows in which key 0 is not selected become 0."""
    e.read("_to_copy_3", 0, e.add("And", "bitwise_and", e.add("Less", "unsqueeze_5", 1, like="bitwise_and")))


def scores_masked_by_addition(e: Editor) -> None:
    floats = e.add("Cast", "bitwise_not", like="squeeze_1", to=ir.DataType.FLOAT)
    e.read("sym_min", 0, "sym_size_int_28")
    masked = e.add("Add", "squeeze_1", e.add("Mul", floats, -3.4e38))
    e.instead_of("masked_fill", masked)


SPARSE_TWINS: dict[str, tuple[Edit, dict[str, int], list[str]]] = {
    "nothing": (do(), {MLA: 1, SFA: 1}, []),
    "Less for LessOrEqual": (lambda e: e.set_op("le", "Less"), {MLA: 1}, ["selection-not-causal"]),
    "one key too many": (
        lambda e: e.read("unsqueeze_2", 0, e.add("Add", "unsqueeze_1", 1)),
        {MLA: 1},
        ["selection-not-causal"],
    ),
    "mirrored": (lambda e: (e.set_op("le", "GreaterOrEqual"), e.swap_inputs("le")), {MLA: 1, SFA: 1}, []),
    "anticausal": (lambda e: e.set_op("le", "GreaterOrEqual"), {MLA: 1}, ["selection-not-causal"]),
    "not causal": (not_causal, {MLA: 1}, ["selection-not-causal"]),
    "padding too": (padding_in_the_mask, {MLA: 1}, ["selection-not-causal"]),
    "padding in both": (padding_in_both_masks, {MLA: 1}, ["selection-not-causal"]),
    "unsorted top-k": (attribute("getitem_11", sorted=0), {MLA: 1}, ["selection-unsorted"]),
    "smallest first": (attribute("getitem_11", largest=0), {MLA: 1}, ["selection-unsorted"]),
    "top-k over queries": (attribute("getitem_11", axis=1), {MLA: 1}, ["selection-unsorted"]),
    "scores not masked": (node_reads("getitem_11", 0, "squeeze_1"), {MLA: 1}, ["selection-unsorted"]),
    "scores masked with 0": (node_reads("masked_fill", 1, 0.0), {MLA: 1}, ["selection-unsorted"]),
    "scores masked with -1": (node_reads("masked_fill", 1, -1.0), {MLA: 1}, ["selection-unsorted"]),
    "visible scores masked": (lambda e: e.swap_inputs("masked_fill", 1, 2), {MLA: 1}, ["selection-unsorted"]),
    "scores masked otherwise": (other_mask_for_the_scores, {MLA: 1}, ["selection-unsorted"]),
    "scores masked by addition": (scores_masked_by_addition, {MLA: 1, SFA: 1}, []),
    "indices shifted": (shifted_indices, {MLA: 1}, ["selection-unsorted"]),
    "selected along the queries": (attribute("scatter", axis=1), {MLA: 1}, []),
    "what is not selected": (node_reads("bitwise_and", 1, "unsqueeze_14"), {MLA: 1}, []),
    "selected or visible": (lambda e: e.set_op("bitwise_and", "Or"), {MLA: 1}, []),
    "mild mask": (node_reads("mul_495", 1, -5.0), {MLA: 1}, []),
    "selection per head": (selection_per_head, {MLA: 1}, []),
    "no guard": (no_guard, {MLA: 1, SFA: 1}, []),
    "guard of another mask": (guard_of_another_mask, {MLA: 1, SFA: 1}, []),
    "guard of another selection": (guard_reads_the_selection, {MLA: 1, SFA: 1}, []),
    "another scale": (scaled("val_338", 0.5), {MLA: 1, SFA: 1}, []),
    "one head of the keys scaled": (scaled("expand_1", PER_HEAD), {}, ["latent-unrecognised"]),
}


@pytest.mark.parametrize("name", SPARSE_TWINS)
def test_sparse_twins(corpus: Corpus, name: str) -> None:
    edit, counts, codes = SPARSE_TWINS[name]
    batch = 4 if name == "selection per head" else 2
    outcome = fused_after(lambda: sparse(corpus), edit, sparse_feeds(batch))
    outcome.assert_equal()
    assert outcome.counts == counts
    assert outcome.codes == codes


INSIDE_SELECTION = {
    "c_q": "mul_95",
    "scores": "squeeze_1",
    "masked scores": "masked_fill",
    "selected positions": "getitem_11",
    "selection": "scatter",
    "visible": "bitwise_and",
    "additive mask": "mul_495",
    "probabilities": "val_340",
    "before the guard": "scaled_dot_product_attention",
    "new rotated key": "past_key_values.layers.0.values",
    "keys": "slice_scatter_1",
}


@pytest.mark.parametrize("name", INSIDE_SELECTION.values(), ids=INSIDE_SELECTION)
def test_selection_values_that_are_outputs(corpus: Corpus, name: str) -> None:
    outcome = fused_after(lambda: sparse(corpus), lambda e: e.expose(name), sparse_feeds())
    assert outcome.counts == {MLA: 1, SFA: 1}
    outcome.assert_equal()


def test_the_selection_of_another_layer(corpus: Corpus) -> None:
    """Layers may share a selection: the second attends to what the first chose."""
    model = load(corpus(V32))
    chosen = [
        v
        for node in model.graph
        for v in node.outputs
        if node.op_type == "TopK" and v.shape and str(v.shape[-1]).startswith("Min")
    ]
    first, second = (v.name for v in chosen if v.dtype == ir.DataType.INT64)
    outcome = fused_after(corpus(V32), lambda e: e.instead_of(second, e[first]), corpus_feeds(V32, {"s70": 12}))
    assert outcome.counts == {MLA: 2, SFA: 2, MOE: 1}
    outcome.assert_equal()


# ----------------------------------------------------------------------------------- attention over gathered rows alone

GATHERED = "sfa_gather_op18_opt"


def gathered_feeds(tokens: int = 3, past: int = 20, chosen: int = 6) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"q": (2, tokens, 4, 512), "qr": (2, tokens, 4, 64), "kv": (2, past, 512), "kr": (2, past, 64)}
    feeds = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    rows = [generator.permutation(past)[:chosen] for _ in range(2 * tokens)]
    return {**feeds, "idx": np.stack(rows).reshape(2, tokens, chosen).astype(np.int64)}


def other_rows_for_values(e: Editor) -> None:
    """The values are rows of a scaled cache."""
    e.read("matmul_2", 1, e.add("Mul", "gather", 2.0))


def other_selection_for_rope(e: Editor) -> None:
    """The rotated keys are those next to the selected ones."""
    shifted = e.add("Mod", e.add("Add", "expand_3", 1), 20, like="expand_3")
    e.read("gather_1", 1, shifted)


def gathered_along_the_queries(e: Editor) -> None:
    e.set_attributes("gather", axis=1)
    e.read("gather", 1, e.add("Mod", "expand_1", 3))


GATHERED_TWINS: dict[str, tuple[Edit, bool | None]] = {
    "nothing": (do(), True),
    "one head scaled": (scaled("q", PER_HEAD.reshape(1, 1, 4, 1)), None),
    "scores masked": (scaled("mul_56", np.linspace(0.5, 1.5, 6, dtype=np.float32)), None),
    "rope scores scaled": (scaled("matmul_1", 0.5), None),
    "rope scores subtracted": (lambda e: e.set_op("add_70", "Sub"), None),
    "values of other rows": (other_rows_for_values, None),
    "rope of another selection": (other_selection_for_rope, None),
    "gathered along the queries": (gathered_along_the_queries, False),
    "softmax over the heads": (attribute("softmax", axis=2), False),
    "probabilities scaled": (scaled("softmax", 0.5), None),
    "rotated keys for latents": (scaled("gather", 0.5, "transpose"), None),
}


@pytest.mark.parametrize("name", GATHERED_TWINS)
def test_gathered_twins(corpus: Corpus, name: str) -> None:
    edit, fuses = GATHERED_TWINS[name]
    outcome = fused_after(corpus(GATHERED), edit, gathered_feeds())
    outcome.assert_equal()
    if fuses is not None:
        assert outcome.counts == ({SFA: 1} if fuses else {})


@pytest.mark.parametrize(("tokens", "past", "chosen"), [(1, 40, 6), (33, 40, 7), (2, 4, 4)])
def test_gathered_sizes(corpus: Corpus, tokens: int, past: int, chosen: int) -> None:
    outcome = fused_after(corpus(GATHERED), do(), gathered_feeds(tokens, past, chosen))
    assert outcome.counts == {SFA: 1}
    outcome.assert_equal()


def test_a_selection_from_outside_is_an_assumption(corpus: Corpus) -> None:
    outcome = fused_after(corpus(GATHERED), do(), gathered_feeds())
    assert outcome.report.fused[0].assumed == ["indices-valid"]
    assert fused_after(corpus(GATHERED), do(), gathered_feeds(), assume=["none"]).counts == {}


# ------------------------------------------------------------------------------------- validation finds a wrong emitter


def wrong_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    right = weights.split_kv_b
    monkeypatch.setattr(
        weights, "split_kv_b", lambda w, heads, nope: tuple(1.01 * part for part in right(w, heads, nope))
    )


def wrong_attribute(
    monkeypatch: pytest.MonkeyPatch, operator: str, name: str, change: Callable[[float], float]
) -> None:
    """Nodes of an operator are made with another value of one attribute."""
    right = Emitter.fused

    def wrong(
        self: Emitter, made: Operator, inputs: object, outputs: object, attributes: dict, *rest: object
    ) -> object:
        changed = {name: change(attributes[name])} if made.name == operator else {}
        return right(self, made, inputs, outputs, {**attributes, **changed}, *rest)

    monkeypatch.setattr(Emitter, "fused", wrong)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_attribute(monkeypatch, SFA, "scale_value", lambda scale: 1.1 * scale)


def wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_attribute(monkeypatch, MOE, "row_idx_type", lambda kind: 1 - kind)


WRONG = {
    "absorbed weights": (wrong_expansion, lambda corpus: load(corpus(ATTENTION))),
    "scale of the sparse attention": (wrong_scale, sparse),
    "row indices": (wrong_order, experts),
}


@pytest.mark.parametrize("mode", ["all", "sample"])
@pytest.mark.parametrize("name", WRONG)
def test_validation_turns_a_wrong_replacement_into_a_miss(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    spoil, source = WRONG[name]
    model = source(corpus)
    before = [node.name for node in model.graph]
    spoil(monkeypatch)
    report = fuse(model, validate=mode)
    assert report.counts == {}
    assert [missed.code for missed in report.missed] == ["validation-failed"]
    assert [node.name for node in model.graph] == before


@pytest.mark.parametrize("name", WRONG)
def test_without_validation_the_wrong_replacement_is_visible(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The comparison of these tests can fail."""
    spoil, source = WRONG[name]
    spoil(monkeypatch)
    feeds = {"absorbed weights": corpus_feeds(ATTENTION, {"past": 5}), "row indices": expert_feeds()}.get(
        name, sparse_feeds()
    )
    outcome = fused_after(lambda: source(corpus), do(), feeds)
    assert outcome.counts
    with pytest.raises(AssertionError, match="largest magnitude"):
        outcome.assert_equal()


def test_only_the_wrong_match_is_left_out(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_order(monkeypatch)
    report = fuse(load(corpus(V3)), validate="all")
    assert report.counts == {MLA: 2}
    assert [missed.code for missed in report.missed] == ["validation-failed"]
