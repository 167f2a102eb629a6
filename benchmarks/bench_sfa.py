"""SparseFlashAttention's function body against the exported gather spelling of the same attention.

Both compute what `models/sfa_gather_op18_opt.onnx` computes: 4 heads, latent 512 + rope 64, every query token attends
to 256 selected of 2,048 cached tokens. ONNX Runtime defaults with 2 threads, median of 5 after a warm-up. Memory is the
peak of a process of its own for each number of query tokens, the runtime included.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ascend_onnx.demo import median_seconds
from ascend_onnx.functions import attach_functions
from ascend_onnx.operators import OPERATORS
from ascend_onnx.session import CpuSession
from benchmarks.memory import own_peak, peak_of

GATHER = Path(__file__).resolve().parent.parent / "models" / "sfa_gather_op18_opt.onnx"
THREADS = 2
ROUNDS = 5
HEADS, LATENT, ROPE = 4, 512, 64
CACHED, SELECTED = 2048, 256
SCALE = float(np.float32((128 + 64) ** -0.5))
QUERY_TOKENS = (1, 8, 64)
FEWER, MORE = 32, 256
"""Query tokens whose peak memory is compared."""


def fused_model() -> ir.Model:
    """The attention as one SparseFlashAttention node with its body, with the inputs of the gather spelling."""
    shapes = {
        "q": ("batch", "tokens", HEADS, LATENT),
        "qr": ("batch", "tokens", HEADS, ROPE),
        "kv": ("batch", "cached", LATENT),
        "kr": ("batch", "cached", ROPE),
        "idx": ("batch", "tokens", "selected"),
    }
    types = dict.fromkeys(shapes, ir.DataType.FLOAT) | {"idx": ir.DataType.INT64}
    values = {
        name: ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(types[name]))
        for name, shape in shapes.items()
    }
    axis = ir.Value(name="axis", const_value=ir.tensor([2], name="axis"))
    one_head = {name: ir.node("Unsqueeze", [values[name], axis]) for name in ("kv", "kr", "idx")}
    indices = ir.node("Cast", one_head["idx"].outputs, {"to": ir.DataType.INT32})
    nodes = [*one_head.values(), indices]
    for node, shape, dtype in (
        (one_head["kv"], ("batch", "cached", 1, LATENT), ir.DataType.FLOAT),
        (one_head["kr"], ("batch", "cached", 1, ROPE), ir.DataType.FLOAT),
        (one_head["idx"], ("batch", "tokens", 1, "selected"), ir.DataType.INT64),
        (indices, ("batch", "tokens", 1, "selected"), ir.DataType.INT32),
    ):
        node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(shape), dtype
    key = one_head["kv"].outputs[0]
    attention = OPERATORS["SparseFlashAttention"].node(
        {
            "query": values["q"],
            "key": key,
            "value": key,
            "sparse_indices": indices.outputs[0],
            "query_rope": values["qr"],
            "key_rope": one_head["kr"].outputs[0],
        },
        ["attention_out"],
        {"scale_value": SCALE, "sparse_mode": 0},
    )
    graph = ir.Graph(
        list(values.values()),
        attention.outputs,
        nodes=[*nodes, attention],
        initializers=[axis],
        opset_imports={"": 18, "ai.ascend": 1},
        name="sparse_flash_attention",
    )
    return attach_functions(ir.Model(graph, ir_version=10))


def feeds(tokens: int) -> dict[str, npt.NDArray[np.generic]]:
    """Random queries and caches of batch 1, and distinct selected positions for each query token."""
    generator = np.random.default_rng(0)
    shapes = {
        "q": (1, tokens, HEADS, LATENT),
        "qr": (1, tokens, HEADS, ROPE),
        "kv": (1, CACHED, LATENT),
        "kr": (1, CACHED, ROPE),
    }
    drawn = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return drawn | {"idx": np.stack([generator.permutation(CACHED)[:SELECTED] for _ in range(tokens)])[None]}


def session(model: Path | ir.Model) -> CpuSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return CpuSession(model, options)


def print_peak(model: Path, tokens: int) -> None:
    """Run the model once with so many query tokens and print the peak memory of this process."""
    session(model).run(feeds(tokens))
    print(own_peak())


def main() -> None:
    gather, body = session(GATHER), session(fused_model())
    for tokens in QUERY_TOKENS:
        inputs = feeds(tokens)
        (expected,), (got,) = gather.run(inputs).values(), body.run(inputs).values()
        before, after = (median_seconds(one, inputs, ROUNDS) for one in (gather, body))
        error = np.abs(expected - got).max() / np.abs(expected).max()
        print(
            f"{tokens:4} query tokens: gather {before * 1e3:8.1f} ms, body {after * 1e3:8.1f} ms, "
            f"{before / after:.2f} times as fast, relative difference {error:.1e}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "body.onnx"
        ir.save(fused_model(), path)
        for name, model in (("gather", GATHER), ("body", path)):
            fewer, more = (peak_of("benchmarks.bench_sfa", str(model), str(tokens)) / 1e6 for tokens in (FEWER, MORE))
            print(
                f"peak memory, {name}: {fewer:.0f} MB with {FEWER} query tokens, {more:.0f} MB with {MORE}, "
                f"{more / fewer:.2f} times as much"
            )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print_peak(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
