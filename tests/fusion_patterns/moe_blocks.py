"""Small mixtures of experts in the spellings of exporters, and whether they compute the same after fusing.

4 experts, 2 choices per token, hidden size 6, expert width 3, unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from ascend_onnx.compare import compare_outputs
from ascend_onnx.session import CpuSession
from fusion_patterns import Report, fuse
from tests.fusion_patterns.graphs import Array, graph

MOE = "MoeInitRoutingV3"
EXPERTS, CHOICES, HIDDEN, WIDTH = 4, 2, 6, 3


def swap(body: str, *changes: tuple[str, str]) -> str:
    """The body with some of its text replaced."""
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    return body


def weights(seed: int = 0, kind: type = np.float32) -> dict[str, Array]:
    """Every weight that a body may read: stacked as (E, n, k) or (E, k, n), and one by one as (k, n)."""
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return generator.standard_normal(shape).astype(kind)

    gate, up, down = draw(EXPERTS, HIDDEN, WIDTH), draw(EXPERTS, HIDDEN, WIDTH), draw(EXPERTS, WIDTH, HIDDEN)
    gate_up = np.concatenate([gate, up], -1)
    found = {
        "router": draw(HIDDEN, EXPERTS),
        "gate_up_kn": gate_up,
        "down_kn": down,
        "gate_up": np.ascontiguousarray(gate_up.transpose(0, 2, 1)),
        "down": np.ascontiguousarray(down.transpose(0, 2, 1)),
        "gate_stack": np.ascontiguousarray(gate.transpose(0, 2, 1)),
        "up_stack": np.ascontiguousarray(up.transpose(0, 2, 1)),
        "gate_up_bias": draw(EXPERTS, 2 * WIDTH),
        "down_bias": draw(EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        found |= {f"g{expert}": gate[expert], f"u{expert}": up[expert], f"d{expert}": down[expert]}
        found |= {f"db{expert}": found["down_bias"][expert]}
        found |= {f"gt{expert}": np.ascontiguousarray(gate[expert].T)}
    return found


CONSTANTS: dict[str, Any] = {
    "minus": [-1],
    "zero": [0],
    "one": [1],
    "two": [2],
    "three": [3],
    "six": [6],
    "middle": [1],
    "zero_scalar": 0,
    "one_scalar": 1,
    "two_scalar": 2,
    "three_scalar": 3,
    "spread": [1, CHOICES, 1],
    "flat_rows": [-1, HIDDEN],
    "choices": [-1, CHOICES, HIDDEN],
    "nothing": 0.0,
}

ROUTER = (
    "logits = MatMul(x, router) scores = Softmax<axis=-1>(logits)"
    " chosen, ids = TopK<axis=-1, largest=1, sorted=1>(scores, two)"
)


def block(body: str, outputs: str = "y", x: str = "float[N,6]", opset: int = 20, **values: Any) -> ir.Model:
    """A graph of a body, with the weights and constants that it reads."""
    known = {"x": x, **CONSTANTS, **weights(), **values}
    words = set(body.replace(",", " ").replace("(", " ").replace(")", " ").split())
    return graph(body, outputs, opset, **{name: v for name, v in known.items() if name in words})


def tokens(count: int = 9, seed: int = 0, kind: type = np.float32) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(kind)}


def fused(make: Callable[[], ir.Model], *feeds: dict[str, Array], **options: Any) -> tuple[ir.Model, Report]:
    """Fuse without validation; whatever fused, every output is what it was for all `feeds`."""
    original, model = make(), make()
    report = fuse(model, validate="none", **options)
    before, after = CpuSession(original), CpuSession(model)
    for given in feeds:
        off = [f"{c.name}: {c.reason}" for c in compare_outputs(before.run(given), after.run(given)) if not c.within]
        assert not off, f"fused {report.counts}, but {'; '.join(off)}"
    return model, report


def domain_node(model: ir.Model) -> ir.Node:
    """The only node of the operators' domain."""
    (node,) = [node for node in model.graph if node.domain == "ai.ascend"]
    return node


def codes(report: Report) -> list[str]:
    return [missed.code for missed in report.missed]
