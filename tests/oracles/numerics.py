"""Shared maths of the oracles: float64 with the roundings that the operators ask for, nothing else.

Quantisation is the exception: scaling and rounding to int8 are element by element in float32, as the published golden
code does it, because float64 would decide ties differently.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .result import Array

__all__ = [
    "Float64",
    "dynamic_quantise",
    "from_fractal_nz",
    "interleaved_rope",
    "quantise",
    "rms_norm",
    "round_to",
    "saturate_int8",
    "widen",
]

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]

FRACTAL_BYTES = 32
FRACTAL_ROWS = 16


def widen(array: Array) -> Float64:
    """`array` in float64; every type here converts exactly."""
    return array.astype(np.float64)


def round_to(array: Float64, dtype: DTypeLike) -> Float64:
    """`array` rounded half to even to `dtype`, and widened again."""
    with np.errstate(over="ignore"):
        return widen(array.astype(np.float32).astype(dtype))


def rms_norm(x: Float64, gamma: Float64, epsilon: float) -> Float64:
    """`x / sqrt(mean(x^2) + epsilon) * gamma` over the last axis."""
    mean_square: Float64 = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + epsilon) * gamma


def interleaved_rope(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """RoPE of interleaved features; the result stays in half order: first the even features, then the odd ones.

    `cos` and `sin` are as wide as `x` and used lane by lane, so their halves need not be equal.
    """
    half = x.shape[-1] // 2
    even, odd = x[..., 0::2], x[..., 1::2]
    first = even * cos[..., :half] - odd * sin[..., :half]
    second = odd * cos[..., half:] + even * sin[..., half:]
    return np.concatenate([first, second], axis=-1)


def saturate_int8(x: Float32 | Float64) -> NDArray[np.int8]:
    """`x` rounded half to even and clamped to [-128, 127]."""
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def quantise(x: Float64, scale: Array, offset: Array | float = 0.0) -> NDArray[np.int8]:
    """`x * scale + offset` in float32, rounded to int8."""
    product = x.astype(np.float32) * scale.astype(np.float32)
    return saturate_int8(product + np.asarray(offset, np.float32))


def dynamic_quantise(x: Float64) -> tuple[NDArray[np.int8], Float32]:
    """Symmetric int8 over the last axis: the values, and `max|x| / 127` with a last axis of 1.

    A row of zeros gives scale 0 and values 0.
    """
    narrow = x.astype(np.float32)
    largest = np.max(np.abs(narrow), axis=-1, keepdims=True, initial=0.0)
    scale = (largest / np.float32(127)).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)
    return saturate_int8(narrow / divisor), scale


def from_fractal_nz(stored: Array) -> Array:
    """The (k, n) matrix of a weight in FRACTAL_NZ storage (n / w0, k / 16, 16, w0); matrices are returned as they are.

    W[k][n] lies at `((n / w0) * (K / 16) + k / 16) * 16 * w0 + (k % 16) * w0 + n % w0`.
    """
    if stored.ndim == 2:
        return stored
    columns, rows, _, w0 = stored.shape
    flat = stored.reshape(-1)
    k = np.arange(rows * FRACTAL_ROWS)[:, None]
    n = np.arange(columns * w0)[None, :]
    fractal = (n // w0) * rows + k // FRACTAL_ROWS
    matrix: Array = flat[fractal * FRACTAL_ROWS * w0 + (k % FRACTAL_ROWS) * w0 + n % w0]
    return matrix
