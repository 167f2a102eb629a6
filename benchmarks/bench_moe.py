"""A mixture of experts whose export gathers a weight matrix per assignment, before and after fusing.

64 experts, 8 chosen per token, 128 tokens, hidden size 1,024, expert width 512, float32, spelled as transformers'
"batched_mm" experts are exported. ONNX Runtime defaults with 2 threads, median of 5 after a warm-up, both models in the
same process.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

import fusion_patterns
from ascend_onnx.compare import compare_outputs
from ascend_onnx.demo import median_seconds
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load

EXPERTS, CHOICES, TOKENS = 64, 8, 128
HIDDEN, WIDTH = 1024, 512
THREADS, ROUNDS = 2, 5
SMALLEST_SPEED_UP = 5

BATCHED = f"""
<ir_version: 10, opset_import: ["" : 18]>
moe (float[tokens, {HIDDEN}] x) => (float[tokens, {HIDDEN}] y)
<float[{HIDDEN}, {EXPERTS}] router, float[{EXPERTS}, {2 * WIDTH}, {HIDDEN}] gate_up,
 float[{EXPERTS}, {HIDDEN}, {WIDTH}] down, int64[1] k = {{{CHOICES}}}, int64[1] last = {{-1}}, int64[1] one = {{1}},
 int64[3] spread = {{1, {CHOICES}, 1}}, int64[2] rows = {{-1, {HIDDEN}}},
 int64[3] choices = {{-1, {CHOICES}, {HIDDEN}}}>
{{
    logits = MatMul(x, router)
    scores = Softmax<axis = -1>(logits)
    chosen, ids = TopK<axis = -1, largest = 1, sorted = 1>(scores, k)
    total = ReduceSum<keepdims = 1>(chosen, last)
    weights = Div(chosen, total)
    middle = Unsqueeze(x, one)
    expanded = Expand(middle, spread)
    repeated = Reshape(expanded, rows)
    flat = Reshape(ids, last)
    places = Unsqueeze(flat, last)
    first = GatherND(gate_up, places)
    column = Unsqueeze(repeated, last)
    product = MatMul(first, column)
    both = Squeeze(product, last)
    gate, up = Split<axis = 1, num_outputs = 2>(both)
    sigmoid = Sigmoid(gate)
    silu = Mul(gate, sigmoid)
    activated = Mul(silu, up)
    second = GatherND(down, places)
    activated_column = Unsqueeze(activated, last)
    result = MatMul(second, activated_column)
    results = Squeeze(result, last)
    flat_weights = Reshape(weights, last)
    weight_column = Unsqueeze(flat_weights, last)
    weighted = Mul(results, weight_column)
    per_choice = Reshape(weighted, choices)
    y = ReduceSum<keepdims = 0>(per_choice, one)
}}
"""


def batched_model(seed: int = 0) -> ir.Model:
    """The block with random weights."""
    generator = np.random.default_rng(seed)
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(BATCHED), data_prop=True)
    model = ir.from_proto(proto)
    for name, shape in (
        ("router", (HIDDEN, EXPERTS)),
        ("gate_up", (EXPERTS, 2 * WIDTH, HIDDEN)),
        ("down", (EXPERTS, HIDDEN, WIDTH)),
    ):
        values = generator.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        model.graph.initializers.add(_weight(model, name, values))
    return model


def _weight(model: ir.Model, name: str, values: np.ndarray) -> ir.Value:
    value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
    value.const_value = ir.tensor(values, name=name)
    return value


def session(model: ir.Model) -> CpuSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return CpuSession(model, options)


def main() -> None:
    original, fused = batched_model(), batched_model()
    fusion_patterns.fuse(load(fused), validate="none")
    before, after = session(original), session(fused)
    feeds = {"x": np.random.default_rng(1).standard_normal((TOKENS, HIDDEN), dtype=np.float32)}
    (comparison,) = compare_outputs(before.run(feeds), after.run(feeds))
    slow, fast = (median_seconds(one, feeds, ROUNDS) for one in (before, after))
    gathered = TOKENS * CHOICES * 3 * WIDTH * HIDDEN * 4
    print(
        f"{EXPERTS} experts, top {CHOICES}, {TOKENS} tokens: gathers {gathered / 1e9:.1f} GB of weights per run unfused"
    )
    print(f"unfused {slow * 1e3:.1f} ms, fused {fast * 1e3:.1f} ms, largest relative error {comparison.max_rel:.1e}")
    print(f"fused is {slow / fast:.1f} times as fast (at least {SMALLEST_SPEED_UP})")


if __name__ == "__main__":
    main()
