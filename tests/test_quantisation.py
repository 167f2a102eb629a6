"""int8 quantisation of arrays, with its inverse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ascend_onnx.quantisation import dequantise, quantise_per_channel, quantise_per_token

DTYPES = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)]


def values(shape: tuple[int, ...], dtype: np.dtype[Any] = DTYPES[0]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_channel_is_within_half_a_step(dtype: np.dtype[Any]) -> None:
    weight = values((48, 20), dtype) * np.arange(1, 21).astype(dtype)
    quantised, scale = quantise_per_channel(weight)
    assert (quantised.dtype, quantised.shape) == (np.int8, weight.shape)
    assert (scale.dtype, scale.shape) == (np.float32, (1, 20))
    assert np.all(np.abs(dequantise(quantised, scale) - weight.astype(np.float32)) <= 0.5001 * scale)
    assert np.array_equal(np.abs(quantised).max(axis=0), np.full(20, 127))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_is_within_half_a_step(dtype: np.dtype[Any]) -> None:
    x = values((2, 5, 33), dtype)
    quantised, scale = quantise_per_token(x)
    assert scale.shape == (2, 5, 1)
    assert np.all(np.abs(dequantise(quantised, scale) - x.astype(np.float32)) <= 0.5001 * scale)
    assert np.array_equal(np.abs(quantised).max(axis=-1), np.full((2, 5), 127))


@pytest.mark.parametrize("quantise", [quantise_per_channel, quantise_per_token])
def test_quantising_what_was_dequantised_changes_nothing(quantise: Any) -> None:
    quantised, scale = quantise(values((16, 16)))
    again, same_scale = quantise(dequantise(quantised, scale))
    assert np.array_equal(again, quantised)
    np.testing.assert_allclose(same_scale, scale, rtol=1e-6)


@pytest.mark.parametrize("quantise", [quantise_per_channel, quantise_per_token])
def test_zeros_get_scale_zero(quantise: Any) -> None:
    quantised, scale = quantise(np.zeros((3, 4), np.float32))
    assert not quantised.any()
    assert not scale.any()
    assert not dequantise(quantised, scale).any()


def test_ties_go_to_the_even_value() -> None:
    quantised, scale = quantise_per_token(np.array([[127.0, 0.5, 1.5, -2.5]], np.float32))
    assert scale.item() == 1
    assert quantised.tolist() == [[127, 0, 2, -2]]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("quantise", [quantise_per_channel, quantise_per_token])
def test_empty(quantise: Any, shape: tuple[int, ...]) -> None:
    quantised, scale = quantise(np.zeros(shape, np.float32))
    assert quantised.shape == shape
    assert dequantise(quantised, scale).shape == shape


def test_product_of_quantised_factors() -> None:
    """What MlaProlog's full int8 projection computes, against the product of the unquantised factors."""
    x, weight = values((4, 256)), values((256, 32))
    (x8, x_scale), (w8, w_scale) = quantise_per_token(x), quantise_per_channel(weight)
    product = (x8.astype(np.int32) @ w8.astype(np.int32)) * x_scale * w_scale
    np.testing.assert_allclose(product, x @ weight, atol=0.02 * np.abs(x @ weight).max())
