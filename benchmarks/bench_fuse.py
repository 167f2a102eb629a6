"""How long fusing takes, against loading the same graph, and how it grows with the graph.

`fusion_patterns.fuse(model, validate="none")`, the attaching of function bodies included, against `onnx_ir.load`;
median of 5. The garbage collector is off during both: it doubles the time of loading, but only for large graphs, and so
would flatter the ratio.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

import fusion_patterns
from benchmarks.deepseek_v3_graph import build

T = TypeVar("T")

LAYERS = (15, 61)
ROUNDS = 5
LARGEST_RATIO = 4.0
LARGEST_GROWTH = 1.5


def measured(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `work` took, and its result."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    gc.enable()
    return seconds, result


def load_and_fuse(path: Path) -> tuple[float, float, str]:
    """Seconds for loading and for fusing the model at `path`, and what it was and became; the model is gone again."""
    load, model = measured(lambda: ir.load(path))
    fuse, report = measured(lambda: fusion_patterns.fuse(model, validate="none"))
    counts = ", ".join(f"{number} {operator}" for operator, number in report.counts.items())
    return load, fuse, f"{report.nodes_before:,} nodes, {counts}"


def ratio(rounds: Sequence[tuple[float, float, str]]) -> float:
    """Print the medians of the rounds with one model and return how many times longer fusing takes than loading."""
    load = statistics.median(seconds for seconds, _, _ in rounds)
    fuse = statistics.median(seconds for _, seconds, _ in rounds)
    print(f"{rounds[0][2]}: load {load * 1e3:.0f} ms, fuse {fuse * 1e3:.0f} ms, ratio {fuse / load:.2f}")
    return fuse / load


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [build(layers, Path(folder)) for layers in LAYERS]
        rounds = [[load_and_fuse(path) for path in paths] for _ in range(ROUNDS)]  # in turn: noise meets both alike
    small, large = (ratio(of_one_model) for of_one_model in zip(*rounds, strict=True))
    print(f"ratio at full size: {large:.2f} (at most {LARGEST_RATIO})")
    print(f"ratio at full size over ratio at a quarter: {large / small:.2f} (at most {LARGEST_GROWTH} either way)")


if __name__ == "__main__":
    main()
