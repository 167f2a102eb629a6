"""Published vectors: inputs and outputs of the vendor's golden code, one `.npz` file a case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.oracles import Array

from .compare import Tolerance

__all__ = ["VECTORS", "Vector", "read_vector"]

OPERATORS = {
    "mla_preprocess": "MlaPreprocess",
    "mla_prolog_v2_weight_nz": "MlaPrologV2WeightNz",
    "moe_init_routing_v3": "MoeInitRoutingV3",
    "ring_attention_update_v2": "RingAttentionUpdateV2",
    "sparse_flash_attention": "SparseFlashAttention",
}
RAW_TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0": ml_dtypes.float8_e8m0fnu,
}
CACHES = {"kv_cache": "kv_cache_out", "kr_cache": "kr_cache_out"}
"""Vectors name a cache output like its input."""

VECTORS = sorted((Path(__file__).parent.parent / "vectors").glob("*.npz"))


@dataclass(frozen=True)
class Vector:
    """One vector, in the names of the operators' schemas. `masks` has an entry only where not all is compared."""

    operator: str
    inputs: Mapping[str, Array]
    attributes: Mapping[str, Any]
    outputs: Mapping[str, Array]
    masks: Mapping[str, NDArray[np.bool_]]
    tolerances: Mapping[str, Tolerance]


@cache
def read_vector(path: Path) -> Vector:
    """The vector at `path`; types that numpy lacks are stored as raw bits, named by the file's `meta`."""
    with np.load(path) as data:
        meta = json.loads(str(data["meta"]))
        stored = {name: data[name] for name in data.files if name != "meta"}

    def typed(prefix: str, dtypes: Mapping[str, str]) -> dict[str, Array]:
        arrays = {name: stored[prefix + name] for name in dtypes}
        return {n: a.view(RAW_TYPES[dtypes[n]]) if dtypes[n] in RAW_TYPES else a for n, a in arrays.items()}

    attributes = {n: int(v) if isinstance(v, bool) else v for n, v in meta["attributes"].items()}
    outputs = typed("out_", meta["output_dtypes"])
    masks = {name: stored[f"mask_{name}"] for name in outputs if f"mask_{name}" in stored}
    tolerances = {name: Tolerance(t["rtol"], t["atol"], t.get("max_fraction")) for name, t in meta["tolerance"].items()}
    return Vector(
        OPERATORS[meta["operator"]],
        typed("in_", meta["input_dtypes"]),
        attributes,
        {CACHES.get(n, n): a for n, a in outputs.items()},
        {CACHES.get(n, n): a for n, a in masks.items()},
        {CACHES.get(n, n): t for n, t in tolerances.items()},
    )
