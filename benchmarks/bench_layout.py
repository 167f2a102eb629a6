"""Packing a weight into FRACTAL_NZ storage and back, against a numpy copy of the same matrix.

A 7168 x 1536 matrix of bfloat16, the size of DeepSeek-V3's query down-projection. The three take turns in one process,
so that noise meets them alike; median of 25 rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

from ascend_onnx.layout import nd_to_nz, nz_to_nd

ROWS, COLUMNS = 7168, 1536
ROUNDS = 25
SMALLEST_RATIO = 0.5


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    matrix = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32).astype(ml_dtypes.bfloat16)
    packed = nd_to_nz(matrix)
    assert np.array_equal(nz_to_nd(packed).view(np.uint16), matrix.view(np.uint16))
    works: dict[str, Callable[[], object]] = {
        "copy": matrix.copy,
        "pack": lambda: nd_to_nz(matrix),
        "unpack": lambda: nz_to_nd(packed),
    }
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(ROUNDS)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in works}
    for name, median in medians.items():
        print(f"{name:6} {median * 1e3:6.2f} ms, {matrix.nbytes / median / 1e9:5.1f} GB/s")
    print(f"packing runs at {medians['copy'] / medians['pack']:.2f} of the speed of a copy (at least {SMALLEST_RATIO})")


if __name__ == "__main__":
    main()
