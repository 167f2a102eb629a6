"""Proof by running: a matched subgraph and its replacement, cut out of the model, on the same random inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ascend_onnx.errors import InputError
from ascend_onnx.functions import attach_functions
from ascend_onnx.verify import verify
from fusion_patterns.engine import Match, between
from fusion_patterns.miss import CODES, Miss, miss

__all__ = ["cut_out", "sample", "validate"]

_Refuse = Callable[[ir.Model, Match], Miss | None]


def sample(matches: Sequence[Match]) -> list[Match]:
    """The first match of each class: the same operators in the same configuration on the same shapes."""
    seen: set[object] = set()
    chosen = []
    for match in matches:
        kinds = tuple(
            (
                call.operator.name,
                call.operator.overload(call),
                tuple((n, t.dtype, t.shape) for n, t in call.inputs.items()),
            )
            for call in match.calls
        )
        if kinds not in seen:
            seen.add(kinds)
            chosen.append(match)
    return chosen


def validate(
    model: ir.Model,
    match: Match,
    fuse_cut: Callable[[ir.Model], int],
    shapes: Mapping[ir.Value, ir.Shape],
    seed: int = 0,
) -> float | Miss:
    """The largest relative error between a match and its replacement, or the Miss that a larger one makes of it.

    `fuse_cut` fuses a model in place and returns how many matches it replaced: the cut runs through the same code as
    the whole model. Both are compared as `ascend_onnx.verify` compares whole models. `shapes` say more than the values
    do themselves.
    """
    known = {**shapes, **match.shapes}
    original, fused = cut_out(model, match, known), cut_out(model, match, known)
    if fuse_cut(fused) != 1:
        return miss("validation-error", match.anchor, "the cut-out subgraph to fuse alone", "it did not")
    try:
        rules = _given_rules(match)
        attach_functions(fused)
        for draw in range(match.draws):
            verification = verify(original, fused, rules=rules, dims=match.sizes, seed=seed + draw, sets=1)
            if verification.equal:
                break
    except InputError as error:
        return replace(miss("validation-error", match.anchor, "both forms to run", "an error"), message=str(error))
    if not verification.equal:
        reason = f"{CODES['validation-failed']} {verification.reason}"
        return replace(miss("validation-failed", match.anchor, "equal results", verification.reason), message=reason)
    errors = [output.max_rel for run in verification.runs for output in run.outputs if output.max_rel is not None]
    if not errors:
        return miss("validation-error", match.anchor, "results that are finite numbers", "none, which proves nothing")
    return max(errors)


def _given_rules(match: Match) -> dict[str, str]:
    return {value.name: rule for value, rule in match.boundary.items() if rule is not None and value.name}


def cut_out(model: ir.Model, match: Match, shapes: Mapping[ir.Value, ir.Shape]) -> ir.Model:
    """The subgraph of a match as a model of its own: boundary values are inputs, results read elsewhere outputs.

    A value that the subgraph only asks the shape of is an input as well. Weights are shared with the model, not copied.
    """
    nodes = between(match)
    members = set(nodes)
    inside = {output for node in nodes for output in node.outputs}
    mapping: dict[ir.Value, ir.Value] = {}
    inputs: list[ir.Value] = []
    initializers: list[ir.Value] = []
    for node in nodes:
        for value in node.inputs:
            if value is None or value in mapping or (value in inside and value not in match.boundary):
                continue
            mapping[value] = _copy(value, shapes)
            if value.is_initializer() and not value.is_graph_input():
                mapping[value].const_value = value.const_value
                initializers.append(mapping[value])
            else:
                inputs.append(mapping[value])
    copies = [_copy_node(node, mapping, shapes) for node in nodes]
    graph = ir.Graph(
        inputs,
        [mapping[value] for value in match.results if _is_read_outside(value, members)],
        nodes=copies,
        initializers=initializers,
        opset_imports=dict(model.graph.opset_imports),
        name=f"cut_{match.fusion}",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _is_read_outside(value: ir.Value, members: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in members for use in value.uses())


def _copy(value: ir.Value, shapes: Mapping[ir.Value, ir.Shape]) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=shapes.get(value, value.shape))


def _copy_node(node: ir.Node, mapping: dict[ir.Value, ir.Value], shapes: Mapping[ir.Value, ir.Shape]) -> ir.Node:
    outputs = [_copy(output, shapes) for output in node.outputs]
    mapping.update(zip(node.outputs, outputs, strict=True))
    return ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else mapping[value] for value in node.inputs],
        node.attributes.values(),
        overload=node.overload,
        outputs=outputs,
        name=node.name,
        version=node.version,
    )
