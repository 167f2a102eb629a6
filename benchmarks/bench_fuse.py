"""How long fusing takes, against loading the same graph, and how it grows with the graph.

`fusion_patterns.fuse(model, validate="none")`, the attaching of function bodies included, against `onnx_ir.load`;
median of 5. The garbage collector is off during both: it doubles the time of loading, but only for large graphs, and so
would flatter the ratio. Memory is the peak of a process of its own that loads, and of one that loads and fuses, each
less what the imports alone need.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

import fusion_patterns
from benchmarks.deepseek_v3_graph import build
from benchmarks.memory import own_peak, peak_of

T = TypeVar("T")

LAYERS = (15, 61, 293)
"""Layers of the graphs, which have about 2,500, 10,000 and 50,000 nodes."""
ROUNDS = 5
LARGEST_RATIO = 2.0
LARGEST_GROWTH = 1.5
LARGEST_MEMORY = 3.0


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


def carry_out(path: Path | None, fuse: bool) -> None:
    """Load, and perhaps fuse, the model at `path`, if any, and print the most bytes this process ever held."""
    model = ir.load(path) if path is not None else None
    if model is not None and fuse:
        fusion_patterns.fuse(model, validate="none")
    print(own_peak())


def memory(path: Path) -> float:
    """Print and return the memory of loading and fusing the model at `path` against that of loading it."""
    tasks = ("imports",), ("load", str(path)), ("fuse", str(path))
    imports, load, fuse = (peak_of("benchmarks.bench_fuse", *task) for task in tasks)
    own, needed = load - imports, fuse - imports
    print(f"peak memory: graph {own / 1e6:.0f} MB, fusing included {needed / 1e6:.0f} MB, ratio {needed / own:.2f}")
    return needed / own


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [build(layers, Path(folder)) for layers in LAYERS]
        rounds = [[load_and_fuse(path) for path in paths] for _ in range(ROUNDS)]  # in turn: noise meets all alike
        peaks = [memory(path) for path in paths[1:]]
    small, *large = (ratio(of_one_model) for of_one_model in zip(*rounds, strict=True))
    print(f"largest ratio of the two large graphs: {max(large):.2f} (at most {LARGEST_RATIO})")
    print(
        f"ratio at 10,000 nodes over ratio at a quarter: {large[0] / small:.2f} (at most {LARGEST_GROWTH} either way)"
    )
    print(f"largest memory: {max(peaks):.2f} (at most {LARGEST_MEMORY})")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        carry_out(Path(sys.argv[2]) if len(sys.argv) > 2 else None, fuse=sys.argv[1] == "fuse")
    else:
        main()
