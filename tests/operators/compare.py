"""Comparators: what counts as equal between an implementation, an oracle and a published vector.

Each returns the disagreements as sentences, so that a test shows all of them at once; no sentence means equal.
Sources: CANN's open accuracy standard (mixed tolerance by type) for float results; indices, counts and cache slots are
exact; int8 may differ by 1 in at most 0.1 % of the written elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.oracles import Array, Expected
from tests.oracles.numerics import widen

__all__ = ["MIXED_TOLERANCE", "MixedTolerance", "Tolerance", "compare", "compare_all", "compare_within"]

INT8_MAX_FRACTION = 0.001


@dataclass(frozen=True)
class MixedTolerance:
    """CANN's mixed tolerance of one type: 99 % of the elements within `rtol` and `atol`, none further off than `worst`.

    `worst` is absolute up to magnitude 1 and relative above, where one step of a short type may exceed it. No element
    may be `OUTLIER` times its tolerance away, and float32 has no outliers at all: both are stricter than the standard,
    whose 99 % alone would let a whole wrong row of a long output pass.
    """

    rtol: float
    atol: float
    worst: float
    fraction: float = 0.99


OUTLIER = 8.0

MIXED_TOLERANCE = {
    np.dtype(np.float32): MixedTolerance(2**-10, 2**-16, 1e-2, fraction=1.0),
    np.dtype(np.float16): MixedTolerance(2**-9, 2**-9, 1e-1),
    np.dtype(ml_dtypes.bfloat16): MixedTolerance(2**-6, 2**-6, 1.0),
}


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of a published vector; with `max_fraction`, at most that part of the elements may differ at all."""

    rtol: float
    atol: float
    max_fraction: float | None = None


def compare_all(actual: Mapping[str, Array], expected: Mapping[str, Expected]) -> list[str]:
    """Every disagreement of the outputs in `expected`; an output that is missing is one."""
    missing = [f"{name}: expected an output, got none" for name in expected if name not in actual]
    found = [s for name, e in expected.items() if name in actual for s in compare(name, actual[name], e)]
    return missing + found


def compare(name: str, actual: Array, expected: Expected) -> list[str]:
    """The disagreements of one output: element type, shape, exact elements, computed elements."""
    if actual.dtype != expected.dtype:
        return [f"{name}: expected {expected.dtype}, got {actual.dtype}"]
    if actual.shape != expected.value.shape:
        return [f"{name}: expected shape {expected.value.shape}, got {actual.shape}"]
    return _exact(name, actual, expected) + _computed(name, actual, expected)


def compare_within(
    name: str,
    actual: Array,
    expected: Array,
    tolerance: Tolerance,
    *,
    mask: NDArray[np.bool_] | None = None,
    counted: NDArray[np.bool_] | None = None,
) -> list[str]:
    """The disagreements where `mask` is true; `max_fraction` is a part of the elements that are also in `counted`."""
    if actual.shape != expected.shape:
        return [f"{name}: expected shape {expected.shape}, got {actual.shape}"]
    mask = np.ones(expected.shape, np.bool_) if mask is None else mask
    counted = mask if counted is None else mask & counted
    left, right = widen(actual), widen(expected)
    wrong = mask & ~_within(left, right, tolerance.rtol, tolerance.atol)
    found = [_worst(name, left, right, wrong)] if wrong.any() else []
    if tolerance.max_fraction is not None:
        differing = np.count_nonzero(mask & (left != right))
        allowed = tolerance.max_fraction * np.count_nonzero(counted)
        if differing > allowed:
            found.append(f"{name}: {differing} elements differ, at most {allowed:.1f} may")
    return found


def _exact(name: str, actual: Array, expected: Expected) -> list[str]:
    """Elements that float maths did not produce are equal bit for bit."""
    fixed = ~expected.computed
    wrong = fixed & (_bits(actual) != _bits(expected.rounded()))
    return [_worst(f"{name} (exact)", actual, expected.value, wrong)] if wrong.any() else []


def _computed(name: str, actual: Array, expected: Expected) -> list[str]:
    """Elements of float maths: int8 within 1, floats within the mixed tolerance of their type."""
    computed = expected.computed
    count = np.count_nonzero(computed)
    if count == 0:
        return []
    left, right = widen(actual), widen(expected.value)
    if expected.dtype == np.int8:
        tolerance = Tolerance(0.0, 1.0, INT8_MAX_FRACTION)
        return compare_within(name, actual, expected.value, tolerance, mask=computed)
    mixed = MIXED_TOLERANCE[expected.dtype]
    outside = computed & ~_within(left, right, mixed.rtol, mixed.atol)
    found = []
    if np.count_nonzero(outside) > (1.0 - mixed.fraction) * count:
        found.append(_worst(name, left, right, outside))
    far = computed & ~_within(left, right, mixed.rtol * OUTLIER, mixed.atol * OUTLIER)
    magnitude = np.maximum(1.0, np.abs(right))
    with np.errstate(invalid="ignore"):
        far |= computed & (np.abs(left - right) > mixed.worst * magnitude)
    if far.any():
        found.append(_worst(f"{name} (outlier)", left, right, far))
    return found


def _within(actual: Array, expected: Array, rtol: float, atol: float) -> NDArray[np.bool_]:
    """`|actual - expected| <= atol + rtol * |expected|`; NaN agrees with NaN and an infinity with itself only."""
    return np.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def _bits(array: Array) -> Array:
    contiguous = np.ascontiguousarray(array)
    return contiguous.view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _worst(name: str, actual: Array, expected: Array, wrong: NDArray[np.bool_]) -> str:
    """One sentence: how many are wrong, and the first of them."""
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{name}: {np.count_nonzero(wrong)} of {wrong.size} elements disagree, "
        f"first at {list(first)}: expected {expected[first]}, got {actual[first]}"
    )
