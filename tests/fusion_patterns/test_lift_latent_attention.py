"""Whole attention layers of real exports, and every smaller block in them: each description is what the graph does.

The sweep asks every recogniser about every value of a graph and proves whatever it claims against ONNX Runtime, so a
recogniser that says too much is found wherever that happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx.storage import load
from fusion_patterns.graph import Facts
from fusion_patterns.lift.attention import Attention, recognise_attention
from fusion_patterns.lift.concat import Concat, recognise_concat
from fusion_patterns.lift.contraction import Contraction, recognise_contraction
from fusion_patterns.lift.experts import GroupedProduct, recognise_counts, recognise_grouped_product
from fusion_patterns.lift.floor_division import FloorDivision, recognise_floor_division
from fusion_patterns.lift.heads import Cut, HeadView, recognise_heads, recognise_split
from fusion_patterns.lift.latent_attention import LatentAttention, recognise_latent_attention
from fusion_patterns.lift.linear import Linear, recognise_linear
from fusion_patterns.lift.mask import (
    CausalMask,
    EmptyRowGuard,
    Selection,
    recognise_additive,
    recognise_causal,
    recognise_guard,
    recognise_selection,
)
from fusion_patterns.lift.permutation import (
    Permutation,
    RowGather,
    gathered_rows,
    recognise_inverse,
    recognise_permutation,
)
from fusion_patterns.lift.permuted import Permuted, recognise_permuted
from fusion_patterns.lift.rms_norm import RmsNorm, recognise_rms_norm
from fusion_patterns.lift.rope import Rope, recognise_rope
from fusion_patterns.lift.slices import Sliced, recognise_slice
from fusion_patterns.miss import Miss
from fusion_patterns.shapes import complete_shapes
from tests.fusion_patterns.claims import assert_true
from tests.fusion_patterns.edits import Editor
from tests.fusion_patterns.graphs import Run
from tests.models import corpus_feeds

Corpus = Callable[[str], Path]
DIMS: dict[str, dict[str, int]] = {
    "lm_deepseek_v3_hf_prefill": {"s44": 2, "s53": 5},
    "lm_deepseek_v3_hf_decode": {"s44": 3, "s36": 5},
    "lm_deepseek_v32_hf_prefill": {"s44": 3, "s70": 13},
    "lm_deepseek_v32_hf_decode": {"s44": 3, "s27": 12},
    "attn_dsv3_decode_eager_op18_opt": {"batch": 3, "past": 5},
    "attn_dsv3_decode_sdpa_op18_opt": {"batch": 3, "past": 5},
    "attn_dsv3_decode_sdpa_op18_noopt": {"batch": 3, "past": 5},
    "attn_dsv3_decode_sdpa_op18_opt_nointerleave": {"batch": 3, "past": 5},
    "attn_dsv3_decode_sdpa_op18_opt_noqlora": {"batch": 3, "past": 5},
    "attn_dsv3_decode_sdpa_op23_opt": {"batch": 3, "past": 5},
    "attn_dsv3_prefill_sdpa_op18_opt": {"batch": 3, "seq": 7},
    "attn_dsv3_prefill_sdpa_op23_opt": {"batch": 3, "seq": 7},
}
BY_VALUE: dict[type, Callable[[ir.Value, Facts], Any]] = {
    Permuted: recognise_permuted,
    Concat: recognise_concat,
    Linear: recognise_linear,
    RmsNorm: recognise_rms_norm,
    HeadView: recognise_heads,
    Cut: recognise_split,
    Sliced: recognise_slice,
    Rope: recognise_rope,
    Contraction: recognise_contraction,
    FloorDivision: recognise_floor_division,
    CausalMask: recognise_causal,
    Selection: recognise_selection,
}


@dataclass
class Graph:
    """A real graph, what is known of it, and one run of it."""

    model: ir.Model
    facts: Facts
    run: Run

    def values(self) -> list[ir.Value]:
        return [v for node in self.model.graph for v in node.outputs if isinstance(v.type, ir.TensorType) and v.name]

    def layers(self) -> list[LatentAttention | Miss]:
        found = [
            recognise_attention(node, self.facts)
            for node in self.model.graph
            if node.op_type in ("Softmax", "Attention")
        ]
        return [recognise_latent_attention(a, self.facts) for a in found if isinstance(a, Attention)]


@pytest.fixture(scope="module")
def graphs(corpus: Corpus) -> Callable[[str], Graph]:
    made: dict[str, Graph] = {}

    def get(name: str) -> Graph:
        if name not in made:
            model = load(corpus(name))
            facts = Facts(complete_shapes(model))
            made[name] = Graph(model, facts, Run(model, corpus_feeds(name, DIMS[name])))
        return made[name]

    return get


Graphs = Callable[[str], Graph]


@pytest.mark.parametrize("name", DIMS)
def test_every_claim_about_a_value_is_true(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    seen = set()
    for value in graph.values():
        for kind, recognise in BY_VALUE.items():
            description = recognise(value, graph.facts)
            if isinstance(description, kind) and not (isinstance(description, Permuted) and description.base is value):
                seen.add(kind)
                assert_true(description, value, graph.run)
    assert {Linear, HeadView, Cut, Rope, Concat} <= seen


@pytest.mark.parametrize("name", DIMS)
def test_every_claim_about_a_node_is_true(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    for node in graph.model.graph:
        attention = recognise_attention(node, graph.facts) if node.op_type in ("Softmax", "Attention") else None
        if isinstance(attention, Attention):
            assert_true(attention, attention.out, graph.run)
        gather = gathered_rows(node, graph.facts)
        if isinstance(gather, RowGather):
            assert_true(gather, gather.rows, graph.run)
        permutation = recognise_permutation(node, graph.facts) if node.op_type == "TopK" else None
        if isinstance(permutation, Permutation):
            assert_true(permutation, permutation.order, graph.run)


@pytest.mark.parametrize("name", [name for name in DIMS if name.startswith("lm_")])
def test_every_claim_about_experts_and_masks_is_true(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    orders = [
        node.outputs[1]
        for node in graph.model.graph
        if isinstance(recognise_permutation(node, graph.facts) if node.op_type == "TopK" else None, Permutation)
    ]
    assert len(orders) == 1
    inverses, products = 0, 0
    for value in graph.values():
        guard = recognise_guard(value, graph.facts)
        if isinstance(guard, EmptyRowGuard):
            assert_true(guard, guard.out, graph.run)
        visible = recognise_additive(value, graph.facts)
        if visible is not None:
            shown, added = graph.run.of(visible), graph.run.of(value)
            assert np.array_equal(np.broadcast_to(shown, added.shape), added if added.dtype == np.bool_ else added == 0)
        product = recognise_grouped_product(value, graph.facts)
        if isinstance(product, GroupedProduct):
            products += 1
            assert_true(product, product.out, graph.run)
        if recognise_inverse(value, orders[0], graph.facts):
            inverses += 1
            order = graph.run.of(orders[0])
            np.testing.assert_array_equal(graph.run.of(value)[order], np.arange(order.size))
    assert (inverses, products) == (1, 2)


@pytest.mark.parametrize("name", [name for name in DIMS if name.startswith("lm_")])
def test_counts_are_those_of_the_ids(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    products = [recognise_grouped_product(value, graph.facts) for value in graph.values()]
    first = next(p for p in products if isinstance(p, GroupedProduct))
    (sort,) = [
        p
        for node in graph.model.graph
        if node.op_type == "TopK" and isinstance(p := recognise_permutation(node, graph.facts), Permutation)
    ]
    assert recognise_counts(first.ends, (sort.keys, sort.sorted_keys), 8, graph.facts) is None
    counts = np.bincount(graph.run.of(sort.keys), minlength=8)
    np.testing.assert_array_equal(graph.run.of(first.ends), np.cumsum(counts))
    assert recognise_counts(first.ends, (sort.keys, sort.sorted_keys), 7, graph.facts) is not None
    assert recognise_counts(first.ends, (sort.order,), 8, graph.facts) is not None


@pytest.mark.parametrize("name", DIMS)
def test_shape_arithmetic_gives_the_numbers_of_the_run(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    compared = 0
    for value in graph.values():
        computed = graph.facts.symbolic(value) if value.dtype in (ir.DataType.INT64, ir.DataType.INT32) else None
        sizes = [graph.run.size(dim) for dim in computed or []]
        if computed is not None and None not in sizes and graph.facts.rank(value) is not None:
            compared += 1
            assert graph.run.of(value).reshape(-1).tolist() == sizes, value.name
    assert compared > 5


@pytest.mark.parametrize("name", DIMS)
def test_shapes_are_those_of_the_run(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    for value in graph.values():
        for dim, size in zip(graph.facts.shape(value) or (), graph.run.of(value).shape, strict=False):
            assert graph.run.size(dim) in (None, size), value.name


@pytest.mark.parametrize("name", [name for name in DIMS if "noqlora" not in name])
def test_layers(graphs: Graphs, name: str) -> None:
    graph = graphs(name)
    layers = graph.layers()
    assert len(layers) == (2 if name.startswith("lm_") else 1)
    for layer in layers:
        assert isinstance(layer, LatentAttention), layer
        projections = layer.projections
        assert (projections.query.heads, projections.query.nope) == (layer.key.heads, layer.key.nope) == (4, 128)
        assert (layer.key.value_size, projections.key.norm.gamma.shape[0]) == (128, 512)
        assert (layer.key.latent.past is None) == (layer.key.rotated.past is None) == ("prefill" in name)
        assert layer.attention.scale == pytest.approx(192**-0.5)
        assert_true(layer, layer.attention.out, graph.run)


def test_a_query_without_a_low_rank_pair(graphs: Graphs) -> None:
    (layer,) = graphs("attn_dsv3_decode_sdpa_op18_opt_noqlora").layers()
    assert isinstance(layer, Miss)
    assert layer.code == "no-query-low-rank"


def missed(edit: Callable[[Editor], None], corpus: Corpus) -> LatentAttention | Miss:
    model = load(corpus("attn_dsv3_decode_sdpa_op18_opt"))
    edit(Editor(model))
    model.graph.sort()
    facts = Facts(complete_shapes(model))
    (softmax,) = [node for node in model.graph if node.op_type == "Softmax"]
    attention = recognise_attention(softmax, facts)
    assert isinstance(attention, Attention)
    return recognise_latent_attention(attention, facts)


MISSES: dict[str, tuple[Callable[[Editor], None], str]] = {
    "keys scaled": (
        lambda e: e.instead_of(
            "slice_scatter_1", e.add("Mul", "slice_scatter_1", e["rot.inv_freq"], like="slice_scatter_1")
        ),
        "keys-not-latent",
    ),
    "keys of another expansion": (
        lambda e: e.read("val_158", 0, e.add("Relu", "split_with_sizes_2_split_0")),
        "keys-not-latent",
    ),
    "values of another expansion": (
        lambda e: e.read("scaled_dot_product_attention", 1, e.add("Relu", "split_with_sizes_2_split_1")),
        "value-not-latent",
    ),
    "queries scaled per feature": (lambda e: e.read("val_199", 0, e.add("Relu", "cat_5")), "query-unrecognised"),
    "another hidden state": (lambda e: e.read("linear_2", 0, e.add("Relu", "hidden_states")), "hidden-differs"),
    "another latent": (lambda e: e.read("view_1", 0, e.add("Relu", "mul_54")), "latent-unrecognised"),
    "another rotated key": (lambda e: e.read("present_kpe", 1, e.add("Relu", "cat_2")), "rope-unrecognised"),
    "a latent that is no part of the down projection": (
        lambda e: e.instead_of("split_with_sizes_1_split_0", e.add("Relu", "split_with_sizes_1_split_0")),
        "latent-unrecognised",
    ),
    "a key that is no part of the down projection": (
        lambda e: e.read("view_2", 0, e.add("Relu", "split_with_sizes_1_split_1")),
        "latent-unrecognised",
    ),
    "no constant expansion": (lambda e: e.read("linear_3", 1, e.add("Relu", "val_116")), "keys-not-latent"),
    "no constant down projection": (lambda e: e.read("linear_2", 1, e.add("Relu", "val_25")), "latent-unrecognised"),
    "no constant query projection": (lambda e: e.read("linear", 1, e.add("Relu", "val_8")), "no-query-low-rank"),
}


@pytest.mark.parametrize(("edit", "code"), MISSES.values(), ids=MISSES)
def test_what_does_not_fit_is_named(corpus: Corpus, edit: Callable[[Editor], None], code: str) -> None:
    result = missed(edit, corpus)
    assert isinstance(result, Miss)
    assert result.code == code
    assert result.node
