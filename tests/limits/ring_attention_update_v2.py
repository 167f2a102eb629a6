"""Limits of RingAttentionUpdateV2."""

from __future__ import annotations

from ascend_onnx.operator import Dim

from .node import BF16, F16, F32, I32, I64, Change, Described, Node, Rule, change, renamed

ATTENTIONS = ("prev_attn_out", "cur_attn_out")
STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")


def inputs(attention: tuple[Dim, ...], statistic: tuple[Dim, ...]) -> dict[str, Described]:
    return {**dict.fromkeys(ATTENTIONS, (BF16, attention)), **dict.fromkeys(STATISTICS, (F32, statistic))}


RING = Node(
    "RingAttentionUpdateV2",
    inputs(("S", "B", 1024), ("B", 8, "S", 8)),
    ("attn_out", "softmax_max", "softmax_sum"),
)
LENGTHS: dict[str, Described] = {"actual_seq_qlen": (I64, ("batches",))}


def tnd(heads: int = 8, head_size: int = 128) -> Change:
    return change({**inputs(("T", heads, head_size), ("T", heads, 8)), **LENGTHS}, input_layout="TND")


def tnd_but(**changes: Described | None) -> Change:
    return change({**tnd()["inputs"], **changes}, input_layout="TND")


RULES: list[Rule] = [
    (RING, "type", change(renamed(cur_attn_out=(F16, ("S", "B", 1024)))), change()),
    (RING, "missing_input", tnd_but(actual_seq_qlen=None), tnd()),
    (RING, "rank", change(renamed(prev_attn_out=(BF16, ("S", "B", 8, 128)))), change()),
    (RING, "rank", change(renamed(cur_softmax_sum=(F32, ("B", 8, "S")))), change()),
    (RING, "rank", tnd_but(cur_softmax_sum=(F32, ("B", 8, "S", 8))), tnd()),
    (RING, "rank", tnd_but(actual_seq_qlen=(I64, (1, 3))), tnd()),
    (RING, "empty_input", change(inputs((0, 1, 1024), (1, 8, 0, 8))), change(inputs((1, 1, 1024), (1, 8, 1, 8)))),
    (RING, "softmax_lanes", change(renamed(prev_softmax_max=(F32, ("B", 8, "S", 1)))), change()),
    (RING, "shapes_agree", change(inputs((5, 2, 1024), (2, 8, 6, 8))), change(inputs((5, 2, 1024), (2, 8, 5, 8)))),
    (RING, "shapes_agree", change(inputs((5, 2, 1024), (3, 8, 5, 8))), change(inputs((5, 2, 1024), (2, 8, 5, 8)))),
    (RING, "shapes_agree", change(renamed(cur_attn_out=(BF16, ("S", "B", 2048)))), change()),
    (RING, "shapes_agree", change(renamed(cur_softmax_sum=(F32, ("B", 4, "S", 8)))), change()),
    (RING, "shapes_agree", tnd_but(prev_softmax_max=(F32, ("T", 4, 8))), tnd()),
    (
        RING,
        "shapes_agree",
        change({**inputs((5, 8, 128), (6, 8, 8)), **LENGTHS}, input_layout="TND"),
        change({**inputs((5, 8, 128), (5, 8, 8)), **LENGTHS}, input_layout="TND"),
    ),
    (RING, "softmax_layout", change(input_softmax_layout="BNS"), change(input_softmax_layout="SBH")),
    (RING, "softmax_layout", change(input_softmax_layout="NT"), change(input_softmax_layout="")),
    (RING, "heads_divide", change(inputs(("S", "B", 1020), ("B", 8, "S", 8))), change()),
    (RING, "heads", tnd(heads=257), tnd(heads=256)),
    (RING, "head_dim", tnd(head_size=832), tnd(head_size=768)),
    (RING, "head_dim", tnd(head_size=96), tnd(head_size=64)),
    (RING, "attribute_value", change(input_layout="BSND"), change(input_layout="SBH")),
    (RING, "missing", change(renamed(cur_softmax_max=None)), change()),
    (RING, "input_type", tnd_but(actual_seq_qlen=(I32, ("batches",))), tnd()),
]

RELAXED: list[tuple[Node, str, Change, Change]] = [
    (RING, "head_dim", tnd(head_size=16), tnd_but(cur_attn_out=(BF16, ("T", 8, 16)))),
]
