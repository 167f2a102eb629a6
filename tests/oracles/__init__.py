"""Plain numpy oracles, written from the operator specification and from nothing in the package under test."""

from .mla_preprocess import mla_preprocess
from .mla_prolog_v2_weight_nz import mla_prolog_v2_weight_nz
from .moe_init_routing_v3 import moe_init_routing_v3
from .result import Array, Expected
from .ring_attention_update_v2 import ring_attention_update_v2
from .sparse_flash_attention import sparse_flash_attention

__all__ = ["ORACLES", "Array", "Expected"]

ORACLES = {
    "MlaPreprocess": mla_preprocess,
    "MlaPrologV2WeightNz": mla_prolog_v2_weight_nz,
    "MoeInitRoutingV3": moe_init_routing_v3,
    "RingAttentionUpdateV2": ring_attention_update_v2,
    "SparseFlashAttention": sparse_flash_attention,
}
"""Operator type -> oracle: (inputs by name, attributes) -> expected outputs by name."""
