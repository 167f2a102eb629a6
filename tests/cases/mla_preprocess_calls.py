"""Calls of MlaPreprocess: their sizes, the inputs made from them, and the cases made from those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import Array
from tests.oracles.mla_preprocess import tie_distance

from .case import FLOAT32, Case, normal

__all__ = [
    "JOINED",
    "MODES",
    "NZ",
    "NZ_INT8",
    "REAL",
    "SPLIT",
    "WEIGHTS",
    "WIDE",
    "Edit",
    "Inputs",
    "Preprocess",
    "case",
]

OPERATOR = "MlaPreprocess"
JOINED, SPLIT, NZ_INT8, NZ = MODES = range(4)
NZ_LANES = 16
NZ_LANES_INT8 = 32
WEIGHTS = ("wdqkv", "wuq", "wuk")
INT8_SPREAD = 127 * 3**-0.5
"""Standard deviation of the int8 values of a weight."""
NEAR_TIE = 5e-5
"""What float32 maths may lose of a value of 127 before it is rounded to int8."""
Inputs = dict[str, Array]
Edit = Callable[[Inputs], None]


@dataclass(frozen=True)
class Preprocess:
    """The sizes and types of one call, and where its tokens go.

    `slots` None draws distinct slots; `skipped` tokens get slot -1. `packed` names the weights in NZ storage.
    `nz_lanes` is the last axis of NZ caches that are not int8.
    """

    tokens: int = 5
    hidden: int = 64
    query_rank: int = 64
    heads: int = 2
    nope: int = 16
    latent: int = 32
    rope: int = 16
    blocks: int = 9
    block_size: int = 4
    dtype: np.dtype[Any] = FLOAT32
    mode: int = SPLIT
    int8: bool = False
    packed: tuple[str, ...] = ()
    nz_lanes: int = NZ_LANES
    slots: tuple[int, ...] | None = None
    skipped: tuple[int, ...] = ()

    @property
    def columns(self) -> int:
        """Columns of the query's way up."""
        return self.heads * (self.nope + self.rope)

    @property
    def kv_columns(self) -> int:
        """Columns of the way down that are the key's; they stand in front of the query's."""
        return self.latent + self.rope


REAL = Preprocess(query_rank=1536, nope=128, latent=512, rope=64, blocks=2, block_size=128)
"""The sizes of the device, with a hidden size of 64 and two heads."""
WIDE = Preprocess(tokens=65, heads=4, latent=512, blocks=17, mode=NZ_INT8)
"""Enough int8 results that one token may differ: a short type that rounds another way in the middle moves its row."""


def build(call: Preprocess, rng: np.random.Generator) -> Inputs:
    """Inputs of one call: rows of unit size, gains near 1, cos and sin with unequal halves, caches that are full."""
    dtype = call.dtype
    down = call.kv_columns + call.query_rank
    inputs: Inputs = {
        "input": normal(rng, (call.tokens, call.hidden), dtype),
        "gamma_0": gain(rng, call.hidden, dtype),
        "wdqkv": normal(rng, (down, call.hidden), dtype, call.hidden**-0.5),
        "gamma_1": gain(rng, call.query_rank, dtype),
        "wuq": normal(rng, (call.columns, call.query_rank), dtype, call.query_rank**-0.5),
        "gamma_2": gain(rng, call.latent, dtype),
        "cos": rng.uniform(-1, 1, (call.tokens, call.rope)).astype(dtype),
        "sin": rng.uniform(-1, 1, (call.tokens, call.rope)).astype(dtype),
        "wuk": normal(rng, (call.heads, call.nope, call.latent), dtype, call.nope**-0.5),
        "slot_mapping": slots(call, rng),
    }
    if call.int8:
        quantise(call, inputs, rng)
    inputs |= caches(call, rng)
    if call.mode == NZ_INT8:
        inputs["ctkv_scale"] = np.array([0.03], dtype)
        inputs["q_nope_scale"] = np.linspace(25, 45, call.heads).astype(dtype)
    for name in call.packed:
        inputs[name] = pack_uk(inputs[name]) if name == "wuk" else pack(inputs[name])
    return inputs


def gain(rng: np.random.Generator, size: int, dtype: np.dtype[Any]) -> Array:
    return (1 + 0.1 * rng.standard_normal(size)).astype(dtype)


def slots(call: Preprocess, rng: np.random.Generator) -> NDArray[np.int32]:
    if call.slots is not None:
        return np.array(call.slots, np.int32)
    capacity = call.blocks * call.block_size
    index = rng.permutation(max(capacity, call.tokens))[: call.tokens].astype(np.int32)
    index[list(call.skipped)] = -1
    return index


def quantise(call: Preprocess, inputs: Inputs, rng: np.random.Generator) -> None:
    """Makes the weights int8; the column scales undo the size of the int8 values."""
    stages = (("wdqkv", call.hidden, 0.03, 5), ("wuq", call.query_rank, -0.025, -7))
    for stage, (weight, depth, quant_scale, quant_offset) in enumerate(stages):
        columns = inputs[weight].shape[0]
        size = INT8_SPREAD / abs(quant_scale) * depth**0.5
        inputs[weight] = rng.integers(-127, 128, (columns, depth)).astype(np.int8)
        inputs[f"beta_{stage}"] = normal(rng, (depth,), call.dtype, 0.3)
        inputs[f"quant_scale_{stage}"] = np.array([quant_scale], call.dtype)
        inputs[f"quant_offset_{stage}"] = np.array([quant_offset], np.int8)
        inputs[f"descale_{stage}"] = (rng.uniform(0.5, 1.5, columns) / size).astype(np.float32)
        inputs[f"bias_{stage}"] = (0.3 * size * rng.standard_normal((1, columns))).astype(np.int32)


def caches(call: Preprocess, rng: np.random.Generator) -> Inputs:
    """The caches in the shape of the mode; mode 0 has one only."""
    pages = (call.blocks, call.block_size, 1)
    lanes = call.nz_lanes
    if call.mode == JOINED:
        return {"kv_cache": normal(rng, (*pages, call.kv_columns), call.dtype)}
    if call.mode == SPLIT:
        return {
            "kv_cache": normal(rng, (*pages, call.latent), call.dtype),
            "kv_cache_rope": normal(rng, (*pages, call.rope), call.dtype),
        }
    if call.mode == NZ_INT8:
        shape = (call.blocks, call.latent // NZ_LANES_INT8, call.block_size, NZ_LANES_INT8)
        latent: Array = rng.integers(-128, 128, shape).astype(np.int8)
    else:
        latent = normal(rng, (call.blocks, call.latent // lanes, call.block_size, lanes), call.dtype)
    rope = (call.blocks, call.rope // lanes, call.block_size, lanes)
    return {"kv_cache": latent, "kv_cache_rope": normal(rng, rope, call.dtype)}


def pack(weight: Array) -> Array:
    """FRACTAL_NZ storage (k / w0, n, w0) of an (n, k) matrix."""
    n, k = weight.shape
    w0 = 32 // weight.itemsize
    return np.ascontiguousarray(weight.reshape(n, k // w0, w0).swapaxes(0, 1))


def pack_uk(weight: Array) -> Array:
    """The storage (N, latent / w0, nope, w0) of the heads' matrices (nope, latent)."""
    heads, nope, latent = weight.shape
    w0 = 32 // weight.itemsize
    return np.ascontiguousarray(weight.reshape(heads, nope, latent // w0, w0).swapaxes(1, 2))


def case(
    name: str,
    call: Preprocess,
    *edits: Edit,
    outputs: tuple[str, ...] = (),
    may_tie: bool = False,
    **attributes: Any,
) -> Case:
    """A case; `edits` change the inputs that `build` made. int8 inputs are drawn until none is near a rounding tie."""

    def make(rng: np.random.Generator) -> Mapping[str, Array]:
        while True:
            inputs = build(call, rng)
            for edit in edits:
                edit(inputs)
            if not call.int8 or may_tie or tie_distance(inputs, attributes) > NEAR_TIE:
                return inputs

    return Case(name, OPERATOR, make, {"cache_mode": call.mode, **attributes}, outputs)
