"""What the call of MlaPrologV2WeightNz is, as far as body, inference and limits depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ascend_onnx.operator import Call, Dim

__all__ = ["PACKABLE", "TENSORS", "Form", "product", "token_dims"]

TENSORS = (
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
"""The inputs whose type is the model's float type or int8."""
PACKABLE = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
"""The weights that may come in FRACTAL_NZ storage."""


@dataclass(frozen=True)
class Form:
    """The facts of a call that its body depends on."""

    batched: bool
    """token_x is (B, S, He) rather than (T, He)."""
    nz_cache: bool
    """Blocks of the caches are stored as (H / c0, BlockSize, c0)."""
    float_type: ir.DataType
    token_int8: bool
    query_weight_int8: bool
    kv_cache: ir.DataType
    kr_cache: ir.DataType
    packed: tuple[str, ...]
    """The weights that come in FRACTAL_NZ storage, (n / w0, k / 16, 16, w0)."""

    @classmethod
    def of(cls, call: Call) -> Form:
        def is_int8(name: str) -> bool:
            return call.input(name).dtype == ir.DataType.INT8

        float_type = call.input("weight_uk").dtype or ir.DataType.FLOAT
        return cls(
            batched=call.input("token_x").rank == 3,
            nz_cache=call.attributes["cache_mode"] == "PA_NZ",
            float_type=float_type,
            token_int8=is_int8("token_x"),
            query_weight_int8=is_int8("weight_uq_qr"),
            kv_cache=call.input("kv_cache").dtype or float_type,
            kr_cache=call.input("kr_cache").dtype or float_type,
            packed=tuple(name for name in PACKABLE if call.input(name).rank == 4),
        )

    @property
    def query_int8(self) -> bool:
        """Both the tokens and the latent cache are int8, and so is the query (FullQuant+KV)."""
        return self.token_int8 and self.kv_cache == ir.DataType.INT8

    @property
    def scenario(self) -> str:
        """Which tensors are int8: "no_quant", "partial_quant_kv_kr", "full_quant_kv", ..."""
        names = {(False, False): "no", (False, True): "partial", (True, False): "token", (True, True): "full"}
        parts = [names[self.token_int8, self.query_weight_int8], "quant"]
        parts += ["kv"] if self.kv_cache == ir.DataType.INT8 else []
        parts += ["kr"] if self.kr_cache == ir.DataType.INT8 else []
        return "_".join(parts)


def token_dims(call: Call) -> tuple[Dim, ...] | None:
    """(T,) or (B, S), each from the first of the inputs that knows it."""
    shapes = [call.input(name).shape for name in ("token_x", "rope_sin", "rope_cos")]
    known = [shape[:-1] for shape in shapes if shape is not None]
    index = call.input("cache_index").shape
    known += [] if index is None else [index]
    if not known:
        return None
    return tuple(next((d for d in dims if d is not None), None) for dims in zip(*known, strict=False))


def product(dims: tuple[Dim, ...]) -> Dim:
    """The number of tokens as one dimension; symbolic where a factor is."""
    if all(isinstance(dim, int) for dim in dims):
        return prod(dim for dim in dims if isinstance(dim, int))
    return None if None in dims else "*".join(map(str, dims))
