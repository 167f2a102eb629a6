"""Which node of a model runs where, and why not on the NPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import onnxruntime

from ascend_onnx.operator import DOMAIN

__all__ = ["Decline", "Placement", "note_decline", "noted_declines", "placements"]


@dataclass(frozen=True)
class Placement:
    """Where one node runs: `device` is "cpu" or "npu". `reason` says why a node of the domain is not on the NPU."""

    node: str
    operator: str
    device: str
    reason: str = ""


@dataclass(frozen=True)
class Decline:
    """A node that a provider does not take, and why."""

    node: str
    operator: str
    reason: str


_noted: ContextVar[dict[Decline, None] | None] = ContextVar("noted_declines", default=None)


@contextmanager
def noted_declines() -> Iterator[dict[Decline, None]]:
    """Collects what `note_decline` is told inside the block; a provider is asked about a node more than once."""
    declines: dict[Decline, None] = {}
    token = _noted.set(declines)
    try:
        yield declines
    finally:
        _noted.reset(token)


def note_decline(node: str, operator: str, reason: str) -> None:
    """For a provider: says why it does not take a node, while a session is being made."""
    declines = _noted.get()
    if declines is not None:
        declines[Decline(node, operator, reason)] = None


def placements(
    session: onnxruntime.InferenceSession, provider: str, names: set[str], declines: Sequence[Decline]
) -> list[Placement]:
    """The nodes on the NPU, the nodes of the domain that were declined, and the model's other nodes, in this order.

    `names` are the names of the model's nodes: the runtime also lists what it made out of function bodies, which is
    left out. The session must record its assignment.
    """
    on_npu: list[Placement] = []
    on_cpu: list[Placement] = []
    for group in session.get_provider_graph_assignment_info():
        for node in group.get_nodes():
            if group.ep_name == provider:
                on_npu.append(Placement(node.name, node.op_type, "npu"))
            elif node.name in names and node.domain != DOMAIN:
                on_cpu.append(Placement(node.name, node.op_type, "cpu"))
    taken = Counter((placement.node, placement.operator) for placement in on_npu)
    declined = [
        Placement(decline.node, decline.operator, "cpu", decline.reason)
        for decline in declines
        if not taken[decline.node, decline.operator]
    ]
    return on_npu + declined + on_cpu
