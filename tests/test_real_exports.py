"""Models exported here and now, with the recipes of `models/recipes`: what fuses, and that it computes the same.

The graphs in `models/` are what exporters wrote once; these say whether today's still write something that fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ascend_onnx.storage import load
from ascend_onnx.verify import verify
from fusion_patterns import fuse

pytest.importorskip("torch", reason="exporting needs the extra `export`: pip install ascend-onnx[export]")
pytest.importorskip("transformers", reason="exporting needs the extra `export`: pip install ascend-onnx[export]")

from models.recipes.attention import export_attention
from models.recipes.experts import export_experts
from models.recipes.language_model import build, export_without_cache

MLA, MOE = "MlaPrologV2WeightNz", "MoeInitRoutingV3"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def language_model(path: Path, model: str, **options: Any) -> None:
    export_without_cache(path, build(model, experts="batched_mm"), **options)


@dataclass(frozen=True)
class Export:
    """One export: who writes it and how, and what becomes of it."""

    write: Callable[..., None]
    model: str
    options: dict[str, Any]
    counts: dict[str, int]
    codes: tuple[str, ...] = ()


EXPORTS = {
    "scaled low-rank projections": Export(export_attention, "longcat_flash", {"stage": "decode"}, {MLA: 1}),
    "YaRN, causal operator": Export(
        export_attention,
        "deepseek_v3",
        {"stage": "prefill", "mask": "none", "opset": 24, "rope_parameters": YARN},
        {MLA: 1},
    ),
    "fixed sizes, TorchScript": Export(
        export_attention,
        "deepseek_v3",
        {"stage": "decode", "dynamo": False, "dynamic": False, "opset": 17},
        {MLA: 1},
    ),
    "bias": Export(
        export_attention,
        "deepseek_v3",
        {"stage": "decode", "dynamo": False, "opset": 17, "attention_bias": True},
        {},
        ("bias",),
    ),
    "experts with biases": Export(export_experts, "gpt_oss", {}, {MOE: 1}),
    "language model": Export(language_model, "deepseek_v3", {"opset": 23}, {MLA: 2, MOE: 1}),
}


@pytest.mark.filterwarnings("ignore")  # exporters warn of their own future
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_fuse(tmp_path: Path, name: str) -> None:
    export, path = EXPORTS[name], tmp_path / "model.onnx"
    export.write(path, export.model, **export.options)
    model = load(path)
    report = fuse(model, validate="all")
    assert (report.counts, tuple(missed.code for missed in report.missed)) == (export.counts, export.codes)
    if export.counts:
        verification = verify(path, model)
        assert verification.equal, verification.reason
