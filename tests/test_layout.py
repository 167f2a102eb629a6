"""Storage orders: each against the index formula of its specification, and each with its inverse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from ascend_onnx import layout

DTYPES = [np.dtype(t) for t in (np.int8, ml_dtypes.float8_e4m3fn, np.float16, ml_dtypes.bfloat16, np.float32, np.int64)]


def numbered(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array whose elements tell each other apart, bit for bit."""
    count = int(np.prod(shape))
    return np.random.default_rng(7).integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nz_index_formula(dtype: np.dtype[Any]) -> None:
    w0 = 32 // dtype.itemsize
    k, n = 48, 2 * w0
    weight = numbered((k, n), dtype)
    packed = layout.nd_to_nz(weight)
    assert packed.shape == (n // w0, k // 16, 16, w0)
    flat = packed.ravel()
    for row in range(k):
        for column in range(n):
            place = ((column // w0) * (k // 16) + row // 16) * 16 * w0 + (row % 16) * w0 + column % w0
            assert bits(flat[place]) == bits(weight[row, column])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nz_round_trip(dtype: np.dtype[Any]) -> None:
    weight = numbered((32, 96), dtype)
    assert np.array_equal(bits(layout.nz_to_nd(layout.nd_to_nz(weight))), bits(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 4096), (8192, 32), (2064, 2048), (1040, 3104), (0, 64), (32, 0)])
def test_nz_of_any_size(dtype: np.dtype[Any], shape: tuple[int, int]) -> None:
    """Matrices of one block and of many, of one processor and of several, whose last block is shorter."""
    weight, width = numbered(shape, dtype), 32 // dtype.itemsize
    packed = layout.nd_to_nz(weight)
    k, n = shape
    expected = weight.reshape(k // 16, 16, n // width, width).transpose(2, 0, 1, 3)
    assert np.array_equal(bits(packed), bits(expected))
    assert packed.flags.c_contiguous
    assert np.array_equal(bits(layout.nz_to_nd(packed)), bits(weight))


def test_nz_of_a_view() -> None:
    weight = numbered((96, 128), np.dtype(np.float16))
    packed = layout.nd_to_nz(weight.T[:, ::2])
    assert np.array_equal(bits(layout.nz_to_nd(packed)), bits(weight.T[:, ::2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_nz_index_formula(dtype: np.dtype[Any]) -> None:
    w0 = 32 // dtype.itemsize
    n, k = 48, 2 * w0
    weight = numbered((n, k), dtype)
    packed = layout.transposed_nd_to_nz(weight)
    assert packed.shape == (k // w0, n, w0)
    flat = packed.ravel()
    for row in range(n):
        for column in range(k):
            place = ((column // w0) * n + row) * w0 + column % w0
            assert bits(flat[place]) == bits(weight[row, column])
    assert np.array_equal(bits(layout.transposed_nz_to_nd(packed)), bits(weight))
    four_axes = packed.reshape(k // w0, n // 16, 16, w0)
    assert np.array_equal(bits(layout.transposed_nz_to_nd(four_axes)), bits(weight))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize in (2, 4)], ids=str)
def test_heads_nz_index_formula(dtype: np.dtype[Any]) -> None:
    w0 = 32 // dtype.itemsize
    heads, nope, rank = 3, 32, 2 * w0
    weight = numbered((heads, nope, rank), dtype)
    packed = layout.heads_nd_to_nz(weight)
    assert packed.shape == (heads, rank // w0, nope, w0)
    for head in range(heads):
        assert np.array_equal(bits(packed[head]), bits(layout.transposed_nd_to_nz(weight[head])))
    assert np.array_equal(bits(layout.heads_nz_to_nd(packed)), bits(weight))


def test_descale_bits() -> None:
    scale = np.array([1.0, -2.5, 0.0, 1e-20, np.inf], np.float32)
    encoded = layout.descale_to_bits(scale)
    assert encoded.dtype == np.int64
    assert np.array_equal(encoded.astype(np.uint64).astype(np.uint32).view(np.float32), scale)
    assert np.array_equal(layout.bits_to_descale(encoded), scale)


@pytest.mark.parametrize(("shape", "wrong"), [((20, 32), "multiples"), ((32, 20), "multiples"), ((2, 3, 4), "(k, n)")])
def test_nz_refuses(shape: tuple[int, ...], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.replace("(", r"\(").replace(")", r"\)")):
        layout.nd_to_nz(np.zeros(shape, np.float16))


@pytest.mark.parametrize("shape", [(16, 16), (2, 1, 16, 8)])
def test_nd_refuses_unpacked(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        layout.nz_to_nd(np.zeros(shape, np.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cache_index_formula(dtype: np.dtype[Any]) -> None:
    c0 = 32 // dtype.itemsize
    blocks, block_size, width = 3, 16, 64
    rows = numbered((blocks, block_size, 1, width), dtype)
    flat = layout.cache_bsnd_to_nz(rows).ravel()
    for block in range(blocks):
        for offset in range(block_size):
            for h in range(width):
                place = block * block_size * width + (h // c0) * block_size * c0 + offset * c0 + h % c0
                assert bits(flat[place]) == bits(rows[block, offset, 0, h])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [0, 2])
def test_cache_round_trip(dtype: np.dtype[Any], blocks: int) -> None:
    cache = numbered((blocks, 16, 1, 64), dtype)
    there = layout.cache_bsnd_to_nz(cache)
    assert there.shape == cache.shape
    assert np.array_equal(bits(layout.cache_nz_to_bsnd(there)), bits(cache))


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 16, 2, 64), (2, 16, 1, 20)])
def test_cache_refuses(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="got"):
        layout.cache_bsnd_to_nz(np.zeros(shape, np.float16))


def test_rope_permutation() -> None:
    lanes = np.arange(10)[None]
    assert layout.interleaved_to_half(lanes, 4).tolist() == [[0, 1, 2, 3, 4, 6, 8, 5, 7, 9]]
    assert layout.half_to_interleaved(layout.interleaved_to_half(lanes, 4), 4).tolist() == lanes.tolist()
    assert layout.half_to_interleaved(lanes[:, :6]).tolist() == [[0, 3, 1, 4, 2, 5]]


def test_permuted_weight_gives_permuted_features() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((3, 8)), rng.standard_normal((8, 20))
    permuted = x @ layout.interleaved_to_half(weight, 12)
    assert np.allclose(permuted, layout.interleaved_to_half(x @ weight, 12))


def test_split_kv_b_absorbs() -> None:
    """Attention in the latent space equals attention over the expanded heads."""
    rng = np.random.default_rng(2)
    rank, heads, nope, value, keys = 8, 3, 4, 5, 6
    kv_b = rng.standard_normal((rank, heads * (nope + value)))
    latents, query = rng.standard_normal((keys, rank)), rng.standard_normal((heads, nope))
    weight_uk, weight_uv = layout.split_kv_b(kv_b, heads, nope)
    assert weight_uk.shape == (heads, nope, rank)
    assert weight_uv.shape == (heads, rank, value)

    expanded = (latents @ kv_b).reshape(keys, heads, nope + value)
    scores = np.einsum("hd,khd->hk", query, expanded[..., :nope])
    absorbed = np.einsum("hd,hdc,kc->hk", query, weight_uk, latents)
    assert np.allclose(scores, absorbed)
    out = np.einsum("hk,khv->hv", scores, expanded[..., nope:])
    assert np.allclose(out, np.einsum("hk,kc,hcv->hv", absorbed, latents, weight_uv))


def test_join_kv_b_inverts_split() -> None:
    kv_b = numbered((8, 3 * 9), np.dtype(np.float32))
    assert np.array_equal(bits(layout.join_kv_b(*layout.split_kv_b(kv_b, 3, 4))), bits(kv_b))


@pytest.mark.parametrize(("heads", "nope"), [(4, 2), (3, 10)])
def test_split_kv_b_refuses(heads: int, nope: int) -> None:
    with pytest.raises(ValueError, match="columns do not hold"):
        layout.split_kv_b(np.zeros((8, 27), np.float32), heads, nope)
