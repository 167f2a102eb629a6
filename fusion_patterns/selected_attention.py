"""Attention over gathered or masked keys in the latent space -> SparseFlashAttention.

gather keys by a list per token -> products, softmax, product      =>   SparseFlashAttention, every listed key visible
scatter a list into a mask      -> dense products, softmax, product
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns.emit import Emitter
from fusion_patterns.engine import Match, Refused
from fusion_patterns.graph import Facts
from fusion_patterns.lift.selected_attention import SelectedAttention, recognise_selected_attention
from fusion_patterns.miss import Miss

__all__ = ["SelectedKeys"]

_OPERATOR = OPERATORS["SparseFlashAttention"]
_NO_MASK = 0


class SelectedKeys:
    """See the module."""

    name = "selected_attention"
    operators = ("SparseFlashAttention",)
    anchors = ("Softmax",)

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]:
        found = recognise_selected_attention(node, facts)
        if isinstance(found, Miss):
            yield Refused(self.name, node, found)
        elif found is not None:
            yield _match(found, facts)


def _match(found: SelectedAttention, facts: Facts) -> Match:
    keys = facts.dim(found.latent, 1)
    boundary: dict[ir.Value, str | None] = {
        found.query: None,
        found.query_rope: None,
        found.latent: None,
        found.rotated: None,
        found.indices: None if keys is None else f"distinct:{keys}",
    }
    return Match(
        SelectedKeys.name,
        found.node,
        (_call(found),),
        (found.out,),
        boundary,
        lambda emit: _emit(emit, found, facts),
        assumed=() if found.proven and not found.padded else ("indices-valid",),
        shapes=_one_list_per_token(found, facts),
    )


def _one_list_per_token(found: SelectedAttention, facts: Facts) -> dict[ir.Value, ir.Shape]:
    """The list's shape in the query's dimensions: scattering would also take fewer lists than there are tokens."""
    query, listed = facts.shape(found.query), facts.shape(found.indices)
    return {} if query is None or listed is None else {found.indices: ir.Shape([*query[:2], listed[2]])}


def _attributes(found: SelectedAttention) -> dict[str, float | int | str]:
    return {
        "scale_value": found.scale,
        "sparse_block_size": 1,
        "layout_query": "BSND",
        "layout_kv": "BSND",
        "sparse_mode": _NO_MASK,
    }


def _call(found: SelectedAttention) -> Call:
    """What the fused node will say of itself, for the checks of a product."""
    query, rope, indices = Tensor.of(found.query), Tensor.of(found.query_rope), Tensor.of(found.indices)
    latent, rotated = Tensor.of(found.latent), Tensor.of(found.rotated)
    keys = Tensor(latent.dtype, (latent.dim(0), latent.dim(1), 1, latent.dim(2)))
    inputs = {
        "query": query,
        "key": keys,
        "value": keys,
        "sparse_indices": Tensor(ir.DataType.INT32, (indices.dim(0), indices.dim(1), 1, indices.dim(2))),
        "query_rope": rope,
        "key_rope": Tensor(rotated.dtype, (rotated.dim(0), rotated.dim(1), 1, rotated.dim(2))),
    }
    return Call(_OPERATOR, inputs, ("attention_out",), _OPERATOR.attribute_values(_attributes(found)))


def _emit(emit: Emitter, found: SelectedAttention, facts: Facts) -> dict[ir.Value, ir.Value]:
    dims = facts.shape(found.indices) or ()
    listed = found.indices
    if listed.dtype != ir.DataType.INT32:
        listed = emit.op("Cast", listed, to=ir.DataType.INT32, dtype=ir.DataType.INT32, shape=dims)
    keys = _with_head_axis(emit, found.latent, facts)
    inputs = {
        "query": found.query,
        "key": keys,
        "value": keys,
        "sparse_indices": emit.op("Unsqueeze", listed, emit.integers([2]), shape=(*dims[:2], 1, dims[2])),
        "query_rope": found.query_rope,
        "key_rope": _with_head_axis(emit, found.rotated, facts),
    }
    out = emit.fused(_OPERATOR, inputs, ("attention_out",), _attributes(found))["attention_out"]
    return {found.out: _empty_rows_undefined(emit, out, listed, facts) if found.padded else out}


def _with_head_axis(emit: Emitter, rows: ir.Value, facts: Facts) -> ir.Value:
    """(B, T, 1, H) of (B, T, H)."""
    b, t, width = facts.shape(rows) or ()
    return emit.op("Unsqueeze", rows, emit.integers([2]), shape=(b, t, 1, width))


def _empty_rows_undefined(emit: Emitter, out: ir.Value, indices: ir.Value, facts: Facts) -> ir.Value:
    """The softmax of a row without any key is not a number in the original, where the operator writes zeros."""
    b, s = (facts.shape(indices) or ())[:2]
    ends = emit.integers([0, 0, 0, 0, 0, 1])
    listed = emit.op("Pad", indices, ends, shape=(b, s, ir.SymbolicDim(None)))  # a list of length 0 is not empty-handed
    first = emit.op("Slice", listed, emit.integers([0]), emit.integers([1]), emit.integers([2]), shape=(b, s, 1))
    zero = emit.typed(np.array(0, np.int32))
    empty = emit.op("Less", first, zero, dtype=ir.DataType.BOOL, shape=(b, s, 1))
    spread = emit.op("Unsqueeze", empty, emit.integers([3]), shape=(b, s, 1, 1))
    assert out.dtype is not None  # inferred by the operator's description
    undefined = emit.scalar(float("nan"), out.dtype)
    return emit.op("Where", spread, undefined, out, dtype=out.dtype, shape=tuple(out.shape or ()))
