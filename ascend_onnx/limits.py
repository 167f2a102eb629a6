"""Words for the limits of a device: of these an operator makes its table of `Constraint`s.

Each function returns a `Limit`. Called with a `Call`, a limit gives one sentence that says what was expected and what
came, or None where it is met or the graph does not say enough (a symbolic dimension, an unknown type).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ascend_onnx.errors import InputError
from ascend_onnx.operator import Bound, Call, Constraint, Dim, Product

__all__ = [
    "INVALID",
    "NULL",
    "TILING",
    "Accepted",
    "Limit",
    "Place",
    "Size",
    "With",
    "absent",
    "agree",
    "attribute",
    "bounded",
    "broken",
    "equal",
    "given",
    "not_empty",
    "of_type",
    "produced",
    "ranks",
    "require",
    "rule",
    "same_type",
    "shape",
    "size",
    "when",
]

NULL, INVALID, TILING = 161001, 161002, 561002
"""What aclnn answers: a missing input, an invalid parameter, a refusal of the operator's tiling."""

Limit = Callable[[Call], str | None]
Accepted = int | str | range | tuple[int | str | range, ...]
"""What a size or an attribute may be: one value, a range, or one of several of them."""
Shape = tuple[Dim, ...] | None


def stated_shape(call: Call, name: str) -> Shape:
    """The shape of an input as the graph states it."""
    return call.input(name).shape


class Size:
    """A number that a call may know: a dimension, or what sums and products of dimensions give."""

    def __call__(self, call: Call) -> int | None:
        raise NotImplementedError

    def __add__(self, other: Size) -> Size:
        return _Combined(self, "+", other, operator.add)

    def __mul__(self, other: Size) -> Size:
        return _Combined(self, "*", other, operator.mul)


@dataclass(frozen=True)
class _Combined(Size):
    first: Size
    sign: str
    second: Size
    combine: Callable[[int, int], int]

    def __call__(self, call: Call) -> int | None:
        first, second = self.first(call), self.second(call)
        return None if first is None or second is None else self.combine(first, second)

    def __str__(self) -> str:
        return f"{self.first} {self.sign} {self.second}"


@dataclass(frozen=True)
class Place(Size):
    """One dimension: `axis` of the input `name`, in the shape that `shape_of` reads."""

    name: str
    axis: int
    shape_of: Callable[[Call, str], Shape] = stated_shape

    def __call__(self, call: Call) -> int | None:
        """The dimension, if the input is there and the dimension a known number."""
        dims = self.shape_of(call, self.name) or ()
        dim = dims[self.axis] if -len(dims) <= self.axis < len(dims) else None
        return dim if isinstance(dim, int) else None

    def __str__(self) -> str:
        return f"axis {self.axis} of {self.name}"


class With:
    """A condition: the attribute `name` has one of `values`."""

    def __init__(self, name: str, *values: int | str) -> None:
        self.name, self.values = name, values

    def __call__(self, call: Call) -> bool:
        return call.attributes.get(self.name) in self.values

    def __str__(self) -> str:
        return f"{self.name} {' or '.join(map(str, self.values))}"


def _limit(words: str, check: Limit) -> Limit:
    """`check` with `words` as its docstring, from which the documentation is made."""
    check.__doc__ = words
    return check


def rule(
    code: int, source: str, name: str, *limits: Limit, products: frozenset[Product] = frozenset(Product)
) -> Constraint:
    """The constraint that none of `limits` is broken."""

    def check(call: Call) -> str | None:
        return broken(limit(call) for limit in limits)

    return Constraint(name, code, source, _limit("\n".join(limit.__doc__ or "" for limit in limits), check), products)


def bounded(
    code: int,
    source: str,
    name: str,
    bound: Bound,
    letter: str,
    accepted: Accepted,
    *places: Place,
    condition: With | None = None,
    products: frozenset[Product] = frozenset(Product),
) -> Constraint:
    """The dimension `letter` is one of the `accepted`; where `bound` is lifted, it is the same at all places."""
    limit, relaxed = size(letter, accepted, *places), agree(letter, *places)
    if condition is not None:
        limit, relaxed = when(condition, limit), when(condition, relaxed)
    return Constraint(name, code, source, limit, products, bound, relaxed)


def broken(sentences: Iterable[str | None]) -> str | None:
    """The first sentence there is."""
    return next((sentence for sentence in sentences if sentence), None)


def require(call: Call, *limits: Limit) -> None:
    """Raise `InputError` for the first of `limits` that is broken, which a body cannot do without."""
    sentence = broken(limit(call) for limit in limits)
    if sentence is not None:
        raise InputError(f"{call.operator.name}: {sentence}")


def when(condition: With, limit: Limit) -> Limit:
    """A limit that counts under a condition only."""

    def check(call: Call) -> str | None:
        sentence = limit(call) if condition(call) else None
        return sentence and f"with {condition.name} {call.attributes[condition.name]}, {sentence}"

    return _limit(f"With {condition}: {limit.__doc__}", check)


def size(letter: str, accepted: Accepted, *places: Size) -> Limit:
    """The dimension `letter` is one of the `accepted`, at every place where it shows."""

    def check(call: Call) -> str | None:
        return broken(
            f"{letter} must be {_words(accepted)}, got {dim} in {place}"
            for place in places
            if (dim := place(call)) is not None and not _accepts(accepted, dim)
        )

    return _limit(f"{letter} is {_words(accepted)} ({_list(places)}).", check)


def agree(letter: str, *places: Size) -> Limit:
    """The dimension `letter` is the same at all places."""

    def check(call: Call) -> str | None:
        known = [(place, dim) for place in places if (dim := place(call)) is not None]
        return broken(
            f"{letter} must be the same everywhere: {known[0][1]} in {known[0][0]}, got {dim} in {place}"
            for place, dim in known
            if dim != known[0][1]
        )

    return _limit(f"{letter} is the same everywhere ({_list(places)}).", check)


def equal(letter: str, expected: Size, place: Size) -> Limit:
    """What is at `place` is `letter`, which others give together."""

    def check(call: Call) -> str | None:
        dim, wanted = place(call), expected(call)
        if dim is None or wanted is None or dim == wanted:
            return None
        return f"{letter} must be {wanted}, got {dim} in {place}"

    return _limit(f"{place} is {letter}.", check)


def shape(name: str, *expected: Size | int | None) -> Limit:
    """The input `name` has these dimensions, each a number, a size of the call, or None for any."""

    def check(call: Call) -> str | None:
        got = call.input(name).shape
        if got is None:
            return None
        wanted = [dim(call) if isinstance(dim, Size) else dim for dim in expected]
        fits = len(got) == len(wanted) and all(
            have == want or want is None or not isinstance(have, int) for have, want in zip(got, wanted, strict=True)
        )
        words = ", ".join("any" if dim is None else str(dim) for dim in wanted)
        return None if fits else f"{name} must have the shape ({words}), got {got}"

    return _limit(f"{name} has the shape ({_list(expected)}).", check)


def ranks(accepted: Mapping[str, Accepted]) -> Limit:
    """The inputs, by name, have these ranks."""

    def check(call: Call) -> str | None:
        return broken(
            f"{name} must have rank {_words(rank)}, got {got}"
            for name, rank in accepted.items()
            if (got := call.input(name).rank) is not None and not _accepts(rank, got)
        )

    return _limit(" ".join(f"{name} has rank {_words(rank)}." for name, rank in accepted.items()), check)


def not_empty(*names: str) -> Limit:
    """No dimension of these inputs, of any input if none is named, is 0."""

    def check(call: Call) -> str | None:
        return broken(
            f"{name} must not be empty, got shape {dims}"
            for name in names or call.inputs
            if (dims := call.input(name).shape) is not None and 0 in dims
        )

    return _limit(f"{_list(names) or 'No input'} {'are not' if names else 'is'} empty.", check)


def of_type(names: Iterable[str], *types: ir.DataType) -> Limit:
    """The inputs `names` have one of the `types`."""

    def check(call: Call) -> str | None:
        return broken(
            f"{name} must be {' or '.join(map(_type_name, types))}, got {_type_name(dtype)}"
            for name in names
            if (dtype := call.input(name).dtype) is not None and dtype not in types
        )

    return _limit(f"{_list(names)}: {' or '.join(map(_type_name, types))}.", check)


def same_type(first: str, *others: str) -> Limit:
    """The inputs `others` have the type of the input `first`."""

    def check(call: Call) -> str | None:
        expected = call.input(first).dtype
        return broken(
            f"{name} must have the type of {first}, {_type_name(expected)}, got {_type_name(dtype)}"
            for name in others
            if expected is not None and (dtype := call.input(name).dtype) is not None and dtype != expected
        )

    return _limit(f"{_list(others)}: the type of {first}.", check)


def given(name: str, condition: With) -> Limit:
    """The input `name` is given under the condition."""

    def check(call: Call) -> str | None:
        if not condition(call) or call.has(name):
            return None
        return f"{name} must be given with {condition.name} {call.attributes[condition.name]}, got none"

    return _limit(f"{name} is given with {condition}.", check)


def absent(name: str, condition: With) -> Limit:
    """The input `name` is given under the condition only."""

    def check(call: Call) -> str | None:
        if condition(call) or not call.has(name):
            return None
        return f"{name} must be given with {condition} only, got {condition.name} {call.attributes[condition.name]}"

    return _limit(f"{name} is given with {condition} only.", check)


def produced(name: str, condition: With) -> Limit:
    """The output `name` is asked for under the condition only."""

    def check(call: Call) -> str | None:
        if condition(call) or not call.has(name):
            return None
        return f"{name} is produced with {condition} only, got {call.attributes[condition.name]}"

    return _limit(f"{name} is produced with {condition} only.", check)


def attribute(name: str, accepted: Accepted) -> Limit:
    """The attribute `name` is one of the `accepted`."""

    def check(call: Call) -> str | None:
        value = call.attributes[name]
        return None if _accepts(accepted, value) else f"{name} must be {_words(accepted)}, got {value}"

    return _limit(f"{name} is {_words(accepted)}.", check)


def _accepts(accepted: Accepted, value: int | str) -> bool:
    if isinstance(accepted, tuple):
        return any(_accepts(one, value) for one in accepted)
    return value in accepted if isinstance(accepted, range) else value == accepted


def _words(accepted: Accepted) -> str:
    if isinstance(accepted, tuple):
        if len(accepted) > 2 and not any(isinstance(one, range) for one in accepted):
            return f"one of {', '.join(map(_words, accepted))}"
        return " or ".join(map(_words, accepted))
    if accepted == "":
        return "empty"
    if isinstance(accepted, range):
        bounds = f"from {accepted[0]} to {accepted[-1]}"
        return bounds if accepted.step == 1 else f"a multiple of {accepted.step} {bounds}"
    return str(accepted)


def _list(items: Iterable[object]) -> str:
    return ", ".join("any" if item is None else str(item) for item in items)


def _type_name(dtype: ir.DataType) -> str:
    return dtype.name.lower()
