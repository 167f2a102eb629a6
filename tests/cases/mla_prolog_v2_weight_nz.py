"""Cases of MlaPrologV2WeightNz.

Sizes are small and free (the device's fixed sizes are the business of `check`), except in the cases called `real_*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import Array

from .case import BFLOAT16, FLOAT16, FLOAT32, FLOAT_TYPES, Case, normal

__all__ = ["CASES"]

OPERATOR = "MlaPrologV2WeightNz"
INT8 = np.dtype(np.int8)
NZ_ROWS = 16


@dataclass(frozen=True)
class Prolog:
    """The sizes and types of one call, and where its tokens go.

    `leading` is (T,) or (B, S). `slots` None draws distinct slots; `skipped` tokens get a negative slot. `packed` names
    the weights that come in rank-4 NZ storage.
    """

    leading: tuple[int, ...] = (5,)
    hidden: int = 32
    query_rank: int = 48
    heads: int = 2
    nope: int = 16
    latent: int = 32
    rope: int = 16
    blocks: int = 3
    block_size: int = 4
    dtype: np.dtype[Any] = FLOAT32
    packed: tuple[str, ...] = ()
    slots: tuple[int, ...] | None = None
    skipped: tuple[int, ...] = ()
    scenario: str = "no_quant"
    smooth: bool = False

    @property
    def tokens(self) -> int:
        return int(np.prod(self.leading))


REAL = Prolog(hidden=64, query_rank=1536, nope=128, latent=512, rope=64, block_size=16)
"""The sizes of the device, with a hidden size of 64 and two heads."""
ALL_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
Inputs = dict[str, Array]


def build(prolog: Prolog, rng: np.random.Generator) -> Inputs:
    """Inputs of one call: rows of unit size, gains near 1, cos and sin with unequal halves, a cache that is full."""
    dtype = prolog.dtype
    columns = prolog.heads * (prolog.nope + prolog.rope)
    down = prolog.latent + prolog.rope
    inputs: Inputs = {
        "token_x": normal(rng, (*prolog.leading, prolog.hidden), dtype),
        "weight_dq": normal(rng, (prolog.hidden, prolog.query_rank), dtype, prolog.hidden**-0.5),
        "weight_uq_qr": normal(rng, (prolog.query_rank, columns), dtype, prolog.query_rank**-0.5),
        "weight_uk": normal(rng, (prolog.heads, prolog.nope, prolog.latent), dtype, prolog.nope**-0.5),
        "weight_dkv_kr": normal(rng, (prolog.hidden, down), dtype, prolog.hidden**-0.5),
        "rmsnorm_gamma_cq": (1 + 0.1 * rng.standard_normal(prolog.query_rank)).astype(dtype),
        "rmsnorm_gamma_ckv": (1 + 0.1 * rng.standard_normal(prolog.latent)).astype(dtype),
        "rope_sin": rng.uniform(-1, 1, (*prolog.leading, prolog.rope)).astype(dtype),
        "rope_cos": rng.uniform(-1, 1, (*prolog.leading, prolog.rope)).astype(dtype),
        "cache_index": slots(prolog, rng).reshape(prolog.leading),
        "kv_cache": normal(rng, (prolog.blocks, prolog.block_size, 1, prolog.latent), dtype),
        "kr_cache": normal(rng, (prolog.blocks, prolog.block_size, 1, prolog.rope), dtype),
    }
    if prolog.scenario != "no_quant":
        quantise(prolog, inputs, rng)
    for name in prolog.packed:
        inputs[name] = pack(inputs[name])
    return inputs


def slots(prolog: Prolog, rng: np.random.Generator) -> NDArray[np.int64]:
    if prolog.slots is not None:
        return np.array(prolog.slots, np.int64)
    capacity = prolog.blocks * prolog.block_size
    index = rng.permutation(max(capacity, prolog.tokens))[: prolog.tokens].astype(np.int64)
    index[list(prolog.skipped)] = -1
    return index


def pack(weight: Array) -> Array:
    """FRACTAL_NZ storage (n / w0, k / 16, 16, w0) of a (k, n) matrix."""
    k, n = weight.shape
    w0 = 32 // weight.itemsize
    return np.ascontiguousarray(weight.reshape(k // NZ_ROWS, NZ_ROWS, n // w0, w0).transpose(2, 0, 1, 3))


def quantise(prolog: Prolog, inputs: Inputs, rng: np.random.Generator) -> None:
    """Makes the int8 tensors of the scenario and their scales; scales undo the size of the int8 values."""

    def int8(shape: tuple[int, ...]) -> Array:
        return rng.integers(-127, 128, shape).astype(np.int8)

    def scale(shape: tuple[int, ...], size: float) -> Array:
        return (rng.uniform(0.5, 1.5, shape) * size).astype(np.float32)

    spread = 127 * 3**-0.5
    columns = inputs["weight_uq_qr"].shape[1]
    inputs["weight_uq_qr"] = int8(inputs["weight_uq_qr"].shape)
    inputs["dequant_scale_w_uq_qr"] = scale((1, columns), prolog.query_rank**-0.5 / spread)
    if prolog.smooth:
        inputs["smooth_scales_cq"] = scale((1, prolog.query_rank), 1.0)
    if prolog.scenario.startswith("full"):
        inputs["token_x"] = int8(inputs["token_x"].shape)
        inputs["dequant_scale_x"] = scale((prolog.tokens, 1), 1 / spread)
        for weight, name in (("weight_dq", "dequant_scale_w_dq"), ("weight_dkv_kr", "dequant_scale_w_dkv_kr")):
            inputs[weight] = int8(inputs[weight].shape)
            inputs[name] = scale((1, inputs[weight].shape[1]), prolog.hidden**-0.5 / spread)
    if prolog.scenario.endswith("_kv"):
        inputs["kv_cache"] = int8(inputs["kv_cache"].shape)
        inputs["quant_scale_ckv"] = scale((1, prolog.latent), 40.0)
    if prolog.scenario == "partial_quant_kv":
        inputs["kr_cache"] = int8(inputs["kr_cache"].shape)
        inputs["quant_scale_ckr"] = scale((1, prolog.rope), 40.0)


def case(
    name: str,
    prolog: Prolog,
    *,
    edit: Callable[[Inputs], None] | None = None,
    **attributes: Any,
) -> Case:
    """A case; `edit` changes the inputs that `build` made."""

    def make(rng: np.random.Generator) -> Mapping[str, Array]:
        inputs = build(prolog, rng)
        if edit is not None:
            edit(inputs)
        return inputs

    return Case(name, OPERATOR, make, attributes)


def large_activations(inputs: Inputs) -> None:
    """Squares of the projections leave the range of float16."""
    inputs["token_x"] = (inputs["token_x"].astype(np.float32) * 800).astype(inputs["token_x"].dtype)


def small_activations(inputs: Inputs) -> None:
    """Mean squares of the size of the default epsilons, so that those show."""
    inputs["token_x"] = (inputs["token_x"].astype(np.float32) * 0.003).astype(inputs["token_x"].dtype)


def zero_row(inputs: Inputs) -> None:
    inputs["token_x"][1] = 0


def nan_in_cache(inputs: Inputs) -> None:
    """Unwritten slots of a fresh cache may hold anything."""
    inputs["kv_cache"][:] = np.nan
    inputs["kr_cache"][:] = -np.inf


def nan_in_skipped_token(inputs: Inputs) -> None:
    inputs["token_x"][1] = np.nan


def nan_in_one_token(inputs: Inputs) -> None:
    """One token is NaN; its neighbours are not."""
    inputs["token_x"][2] = np.nan


def layouts() -> list[Case]:
    """Each type in both cache modes and both forms of the tokens, with the weights as matrices and packed."""
    found = []
    for type_name, dtype in FLOAT_TYPES.items():
        for mode in ("PA_BSND", "PA_NZ"):
            for form, leading in (("th", (5,)), ("bsh", (2, 3))):
                for storage, packed in (("nd", ()), ("packed", ALL_WEIGHTS)):
                    prolog = Prolog(leading=leading, dtype=dtype, packed=packed)
                    found.append(case(f"{type_name}_{mode.lower()}_{form}_{storage}", prolog, cache_mode=mode))
    return found


def sizes() -> list[Case]:
    tokens = [
        case(f"tokens_{t}", Prolog(leading=(t,), blocks=9, block_size=8))
        for t in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
    ]
    batches = [
        case(f"batch_{b}_by_{s}", Prolog(leading=(b, s), blocks=9, block_size=8))
        for b, s in ((1, 1), (1, 7), (7, 1), (3, 5), (8, 8), (2, 33))
    ]
    heads = [case(f"heads_{n}", Prolog(heads=n)) for n in (1, 3, 5, 7, 8, 9, 16, 17)]
    hidden = [case(f"hidden_{h}", Prolog(hidden=h)) for h in (1, 2, 3, 5, 7, 31, 33, 128)]
    ranks = [case(f"query_rank_{r}", Prolog(query_rank=r)) for r in (1, 2, 3, 5, 7, 31, 33)]
    nope = [case(f"nope_{d}", Prolog(nope=d)) for d in (1, 2, 3, 5, 7, 15, 17)]
    latent = [case(f"latent_{c}", Prolog(latent=c)) for c in (1, 2, 3, 5, 7, 31, 33)]
    rope = [case(f"rope_{r}", Prolog(rope=r)) for r in (2, 4, 6, 10, 14, 32, 34)]
    pages = [
        case(f"blocks_{blocks}_of_{size}", Prolog(blocks=blocks, block_size=size))
        for blocks, size in ((5, 1), (4, 2), (2, 3), (1, 5), (1, 7), (7, 1), (2, 16), (1, 17), (2, 128))
    ]
    nz_pages = [
        case(f"nz_blocks_{blocks}_of_{size}", Prolog(blocks=blocks, block_size=size), cache_mode="PA_NZ")
        for blocks, size in ((5, 1), (4, 2), (2, 3), (1, 7), (2, 16), (1, 17), (2, 128))
    ]
    return tokens + batches + heads + hidden + ranks + nope + latent + rope + pages + nz_pages


def slots_and_emptiness() -> list[Case]:
    found = []
    for mode in ("PA_BSND", "PA_NZ"):
        short = mode.lower()
        found += [
            case(f"{short}_first_skipped", Prolog(skipped=(0,)), cache_mode=mode),
            case(f"{short}_some_skipped", Prolog(leading=(2, 3), skipped=(1, 5)), cache_mode=mode),
            case(f"{short}_all_skipped", Prolog(skipped=(0, 1, 2, 3, 4)), cache_mode=mode),
            case(f"{short}_other_negatives", Prolog(slots=(-1, 3, -2, -12, 11)), cache_mode=mode),
            case(f"{short}_every_slot", Prolog(leading=(12,)), cache_mode=mode),
            case(f"{short}_descending", Prolog(slots=(11, 8, 5, 4, 0)), cache_mode=mode),
            case(f"{short}_empty_t", Prolog(leading=(0,)), cache_mode=mode),
            case(f"{short}_empty_b", Prolog(leading=(0, 3)), cache_mode=mode),
            case(f"{short}_empty_s", Prolog(leading=(2, 0)), cache_mode=mode),
            case(f"{short}_empty_cache", Prolog(blocks=0), cache_mode=mode),
            case(f"{short}_empty_cache_skipped", Prolog(blocks=0, slots=(-1,) * 5), cache_mode=mode),
            case(f"{short}_empty_t_and_cache", Prolog(leading=(0,), blocks=0), cache_mode=mode),
            case(f"{short}_nan_in_unwritten_slots", Prolog(skipped=(1,)), edit=nan_in_cache, cache_mode=mode),
        ]
    return found


def numerics() -> list[Case]:
    found = [
        case("epsilons", Prolog(), rmsnorm_epsilon_cq=1.0, rmsnorm_epsilon_ckv=3.0),
        case("epsilon_cq_only", Prolog(), rmsnorm_epsilon_cq=0.5),
        case("default_epsilons", Prolog(), edit=small_activations),
        case("float16_large_activations", Prolog(dtype=FLOAT16), edit=large_activations),
        case("zero_row", Prolog(), edit=zero_row),
        case("nan_in_skipped_token", Prolog(skipped=(1,)), edit=nan_in_skipped_token),
        case("nan_in_one_token", Prolog(), edit=nan_in_one_token),
    ]
    for name in ALL_WEIGHTS:
        found.append(case(f"only_{name}_packed", Prolog(packed=(name,), dtype=FLOAT16)))
    for type_name, dtype in FLOAT_TYPES.items():
        packed = replace(REAL, dtype=dtype, packed=ALL_WEIGHTS, leading=(3,), skipped=(1,))
        found += [
            case(f"real_{type_name}", replace(REAL, dtype=dtype, leading=(2, 2))),
            case(f"real_{type_name}_packed_pa_nz", packed, cache_mode="PA_NZ"),
        ]
    return found


def quantised() -> list[Case]:
    """The four int8 scenarios; sizes are multiples of 32, the width of an int8 fractal."""
    base = Prolog(query_rank=64, latent=64, rope=32, dtype=BFLOAT16)
    found = []
    for scenario in ("partial_quant", "partial_quant_kv", "full_quant", "full_quant_kv"):
        plain = replace(base, scenario=scenario)
        for mode in ("PA_BSND", "PA_NZ"):
            short = f"{scenario}_{mode.lower()}"
            found += [
                case(f"{short}_th", plain, cache_mode=mode),
                case(f"{short}_bsh_smooth", replace(plain, leading=(2, 3), smooth=True), cache_mode=mode),
                case(f"{short}_packed", replace(plain, packed=ALL_WEIGHTS, smooth=True), cache_mode=mode),
                case(f"{short}_skipped", replace(plain, skipped=(0, 3)), cache_mode=mode),
                case(f"{short}_empty_t", replace(plain, leading=(0,)), cache_mode=mode),
                case(f"{short}_empty_cache", replace(plain, blocks=0), cache_mode=mode),
            ]
        found += [
            case(f"{scenario}_float32", replace(plain, dtype=FLOAT32, smooth=True)),
            case(f"{scenario}_float16", replace(plain, dtype=FLOAT16)),
            case(f"{scenario}_one_token", replace(plain, leading=(1,))),
            case(f"{scenario}_seven_heads", replace(plain, heads=7, leading=(2,))),
            case(f"{scenario}_epsilons", plain, rmsnorm_epsilon_cq=1.0, rmsnorm_epsilon_ckv=3.0),
        ]
        if scenario != "full_quant_kv":
            found.append(case(f"{scenario}_zero_row", plain, edit=zero_row))
    return found


CASES = layouts() + sizes() + slots_and_emptiness() + numerics() + quantised()
