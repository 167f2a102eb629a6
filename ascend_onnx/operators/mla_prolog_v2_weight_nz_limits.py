"""The limits of the device on MlaPrologV2WeightNz.

Source: aclnnMlaPrologV2WeightNz, Shape format field description, shape constraints and scenario tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import onnx_ir as ir

from ascend_onnx.operator import Call, Constraint, Dim
from ascend_onnx.operators.mla_prolog_v2_weight_nz_form import PACKABLE, TENSORS, Form, product, token_dims

__all__ = ["CONSTRAINTS"]

_SEED = "aclnnMlaPrologV2WeightNz"
_SHAPES = f"{_SEED}, Shape format field description"
_TYPES = f"{_SEED}, dtype and shape combinations"
_HIDDEN_SIZES = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
_HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


def _weight(call: Call, name: str) -> tuple[Dim, Dim]:
    """(k, n) of a weight, packed or not; None where unknown."""
    tensor = call.input(name)
    if tensor.rank != 4:
        return tensor.dim(0), tensor.dim(1)
    outer_n, outer_k, inner_k, inner_n = (tensor.dim(axis) for axis in range(4))
    k = outer_k * inner_k if isinstance(outer_k, int) and isinstance(inner_k, int) else None
    n = outer_n * inner_n if isinstance(outer_n, int) and isinstance(inner_n, int) else None
    return k, n


def _other_than(letter: str, expected: str, got: Dim, accepted: Container[int]) -> str | None:
    return f"{letter} must be {expected}, got {got}" if isinstance(got, int) and got not in accepted else None


def _first(sentences: Iterable[str | None]) -> str | None:
    return next((sentence for sentence in sentences if sentence), None)


def _fixed(letter: str, size: int, *places: tuple[str, int]) -> Callable[[Call], str | None]:
    """A limit `letter == size` on the dimensions at `places`, (input, axis) of the unpacked shapes."""

    def broken(call: Call) -> str | None:
        def dim(name: str, axis: int) -> Dim:
            return _weight(call, name)[axis] if name in PACKABLE else call.input(name).dim(axis)

        return _first(
            _other_than(f"{letter} (axis {axis} of {name})", str(size), dim(name, axis), (size,))
            for name, axis in places
        )

    return broken


def _wrong_type(call: Call) -> str | None:
    return _first(
        f"{name} must be bfloat16 (int8 where quantised), got {dtype.name.lower()}"
        for name in TENSORS
        if (dtype := call.input(name).dtype) is not None and dtype not in (ir.DataType.BFLOAT16, ir.DataType.INT8)
    )


_PARTIAL_SCALES = ("dequant_scale_w_uq_qr",)
_FULL_SCALES = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
_SCENARIO_SCALES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    # The inputs that are int8, and the scales that such a call needs.
    (): (),
    ("weight_uq_qr",): _PARTIAL_SCALES,
    ("weight_uq_qr", "kv_cache", "kr_cache"): (*_PARTIAL_SCALES, "quant_scale_ckv", "quant_scale_ckr"),
    ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr"): _FULL_SCALES,
    ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr", "kv_cache"): (*_FULL_SCALES, "quant_scale_ckv"),
}


def _int8_inputs(call: Call) -> tuple[str, ...]:
    return tuple(name for name in TENSORS if call.input(name).dtype == ir.DataType.INT8)


def _unknown_scenario(call: Call) -> str | None:
    if any(call.input(name).dtype is None for name in TENSORS) or _int8_inputs(call) in _SCENARIO_SCALES:
        return None
    known = "; ".join(", ".join(names) or "none" for names in _SCENARIO_SCALES)
    return f"the int8 inputs must be one of the sets [{known}], got {', '.join(_int8_inputs(call))}"


def _wrong_scales(call: Call) -> str | None:
    int8 = _int8_inputs(call)
    needed = _SCENARIO_SCALES.get(int8)
    if needed is None:
        return None
    given = [name for name in call.inputs if "_scale" in name]
    allowed = (*needed, "smooth_scales_cq") if int8 else needed
    return _first(
        [f"{name} is required in this scenario and absent" for name in needed if name not in given]
        + [f"{name} must be absent in this scenario" for name in given if name not in allowed]
    )


def _wrong_rank(call: Call) -> str | None:
    rank = call.input("token_x").rank
    if rank is None:
        return None
    if rank not in (2, 3):
        return f"token_x must be (T, He) or (B, S, He), got rank {rank}"
    expected = {
        "rope_sin": rank,
        "rope_cos": rank,
        "cache_index": rank - 1,
        "kv_cache": 4,
        "kr_cache": 4,
        "weight_uk": 3,
    }
    wrong = [(n, r, got) for n, r in expected.items() if (got := call.input(n).rank) is not None and got != r]
    wrong += [(n, 2, got) for n in PACKABLE if (got := call.input(n).rank) not in (None, 2, 4)]
    return _first(f"{name} must have rank {rank}, got {got}" for name, rank, got in wrong)


def _wrong_tokens(call: Call) -> str | None:
    tokens = call.input("token_x").shape
    if tokens is None:
        return None
    others = {name: (call.input(name).shape or ())[:-1] for name in ("rope_sin", "rope_cos")}
    others["cache_index"] = call.input("cache_index").shape or ()
    return _first(
        f"{name} must have the {expected} tokens of token_x in axis {axis}, got {got}"
        for name, dims in others.items()
        for axis, (expected, got) in enumerate(zip(tokens[:-1], dims, strict=False))
        if isinstance(expected, int) and isinstance(got, int) and expected != got
    )


def _too_many_tokens(call: Call) -> str | None:
    count, letter, limit = call.input("token_x").dim(0), "T", 1048576
    if call.input("token_x").rank == 3:
        letter, limit = "B", 65536
    return f"{letter} must be at most {limit}, got {count}" if isinstance(count, int) and count > limit else None


def _wrong_hidden_size(call: Call) -> str | None:
    sizes = ", ".join(map(str, _HIDDEN_SIZES))
    return _first(
        _other_than("He", f"one of {sizes}", dim, _HIDDEN_SIZES)
        for dim in (call.input("token_x").dim(-1), _weight(call, "weight_dq")[0], _weight(call, "weight_dkv_kr")[0])
    )


def _wrong_head_count(call: Call) -> str | None:
    heads = call.input("weight_uk").dim(0)
    return _other_than("N (axis 0 of weight_uk)", f"one of {', '.join(map(str, _HEAD_COUNTS))}", heads, _HEAD_COUNTS)


def _wrong_query_width(call: Call) -> str | None:
    heads, columns = call.input("weight_uk").dim(0), _weight(call, "weight_uq_qr")[1]
    if not isinstance(heads, int):
        return None
    return _other_than("N * (D + Dr) (axis 1 of weight_uq_qr)", str(heads * 192), columns, (heads * 192,))


def _unequal_sizes(call: Call) -> str | None:
    hidden = call.input("token_x").dim(-1)
    equal = [("He", "token_x", hidden, name, _weight(call, name)[0]) for name in ("weight_dq", "weight_dkv_kr")]
    for axis, letter in enumerate(("BlockNum", "BlockSize")):
        dims = [call.input(name).dim(axis) for name in ("kv_cache", "kr_cache")]
        equal.append((letter, "kv_cache", dims[0], "kr_cache", dims[1]))
    return _first(
        f"{letter} must be the same in {first} and {second}, got {one} and {other}"
        for letter, first, one, second, other in equal
        if isinstance(one, int) and isinstance(other, int) and one != other
    )


def _wrong_scale_shape(call: Call) -> str | None:
    tokens = token_dims(call)
    shapes: dict[str, tuple[Dim, Dim]] = {
        "dequant_scale_x": (None if tokens is None else product(tokens), 1),
        "dequant_scale_w_dq": (1, _weight(call, "weight_dq")[1]),
        "dequant_scale_w_uq_qr": (1, _weight(call, "weight_uq_qr")[1]),
        "dequant_scale_w_dkv_kr": (1, _weight(call, "weight_dkv_kr")[1]),
        "quant_scale_ckv": (1, call.input("kv_cache").dim(3)),
        "quant_scale_ckr": (1, call.input("kr_cache").dim(3)),
        "smooth_scales_cq": (1, call.input("rmsnorm_gamma_cq").dim(0)),
    }
    return _first(
        f"{name} must have the shape {expected}, got {got}"
        for name, expected in shapes.items()
        if (got := call.input(name).shape) is not None and not _may_equal(got, expected)
    )


def _may_equal(got: tuple[Dim, ...], expected: tuple[Dim, ...]) -> bool:
    return len(got) == len(expected) and all(
        one == other or not isinstance(one, int) or not isinstance(other, int)
        for one, other in zip(got, expected, strict=True)
    )


def _empty_weight(call: Call) -> str | None:
    names = (*PACKABLE, "weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
    return _first(
        f"{name} must not be empty, got shape {shape}"
        for name in names
        if (shape := call.input(name).shape) is not None and 0 in shape
    )


def _wrong_block_size(call: Call) -> str | None:
    return _first(
        f"BlockSize (axis 1 of {name}) must be a multiple of 16 from 16 to 1024, got {size}"
        for name in ("kv_cache", "kr_cache")
        if isinstance(size := call.input(name).dim(1), int) and (size % 16 or not 16 <= size <= 1024)
    )


def _unproduced_scale(call: Call) -> str | None:
    if not call.has("dequant_scale_q_nope") or Form.of(call).query_int8:
        return None
    return "dequant_scale_q_nope exists only when token_x and kv_cache are both int8"


CONSTRAINTS = (
    Constraint("type", 161002, _TYPES, _wrong_type),
    Constraint("scenario", 161002, _TYPES, _unknown_scenario),
    Constraint("scale", 161002, _TYPES, _wrong_scales),
    Constraint("unproduced_output", 161002, _TYPES, _unproduced_scale),
    Constraint("rank", 161002, f"{_SEED}, Shape constraints", _wrong_rank),
    Constraint("tokens", 161002, f"{_SEED}, Shape constraints", _wrong_tokens),
    Constraint("sizes", 161002, f"{_SEED}, Shape constraints", _unequal_sizes),
    Constraint("scale_shape", 161002, _TYPES, _wrong_scale_shape),
    Constraint("empty_input", 161002, f"{_SEED}, Parameters", _empty_weight),
    Constraint("token_count", 561002, _SHAPES, _too_many_tokens),
    Constraint("hidden", 561002, _SHAPES, _wrong_hidden_size),
    Constraint("heads", 561002, _SHAPES, _wrong_head_count),
    Constraint(
        "hcq",
        561002,
        _SHAPES,
        _fixed("Hcq", 1536, ("weight_dq", 1), ("weight_uq_qr", 0), ("rmsnorm_gamma_cq", 0)),
    ),
    Constraint(
        "hckv", 561002, _SHAPES, _fixed("Hckv", 512, ("weight_uk", 2), ("rmsnorm_gamma_ckv", 0), ("kv_cache", 3))
    ),
    Constraint("head_dim", 561002, _SHAPES, _fixed("D", 128, ("weight_uk", 1))),
    Constraint("rope_dim", 561002, _SHAPES, _fixed("Dr", 64, ("rope_sin", -1), ("rope_cos", -1), ("kr_cache", 3))),
    Constraint("query_width", 561002, _SHAPES, _wrong_query_width),
    Constraint("kv_width", 561002, _SHAPES, _fixed("Hckv + Dr", 576, ("weight_dkv_kr", 1))),
    Constraint("kv_heads", 561002, _SHAPES, _fixed("Nkv", 1, ("kv_cache", 2), ("kr_cache", 2))),
    Constraint("block_size", 561002, _SHAPES, _wrong_block_size),
)
