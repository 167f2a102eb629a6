"""The graphs of `models/` with seeded weights, and example inputs for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ascend_onnx.seeded_weights import fill

ROOT = Path(__file__).resolve().parent.parent
GRAPHS = (ROOT / "models", ROOT / "ascend_onnx" / "data")
CASES: dict[str, dict[str, Any]] = json.loads((ROOT / "models" / "cases.json").read_text())
EXPECTED: dict[str, dict[str, int]] = json.loads((ROOT / "models" / "expected.json").read_text())

_TYPES = {
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}


def graph_path(name: str) -> Path:
    """Where the graph called `name` lies in the source tree, without weights."""
    for folder in GRAPHS:
        path = folder / f"{name}.onnx"
        if path.exists():
            return path
    raise FileNotFoundError(f"no graph called {name} in {' or '.join(map(str, GRAPHS))}")


def corpus_model(name: str, folder: Path) -> Path:
    """The graph `name` in `folder` with its seeded weights beside it; made once, then found again."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph_path(name), path)
    fill(path)
    return path


def corpus_feeds(name: str, dims: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Example inputs of the graph `name` by the rules of `models/cases.json`; `dims` overrides symbolic dimensions."""
    case = CASES[name]
    sizes = {**case["dims"], **(dims or {})}
    generator = np.random.default_rng(seed)
    feeds = {}
    for input_name, (kind, shape, rule) in case["inputs"].items():
        drawn = _draw(rule, [_size(d, sizes) for d in shape], sizes, generator)
        dtype = ml_dtypes.bfloat16 if case.get("bf16") and kind == "tensor(float)" else _TYPES[kind]
        feeds[input_name] = np.ascontiguousarray(drawn, dtype=dtype)
    return feeds


def _size(dimension: int | str, sizes: Mapping[str, int]) -> int:
    """A number, a symbol, or a sum of them such as "past + 1"."""
    if isinstance(dimension, int):
        return dimension
    return sum(sizes[term] if term in sizes else int(term) for term in dimension.replace(" ", "").split("+"))


def _draw(rule: str, shape: list[int], sizes: Mapping[str, int], generator: np.random.Generator) -> npt.NDArray[Any]:
    kind, _, parameter = rule.partition(":")
    if kind == "normal":
        return generator.standard_normal(shape)
    if kind == "ids":
        return generator.integers(0, _size(parameter, sizes), shape)
    if kind == "distinct":
        rows = [generator.permutation(_size(parameter, sizes))[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))]
        return np.stack(rows).reshape(shape)
    if kind == "permutation":
        return generator.permutation(_size(parameter, sizes))[: int(np.prod(shape))].reshape(shape)
    if kind == "arange":
        return np.broadcast_to(np.arange(shape[-1]) + _size(parameter, sizes), shape)
    if kind == "ones":
        return np.ones(shape)
    raise ValueError(f"unknown rule {rule!r}")
