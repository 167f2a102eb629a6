"""Limits of MoeInitRoutingV3."""

from __future__ import annotations

from dataclasses import replace

from .node import BF16, F32, I8, I32, I64, Node, Rule, change, renamed

ROUTING = Node(
    "MoeInitRoutingV3",
    {"x": (BF16, (32, 7168)), "expert_idx": (I32, (32, 8))},
    ("expanded_x", "expanded_row_idx", "expert_tokens_count_or_cumsum"),
    {"expert_num": 256, "expert_tokens_num_flag": 1, "expert_tokens_num_type": 1},
)
ROUTING_950 = replace(ROUTING, target="950")
STATIC = {"scale": (F32, (1,)), "offset": (F32, (1,))}
DROP_PAD = {"drop_pad_mode": 1, "expert_capacity": 4}

RULES: list[Rule] = [
    (ROUTING, "type", change(renamed(x=(I8, (32, 7168))), quant_mode=1), change(renamed(x=(I8, (32, 7168))))),
    (ROUTING, "rank", change(renamed(x=(BF16, (31, 7168)))), change()),
    (ROUTING, "rank", change(renamed(expert_idx=(I32, (32,)))), change()),
    (ROUTING, "scale", change(renamed(scale=(F32, (31,)))), change(renamed(scale=(F32, (32,))))),
    (ROUTING, "scale", change(renamed(offset=(F32, (1,))), quant_mode=0), change(STATIC, quant_mode=0)),
    (
        ROUTING,
        "scale",
        change(renamed(scale=(F32, (2, 7168))), quant_mode=1),
        change(renamed(scale=(F32, (1, 7168))), quant_mode=1),
    ),
    (ROUTING, "offset", change(renamed(offset=(F32, (1,)))), change()),
    (ROUTING, "offset", change({**STATIC, "offset": (F32, (2,))}, quant_mode=0), change(STATIC, quant_mode=0)),
    (ROUTING, "expert_num", change(expert_num=10241), change(expert_num=10240)),
    (
        ROUTING,
        "expert_num",
        change(expert_num=5121, expert_tokens_num_type=2),
        change(expert_num=5120, expert_tokens_num_type=2),
    ),
    (ROUTING, "active_expert_range", change(active_expert_range=[8, 257]), change(active_expert_range=[8, 256])),
    (
        ROUTING,
        "active_expert_range",
        change(active_expert_range=[0, 255], **DROP_PAD),
        change(active_expert_range=[0, 256], **DROP_PAD),
    ),
    (ROUTING, "active_num", change(active_num=-2), change(active_num=0)),
    (ROUTING_950, "active_num", change(active_num=255), change(active_num=256)),
    (
        ROUTING,
        "expert_capacity",
        change(drop_pad_mode=1, expert_capacity=0),
        change(drop_pad_mode=1, expert_capacity=1),
    ),
    (
        ROUTING,
        "expert_capacity",
        change(drop_pad_mode=1, expert_capacity=33),
        change(drop_pad_mode=1, expert_capacity=32),
    ),
    (ROUTING, "drop_pad", change(row_idx_type=1, **DROP_PAD), change(**DROP_PAD)),
    (ROUTING, "drop_pad", change(expert_tokens_num_type=2, **DROP_PAD), change(expert_tokens_num_type=1, **DROP_PAD)),
    (ROUTING, "drop_pad_mode", change(drop_pad_mode=2), change(**DROP_PAD)),
    (ROUTING_950, "drop_pad_mode", change(**DROP_PAD), change()),
    (ROUTING, "expert_tokens_num_type", change(expert_tokens_num_type=3), change(expert_tokens_num_type=2)),
    (ROUTING_950, "expert_tokens_num_type", change(expert_tokens_num_type=0), change(expert_tokens_num_type=1)),
    (ROUTING, "expert_tokens_num_flag", change(expert_tokens_num_flag=2), change(expert_tokens_num_flag=1)),
    (ROUTING_950, "expert_tokens_num_flag", change(outputs=ROUTING.outputs[:2], expert_tokens_num_flag=0), change()),
    (ROUTING, "quant_mode", change(quant_mode=2), change(quant_mode=1)),
    (ROUTING_950, "quant_mode", change(STATIC, quant_mode=0), change(quant_mode=2)),
    (ROUTING, "row_idx_type", change(row_idx_type=2), change(row_idx_type=1)),
    (
        ROUTING,
        "unproduced_output",
        change(expert_tokens_num_flag=0),
        change(outputs=ROUTING.outputs[:2], expert_tokens_num_flag=0),
    ),
    (
        ROUTING,
        "unproduced_output",
        change(outputs=(*ROUTING.outputs, "expanded_scale")),
        change(outputs=(*ROUTING.outputs, "expanded_scale"), quant_mode=1),
    ),
    (ROUTING, "missing", change(expert_num=None), change()),
    (ROUTING, "input_type", change(renamed(expert_idx=(I64, (32, 8)))), change()),
    (ROUTING_950, "type", change(renamed(x=(F32, (32, 7168))), quant_mode=2), change(quant_mode=2)),
    (ROUTING_950, "scale", change(renamed(scale=(F32, (32,))), quant_mode=2), change(renamed(scale=(F32, (32,))))),
    (ROUTING, "offset", change({**STATIC, "offset": None}, quant_mode=0), change(STATIC, quant_mode=0)),
    (ROUTING, "active_expert_range", change(active_expert_range=[3]), change(active_expert_range=[3, 3])),
]
