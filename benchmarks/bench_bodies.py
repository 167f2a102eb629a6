"""Function bodies against the same maths as a flat graph in an exporter's spelling, and against numpy.

Each graph of `models/` that an operator replaces as a whole runs unfused, fused with its function body, both on the CPU
provider of ONNX Runtime with 2 threads, and fused with the operator's numpy implementation in onnx's reference
evaluator. Flat graph and body take turns in batches of consecutive runs (the threads of a session spin for a while
after a run and would disturb the other one), so that noise meets them alike; medians. A body may be 10 % slower.

`python -m benchmarks.bench_bodies [FOLDER] [NAME ...]` takes the graphs from another folder, or only those whose names
begin so. Graphs that are not there are named and left out.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

import fusion_patterns
from ascend_onnx.feeds import make_feeds
from ascend_onnx.functions import strip_functions
from ascend_onnx.reference import reference_ops
from ascend_onnx.seeded_weights import fill
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load, save

MODELS = Path(__file__).resolve().parent.parent / "models"
THREADS = 2
LARGEST_RATIO = 1.10
SECONDS = 1.5
"""How long flat graph and body take turns."""
BATCHES = 5
SMALLEST_BATCH, LARGEST_BATCH = 3, 100

Sizes = Mapping[str, int]


def _latent_cache(tokens: int) -> Sizes:
    return {"s77": 1, "s27": tokens, "s35": tokens, "s23": 64, "s78": 128, "s24": 64, "s64": 128}


def _gathered(tokens: int) -> Sizes:
    return {"s46": 1, "s34": tokens, "s91": 1, "s55": 1, "s44": 2048, "s24": 2048, "s57": 256}


def _masked(tokens: int) -> Sizes:
    return {"s46": 1, "s34": tokens, "s95": 1, "s75": tokens, "s24": 2048, "s57": 256}


GRAPHS: Mapping[str, Sequence[Sizes]] = {
    # The symbolic dimensions of each graph, small and large; none where the exporter fixed them.
    "refmla_proj_only_pair_F_op18_opt": [_latent_cache(tokens) for tokens in (1, 32, 256)],
    "refmla_proj_only_oldhf_manual_op18_opt": [_latent_cache(tokens) for tokens in (1, 32, 256)],
    "w8a8_explicit_int_op18_opt": [{"s13": tokens, "s23": 1024, "s20": 1024} for tokens in (1, 32)],
    "w8a8_explicit_float_op18_opt": [{"s13": tokens, "s23": 1024, "s20": 1024} for tokens in (1, 32)],
    "sfa_gather_op18_opt": [_gathered(tokens) for tokens in (1, 32, 128)],
    "sfa_valid_op18_opt": [_gathered(tokens) for tokens in (1, 32)],
    "sfa_mask_op18_opt": [_masked(tokens) for tokens in (1, 32)],
    "sfa_gather_op17_ts": [{}],
    "perm_full_ns_op18_opt": [{"s77": tokens, "s95": tokens} for tokens in (1, 64, 4096)],
    "perm_scatter_op18_opt": [{"s77": tokens, "s95": tokens} for tokens in (1, 64, 4096)],
    "perm_eqsum_op17_ts": [{}],
    "ring_sbh_op18_opt": [{"s31": 8}, {"s31": 4096}],
    "ring_tnd_op18_opt": [{"s54": 8}, {"s54": 8192}],
    "ring_tnd_bcast_op18_opt": [{"s54": 8}, {"s54": 8192}],
    "ring_doc_op18_opt": [{"s54": 8}, {"s54": 8192}],
    "ring_sbh_op17_ts": [{}],
}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def session(path: Path) -> CpuSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return CpuSession(path, options)


def numpy_evaluator(path: Path) -> ReferenceEvaluator:
    return ReferenceEvaluator(strip_functions(onnx.load(path)), new_ops=reference_ops())


def measure(flat: CpuSession, body: CpuSession, feeds: Mapping[str, npt.NDArray[np.generic]]) -> tuple[float, float]:
    """Median seconds of a run of each."""
    once = seconds(lambda: (flat.run(feeds), body.run(feeds)))
    batch = min(max(int(SECONDS / BATCHES / once), SMALLEST_BATCH), LARGEST_BATCH)
    times: dict[CpuSession, list[float]] = {flat: [], body: []}
    for _ in range(BATCHES):
        for one, measured in times.items():
            one.run(feeds)
            measured += [seconds(partial(one.run, feeds)) for _ in range(batch)]
    return statistics.median(times[flat]), statistics.median(times[body])


def bench(graph: Path, sizes: Sequence[Sizes]) -> list[float]:
    """Print a line for each of the sizes and return how much longer the body takes than the flat graph."""
    fused, model = graph.with_suffix(".fused.onnx"), load(graph)
    report = fusion_patterns.fuse(model, validate="none")
    if not report.counts:
        print(f"{graph.stem}: nothing was fused")
        return []
    save(model, fused, source=graph)
    flat, body, evaluator = session(graph), session(fused), numpy_evaluator(fused)
    ratios = []
    for one in sizes:
        feeds = make_feeds(load(graph), one)
        before, after = measure(flat, body, feeds)
        in_numpy = seconds(partial(evaluator.run, None, dict(feeds)))
        ratios.append(after / before)
        dims = " ".join(f"{name}={size}" for name, size in one.items() if size > 1)
        print(
            f"{graph.stem:38} flat {before * 1e3:8.3f} ms  body {after * 1e3:8.3f} ms  {ratios[-1]:5.2f} times"
            f"  numpy {in_numpy * 1e3:8.1f} ms  {dims}",
            flush=True,
        )
    return ratios


def main(folder: Path, prefixes: tuple[str, ...]) -> None:
    ratios = []
    with tempfile.TemporaryDirectory() as work:
        for name, sizes in GRAPHS.items():
            if not name.startswith(prefixes):
                continue
            source, graph = folder / f"{name}.onnx", Path(work) / f"{name}.onnx"
            if not source.exists():
                print(f"{name}: not in {folder}")
                continue
            shutil.copyfile(source, graph)
            fill(graph)
            ratios += bench(graph, sizes)
    print(f"the slowest body takes {max(ratios):.2f} times as long as its flat graph (at most {LARGEST_RATIO})")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    has_folder = bool(arguments) and Path(arguments[0]).is_dir()
    main(Path(arguments[0]) if has_folder else MODELS, tuple(arguments[has_folder:]) or ("",))
