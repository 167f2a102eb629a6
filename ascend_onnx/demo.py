"""The main job on a real graph: fuse two layers of DeepSeek-V3 with random weights, prove the result equal, time it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from ascend_onnx.feeds import make_feeds
from ascend_onnx.seeded_weights import fill
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load, save
from ascend_onnx.verify import Verification, verify

__all__ = ["Demonstration", "Timing", "decode_feeds", "median_seconds", "run", "write_graph"]

GRAPH = "lm_deepseek_v3_hf_decode.onnx"
BATCH, PAST = "s44", "s36"
"""What the exporter called the batch size and the number of cached tokens."""
CACHED_TOKENS = 1024
ROUNDS = 5

Feeds = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one decoding step of batch 1, on the CPU provider of ONNX Runtime."""

    cached_tokens: int
    before: float
    after: float


@dataclass(frozen=True)
class Demonstration:
    """What the demonstration showed: the fusion report as JSON data, the comparison, and the times."""

    report: Mapping[str, Any]
    verification: Verification
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        return {
            "report": dict(self.report),
            "verification": self.verification.to_json(),
            "timing": asdict(self.timing),
        }


def run(fuse: Callable[[ir.Model], Mapping[str, Any]]) -> Demonstration:
    """Fuse the graph that comes with the package, in a temporary folder, with `fuse`, which returns its report."""
    with tempfile.TemporaryDirectory(prefix="ascend-onnx-demo-") as folder:
        original, fused = write_graph(Path(folder)), Path(folder) / "fused.onnx"
        model = load(original)
        report = fuse(model)
        save(model, fused, source=original)
        verification = verify(original, fused)
        feeds = decode_feeds(original, CACHED_TOKENS)
        before, after = (median_seconds(CpuSession(path), feeds, ROUNDS) for path in (original, fused))
    return Demonstration(report, verification, Timing(CACHED_TOKENS, before, after))


def write_graph(folder: Path) -> Path:
    """Write the two-layer decode graph and its seeded weights into `folder`; returns the model's path."""
    path = folder / GRAPH
    path.write_bytes((resources.files("ascend_onnx") / "data" / GRAPH).read_bytes())
    fill(path)
    return path


def decode_feeds(model: str | Path, cached_tokens: int) -> Feeds:
    """Inputs of one decoding step of batch 1 for the graph that `write_graph` writes."""
    return make_feeds(load(model), {BATCH: 1, PAST: cached_tokens})


def median_seconds(session: CpuSession, feeds: Feeds, rounds: int) -> float:
    """The median time of `rounds` consecutive runs, after one that does not count."""
    session.run(feeds)
    return statistics.median(_seconds(session, feeds) for _ in range(rounds))


def _seconds(session: CpuSession, feeds: Feeds) -> float:
    started = time.perf_counter()
    session.run(feeds)
    return time.perf_counter() - started
