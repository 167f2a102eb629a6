"""The demonstration, as a user starts it."""

from __future__ import annotations

import json

import pytest

from ascend_onnx.cli import main


def test_demo_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    demo = json.loads(out)
    report = demo["report"]
    assert report["counts"] == {"MlaPrologV2WeightNz": 2, "MoeInitRoutingV3": 1}
    assert report["nodes"]["after"] < report["nodes"]["before"] == 394
    assert report["kv_cache_bytes_per_token"] == {"before": 4608, "after": 4608, "per_head_equivalent": 10240}
    assert demo["verification"]["equal"] is True
    assert len(demo["verification"]["runs"]) == 2
    assert {output["name"] for output in demo["verification"]["runs"][0]["outputs"]} >= {"logits"}
    assert demo["timing"]["cached_tokens"] == 1024
    assert 0 < demo["timing"]["after"] < demo["timing"]["before"]


def test_demo_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for words in (
        "MlaPrologV2WeightNz",
        "MoeInitRoutingV3",
        "Nodes: 394 before",
        "KV cache per token: 4,608 bytes (caching keys and values per head would take 10,240)",
        "logits",
        "Equal.",
        "One decoding step with 1,024 cached tokens",
    ):
        assert words in out
