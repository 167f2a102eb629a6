"""The smallest call of an operator, for tests that care about how it is launched and not about what it computes."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from tests.oracles import Array

from .acl import Acl
from .launches import Launch, Output, first_phase

__all__ = ["ATTENTION", "FLOAT", "OUTPUTS", "merge", "merge_inputs"]

FLOAT = np.dtype(np.float32)
ATTENTION, STATISTIC = (2, 1, 64), (1, 1, 2, 8)
OUTPUTS: dict[str, Output] = {
    "attn_out": (ATTENTION, FLOAT),
    "softmax_max": (STATISTIC, FLOAT),
    "softmax_sum": (STATISTIC, FLOAT),
}


def merge_inputs() -> dict[str, Array]:
    """Two attentions of weight one half each, 1 and 3: their merge is 2."""
    statistics = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")
    inputs: dict[str, Array] = {name: np.ones(STATISTIC, FLOAT) for name in statistics}
    return {**inputs, "prev_attn_out": np.full(ATTENTION, 1, FLOAT), "cur_attn_out": np.full(ATTENTION, 3, FLOAT)}


def merge(acl: Acl, stack: ExitStack) -> Launch:
    """The first phase of the merge."""
    return first_phase(acl, stack, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
