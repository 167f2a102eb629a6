"""Case tables: one module an operator, each with the calls that its oracle defines."""

from . import (
    mla_preprocess,
    mla_prolog_v2_weight_nz,
    moe_init_routing_v3,
    ring_attention_update_v2,
    sparse_flash_attention,
)
from .case import Case

__all__ = ["ALL_CASES", "QUANTISED", "QUANTISED_CASES", "RUNNABLE_CASES", "case_called"]

QUANTISED = True
"""Whether the package under test has the quantised forms; their cases run only then, their oracles always."""

UNQUANTISED_CASES: list[Case] = [
    *mla_prolog_v2_weight_nz.CASES,
    *sparse_flash_attention.CASES,
    *moe_init_routing_v3.CASES,
    *ring_attention_update_v2.CASES,
    *mla_preprocess.CASES,
]
QUANTISED_CASES: list[Case] = [
    *mla_prolog_v2_weight_nz.QUANTISED_CASES,
    *moe_init_routing_v3.QUANTISED_CASES,
    *mla_preprocess.QUANTISED_CASES,
]
ALL_CASES = UNQUANTISED_CASES + QUANTISED_CASES
RUNNABLE_CASES = ALL_CASES if QUANTISED else UNQUANTISED_CASES


def case_called(name: str) -> Case:
    """The case whose `str` is `name`: its operator, a hyphen and its own name."""
    return {str(case): case for case in ALL_CASES}[name]
