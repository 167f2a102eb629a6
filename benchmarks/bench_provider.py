"""What the provider costs on the host, on an emulated device whose kernels do nothing.

- One more claimed node: a chain of nodes against one node, beside the same two-phase call made from C++ directly.
  Bound: at most 5 microseconds more per node.
- Device memory asked for in steady state. Bound: none.
- A run with caches in place, small and 64 times as large. Bound: the same time.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import ascend_onnx
import runtime_ep

NODES, REPEATS, RUNS = 101, 200, 3
BOUND_MICROSECONDS = 5.0
PAGES, PAGES_LARGE = 8, 512
ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "runtime_ep" / "native"
DIRECT = ROOT / "benchmarks" / "direct_launch.cpp"
RING = {"attn_out": (2, 1, 64), "softmax_max": (1, 1, 2, 8), "softmax_sum": (1, 1, 2, 8)}


def best(action: Callable[[], None]) -> float:
    """Microseconds of one call, the least of many short means: others may be using the machine."""
    action()
    action()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(RUNS):
            action()
        seconds.append((time.perf_counter() - started) / RUNS)
    return min(seconds) * 1e6


def direct_launch() -> float:
    """Microseconds of the two-phase call in C++."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "direct_launch"
        sources = [str(source) for source in (DIRECT, *NATIVE.glob("cann/*.cpp"))]
        subprocess.run(["g++", "-O2", "-std=c++20", f"-I{NATIVE}", *sources, "-o", str(program), "-ldl"], check=True)
        arguments = [str(program), runtime_ep.get_emulator_path(), str(NODES), str(REPEATS * RUNS)]
        return float(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def ring_chain(length: int) -> onnx.ModelProto:
    """`length` RingAttentionUpdateV2 nodes one behind the other."""
    nodes = []
    state = [f"prev_{name}" for name in RING]
    for index in range(length):
        outputs = [name if index == length - 1 else f"{name}_{index}" for name in RING]
        inputs = [*state, *(f"cur_{name}" for name in RING)]
        nodes.append(helper.make_node("RingAttentionUpdateV2", inputs, outputs, domain="ai.ascend"))
        state = outputs

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(
            name, TensorProto.FLOAT, RING[name.removeprefix("prev_").removeprefix("cur_")]
        )

    feeds = [info(f"{when}_{name}") for when in ("prev", "cur") for name in RING]
    return _model(nodes, feeds, [info(name) for name in RING])


def prolog(pages: int) -> onnx.ModelProto:
    """One MlaPrologV2WeightNz node whose caches have `pages` pages of 128 slots."""
    operator = ascend_onnx.OPERATORS["MlaPrologV2WeightNz"]
    shapes = {
        "token_x": (1, 1024),
        "weight_dq": (1024, 1536),
        "weight_uq_qr": (1536, 192),
        "weight_uk": (1, 128, 512),
        "weight_dkv_kr": (1024, 576),
        "rmsnorm_gamma_cq": (1536,),
        "rmsnorm_gamma_ckv": (512,),
        "rope_sin": (1, 64),
        "rope_cos": (1, 64),
        "cache_index": (1,),
        "kv_cache": (pages, 128, 1, 512),
        "kr_cache": (pages, 128, 1, 64),
    }
    inputs, weights = [], []
    for name, shape in shapes.items():
        dtype = TensorProto.INT64 if name == "cache_index" else TensorProto.BFLOAT16
        if name.startswith(("weight", "rmsnorm")):
            zeros = np.zeros(shape, ml_dtypes.bfloat16)
            weights.append(helper.make_tensor(name, dtype, shape, zeros.tobytes(), raw=True))
        else:
            inputs.append(helper.make_tensor_value_info(name, dtype, shape))
    outputs = [declared.name for declared in operator.outputs if not declared.optional]
    node = helper.make_node(operator.name, list(shapes), outputs, domain="ai.ascend")
    results = [
        helper.make_tensor_value_info(name, TensorProto.BFLOAT16, shape)
        for name, shape in zip(outputs, ((1, 1, 512), (1, 1, 64), shapes["kv_cache"], shapes["kr_cache"]), strict=True)
    ]
    return _model([node], inputs, results, weights)


def _model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: list[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "benchmark", inputs, outputs, weights)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.ascend", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    ascend_onnx.attach_functions(model)
    return model


class Bound:
    """A session with every input and output bound to a value on the device; caches to one value for both."""

    def __init__(self, model: onnx.ModelProto, device: onnxruntime.OrtEpDevice) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_provider_for_devices([device], runtime_ep.make_provider_options(require_npu=True))
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
        self.binding = self.session.io_binding()
        values: dict[str, onnxruntime.OrtValue] = {}
        for kind, entries in (("input", self.session.get_inputs()), ("output", self.session.get_outputs())):
            for entry in entries:
                value = values.get(entry.name.removesuffix("_out")) if kind == "output" else None
                if value is None or "cache" not in entry.name:
                    dtype = {"float": 1, "bfloat16": 16, "int64": 7}[entry.type[7:-1]]
                    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(entry.shape, dtype, "npu", 0, 0x19E5)
                values[entry.name] = value
                getattr(self.binding, f"bind_ortvalue_{kind}")(entry.name, value)

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)


def main() -> None:
    os.environ["ASCEND_EMULATOR_NOOP"] = "1"
    (device,) = runtime_ep.register("emulator")
    emulator = ctypes.CDLL(runtime_ep.get_emulator_path())
    emulator.ascend_emulator_calls.restype = ctypes.c_uint64

    one, chain = Bound(ring_chain(1), device), Bound(ring_chain(NODES), device)
    single, whole = best(one.run), best(chain.run)
    emulator.ascend_emulator_reset_faults()
    chain.run()
    allocations = emulator.ascend_emulator_calls(b"aclrtMalloc")
    node, direct = (whole - single) / (NODES - 1), direct_launch()
    print(f"run with one claimed node          {single:8.1f} us")
    print(f"one more claimed node              {node:8.2f} us")
    print(f"the same call from C++             {direct:8.2f} us")
    print(f"the provider's part                {node - direct:8.2f} us (bound {BOUND_MICROSECONDS:.1f})")
    print(f"device allocations in a run        {allocations:8d}    (bound 0)")
    small, large = (best(Bound(prolog(pages), device).run) for pages in (PAGES, PAGES_LARGE))
    print(f"caches in place, {PAGES:3d} pages         {small:8.1f} us")
    print(f"caches in place, {PAGES_LARGE:3d} pages         {large:8.1f} us")
    del one, chain
    if node - direct > BOUND_MICROSECONDS or allocations:
        raise SystemExit("a bound is not kept")


if __name__ == "__main__":
    main()
