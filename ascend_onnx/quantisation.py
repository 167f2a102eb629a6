"""Symmetric int8 quantisation of arrays, in the form that the operators take, and its inverse.

A value is `quantised * scale`; scales are float32 and keep the reduced axis with size 1, so that they multiply as they
are. Rounding is half to even, as in the published goldens, and a row or column of zeros gets scale 0 and values 0.

Source: MlaPrologV2WeightNz, dequant_scale_x and dequant_scale_w_*; MoeInitRoutingV3, quant mode 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["dequantise", "quantise_per_channel", "quantise_per_token"]

_LARGEST = np.float32(127)


def quantise_per_channel(weight: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """A weight (..., k, n) as int8, with one scale per output channel, (..., 1, n): `max|column| / 127`."""
    return _quantise(weight, axis=-2)


def quantise_per_token(x: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Activations (..., T, H) as int8, with one scale per token, (..., T, 1): `max|row| / 127`."""
    return _quantise(x, axis=-1)


def dequantise(quantised: npt.NDArray[np.int8], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The float32 values of int8 ones; each is within half a scale of the value that it came from."""
    return quantised.astype(np.float32) * scale


def _quantise(values: npt.NDArray[Any], axis: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    wide = values.astype(np.float32)
    scale = np.abs(wide).max(axis=axis, keepdims=True, initial=0) / _LARGEST
    divided = np.divide(wide, scale, out=np.zeros_like(wide), where=scale != 0)
    return np.clip(np.rint(divided), -128, 127).astype(np.int8), scale
