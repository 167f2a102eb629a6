"""Experts whose weight matrices are gathered once per assignment, and multiplied in one batch.

ids -> Gather(stack (E, n, k), ids) -> (M, n, k)
MatMul((M, n, k), rows (M, k, 1)) -> Squeeze -> activation -> the same with the second stack
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fusion_patterns.graph import Facts, attribute, is_op
from fusion_patterns.lift.contraction import Labelled, recognise_contraction
from fusion_patterns.lift.expert_network import ON_ROWS, FoundProduct, Values
from fusion_patterns.lift.expert_weight import ExpertWeight
from fusion_patterns.lift.repeated_rows import recognise_repeated_rows
from fusion_patterns.lift.router import reshaped_from

__all__ = [
    "BatchedExperts",
    "BatchedProduct",
    "StackGather",
    "recognise_batched_product",
    "recognise_bias",
    "recognise_stack_gather",
]

_FARTHEST = 48


@dataclass(frozen=True)
class StackGather:
    """value[.., :, :] = stack[ids[..]] with a stack of weights (E, a, b) or biases (E, n).

    `ids` are before they were reshaped, so in the order of the assignments but not in their shape.
    """

    stack: ir.Value
    ids: ir.Value
    lead: int
    node: ir.Node

    @property
    def experts(self) -> int:
        return int(str((self.stack.shape or (0,))[0]))


def recognise_stack_gather(node: ir.Node | None, facts: Facts) -> StackGather | None:
    """Gather(axis 0), or GatherND with one added axis, of a constant stack by ids that the graph computes."""
    if not is_op(node, "Gather", "GatherND"):
        return None
    stack, ids = facts.input(node, 0), facts.input(node, 1)
    rank, lead = facts.rank(stack), facts.rank(ids)
    shape = facts.shape(stack)
    if not stack.is_initializer() or stack.is_graph_input() or rank not in (2, 3) or shape is None or lead is None:
        return None
    if not all(isinstance(dim, int) for dim in shape) or facts.constant(ids) is not None:
        return None
    if node.op_type == "GatherND":
        if attribute(node, "batch_dims") != 0 or facts.size(ids, -1) != 1:
            return None
        lead -= 1
    elif facts.axis(node, stack, 0) != 0:
        return None
    return None if lead < 1 else StackGather(stack, reshaped_from(ids, facts), lead, node)


@dataclass(frozen=True)
class BatchedProduct:
    """value[i] = stack[ids[i]] @ rows[i], or its transpose, for every assignment i.

    `repeated` is how many assignments share each of the rows because the product broadcasts them, else 1.
    """

    rows: ir.Value
    ids: ir.Value
    stack: StackGather
    transposed: bool
    repeated: int


def recognise_batched_product(value: ir.Value, facts: Facts) -> BatchedProduct | None:
    """The product with gathered matrices that computes a value (.., n), (.., n, 1) or (.., 1, n).

    MatMul or Einsum with the gathered matrices on either side, transposed or not.
    """
    return facts.remember("batched_product", value, _batched_product)


def _batched_product(value: ir.Value, facts: Facts) -> BatchedProduct | None:
    product = recognise_contraction(value, facts)
    if product is None or product.factor != 1:
        return None
    for matrices, rows in ((product.left, product.right), (product.right, product.left)):
        gather = recognise_stack_gather(facts.producer(matrices.value), facts)
        if gather is None or facts.rank(gather.stack) != 3:
            continue
        batch, sides = matrices.labels[: gather.lead], matrices.labels[gather.lead :]
        if product.shared not in sides or len(sides) != 2:
            continue
        out = sides.replace(product.shared, "")
        others = set(product.labels) - set(batch) - {out}
        free = [label for label in rows.labels if label not in (*batch, product.shared)]
        single = all(facts.size(rows.value, rows.labels.index(label)) == 1 for label in free)
        if out in rows.labels or not single or not others <= set(free) or not _in_order(product.labels, batch):
            continue
        repeated = _broadcast(rows, batch, product.shared, matrices, facts)
        if repeated is not None:
            return BatchedProduct(rows.value, gather.ids, gather, sides.index(out) == 0, repeated)
    return None


def _in_order(labels: str, batch: str) -> bool:
    return labels[: len(batch)] == batch


def _broadcast(rows: Labelled, batch: str, shared: str, matrices: Labelled, facts: Facts) -> int | None:
    """How many assignments share a row: 1, or K where the last batch axis is missing from the rows or of size 1."""
    own = [label for label in rows.labels if label in batch]
    if rows.labels.index(shared) < len(own) or [label for label in batch if label in own] != own:
        return None
    if own == list(batch):
        return 1
    if own == list(batch[:-1]) and own:
        return facts.size(matrices.value, len(batch) - 1)
    return None


class BatchedExperts:
    """The experts of one block, see `fusion_patterns.lift.expert_network.Experts`.

    After the network is recognised, `x` (.., H) are the tokens, with `choices` assignments each. Rows of which it
    cannot be told that they repeat tokens are tokens themselves, with one assignment each.
    """

    def __init__(self, ids: ir.Value, experts: int) -> None:
        self.x: ir.Value | None = None
        self.choices = 1
        self._ids, self._experts = ids, experts

    def are_rows(self, values: Values, facts: Facts) -> bool:
        value = values[0]
        repeated = recognise_repeated_rows(value, facts)
        if repeated is not None:
            return self._take(repeated.x, repeated.choices)
        return not self._is_computed(value, facts) and self._take(value, self._broadcast)

    _broadcast = 1

    def _take(self, x: ir.Value, choices: int) -> bool:
        if self.x is None:
            self.x, self.choices = x, choices
        return self.x is x and self.choices == choices

    def product(self, values: Values, facts: Facts) -> FoundProduct | None:
        (value,) = values
        product, bias = self._unbiased(value, facts), None
        if product is None:
            product, bias = self._biased(value, facts)
        if product is None:
            return None
        if product.repeated > 1:
            self._broadcast = product.repeated
        weights = self._entries(product.stack.stack, product.transposed)
        return FoundProduct((product.rows,), weights, bias, weights[0].shape[1])

    def _unbiased(self, value: ir.Value, facts: Facts) -> BatchedProduct | None:
        product = recognise_batched_product(value, facts)
        ours = product is not None and product.ids is self._ids and product.stack.experts == self._experts
        return product if ours else None

    def _biased(self, value: ir.Value, facts: Facts) -> tuple[BatchedProduct | None, tuple[ExpertWeight, ...] | None]:
        """A product plus a bias (E, n) that is gathered by the same ids."""
        node = facts.producer(value)
        if not is_op(node, "Add"):
            return None, None
        for summand, added in facts.either_way(node):
            while is_op(below := facts.producer(summand), "Squeeze", "Reshape"):
                summand = facts.input(below, 0)
            product, bias = self._unbiased(summand, facts), recognise_bias(added, self._ids, facts)
            if product is not None and bias is not None and bias.experts == self._experts:
                return product, self._entries(bias.stack, transposed=False)
        return None, None

    def _entries(self, stack: ir.Value, transposed: bool) -> tuple[ExpertWeight, ...]:
        return tuple(ExpertWeight(stack, expert, transposed) for expert in range(self._experts))

    def _is_computed(self, value: ir.Value, facts: Facts) -> bool:
        """Whether one of the products stands above a value, with nothing but work on rows between them."""
        queue, seen = [facts.plain(value)], {value}
        while queue:
            current = queue.pop()
            if self._unbiased(current, facts) is not None:
                return True
            node = current.producer()
            if node is not None and node.op_type in ON_ROWS:
                fresh = [v for i in range(len(node.inputs)) if (v := facts.input(node, i)) not in seen]
                if len(seen) < _FARTHEST:
                    seen.update(fresh)
                    queue.extend(fresh)
        return False


def recognise_bias(value: ir.Value, ids: ir.Value, facts: Facts) -> StackGather | None:
    """A bias per assignment: a stack (E, n) gathered by `ids`, perhaps with axes of size 1 added."""
    while is_op(node := facts.producer(value), "Unsqueeze", "Reshape"):
        value = facts.input(node, 0)
    gather = recognise_stack_gather(node, facts)
    return gather if gather is not None and gather.ids is ids and facts.rank(gather.stack) == 2 else None
