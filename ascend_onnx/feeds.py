"""Inputs for running a model: sizes for its symbolic dimensions, and arrays drawn by rules.

A rule says in one word how an input is drawn. `N`, `START` and `V` are numbers or expressions over the symbolic
dimensions, such as `past` or `blocks*block_size`:

    normal                    standard normal
    lanes, positive_lanes     normal (its magnitude plus 0.5), one value along the last axis, as softmax max (sum) has
    ones                      1 or true
    scalar:V                  V everywhere
    ids:N                     integers below N
    distinct:N                integers below N, without repetition along the last axis
    permutation:N             integers below N, without any repetition
    arange:START              START, START + 1, ... along the last axis
    causal                    a mask (..., queries, keys) that hides future keys: true or 0 for visible, false or the
                              lowest number for hidden; the last query sees the last key
    future                    the opposite of a boolean `causal`
"""

from __future__ import annotations

__all__ = ["RULES", "choose_dimensions", "fit_dimensions", "infer_rules", "make_feeds"]

import math
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ascend_onnx.errors import InputError
from ascend_onnx.input_rules import fed_inputs, infer_rules, selected_tokens
from ascend_onnx.symbols import expression

RULES = (
    "normal",
    "lanes",
    "positive_lanes",
    "ones",
    "scalar:V",
    "ids:N",
    "distinct:N",
    "permutation:N",
    "arange:START",
    "causal",
    "future",
)
_WITH_ARGUMENT = {rule.partition(":")[0] for rule in RULES if ":" in rule}

_BATCHES = (2, 3, 4, 5)
_LENGTHS = ((3, 5, 4, 7, 6), (9, 6, 11, 8, 13))
_SELECTION_FACTOR = 5
"""How many times more tokens than are selected: a selection of everything would prove nothing."""
_SLOT_FACTOR = 2  # cache slots for every slot that is written, so that some stay as they were


# --------------------------------------------------------------------------------------------------------- dimensions


def choose_dimensions(
    model: ir.Model,
    given: Mapping[str, int] | None = None,
    *,
    sets: int = 2,
    rules: Mapping[str, str] | None = None,
) -> list[dict[str, int]]:
    """Sizes for every symbolic dimension of the model's inputs, `sets` times, each time other ones.

    `given` sizes are taken as they are. Dimensions that lead an input (a batch, a number of tokens) are at least 2.
    Sizes are large enough for the `rules` (inferred ones by default) to draw without repetition. In a model that
    selects tokens the last set has at least 5 times as many as are selected.

    Raises:
        InputError: a given name that no input has, or a size below 1.
    """
    given = {expression(name): size for name, size in (given or {}).items()}
    rules = infer_rules(model) if rules is None else rules
    inputs = fed_inputs(model)
    names = _symbols(inputs)
    for name, size in given.items():
        if name not in names:
            known = ", ".join(names) or "none"
            raise InputError(f"no input of the model has a dimension {name!r}; its symbolic dimensions are: {known}")
        if size < 1:
            raise InputError(f"dimension {name!r} was set to {size}, but a size of at least 1 is expected")
    leading = {name for value in inputs for name in _dim_symbols(_shape(value)[:1])}
    chosen = []
    for index in range(sets):
        lengths = iter(_LENGTHS[index % len(_LENGTHS)] * (1 + len(names)))
        sizes = {
            name: given.get(name)
            or (_BATCHES[index % len(_BATCHES)] if name in leading else next(lengths) + index // 2)
            for name in names
        }
        sizes = fit_dimensions(model, rules, sizes, given)
        if index == sets - 1:
            for tokens, count in selected_tokens(model):
                _raise_to(tokens, count * _SELECTION_FACTOR, sizes, fixed={*given, *(leading - _symbols_of(tokens))})
        chosen.append(sizes)
    return chosen


def evaluate(expression: str | int, sizes: Mapping[str, int]) -> int:
    """A dimension or a rule's argument as a number.

    Raises:
        InputError: it is no expression, or names a dimension without a size.
    """
    if isinstance(expression, int):
        return expression
    try:
        value = ir.SymbolicDim(expression).evaluate(sizes)
    except ValueError:
        value = None
    if not isinstance(value, int):
        raise InputError(f"{expression!r} is not a number for the dimensions {dict(sizes)}; set what it names")
    return value


def fit_dimensions(
    model: ir.Model, rules: Mapping[str, str], sizes: Mapping[str, int], fixed: Collection[str] = ()
) -> dict[str, int]:
    """`sizes`, raised where draws without repetition need it and selections would leave nothing out.

    Dimensions in `fixed` stay as they are.
    """
    fitted = dict(sizes)
    for value in fed_inputs(model):
        kind, _, bound = rules.get(value.name or "", "").partition(":")
        shape = [evaluate(dim, fitted) for dim in _shape(value)]
        kept = {*fixed, *_dim_symbols(_shape(value))}
        if kind == "distinct" and shape:
            _raise_to(bound, shape[-1] * _SELECTION_FACTOR, fitted, kept)
        elif kind == "permutation":
            _raise_to(bound, math.prod(shape) * _SLOT_FACTOR, fitted, kept)
    return fitted


def _raise_to(expression: str | int, least: int, sizes: dict[str, int], fixed: set[str]) -> None:
    size = evaluate(expression, sizes)
    free = sorted(_symbols_of(expression) - fixed)
    while free and size < least:
        sizes[free[0]] += 1
        before, size = size, evaluate(expression, sizes)
        if size <= before:  # it does not grow with this dimension
            return


def _symbols(inputs: list[ir.Value]) -> list[str]:
    """Names of the symbolic dimensions, in order of appearance."""
    return list(dict.fromkeys(name for value in inputs for name in sorted(_dim_symbols(_shape(value)))))


def _dim_symbols(dims: tuple[int | str, ...]) -> set[str]:
    return {name for dim in dims for name in _symbols_of(dim)}


def _symbols_of(dim: int | str) -> set[str]:
    return set() if isinstance(dim, int) else set(ir.SymbolicDim(dim).free_symbols())


def _named(dim: ir.SymbolicDim) -> str | None:
    return None if dim.value is None else expression(dim.value)


def _shape(value: ir.Value) -> tuple[int | str, ...]:
    """Dimensions as numbers and expressions; a dimension without a name is called after its input and axis."""
    if value.shape is None:
        raise InputError(f"input {value.name!r} has no shape in the model; give arrays for the inputs instead")
    dims = (dim if isinstance(dim, int) else _named(dim) for dim in value.shape)
    return tuple(f"{_identifier(value)}_dim_{axis}" if dim is None else dim for axis, dim in enumerate(dims))


def _identifier(value: ir.Value) -> str:
    return "".join(c if c.isalnum() else "_" for c in value.name or "input")


# -------------------------------------------------------------------------------------------------------------- arrays


def make_feeds(
    model: ir.Model,
    sizes: Mapping[str, int],
    rules: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """One array for each input of the model, by its rule, or by the inferred one.

    The same seed gives an input the same values whatever other inputs there are.

    Raises:
        InputError: a rule for an unknown input, an unknown rule, or one that cannot be met at these sizes.
    """
    inputs = {value.name or "": value for value in fed_inputs(model)}
    for name in rules or {}:
        if name not in inputs:
            raise InputError(f"no input is called {name!r}; the model's inputs are {', '.join(inputs)}")
    every = dict(rules or {})
    if any(name not in every for name in inputs):
        every = {**infer_rules(model), **every}
    return {name: _draw(value, every.get(name, "normal"), sizes, seed) for name, value in inputs.items()}


def _draw(value: ir.Value, rule: str, sizes: Mapping[str, int], seed: int) -> np.ndarray:
    if value.dtype is None or not isinstance(value.type, ir.TensorType):
        raise InputError(f"input {value.name!r} is {value.type}, but only tensors can be drawn")
    kind, _, argument = rule.partition(":")
    if (kind in _WITH_ARGUMENT) != bool(argument) or kind not in {r.partition(":")[0] for r in RULES}:
        raise InputError(f"rule {rule!r} for input {value.name!r} is not one of {', '.join(RULES)}")
    shape = tuple(evaluate(dim, sizes) for dim in _shape(value))
    generator = np.random.default_rng([seed, zlib.crc32((value.name or "").encode())])
    dtype = value.dtype.numpy()
    where = f"input {value.name!r} of shape {shape}"
    array: np.ndarray
    match kind:
        case "normal":
            array = generator.standard_normal(shape)
        case "lanes" | "positive_lanes":
            lane = generator.standard_normal((*shape[:-1], 1)[: len(shape)])
            array = np.broadcast_to(lane if kind == "lanes" else np.abs(lane) + 0.5, shape)
        case "ones":
            array = np.ones(shape)
        case "scalar":
            array = np.full(shape, _number(argument, sizes))
        case "arange":
            array = np.broadcast_to(np.arange(shape[-1] if shape else 1) + evaluate(argument, sizes), shape or (1,))
        case "causal" | "future":
            array = _causal(shape, dtype, hide=kind == "causal", where=where)
        case _:
            array = _integers(kind, evaluate(argument, sizes), shape, generator, where)
    return np.asarray(array.reshape(shape), order="C").astype(dtype)


def _number(text: str, sizes: Mapping[str, int]) -> float:
    try:
        return float(text)
    except ValueError:
        return evaluate(text, sizes)


def _integers(kind: str, bound: int, shape: tuple[int, ...], generator: np.random.Generator, where: str) -> np.ndarray:
    if bound > np.iinfo(np.int64).max:
        raise InputError(f"{where} cannot hold {kind}:{bound}: an integer of 64 bits ends before that")
    wanted = {"ids": min(1, math.prod(shape)), "distinct": shape[-1] if shape else 1, "permutation": math.prod(shape)}
    if bound < wanted[kind]:
        raise InputError(f"{where} cannot hold {kind}:{bound}: there are too few integers below {bound}")
    if kind == "ids":
        return generator.integers(0, bound, shape)
    if kind == "permutation":
        return generator.permutation(bound)[: math.prod(shape)].reshape(shape)
    rows = np.tile(np.arange(bound), (math.prod(shape[:-1]), 1))
    return generator.permuted(rows, axis=1)[:, : shape[-1] if shape else 1].reshape(shape)


def _causal(shape: tuple[int, ...], dtype: np.dtype[Any], *, hide: bool, where: str) -> np.ndarray:
    if len(shape) < 2:
        raise InputError(f"{where} cannot be a causal mask: the axes (queries, keys) are expected last")
    queries, keys = shape[-2:]
    visible = np.arange(keys) <= np.arange(queries)[:, None] + keys - queries
    if dtype.kind in "biu":
        return np.broadcast_to(visible if hide else ~visible, shape)
    lowest = float(ir.DataType.from_numpy(dtype).min)
    return np.broadcast_to(np.where(visible, 0.0, lowest), shape)
