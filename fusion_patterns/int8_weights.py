"""Int8 weights as MlaPreprocess takes them, (n, k) with the columns in its order, and what goes with each column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ascend_onnx.layout import descale_to_bits
from fusion_patterns.emit import Emitter
from fusion_patterns.lift.quantised_linear import QuantisedLinear

__all__ = ["Part", "biases", "scales", "weight_rows"]


@dataclass(frozen=True)
class Part:
    """Some columns of a projection, in some order."""

    linear: QuantisedLinear
    columns: npt.NDArray[np.int64]

    @property
    def key(self) -> tuple[ir.Value, bytes]:
        return self.linear.weight.initializer, self.columns.tobytes()

    def is_whole(self) -> bool:
        return np.array_equal(self.columns, np.arange(self.linear.weight.shape[1]))


def weight_rows(emit: Emitter, parts: Sequence[Part]) -> ir.Value:
    """(n, k) int8 of all columns of all parts; the initializer itself where it lies so."""
    parts = _joined(parts)
    first = parts[0].linear.weight
    if len(parts) == 1 and parts[0].is_whole() and first.transposed:
        return first.initializer
    rows = sum(len(part.columns) for part in parts)

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([_rows(part) for part in parts]), dtype=ir.DataType.INT8)

    def build() -> ir.Value:
        lazy = ir.LazyTensor(compute, dtype=ir.DataType.INT8, shape=ir.Shape((rows, first.shape[0])))
        return emit.weight(f"{first.initializer.name}.rows", lazy)

    value: ir.Value = emit.shared(("int8 rows", *(part.key for part in parts)), build)
    return value


def scales(emit: Emitter, parts: Sequence[Part], dtype: ir.DataType) -> ir.Value:
    """(n): what the integers of each column are multiplied by, float32, or its bits in int64 for float16 models."""
    numbers = np.concatenate([part.linear.column_scales()[part.columns] for part in parts])
    stored = descale_to_bits(numbers) if dtype == ir.DataType.FLOAT16 else numbers
    return emit.typed(stored)


def biases(emit: Emitter, parts: Sequence[Part]) -> ir.Value | None:
    """(n) int32: what is added to the integers of each column, minus what the shift of the rows makes of the weight.

    None where nothing is. The weight is read only when the model is written or run.
    """
    parts = _joined(parts)
    if all(part.linear.bias is None and part.linear.product.shift == 0 for part in parts):
        return None
    rows = sum(len(part.columns) for part in parts)

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([_bias(part) for part in parts]), dtype=ir.DataType.INT32)

    def build() -> ir.Value:
        lazy = ir.LazyTensor(compute, dtype=ir.DataType.INT32, shape=ir.Shape((rows,)))
        return emit.weight(f"{parts[0].linear.weight.initializer.name}.bias", lazy)

    own = tuple((part.linear.bias, part.linear.product.shift) for part in parts)
    value: ir.Value = emit.shared(("int8 bias", *(part.key for part in parts), own), build)
    return value


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring parts of one projection as one part."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].linear is part.linear:
            joined[-1] = Part(part.linear, np.concatenate([joined[-1].columns, part.columns]))
        else:
            joined.append(part)
    return joined


def _numbers(value: ir.Value) -> npt.NDArray[np.generic]:
    tensor = value.const_value
    if tensor is None:
        raise ValueError(f"weight {value.name!r} has no data")
    return tensor.numpy()


def _rows(part: Part) -> npt.NDArray[np.generic]:
    """(columns, k)."""
    stored = _numbers(part.linear.weight.initializer)
    by_column = stored if part.linear.weight.transposed else stored.T
    return np.ascontiguousarray(by_column[part.columns])


def _bias(part: Part) -> npt.NDArray[np.int32]:
    total = np.zeros(len(part.columns), np.int64)
    if part.linear.bias is not None:
        total += np.rint(_numbers(part.linear.bias).reshape(-1)[part.columns].astype(np.float64)).astype(np.int64)
    if part.linear.product.shift:
        total -= part.linear.product.shift * _rows(part).sum(axis=1, dtype=np.int64)
    return total.astype(np.int32)
