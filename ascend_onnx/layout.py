"""Storage orders of the device, as pure functions on arrays, each with its inverse.

Source: MlaPrologV2WeightNz, NZ weights, RoPE and cache write; aclnnMlaPrologV2WeightNz, cacheMode;
aclnnMlaPreprocess, wdqkv, wuq, wuk and deScale0.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = [
    "bits_to_descale",
    "cache_bsnd_to_nz",
    "cache_nz_to_bsnd",
    "descale_to_bits",
    "fractal_width",
    "half_to_interleaved",
    "heads_nd_to_nz",
    "heads_nz_to_nd",
    "interleaved_to_half",
    "join_kv_b",
    "nd_to_nz",
    "nz_to_nd",
    "split_kv_b",
    "transposed_nd_to_nz",
    "transposed_nz_to_nd",
]

_FRACTAL_HEIGHT = 16
_FRACTAL_BYTES = 32
_BLOCK_LINES = 24576
"""Lines that are transposed at once: 768 KB, so that the interpreter has a small share in the time."""
_SHARED_BYTES = 2**22
"""From this size on a matrix is worth several threads."""
_MOST_SHARES = 4


def fractal_width(itemsize: int) -> int:
    """Elements in one line of a fractal: 16 for 2-byte types, 32 for int8, 8 for float32."""
    return _FRACTAL_BYTES // itemsize


def nd_to_nz(weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A weight (k, n) in FRACTAL_NZ storage (n / w0, k / 16, 16, w0), w0 = 32 bytes of elements.

    Raises `ValueError` where k is no multiple of 16 or n no multiple of w0.
    """
    if weight.ndim != 2:
        raise ValueError(f"a weight (k, n) was expected, got shape {weight.shape}")
    k, n = weight.shape
    width = fractal_width(weight.itemsize)
    if k % _FRACTAL_HEIGHT or n % width:
        raise ValueError(f"(k, n) must be multiples of ({_FRACTAL_HEIGHT}, {width}), got ({k}, {n})")
    lines = _transposed_lines(weight.reshape(k, n // width, width))
    return lines.reshape(n // width, k // _FRACTAL_HEIGHT, _FRACTAL_HEIGHT, width)


def nz_to_nd(weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The weight (k, n) from its FRACTAL_NZ storage (n / w0, k / 16, 16, w0); inverse of `nd_to_nz`."""
    if weight.ndim != 4:
        raise ValueError(f"a weight (n / w0, k / 16, 16, w0) was expected, got shape {weight.shape}")
    outer_n, outer_k, height, width = weight.shape
    if width != fractal_width(weight.itemsize):
        raise ValueError(f"lines of {fractal_width(weight.itemsize)} elements were expected, got {width}")
    lines = _transposed_lines(weight.reshape(outer_n, outer_k * height, width))
    return lines.reshape(outer_k * height, outer_n * width)


def _transposed_lines(lines: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """`lines` (rows, columns, w0) as (columns, rows, w0), contiguous; a line is 32 bytes.

    Large matrices are shared among the processors.
    """
    rows, columns, width = lines.shape
    target = np.empty((columns, rows, width), lines.dtype)
    if not lines.size:
        return target
    # A line is two complex numbers, and a gather of such pairs has a kernel of its own in numpy.
    source, result = np.ascontiguousarray(lines).view(np.complex128), target.view(np.complex128)
    shares = min(os.cpu_count() or 1, _MOST_SHARES) if lines.nbytes >= _SHARED_BYTES else 1
    bounds = [max(rows, columns) * share // shares for share in range(shares + 1)]
    own, *others = pairwise(bounds)
    if not others:
        _transpose_part(source, result, *own)
        return target
    with ThreadPoolExecutor(len(others)) as pool:
        running = [pool.submit(_transpose_part, source, result, *part) for part in others]
        _transpose_part(source, result, *own)
        for part in running:
            part.result()
    return target


def _transpose_part(
    source: npt.NDArray[np.complex128], result: npt.NDArray[np.complex128], begin: int, end: int
) -> None:
    """Transpose what lies between `begin` and `end` on the longer axis of `source` (rows, columns, 2).

    A strided copy would wait for memory at every line. So blocks that a processor's cache holds are copied in order,
    transposed there, and written in long runs.
    """
    rows, columns, _ = source.shape
    tall = rows >= columns
    step = min(max(_BLOCK_LINES // min(rows, columns), 1), end - begin)
    block = np.empty((step, columns, 2) if tall else (rows, step, 2), source.dtype)
    order = np.arange(block.shape[0] * block.shape[1]).reshape(block.shape[:2]).T.ravel()
    transposed = np.empty((columns, step, 2), source.dtype)
    for start in range(begin, end, step):
        # The last block reaches back to be as long as the others.
        part = slice(min(start, end - step), min(start + step, end))
        block[...] = source[part] if tall else source[:, part]
        target = transposed if tall else result[part]
        block.reshape(-1, 2).take(order, axis=0, out=target.reshape(-1, 2), mode="clip")
        if tall:
            result[:, part] = transposed


def transposed_nd_to_nz(weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A weight of MlaPreprocess, (n, k), in its FRACTAL_NZ storage (k / w0, n, w0), w0 = 32 bytes of elements.

    Raises `ValueError` where n is no multiple of 16 or k no multiple of w0.
    """
    fractals = nd_to_nz(weight)
    outer, _, _, width = fractals.shape
    return fractals.reshape(outer, -1, width)


def transposed_nz_to_nd(weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The weight (n, k) from its FRACTAL_NZ storage, (k / w0, n, w0) or (k / w0, n / 16, 16, w0)."""
    if weight.ndim not in (3, 4):
        raise ValueError(f"a weight (k / w0, n, w0) or (k / w0, n / 16, 16, w0) was expected, got shape {weight.shape}")
    lines = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    outer, n, width = lines.shape
    return np.ascontiguousarray(lines.transpose(1, 0, 2)).reshape(n, outer * width)


def heads_nd_to_nz(weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """One matrix (D, Hckv) a head, (N, D, Hckv), in FRACTAL_NZ storage (N, Hckv / w0, D, w0)."""
    if weight.ndim != 3:
        raise ValueError(f"a weight (N, D, Hckv) was expected, got shape {weight.shape}")
    heads, nope, rank = weight.shape
    width = fractal_width(weight.itemsize)
    if nope % _FRACTAL_HEIGHT or rank % width:
        raise ValueError(f"(D, Hckv) must be multiples of ({_FRACTAL_HEIGHT}, {width}), got ({nope}, {rank})")
    return np.ascontiguousarray(weight.reshape(heads, nope, rank // width, width).transpose(0, 2, 1, 3))


def heads_nz_to_nd(weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The weight (N, D, Hckv) from its FRACTAL_NZ storage (N, Hckv / w0, D, w0); inverse of `heads_nd_to_nz`."""
    if weight.ndim != 4:
        raise ValueError(f"a weight (N, Hckv / w0, D, w0) was expected, got shape {weight.shape}")
    heads, outer, nope, width = weight.shape
    return np.ascontiguousarray(weight.transpose(0, 2, 1, 3)).reshape(heads, nope, outer * width)


def descale_to_bits(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Float32 scales in the encoding of the device for float16 input: int64 whose low 32 bits are the float32."""
    return np.ascontiguousarray(scale, np.float32).view(np.int32).astype(np.int64)


def bits_to_descale(bits: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The float32 scales in the low 32 bits of `bits`; inverse of `descale_to_bits`."""
    return (bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def cache_bsnd_to_nz(cache: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A PA_BSND cache (BlockNum, BlockSize, 1, H) in PA_NZ order, under the same declared shape.

    Each block is stored as (H / c0, BlockSize, c0), c0 = 32 bytes of elements.
    """
    blocks, block_size, width, lanes = _cache_sizes(cache)
    pieces = cache.reshape(blocks, block_size, width // lanes, lanes)
    return np.ascontiguousarray(pieces.transpose(0, 2, 1, 3)).reshape(cache.shape)


def cache_nz_to_bsnd(cache: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A PA_NZ cache in PA_BSND order (BlockNum, BlockSize, 1, H); inverse of `cache_bsnd_to_nz`."""
    blocks, block_size, width, lanes = _cache_sizes(cache)
    pieces = cache.reshape(blocks, width // lanes, block_size, lanes)
    return np.ascontiguousarray(pieces.transpose(0, 2, 1, 3)).reshape(cache.shape)


def _cache_sizes(cache: npt.NDArray[np.generic]) -> tuple[int, int, int, int]:
    if cache.ndim != 4 or cache.shape[2] != 1:
        raise ValueError(f"a cache (BlockNum, BlockSize, 1, H) was expected, got shape {cache.shape}")
    blocks, block_size, _, width = cache.shape
    lanes = fractal_width(cache.itemsize)
    if width % lanes:
        raise ValueError(f"H must be a multiple of {lanes}, got {width}")
    return blocks, block_size, width, lanes


def interleaved_to_half(x: npt.NDArray[np.generic], start: int = 0) -> npt.NDArray[np.generic]:
    """The last axis from lane `start` on, from interleaved pairs to half-split order; lanes before it stay.

    Applied to the columns of a projection weight it makes the projection produce half-split rotary features.
    """
    lanes = x[..., start:]
    return np.concatenate([x[..., :start], lanes[..., 0::2], lanes[..., 1::2]], axis=-1)


def half_to_interleaved(x: npt.NDArray[np.generic], start: int = 0) -> npt.NDArray[np.generic]:
    """The last axis from lane `start` on, from half-split order to interleaved pairs; inverse of the above."""
    lanes = x[..., start:]
    half = lanes.shape[-1] // 2
    pairs = np.stack([lanes[..., :half], lanes[..., half:]], axis=-1).reshape(lanes.shape)
    return np.concatenate([x[..., :start], pairs], axis=-1)


def split_kv_b(
    kv_b: npt.NDArray[np.generic], heads: int, nope: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """The up-projection of latent attention, (Hckv, N * (D + Dv)), as W_UK (N, D, Hckv) and W_UV (N, Hckv, Dv).

    `nope` is D, the head size without rotary embedding; the value head size Dv is what remains of a head's columns.
    """
    rank, columns = kv_b.shape
    if columns % heads or columns // heads < nope:
        raise ValueError(f"{columns} columns do not hold {heads} heads of {nope} nope lanes and a value")
    per_head = kv_b.reshape(rank, heads, columns // heads)
    weight_uk = np.ascontiguousarray(per_head[:, :, :nope].transpose(1, 2, 0))
    weight_uv = np.ascontiguousarray(per_head[:, :, nope:].transpose(1, 0, 2))
    return weight_uk, weight_uv


def join_kv_b(weight_uk: npt.NDArray[np.generic], weight_uv: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The up-projection (Hckv, N * (D + Dv)) from W_UK (N, D, Hckv) and W_UV (N, Hckv, Dv); inverse of `split_kv_b`."""
    rank = weight_uv.shape[1]
    per_head = np.concatenate([weight_uk.transpose(2, 0, 1), weight_uv.transpose(1, 0, 2)], axis=-1)
    return per_head.reshape(rank, -1)
