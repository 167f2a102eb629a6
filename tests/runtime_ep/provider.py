"""The provider on the emulator that it shares with the test: its faults, its counts and its ledger.

with provider("a3") as emulator:
    session = npu_session(model)
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import ascend_onnx
import runtime_ep
from tests.operators.harness import DOMAIN, SIGNATURES
from tests.oracles import Array

from .controls import Controls, environment

__all__ = ["Emulator", "is_built", "npu_session", "provider", "ring_chain", "ring_feeds"]


class Emulator(Controls):
    """The controls of the emulator that the provider uses in this process."""

    def __init__(self) -> None:
        super().__init__(ctypes.CDLL(runtime_ep.get_emulator_path()))


def is_built() -> bool:
    try:
        runtime_ep.get_library_path(), runtime_ep.get_emulator_path()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def provider(product: str = "a2", *, device_only: bool = False, **settings: str) -> Iterator[Emulator]:
    """The provider, registered on an emulated device of `product`; at the end nothing may be alive on it.

    `settings` are the emulator's: DELAY_US="100" sets ASCEND_EMULATOR_DELAY_US.
    """
    variables = {f"ASCEND_EMULATOR_{name}": value for name, value in {"PRODUCT": product, **settings}.items()}
    emulator = Emulator()
    emulator.library.aclFinalize()  # so that the settings are read again
    with environment(variables):
        assert runtime_ep.register("emulator", device_only=device_only)
    emulator.reset_faults()
    try:
        yield emulator
    finally:
        emulator.reset_faults()
        gc.collect()
        alive = emulator.ledger()
        runtime_ep.unregister()
    assert alive == {}


def npu_session(model: onnx.ModelProto, *, require_npu: bool = False) -> onnxruntime.InferenceSession:
    """ONNX Runtime's own session with the provider, bodies attached, that records where nodes run."""
    with_bodies = onnx.ModelProto()
    with_bodies.CopyFrom(model)
    ascend_onnx.attach_functions(with_bodies)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == runtime_ep.get_ep_name()]
    options.add_provider_for_devices(devices[:1], runtime_ep.make_provider_options(require_npu=require_npu))
    return onnxruntime.InferenceSession(with_bodies.SerializeToString(), options, enable_fallback=0)


SHAPES = {"attn_out": (2, 1, 64), "softmax_max": (1, 1, 2, 8), "softmax_sum": (1, 1, 2, 8)}
"""Of RingAttentionUpdateV2 in the layout SBH: the smallest operator there is."""


def ring_chain(
    length: int, *, between: str | None = None, constants: Mapping[str, Array] | None = None
) -> onnx.ModelProto:
    """`length` RingAttentionUpdateV2 nodes one behind the other; `between` is a CPU operator in front of the first.

    Inputs prev_* and cur_*, each node merging the same cur_* once more; those in `constants` are initializers.
    """
    constants = constants or {}
    results = list(SHAPES)
    feeds = [f"{when}_{name}" for when in ("prev", "cur") for name in results]
    nodes: list[onnx.NodeProto] = []
    state = [f"prev_{name}" for name in results]
    if between:
        nodes.append(helper.make_node(between, [state[0]], ["on_cpu"], name="on_cpu"))
        state[0] = "on_cpu"
    for index in range(length):
        last = index == length - 1
        outputs = results if last else [f"{name}_{index}" for name in results]
        inputs = [*state, *(f"cur_{name}" for name in results)]
        nodes.append(helper.make_node("RingAttentionUpdateV2", inputs, outputs, name=f"merge_{index}", domain=DOMAIN))
        state = list(outputs)
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, SHAPES[name.partition("_")[2]])
        for name in feeds
        if name not in constants
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, SHAPES[name]) for name in results]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "merges", values, ends, initializers)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    assert len(SIGNATURES["RingAttentionUpdateV2"][1]) == len(results)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def ring_feeds(seed: int = 0) -> dict[str, Array]:
    """Arrays for `ring_chain`, eight equal lanes in the statistics."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for when in ("prev", "cur"):
        feeds[f"{when}_attn_out"] = rng.standard_normal(SHAPES["attn_out"], np.float32)
        for name in ("softmax_max", "softmax_sum"):
            row = np.abs(rng.standard_normal((*SHAPES[name][:-1], 1), np.float32)) + 0.5
            feeds[f"{when}_{name}"] = np.repeat(row, 8, axis=-1)
    return feeds
