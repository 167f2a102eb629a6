"""The package's public names, whichever of its modules were imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ascend_onnx

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ascend_onnx.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ascend_onnx, name) is not None
    assert name in dir(ascend_onnx)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fuse'"):
        ascend_onnx.fuse  # noqa: B018


@pytest.mark.parametrize("module", ["check", "verify", "opset", "layout"])
def test_modules_do_not_hide_functions(module: str) -> None:
    code = (
        f"import ascend_onnx.{module}, ascend_onnx; "
        "print(callable(ascend_onnx.check), callable(ascend_onnx.verify), ascend_onnx.op.domain)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == ["True", "True", "ai.ascend"]


def test_the_modules_of_arrays_are_public() -> None:
    assert isinstance(ascend_onnx.layout, ModuleType)
    assert ascend_onnx.layout.fractal_width(2) == 16
    assert ascend_onnx.quantisation.quantise_per_token is not None
