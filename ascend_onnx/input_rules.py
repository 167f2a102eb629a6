"""Guessing from the graph how an input has to be drawn: what is an index of what, a position, a mask.

input_ids     -> Gather(embedding, .)                          ids below the vocabulary's size
position_ids  -> Cast -> Mul -> Cos                            a range after the past
slot          -> Unsqueeze -> ScatterND(cache, ., rows)        slots of the cache without repetition
mask          -> Add(scores, .) -> Softmax                     causal
"""

from __future__ import annotations

__all__ = ["fed_inputs", "infer_rules", "selected_tokens"]

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from ascend_onnx.tensors import proto_without_data

_SAME_VALUES = {
    "Cast",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
    "Identity",
    "Expand",
    "Flatten",
    "Transpose",
    "Tile",
    "Slice",
}
"""Operators whose output holds values of their first input, and no others."""

_TO_ANGLES = _SAME_VALUES | {"Mul", "Div", "Add", "MatMul", "Einsum", "Concat"}
_TO_SCORES = _SAME_VALUES | {"Mul", "Div", "Add", "Where", "Sub", "Clip", "Max", "Min", "Concat"}
_UNKNOWN_COUNT = 8  # how many different values are drawn where values are only sorted and compared
_HIDING = -1e3  # constants at or below this hide a score in a softmax
_SMALL_BYTES = 1024


@dataclass(frozen=True)
class _Reach:
    """A use of an input's values: `node.inputs[index]` holds them. `inverted`: an odd number of Not on the way.

    `component` is the place of the values along the last axis of an index tuple, None where they are not in one.
    """

    node: ir.Node
    index: int
    component: int | None
    inverted: bool


def fed_inputs(model: ir.Model) -> list[ir.Value]:
    """The inputs that a run must feed: those without a default value."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def infer_rules(model: ir.Model) -> dict[str, str]:
    """A rule for each input, in the language of `ascend_onnx.feeds`.

    Integers that index an axis are drawn below its size; cache slots and selections without repetition; position-like
    integers are a range after the past; token masks are ones; attention masks are causal; floats are normal.
    """
    shaped = _with_shapes(model)
    past = _past(shaped)
    rules: dict[str, str] = {}
    for value in fed_inputs(shaped):
        if value.dtype is None:
            continue
        if value.dtype.is_integer():
            rules[value.name or ""] = _integer_rule(value, past)
        elif value.dtype == ir.DataType.BOOL:
            rules[value.name or ""] = _boolean_rule(value)
        else:
            rules[value.name or ""] = "causal" if _is_additive_mask(value) else "normal"
    return rules


def selected_tokens(model: ir.Model) -> list[tuple[str, int]]:
    """Each selection of tokens in the model: (number of tokens to select from, as an expression; number selected).

    A selection is a TopK over a symbolic axis whose k is a constant, or the lesser of a constant and something.
    """
    found: dict[tuple[str, int], None] = {}
    for node in _with_shapes(model).graph.all_nodes():
        if node.op_type != "TopK" or node.domain not in ("", "ai.onnx"):
            continue
        data, count = node.inputs[0], node.inputs[1]
        size = None if data is None else _dim(data, node.attributes.get_int("axis", -1))
        bound = _upper_bound(count)
        if isinstance(size, str) and bound is not None:
            found[size, bound] = None
    return list(found)


# ------------------------------------------------------------------------------------------------------------ integers


def _integer_rule(value: ir.Value, past: str) -> str:
    reaches = list(_reaches(value))
    if any(_is_position(reach) for reach in reaches):
        return f"arange:{past}"
    for kind in (_slot_rule, _selection_rule, _id_rule):
        rules = [rule for reach in reaches if (rule := kind(reach, value)) is not None]
        if rules:
            return min(rules, key=_tightness)
    if any(reach.node.op_type == "TopK" and reach.index == 0 for reach in reaches):
        return f"ids:{_UNKNOWN_COUNT}"
    if value.dtype in (ir.DataType.INT8, ir.DataType.UINT8):
        return "ids:100"
    return "ones"  # token masks, and integers that no use of them bounds


def _tightness(rule: str) -> tuple[bool, int]:
    """Numbers before expressions, lower ones first."""
    bound = rule.partition(":")[2]
    return (not bound.isdigit(), int(bound) if bound.isdigit() else 0)


def _is_position(reach: _Reach) -> bool:
    node = reach.node
    if node.op_type == "Gather" and reach.index == 1:
        return _is_angle_table(node)
    if node.op_type in ("Mul", "MatMul", "Einsum", "Div"):
        return _leads_to(node.outputs[0], {"Cos", "Sin"}, _TO_ANGLES, hops=8)
    return node.op_type == "RotaryEmbedding"


def _is_angle_table(gather: ir.Node) -> bool:
    """A cos or sin table: what it gives goes into a RotaryEmbedding, or it holds cos(0) or sin(0) in its first row."""
    if _leads_to(gather.outputs[0], {"RotaryEmbedding"}, _SAME_VALUES, hops=4):
        return True
    table = gather.inputs[0]
    if table is None or table.const_value is None or not table.const_value.dtype.is_floating_point():
        return False
    if gather.attributes.get_int("axis", 0) != 0 or len(table.const_value.shape) < 2:
        return False
    try:
        first = np.asarray(table.const_value.numpy()[0], np.float64)
    except OSError:
        return False  # a graph without its weights: the table cannot be looked at
    return first.size > 0 and bool(np.all(first == first.flat[0])) and abs(first.flat[0]) in (0.0, 1.0)


def _slot_rule(reach: _Reach, value: ir.Value) -> str | None:
    node = reach.node
    if node.op_type != "ScatterND" or reach.index != 1 or node.attributes.get_string("reduction", "none") != "none":
        return None
    bound = _indexed(node, reach.component or 0)
    return None if bound is None else f"permutation:{bound}"


def _selection_rule(reach: _Reach, value: ir.Value) -> str | None:
    """Indices into something computed or fed: tokens of a cache, experts that are counted."""
    node = reach.node
    bound: int | str | None = None
    if reach.index == 1 and node.op_type in ("Gather", "GatherElements", "ScatterElements"):
        if node.op_type == "Gather" and _is_weight(node.inputs[0]):
            return None
        bound = _indexed(node, node.attributes.get_int("axis", 0))
    elif reach.index == 1 and node.op_type == "GatherND":
        bound = _indexed(node, node.attributes.get_int("batch_dims", 0) + (reach.component or 0))
    elif reach.index == 1 and node.op_type == "ScatterND":
        bound = _indexed(node, reach.component or 0)
    elif node.op_type == "Equal":
        bound = _compared_below(node.inputs[1 - reach.index])
    elif node.op_type == "OneHot" and reach.index == 0:
        bound = _upper_bound(node.inputs[1])
    if bound is None:
        return None
    size = _dim(value, -1)
    fits = isinstance(bound, str) or (isinstance(size, int) and size <= bound)
    return f"distinct:{bound}" if fits else f"ids:{bound}"


def _id_rule(reach: _Reach, value: ir.Value) -> str | None:
    if reach.node.op_type != "Gather" or reach.index != 1:
        return None
    bound = _indexed(reach.node, reach.node.attributes.get_int("axis", 0))
    return None if bound is None else f"ids:{bound}"


def _indexed(node: ir.Node, axis: int) -> int | str | None:
    dim = None if node.inputs[0] is None else _dim(node.inputs[0], axis)
    return None if isinstance(dim, str) and dim.startswith("unk__") else dim  # a name that inference made up


def _compared_below(value: ir.Value | None) -> int | None:
    """The number of values in a constant 0, 1, ..., n - 1."""
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    if constant is None or constant.size < 2 or constant.nbytes > _SMALL_BYTES:
        return None
    values = constant.numpy().reshape(-1)
    return int(values.size) if np.array_equal(values, np.arange(values.size)) else None


def _upper_bound(value: ir.Value | None) -> int | None:
    """The constant that a count is, or that it is limited to by a Min."""
    if value is None:
        return None
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None:
        return int(constant.numpy().reshape(-1)[0]) if constant.size == 1 else None
    node = value.producer()
    if node is None:
        return None
    if node.op_type in _SAME_VALUES:
        return _upper_bound(node.inputs[0])
    if node.op_type == "Min":
        bounds = [bound for entry in node.inputs if (bound := _upper_bound(entry)) is not None]
        return min(bounds, default=None)
    return None


# --------------------------------------------------------------------------------------------------------------- masks


def _boolean_rule(value: ir.Value) -> str:
    """True is taken for visible, unless true is where a lowest number is put."""
    if value.shape is None or len(value.shape) < 3:
        return "ones"
    for reach in _reaches(value):
        if reach.node.op_type == "Where" and reach.index == 0:
            hidden_by_true = _hides(reach.node.inputs[1])
            return "future" if hidden_by_true != reach.inverted else "causal"
    return "causal"


def _hides(value: ir.Value | None) -> bool:
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    return constant is not None and constant.size == 1 and float(constant.numpy().reshape(-1)[0]) <= _HIDING


def _is_additive_mask(value: ir.Value) -> bool:
    """A float input that is added to scores before a Softmax, or is the mask of an Attention."""
    if value.shape is None or len(value.shape) < 2:
        return False
    for reach in _reaches(value):
        if reach.node.op_type == "Attention" and reach.index == 3:
            return True
        added = reach.node.op_type == "Add" or (reach.node.op_type == "Where" and reach.index > 0)
        if added and _leads_to(reach.node.outputs[0], {"Softmax", "Attention"}, _TO_SCORES, hops=6):
            return True
    return False


# --------------------------------------------------------------------------------------------------------------- graph


def _reaches(value: ir.Value) -> Iterator[_Reach]:
    """Every use of the value, and of what merely reshapes, casts or joins it."""
    pending: list[tuple[ir.Value, int | None, bool]] = [(value, None, False)]
    seen: set[tuple[int, int | None, bool]] = set()
    while pending:
        current, component, inverted = pending.pop()
        if (id(current), component, inverted) in seen:
            continue
        seen.add((id(current), component, inverted))
        for use in current.uses():
            node, index = use.node, use.idx
            yield _Reach(node, index, component, inverted)
            if node.op_type in _SAME_VALUES and index == 0:
                pending.append((node.outputs[0], component, inverted))
            elif node.op_type == "Not":
                pending.append((node.outputs[0], component, not inverted))
            elif node.op_type == "Concat":
                pending.append((node.outputs[0], _place_in_tuple(node, index), inverted))
            elif (node.op_type == "Clip" and index == 0) or (node.op_type == "Where" and index > 0):
                pending.append((node.outputs[0], component, inverted))


def _place_in_tuple(concat: ir.Node, index: int) -> int | None:
    """Where along the last axis a Concat puts its input, if it joins index tuples there."""
    output = concat.outputs[0]
    rank = None if output.shape is None else len(output.shape)
    if concat.attributes.get_int("axis", 0) not in (-1, None if rank is None else rank - 1):
        return None
    sizes = [_dim(entry, -1) if entry is not None else None for entry in concat.inputs[:index]]
    return sum(size for size in sizes if isinstance(size, int)) if all(isinstance(s, int) for s in sizes) else None


def _leads_to(value: ir.Value, targets: set[str], through: set[str], hops: int) -> bool:
    """Whether a target operator is among the next ones, going on through the named operators only."""
    level, seen = [value], {id(value)}
    for _ in range(hops):
        following: list[ir.Value] = []
        for current in level:
            for node in current.consumers():
                if node.op_type in targets:
                    return True
                if node.op_type in through and id(node.outputs[0]) not in seen:
                    seen.add(id(node.outputs[0]))
                    following.append(node.outputs[0])
        level = following
    return False


def _past(model: ir.Model) -> str:
    """The number of tokens before the new ones: the axis of an input that is joined with new rows, "0" without one.

    A named axis goes before one of a fixed size.
    """
    fixed = "0"
    for value in fed_inputs(model):
        if value.shape is None or value.dtype is None or not value.dtype.is_floating_point():
            continue
        for use in value.uses():
            size: int | str | None = None
            if use.node.op_type == "Concat" and use.idx == 0:
                size = _dim(value, use.node.attributes.get_int("axis", 0))
            elif use.node.op_type == "Attention" and use.idx in (4, 5):
                size = _dim(value, 2)
            if isinstance(size, str):
                return size
            if size is not None and fixed == "0":
                fixed = str(size)
    return fixed


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and (value.is_initializer() or value.const_value is not None)


def _dim(value: ir.Value, axis: int) -> int | str | None:
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else dim.value


def _with_shapes(model: ir.Model) -> ir.Model:
    """The model, or where values lack a shape a copy with inferred ones, without its weights' data."""
    if all(value.shape is not None for node in model.graph for value in node.outputs if value.name):
        return model
    try:
        shaped = ir.from_proto(onnx.shape_inference.infer_shapes(proto_without_data(model), data_prop=True))
    except onnx.shape_inference.InferenceError:
        return model  # rules are guesses: what cannot be inferred is not used
    for name, value in shaped.graph.initializers.items():
        value.const_value = model.graph.initializers[name].const_value
    return shaped
