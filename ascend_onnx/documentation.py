"""The domain as JSON and as one Markdown page per operator, both derived from the operators' descriptions.

`python -m ascend_onnx.documentation docs/operators` writes the pages.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ascend_onnx.operator import DOMAIN, VERSION, Attribute, Constraint, Input, Operator, Output, Product
from ascend_onnx.operators import OPERATORS

__all__ = ["domain_json", "operator_markdown", "write_pages"]


def domain_json() -> dict[str, Any]:
    """The domain in values that JSON knows: names, types, shapes, defaults, and the limits of each product."""
    return {"domain": DOMAIN, "version": VERSION, "operators": [_operator(operator) for operator in OPERATORS.values()]}


def _operator(operator: Operator) -> dict[str, Any]:
    return {
        "name": operator.name,
        "description": operator.description,
        "source": operator.source,
        "aclnn": operator.aclnn,
        "products": _products(operator.products),
        "inputs": [_tensor(declared) for declared in operator.inputs],
        "outputs": [_tensor(declared) for declared in operator.outputs],
        "attributes": [_attribute(declared) for declared in operator.attributes],
        "limits": [_limit(constraint, operator) for constraint in operator.constraints],
    }


def _tensor(declared: Input | Output) -> dict[str, Any]:
    return {
        "name": declared.name,
        "types": [_type_name(dtype) for dtype in declared.types],
        "shape": declared.shape,
        "optional": declared.optional,
        "description": declared.description,
    }


def _attribute(declared: Attribute) -> dict[str, Any]:
    return {
        "name": declared.name,
        "type": declared.type.name,
        "required": declared.required,
        "default": declared.default,
        "choices": list(declared.choices),
        "description": declared.description,
    }


def _limit(constraint: Constraint, operator: Operator) -> dict[str, Any]:
    return {
        "rule": constraint.rule,
        "code": constraint.code,
        "products": _products(constraint.products & operator.products),
        "limit": constraint.words.splitlines(),
        "source": constraint.source,
        "lifted_by": constraint.bound,
    }


def _products(products: Iterable[Product]) -> list[str]:
    return [product.value for product in Product if product in products]


def _type_name(dtype: ir.DataType) -> str:
    return "float32" if dtype == ir.DataType.FLOAT else dtype.name.lower()


def operator_markdown(operator: Operator) -> str:
    """The documentation page of an operator."""
    described = _operator(operator)
    sections = [
        f"# {operator.name}",
        _overview(operator),
        operator.description,
        f"Domain `{DOMAIN}`, version {VERSION}. On a device: `{operator.aclnn}`, "
        f"on {', '.join(_PRODUCT_NAMES[product] for product in Product if product in operator.products)}. "
        f"Source: {operator.source}.",
        "## Inputs",
        _table(("Name", "Types", "Shape", "Meaning"), [_tensor_row(tensor) for tensor in described["inputs"]]),
        "An input in italics is optional. Which of the types a device takes stands among its limits.",
        "## Outputs",
        _table(("Name", "Types", "Shape", "Meaning"), [_tensor_row(tensor) for tensor in described["outputs"]]),
        "An output in italics is optional: it exists in a node that names it.",
        "## Attributes",
        _table(("Name", "Type", "Default", "Meaning"), [_attribute_row(value) for value in described["attributes"]]),
        "## Example",
        f"```python\n{operator.example.strip()}\n```",
        "## Limits of the devices",
        "What `ascend-onnx check` finds, with the status that aclnn returns. A CPU knows none of these limits.",
        _table(("Rule", "Products", "Limit", "Status", "Source"), [_limit_row(value) for value in described["limits"]]),
    ]
    return "\n\n".join(sections) + "\n"


def write_pages(folder: Path) -> None:
    """One page per operator in `folder`, NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for operator in OPERATORS.values():
        (folder / f"{operator.name}.md").write_text(operator_markdown(operator), encoding="utf-8")


def _overview(operator: Operator) -> str:
    """What the operator's module says of it: one sentence, the steps, the letters of its shapes."""
    words = inspect.getdoc(inspect.getmodule(operator.reference)) or ""
    sentence = words.removeprefix(f"{operator.name}: ")
    return sentence[:1].upper() + sentence[1:]


_PRODUCT_NAMES = {Product.A2: "Atlas A2", Product.A3: "Atlas A3", Product.ASCEND_950: "Ascend 950"}


def _tensor_row(tensor: dict[str, Any]) -> Sequence[str]:
    name = f"`{tensor['name']}`"
    return (
        f"*{name}*" if tensor["optional"] else name,
        ", ".join(tensor["types"]),
        tensor["shape"],
        tensor["description"],
    )


def _attribute_row(attribute: dict[str, Any]) -> Sequence[str]:
    default = "required" if attribute["required"] else "absent"
    if attribute["default"] is not None:
        default = f"`{attribute['default']!r}`"
    return f"`{attribute['name']}`", attribute["type"], default, attribute["description"]


def _limit_row(limit: dict[str, Any]) -> Sequence[str]:
    sentences = "<br>".join(limit["limit"])
    return limit["rule"], ", ".join(limit["products"]), sentences, str(limit["code"]), limit["source"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
