"""How one candidate was looked at: every building block that was asked for, with the value and the answer."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ascend_onnx.errors import InputError
from ascend_onnx.storage import load
from fusion_patterns.engine import Refused, label
from fusion_patterns.fuse import FUSIONS, default_assumptions
from fusion_patterns.graph import Facts
from fusion_patterns.miss import Miss
from fusion_patterns.shapes import complete_shapes, has_shapes

__all__ = ["Explanation", "Step", "explain"]


@dataclass(frozen=True)
class Step:
    """A building block looked for at a value: what was found, or what was expected and what was there instead."""

    block: str
    value: str
    found: bool
    detail: str


@dataclass(frozen=True)
class Explanation:
    """What one fusion made of one anchor: the steps in the order they were finished, and the outcome."""

    fusion: str
    anchor: str
    fuses: bool
    outcome: str
    steps: tuple[Step, ...]


_FACTS = {"plain", "constant", "symbolic", "shape", "range"}
"""What is remembered of values without being a building block."""


def explain(model: str | Path | onnx.ModelProto | ir.Model, node: str) -> list[Explanation]:
    """What every fusion that starts at this node's operator makes of it; nothing is changed.

    `node` is the name of a node, or of one of its outputs. A node that no fusion starts at gives an empty list.

    Raises `InputError` when the model has no such node.
    """
    loaded = load(model)
    if loaded is model and not has_shapes(loaded):
        loaded = loaded.clone()
    anchor = next((n for n in loaded.graph.all_nodes() if node in (n.name, *(o.name for o in n.outputs))), None)
    if anchor is None:
        raise InputError(f"the model has no node, and no value computed by one, called {node!r}")
    shapes = complete_shapes(loaded)
    found = []
    for fusion in FUSIONS:
        if anchor.op_type not in fusion.anchors:
            continue
        facts = Facts(shapes, default_assumptions())
        outcomes = list(fusion.match(anchor, facts))
        steps = tuple(_step(kind, value, answer) for kind, value, answer in facts.trace() if kind not in _FACTS)
        for outcome in outcomes:
            missed = isinstance(outcome, Refused)
            name = outcome.fusion
            text = outcome.miss.message if isinstance(outcome, Refused) else _operators(outcome.calls)
            found.append(Explanation(name, label(anchor), not missed, text, steps))
    return found


def _operators(calls: Any) -> str:
    return "fuses into " + " and ".join(call.operator.name for call in calls)


def _step(kind: Any, value: ir.Value, answer: Any) -> Step:
    if isinstance(answer, Miss):
        return Step(str(kind), value.name or "", False, f"expected {answer.expected}, found {answer.got}")
    if answer is None:
        return Step(str(kind), value.name or "", False, "not found")
    return Step(str(kind), value.name or "", True, _summary(answer))


def _summary(answer: Any) -> str:
    """The fields of a description in one line; values by name."""
    if not is_dataclass(answer):
        return _text(answer)
    return ", ".join(f"{entry.name}={_text(getattr(answer, entry.name))}" for entry in fields(answer))


def _text(entry: Any) -> str:
    if isinstance(entry, ir.Value):
        return entry.name or "?"
    if isinstance(entry, ir.Node):
        return label(entry)
    if isinstance(entry, ir.SymbolicDim):
        return str(entry.value)
    if isinstance(entry, tuple | list):
        return "(" + ", ".join(_text(part) for part in entry) + ")"
    if is_dataclass(entry):
        return f"{type(entry).__name__}(..)"
    return str(getattr(entry, "value", entry))
