"""RMS normalisation: y = x / sqrt(mean(x^2) + epsilon) * gamma over the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op, stored_tensor
from fusion_patterns.miss import Miss, miss

__all__ = ["RmsNorm", "recognise_rms_norm"]


@dataclass(frozen=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + epsilon) * gamma; `x` (..., H), `gamma` (H)."""

    x: ir.Value
    gamma: ir.Value
    epsilon: float
    node: ir.Node


def recognise_rms_norm(value: ir.Value, facts: Facts) -> RmsNorm | Miss:
    """The normalisation that computes a value. Casts to float32 and back around the maths are looked through.

    Spellings
    ---------
    1. RMSNormalization or SimplifiedLayerNormalization over the last axis.
    2. Mul(gamma, Mul(x, r)) in any order, r = Reciprocal(Sqrt(mean + eps)), 1 / Sqrt(..) or Pow(.., -0.5).
    3. The same with Div(x, Sqrt(mean + eps)).
    4. mean = ReduceMean over the last axis of Pow(x, 2) or Mul(x, x).
    """
    return facts.remember("rms_norm", value, _rms_norm)


def _rms_norm(value: ir.Value, facts: Facts) -> RmsNorm | Miss:
    maths = _Maths(facts, value.dtype)
    node = facts.producer(maths.unrounded(value))
    if node is None:
        return miss("latent-unrecognised", value, "an RMS norm", "a graph input")
    if is_op(node, "RMSNormalization", "SimplifiedLayerNormalization"):
        return _single_node(node, facts)
    if not is_op(node, "Mul"):
        return miss("latent-unrecognised", value, "an RMS norm", node.op_type)
    for factor, scaled in facts.either_way(node):
        gamma = maths.unwidened(factor)
        if facts.rank(gamma) != 1 or stored_tensor(gamma) is None:
            continue
        normed = _normalised(maths.unrounded(scaled), maths)
        if normed is not None and facts.dim(gamma, 0) == facts.dim(normed[0], -1):
            return RmsNorm(normed[0], gamma, normed[1], node)
    return miss("latent-unrecognised", value, "gamma times a normalised value", "a product of other values")


@dataclass(frozen=True)
class _Maths:
    """Looking through the casts of a norm of `dtype` values whose maths are float32, and through no others.

    Widening is exact, and one rounding back to the model's type is what the operator does as well; a rounding to any
    other type would be lost.
    """

    facts: Facts
    dtype: ir.DataType | None

    def unwidened(self, value: ir.Value) -> ir.Value:
        """The value before a cast from the model's type to float32."""
        return self._before_cast(value, self.dtype, ir.DataType.FLOAT)

    def unrounded(self, value: ir.Value) -> ir.Value:
        """The value before a cast from float32 to the model's type."""
        return self._before_cast(value, ir.DataType.FLOAT, self.dtype)

    def _before_cast(self, value: ir.Value, source: ir.DataType | None, target: ir.DataType | None) -> ir.Value:
        node = self.facts.producer(value)
        if not is_op(node, "Cast") or attribute(node, "to") != target or self.facts.input(node, 0).dtype != source:
            return value
        return self.facts.input(node, 0)


def _single_node(node: ir.Node, facts: Facts) -> RmsNorm | Miss:
    x, gamma = facts.input(node, 0), facts.input(node, 1)
    if stored_tensor(gamma) is None or facts.rank(gamma) != 1:
        return miss("latent-unrecognised", node, "a constant gamma of rank 1", "another scale")
    rank, axis = facts.rank(x), attribute(node, "axis", -1)
    if axis != -1 and (rank is None or axis != rank - 1):
        return miss("latent-unrecognised", node, "a norm over the last axis", f"axis {axis}")
    return RmsNorm(x, gamma, float(attribute(node, "epsilon", 1e-5)), node)


def _normalised(value: ir.Value, maths: _Maths) -> tuple[ir.Value, float] | None:
    """(x, epsilon) of x / sqrt(mean(x^2) + epsilon)."""
    node = maths.facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Div"):
        epsilon = _mean_square_root(maths.facts.input(node, 1), maths.facts.input(node, 0), maths)
        return None if epsilon is None else (maths.unwidened(maths.facts.input(node, 0)), epsilon)
    if is_op(node, "Mul"):
        for x, factor in maths.facts.either_way(node):
            epsilon = _reciprocal_root(factor, x, maths)
            if epsilon is not None:
                return maths.unwidened(x), epsilon
    return None


def _reciprocal_root(value: ir.Value, x: ir.Value, maths: _Maths) -> float | None:
    node = maths.facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Reciprocal"):
        return _mean_square_root(maths.facts.input(node, 0), x, maths)
    if is_op(node, "Div") and maths.facts.scalar(maths.facts.input(node, 0)) == 1:
        return _mean_square_root(maths.facts.input(node, 1), x, maths)
    if is_op(node, "Pow") and maths.facts.scalar(maths.facts.input(node, 1)) == -0.5:
        return _mean_square(maths.facts.input(node, 0), x, maths)
    return None


def _mean_square_root(value: ir.Value, x: ir.Value, maths: _Maths) -> float | None:
    """epsilon of Sqrt(mean(x^2) + epsilon)."""
    node = maths.facts.producer(value)
    return _mean_square(maths.facts.input(node, 0), x, maths) if is_op(node, "Sqrt") else None


def _mean_square(value: ir.Value, x: ir.Value, maths: _Maths) -> float | None:
    """epsilon of mean(x^2) + epsilon."""
    node = maths.facts.producer(value)
    if not is_op(node, "Add"):
        return None
    for mean, constant in maths.facts.either_way(node):
        epsilon = maths.facts.scalar(constant)
        if epsilon is not None and _is_mean_of_squares(mean, x, maths):
            return epsilon
    return None


def _is_mean_of_squares(value: ir.Value, x: ir.Value, maths: _Maths) -> bool:
    node = maths.facts.producer(value)
    if not is_op(node, "ReduceMean") or attribute(node, "keepdims", 1) != 1:
        return False
    axes = maths.facts.integers(maths.facts.input(node, 1)) if len(node.inputs) > 1 else attribute(node, "axes")
    rank = maths.facts.rank(value)
    if axes is None or len(axes) != 1 or (axes[0] != -1 and (rank is None or axes[0] != rank - 1)):
        return False
    square = maths.facts.producer(maths.facts.input(node, 0))
    if square is None or maths.unwidened(maths.facts.input(square, 0)) is not maths.unwidened(x):
        return False
    if is_op(square, "Pow"):
        return maths.facts.scalar(maths.facts.input(square, 1)) == 2
    return is_op(square, "Mul") and maths.facts.input(square, 1) is maths.facts.input(square, 0)
