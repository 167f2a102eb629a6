"""Cases of MlaPreprocess, with floating weights and with int8 weights.

Sizes are small and free (the device's fixed sizes are the business of `check`), except in the cases called `real_*`
and in the published example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .case import BFLOAT16, FLOAT16, FLOAT32, FLOAT_TYPES, Case
from .mla_preprocess_calls import (
    JOINED,
    MODES,
    NZ,
    NZ_INT8,
    REAL,
    SPLIT,
    WEIGHTS,
    WIDE,
    Edit,
    Inputs,
    Preprocess,
    case,
)

__all__ = ["CASES"]

NZ_ROWS = 16


def scaled(name: str, factor: float) -> Edit:
    def edit(inputs: Inputs) -> None:
        array = inputs[name]
        inputs[name] = (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)

    return edit


def without(*names: str) -> Edit:
    def edit(inputs: Inputs) -> None:
        for name in names:
            del inputs[name]

    return edit


def empty(*names: str) -> Edit:
    """A tensor of shape (0) in place of the input, present or not; it means the same as no input."""

    def edit(inputs: Inputs) -> None:
        for name in names:
            dtype = inputs[name].dtype if name in inputs else PLACEHOLDER_TYPES.get(name, inputs["input"].dtype)
            inputs[name] = np.zeros(0, dtype)

    return edit


PLACEHOLDER_TYPES: Mapping[str, Any] = {
    "quant_offset_0": np.int8,
    "quant_offset_1": np.int8,
    "descale_0": np.float32,
    "descale_1": np.float32,
    "bias_0": np.int32,
    "bias_1": np.int32,
}
QUANTISATION = tuple(
    f"{name}_{stage}" for stage in (0, 1) for name in ("beta", "quant_scale", "quant_offset", "descale", "bias")
)


def unused_quantisation(inputs: Inputs) -> None:
    """Floating weights know nothing of these, nor of the first gain."""
    columns, hidden = inputs["wdqkv"].shape
    up, rank = inputs["wuq"].shape
    dtype = inputs["input"].dtype
    inputs["gamma_0"] = np.full(hidden, 3, dtype)
    for stage, (depth, width) in enumerate(((hidden, columns), (rank, up))):
        inputs[f"beta_{stage}"] = np.full(depth, 2, dtype)
        inputs[f"quant_scale_{stage}"] = np.array([0.5], dtype)
        inputs[f"quant_offset_{stage}"] = np.array([9], np.int8)
        inputs[f"descale_{stage}"] = np.full(width, 7, np.float32)
        inputs[f"bias_{stage}"] = np.full((1, width), 1000, np.int32)


def flat_bias(inputs: Inputs) -> None:
    """(n) in place of (1, n)."""
    inputs["bias_0"] = inputs["bias_0"].reshape(-1)
    inputs["bias_1"] = inputs["bias_1"].reshape(-1)


def int64_descale(upper: int = 0) -> Edit:
    """The bits of the float32 scales in the lower half of an int64, below the bits `upper`."""

    def edit(inputs: Inputs) -> None:
        for name in ("descale_0", "descale_1"):
            bits = inputs[name].view(np.uint32).astype(np.int64)
            inputs[name] = bits + (np.int64(upper) << np.int64(32))

    return edit


def negative_descale(inputs: Inputs) -> None:
    inputs["descale_0"][::3] *= -1
    inputs["descale_1"][::2] *= -1


def sign_extended_descale(inputs: Inputs) -> None:
    """int64 made from the bits as int32, so that negative scales fill the upper half with ones."""
    negative_descale(inputs)
    for name in ("descale_0", "descale_1"):
        inputs[name] = inputs[name].view(np.int32).astype(np.int64)


def fractals_in_four_axes(inputs: Inputs) -> None:
    """(k / w0, n / 16, 16, w0): the same memory as (k / w0, n, w0)."""
    for name in ("wdqkv", "wuq"):
        k, n, w0 = inputs[name].shape
        inputs[name] = inputs[name].reshape(k, n // NZ_ROWS, NZ_ROWS, w0)


def halves_to_even(inputs: Inputs) -> None:
    """Without a norm: values that lie on a tie exactly, in any order of float maths, on both sides of saturation."""
    count = inputs["input"].size
    halves = (np.arange(count) - count // 2) + 0.5
    inputs["input"] = (halves / 32).reshape(inputs["input"].shape).astype(inputs["input"].dtype)
    inputs["quant_scale_0"] = np.array([1 / 32], inputs["input"].dtype)


def single_scale(name: str, value: float) -> Edit:
    def edit(inputs: Inputs) -> None:
        inputs[name] = np.full(inputs[name].shape, value, inputs[name].dtype)

    return edit


def signed_head_scales(inputs: Inputs) -> None:
    """Far apart, so that a scale of another head shows; a negative one too."""
    inputs["q_nope_scale"] = np.array([1, -40, 7.3, 90], inputs["q_nope_scale"].dtype)


def caches_hold(value: float) -> Edit:
    """Unwritten slots of a fresh cache may hold anything."""

    def edit(inputs: Inputs) -> None:
        for name in ("kv_cache", "kv_cache_rope"):
            if name in inputs and inputs[name].dtype != np.int8:
                inputs[name][:] = value

    return edit


def row(token: int, value: float) -> Edit:
    def edit(inputs: Inputs) -> None:
        inputs["input"][token] = value

    return edit


def rope_cache_that_is_not_used(inputs: Inputs) -> None:
    blocks, block_size = inputs["kv_cache"].shape[:2]
    inputs["kv_cache_rope"] = np.ones((blocks, block_size, 1, inputs["cos"].shape[1]), inputs["input"].dtype)


def name_of(call: Preprocess, *parts: str) -> str:
    return "_".join([("int8" if call.int8 else "float"), f"mode{call.mode}", *parts])


def in_every_mode(call: Preprocess) -> list[Preprocess]:
    """`call` in the four cache modes, mode 2 with more results."""
    return [replace(call, mode=mode, latent=WIDE.latent if mode == NZ_INT8 else call.latent) for mode in MODES]


def forms(base: Preprocess) -> list[Case]:
    """Each type in each mode, with the weights as matrices and packed, together and one by one."""
    found = []
    for type_name, dtype in FLOAT_TYPES.items():
        narrow = replace(base, dtype=dtype, tokens=9, heads=4)
        wide = replace(WIDE, dtype=dtype, int8=base.int8)
        for call in [*(replace(narrow, mode=mode) for mode in (JOINED, SPLIT, NZ)), wide]:
            found += [
                case(name_of(call, type_name), call),
                case(name_of(call, type_name, "packed"), replace(call, packed=WEIGHTS)),
            ]
    for name in WEIGHTS:
        call = replace(base, dtype=FLOAT16, packed=(name,))
        found.append(case(name_of(call, "only", name, "packed"), call))
    packed = replace(base, packed=WEIGHTS)
    found.append(case(name_of(packed, "fractals_in_four_axes"), packed, fractals_in_four_axes))
    for mode in (NZ_INT8, NZ):
        call = replace(base, mode=mode, nz_lanes=8)
        found.append(case(name_of(call, "caches_of_8_lanes"), call))
    return found


def sizes(base: Preprocess) -> list[Case]:
    found = []
    for call in in_every_mode(base):
        found += [
            case(name_of(call, f"tokens_{t}"), replace(call, tokens=t))
            for t in (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)
        ]
        found += [
            case(name_of(call, f"blocks_{blocks}_of_{size}"), replace(call, blocks=blocks, block_size=size))
            for blocks, size in ((5, 1), (4, 2), (2, 3), (1, 7), (2, 16), (1, 17), (2, 128))
        ]
        found += [case(name_of(call, f"heads_{n}"), replace(call, heads=n)) for n in (1, 2, 3, 4, 5, 8)]
    found += [
        case(name_of(base, f"hidden_{h}"), replace(base, hidden=h))
        for h in (1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 65, 96, 128, 160, 224)
    ]
    found += [
        case(name_of(base, f"hidden_{h}_packed"), replace(base, hidden=h, packed=WEIGHTS, dtype=FLOAT16))
        for h in (32, 64, 96, 128, 160, 224)
    ]
    found += [case(name_of(base, f"query_rank_{r}"), replace(base, query_rank=r)) for r in (1, 2, 3, 5, 7, 31, 33)]
    found += [case(name_of(base, f"nope_{d}"), replace(base, nope=d)) for d in (1, 2, 3, 5, 7, 15, 17)]
    found += [case(name_of(base, f"latent_{c}"), replace(base, latent=c)) for c in (1, 2, 3, 5, 7, 31, 33)]
    found += [case(name_of(base, f"rope_{r}"), replace(base, rope=r)) for r in (2, 4, 6, 10, 14, 32, 34)]
    return found


def slots_and_emptiness(base: Preprocess) -> list[Case]:
    found = []
    for call in in_every_mode(base):
        full = replace(call, tokens=12, blocks=3)
        found += [
            case(name_of(call, "first_skipped"), replace(call, skipped=(0,))),
            case(name_of(call, "some_skipped"), replace(call, skipped=(1, 3))),
            case(name_of(call, "all_skipped"), replace(call, skipped=(0, 1, 2, 3, 4))),
            case(name_of(call, "one_token_skipped"), replace(call, tokens=1, skipped=(0,))),
            case(name_of(call, "other_negatives"), replace(call, slots=(-1, 3, -2, -36, 35))),
            case(name_of(call, "every_slot"), full),
            case(name_of(call, "descending"), replace(call, slots=(35, 8, 5, 4, 0))),
            case(name_of(call, "empty_cache"), replace(call, blocks=0, slots=(-1,) * 5)),
            case(name_of(call, "empty_t_and_cache"), replace(call, tokens=0, blocks=0)),
            case(name_of(call, "nan_in_unwritten_slots"), replace(call, skipped=(1,)), caches_hold(np.nan)),
            case(name_of(call, "inf_in_unwritten_slots"), replace(call, skipped=(1,)), caches_hold(-np.inf)),
        ]
    return found


def attributes_and_numerics(base: Preprocess) -> list[Case]:
    found = []
    for type_name, dtype in FLOAT_TYPES.items():
        call = replace(base, dtype=dtype)
        found += [
            case(name_of(call, type_name, "small_input"), call, scaled("input", 1e-3)),
            case(name_of(call, type_name, "large_input"), call, scaled("input", 800)),
            case(name_of(call, type_name, "zero_row"), call, row(1, 0)),
        ]
    joined = replace(base, mode=JOINED)
    found += [
        case(name_of(base, "epsilon_is_ignored"), base, scaled("input", 1e-3), epsilon=1.0),
        case(
            name_of(base, "inert_attributes"),
            base,
            wdq_dim=128,
            q_rope_dim=0,
            k_rope_dim=0,
            epsilon=1e-5,
            transpose_wdq=0,
            transpose_wuq=0,
            transpose_wuk=0,
            wdkv_split_count=3,
        ),
        case(name_of(base, "defaults_said"), base, quant_mode=0, do_rms_norm=1, q_rotary_coeff=2, k_rotary_coeff=2),
        case(name_of(base, "without_rope_outputs"), base, outputs=("q_out", "kv_cache_out")),
        case(name_of(base, "without_rope_query"), base, outputs=("q_out", "kv_cache_out", "kr_cache_out")),
        case(name_of(joined, "empty_rope_cache"), joined, empty("kv_cache_rope")),
        case(name_of(joined, "rope_cache_is_not_used"), joined, rope_cache_that_is_not_used),
        case(name_of(base, "empty_output_scales"), base, empty("ctkv_scale", "q_nope_scale")),
    ]
    wide = replace(WIDE, int8=base.int8)
    for type_name, dtype in FLOAT_TYPES.items():
        call = replace(wide, dtype=dtype)
        found += [
            case(name_of(call, type_name, "scale_for_each_head"), call, signed_head_scales),
            case(name_of(call, type_name, "q_saturates"), call, single_scale("q_nope_scale", 150)),
            case(name_of(call, type_name, "ckv_saturates"), call, single_scale("ctkv_scale", 0.0071)),
            case(name_of(call, type_name, "ckv_scale_of_a_power_of_two"), call, single_scale("ctkv_scale", 2**-5)),
        ]
    for call in in_every_mode(replace(REAL, int8=base.int8, tokens=3, skipped=(1,))):
        # The many short roundings between two floating products move more int8 results than one in a thousand.
        exact = base.int8 or call.mode != NZ_INT8
        for type_name, dtype in FLOAT_TYPES.items():
            if exact or dtype == FLOAT32:
                typed = replace(call, dtype=dtype)
                found.append(case(name_of(typed, "real", type_name), typed))
        packed = replace(call, dtype=FLOAT16 if exact else FLOAT32, packed=WEIGHTS)
        found.append(case(name_of(packed, "real_packed"), packed))
    return found


def floating() -> list[Case]:
    """Cases of floating weights only: what they ignore, and NaN, which no rounding to int8 defines."""
    base = Preprocess()
    found = []
    for call in in_every_mode(base):
        found += [
            case(name_of(call, "without_first_norm"), call, do_rms_norm=0),
            case(name_of(call, "placeholders"), call, empty("gamma_0", *QUANTISATION)),
        ]
        if call.mode != NZ_INT8:
            found += [
                case(name_of(call, "nan_in_skipped_token"), replace(call, skipped=(1,)), row(1, np.nan)),
                case(name_of(call, "nan_in_one_token"), call, row(2, np.nan)),
            ]
    for type_name, dtype in FLOAT_TYPES.items():
        call = replace(base, dtype=dtype)
        found += [
            case(name_of(call, type_name, "unused_quantisation"), call, unused_quantisation),
            case(name_of(call, type_name, "placeholders"), call, empty("gamma_0", *QUANTISATION), do_rms_norm=0),
        ]
    return found


def static_int8() -> list[Case]:
    """Cases of int8 weights only: their optional inputs, both encodings of the scales, rounding and saturation."""
    base = Preprocess(int8=True)
    found = []
    optional = ("beta_0", "beta_1", "bias_0", "bias_1", "quant_offset_0", "quant_offset_1")
    for name in optional:
        found += [
            case(name_of(base, "without", name), base, without(name)),
            case(name_of(base, "empty", name), base, empty(name)),
        ]
    for call in in_every_mode(base):
        found += [
            case(name_of(call, "without_optionals"), call, without(*optional)),
            case(name_of(call, "empty_optionals"), call, empty(*optional)),
            case(name_of(call, "flat_bias"), call, flat_bias),
            case(name_of(call, "without_first_norm"), call, do_rms_norm=0),
            case(name_of(call, "without_first_norm_placeholders"), call, empty("gamma_0", "beta_0"), do_rms_norm=0),
        ]
        half = replace(call, dtype=FLOAT16)
        found += [
            case(name_of(call, "int64_descale"), half, int64_descale()),
            case(name_of(call, "int64_descale_packed"), replace(half, packed=WEIGHTS), int64_descale()),
        ]
    half = replace(base, dtype=FLOAT16)
    short = replace(base, dtype=BFLOAT16)
    found += [
        case(name_of(half, "int64_descale_upper_bits"), half, int64_descale(0x5A5A5A5A)),
        case(name_of(half, "int64_descale_sign_extended"), half, sign_extended_descale),
        case(name_of(half, "int64_descale_negative"), half, negative_descale, int64_descale()),
        case(name_of(base, "int64_descale_float32"), base, int64_descale()),
        case(name_of(base, "negative_descale"), base, negative_descale),
        case(name_of(half, "float16_without_first_norm"), half, do_rms_norm=0),
        case(name_of(short, "bfloat16_without_first_norm"), short, do_rms_norm=0),
        case(name_of(base, "first_quantisation_saturates"), base, single_scale("quant_scale_0", 0.007)),
        case(name_of(base, "second_quantisation_saturates"), base, single_scale("quant_scale_1", 0.0051)),
        case(name_of(base, "coarse_quantisation"), base, single_scale("quant_scale_0", 2.7)),
        case(name_of(base, "extreme_offsets"), base, single_scale("quant_offset_0", -128)),
        case(name_of(base, "offsets_of_127"), base, single_scale("quant_offset_1", 127)),
        case(name_of(base, "small_projection"), base, scaled("descale_0", 1e-3), scaled("descale_1", 1e-3)),
        case(name_of(base, "epsilon_of_later_norms_is_ignored"), base, scaled("descale_0", 1e-3), epsilon=1.0),
    ]
    for type_name, dtype in FLOAT_TYPES.items():
        call = replace(base, dtype=dtype)
        found.append(
            case(name_of(call, type_name, "halves_to_even"), call, halves_to_even, may_tie=True, do_rms_norm=0)
        )
    return found


def table(base: Preprocess) -> list[Case]:
    return forms(base) + sizes(base) + slots_and_emptiness(base) + attributes_and_numerics(base)


CASES = table(Preprocess()) + floating() + table(Preprocess(int8=True)) + static_int8()
