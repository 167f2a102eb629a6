"""MlaPrologV2WeightNz: the projections, norms, rotations and cache writes in front of latent attention.

    token_x -> W_DQ -> RmsNorm -> W_UQ|W_QR -> [nope -> W_UK -> query | RoPE -> query_rope]
    token_x -> W_DKV|W_KR -> [RmsNorm -> kv_cache | RoPE -> kr_cache]

Letters: T (or B, S) tokens; He the hidden size; Hcq and Hckv the ranks of query and key-value; N heads; D and Dr the
head sizes without and with rotary embedding. Which tensors are int8 decides the scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from math import prod

import onnx_ir as ir

from ascend_onnx.operator import Attribute, Call, Constraint, Dim, Input, Operator, Output, Product, Tensor
from ascend_onnx.operators.mla_prolog_v2_weight_nz_body import PACKABLE, Form, build_body
from ascend_onnx.operators.mla_prolog_v2_weight_nz_reference import MlaPrologV2WeightNz

__all__ = ["OPERATOR"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
_FLOATS_OR_INT8 = (*_FLOATS, ir.DataType.INT8)
_SCALE = (ir.DataType.FLOAT,)
_TENSORS = (
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
    "rope_sin",
    "rope_cos",
    "kv_cache",
    "kr_cache",
)
_USUAL_OUTPUTS = 4
"""All but dequant_scale_q_nope."""
_SEED = "aclnnMlaPrologV2WeightNz"


def _overload(call: Call) -> str:
    form = Form.of(call)
    parts = [
        "bsh" if form.batched else "th",
        str(call.attributes["cache_mode"]).lower(),
        form.scenario,
        form.float_type.short_name(),
    ]
    types = {name: call.input(name).dtype for name in _TENSORS}
    odd = [
        f"{name}_{dtype.short_name()}"
        for name, dtype in types.items()
        if dtype is not None and dtype not in (form.float_type, ir.DataType.INT8)
    ]
    if form.packed:
        parts += ["packed", *(() if form.packed == PACKABLE else form.packed)]
    parts += odd
    parts += ["smooth"] if call.has("smooth_scales_cq") else []
    parts += [f"{call.output_count}_outputs"] if call.output_count != _USUAL_OUTPUTS else []
    return "_".join(parts)


def _infer(call: Call) -> Mapping[str, Tensor]:
    form = Form.of(call)
    tokens = _token_dims(call)
    heads, rank, rope = call.input("weight_uk").dim(0), call.input("weight_uk").dim(2), call.input("rope_sin").dim(-1)
    float_type = call.input("weight_uk").dtype
    query = rope_part = scale = None
    if tokens is not None:
        query, rope_part = (*tokens, heads, rank), (*tokens, heads, rope)
        scale = (_product(tokens), heads, 1) if form.query_int8 else (0,)
    return {
        "query": Tensor(ir.DataType.INT8 if form.query_int8 else float_type, query),
        "query_rope": Tensor(float_type, rope_part),
        "kv_cache_out": call.input("kv_cache"),
        "kr_cache_out": call.input("kr_cache"),
        "dequant_scale_q_nope": Tensor(ir.DataType.FLOAT, scale),
    }


def _token_dims(call: Call) -> tuple[Dim, ...] | None:
    """(T,) or (B, S), each from the first of the inputs that knows it."""
    shapes = [call.input(name).shape for name in ("token_x", "rope_sin", "rope_cos")]
    known = [shape[:-1] for shape in shapes if shape is not None]
    index = call.input("cache_index").shape
    known += [] if index is None else [index]
    if not known:
        return None
    return tuple(next((d for d in dims if d is not None), None) for dims in zip(*known, strict=False))


def _product(dims: tuple[Dim, ...]) -> Dim:
    if all(isinstance(dim, int) for dim in dims):
        return prod(dim for dim in dims if isinstance(dim, int))
    return None if None in dims else "*".join(map(str, dims))


# --- The limits of the device -----------------------------------------------------------------------------------------

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
        for name in _TENSORS
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
    return tuple(name for name in _TENSORS if call.input(name).dtype == ir.DataType.INT8)


def _unknown_scenario(call: Call) -> str | None:
    if any(call.input(name).dtype is None for name in _TENSORS) or _int8_inputs(call) in _SCENARIO_SCALES:
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
    expected = heads * 192 if isinstance(heads, int) else columns
    return f"weight_uq_qr must have N * 192 = {expected} columns, got {columns}" if _differ(columns, expected) else None


def _differ(got: Dim, expected: Dim) -> bool:
    return isinstance(got, int) and isinstance(expected, int) and got != expected


def _wrong_block_size(call: Call) -> str | None:
    return _first(
        f"BlockSize (axis 1 of {name}) must be a multiple of 16 from 16 to 1024, got {size}"
        for name in ("kv_cache", "kr_cache")
        if isinstance(size := call.input(name).dim(1), int) and (size % 16 or not 16 <= size <= 1024)
    )


def _wrong_cache_mode(call: Call) -> str | None:
    mode = call.attributes["cache_mode"]
    return None if mode in ("PA_BSND", "PA_NZ") else f"cache_mode must be PA_BSND or PA_NZ, got {mode}"


def _unproduced_scale(call: Call) -> str | None:
    if not call.has("dequant_scale_q_nope") or Form.of(call).query_int8:
        return None
    return "dequant_scale_q_nope exists only when token_x and kv_cache are both int8"


_CONSTRAINTS = (
    Constraint("types", 161002, _TYPES, _wrong_type),
    Constraint("scenario", 161002, _TYPES, _unknown_scenario),
    Constraint("scales", 161002, _TYPES, _wrong_scales),
    Constraint("dequant-scale-q-nope", 161002, _TYPES, _unproduced_scale),
    Constraint("ranks", 161002, f"{_SEED}, Shape constraints", _wrong_rank),
    Constraint("tokens-agree", 161002, f"{_SEED}, Shape constraints", _wrong_tokens),
    Constraint("cache-mode", 561002, f"{_SEED}, cacheModeOptional", _wrong_cache_mode),
    Constraint("token-count", 561002, _SHAPES, _too_many_tokens),
    Constraint("hidden-size", 561002, _SHAPES, _wrong_hidden_size),
    Constraint("head-count", 561002, _SHAPES, _wrong_head_count),
    Constraint(
        "hcq",
        561002,
        _SHAPES,
        _fixed("Hcq", 1536, ("weight_dq", 1), ("weight_uq_qr", 0), ("rmsnorm_gamma_cq", 0)),
    ),
    Constraint(
        "hckv", 561002, _SHAPES, _fixed("Hckv", 512, ("weight_uk", 2), ("rmsnorm_gamma_ckv", 0), ("kv_cache", 3))
    ),
    Constraint("head-size", 561002, _SHAPES, _fixed("D", 128, ("weight_uk", 1))),
    Constraint("rope-size", 561002, _SHAPES, _fixed("Dr", 64, ("rope_sin", -1), ("rope_cos", -1), ("kr_cache", 3))),
    Constraint("query-width", 561002, _SHAPES, _wrong_query_width),
    Constraint("kv-width", 561002, _SHAPES, _fixed("Hckv + Dr", 576, ("weight_dkv_kr", 1))),
    Constraint("kv-heads", 561002, _SHAPES, _fixed("Nkv", 1, ("kv_cache", 2), ("kr_cache", 2))),
    Constraint("block-size", 561002, _SHAPES, _wrong_block_size),
)


# --- The operator -----------------------------------------------------------------------------------------------------

OPERATOR = Operator(
    name="MlaPrologV2WeightNz",
    description="Query and key-value projections of multi-head latent attention: low-rank projections, RmsNorm, the "
    "absorbed W_UK, rotary embedding (interleaved in, half-split out) and the write of the new latents into the paged "
    "caches. Tokens with a negative cache_index are not written.",
    source=_SEED,
    aclnn="aclnnMlaPrologV2WeightNz",
    inputs=(
        Input("token_x", _FLOATS_OR_INT8, "(T, He) or (B, S, He)", "The hidden states."),
        Input("weight_dq", _FLOATS_OR_INT8, "(He, Hcq)", "W_DQ, also as FRACTAL_NZ storage of rank 4."),
        Input(
            "weight_uq_qr",
            _FLOATS_OR_INT8,
            "(Hcq, N * (D + Dr))",
            "W_UQ and W_QR, head by head [D | Dr], also as FRACTAL_NZ storage of rank 4.",
        ),
        Input("weight_uk", _FLOATS, "(N, D, Hckv)", "W_UK, the absorbed key up-projection."),
        Input(
            "weight_dkv_kr",
            _FLOATS_OR_INT8,
            "(He, Hckv + Dr)",
            "W_DKV and W_KR, [Hckv | Dr], also as FRACTAL_NZ storage of rank 4.",
        ),
        Input("rmsnorm_gamma_cq", _FLOATS, "(Hcq)", "Weight of the norm of the query latent."),
        Input("rmsnorm_gamma_ckv", _FLOATS, "(Hckv)", "Weight of the norm of the key-value latent."),
        Input("rope_sin", _FLOATS, "(T, Dr) or (B, S, Dr)", "Sines of the rotary embedding."),
        Input("rope_cos", _FLOATS, "(T, Dr) or (B, S, Dr)", "Cosines of the rotary embedding."),
        Input("cache_index", (ir.DataType.INT64,), "(T) or (B, S)", "The cache slot of each token; negative: none."),
        Input("kv_cache", _FLOATS_OR_INT8, "(BlockNum, BlockSize, 1, Hckv)", "The paged cache of latents."),
        Input("kr_cache", _FLOATS_OR_INT8, "(BlockNum, BlockSize, 1, Dr)", "The paged cache of rotary keys."),
        Input("dequant_scale_x", _SCALE, "(T, 1) or (B * S, 1)", "Scale per token of an int8 token_x.", optional=True),
        Input("dequant_scale_w_dq", _SCALE, "(1, Hcq)", "Scale per column of an int8 weight_dq.", optional=True),
        Input(
            "dequant_scale_w_uq_qr",
            _SCALE,
            "(1, N * (D + Dr))",
            "Scale per column of an int8 weight_uq_qr.",
            optional=True,
        ),
        Input(
            "dequant_scale_w_dkv_kr",
            _SCALE,
            "(1, Hckv + Dr)",
            "Scale per column of an int8 weight_dkv_kr.",
            optional=True,
        ),
        Input(
            "quant_scale_ckv",
            _SCALE,
            "(1, Hckv)",
            "Factor per lane for an int8 kv_cache; only the first counts when token_x is int8 too.",
            optional=True,
        ),
        Input("quant_scale_ckr", _SCALE, "(1, Dr)", "Factor per lane for an int8 kr_cache.", optional=True),
        Input(
            "smooth_scales_cq",
            _SCALE,
            "(1, Hcq)",
            "Factor per lane of the query latent before its dynamic quantisation.",
            optional=True,
        ),
    ),
    outputs=(
        Output("query", _FLOATS_OR_INT8, "(T, N, Hckv) or (B, S, N, Hckv)", "The query in the latent space."),
        Output("query_rope", _FLOATS, "(T, N, Dr) or (B, S, N, Dr)", "The rotary part of the query."),
        Output("kv_cache_out", _FLOATS_OR_INT8, "as kv_cache", "kv_cache with the new latents."),
        Output("kr_cache_out", _FLOATS_OR_INT8, "as kr_cache", "kr_cache with the new rotary keys."),
        Output(
            "dequant_scale_q_nope",
            _SCALE,
            "(T, N, 1) or (B * S, N, 1)",
            "Scale per token and head of an int8 query.",
            optional=True,
        ),
    ),
    attributes=(
        Attribute("rmsnorm_epsilon_cq", ir.AttributeType.FLOAT, "Epsilon of the query norm.", default=1e-5),
        Attribute("rmsnorm_epsilon_ckv", ir.AttributeType.FLOAT, "Epsilon of the key-value norm.", default=1e-5),
        Attribute(
            "cache_mode",
            ir.AttributeType.STRING,
            "Order inside a cache block: rows (PA_BSND) or fractals (PA_NZ).",
            default="PA_BSND",
            choices=("PA_BSND", "PA_NZ"),
        ),
    ),
    infer=_infer,
    overload=_overload,
    body=build_body,
    reference=MlaPrologV2WeightNz,
    products=frozenset({Product.A2, Product.A3}),
    constraints=_CONSTRAINTS,
)
