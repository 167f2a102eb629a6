"""Tables of limits: one module an operator, each rule with a call that breaks it and one that just meets it."""

from . import (
    mla_preprocess,
    mla_prolog_v2_weight_nz,
    moe_init_routing_v3,
    ring_attention_update_v2,
    sparse_flash_attention,
)
from .node import Change, Node, Rule

__all__ = ["RELAXED", "RULES"]

RULES: list[Rule] = [
    rule
    for table in (
        mla_prolog_v2_weight_nz,
        sparse_flash_attention,
        moe_init_routing_v3,
        ring_attention_update_v2,
        mla_preprocess,
    )
    for rule in table.RULES
]
RELAXED: list[tuple[Node, str, Change, Change]] = [
    relaxed
    for table in (mla_prolog_v2_weight_nz, sparse_flash_attention, ring_attention_update_v2, mla_preprocess)
    for relaxed in table.RELAXED
]
"""Node, bound, what passes once the bound is lifted, what does not even then."""
