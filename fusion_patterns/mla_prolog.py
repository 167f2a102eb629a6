"""Multi-head latent attention -> MlaPrologV2WeightNz -> attention in the latent space.

x -> q_a -> norm -> q_b -> rope                          x -> MlaPrologV2WeightNz -> query, query_rope
x -> kv_a -> norm, rope -> cache -> kv_b -> attention     =>   -> new rows -> cache -> latent attention -> W_UV

The caches of the graph stay what they are: the operator writes the new rows into a scratch cache, they are read back
and appended where the old graph appended them. kv_b is absorbed: its key half multiplies the query inside the operator,
its value half the weighted latents, so keys and values are never expanded.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns import weights
from fusion_patterns.absorbed_attention import (
    LatentQuery,
    Tokens,
    expand_values,
    interleave,
    latent_attention,
)
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Candidate, LatentCache, Match
from fusion_patterns.graph import Dimension, Facts, is_op, same_dim
from fusion_patterns.lift.attention import recognise_attention
from fusion_patterns.lift.latent_attention import LatentAttention, recognise_latent_attention
from fusion_patterns.lift.linear import WeightView
from fusion_patterns.lift.rope import Angles, Rope, RopeLayout
from fusion_patterns.miss import Miss, miss
from fusion_patterns.sparse_flash_attention import NAME as SPARSE
from fusion_patterns.sparse_flash_attention import SparseAttention, recognise_sparse_attention

__all__ = ["MlaProlog"]

_PROLOG = OPERATORS["MlaPrologV2WeightNz"]
_BLOCK_SIZE = 16
"""Slots of a block of the scratch cache: the smallest the device takes."""
_LATENT, _ROPE, _NOPE = 512, 64, 128
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class MlaProlog:
    """See the module."""

    name = "mla_prolog"
    operators = ("MlaPrologV2WeightNz", "SparseFlashAttention")
    anchors = ("Softmax", "Attention")

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Candidate]:
        """A Match, and a Miss for a selection that stays a mask; or the Miss of the whole layer."""
        attention = recognise_attention(node, facts)
        if attention is None:
            return
        layer = attention if isinstance(attention, Miss) else recognise_latent_attention(attention, facts)
        reason = layer if isinstance(layer, Miss) else _unfit(layer, facts)
        if reason is not None:
            yield Candidate(self.name, node, reason)
            return
        assert not isinstance(layer, Miss)  # that would have been the reason
        sparse = recognise_sparse_attention(layer, facts)
        if isinstance(sparse, Miss):
            yield Candidate(SPARSE, node, sparse)
            sparse = None
        yield _match(layer, sparse, facts)


def _unfit(layer: LatentAttention, facts: Facts) -> Miss | None:
    """What about a recognised layer the operator does not compute."""
    x, key = layer.x, layer.key
    dtype = x.dtype
    if facts.rank(x) != 3:
        return miss("query-unrecognised", layer.query.down.node, "a hidden state (B, S, He)", f"{facts.rank(x)} axes")
    if dtype not in _FLOATS:
        return miss("dtype", layer.query.down.node, "float32, float16 or bfloat16", str(dtype))
    sizes = (facts.size(key.norm.gamma, 0), facts.size(key.rope.x, -1), key.nope)
    if sizes != (_LATENT, _ROPE, _NOPE):
        wanted = f"latent {_LATENT}, rope {_ROPE}, nope {_NOPE}"
        return miss("split-sizes", key.down.node, wanted, f"latent {sizes[0]}, rope {sizes[1]}, nope {sizes[2]}")
    if layer.query.rope.output_layout != key.rope.output_layout:
        return miss("rope-differs", key.rope.node, "query and key rotated into one order of features", "two orders")
    if (key.latent.past is None) != (key.rotated.past is None):
        return miss("cache-mismatch", layer.attention.node, "both parts cached or none", "one cached")
    mask = layer.attention.mask
    if mask is not None and (facts.rank(mask) is None or (facts.rank(mask) or 0) > 4):
        return miss("mask-unrecognised", mask, "at most four axes", f"{facts.rank(mask)} axes")
    return None


def _match(layer: LatentAttention, sparse: SparseAttention | None, facts: Facts) -> Match:
    attention, key = layer.attention, layer.key
    out = sparse.out if sparse is not None else attention.out
    results = (out, key.latent.new, key.rotated.new)
    boundary: dict[ir.Value, str | None] = {
        layer.x: None,
        layer.query.rope.cos.value: None,
        layer.query.rope.sin.value: None,
    }
    boundary.update({rows.past: None for rows in (key.latent, key.rotated) if rows.past is not None})
    if sparse is not None:
        boundary[sparse.selection.scores] = None
    elif attention.mask is not None:
        boundary[attention.mask] = None
    itemsize = layer.x.dtype.itemsize if layer.x.dtype else 0
    per_head = layer.query.heads * (key.nope + _ROPE + key.value_size)

    def emit(emitter: Emitter) -> dict[ir.Value, ir.Value]:
        return _emit(emitter, layer, sparse, facts)

    return Match(
        MlaProlog.name,
        attention.node,
        (_prolog_call(layer, facts), *(() if sparse is None else (sparse.call(layer, facts),))),
        results,
        boundary,
        emit,
        absorbed=_absorbed(layer),
        assumed=() if sparse is None else sparse.assumed,
        shape_of=lambda emitter, node: _shape_of(emitter, node, layer, facts),
        cache=LatentCache((_LATENT + _ROPE) * int(itemsize), per_head * int(itemsize)),
    )


def _shape_of(emit: Emitter, node: ir.Node, layer: LatentAttention, facts: Facts) -> ir.Value | None:
    """What a Shape node in the layer yields, from batch, length and cache; None where another dimension is in it."""
    dims = facts.symbolic(node.outputs[0])
    scratch, cache = _scratch(emit, layer.x, facts), layer.key.latent.all
    parts: list[ir.Value] = []
    for dim in dims or ():
        if isinstance(dim, int):
            parts.append(emit.integers([dim]))
        elif same_dim(dim, scratch.b):
            parts.append(scratch.batch)
        elif same_dim(dim, scratch.s):
            parts.append(scratch.length)
        elif same_dim(dim, facts.dim(cache, -2)):
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


def _absorbed(layer: LatentAttention) -> tuple[ir.Value, ...]:
    """The values that the operators compute inside: whoever else reads one keeps its computation alive."""
    query, key = layer.query, layer.key
    linears = (query.down, query.up, key.down, key.expansion)
    return (query.normed, *(linear.node.outputs[0] for linear in linears), layer.attention.node.outputs[0])


def _prolog_call(layer: LatentAttention, facts: Facts) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    x, query, key = Tensor.of(layer.x), layer.query, layer.key
    cache = Tensor(x.dtype, (None, _BLOCK_SIZE, 1, _LATENT))
    angles = Tensor(x.dtype, (x.dim(0), x.dim(1), _ROPE))
    inputs = {
        "token_x": x,
        "weight_dq": Tensor(x.dtype, query.down.weight.shape),
        "weight_uq_qr": Tensor(x.dtype, query.up.weight.shape),
        "weight_uk": Tensor(x.dtype, (query.heads, query.nope, _LATENT)),
        "weight_dkv_kr": Tensor(x.dtype, key.down.weight.shape),
        "rmsnorm_gamma_cq": Tensor.of(query.norm.gamma),
        "rmsnorm_gamma_ckv": Tensor.of(key.norm.gamma),
        "rope_sin": angles,
        "rope_cos": angles,
        "cache_index": Tensor(ir.DataType.INT64, (x.dim(0), x.dim(1))),
        "kv_cache": cache,
        "kr_cache": Tensor(x.dtype, (None, _BLOCK_SIZE, 1, _ROPE)),
    }
    return Call(_PROLOG, inputs, _OUTPUTS, _PROLOG.attribute_values(_attributes(layer)))


_OUTPUTS = ("query", "query_rope", "kv_cache_out", "kr_cache_out")


def _attributes(layer: LatentAttention) -> dict[str, float | str]:
    return {
        "rmsnorm_epsilon_cq": layer.query.norm.epsilon,
        "rmsnorm_epsilon_ckv": layer.key.norm.epsilon,
        "cache_mode": "PA_BSND",
    }


def _emit(
    emit: Emitter, layer: LatentAttention, sparse: SparseAttention | None, facts: Facts
) -> dict[ir.Value, ir.Value]:
    key = layer.key
    scratch = _scratch(emit, layer.x, facts)
    weight_uk, weight_uv = weights.absorbed_pair(emit, key.expansion.weight, layer.query.heads, key.nope)
    made = emit.fused(
        _PROLOG, _inputs(emit, layer, weight_uk, scratch, facts), _OUTPUTS, _attributes(layer), _provenance(layer)
    )
    interleaved = key.rope.output_layout is RopeLayout.INTERLEAVED
    new_latent = _read_back(emit, scratch, made["kv_cache_out"], _LATENT, like=key.latent.new, facts=facts)
    new_rotated = _read_back(
        emit, scratch, made["kr_cache_out"], _ROPE, like=key.rotated.new, facts=facts, interleaved=interleaved
    )
    latent = new_latent if key.latent.past is None else key.latent.all
    rotated = new_rotated if key.rotated.past is None else key.rotated.all
    total = facts.dim(key.latent.all, -2)
    tokens = Tokens(
        scratch.b,
        scratch.s,
        layer.query.heads,
        total if total is not None else ir.SymbolicDim(None),
        scratch.batch,
        scratch.length,
    )
    query_rope = interleave(emit, made["query_rope"]) if interleaved else made["query_rope"]
    query = LatentQuery(made["query"], query_rope)
    attention = layer.attention
    if sparse is not None:
        context = sparse.emit(emit, query, latent, rotated, attention.scale, _provenance(layer))
    else:
        context = latent_attention(emit, tokens, query, latent, rotated, attention)
    out = sparse.out if sparse is not None else attention.out
    return {
        out: expand_values(emit, tokens, context, weight_uv, heads_first=attention.heads_first),
        key.latent.new: new_latent,
        key.rotated.new: new_rotated,
    }


def _provenance(layer: LatentAttention) -> dict[str, str]:
    return {"ascend_onnx.fusion": MlaProlog.name, "ascend_onnx.anchor": layer.attention.node.name or ""}


class _Scratch:
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
        self.latent = self._zeros(emit, _LATENT)
        self.rotated = self._zeros(emit, _ROPE)

    def _zeros(self, emit: Emitter, width: int) -> ir.Value:
        shape = emit.op("Concat", self.blocks, emit.integers([_BLOCK_SIZE, 1, width]), axis=0, shape=[4])
        assert self.dtype is not None  # `_unfit` has looked at it
        zero = ir.tensor([0.0], dtype=self.dtype)
        dims = (ir.SymbolicDim(None), _BLOCK_SIZE, 1, width)
        return emit.op("ConstantOfShape", shape, value=zero, shape=dims, dtype=self.dtype)


def _scratch(emit: Emitter, x: ir.Value, facts: Facts) -> _Scratch:
    """One scratch for all layers whose hidden states have provably the same dimensions."""
    dims = facts.shape(x)
    known = dims is not None and all(isinstance(d, int) or d.value is not None for d in dims[:2])
    key = ("scratch", tuple(map(str, dims[:2])), x.dtype) if known and dims is not None else ("scratch", x)
    scratch: _Scratch = emit.shared(key, lambda: _Scratch(emit, x, facts))
    return scratch


def _inputs(
    emit: Emitter, layer: LatentAttention, weight_uk: ir.Value, scratch: _Scratch, facts: Facts
) -> dict[str, ir.Value]:
    query, key = layer.query, layer.key
    return {
        "token_x": layer.x,
        "weight_dq": weights.as_stored(emit, query.down.weight),
        "weight_uq_qr": _rotating(emit, query.up.weight, query.rope, query.heads, query.nope),
        "weight_uk": weight_uk,
        "weight_dkv_kr": _rotating(emit, key.down.weight, key.rope, 1, _LATENT),
        "rmsnorm_gamma_cq": query.norm.gamma,
        "rmsnorm_gamma_ckv": key.norm.gamma,
        "rope_sin": _angles(emit, query.rope, query.rope.sin, scratch, facts),
        "rope_cos": _angles(emit, query.rope, query.rope.cos, scratch, facts),
        "cache_index": scratch.index,
        "kv_cache": scratch.latent,
        "kr_cache": scratch.rotated,
    }


def _rotating(emit: Emitter, view: WeightView, rope: Rope, heads: int, start: int) -> ir.Value:
    """The operator rotates interleaved features: columns of a projection that yields half order move."""
    if rope.input_layout is RopeLayout.INTERLEAVED:
        return weights.as_stored(emit, view)
    return weights.rope_interleaved(emit, view, heads, start)


def _angles(emit: Emitter, rope: Rope, angles: Angles, scratch: _Scratch, facts: Facts) -> ir.Value:
    """cos or sin as the operator takes it: (B, S, 64), both halves."""

    def build() -> ir.Value:
        flat = _three_axes(emit, angles, facts)
        whole = _whole_width(emit, flat, facts) if rope.half_width else flat
        if _dim(facts, whole, 0) == scratch.b and _dim(facts, whole, 1) == scratch.s:
            return whole
        target = emit.op("Concat", scratch.batch, scratch.length, emit.integers([_ROPE]), axis=0, shape=[3])
        return emit.op("Expand", whole, target, shape=(scratch.b, scratch.s, _ROPE))

    value: ir.Value = emit.shared(("angles", angles.value, rope.half_width, scratch.index), build)
    return value


def _three_axes(emit: Emitter, angles: Angles, facts: Facts) -> ir.Value:
    """Angles without the axis they are broadcast over heads on, and without a unit axis at the end."""
    shape = facts.shape(angles.value) or ()
    if not angles.head_axes:
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
    return emit.op("Concat", angles, angles, axis=-1, shape=(*shape[:-1], _ROPE))


def _doubled_source(half: ir.Value, facts: Facts) -> ir.Value | None:
    """Cos or Sin of Concat(f, f), where `half` is one half of it."""
    cut = facts.producer(half)
    source = facts.input(cut, 0) if is_op(cut, "Slice") else None
    function = None if source is None else facts.producer(source)
    if source is None or not is_op(function, "Cos", "Sin"):
        return None
    join = facts.producer(facts.input(function, 0))
    doubled = is_op(join, "Concat") and len(join.inputs) == 2 and facts.input(join, 0) is facts.input(join, 1)
    return source if doubled and facts.size(source, -1) == _ROPE else None


def _read_back(
    emit: Emitter,
    scratch: _Scratch,
    cache: ir.Value,
    width: int,
    *,
    like: ir.Value,
    facts: Facts,
    interleaved: bool = False,
) -> ir.Value:
    """The rows just written to a scratch cache (blocks, 16, 1, H), in the shape of the rows `like` they replace."""
    flat = emit.op("Reshape", cache, emit.integers([-1, width]), shape=(ir.SymbolicDim(None), width))
    bounds = (emit.integers([0]), scratch.count, emit.integers([0]))
    rows = emit.op("Slice", flat, *bounds, shape=(scratch.b * scratch.s, width))
    if interleaved:
        rows = interleave(emit, rows)
    dims = facts.shape(like) or ()
    unit = None if len(dims) == 3 else 1 if dims[1] == 1 else 2
    wanted: list[ir.Value] = [scratch.batch, scratch.length, emit.integers([width])]
    if unit is not None:
        wanted.insert(unit, emit.integers([1]))
    target = emit.shared(
        ("new rows", scratch.index, width, unit), lambda: emit.op("Concat", *wanted, axis=0, shape=[len(wanted)])
    )
    return emit.op("Reshape", rows, target, shape=dims)


def _dim(facts: Facts, value: ir.Value, axis: int) -> Dimension:
    dim = facts.dim(value, axis)
    return ir.SymbolicDim(None) if dim is None else dim
