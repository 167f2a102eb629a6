"""Latent attention under a top-k selection -> SparseFlashAttention.

scores -> causal mask -> TopK -> scatter into a mask -> dense attention   =>   TopK -> SparseFlashAttention

The selection is a list of key positions per query token, so the mask and the products with unselected keys disappear.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ascend_onnx.operator import Call, Tensor
from ascend_onnx.operators import OPERATORS
from fusion_patterns.absorbed_attention import LatentQuery, without_head_axis
from fusion_patterns.emit import Emitter
from fusion_patterns.graph import Facts, same_dim
from fusion_patterns.lift.latent_attention import LatentAttention
from fusion_patterns.lift.mask import Selection, recognise_additive, recognise_guard, recognise_selection
from fusion_patterns.miss import Miss, miss

__all__ = ["NAME", "SparseAttention", "recognise_sparse_attention"]

NAME = "sparse_flash_attention"

_OPERATOR = OPERATORS["SparseFlashAttention"]
_RIGHT_DOWN_CAUSAL = 3


@dataclass(frozen=True)
class SparseAttention:
    """A selection over a latent attention layer; `out` (B, N, S, Dv) is the value to replace."""

    selection: Selection
    out: ir.Value

    @property
    def assumed(self) -> tuple[str, ...]:
        """Named assumptions that the match stands on."""
        return () if self.selection.causal is not None else ("causal-mask",)

    def call(self, layer: LatentAttention) -> Call:
        """What the fused node will say of itself."""
        x, keys, indices = (
            Tensor.of(layer.projections.x),
            Tensor.of(layer.key.latent.all),
            Tensor.of(self.selection.indices),
        )
        b, s, heads = x.dim(0), x.dim(1), layer.projections.query.heads
        rows = Tensor(x.dtype, (b, keys.dim(-2), 1, 512))
        inputs = {
            "query": Tensor(x.dtype, (b, s, heads, 512)),
            "key": rows,
            "value": rows,
            "sparse_indices": Tensor(ir.DataType.INT32, (b, s, 1, indices.dim(2))),
            "query_rope": Tensor(x.dtype, (b, s, heads, 64)),
            "key_rope": Tensor(x.dtype, (b, keys.dim(-2), 1, 64)),
        }
        return Call(
            _OPERATOR, inputs, ("attention_out",), _OPERATOR.attribute_values(_attributes(layer.attention.scale))
        )

    def emit(
        self,
        emit: Emitter,
        query: LatentQuery,
        latent: ir.Value,
        rotated: ir.Value,
        scale: float,
    ) -> ir.Value:
        """attention_out (B, S, N, 512) of the latents (B, 1, T, 512) and rotated keys (B, 1, T, 64)."""
        indices = emit.op(
            "Cast",
            self.selection.indices,
            to=ir.DataType.INT32,
            dtype=ir.DataType.INT32,
            shape=_dims(self.selection.indices),
        )
        b, s, k = _dims(indices)
        keys = _tokens_first(emit, latent)
        inputs = {
            "query": query.query,
            "key": keys,
            "value": keys,
            "sparse_indices": emit.op("Unsqueeze", indices, emit.integers([2]), shape=(b, s, 1, k)),
            "query_rope": query.query_rope,
            "key_rope": _tokens_first(emit, rotated),
        }
        return emit.fused(_OPERATOR, inputs, ("attention_out",), _attributes(scale))["attention_out"]


def _attributes(scale: float) -> dict[str, float | int | str]:
    return {
        "scale_value": scale,
        "sparse_block_size": 1,
        "layout_query": "BSND",
        "layout_kv": "BSND",
        "sparse_mode": _RIGHT_DOWN_CAUSAL,
    }


def _tokens_first(emit: Emitter, rows: ir.Value) -> ir.Value:
    """(B, T, 1, H) of (B, 1, T, H) or (B, T, H), without moving data."""
    flat = without_head_axis(emit, rows)
    b, t, width = _dims(flat)
    return emit.op("Unsqueeze", flat, emit.integers([2]), shape=(b, t, 1, width))


def _dims(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    assert value.shape is not None  # matched values have a rank, emitted ones a shape
    return tuple(value.shape)


def recognise_sparse_attention(layer: LatentAttention, facts: Facts) -> SparseAttention | Miss | None:
    """The selection under which a layer attends; None when its mask involves none.

    The mask must be provably causal with its diagonal in the lower right corner: key j is visible to query i exactly
    if j <= i + T - S.
    """
    mask = layer.attention.mask
    selection = None if mask is None else recognise_selection(mask, facts)
    if selection is None or isinstance(selection, Miss):
        return selection
    keys, queries = facts.dim(layer.key.latent.all, -2), facts.dim(layer.projections.x, 1)
    causal = selection.causal
    if keys is None or queries is None:
        return miss("selection-not-causal", selection.node, "known numbers of keys and queries", "unknown ones")
    if causal is not None and not (same_dim(causal.keys, keys) and same_dim(causal.queries, queries)):
        return miss("selection-not-causal", selection.node, f"a mask of {queries} queries and {keys} keys", str(causal))
    if causal is not None and not same_dim(causal.offset, keys - queries):
        return miss(
            "selection-not-causal", selection.node, f"keys up to i + {keys - queries}", f"up to i + {causal.offset}"
        )
    if not same_dim(facts.dim(selection.scores, 2), keys):
        return miss("selection-not-causal", selection.node, f"scores of {keys} keys", "another number")
    guard = recognise_guard(layer.attention.out, facts)
    guarded = guard is not None and mask is not None and guard.visible is recognise_additive(mask, facts)
    return SparseAttention(selection, guard.out if guard is not None and guarded else layer.attention.out)
