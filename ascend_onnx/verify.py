"""Proving that a fused model computes what its original computes, by running both on the same inputs."""

from __future__ import annotations

__all__ = ["Run", "Verification", "verify"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import onnx
import onnx_ir as ir

from ascend_onnx.compare import Comparison, compare, compare_outputs
from ascend_onnx.convert import has_bfloat16, to_float32, widened
from ascend_onnx.dimension_search import Relation, apply_relations, find_relations
from ascend_onnx.errors import ExecutionError, InputError
from ascend_onnx.feeds import choose_dimensions, fit_dimensions, infer_rules, make_feeds
from ascend_onnx.functions import attach_functions
from ascend_onnx.operator import DOMAIN
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load

AnyModel = str | Path | onnx.ModelProto | ir.Model
Feeds = Mapping[str, np.ndarray]
_Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """One set of inputs, drawn for the sizes `dims` or read from `source`, and how each output compares."""

    dims: dict[str, int]
    source: str | None
    outputs: tuple[Comparison, ...]

    @property
    def equal(self) -> bool:
        return all(output.within for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {
            "dims": self.dims,
            "source": self.source,
            "equal": self.equal,
            "outputs": [output.to_json() for output in self.outputs],
        }


@dataclass(frozen=True)
class Verification:
    """Whether two models are equal, and the runs that say so.

    `reason` is one sentence, empty if they are equal. `converted` tells that bfloat16 was compared as float32. `rules`
    are those that the inputs were drawn by; `relations` hold between dimensions that the graph names differently.
    """

    reason: str
    runs: tuple[Run, ...] = ()
    rules: Mapping[str, str] | None = None
    relations: tuple[Relation, ...] = ()
    converted: bool = False
    seed: int = 0

    @property
    def equal(self) -> bool:
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {
            "equal": self.equal,
            "reason": self.reason,
            "converted_to_float32": self.converted,
            "seed": self.seed,
            "rules": dict(self.rules or {}),
            "relations": [str(relation) for relation in self.relations],
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(frozen=True)
class _InputSet:
    feeds: Feeds
    dims: dict[str, int]
    source: str | None


def verify(
    original: AnyModel,
    fused: AnyModel,
    *,
    inputs: str | Path | Feeds | Sequence[str | Path | Feeds] | None = None,
    dims: Mapping[str, int] | None = None,
    rules: Mapping[str, str] | None = None,
    seed: int = 0,
    rtol: float | None = None,
    sets: int = 2,
) -> Verification:
    """Runs both models on the CPU and compares every output, see `ascend_onnx.compare` for what counts as equal.

    `inputs` are arrays by input name, or .npz files that hold them, one set each. Without, `sets` sets are drawn for
    different sizes of the symbolic dimensions (`dims` sets some) by `rules`, inferred where not given.
    bfloat16 models are compared as float32 on both sides. float16 outputs are compared with those of the original in
    float32, wherever the original's own agree with them, so that one rounding error is judged and not two.
    Operators of the domain without a body get one, on a copy. Models that differ in the names or types of inputs or
    outputs are unequal. One model is in memory at a time.

    Raises:
        InputError: a model or an input file cannot be used, inputs come with dims or rules, or the original does not
            run on these inputs.
    """
    if inputs is not None and (dims or rules):
        raise InputError("given inputs have their sizes and values: leave out either them or the dims and rules")
    loaded, loaded_fused = load(original), load(fused)
    difference = _interface_difference(loaded, loaded_fused)
    if difference:
        return Verification(difference, seed=seed)
    converted = has_bfloat16(loaded) or has_bfloat16(loaded_fused)
    runnable = _runnable(original, loaded, converted)
    every_rule: dict[str, str] = {}
    relations: tuple[Relation, ...] = ()
    session = CpuSession(runnable)
    if inputs is not None:
        input_sets = [_read(entry, loaded, converted) for entry in _as_sequence(inputs)]
        expected = [session.run(entry.feeds) for entry in input_sets]
    else:
        every_rule = {**infer_rules(loaded), **(rules or {})}
        sizes = choose_dimensions(loaded, dims, sets=sets, rules=every_rule)
        plan = _Plan(
            runnable if isinstance(runnable, ir.Model) else loaded, every_rule, sizes, frozenset(dims or ()), seed
        )
        relations = plan.relations(session)
        input_sets = list(plan.input_sets(relations))
        expected = [session.run(entry.feeds) for entry in input_sets]
    del session  # its weights, before the other model's come
    expected = _with_float32_run(loaded, input_sets, expected)
    try:
        fused_session = CpuSession(_runnable(fused, loaded_fused, converted))
        actual = [fused_session.run(entry.feeds) for entry in input_sets]
    except ExecutionError as error:
        return Verification(f"the second model does not run: {error}", (), every_rule, relations, converted, seed)
    runs = tuple(
        Run(entry.dims, entry.source, tuple(compare_outputs(before, after, rtol=rtol)))
        for entry, before, after in zip(input_sets, expected, actual, strict=True)
    )
    return Verification(_first_difference(runs), runs, every_rule, relations, converted, seed)


def _with_float32_run(
    original: ir.Model, input_sets: Sequence[_InputSet], expected: Sequence[_Outputs]
) -> list[_Outputs]:
    """The expected outputs, those in float16 from a run of the original in float32 that the original agrees with."""
    if not any(value.dtype == ir.DataType.FLOAT16 for value in original.graph.outputs):
        return list(expected)
    wide = widened(original, ir.DataType.FLOAT16)
    try:
        session = CpuSession(_runnable(wide, wide, converted=False))
        exact = [session.run(_floats(entry.feeds)) for entry in input_sets]
    except ExecutionError:  # an operator that takes no float32, for example
        return list(expected)
    return [
        {name: _rounded(name, run[name], array) for name, array in own.items()}
        for run, own in zip(exact, expected, strict=True)
    ]


def _rounded(name: str, exact: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The exact output in the type of the model's own, which is taken instead if it is not close to that."""
    if own.dtype != np.float16:
        return own
    rounded = exact.astype(own.dtype)
    return rounded if compare(name, rounded, own).within else own


def _floats(feeds: Feeds) -> Feeds:
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in feeds.items()}


@dataclass(frozen=True)
class _Plan:
    """How inputs are drawn: sizes for the dimensions, and arrays for the sizes."""

    model: ir.Model
    rules: Mapping[str, str]
    sizes: Sequence[dict[str, int]]
    given: frozenset[str]
    seed: int

    def related_sizes(self, relations: Sequence[Relation]) -> Iterator[dict[str, int]]:
        fixed = {*self.given, *(relation.name for relation in relations)}
        for sizes in self.sizes:
            fitted = fit_dimensions(self.model, self.rules, apply_relations(relations, sizes), fixed)
            yield apply_relations(relations, fitted)

    def input_sets(self, relations: Sequence[Relation]) -> Iterator[_InputSet]:
        for index, sizes in enumerate(self.related_sizes(relations)):
            yield _InputSet(make_feeds(self.model, sizes, self.rules, seed=self.seed + index), sizes, None)

    def relations(self, session: CpuSession) -> tuple[Relation, ...]:
        """Relations between the dimensions under which the model runs, none if it runs as its graph says.

        Raises:
            ExecutionError: none were found.
        """
        places = {node.name: place for place, node in enumerate(self.model.graph)}
        failures: list[ExecutionError] = []

        def attempt(relations: Sequence[Relation]) -> int | None:
            try:
                for entry in self.input_sets(relations):
                    session.run(entry.feeds)
            except ExecutionError as error:
                failures.append(error)
                return places.get(error.node, -1)
            except InputError:
                if not relations:
                    raise
                return -1  # the relation asks for more different values than there are
            return None

        sizes = self.sizes[0] if self.sizes else {}
        found = find_relations(list(sizes), self.given, attempt)
        if found is None:
            tried = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "only fixed dimensions"
            raise ExecutionError(f"{failures[0]} (tried with {tried}; set dimensions or rules if these are wrong)")
        return found


def _runnable(given: AnyModel, loaded: ir.Model, converted: bool) -> str | Path | ir.Model:
    """The model as a CPU can run it; a file stays a file, for the runtime to map its weights."""
    missing = any(
        node.domain == DOMAIN and node.op_identifier() not in loaded.functions for node in loaded.graph.all_nodes()
    )
    if not converted and not missing:
        return given if isinstance(given, str | Path) else loaded
    model = to_float32(loaded) if converted else loaded.clone()
    return attach_functions(model) if missing else model


def _interface_difference(original: ir.Model, fused: ir.Model) -> str:
    """Why the models cannot be exchanged for each other, empty if they can."""
    for kind in ("input", "output"):
        before, after = (_interface(model, kind) for model in (original, fused))
        for name, dtype in before.items():
            if name not in after:
                return f"the second model lacks the {kind} {name!r}"
            if after[name] != dtype:
                return f"{kind} {name!r} is {after[name]} in the second model, expected {dtype}"
        extra = [name for name in after if name not in before]
        if extra:
            return f"the second model has a further {kind} {extra[0]!r}"
    return ""


def _interface(model: ir.Model, kind: str) -> dict[str, str]:
    values = model.graph.inputs if kind == "input" else model.graph.outputs
    return {value.name or "": value.dtype.name if value.dtype else "of unknown type" for value in values}


def _first_difference(runs: Sequence[Run]) -> str:
    for run in runs:
        for output in run.outputs:
            if not output.within:
                where = run.source or ", ".join(f"{name}={size}" for name, size in run.dims.items()) or "fixed sizes"
                return f"output {output.name!r} differs ({where}): {output.reason}"
    return ""


def _as_sequence(inputs: str | Path | Feeds | Sequence[str | Path | Feeds]) -> Sequence[str | Path | Feeds]:
    return [inputs] if isinstance(inputs, str | Path | Mapping) else inputs


def _read(entry: str | Path | Feeds, model: ir.Model, converted: bool) -> _InputSet:
    if isinstance(entry, str | Path):
        try:
            with np.load(entry, allow_pickle=False) as file:
                arrays = dict(file)
        except FileNotFoundError:
            raise InputError(f"expected input arrays in {entry}, but there is no such file; check the path") from None
        except (OSError, ValueError, BadZipFile, AttributeError, TypeError):
            raise InputError(f"expected input arrays in {entry}, but it is not an .npz file of plain arrays") from None
        source = str(entry)
    else:
        arrays, source = dict(entry), "given arrays"
    types = {value.name: value.dtype for value in model.graph.inputs}
    return _InputSet({name: _typed(array, types.get(name), converted) for name, array in arrays.items()}, {}, source)


def _typed(array: np.ndarray, dtype: ir.DataType | None, converted: bool) -> np.ndarray:
    """The array in the input's type: numpy files keep only the bits of types that are not numpy's own."""
    if dtype is not None and array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        array = array.view(dtype.numpy())
    return array.astype(np.float32) if converted and dtype == ir.DataType.BFLOAT16 else array
