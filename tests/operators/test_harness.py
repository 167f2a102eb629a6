"""The harness carries every element type into ONNX Runtime and back unchanged."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .harness import from_ort, to_ort

TYPES = [
    np.float32,
    np.float16,
    np.int8,
    np.int32,
    np.int64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e8m0fnu,
]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (1,), ()])
@pytest.mark.parametrize("dtype", TYPES)
def test_round_trip(dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape)) + 1).astype(np.float32).reshape(shape).astype(dtype)
    result = from_ort(to_ort(array))
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert result.tobytes() == array.tobytes()
