"""What would not launch on a device: the limits of each product, applied to the nodes of a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import onnx
import onnx_ir as ir

from ascend_onnx.errors import InputError
from ascend_onnx.limits import INVALID, NULL
from ascend_onnx.operator import DOMAIN, Bound, Call, Constraint, Product
from ascend_onnx.operators import OPERATORS
from ascend_onnx.schema import domain_nodes, infer_types, untyped_input
from ascend_onnx.storage import load

__all__ = ["RELAX", "Finding", "check", "check_call"]

RELAX = "ASCEND_EMULATOR_RELAX"
"""The environment variable that lifts bounds, here as in the emulator: names of `Bound`, separated by commas."""
_NO_KERNEL_PACKAGE = 561112


@dataclass(frozen=True)
class Finding:
    """One reason why a node would not launch.

    `code` is the status that aclnn returns for it, `source` the section of the vendor's documentation that says so.
    """

    node: str
    operator: str
    rule: str
    code: int
    message: str
    source: str


def check(model: str | Path | onnx.ModelProto | ir.Model, target: str = "any") -> list[Finding]:
    """The limits that nodes of the domain break, in subgraphs too. The model is not changed.

    `target` is a product, "a2", "a3" or "950", or "any": then a node has findings only if no product would launch it.
    A limit whose facts the model does not state (a symbolic dimension) is not broken, and the bounds that `RELAX` names
    are lifted.

    Raises `InputError` for another target or bound, and for a model that cannot be loaded.
    """
    products = _products(target)
    loaded = load(model)
    if any(untyped_input(node) is not None for node in domain_nodes(loaded)):
        loaded = loaded.clone()
        infer_types(loaded)
    unknown = [node for node in loaded.graph.all_nodes() if node.domain == DOMAIN and node.op_type not in OPERATORS]
    return [_no_operator(node) for node in unknown] + [
        finding
        for node in domain_nodes(loaded)
        for finding in check_call(OPERATORS[node.op_type].call(node), products, node.name or "")
    ]


def check_call(call: Call, products: Collection[Product] = tuple(Product), node: str = "") -> list[Finding]:
    """The findings on one call; none if at least one of `products` would launch it.

    Where some of `products` have the operator, only their limits count. The message of a limit that not all of those
    have names the ones that do.
    """
    products = [product for product in products if product in call.operator.products] or products
    lifted = _lifted_bounds()
    broken: dict[Finding, list[Product]] = {}
    for product in products:
        findings = list(_findings(call, product, lifted, node))
        if not findings:
            return []
        for finding in findings:
            broken.setdefault(finding, []).append(product)
    return [
        finding if len(where) == len(products) else replace(finding, message=f"{finding.message} ({_names(where)})")
        for finding, where in broken.items()
    ]


def _no_operator(node: ir.Node) -> Finding:
    message = f"{DOMAIN} has no operator {node.op_type}; it has {', '.join(OPERATORS)}"
    return Finding(node.name or "", node.op_type, "operator", _NO_KERNEL_PACKAGE, message, DOMAIN)


def _products(target: str) -> tuple[Product, ...]:
    if target == "any":
        return tuple(Product)
    try:
        return (Product(target),)
    except ValueError:
        expected = ", ".join(["any", *(product.value for product in Product)])
        raise InputError(f"the target must be one of {expected}, got {target!r}") from None


def _lifted_bounds() -> frozenset[str]:
    names = frozenset(name for name in os.environ.get(RELAX, "").split(",") if name)
    if names - set(get_args(Bound)):
        raise InputError(f"{RELAX} takes {', '.join(get_args(Bound))}, got {', '.join(sorted(names))}")
    return names


def _sentence(constraint: Constraint, call: Call, lifted: frozenset[str]) -> str | None:
    """What is wrong by this limit, or by what remains of it where its bound is lifted."""
    if constraint.bound not in lifted:
        return constraint.broken(call)
    return None if constraint.relaxed is None else constraint.relaxed(call)


def _names(products: list[Product]) -> str:
    return "on " + ", ".join(product.value for product in products)


def _findings(call: Call, product: Product, lifted: frozenset[str], node: str) -> Iterator[Finding]:
    operator = call.operator

    def finding(rule: str, code: int, message: str, source: str = operator.source) -> Finding:
        return Finding(node, operator.name, rule, code, message, source)

    if product not in operator.products:
        yield finding("product", _NO_KERNEL_PACKAGE, f"{operator.name} does not exist for the product {product.value}")
        return
    if call.missing:
        yield finding("missing", NULL, f"{', '.join(call.missing)} must be given, got none")
        return
    for declared in operator.inputs:
        dtype = call.input(declared.name).dtype
        if dtype is not None and dtype not in declared.types:
            expected = ", ".join(t.name.lower() for t in declared.types)
            message = f"{declared.name} must be {expected}, got {dtype.name.lower()}"
            yield finding("input_type", INVALID, message)
    for attribute in operator.attributes:
        value = call.attributes.get(attribute.name)
        if value is not None and attribute.choices and value not in attribute.choices:
            expected = ", ".join(map(str, attribute.choices))
            message = f"{attribute.name} must be one of {expected}, got {value}"
            yield finding("attribute_value", INVALID, message)
    for constraint in operator.constraints:
        sentence = _sentence(constraint, call, lifted) if product in constraint.products else None
        if sentence is not None:
            yield finding(constraint.rule, constraint.code, sentence, constraint.source)
