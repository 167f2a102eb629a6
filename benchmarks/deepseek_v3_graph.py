"""A DeepSeek-V3-shaped decode graph of any depth, in the spelling of the transformers 5.23 exporter.

The two layers of the exported two-layer graph (a dense one, and a MoE one with 8 grouped experts) are repeated in
turn. Each copy has its own nodes, values, caches and weight tensors; the weight tensors of all copies point at the same
bytes, so that a deep graph needs no more disk than the exported one. What a layer does not compute from its hidden
state or its weights (mask, cos and sin, empty buffers) all layers share, as they do in a real export.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import onnx

from ascend_onnx.demo import write_graph

__all__ = ["build"]

BORDERS = ("embedding", "add_498", "add_1135")
"""The hidden states before, between and behind the two layers of the exported graph."""


@dataclass(frozen=True)
class Layer:
    """One layer of the exported graph."""

    index: int
    hidden_in: str
    hidden_out: str
    nodes: tuple[onnx.NodeProto, ...]


def build(layers: int, folder: Path) -> Path:
    """Write a graph of `layers` layers, and the weights that it refers to, into `folder`; returns the model's path."""
    exported = onnx.load(write_graph(folder), load_external_data=False)
    originals = [_layer(exported.graph, index, *border) for index, border in enumerate(pairwise(BORDERS))]
    in_layers = {node.output[0] for layer in originals for node in layer.nodes}
    tail = _downstream(exported.graph, {BORDERS[-1]})
    others = [node for node in exported.graph.node if node.output[0] not in in_layers]

    deep = onnx.ModelProto()
    deep.CopyFrom(exported)
    graph = deep.graph
    for repeated in (graph.node, graph.input, graph.output, graph.initializer, graph.value_info):
        del repeated[:]
    graph.input.extend(value for value in exported.graph.input if _cache_layer(value.name) is None)
    graph.output.extend(value for value in exported.graph.output if _cache_layer(value.name) is None)
    head = [node for node in others if node.output[0] not in tail]
    _append(graph, exported.graph, head, {})
    hidden = BORDERS[0]
    for index in range(layers):
        original = originals[index % len(originals)]
        names = _names_in_copy(exported.graph, original, index) | {original.hidden_in: hidden}
        _append(graph, exported.graph, original.nodes, names)
        hidden = names[original.hidden_out]
    _append(graph, exported.graph, [node for node in others if node.output[0] in tail], {BORDERS[-1]: hidden})

    path = folder / f"deepseek_v3_{layers}_layers.onnx"
    path.write_bytes(deep.SerializeToString())
    return path


def _layer(graph: onnx.GraphProto, index: int, hidden_in: str, hidden_out: str) -> Layer:
    """The nodes between two hidden states that depend on the first one or on a weight."""
    caches = {value.name for value in graph.output if _cache_layer(value.name) == index}
    wanted = _upstream(graph, {hidden_out} | caches, stop=hidden_in)
    weights = {tensor.name for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    own = wanted & _downstream(graph, weights | {hidden_in})
    return Layer(index, hidden_in, hidden_out, tuple(node for node in graph.node if node.output[0] in own))


def _names_in_copy(graph: onnx.GraphProto, layer: Layer, index: int) -> dict[str, str]:
    """New names for everything that layer number `index` has for itself: values, weights and caches."""
    weights = {tensor.name for tensor in graph.initializer if _is_weight(tensor)}
    names = {}
    for node in layer.nodes:
        for name in [*node.output, *(name for name in node.input if name in weights)]:
            names[name] = f"layers.{index}.{name}"
    for value in [*graph.input, *graph.output]:
        if _cache_layer(value.name) == layer.index:
            names[value.name] = value.name.replace(f".layers.{layer.index}.", f".layers.{index}.")
    return names


def _append(
    graph: onnx.GraphProto, exported: onnx.GraphProto, nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]
) -> None:
    """Append renamed copies of `nodes` with the initializers, inputs, outputs and value descriptions they need."""
    present = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    initializers = {tensor.name: tensor for tensor in exported.initializer}
    inputs = {value.name: value for value in exported.input}
    outputs = {value.name: value for value in exported.output if _cache_layer(value.name) is not None}
    described = {value.name: value for value in exported.value_info}
    for node in nodes:
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = names.get(node.output[0], node.output[0])
        copy.input[:] = [names.get(name, name) for name in node.input]
        copy.output[:] = [names.get(name, name) for name in node.output]
        for old, new in zip([*node.input, *node.output], [*copy.input, *copy.output], strict=True):
            if old in initializers and new not in present:
                graph.initializer.add().CopyFrom(initializers[old])
                graph.initializer[-1].name = new
            elif old in inputs and new not in present:
                _add_value(graph.input, inputs[old], new)
            present.add(new)
        for old, new in zip(node.output, copy.output, strict=True):
            if old in outputs:
                _add_value(graph.output, outputs[old], new)
            elif old in described:
                _add_value(graph.value_info, described[old], new)


def _add_value(values: Iterable[onnx.ValueInfoProto], value: onnx.ValueInfoProto, name: str) -> None:
    copy = values.add()  # type: ignore[attr-defined]
    copy.CopyFrom(value)
    copy.name = name


def _is_weight(tensor: onnx.TensorProto) -> bool:
    """External matrices, and the float vectors of norms and router biases."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL or (
        tensor.data_type == onnx.TensorProto.FLOAT and list(tensor.dims) not in ([], [1])
    )


def _cache_layer(name: str) -> int | None:
    """The layer that a cache input or output belongs to, None for any other name."""
    _, found, rest = name.partition("past_key_values.layers.")
    return int(rest.partition(".")[0]) if found else None


def _downstream(graph: onnx.GraphProto, values: set[str]) -> set[str]:
    """First outputs of the nodes that depend on one of `values`; nodes stand in topological order."""
    reached = set(values)
    found = set()
    for node in graph.node:
        if reached.intersection(node.input):
            reached.update(node.output)
            found.add(node.output[0])
    return found


def _upstream(graph: onnx.GraphProto, values: set[str], stop: str) -> set[str]:
    """First outputs of the nodes that one of `values` depends on, without looking behind `stop`."""
    wanted = set(values)
    found = set()
    for node in reversed(graph.node):
        if stop not in node.output and wanted.intersection(node.output):
            wanted.update(node.input)
            found.add(node.output[0])
    return found
