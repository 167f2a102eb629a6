"""Projections of latent attention with int8 activations of constant scales -> MlaPreprocess.

x -> [RmsNorm] -> int8 -> kv_a -> norm -> cache[slot]; rope -> cache[slot]
                       -> q_a -> norm -> int8 -> q_b -> heads: nope x W_UK; rope
=>  x -> MlaPreprocess -> query, both caches, query_rope

The weights of kv_a and q_a become one, its columns in the operator's order [latent | rotary key | query latent].

A static quantiser that treats the whole attention alike is missed: a product whose result is quantised again, or keys
that are expanded and quantised per head, are not what the operator computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ascend_onnx.layout import interleaved_to_half
from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns import int8_weights
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match, Refused
from fusion_patterns.graph import Dimension, Facts, is_op, same_dim
from fusion_patterns.int8_weights import Part
from fusion_patterns.lift.quantised import PerTensor
from fusion_patterns.lift.quantised_projections import (
    Columns,
    QuantisedProjections,
    ShiftedNorm,
    recognise_quantised_projections,
    row_by_row,
)
from fusion_patterns.lift.rope import Angles, Rope, RopeLayout
from fusion_patterns.lift.slot_write import SlotWrite
from fusion_patterns.miss import Miss, miss
from fusion_patterns.mla_projection import key_half_of

__all__ = ["MlaPreprocess"]

_OPERATOR = OPERATORS["MlaPreprocess"]
_OUTPUTS = ("q_out", "kv_cache_out", "q_rope_out", "kr_cache_out")
_LATENT, _ROPE = 512, 64
_BLOCK_SIZE = 128
"""Slots of a block of the caches, the only number that the device takes."""
_EPSILON = np.float32(1e-6)
"""The epsilon of all the operator's norms."""
_DRAWS = 3
"""Of some thousand numbers that are rounded to 8 bits, one may lie so near a tie that it falls the other way."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class MlaPreprocess:
    """See the module."""

    name = "mla_preprocess"
    operators = ("MlaPreprocess",)
    anchors = ("MatMul", "MatMulInteger", "QLinearMatMul", "Gemm")

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]:
        found = recognise_quantised_projections(node, facts)
        if found is None:
            return
        reason = found if isinstance(found, Miss) else _unfit(node, found, facts)
        if reason is not None:
            yield Refused(self.name, node, reason)
        elif not isinstance(found, Miss):
            yield _match(node, found, facts)


def _unfit(node: ir.Node, layer: QuantisedProjections, facts: Facts) -> Miss | None:
    """What about recognised projections the operator does not compute."""
    x, caches = layer.x, (layer.latent_write.cache, layer.rotated_write.cache)
    if x.dtype not in _FLOATS:
        return miss("dtype", node, "float32, float16 or bfloat16", str(x.dtype))
    if any(cache.dtype != x.dtype for cache in caches):
        return miss("dtype", node, f"caches of {x.dtype}", ", ".join(str(cache.dtype) for cache in caches))
    first = [] if layer.input_norm is None else [layer.input_norm.norm]
    for norm in (*first, layer.query_norm.norm, layer.latent_norm):
        if np.float32(norm.epsilon) not in (_EPSILON, np.float32(_EPSILON.astype(x.dtype.numpy()))):
            return miss("epsilon", norm.node, f"{_EPSILON:g}", f"{norm.epsilon:g}")
    sizes = (layer.latent.size, layer.rotated.size)
    if sizes != (_LATENT, _ROPE):
        return miss("split-sizes", node, f"latent {_LATENT}, rope {_ROPE}", f"latent {sizes[0]}, rope {sizes[1]}")
    if layer.key_rope.output_layout is not RopeLayout.HALF:
        return miss("rope-unrecognised", layer.key_rope.node, "features rotated into half-split order", "interleaved")
    for angles in (layer.key_rope.cos, layer.key_rope.sin):
        if not _one_angle_a_token(angles, layer, facts):
            return miss("rope-unrecognised", layer.key_rope.node, "one row of angles for each token", "a broadcast")
    return None


def _one_angle_a_token(angles: Angles, layer: QuantisedProjections, facts: Facts) -> bool:
    """Whether the angles have the tokens of x, and no other axes but the last one and those of size 1."""
    tokens = (facts.shape(layer.x) or ())[:-1]
    rows = [dim for dim in (facts.shape(angles.value) or ())[:-1] if dim != 1]
    wanted = [dim for dim in tokens if dim != 1]
    return len(rows) == len(wanted) and all(same_dim(a, b) for a, b in zip(rows, wanted, strict=True))


def _match(node: ir.Node, layer: QuantisedProjections, facts: Facts) -> Match:
    writes = layer.latent_write, layer.rotated_write
    angles = (row_by_row(part.value, facts) for part in (layer.key_rope.cos, layer.key_rope.sin))
    starts = (layer.x, layer.latent_write.slots, *angles, *(write.cache for write in writes))
    boundary: dict[ir.Value, str | None] = dict.fromkeys(starts)
    return Match(
        MlaPreprocess.name,
        node,
        (_call(layer, facts),),
        (layer.query, layer.query_rope, *(write.value for write in writes)),
        boundary,
        lambda emitter: _emit(emitter, layer, facts),
        absorbed=_absorbed(layer),
        assumed=("slots-valid",),
        draws=_DRAWS,
    )


def _absorbed(layer: QuantisedProjections) -> tuple[ir.Value, ...]:
    nodes = (layer.latent.linear.node, layer.low_rank.linear.node, layer.up.node)
    outputs = [n.outputs[0] for n in dict.fromkeys(nodes)]
    codes = (layer.rows.value, layer.query_rows.value)
    return (*codes, *outputs, layer.up.x, layer.latent_write.rows, layer.rotated_write.rows)


def _call(layer: QuantisedProjections, facts: Facts) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    x, low_rank = layer.x.dtype, layer.low_rank.size
    one, int8 = Tensor(x, (1,)), Tensor(ir.DataType.INT8, (1,))
    dims = facts.shape(layer.x) or ()
    tokens = Tensor.of(layer.x).dim(0) if len(dims) == 2 else None
    hidden, rows = facts.size(layer.x, -1), layer.heads * (layer.nope + _ROPE)
    wide = _LATENT + _ROPE + low_rank
    descale = ir.DataType.INT64 if x == ir.DataType.FLOAT16 else ir.DataType.FLOAT
    inputs = {
        "input": Tensor(x, (tokens, hidden)),
        "gamma_0": Tensor(x, (hidden,) if layer.input_norm else (0,)),
        "quant_scale_0": one,
        "quant_offset_0": int8,
        "wdqkv": Tensor(ir.DataType.INT8, (wide, hidden)),
        "descale_0": Tensor(descale, (wide,)),
        "gamma_1": Tensor.of(layer.query_norm.norm.gamma),
        "quant_scale_1": one,
        "quant_offset_1": int8,
        "wuq": Tensor(ir.DataType.INT8, (rows, low_rank)),
        "descale_1": Tensor(descale, (rows,)),
        "gamma_2": Tensor.of(layer.latent_norm.gamma),
        "cos": Tensor(x, (tokens, _ROPE)),
        "sin": Tensor(x, (tokens, _ROPE)),
        "wuk": Tensor(x, (layer.heads, layer.nope, _LATENT)),
        "kv_cache": Tensor(x, (*_blocks(layer.latent_write.cache, facts), 1, _LATENT)),
        "kv_cache_rope": Tensor(x, (*_blocks(layer.rotated_write.cache, facts), 1, _ROPE)),
        "slot_mapping": Tensor(ir.DataType.INT32, (tokens,)),
    }
    shifts = {
        "beta_0": layer.input_norm.beta if layer.input_norm else None,
        "beta_1": layer.query_norm.beta,
    }
    inputs.update({name: Tensor.of(value) for name, value in shifts.items() if value is not None})
    parts = _parts(layer)
    for stage, width in enumerate((wide, rows)):
        if any(part.linear.bias is not None or part.linear.product.shift for part in parts[stage]):
            inputs[f"bias_{stage}"] = Tensor(ir.DataType.INT32, (width,))
    return Call(_OPERATOR, inputs, _OUTPUTS, _OPERATOR.attribute_values(_attributes(layer)))


def _attributes(layer: QuantisedProjections) -> dict[str, int]:
    return {"cache_mode": 1, "do_rms_norm": int(layer.input_norm is not None)}


def _parts(layer: QuantisedProjections) -> tuple[list[Part], list[Part]]:
    """The columns of both int8 weights in the operator's order, those that it rotates in half-split order."""

    def columns(of: Columns) -> npt.NDArray[np.int64]:
        return np.arange(of.start, of.start + of.size)

    key = columns(layer.rotated)
    if layer.key_rope.input_layout is RopeLayout.INTERLEAVED:
        key = np.asarray(interleaved_to_half(key), np.int64)
    down = [(layer.latent, columns(layer.latent)), (layer.rotated, key), (layer.low_rank, columns(layer.low_rank))]
    per_head = np.arange(layer.up.weight.shape[1]).reshape(layer.heads, -1)
    if layer.up_rope.input_layout is RopeLayout.INTERLEAVED:
        per_head = np.asarray(interleaved_to_half(per_head, layer.nope), np.int64)
    return [Part(of.linear, chosen) for of, chosen in down], [Part(layer.up, per_head.reshape(-1))]


def _emit(emit: Emitter, layer: QuantisedProjections, facts: Facts) -> dict[ir.Value, ir.Value]:
    inputs = _inputs(emit, layer, facts)
    made = emit.fused(_OPERATOR, inputs, _OUTPUTS, _attributes(layer))
    results = {
        layer.query: _shaped(emit, made["q_out"], layer, layer.order, layer.query, facts),
        layer.query_rope: _shaped(emit, made["q_rope_out"], layer, _rope_order(layer), layer.query_rope, facts),
    }
    for write, cache in ((layer.latent_write, "kv_cache_out"), (layer.rotated_write, "kr_cache_out")):
        results[write.value] = _flat(emit, made[cache], facts.shape(write.value) or ())
    return results


def _inputs(emit: Emitter, layer: QuantisedProjections, facts: Facts) -> dict[str, ir.Value]:
    dtype = layer.x.dtype
    assert dtype is not None  # `_unfit` has looked at it
    down, up = _parts(layer)
    given: dict[str, ir.Value | None] = {
        "input": _flat(emit, layer.x, facts.shape(layer.x) or ()),
        "gamma_0": _no_gamma(emit, dtype),
        **_norm(0, layer.input_norm),
        **_quantisation(emit, 0, layer.rows, dtype),
        "wdqkv": int8_weights.weight_rows(emit, down),
        "descale_0": int8_weights.scales(emit, down, dtype),
        "bias_0": int8_weights.biases(emit, down),
        **_norm(1, layer.query_norm),
        **_quantisation(emit, 1, layer.query_rows, dtype),
        "wuq": int8_weights.weight_rows(emit, up),
        "descale_1": int8_weights.scales(emit, up, dtype),
        "bias_1": int8_weights.biases(emit, up),
        "gamma_2": layer.latent_norm.gamma,
        "cos": _angles(emit, layer.key_rope, layer.key_rope.cos, facts),
        "sin": _angles(emit, layer.key_rope, layer.key_rope.sin, facts),
        "wuk": key_half_of(emit, layer.key_weight),
        "kv_cache": _paged(emit, layer.latent_write.cache, _LATENT, facts),
        "kv_cache_rope": _paged(emit, layer.rotated_write.cache, _ROPE, facts),
        "slot_mapping": _slot_mapping(emit, layer.latent_write, facts),
    }
    return {name: value for name, value in given.items() if value is not None}


def _norm(stage: int, norm: ShiftedNorm | None) -> dict[str, ir.Value | None]:
    return {} if norm is None else {f"gamma_{stage}": norm.norm.gamma, f"beta_{stage}": norm.beta}


def _no_gamma(emit: Emitter, dtype: ir.DataType) -> ir.Value:
    """Shape (0) stands for an input that is not used."""
    return emit.typed(np.zeros(0, dtype.numpy()))


def _quantisation(emit: Emitter, stage: int, rows: PerTensor, dtype: ir.DataType) -> dict[str, ir.Value]:
    scale = np.array([rows.scale], np.float32)
    rounded = scale.astype(dtype.numpy())
    exact = np.array_equal(rounded.astype(np.float32), scale)
    return {
        f"quant_scale_{stage}": emit.typed(rounded if exact else scale),
        f"quant_offset_{stage}": emit.typed(np.array([rows.zero_point], np.int8)),
    }


def _slot_mapping(emit: Emitter, write: SlotWrite, facts: Facts) -> ir.Value:
    """(T) int32."""

    def build() -> ir.Value:
        slots, dims = write.slots, facts.shape(write.slots) or ()
        if len(dims) > 1:
            dims = dims[:1]
            slots = emit.op("Reshape", slots, emit.integers([-1]), shape=dims)
        if slots.dtype == ir.DataType.INT32:
            return slots
        return emit.op("Cast", slots, to=ir.DataType.INT32, dtype=ir.DataType.INT32, shape=dims)

    value: ir.Value = emit.shared(("slot mapping", write.slots), build)
    return value


# --- Shapes -----------------------------------------------------------------------------------------------------------


def _flat(emit: Emitter, value: ir.Value, dims: tuple[Dimension, ...]) -> ir.Value:
    """A value with all axes but the last as one; `dims` are those of the value, or of the result."""
    width = dims[-1]
    if value.shape is not None and len(value.shape) == 2:
        return value
    assert isinstance(width, int)  # the hidden size, or that of a row in a cache
    rows = dims[0] if len(dims) == 2 else _product(dims[:-1])
    return emit.op("Reshape", value, emit.integers([-1, width]), shape=(rows, width))


def _product(dims: tuple[Dimension, ...]) -> Dimension:
    total: Dimension = 1
    for dim in dims:
        total = dim * total if isinstance(dim, ir.SymbolicDim) else total * dim
    return total


def _rope_order(layer: QuantisedProjections) -> tuple[int, ...]:
    """The axes (tokens, N, Dr) in the order of the graph's rotated query."""
    last = len(layer.order) - 1
    axes = list(range(last + 1))
    if layer.rope_heads_first:
        axes[last - 1], axes[last - 2] = axes[last - 2], axes[last - 1]
    return tuple(axes)


def _shaped(
    emit: Emitter, value: ir.Value, layer: QuantisedProjections, order: tuple[int, ...], like: ir.Value, facts: Facts
) -> ir.Value:
    """(T, N, H) of the operator with its tokens in the axes of x, in the order of the result that it replaces."""
    dims, width = facts.shape(layer.x) or (), static_last(value)
    axes: tuple[Dimension, ...] = (*dims[:-1], layer.heads, width)
    if len(dims) > 2:
        tokens = _token_shape(emit, layer.x, len(dims) - 1)
        target = emit.shared(
            ("heads of", layer.x, layer.heads, width),
            lambda: emit.op("Concat", tokens, emit.integers([layer.heads, width]), axis=0, shape=[len(axes)]),
        )
        value = emit.op("Reshape", value, target, shape=axes)
    if order == tuple(range(len(order))):
        return value
    return emit.op("Transpose", value, perm=list(order), shape=facts.shape(like))


def static_last(value: ir.Value) -> int:
    """The number of features of an output of the operator."""
    width = value.shape[-1] if value.shape is not None else None
    assert isinstance(width, int)  # inferred from W_UK and the angles
    return width


def _token_shape(emit: Emitter, x: ir.Value, count: int) -> ir.Value:
    value: ir.Value = emit.shared(
        ("token shape", x), lambda: emit.op("Shape", x, dtype=ir.DataType.INT64, start=0, end=count, shape=[count])
    )
    return value


def _angles(emit: Emitter, rope: Rope, angles: Angles, facts: Facts) -> ir.Value:
    """cos or sin as the operator takes it: (T, 64), both halves."""

    def build() -> ir.Value:
        value = row_by_row(angles.value, facts)
        flat = _flat(emit, value, facts.shape(value) or ())
        if not rope.half_width:
            return flat
        return emit.op("Concat", flat, flat, axis=-1, shape=((flat.shape or (ir.SymbolicDim(None),))[0], _ROPE))

    value: ir.Value = emit.shared(("rows of angles", angles.value, rope.half_width), build)
    return value


# --- Caches -----------------------------------------------------------------------------------------------------------


def _blocks(cache: ir.Value, facts: Facts) -> tuple[int | None, int | None]:
    """The blocks and their size into which the slots of a cache (slots, H) are divided, as far as they are known."""
    slots = facts.size(cache, 0)
    if slots is None:
        return None, None
    size = gcd(slots, _BLOCK_SIZE)
    return slots // max(size, 1), size


def _paged(emit: Emitter, cache: ir.Value, width: int, facts: Facts) -> ir.Value:
    """A cache (slots, H) as (blocks, block size, 1, H): blocks of 128 slots where that divides them, else of one.

    A cache that was (blocks, block size, 1, H) before it was flattened goes in as it was.
    """
    flattened = facts.producer(cache)
    if is_op(flattened, "Reshape"):
        dims = facts.shape(facts.input(flattened, 0))
        if dims is not None and len(dims) == 4 and dims[2:] == (1, width):
            return facts.input(flattened, 0)
    count, size = _blocks(cache, facts)
    if count is not None and size is not None:
        return emit.op("Reshape", cache, emit.integers([count, size, 1, width]), shape=(count, size, 1, width))
    slots = emit.op("Shape", cache, dtype=ir.DataType.INT64, start=0, end=1, shape=[1])
    rest = emit.op("Mod", slots, emit.integers([_BLOCK_SIZE]), shape=[1])
    divides = emit.op("Equal", rest, emit.integers([0]), dtype=ir.DataType.BOOL, shape=[1])
    size_value = emit.op(
        "Where", divides, emit.integers([_BLOCK_SIZE]), emit.integers([1]), dtype=ir.DataType.INT64, shape=[1]
    )
    target = emit.op("Concat", emit.integers([-1]), size_value, emit.integers([1, width]), axis=0, shape=[4])
    unknown = ir.SymbolicDim(None)
    return emit.op("Reshape", cache, target, shape=(unknown, unknown, 1, width))
