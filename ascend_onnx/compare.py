"""Comparing two outputs: error metrics, and a verdict by the rule of the element type.

Source of the tolerances: CANN's open accuracy standard (mixed tolerance; mean and maximal relative error).
"""

from __future__ import annotations

__all__ = ["Comparison", "compare", "compare_outputs"]

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

FLOAT32_RTOL = 1e-4
"""How far a float32 output may be off, as a part of its largest magnitude: fusing is algebra, not approximation."""

_RELATIVE_FLOOR = 1e-7  # added to the denominator of elementwise relative errors, as CANN does
_OFF_BY_ONE_PART = 1e-3  # the part of quantised elements that may land on the neighbouring code
_QUANTISED = frozenset(
    np.dtype(t) for t in (np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
)


@dataclass(frozen=True)
class MixedTolerance:
    """|actual - expected| <= atol + rtol * |expected| for `part` of the elements, and at most `max_abs` for all."""

    rtol: float
    atol: float
    max_abs: float
    part: float = 0.99


MIXED_TOLERANCES: dict[np.dtype[Any], MixedTolerance] = {
    np.dtype(np.float32): MixedTolerance(rtol=2**-10, atol=2**-16, max_abs=1e-2),
    np.dtype(np.float16): MixedTolerance(rtol=2**-9, atol=2**-9, max_abs=1e-1),
    np.dtype(ml_dtypes.bfloat16): MixedTolerance(rtol=2**-6, atol=2**-6, max_abs=1.0),
}


@dataclass(frozen=True)
class Comparison:
    """How one output compares.

    The numbers are over finite elements and None where they make no sense (another shape or type, text): `max_abs` the
    largest absolute error, `max_rel` that divided by the largest expected magnitude, `mere` / `mare` the mean / largest
    elementwise relative error, `mixed` CANN's mixed-tolerance verdict for the element type.
    `within` is the verdict by `rule`; `reason` says in one sentence why it is negative.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    within: bool
    rule: str
    reason: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    mere: float | None = None
    mare: float | None = None
    mixed: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types; an infinite ratio becomes null, for JSON has no infinity."""
        fields = {**asdict(self), "shape": list(self.shape)}
        return {name: None if value == math.inf else value for name, value in fields.items()}


def compare_outputs(
    expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray], *, rtol: float | None = None
) -> list[Comparison]:
    """One comparison for every expected output; a missing one is not within."""
    comparisons = []
    for name, array in expected.items():
        if name in actual:
            comparisons.append(compare(name, array, actual[name], rtol=rtol))
        else:
            comparisons.append(_refused(name, array, "both models have the output", f"output {name!r} is missing"))
    return comparisons


def compare(name: str, expected: np.ndarray, actual: np.ndarray, *, rtol: float | None = None) -> Comparison:
    """Compares `actual` with `expected`.

    float32 and float64 are held to 1e-4 of the largest expected magnitude, float16 and bfloat16 to the mixed tolerance
    of their type, int8 and float8 may land on a neighbouring code in at most 0.1 % of the elements, everything else is
    exact. `rtol` holds every float type to that part of the largest magnitude instead. NaN and infinities must be at
    the same places, and something must be expected besides NaN. Empty outputs of one shape and type are equal.
    """
    expected, actual = np.asarray(expected), np.asarray(actual)
    if expected.dtype != actual.dtype:
        return _refused(name, expected, "same type", f"type {actual.dtype}, expected {expected.dtype}")
    if expected.shape != actual.shape:
        return _refused(name, expected, "same shape", f"shape {actual.shape}, expected {expected.shape}")
    if expected.dtype.kind in "OSU":
        different = int(np.count_nonzero(expected != actual))
        reason = f"{different} of {expected.size} texts differ" if different else ""
        return Comparison(name, str(expected.dtype), expected.shape, not different, "exact", reason)
    if expected.dtype.kind in "biu" and expected.dtype not in _QUANTISED:
        return _compared(name, expected, actual, "exact", _exact(expected, actual))
    if expected.dtype in _QUANTISED:
        rule = f"off by one code in at most {_OFF_BY_ONE_PART:.1%}"
        return _compared(name, expected, actual, rule, _neighbouring(expected, actual))
    strays = _non_finite(expected, actual)
    tolerance = MIXED_TOLERANCES.get(expected.dtype)
    if rtol is None and tolerance is not None and expected.dtype != np.float32:
        rule = (
            f"{tolerance.part:.0%} within {tolerance.atol:g} + {tolerance.rtol:g} |x|, all within {tolerance.max_abs:g}"
        )
        return _compared(name, expected, actual, rule, strays or _mixed(expected, actual, tolerance))
    part = FLOAT32_RTOL if rtol is None else rtol
    rule = f"within {part:g} of the largest magnitude"
    return _compared(name, expected, actual, rule, strays or _within_largest(expected, actual, part))


def _refused(name: str, expected: np.ndarray, rule: str, reason: str) -> Comparison:
    return Comparison(name, str(expected.dtype), expected.shape, False, rule, reason)


def _compared(name: str, expected: np.ndarray, actual: np.ndarray, rule: str, reason: str) -> Comparison:
    error, magnitude = _errors(expected, actual)
    relative = error / (magnitude + _RELATIVE_FLOOR)
    largest = magnitude.max(initial=0.0)
    max_abs = float(error.max(initial=0.0))
    tolerance = MIXED_TOLERANCES.get(expected.dtype)
    mixed = None
    if tolerance is not None:
        mixed = not (_non_finite(expected, actual) or _mixed(expected, actual, tolerance))
    return Comparison(
        name,
        str(expected.dtype),
        expected.shape,
        within=not reason,
        rule=rule,
        reason=reason,
        max_abs=max_abs,
        max_rel=_ratio(max_abs, float(largest)),
        mere=float(relative.mean()) if relative.size else 0.0,
        mare=float(relative.max(initial=0.0)),
        mixed=mixed,
    )


def _errors(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Absolute errors and expected magnitudes of the elements that are finite on both sides, in float64."""
    wide_expected, wide_actual = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(wide_expected) & np.isfinite(wide_actual)
    return np.abs(wide_actual[finite] - wide_expected[finite]), np.abs(wide_expected[finite])


def _ratio(error: float, magnitude: float) -> float:
    if error == 0:
        return 0.0
    return error / magnitude if magnitude else float("inf")


def _non_finite(expected: np.ndarray, actual: np.ndarray) -> str:
    """Why NaNs and infinities do not agree, empty if they do."""
    wide_expected, wide_actual = expected.astype(np.float64), actual.astype(np.float64)
    either = ~(np.isfinite(wide_expected) & np.isfinite(wide_actual))
    if not either.any():
        return ""
    if np.isnan(wide_expected).all():
        return "every expected value is NaN, which proves nothing; give other inputs or weights"
    same = np.isclose(wide_expected, wide_actual, rtol=0, atol=0, equal_nan=True) | ~either
    if same.all():
        return ""
    at = _place(np.flatnonzero(~same)[0], expected.shape)
    return f"{wide_actual[at]:g} at {list(at)}, expected {wide_expected[at]:g}"


def _exact(expected: np.ndarray, actual: np.ndarray) -> str:
    different = np.flatnonzero(expected != actual)
    if not different.size:
        return ""
    at = _place(different[0], expected.shape)
    return f"{different.size} of {expected.size} differ, first {actual[at]} at {list(at)}, expected {expected[at]}"


def _neighbouring(expected: np.ndarray, actual: np.ndarray) -> str:
    distance = np.abs(_codes(expected) - _codes(actual))
    far, off = int(np.count_nonzero(distance > 1)), int(np.count_nonzero(distance))
    if far:
        return f"{far} of {expected.size} are more than one code off"
    if off > _OFF_BY_ONE_PART * expected.size:
        return f"{off} of {expected.size} are one code off, {_OFF_BY_ONE_PART:.1%} are allowed"
    return ""


def _codes(array: np.ndarray) -> np.ndarray:
    """Integers in the order of the values, one apart for neighbouring values."""
    if array.dtype == np.int8:
        return array.astype(np.int16)
    bits = array.view(np.uint8).astype(np.int16)
    if array.dtype == ml_dtypes.float8_e8m0fnu:
        return bits  # an exponent without sign
    return np.where(bits < 0x80, bits, 0x80 - bits)


def _mixed(expected: np.ndarray, actual: np.ndarray, tolerance: MixedTolerance) -> str:
    error, magnitude = _errors(expected, actual)
    if not error.size:
        return ""
    part = float(np.count_nonzero(error <= tolerance.atol + tolerance.rtol * magnitude)) / error.size
    if part < tolerance.part:
        return f"only {part:.2%} of the elements are within {tolerance.atol:g} + {tolerance.rtol:g} |x|"
    if error.max() > tolerance.max_abs:
        return f"the largest error is {error.max():.3g}, {tolerance.max_abs:g} is allowed"
    return ""


def _within_largest(expected: np.ndarray, actual: np.ndarray, part: float) -> str:
    error, magnitude = _errors(expected, actual)
    if not error.size:
        return ""
    bound = part * magnitude.max()
    if error.max() <= bound:
        return ""
    finite = np.flatnonzero(np.isfinite(expected.astype(np.float64)) & np.isfinite(actual.astype(np.float64)))
    at = _place(int(finite[error.argmax()]), expected.shape)
    return (
        f"the error at {list(at)} is {error.max():.3g}, {_ratio(float(error.max()), float(magnitude.max())):.2g} "
        f"of the largest magnitude {magnitude.max():.3g}"
    )


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(flat, shape))
