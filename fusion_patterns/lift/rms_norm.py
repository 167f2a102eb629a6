"""RMS normalisation: y = x / sqrt(mean(x^2) + epsilon) * gamma over the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
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
    node = _uncast(value, facts).producer()
    if node is None:
        return miss("latent-unrecognised", value, "an RMS norm", "a graph input")
    if node.op_type in ("RMSNormalization", "SimplifiedLayerNormalization"):
        return _single_node(node, facts)
    if not is_op(node, "Mul"):
        return miss("latent-unrecognised", value, "an RMS norm", node.op_type)
    for gamma, scaled in facts.either_way(node):
        if facts.rank(_uncast(gamma, facts)) != 1 or not _uncast(gamma, facts).is_initializer():
            continue
        normed = _normalised(_uncast(scaled, facts), facts)
        if normed is not None:
            return RmsNorm(normed[0], _uncast(gamma, facts), normed[1], node)
    return miss("latent-unrecognised", value, "gamma times a normalised value", "a product of other values")


def _single_node(node: ir.Node, facts: Facts) -> RmsNorm | Miss:
    x, gamma = facts.input(node, 0), facts.input(node, 1)
    if not gamma.is_initializer() or facts.rank(gamma) != 1:
        return miss("latent-unrecognised", node, "a constant gamma of rank 1", "another scale")
    rank, axis = facts.rank(x), attribute(node, "axis", -1)
    if axis != -1 and (rank is None or axis != rank - 1):
        return miss("latent-unrecognised", node, "a norm over the last axis", f"axis {axis}")
    return RmsNorm(x, gamma, float(attribute(node, "epsilon", 1e-5)), node)


def _normalised(value: ir.Value, facts: Facts) -> tuple[ir.Value, float] | None:
    """(x, epsilon) of x / sqrt(mean(x^2) + epsilon)."""
    node = facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Div"):
        epsilon = _mean_square_root(facts.input(node, 1), facts.input(node, 0), facts)
        return None if epsilon is None else (_uncast(facts.input(node, 0), facts), epsilon)
    if is_op(node, "Mul"):
        for x, factor in facts.either_way(node):
            epsilon = _reciprocal_root(factor, x, facts)
            if epsilon is not None:
                return _uncast(x, facts), epsilon
    return None


def _reciprocal_root(value: ir.Value, x: ir.Value, facts: Facts) -> float | None:
    node = facts.producer(value)
    if node is None:
        return None
    if is_op(node, "Reciprocal"):
        return _mean_square_root(facts.input(node, 0), x, facts)
    if is_op(node, "Div") and facts.scalar(facts.input(node, 0)) == 1:
        return _mean_square_root(facts.input(node, 1), x, facts)
    if is_op(node, "Pow") and facts.scalar(facts.input(node, 1)) == -0.5:
        return _mean_square(facts.input(node, 0), x, facts)
    return None


def _mean_square_root(value: ir.Value, x: ir.Value, facts: Facts) -> float | None:
    """epsilon of Sqrt(mean(x^2) + epsilon)."""
    node = facts.producer(value)
    return _mean_square(facts.input(node, 0), x, facts) if is_op(node, "Sqrt") else None


def _mean_square(value: ir.Value, x: ir.Value, facts: Facts) -> float | None:
    """epsilon of mean(x^2) + epsilon."""
    node = facts.producer(value)
    if not is_op(node, "Add"):
        return None
    for mean, constant in facts.either_way(node):
        epsilon = facts.scalar(constant)
        if epsilon is not None and _is_mean_of_squares(mean, x, facts):
            return epsilon
    return None


def _is_mean_of_squares(value: ir.Value, x: ir.Value, facts: Facts) -> bool:
    node = facts.producer(value)
    if not is_op(node, "ReduceMean") or attribute(node, "keepdims", 1) != 1:
        return False
    axes = facts.integers(facts.input(node, 1)) if len(node.inputs) > 1 else attribute(node, "axes")
    rank = facts.rank(value)
    if axes is None or len(axes) != 1 or (axes[0] != -1 and (rank is None or axes[0] != rank - 1)):
        return False
    square = facts.producer(facts.input(node, 0))
    if square is None or _uncast(facts.input(square, 0), facts) is not _uncast(x, facts):
        return False
    if is_op(square, "Pow"):
        return facts.scalar(facts.input(square, 1)) == 2
    return is_op(square, "Mul") and facts.input(square, 1) is facts.input(square, 0)


_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def _uncast(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before casts between float types."""
    while True:
        node = facts.producer(value)
        if not is_op(node, "Cast") or facts.input(node, 0).dtype not in _FLOATS:
            return value
        if attribute(node, "to") not in {int(t) for t in _FLOATS}:
            return value
        value = facts.input(node, 0)
