"""One decoding step of the two-layer DeepSeek-V3 graph with 4,096 cached tokens, before and after fusing.

Batch 1, ONNX Runtime defaults with 2 threads, median of 15 consecutive runs after a warm-up, both models in the same
process. The floor is what the step costs at least on this machine: every weight that it uses and the caches read once,
and the new caches written once, at the speed at which a matrix-vector product reads; or its multiplications at the
speed of a large matrix product, whichever takes longer.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

import fusion_patterns
from ascend_onnx.demo import decode_feeds, median_seconds, write_graph
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load

THREADS = 2
CACHED_TOKENS = 4096
ROUNDS = 15
LAYERS, HEADS, LATENT, ROPE = 2, 4, 512, 64
EXPERTS, ACTIVE_EXPERTS = 8, 2
FLOAT_BYTES = 4
SMALLEST_SPEED_UP = 15


def session(model: Path | ir.Model) -> CpuSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return CpuSession(model, options)


def weights_used(path: Path) -> int:
    """Elements of the weights that one decoding step multiplies with: all matrices, and of the experts the active."""
    used = 0
    for value in ir.load(path).graph.initializers.values():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        shape = value.const_value.shape.numpy()
        looked_up = all(node.op_type == "Gather" for node in value.consumers())  # the embeddings: one row is read
        if not looked_up:
            used += math.prod(shape) * ACTIVE_EXPERTS // EXPERTS if len(shape) == 3 else math.prod(shape)
    return used


def product_seconds(rows: int, inner: int, columns: int) -> float:
    """How long ONNX Runtime takes for one matrix product of this size."""
    sides = {"a": (rows, inner), "b": (inner, columns)}
    values = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in sides.items()
    ]
    node = ir.node("MatMul", values)
    node.outputs[0].name, node.outputs[0].dtype = "product", ir.DataType.FLOAT
    node.outputs[0].shape = ir.Shape((rows, columns))
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 20}, name="product")
    feeds = {name: np.ones(shape, np.float32) for name, shape in sides.items()}
    return median_seconds(session(ir.Model(graph, ir_version=10)), feeds, ROUNDS)


def floor_seconds(path: Path) -> tuple[float, str]:
    """The least time that a step can take here, and how it comes about."""
    weights = weights_used(path)
    attention = LAYERS * CACHED_TOKENS * HEADS * (LATENT + ROPE + LATENT)
    operations = 2 * (weights + attention)
    caches = LAYERS * CACHED_TOKENS * (LATENT + ROPE)
    moved = FLOAT_BYTES * (weights + 2 * caches)
    reading = FLOAT_BYTES * 4096 * 16384 / product_seconds(1, 4096, 16384)
    rate = 2 * 1024**3 / product_seconds(1024, 1024, 1024)
    seconds = max(moved / reading, operations / rate)
    how = (
        f"{moved / 1e6:.0f} MB at {reading / 1e9:.1f} GB/s = {moved / reading * 1e3:.1f} ms, "
        f"{operations / 1e9:.2f} GFLOP at {rate / 1e9:.0f} GFLOP/s = {operations / rate * 1e3:.1f} ms"
    )
    return seconds, how


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_graph(Path(folder))
        fused = load(path)
        fusion_patterns.fuse(fused, validate="none")
        before, after = session(path), session(fused)
        feeds = decode_feeds(path, CACHED_TOKENS)
        slow, fast = (median_seconds(one, feeds, ROUNDS) for one in (before, after))
        least, how = floor_seconds(path)
    print(f"decode, {CACHED_TOKENS:,} cached tokens: unfused {slow * 1e3:.1f} ms, fused {fast * 1e3:.1f} ms")
    print(f"fused is {slow / fast:.1f} times as fast (at least {SMALLEST_SPEED_UP})")
    print(f"floor {least * 1e3:.1f} ms ({how}); fused takes {fast / least:.1f} times that")


if __name__ == "__main__":
    main()
