"""MXFP8: float8 values in blocks of 32 that share a power of two, kept as E8M0 bytes.

Source: aclnnMoeInitRoutingV3, quantMode 2 and 3; the shared exponent follows the floor rule.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .numerics import widen
from .result import Array

__all__ = ["quantise_mxfp8"]

BLOCK = 32
EXPONENT_BIAS = 127
NOT_A_NUMBER = 0xFF
LARGEST = {np.dtype(ml_dtypes.float8_e5m2): (57344.0, 15), np.dtype(ml_dtypes.float8_e4m3fn): (448.0, 8)}
"""Element type -> its largest value, and the exponent of that."""


def quantise_mxfp8(x: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """`x` (R, H) as float8 (R, H) and E8M0 scales (R, ceil(H / 32) rounded up to even), the padding column 0.

    A block with a value that is not finite gets the scale 0xFF; its elements are then 0 here and open on a device.
    """
    limit, largest_exponent = LARGEST[dtype]
    rows, hidden = x.shape
    blocks = -(-hidden // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK))
    padded[:, :hidden] = widen(x)
    grouped = padded.reshape(rows, blocks, BLOCK)

    largest = np.max(np.abs(grouped), axis=-1, initial=0.0)
    finite = np.isfinite(largest)
    # The exponent field of a float32 is what truncation to bfloat16 leaves as well.
    field = (largest.astype(np.float32).view(np.uint32) >> 23 & 0xFF).astype(np.int64)
    exponent = np.maximum(field - largest_exponent, 0)
    with np.errstate(invalid="ignore"):
        scaled = np.ldexp(grouped, (EXPONENT_BIAS - exponent)[..., None])
    scaled = np.where(finite[..., None], np.clip(scaled, -limit, limit), 0.0)
    values = scaled.reshape(rows, -1)[:, :hidden].astype(np.float32).astype(dtype)

    scales = np.zeros((rows, blocks + blocks % 2), np.uint8)
    scales[:, :blocks] = np.where(finite, exponent, NOT_A_NUMBER)
    return values, scales.view(ml_dtypes.float8_e8m0fnu)
