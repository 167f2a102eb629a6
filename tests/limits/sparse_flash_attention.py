"""Limits of SparseFlashAttention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .node import BF16, F16, F32, I32, I64, Change, Described, Node, Rule, change, renamed

ATTENTION = Node(
    "SparseFlashAttention",
    {
        "query": (F16, ("B", "S", 16, 512)),
        "key": (F16, ("B", "P", 1, 512)),
        "value": (F16, ("B", "P", 1, 512)),
        "sparse_indices": (I32, ("B", "S", 1, 2048)),
        "query_rope": (F16, ("B", "S", 16, 64)),
        "key_rope": (F16, ("B", "P", 1, 64)),
    },
    ("attention_out",),
    {"scale_value": 0.04},
)
PAGED = {
    "key": (F16, ("pages", 128, 1, 512)),
    "value": (F16, ("pages", 128, 1, 512)),
    "key_rope": (F16, ("pages", 128, 1, 64)),
    "block_table": (I32, ("B", "most")),
    "actual_seq_lengths_kv": (I32, ("B",)),
}


def pages(size: int) -> dict[str, Described]:
    changed = {
        name: (F16, ("pages", size, 1, 64 if name == "key_rope" else 512)) for name in ("key", "value", "key_rope")
    }
    return {**PAGED, **changed}


TND: Mapping[str, Described] = {
    "query": (F16, ("T", 16, 512)),
    "query_rope": (F16, ("T", 16, 64)),
    "sparse_indices": (I32, ("T", 1, 2048)),
    "key": (F16, ("keys", 1, 512)),
    "value": (F16, ("keys", 1, 512)),
    "key_rope": (F16, ("keys", 1, 64)),
    "actual_seq_lengths_query": (I32, ("B",)),
    "actual_seq_lengths_kv": (I32, ("B",)),
}
BOTH_TND = {"layout_query": "TND", "layout_kv": "TND"}
ATTENTION_950 = replace(ATTENTION, target="950")


def query_heads(count: int) -> dict[str, Described]:
    return {"query": (F16, ("B", "S", count, 512)), "query_rope": (F16, ("B", "S", count, 64))}


def lists_for(tokens: int, lists: int) -> dict[str, Described]:
    return {
        "query": (F16, (1, tokens, 16, 512)),
        "query_rope": (F16, (1, tokens, 16, 64)),
        "sparse_indices": (I32, (1, lists, 1, 2048)),
    }


RULES: list[Rule] = [
    (ATTENTION, "type", change(renamed(key=(BF16, ("B", "P", 1, 512)))), change()),
    (ATTENTION, "missing_input", change(renamed(query_rope=None)), change()),
    (
        ATTENTION,
        "missing_input",
        change({**PAGED, "block_table": None}, layout_kv="PA_BSND"),
        change(PAGED, layout_kv="PA_BSND"),
    ),
    (ATTENTION, "layouts", change(layout_kv="TND"), change()),
    (ATTENTION, "block_table", change(renamed(block_table=(I32, ("B", 4)))), change(PAGED, layout_kv="PA_BSND")),
    (ATTENTION, "sparse_block_size", change(sparse_block_size=256), change(sparse_block_size=128)),
    (ATTENTION, "sparse_block_size", change(sparse_block_size=3), change(sparse_block_size=2)),
    (ATTENTION_950, "sparse_block_size_950", change(sparse_block_size=2), change()),
    (ATTENTION, "block_size", change(pages(8), layout_kv="PA_BSND"), change(pages(16), layout_kv="PA_BSND")),
    (ATTENTION, "block_size", change(pages(1040), layout_kv="PA_BSND"), change(pages(1024), layout_kv="PA_BSND")),
    (
        ATTENTION,
        "block_size",
        change(pages(16), layout_kv="PA_BSND", sparse_block_size=32),
        change(pages(32), layout_kv="PA_BSND", sparse_block_size=32),
    ),
    (ATTENTION, "rank", change(renamed(sparse_indices=(I32, ("B", "S", 2048)))), change()),
    (ATTENTION, "shapes_agree", change(renamed(key_rope=(F16, ("B", "P", 2, 64)))), change()),
    (ATTENTION, "shapes_agree", change(lists_for(8, 7)), change(lists_for(8, 8))),
    (ATTENTION, "head_dim", change(renamed(query=(F16, ("B", "S", 16, 576)))), change()),
    (ATTENTION, "rope_dim", change(renamed(key_rope=(F16, ("B", "P", 1, 32)))), change()),
    (ATTENTION, "kv_heads", change(renamed(key=(F16, ("B", "P", 2, 512)))), change()),
    (ATTENTION, "heads", change(query_heads(65)), change(query_heads(64))),
    (ATTENTION, "heads", change(query_heads(127)), change(query_heads(128))),
    (
        ATTENTION,
        "empty_input",
        change(renamed(key=(F16, ("B", 0, 1, 512)))),
        change(renamed(key=(F16, ("B", 1, 1, 512)))),
    ),
    (
        ATTENTION,
        "return_softmax_lse_pages",
        change(PAGED, layout_kv="PA_BSND", return_softmax_lse=1),
        change(return_softmax_lse=1),
    ),
    (
        ATTENTION,
        "unproduced_output",
        change(outputs=("attention_out", "softmax_max", "softmax_sum")),
        change(outputs=("attention_out", "softmax_max", "softmax_sum"), return_softmax_lse=1),
    ),
    (ATTENTION, "attribute_value", change(sparse_mode=1), change(sparse_mode=0)),
    (ATTENTION, "missing", change(scale_value=None), change()),
    (ATTENTION, "input_type", change(renamed(sparse_indices=(I64, ("B", "S", 1, 2048)))), change()),
    (
        ATTENTION,
        "layouts",
        change(TND, layout_query="TND", layout_kv="BSND"),
        change(TND, layout_query="TND", layout_kv="TND"),
    ),
    (
        ATTENTION,
        "missing_input",
        change({**TND, "actual_seq_lengths_query": None}, **BOTH_TND),
        change(TND, **BOTH_TND),
    ),
    (ATTENTION, "missing_input", change({**TND, "actual_seq_lengths_kv": None}, **BOTH_TND), change(TND, **BOTH_TND)),
    (ATTENTION, "rank", change({**TND, "key": (F16, ("B", "P", 1, 512))}, **BOTH_TND), change(TND, **BOTH_TND)),
    (
        ATTENTION,
        "rank",
        change({**PAGED, "block_table": (I32, ("B",))}, layout_kv="PA_BSND"),
        change(PAGED, layout_kv="PA_BSND"),
    ),
    (ATTENTION, "kv_heads", change(renamed(sparse_indices=(I32, ("B", "S", 2, 2048)))), change()),
    (
        ATTENTION,
        "type",
        change({name: (F32, shape) for name, (_, shape) in ATTENTION.inputs.items() if name != "sparse_indices"}),
        change(),
    ),
]

RELAXED: list[tuple[Node, str, Change, Change]] = [
    (
        ATTENTION,
        "head_dim",
        change({n: (F16, (*s[:-1], 32)) for n, (_, s) in ATTENTION.inputs.items() if n in ("query", "key", "value")}),
        change(renamed(query=(F16, ("B", "S", 16, 32)))),
    ),
]
