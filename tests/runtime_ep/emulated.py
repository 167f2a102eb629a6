"""A call as an ONNX node would make it, on the emulated device: absent inputs, packed weights, paged caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import Array, Expected

from .acl import Acl
from .launches import DEFAULTS, PARAMETERS, Input, Output, Packed, launch

__all__ = ["NotPackableError", "Prepared", "nz_of_kn", "nz_of_nk", "prepare", "product_of", "run_on_device"]

PROLOG_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
PREPROCESS_WEIGHTS = ("wdqkv", "wuq")
FRACTAL_BYTES, FRACTAL_ROWS = 32, 16


class NotPackableError(Exception):
    """A weight whose sizes are no multiples of a fractal's cannot be given to the device at all."""


def product_of(operator: str, attributes: Mapping[str, Any]) -> str:
    """A product that runs the call: MXFP8 needs a 950."""
    return "950" if operator == "MoeInitRoutingV3" and attributes.get("quant_mode", -1) >= 2 else "a2"


def nz_of_kn(matrix: Array) -> Packed:
    """FRACTAL_NZ of a matrix (k, n): (n / w0, k / 16, 16, w0)."""
    k, n = matrix.shape
    width = FRACTAL_BYTES // matrix.dtype.itemsize
    require_multiples(k, n, width)
    fractals = matrix.reshape(k // FRACTAL_ROWS, FRACTAL_ROWS, n // width, width).transpose(2, 0, 1, 3)
    return Packed(np.ascontiguousarray(fractals), (k, n))


def nz_of_nk(matrix: Array) -> Packed:
    """FRACTAL_NZ of a matrix (n, k): (k / w0, n, w0), stored as (k / w0, n / 16, 16, w0)."""
    n, k = matrix.shape
    width = FRACTAL_BYTES // matrix.dtype.itemsize
    require_multiples(n, k, width)
    fractals = matrix.reshape(n, k // width, width).transpose(1, 0, 2)
    storage = np.ascontiguousarray(fractals).reshape(k // width, n // FRACTAL_ROWS, FRACTAL_ROWS, width)
    return Packed(storage, (n, k))


def require_multiples(rows: int, columns: int, width: int) -> None:
    if rows % FRACTAL_ROWS or columns % width:
        raise NotPackableError(f"{rows} rows and {columns} columns are no fractals of {FRACTAL_ROWS} by {width}")


@dataclass
class Prepared:
    """A call as the launch of a node makes it."""

    inputs: dict[str, Input]
    attributes: dict[str, Any]
    outputs: dict[str, Output]


def prepare(
    acl: Acl,
    operator: str,
    inputs: Mapping[str, Array],
    attributes: Mapping[str, Any],
    expected: Mapping[str, Expected],
) -> Prepared:
    """The call with its weights packed, its defaults filled in, and holders for outputs that are not produced.

    Raises `NotPackableError` where there is no such call.
    """
    values = {**DEFAULTS[operator], **attributes}
    given: dict[str, Input] = dict(inputs)
    outputs: dict[str, Output] = {name: (e.value.shape, e.dtype) for name, e in expected.items()}
    if operator == "MlaPrologV2WeightNz":
        given.update({name: prolog_weight(inputs[name]) for name in PROLOG_WEIGHTS})
    elif operator == "MlaPreprocess":
        given = preprocess_inputs(inputs)
    elif operator == "MoeInitRoutingV3":
        complete_routing(acl, inputs, values, outputs)
    for parameter in PARAMETERS[operator].split():
        kind, name = parameter.split(":")
        if kind == "out" and name not in outputs:
            outputs[name] = ((0,), np.dtype(np.float32))
    return Prepared(given, values, outputs)


def run_on_device(
    acl: Acl,
    operator: str,
    inputs: Mapping[str, Array],
    attributes: Mapping[str, Any],
    expected: Mapping[str, Expected],
) -> dict[str, Array]:
    """The outputs that the call has on the device; `expected` names them all and says their shapes and types.

    Raises `NotPackableError` where there is no such call.
    """
    call = prepare(acl, operator, inputs, attributes, expected)
    results = launch(acl, operator, call.inputs, call.attributes, call.outputs)
    return {name: results[name] for name in expected}


def prolog_weight(weight: Array) -> Packed:
    if weight.ndim == 2:
        return nz_of_kn(weight)
    columns, rows, _, width = weight.shape
    return Packed(weight, (rows * FRACTAL_ROWS, columns * width))


def preprocess_inputs(inputs: Mapping[str, Array]) -> dict[str, Input]:
    """All 24 inputs: the device wants an empty tensor where a node has none, and the weights packed."""
    given: dict[str, Input] = {}
    for parameter in PARAMETERS["MlaPreprocess"].split():
        kind, name = parameter.split(":")
        if kind == "in":
            given[name] = inputs.get(name, np.zeros(0, inputs["input"].dtype))
    for name in PREPROCESS_WEIGHTS:
        weight = inputs[name]
        if weight.ndim == 2:
            given[name] = nz_of_nk(weight)
        else:
            columns = weight.shape[0] * weight.shape[-1]
            given[name] = Packed(weight, (weight.size // max(1, columns), columns))
    wuk = inputs["wuk"]
    if wuk.ndim == 4:
        heads, columns, rows, width = wuk.shape
        given["wuk"] = Packed(wuk, (heads, rows, columns * width))
    return given


def complete_routing(acl: Acl, inputs: Mapping[str, Array], values: dict[str, Any], outputs: dict[str, Output]) -> None:
    """What a launch passes for the defaults of a node, and holders for the outputs that the node does not produce."""
    if not values.get("active_expert_range"):
        values["active_expert_range"] = [0, values["expert_num"]]
    if values["active_num"] <= 0 and acl.soc_name().startswith("Ascend950"):
        values["active_num"] = inputs["expert_idx"].size  # the 950 has no other way to say "no limit"
    outputs.setdefault("expert_tokens_count_or_cumsum", ((0,), np.dtype(np.int64)))
