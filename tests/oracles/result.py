"""What an oracle says of one output: its value, its type, and how closely it is to be held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Array", "Expected"]

Array = NDArray[Any]
"""An array of any element type, those of ml_dtypes included."""


@dataclass(frozen=True)
class Expected:
    """One expected output.

    `value` is float64 (not rounded to `dtype`) for results of float maths, and of type `dtype` for copies, indices,
    counts and quantised values. `dtype` is the element type that the operator declares. `computed` marks the elements
    that float maths produced; all others are equal bit for bit. `specified` marks the elements that a device defines:
    the others hold the portable values of this project.
    """

    value: Array
    dtype: np.dtype[Any]
    computed: NDArray[np.bool_]
    specified: NDArray[np.bool_]

    @classmethod
    def maths(
        cls,
        value: Array,
        dtype: DTypeLike,
        *,
        computed: NDArray[np.bool_] | None = None,
        specified: NDArray[np.bool_] | None = None,
    ) -> Expected:
        """An output of float maths, by default in every element."""
        everywhere = np.ones(value.shape, np.bool_)
        return cls(
            value,
            np.dtype(dtype),
            everywhere if computed is None else computed,
            everywhere if specified is None else specified,
        )

    @classmethod
    def exact(cls, value: Array, *, specified: NDArray[np.bool_] | None = None) -> Expected:
        """An output that is copied or counted: every element is exact."""
        everywhere = np.ones(value.shape, np.bool_)
        return cls(value, value.dtype, ~everywhere, everywhere if specified is None else specified)

    def rounded(self) -> Array:
        """`value` in the declared type: what a perfect implementation returns."""
        if self.value.dtype == self.dtype:
            return self.value
        return self.value.astype(np.float32).astype(self.dtype)
