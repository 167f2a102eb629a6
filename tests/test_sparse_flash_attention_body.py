"""SparseFlashAttention's body as a program: when it loops, how much memory it takes, which keys it reads."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ascend_onnx

Array = np.ndarray[Any, np.dtype[Any]]

WIDTH, ROPE, HEADS, KEYS, SELECTED = 512, 64, 4, 1024, 512
FEW, MANY = 32, 256
"""Query tokens: as many as are served without a loop, and eight times as many."""

INPUTS = (
    "query",
    "key",
    "value",
    "sparse_indices",
    "block_table",
    "actual_seq_lengths_query",
    "actual_seq_lengths_kv",
    "query_rope",
    "key_rope",
)


def attention_model(inputs: Mapping[str, Array], dims: tuple[Any, ...], **attributes: Any) -> onnx.ModelProto:
    """One node in BSND with its body; `dims` are (B, S1) as the model states them, for query tokens only."""
    per_token = ("query", "sparse_indices", "query_rope")
    declared = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            (*dims, *array.shape[2:]) if name in per_token else array.shape,
        )
        for name, array in inputs.items()
    ]
    listed = [name if name in inputs else "" for name in INPUTS]
    node = helper.make_node(
        "SparseFlashAttention", listed, ["attention_out"], domain="ai.ascend", scale_value=0.05, **attributes
    )
    query = inputs["query"]
    output = helper.make_tensor_value_info("attention_out", TensorProto.FLOAT, (*dims, *query.shape[2:]))
    model = helper.make_model(
        helper.make_graph([node], "attention", declared, [output]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.ascend", 1)],
        ir_version=10,
    )
    return ascend_onnx.attach_functions(model)


def attention_inputs(batch: int, tokens: int) -> dict[str, Array]:
    """`tokens` query tokens in each of `batch` batches, each of which selects 512 of 1,024 keys."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    lists = np.stack([random.permutation(KEYS)[:SELECTED] for _ in range(batch * tokens)])
    return {
        "query": normal(batch, tokens, HEADS, WIDTH),
        "key": normal(batch, KEYS, 1, WIDTH),
        "value": normal(batch, KEYS, 1, WIDTH),
        "sparse_indices": lists.reshape(batch, tokens, 1, SELECTED).astype(np.int32),
        "query_rope": normal(batch, tokens, HEADS, ROPE),
        "key_rope": normal(batch, KEYS, 1, ROPE),
    }


def run(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Array:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, dict(inputs))
    return result


def operators(nodes: Any) -> list[str]:
    """The operator types of nodes and of those in their subgraphs."""
    found = []
    for node in nodes:
        found.append(node.op_type)
        for attribute in node.attribute:
            found += operators(attribute.g.node)
    return found


@pytest.mark.parametrize(
    ("dims", "loops"),
    [
        ((1, 1), False),
        ((1, 32), False),
        ((4, 8), False),
        ((1, 33), True),
        ((3, 11), True),
        ((1, "tokens"), True),
        (("batch", 1), True),
    ],
)
def test_few_tokens_need_no_loop(dims: tuple[Any, ...], loops: bool) -> None:
    sizes = tuple(dim if isinstance(dim, int) else 2 for dim in dims)
    inputs = attention_inputs(*sizes)
    (body,) = attention_model(inputs, dims, sparse_mode=0).functions
    assert ("Loop" in operators(body.node)) == loops


def test_loop_and_no_loop_agree() -> None:
    inputs = attention_inputs(2, 13)
    at_once = run(attention_model(inputs, (2, 13), sparse_mode=0), inputs)
    in_chunks = run(attention_model(inputs, ("batch", "tokens"), sparse_mode=0), inputs)
    np.testing.assert_allclose(in_chunks, at_once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dims", [(1, MANY), ("batch", "tokens")])
def test_no_tensor_holds_the_keys_of_all_tokens(dims: tuple[Any, ...]) -> None:
    """What the body computes outside the loop is no larger than inputs and output."""
    inputs = attention_inputs(1, MANY)
    (body,) = attention_model(inputs, dims, sparse_mode=0).functions
    outside = {name for node in body.node for name in node.output}
    (loop,) = [node for node in body.node if node.op_type == "Loop"]
    (chunk,) = [attribute.g for attribute in loop.attribute]
    assert [node.op_type for node in body.node if node.op_type in ("Gather", "MatMul")] == []
    assert operators(chunk.node).count("MatMul") == 3
    assert not outside & {name for node in chunk.node for name in node.output}


def test_memory_does_not_grow_with_query_tokens() -> None:
    few, many = peak_of_subprocess(FEW), peak_of_subprocess(MANY)
    gathered_keys = MANY * SELECTED * WIDTH * 4
    assert 0.2 * few < gathered_keys, "the bound would hold for a body that gathers the keys of all tokens at once"
    assert many < 1.2 * few


@pytest.mark.parametrize("paged", [False, True])
def test_keys_that_are_not_selected_are_not_read(paged: bool) -> None:
    """Cache rows beyond the length are not written yet and may hold anything, in the first row as elsewhere."""
    inputs = attention_inputs(2, 2)
    selected = np.array([3, 5, 2000, 7, -1, 0, 1, 2], np.int32)
    inputs["sparse_indices"] = np.broadcast_to(selected, (2, 2, 1, 8)).copy()
    inputs["actual_seq_lengths_kv"] = np.array([6, 0], np.int32)
    attributes: dict[str, Any] = {"sparse_mode": 0}
    if paged:
        attributes["layout_kv"] = "PA_BSND"
        inputs["block_table"] = np.array([[1], [-1]], np.int32)
    expected = run(attention_model(inputs, (2, 2), **attributes), inputs)
    for name in ("key", "value", "key_rope"):
        rows = inputs[name].reshape(2, KEYS, -1)
        kept = rows[1 if paged else 0, [3, 5]].copy()
        rows[:] = np.nan
        rows[1 if paged else 0, [3, 5]] = kept
    result = run(attention_model(inputs, (2, 2), **attributes), inputs)
    np.testing.assert_array_equal(result, expected)
    assert np.all(result[1] == 0)
    assert np.all(result[0] != 0)


def peak_of_subprocess(tokens: int) -> int:
    """The largest resident size in bytes of a process that runs the body on `tokens` query tokens."""
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, __file__, str(tokens)], env=environment, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def peak_of_this_process() -> int:
    """Largest resident size so far in bytes. Where Linux tells it, that of this program: ru_maxrss has the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    tokens = int(sys.argv[1])
    inputs = attention_inputs(1, tokens)
    run(attention_model(inputs, ("batch", "tokens"), sparse_mode=0), inputs)
    print(peak_of_this_process())


if __name__ == "__main__":
    main()
