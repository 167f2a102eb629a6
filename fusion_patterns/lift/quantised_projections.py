"""The projections of latent attention in 8 bits with constant scales, from hidden states to the rows in the caches.

x -> [RmsNorm] -> quantise -> int8 W_DKV -> [latent -> RmsNorm -> cache | rope -> Rope -> cache]
                           -> int8 W_DQ -> RmsNorm -> quantise -> int8 W_UQ -> heads [nope x W_UK | rope -> Rope]

W_DKV and W_DQ may be one weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.absorbed_query import KeyWeight, key_weight
from fusion_patterns.lift.contraction import Contraction, Labelled, recognise_contraction
from fusion_patterns.lift.heads import recognise_heads
from fusion_patterns.lift.nearby import values_behind
from fusion_patterns.lift.quantised import (
    PerTensor,
    PerToken,
    quantised_again,
    same_codes,
)
from fusion_patterns.lift.quantised_linear import (
    UNDERSTOOD,
    QuantisedLinear,
    QuantisedProduct,
    dequantised,
    recognise_quantised_linear,
    recognise_quantised_product,
)
from fusion_patterns.lift.rms_norm import RmsNorm, recognise_rms_norm
from fusion_patterns.lift.rope import Rope, recognise_rope
from fusion_patterns.lift.slices import recognise_slice
from fusion_patterns.lift.slot_write import SlotWrite, recognise_slot_write
from fusion_patterns.lift.token_heads import TokenHeads, recognise_token_heads
from fusion_patterns.miss import Miss, miss

__all__ = ["Columns", "QuantisedProjections", "ShiftedNorm", "recognise_quantised_projections", "row_by_row"]

_NEAR = 160
"""How many values are looked at behind one: three paths with a norm, quantisation and a rotation on them."""

_NEXT = 16
"""How many values are looked at behind one for what only moves its columns."""

_STEPS = 8
"""How many nodes may make real numbers of a product before it is normed."""


@dataclass(frozen=True)
class Columns:
    """Columns [start, start + size) of a projection."""

    linear: QuantisedLinear
    start: int
    size: int


@dataclass(frozen=True)
class ShiftedNorm:
    """norm(x) + beta; `beta` (H) or None."""

    norm: RmsNorm
    beta: ir.Value | None


@dataclass(frozen=True)
class QuantisedProjections:
    """Hidden states `x` (T, He) or (B, S, He), normed by `input_norm` if there is one, and all that is made of them.

    `query` has the axes of `order` out of (tokens, N, Hckv); `query_rope` is the value that `up_rope` describes.
    """

    x: ir.Value
    input_norm: ShiftedNorm | None
    rows: PerTensor
    latent: Columns
    latent_norm: RmsNorm
    rotated: Columns
    key_rope: Rope
    low_rank: Columns
    query_norm: ShiftedNorm
    query_rows: PerTensor
    up: QuantisedLinear
    up_rope: Rope
    heads: int
    nope: int
    key_weight: KeyWeight
    query: ir.Value
    order: tuple[int, ...]
    query_rope: ir.Value
    rope_heads_first: bool
    latent_write: SlotWrite
    rotated_write: SlotWrite


def recognise_quantised_projections(node: ir.Node, facts: Facts) -> QuantisedProjections | Miss | None:
    """The projections around an 8-bit product that yields heads [nope | rope] from a normed, projected query.

    None for other products, and where the query (B, S, Hcq) is quantised by a scale for each token.
    """
    product = recognise_quantised_product(node, facts)
    if product is None:
        return None
    value, norm = dequantised(node, facts), _shifted_norm(product.rows.x, facts)
    low_rank = norm is not None and _stands_behind_product(norm.norm.x, facts)
    if not low_rank and not _is_absorbed(value, facts):
        return None
    turned = _rotated_heads(value, facts)
    if turned is None and not _is_rotated_somehow(value, facts) and not _is_absorbed(value, facts):
        return None
    if isinstance(product.rows, PerToken):
        if facts.rank(product.rows.x) == 3:
            return None  # another operator's
        wanted = "one scale for all tokens, or hidden states (B, S, He)"
        return miss("quantisation-unsupported", node, wanted, "a scale for each token of hidden states (T, He)")
    if product.odd is not None:
        return miss("quantisation-unsupported", node, UNDERSTOOD, product.odd)
    if turned is None:
        return miss("rope-unrecognised", node, "a rotation of the last columns of each head", "none")
    if norm is None:
        return miss("no-query-low-rank", node, "a normed query latent, quantised", "rows that are not normed")
    return _Layer(product, norm, value, turned, facts).recognise()


def _is_absorbed(value: ir.Value, facts: Facts) -> bool:
    """Whether heads of a projection are multiplied by a constant W_UK."""
    for behind in values_behind(value, facts, _NEXT):
        product = recognise_contraction(behind, facts)
        heads = None if product is None else _heads(product.left.value, facts)
        if product is not None and heads is not None and heads.source is value:
            return key_weight(product.right, product.shared, facts) is not None
    return False


def _shifted_norm(value: ir.Value, facts: Facts) -> ShiftedNorm | None:
    norm = recognise_rms_norm(value, facts)
    if isinstance(norm, RmsNorm):
        return ShiftedNorm(norm, None)
    node = facts.producer(value)
    if is_op(node, "Add"):
        for normed, beta in facts.either_way(node):
            norm = recognise_rms_norm(normed, facts)
            constant = beta.is_initializer() and not beta.is_graph_input() and facts.rank(beta) == 1
            if isinstance(norm, RmsNorm) and constant and facts.dim(beta, 0) == facts.dim(normed, -1):
                return ShiftedNorm(norm, beta)
    return None


def _stands_behind_product(value: ir.Value, facts: Facts) -> bool:
    """Whether a few steps with constants lead from a product of rows and a constant matrix to a value."""
    current = value
    for _ in range(_STEPS):
        node = facts.producer(current)
        if is_op(node, "MatMul", "MatMulInteger", "Gemm", "QLinearMatMul"):
            return True
        if not is_op(node, "Slice", "Split", "Cast", "Add", "Mul", "Div", "Sub", "QuantizeLinear", "DequantizeLinear"):
            return False
        variable = [v for v in map(facts.plain, filter(None, node.inputs)) if not v.is_initializer()]
        if len(variable) != 1:
            return False
        current = variable[0]
    return False


def _rotated_heads(value: ir.Value, facts: Facts) -> tuple[ir.Value, Rope, TokenHeads] | None:
    """The rotation of the last columns, and not all, of the heads of a value, whether it is quantised again or not."""
    for behind in values_behind(value, facts, _NEAR):
        rope = recognise_rope(behind, facts)
        heads = None if isinstance(rope, Miss) else _heads(rope.x, facts)
        if isinstance(rope, Miss) or heads is None or heads.start == 0 or heads.start + heads.size != heads.width:
            continue
        if value in (heads.source, quantised_again(heads.source, facts)):
            return behind, rope, heads
    return None


def _is_rotated_somehow(value: ir.Value, facts: Facts) -> bool:
    """Whether a rotation follows of columns that are no view of heads."""
    ropes = (recognise_rope(behind, facts) for behind in values_behind(value, facts, _NEAR))
    return any(not isinstance(rope, Miss) and _heads(rope.x, facts) is None for rope in ropes)


def _heads(value: ir.Value, facts: Facts) -> TokenHeads | None:
    if facts.rank(value) != 4:
        found = recognise_token_heads(value, facts)
        return None if isinstance(found, Miss) else found
    view = recognise_heads(value, facts)
    if isinstance(view, Miss):
        return None
    return TokenHeads(view.source, view.heads, view.width, view.start, view.size, view.heads_first)


class _Layer:
    """One layer while it is looked at: its parts are found one after the other."""

    def __init__(
        self,
        product: QuantisedProduct,
        norm: ShiftedNorm,
        value: ir.Value,
        turned: tuple[ir.Value, Rope, TokenHeads],
        facts: Facts,
    ) -> None:
        self.node, self.product, self.norm, self.value, self.facts = product.node, product, norm, value, facts
        self.rope_value, self.rope, self.heads = turned

    def recognise(self) -> QuantisedProjections | Miss:
        up = self._linear(self.value)
        if isinstance(up, Miss):
            return up
        if self.heads.source is not self.value:
            return _again(self.node, "the query projection")
        low_rank = self._columns(self.norm.norm.x)
        if isinstance(low_rank, Miss):
            return low_rank
        key = self._key(low_rank.linear)
        if isinstance(key, Miss):
            return key
        query = self._absorbed()
        if isinstance(query, Miss):
            return query
        writes = self._writes(key)
        if isinstance(writes, Miss):
            return writes
        assert isinstance(up.rows, PerTensor)  # `_linear` has seen to both
        assert isinstance(low_rank.linear.rows, PerTensor)
        input_norm = _shifted_norm(low_rank.linear.x, self.facts)
        return QuantisedProjections(
            x=low_rank.linear.x if input_norm is None else input_norm.norm.x,
            input_norm=input_norm,
            rows=low_rank.linear.rows,
            latent=key.latent,
            latent_norm=key.norm,
            rotated=key.rotated,
            key_rope=key.rope,
            low_rank=low_rank,
            query_norm=self.norm,
            query_rows=up.rows,
            up=up,
            up_rope=self.rope,
            heads=self.heads.heads,
            nope=self.heads.start,
            key_weight=query[0],
            query=query[1],
            order=query[2],
            query_rope=self.rope_value,
            rope_heads_first=self.heads.heads_first,
            latent_write=writes[0],
            rotated_write=writes[1],
        )

    def _linear(self, value: ir.Value) -> QuantisedLinear | Miss:
        linear = recognise_quantised_linear(value, self.facts)
        if isinstance(linear, Miss):
            return linear
        if isinstance(linear.rows, PerToken):
            return miss("quantisation-unsupported", linear.node, "one constant scale", "a scale for each token")
        return linear

    def _columns(self, value: ir.Value) -> Columns | Miss:
        """The columns of a projection that a value is."""
        again = quantised_again(value, self.facts)
        cut = recognise_slice(value, self.facts)
        source = self.facts.plain(value) if cut is None else cut.source
        if again is not None or (cut is not None and quantised_again(cut.source, self.facts) is not None):
            return _again(value, "a down projection")
        linear = self._linear(source)
        if isinstance(linear, Miss):
            return linear
        if cut is None:
            return Columns(linear, 0, linear.weight.shape[1])
        if cut.step != 1 or cut.axis != (self.facts.rank(value) or 0) - 1:
            return miss("split-sizes", value, "consecutive columns of a projection", "others")
        return Columns(linear, cut.start, cut.size)

    # The key

    def _key(self, query_down: QuantisedLinear) -> _Key | Miss:
        """The normed latent and the rotated key made of the rows that the query's down projection reads."""
        reasons = []
        for source in self._projections_of(query_down.x):
            norms = self._normed(source)
            ropes = self._rotated(source)
            if norms is None or ropes is None:
                continue
            key = self._key_of(norms, ropes, query_down)
            if not isinstance(key, Miss):
                return key
            reasons.append(key)
        wanted = "a latent to be normed and a rotary key, projected from the quantised rows of the query projection"
        return reasons[0] if reasons else miss("latent-unrecognised", query_down.node, wanted, "none")

    def _projections_of(self, x: ir.Value) -> Iterator[ir.Value]:
        """The real numbers that each 8-bit product of `x` becomes."""
        for behind in values_behind(x, self.facts, _NEAR):
            node = behind.producer()
            if node is not None and recognise_quantised_product(node, self.facts) is not None:
                yield dequantised(node, self.facts)

    def _normed(self, source: ir.Value) -> tuple[ir.Value, RmsNorm] | None:
        for behind in values_behind(source, self.facts, _NEAR):
            norm = recognise_rms_norm(behind, self.facts)
            cut = None if isinstance(norm, Miss) else recognise_slice(norm.x, self.facts)
            # of one weight for both, the query's columns are normed as well, and go on into a product
            if not isinstance(norm, Miss) and cut is not None and norm != self.norm.norm and cut.source is source:
                return behind, norm
        return None

    def _rotated(self, source: ir.Value) -> tuple[ir.Value, Rope] | None:
        for behind in values_behind(source, self.facts, _NEAR):
            rope = recognise_rope(behind, self.facts)
            heads = None if isinstance(rope, Miss) else _heads(rope.x, self.facts)
            cut = None if heads is None or heads.heads != 1 else recognise_slice(heads.source, self.facts)
            whole = heads is not None and heads.size == heads.width
            if not isinstance(rope, Miss) and cut is not None and whole and cut.source is source:
                return behind, rope
        return None

    def _key_of(
        self, normed: tuple[ir.Value, RmsNorm], rotated: tuple[ir.Value, Rope], query_down: QuantisedLinear
    ) -> _Key | Miss:
        latent = self._columns(normed[1].x)
        heads = _heads(rotated[1].x, self.facts)
        last = latent if heads is None or isinstance(latent, Miss) else self._columns(heads.source)
        if isinstance(latent, Miss):
            return latent
        if isinstance(last, Miss):
            return last
        ours, theirs = latent.linear.rows, query_down.rows
        assert isinstance(ours, PerTensor)
        assert isinstance(theirs, PerTensor)
        if not same_codes(ours, theirs):
            wanted = f"the rows of the query projection, scale {theirs.scale:g}, zero point {theirs.zero_point}"
            return miss("quantisation-differs", latent.linear.node, wanted, f"{ours.scale:g}, {ours.zero_point}")
        if not (
            _fits(self.rope, self.heads, self.facts) and heads is not None and _fits(rotated[1], heads, self.facts)
        ):
            return miss("rope-unrecognised", rotated[1].node, "angles for each token, the same for all heads", "others")
        if not _same_angles(self.rope, rotated[1], self.facts):
            return miss("rope-differs", rotated[1].node, "the cos and sin of the query", "others")
        if rotated[1].output_layout != self.rope.output_layout:
            return miss(
                "rope-differs", rotated[1].node, "query and key rotated into one order of features", "two orders"
            )
        return _Key(latent, normed[1], last, rotated[1], normed[0], rotated[0])

    # The query in the latent space

    def _absorbed(self) -> tuple[KeyWeight, ir.Value, tuple[int, ...]] | Miss:
        """(W_UK, result, order of its axes) of the unrotated heads times W_UK."""
        for behind in values_behind(self.value, self.facts, _NEAR):
            product = recognise_contraction(behind, self.facts)
            if product is None or product.factor != 1 or product.node is not behind.producer():
                continue
            found = self._absorbed_by(product)
            if found is not None:
                return found[0], *_in_order(behind, found[1], self.facts)
        wanted = f"the first {self.heads.start} columns of each head times a constant W_UK (N, D, Hckv)"
        return miss("query-not-absorbed", self.node, wanted, "keys that are expanded from the latents")

    def _absorbed_by(self, product: Contraction) -> tuple[KeyWeight, tuple[int, ...]] | None:
        plain = _heads(product.left.value, self.facts)
        if plain is None or plain.source is not self.value:
            return None
        weight = key_weight(product.right, product.shared, self.facts)
        labels = product.left.labels
        batch = labels[: len(labels) - 3]
        tokens, heads = (labels[-2], labels[-3]) if plain.heads_first else (labels[-3], labels[-2])
        latent = next((label for label in product.right.labels if label not in labels), "")
        order = Labelled(product.node.outputs[0], batch + tokens + heads + latent).order(product.labels)
        fits = (
            weight is not None
            and order is not None
            and labels[-1] == product.shared
            and heads in product.right.labels
            and (plain.heads, plain.start, plain.size) == (self.heads.heads, 0, self.heads.start)
            and plain.width == self.heads.width
            and (weight.heads, weight.nope) == (plain.heads, plain.size)
        )
        return (weight, order) if fits and weight is not None and order is not None else None

    # The caches

    def _writes(self, key: _Key) -> tuple[SlotWrite, SlotWrite] | Miss:
        writes = self._write(key.latent_rows), self._write(key.rotated_rows)
        if isinstance(writes[0], Miss):
            return writes[0]
        if isinstance(writes[1], Miss):
            return writes[1]
        if writes[0].slots is not writes[1].slots:
            return miss("slots-differ", writes[1].value, "the slots of the latents", "others")
        return writes[0], writes[1]

    def _write(self, rows: ir.Value) -> SlotWrite | Miss:
        reason = None
        for behind in values_behind(rows, self.facts, _NEAR):
            if not is_op(behind.producer(), "ScatterND", "ScatterElements"):
                continue
            write = recognise_slot_write(behind, self.facts)
            if isinstance(write, Miss):
                reason = reason or write
            elif row_by_row(write.rows, self.facts) is self.facts.plain(rows):
                return write
        return reason or miss("cache-unrecognised", rows, "rows scattered by slot into a cache", "no such write")


@dataclass(frozen=True)
class _Key:
    latent: Columns
    norm: RmsNorm
    rotated: Columns
    rope: Rope
    latent_rows: ir.Value
    rotated_rows: ir.Value


def _in_order(value: ir.Value, order: tuple[int, ...], facts: Facts) -> tuple[ir.Value, tuple[int, ...]]:
    """A value with its axes in some order; or the Transpose that alone reads it, if that puts them in order."""
    readers = facts.readers(value)
    node = readers[0][0] if len(readers) == 1 and not value.is_graph_output() else None
    if is_op(node, "Transpose"):
        turned = tuple(order[axis] for axis in attribute(node, "perm") or ())
        if turned == tuple(range(len(order))):
            return node.outputs[0], turned
    return value, order


def _again(where: ir.Value | ir.Node, what: str) -> Miss:
    return miss("quantisation-unsupported", where, f"{what} in real numbers", "one whose result is quantised again")


def _fits(rope: Rope, heads: TokenHeads, facts: Facts) -> bool:
    """Whether the angles are broadcast over the axis of the heads, if there is one."""
    rank = facts.rank(rope.x) or 0
    axis = rank - 3 if heads.heads_first else rank - 2
    return rank == 2 or (rope.cos.fits(axis) and rope.sin.fits(axis))


def _same_angles(query: Rope, key: Rope, facts: Facts) -> bool:
    pairs = ((query.cos, key.cos), (query.sin, key.sin))
    same = all(row_by_row(one.value, facts) is row_by_row(other.value, facts) for one, other in pairs)
    return same and query.half_width == key.half_width


def row_by_row(value: ir.Value, facts: Facts) -> ir.Value:
    """The value before its rows were laid out along other axes, in the same order."""
    current = facts.plain(value)
    while is_op(node := current.producer(), "Reshape", "Unsqueeze", "Squeeze", "Flatten"):
        source = facts.input(node, 0)
        if facts.dim(source, -1) != facts.dim(current, -1):
            break
        current = source
    return current
