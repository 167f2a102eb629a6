"""The documentation pages: generated from the descriptions, complete, and with examples that run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_onnx.documentation import domain_json, operator_markdown, write_pages
from ascend_onnx.operator import Operator
from ascend_onnx.operators import OPERATORS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "operators"

each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)


@each_operator
def test_page_is_the_generated_one(operator: Operator) -> None:
    page = (PAGES / f"{operator.name}.md").read_text(encoding="utf-8")
    assert page == operator_markdown(operator), "run python -m ascend_onnx.documentation docs/operators"


def test_there_are_no_other_pages(tmp_path: Path) -> None:
    write_pages(tmp_path)
    assert {page.name for page in PAGES.iterdir()} == {page.name for page in tmp_path.iterdir()}


@each_operator
def test_example_of_the_page_runs(operator: Operator, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{operator.name}.md").read_text(), re.DOTALL)
    assert f"op.{operator.name}(" in program
    assert "assert " in program
    path = tmp_path / "example.py"
    path.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@each_operator
def test_page_names_everything(operator: Operator) -> None:
    page = operator_markdown(operator)
    for declared in (*operator.inputs, *operator.outputs, *operator.attributes):
        assert f"`{declared.name}`" in page
    for constraint in operator.constraints:
        assert constraint.words, constraint.rule
        assert f"| {constraint.rule} |" in page


def test_json_holds_the_descriptions() -> None:
    domain = json.loads(json.dumps(domain_json()))
    assert (domain["domain"], domain["version"]) == ("ai.ascend", 1)
    described = {entry["name"]: entry for entry in domain["operators"]}
    assert set(described) == set(OPERATORS)
    for name, operator in OPERATORS.items():
        entry = described[name]
        assert [i["name"] for i in entry["inputs"]] == [i.name for i in operator.inputs]
        assert [o["optional"] for o in entry["outputs"]] == [o.optional for o in operator.outputs]
        assert {a["name"]: a["required"] for a in entry["attributes"]} == {
            a.name: a.required for a in operator.attributes
        }
        assert [limit["code"] for limit in entry["limits"]] == [c.code for c in operator.constraints]
        assert all(limit["products"] for limit in entry["limits"])
