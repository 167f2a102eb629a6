"""Weights that a fusion makes out of others, computed tensor by tensor when the model is written or run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ascend_onnx.layout import half_to_interleaved, split_kv_b
from fusion_patterns.emit import Emitter
from fusion_patterns.graph import static, stored_tensor
from fusion_patterns.lift.linear import WeightView

__all__ = ["as_stored", "key_half", "permuted", "rope_interleaved", "scaled", "stacked_slice", "value_half"]

_Array = npt.NDArray[Any]


def as_stored(emitter: Emitter, view: WeightView) -> ir.Value:
    """The weight (k, n): the initializer itself where it lies so, else a transposed copy."""
    if not view.transposed:
        return view.initializer
    return _derived(emitter, view, view.shape, "kn", lambda weight: weight)


def rope_interleaved(emitter: Emitter, view: WeightView, heads: int, start: int) -> ir.Value:
    """The weight (k, heads * width) with the columns from `start` on in each head moved from half to interleaved order.

    A projection through it yields the interleaved features that the operator rotates, exactly: columns only move.
    """

    def permute(weight: _Array) -> _Array:
        per_head = weight.reshape(weight.shape[0], heads, -1)
        return half_to_interleaved(per_head, start).reshape(weight.shape)

    return _derived(emitter, view, view.shape, "interleaved", permute)


def key_half(emitter: Emitter, view: WeightView, heads: int, nope: int) -> ir.Value:
    """W_UK (N, D, Hckv) of an expansion (Hckv, N * (D + Dv))."""
    shape = (heads, nope, view.shape[0])
    return _derived(emitter, view, shape, "uk", lambda weight: split_kv_b(weight, heads, nope)[0])


def value_half(emitter: Emitter, view: WeightView, heads: int, nope: int) -> ir.Value:
    """W_UV (N, Hckv, Dv) of an expansion (Hckv, N * (D + Dv))."""
    rank, columns = view.shape
    shape = (heads, rank, columns // heads - nope)
    return _derived(emitter, view, shape, "uv", lambda weight: split_kv_b(weight, heads, nope)[1])


def permuted(emitter: Emitter, stored: ir.Value, perm: tuple[int, ...]) -> ir.Value:
    """A weight with its axes in another order; the initializer itself where the order is its own."""
    if perm == tuple(range(len(perm))):
        return stored
    dims = static(stored.shape)
    shape = tuple(dims[axis] for axis in perm)
    return _computed(emitter, stored, shape, "permuted", lambda weight: weight.transpose(perm))


def scaled(emitter: Emitter, stored: ir.Value, factor: float) -> ir.Value:
    """A weight times a number; the initializer itself where that is 1."""
    if factor == 1:
        return stored

    def multiply(weight: _Array) -> _Array:
        return np.asarray(weight.astype(np.float32) * np.float32(factor), weight.dtype)

    return _computed(emitter, stored, static(stored.shape), f"scaled_{factor!r}", multiply)


def _derived(
    emitter: Emitter, view: WeightView, shape: tuple[int, ...], suffix: str, transform: Callable[[_Array], _Array]
) -> ir.Value:
    """A weight made of one that is seen as (k, n)."""
    turned = view.transposed
    return _computed(emitter, view.initializer, shape, suffix, lambda weight: transform(weight.T if turned else weight))


def _computed(
    emitter: Emitter, stored: ir.Value, shape: tuple[int, ...], suffix: str, transform: Callable[[_Array], _Array]
) -> ir.Value:
    known = stored_tensor(stored)
    source = stored.const_value if known is None else known  # one just emitted is no initializer yet
    if source is None:
        raise ValueError(f"weight {stored.name!r} has no data")

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(transform(source.numpy())), dtype=source.dtype)

    def build() -> ir.Value:
        lazy = ir.LazyTensor(compute, dtype=source.dtype, shape=ir.Shape(shape))
        return emitter.weight(f"{stored.name}.{suffix}", lazy)

    value: ir.Value = emitter.shared(("weight", stored, suffix, shape), build)
    return value


def stacked_slice(emitter: Emitter, stack: ir.Value, index: int) -> ir.Value:
    """Matrix `index` of a stack (E, k, n), without a copy: an external tensor at its own offset, or a view."""
    tensor = stored_tensor(stack)
    if tensor is None:
        raise ValueError(f"weight {stack.name!r} has no data")
    shape = static(stack.shape)[1:]
    name = f"{stack.name}.{index}"
    if isinstance(tensor, ir.ExternalTensor):
        stride = tensor.nbytes // static(stack.shape)[0]
        piece: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location,
            (tensor.offset or 0) + index * stride,
            stride,
            tensor.dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=tensor.base_dir,
        )
    else:
        piece = ir.LazyTensor(
            lambda: ir.Tensor(tensor.numpy()[index], dtype=tensor.dtype), dtype=tensor.dtype, shape=ir.Shape(shape)
        )
    value: ir.Value = emitter.shared(("slice", stack, index), lambda: emitter.weight(name, piece))
    return value
