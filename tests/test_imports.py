"""Arrows point one way: the command line -> fusion_patterns, runtime_ep -> ascend_onnx."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ascend_onnx", "fusion_patterns", "runtime_ep")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN = {
    "ascend_onnx": {"benchmarks", "fusion_patterns", "runtime_ep", "tests", "torch", "transformers"},
    "fusion_patterns": {"benchmarks", "runtime_ep", "tests", "torch", "transformers"},
    "runtime_ep": {"benchmarks", "fusion_patterns", "tests", "torch", "transformers"},
}
ALLOWED = {"ascend_onnx/cli.py": {"fusion_patterns", "runtime_ep"}}


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports anywhere: at its top, in functions, for type checking only."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_against_the_arrows(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    forbidden = FORBIDDEN[name.partition("/")[0]] - ALLOWED.get(name, set())
    assert {module for module in imported_modules(path) if module.partition(".")[0] in forbidden} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_import_from_the_onnx_libraries(path: Path) -> None:
    private = {
        module
        for module in imported_modules(path)
        if module.partition(".")[0] in ("onnx", "onnx_ir", "onnxscript", "typer")
        and any(part.startswith("_") for part in module.split("."))
    }
    assert private == set()


def test_the_command_starts_without_loading_what_only_exports_need() -> None:
    code = "import sys, ascend_onnx.cli; print(*{'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == []
