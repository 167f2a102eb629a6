"""The operator MlaPrologV2WeightNz in the place of the projections it computes: inputs, scratch caches, rows read back.

The caches of the graph stay what they are: the operator writes the new rows into a scratch cache of its own, and they
are read back in the shape of the rows they replace.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns import weights
from fusion_patterns.absorbed_attention import interleave
from fusion_patterns.emit import Emitter
from fusion_patterns.graph import Dimension, Facts, is_op, same_dim
from fusion_patterns.lift.linear import WeightView
from fusion_patterns.lift.projections import Projections
from fusion_patterns.lift.rope import Angles, Rope, RopeLayout
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.miss import Miss, miss
from fusion_patterns.prolog_scales import quantised_rows, scale_inputs, scale_tensors, token_x

__all__ = ["LATENT", "ROPE", "Prolog", "Scratch", "prolog_call", "scratch_of", "unfit"]

_OPERATOR = OPERATORS["MlaPrologV2WeightNz"]
_OUTPUTS = ("query", "query_rope", "kv_cache_out", "kr_cache_out")
_BLOCK_SIZE = 16
"""Slots of a block of the scratch cache: the smallest the device takes."""
LATENT, ROPE, _NOPE = 512, 64, 128
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def unfit(paths: Projections, facts: Facts) -> Miss | None:
    """What about recognised projections the operator does not compute."""
    x, query, key = paths.x, paths.query, paths.key
    if facts.rank(x) != 3:
        return miss("query-unrecognised", query.down.node, "a hidden state (B, S, He)", f"{facts.rank(x)} axes")
    if x.dtype not in _FLOATS:
        return miss("dtype", query.down.node, "float32, float16 or bfloat16", str(x.dtype))
    sizes = (facts.size(key.norm.gamma, 0), facts.size(key.rope.x, -1), query.nope)
    if sizes != (LATENT, ROPE, _NOPE):
        wanted = f"latent {LATENT}, rope {ROPE}, nope {_NOPE}"
        return miss("split-sizes", key.down.node, wanted, f"latent {sizes[0]}, rope {sizes[1]}, nope {sizes[2]}")
    if query.rope.output_layout != key.rope.output_layout:
        return miss("rope-differs", key.rope.node, "query and key rotated into one order of features", "two orders")
    return None


def prolog_call(paths: Projections) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    x, query, key = Tensor.of(paths.x), paths.query, paths.key
    angles = Tensor(x.dtype, (x.dim(0), x.dim(1), ROPE))
    inputs = {
        "token_x": x if quantised_rows(paths) is None else Tensor(ir.DataType.INT8, x.shape),
        "weight_dq": _weight_tensor(query.down.weight),
        "weight_uq_qr": _weight_tensor(query.up.weight),
        "weight_uk": Tensor(x.dtype, (query.heads, query.nope, LATENT)),
        "weight_dkv_kr": _weight_tensor(key.down.weight),
        "rmsnorm_gamma_cq": Tensor.of(query.norm.gamma),
        "rmsnorm_gamma_ckv": Tensor.of(key.norm.gamma),
        "rope_sin": angles,
        "rope_cos": angles,
        "cache_index": Tensor(ir.DataType.INT64, (x.dim(0), x.dim(1))),
        "kv_cache": Tensor(x.dtype, (None, _BLOCK_SIZE, 1, LATENT)),
        "kr_cache": Tensor(x.dtype, (None, _BLOCK_SIZE, 1, ROPE)),
        **scale_tensors(paths),
    }
    return Call(_OPERATOR, inputs, _OUTPUTS, _OPERATOR.attribute_values(_attributes(paths)))


def _weight_tensor(view: WeightView) -> Tensor:
    return Tensor(view.initializer.dtype, view.shape)


def _attributes(paths: Projections) -> dict[str, float | str]:
    return {
        "rmsnorm_epsilon_cq": paths.query.norm.epsilon,
        "rmsnorm_epsilon_ckv": paths.key.norm.epsilon,
        "cache_mode": "PA_BSND",
    }


@dataclass(frozen=True)
class Prolog:
    """An emitted operator: `query` (B, S, N, 512), `query_rope` (B, S, N, 64) and the new rows, one per token.

    `query_rope` and the rotated rows are in the order of features that the replaced rotation had.
    """

    query: ir.Value
    query_rope: ir.Value
    latent_rows: ir.Value
    rotated_rows: ir.Value
    scratch: Scratch

    @classmethod
    def emit(cls, emit: Emitter, paths: Projections, weight_uk: ir.Value, facts: Facts) -> Prolog:
        scratch = scratch_of(emit, paths.x, facts)
        inputs = _inputs(emit, paths, weight_uk, scratch, facts)
        made = emit.fused(_OPERATOR, inputs, _OUTPUTS, _attributes(paths))
        rows = scratch.rows(emit, made["kv_cache_out"], LATENT), scratch.rows(emit, made["kr_cache_out"], ROPE)
        if paths.key.rope.output_layout is RopeLayout.HALF:
            return cls(made["query"], made["query_rope"], *rows, scratch)
        turned = interleave(emit, made["query_rope"]), interleave(emit, rows[1])
        return cls(made["query"], turned[0], rows[0], turned[1], scratch)


class Scratch:
    """Empty caches for the tokens of one call, one slot a token, and the shape arithmetic around them."""

    def __init__(self, emit: Emitter, x: ir.Value, facts: Facts) -> None:
        self.b, self.s = _dim(facts, x, 0), _dim(facts, x, 1)
        self.dtype = x.dtype
        shape = emit.op("Shape", x, dtype=ir.DataType.INT64, shape=[3])
        self.batch = emit.op("Slice", shape, emit.integers([0]), emit.integers([1]), shape=[1])
        self.length = emit.op("Slice", shape, emit.integers([1]), emit.integers([2]), shape=[1])
        self.count = emit.op("Mul", self.batch, self.length, shape=[1])
        count = emit.op("Squeeze", self.count, shape=[])
        slots = emit.op("Range", emit.integers(0), count, emit.integers(1), shape=[self.b * self.s])
        rows = emit.op("Concat", self.batch, self.length, axis=0, shape=[2])
        self.index = emit.op("Reshape", slots, rows, shape=[self.b, self.s])
        padded = emit.op("Add", self.count, emit.integers([_BLOCK_SIZE - 1]), shape=[1])
        self.blocks = emit.op("Div", padded, emit.integers([_BLOCK_SIZE]), shape=[1])
        self.latent = self._zeros(emit, LATENT)
        self.rotated = self._zeros(emit, ROPE)

    def _zeros(self, emit: Emitter, width: int) -> ir.Value:
        shape = emit.op("Concat", self.blocks, emit.integers([_BLOCK_SIZE, 1, width]), axis=0, shape=[4])
        assert self.dtype is not None  # `_unfit` has looked at it
        zero = ir.tensor([0.0], dtype=self.dtype)
        dims = (ir.SymbolicDim(None), _BLOCK_SIZE, 1, width)
        return emit.op("ConstantOfShape", shape, value=zero, shape=dims, dtype=self.dtype)

    def rows(self, emit: Emitter, cache: ir.Value, width: int) -> ir.Value:
        """The rows (B * S, H) just written to a scratch cache (blocks, 16, 1, H)."""
        flat = emit.op("Reshape", cache, emit.integers([-1, width]), shape=(ir.SymbolicDim(None), width))
        bounds = (emit.integers([0]), self.count, emit.integers([0]))
        return emit.op("Slice", flat, *bounds, shape=(self.b * self.s, width))

    def shaped(self, emit: Emitter, rows: ir.Value, like: ir.Value, facts: Facts) -> ir.Value:
        """Rows (B * S, H) in the shape of what they replace: the same, or (B, S, H) perhaps with an axis of size 1."""
        dims = facts.shape(like) or ()
        if len(dims) == 2:
            return rows
        width = rows.shape[1] if rows.shape is not None else None
        assert isinstance(width, int)  # given by `rows`
        unit = None if len(dims) == 3 else 1 if dims[1] == 1 else 2
        wanted: list[ir.Value] = [self.batch, self.length, emit.integers([width])]
        if unit is not None:
            wanted.insert(unit, emit.integers([1]))
        target = emit.shared(
            ("new rows", self.index, width, unit), lambda: emit.op("Concat", *wanted, axis=0, shape=[len(wanted)])
        )
        return emit.op("Reshape", rows, target, shape=dims)

    def shape_of(self, emit: Emitter, node: ir.Node, cache: ir.Value | None, facts: Facts) -> ir.Value | None:
        """What a Shape node yields, from batch, length and the tokens of `cache`; None where it asks for more."""
        dims = facts.symbolic(node.outputs[0])
        parts: list[ir.Value] = []
        for dim in dims or ():
            if isinstance(dim, int):
                parts.append(emit.integers([dim]))
            elif same_dim(dim, self.b):
                parts.append(self.batch)
            elif same_dim(dim, self.s):
                parts.append(self.length)
            elif cache is not None and same_dim(dim, facts.dim(cache, -2)):
                parts.append(_cache_length(emit, cache, facts))
            else:
                return None
        if not parts:
            return None
        return emit.op("Concat", *parts, axis=0, shape=[len(parts)]) if len(parts) > 1 else parts[0]


def _cache_length(emit: Emitter, cache: ir.Value, facts: Facts) -> ir.Value:
    def build() -> ir.Value:
        shape = emit.op("Shape", cache, dtype=ir.DataType.INT64, shape=[facts.rank(cache) or 0])
        return emit.op("Slice", shape, emit.integers([-2]), emit.integers([-1]), shape=[1])

    length: ir.Value = emit.shared(("cache length", cache), build)
    return length


def scratch_of(emit: Emitter, x: ir.Value, facts: Facts) -> Scratch:
    """One scratch for all layers whose hidden states have provably the same dimensions."""
    dims = facts.shape(x)
    known = dims is not None and all(isinstance(d, int) or d.value is not None for d in dims[:2])
    key = ("scratch", tuple(map(str, dims[:2])), x.dtype) if known and dims is not None else ("scratch", x)
    scratch: Scratch = emit.shared(key, lambda: Scratch(emit, x, facts))
    return scratch


def _inputs(
    emit: Emitter, paths: Projections, weight_uk: ir.Value, scratch: Scratch, facts: Facts
) -> dict[str, ir.Value]:
    """The operator has no inputs for scales: what multiplies the whole query, or the latents, goes into a gamma; what
    multiplies the unrotated heads alone, into W_UK.
    """
    query, key = paths.query, paths.key
    return {
        "token_x": token_x(emit, paths),
        "weight_dq": weights.as_stored(emit, query.down.weight),
        "weight_uq_qr": _rotating(emit, query.up.weight, query.rope, query.heads, query.nope),
        "weight_uk": weights.scaled(emit, weight_uk, query.nope_scale / query.rope_scale),
        "weight_dkv_kr": _rotating(emit, key.down.weight, key.rope, 1, LATENT),
        "rmsnorm_gamma_cq": weights.scaled(emit, query.norm.gamma, query.rope_scale),
        "rmsnorm_gamma_ckv": weights.scaled(emit, key.norm.gamma, key.latent_scale),
        "rope_sin": _angles(emit, query.rope, query.rope.sin, scratch, facts),
        "rope_cos": _angles(emit, query.rope, query.rope.cos, scratch, facts),
        "cache_index": scratch.index,
        "kv_cache": scratch.latent,
        "kr_cache": scratch.rotated,
        **scale_inputs(emit, paths),
    }


def _rotating(emit: Emitter, view: WeightView, rope: Rope, heads: int, start: int) -> ir.Value:
    """The operator rotates interleaved features: columns of a projection that yields half order move."""
    if rope.input_layout is RopeLayout.INTERLEAVED:
        return weights.as_stored(emit, view)
    return weights.rope_interleaved(emit, view, heads, start)


def _angles(emit: Emitter, rope: Rope, angles: Angles, scratch: Scratch, facts: Facts) -> ir.Value:
    """cos or sin as the operator takes it: (B, S, 64), both halves."""

    def build() -> ir.Value:
        flat = _three_axes(emit, angles, facts)
        whole = _whole_width(emit, flat, facts) if rope.half_width else flat
        if _dim(facts, whole, 0) == scratch.b and _dim(facts, whole, 1) == scratch.s:
            return whole
        target = emit.op("Concat", scratch.batch, scratch.length, emit.integers([ROPE]), axis=0, shape=[3])
        return emit.op("Expand", whole, target, shape=(scratch.b, scratch.s, ROPE))

    value: ir.Value = emit.shared(("angles", angles.value, rope.half_width, scratch.index), build)
    return value


def _three_axes(emit: Emitter, angles: Angles, facts: Facts) -> ir.Value:
    """Angles without the axis they are broadcast over heads on, and without a unit axis at the end."""
    shape = facts.shape(angles.value) or ()
    if len(shape) == 3:
        return angles.value
    axis, node = angles.head_axes[0], facts.producer(angles.value)
    if len(shape) == 4 and is_op(node, "Unsqueeze") and facts.integers(facts.input(node, 1)) in ([axis], [axis - 4]):
        return facts.input(node, 0)
    dropped = [axis] if len(shape) == 4 else [axis, 4]
    kept = [dim for position, dim in enumerate(shape) if position not in dropped]
    return emit.op("Squeeze", angles.value, emit.integers(dropped), shape=kept)


def _whole_width(emit: Emitter, angles: ir.Value, facts: Facts) -> ir.Value:
    """(.., 64) of (.., 32): what it was cut from where that has equal halves, else the concatenation with itself."""
    source = _doubled_source(angles, facts)
    if source is not None:
        return source
    shape = facts.shape(angles) or ()
    return emit.op("Concat", angles, angles, axis=-1, shape=(*shape[:-1], ROPE))


def _doubled_source(half: ir.Value, facts: Facts) -> ir.Value | None:
    """Cos or Sin of Concat(f, f), where `half` is one half of it."""
    cut = recognise_slice(half, facts)
    if cut is None or (cut.axis, cut.size, cut.step) != (2, ROPE // 2, 1) or cut.start not in (0, ROPE // 2):
        return None
    function = facts.producer(cut.source)
    join = facts.producer(facts.input(function, 0)) if is_op(function, "Cos", "Sin") else None
    if not is_op(join, "Concat") or len(join.inputs) != 2 or facts.size(cut.source, -1) != ROPE:
        return None
    doubled = facts.input(join, 0) is facts.input(join, 1) and facts.axis(join, join.outputs[0]) == 2
    return cut.source if doubled else None


def _dim(facts: Facts, value: ir.Value, axis: int) -> Dimension:
    dim = facts.dim(value, axis)
    return ir.SymbolicDim(None) if dim is None else dim
