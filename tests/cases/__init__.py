"""Case tables: one module an operator, each with the calls that its oracle defines."""

from . import (
    mla_preprocess,
    mla_prolog_v2_weight_nz,
    moe_init_routing_v3,
    ring_attention_update_v2,
    sparse_flash_attention,
)
from .case import Case

__all__ = ["ALL_CASES", "case_called"]

ALL_CASES: list[Case] = [
    case
    for table in (
        mla_prolog_v2_weight_nz,
        sparse_flash_attention,
        moe_init_routing_v3,
        ring_attention_update_v2,
        mla_preprocess,
    )
    for case in table.CASES
]


def case_called(name: str) -> Case:
    """The case whose `str` is `name`: its operator, a hyphen and its own name."""
    return {str(case): case for case in ALL_CASES}[name]
