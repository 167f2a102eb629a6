"""One run of a model on a device with drawn or given inputs, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_onnx.feeds import choose_dimensions, make_feeds
from ascend_onnx.inference import Device, create_session
from ascend_onnx.input_rules import infer_rules
from ascend_onnx.placement import Placement
from ascend_onnx.storage import load

__all__ = ["RunReport", "run"]


@dataclass(frozen=True)
class RunReport:
    """What a run did: sizes of the symbolic dimensions, where the nodes ran, the outputs, the seconds it took."""

    device: Device
    dims: Mapping[str, int]
    placement: tuple[Placement, ...]
    outputs: Mapping[str, np.ndarray]
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types, of outputs their type, shape and range."""
        on_npu = [entry for entry in self.placement if entry.device == "npu"]
        declined = [entry for entry in self.placement if entry.reason]
        return {
            "device": self.device,
            "dims": dict(self.dims),
            "on_npu": [{"node": entry.node, "operator": entry.operator} for entry in on_npu],
            "declined": [{"node": e.node, "operator": e.operator, "reason": e.reason} for e in declined],
            "other_nodes": len(self.placement) - len(on_npu) - len(declined),
            "outputs": [_summary(name, array) for name, array in self.outputs.items()],
            "seconds": dict(self.seconds),
        }


def run(
    model: Path,
    device: Device,
    *,
    dims: Mapping[str, int] | None = None,
    rules: Mapping[str, str] | None = None,
    seed: int = 0,
    require_npu: bool = False,
) -> RunReport:
    """Loads a model on a device and runs it twice with drawn inputs; the second time is the one that is measured.

    Raises:
        InputError: the model, a dimension or a rule cannot be used, or the device is not there or fails.
    """
    loaded = load(model)
    every_rule = {**infer_rules(loaded), **(rules or {})}
    sizes = choose_dimensions(loaded, dims, sets=1, rules=every_rule)[0]
    feeds = make_feeds(loaded, sizes, every_rule, seed=seed)
    started = time.perf_counter()
    session = create_session(model, device, require_npu=require_npu)
    created = time.perf_counter()
    session.run(None, feeds)
    warm = time.perf_counter()
    results = session.run(None, feeds)
    seconds = {"create": created - started, "first_run": warm - created, "run": time.perf_counter() - warm}
    outputs = dict(zip(session.outputs, results, strict=True))
    return RunReport(device, sizes, tuple(session.placement()), outputs, seconds)


def _summary(name: str, array: np.ndarray) -> dict[str, Any]:
    values = array.astype(np.float64) if array.size and array.dtype != np.bool_ else np.zeros(0)
    finite = values[np.isfinite(values)]
    return {
        "name": name,
        "type": str(array.dtype),
        "shape": list(array.shape),
        "smallest": float(finite.min()) if finite.size else None,
        "largest": float(finite.max()) if finite.size else None,
        "not_finite": int(values.size - finite.size),
    }
