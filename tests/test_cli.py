"""The command line: exit codes, one sentence for bad input, files that are complete or absent, JSON for programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ascend_onnx import render
from ascend_onnx.cli import main
from ascend_onnx.documentation import operator_markdown
from ascend_onnx.operators import OPERATORS
from tests.models import corpus_feeds, graph_path

Corpus = Callable[[str], Path]

DECODE = "attn_dsv3_decode_sdpa_op18_opt"
PREFILL = "attn_dsv3_prefill_sdpa_op18_opt"
REPORT_KEYS = {"counts", "fused", "missed", "nodes", "kv_cache_bytes_per_token", "seconds"}


def tiny_model(opset: int = 20) -> onnx.ModelProto:
    """A valid model of one node that nothing can fuse."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"], name="relu")], "tiny", [x], [y])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=9)


def save_tiny(path: Path) -> Path:
    onnx.save(tiny_model(), path)
    return path


def old_opset(path: Path) -> None:
    onnx.save(tiny_model(opset=16), path)


def undefined_input(path: Path) -> None:
    model = tiny_model()
    model.graph.node[0].input[0] = "nowhere"
    onnx.save(model, path)


def unknown_operator(path: Path) -> None:
    model = tiny_model()
    model.graph.node[0].op_type = "Rehlu"
    onnx.save(model, path)


def text(path: Path) -> None:
    path.write_text("this is not a model")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_short(path: Path) -> None:
    path.write_bytes(graph_path(DECODE).read_bytes()[:5000])


def no_weights(path: Path) -> None:
    shutil.copy(graph_path(DECODE), path)


def short_weights(path: Path) -> None:
    shutil.copy(graph_path(DECODE), path)
    path.with_name(f"{DECODE}.weights").write_bytes(b"\0" * 100)


def folder(path: Path) -> None:
    path.mkdir()


def nothing(path: Path) -> None:
    pass


BAD_MODELS = [
    (nothing, "no such file"),
    (folder, "folder"),
    (text, "not an ONNX protobuf"),
    (empty, "no graph"),
    (cut_short, "not an ONNX protobuf"),
    (undefined_input, "checker"),
    (unknown_operator, "checker"),
    (no_weights, "external data"),
    (short_weights, "external data"),
    (old_opset, "opset 16"),
]


class Result:
    """Exit code and output of one run of the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> None:
        capsys.readouterr()
        self.code = main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    def json(self) -> dict[str, Any]:
        data = json.loads(self.out)
        assert isinstance(data, dict)
        return data

    def assert_bad_input(self, *words: str) -> None:
        assert self.code == 2
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    return lambda *arguments: Result(capsys, *arguments)


Run = Callable[..., Result]


@pytest.mark.parametrize("command", ["fuse", "find", "explain", "check", "verify"])
@pytest.mark.parametrize(("make", "words"), BAD_MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_model_is_one_sentence(
    run: Run, tmp_path: Path, command: str, make: Callable[[Path], None], words: str
) -> None:
    model, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    make(model)
    before = sorted(tmp_path.rglob("*"))
    more = {
        "explain": ["--node", "relu"],
        "fuse": ["-o", out, "--report", tmp_path / "report.json"],
        "verify": [model],
    }.get(command, [])
    run(command, model, *more).assert_bad_input(words, "model.onnx")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bad_second_model_is_one_sentence(run: Run, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model.onnx")
    run("verify", model, tmp_path / "absent.onnx").assert_bad_input("absent.onnx")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-cache", "x"], "--kv-cache"),
        (["--kv-cache", "paged"], "--kv-cache"),
        (["--target", "a9"], "--target"),
        (["--validate", "x"], "--validate"),
        (["--external-data", "x"], "--external-data"),
        (["--assume", "x"], "expert-ids-in-range"),
        (["--only", "Softmax"], "MlaPrologV2WeightNz"),
        (["--expect", "Softmax=1"], "MlaPrologV2WeightNz"),
        (["--expect", "MlaPrologV2WeightNz"], "OPERATOR=N"),
        (["--expect", "MlaPrologV2WeightNz=-1"], "whole number"),
        (["--expect", "MlaPrologV2WeightNz=two"], "whole number"),
        (["--expect", "=1"], "OPERATOR=N"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_an_unknown_option_value_is_one_sentence(run: Run, tmp_path: Path, options: list[str], words: str) -> None:
    model, out = save_tiny(tmp_path / "model.onnx"), tmp_path / "out.onnx"
    run("fuse", model, "-o", out, *options).assert_bad_input(words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "frobnicate"),
        (["fuse"], "IN"),
        (["fuse", "model.onnx"], "--output"),
        (["find"], "IN"),
        (["verify", "model.onnx"], "Missing argument"),
        (["check", "model.onnx", "--target", "a9"], "--target"),
        (["explain", "model.onnx"], "--node"),
        (["schema", "Softmax"], "MlaPrologV2WeightNz"),
        (["schema", "--json", "--markdown"], "not both"),
    ],
)
def test_a_usage_error_is_one_sentence(run: Run, arguments: list[str], words: str) -> None:
    run(*arguments).assert_bad_input(words)


def test_unwritable_output_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    absent_model = tmp_path / "absent.onnx"
    run("fuse", absent_model, "-o", tmp_path / "nowhere" / "out.onnx").assert_bad_input("no folder")
    run("fuse", absent_model, "-o", tmp_path).assert_bad_input("is a folder")
    run("fuse", absent_model, "-o", tmp_path / "out.onnx", "--report", tmp_path / "no" / "r.json").assert_bad_input(
        "no folder"
    )


@pytest.mark.parametrize("out", ["model.onnx", "folder/../model.onnx", "link.onnx"])
def test_the_model_that_is_read_is_never_replaced(run: Run, tmp_path: Path, out: str) -> None:
    model = save_tiny(tmp_path / "model.onnx")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.onnx").symlink_to(model)
    content = model.read_bytes()
    run("fuse", model, "-o", tmp_path / out).assert_bad_input("--output")
    assert model.read_bytes() == content


@pytest.mark.parametrize("report", [f"{DECODE}.onnx", f"{DECODE}.weights", "out.onnx", "out.onnx.data"])
def test_a_report_never_replaces_a_model_or_its_weights(run: Run, corpus: Corpus, tmp_path: Path, report: str) -> None:
    for file in corpus(DECODE).parent.glob(f"{DECODE}.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    model, out = tmp_path / f"{DECODE}.onnx", tmp_path / "out.onnx"
    run("fuse", model, "-o", out, "--report", tmp_path / report).assert_bad_input("--report")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("option", ["--output", "--report"])
def test_only_regular_files_are_replaced(run: Run, tmp_path: Path, option: str) -> None:
    model, pipe = save_tiny(tmp_path / "model.onnx"), tmp_path / "pipe"
    os.mkfifo(pipe)
    others = ["--output", tmp_path / "out.onnx"] if option == "--report" else []
    run("fuse", model, *others, option, pipe).assert_bad_input("no regular file")
    assert pipe.is_fifo()


def test_an_interrupted_save_leaves_nothing(
    run: Run, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)  # the weights are written, the model is not
    result = run("fuse", corpus(DECODE), "-o", tmp_path / "out.onnx", "--validate", "none")
    assert (result.code, result.out) == (130, "")
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_link_is_refused_where_it_cannot_be_had(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    run("fuse", corpus(DECODE), "-o", out, "--validate", "none", "--external-data", "link").assert_bad_input("link")
    assert list(tmp_path.iterdir()) == []


def test_fuse_writes_model_and_report(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    out, report = tmp_path / "out.onnx", tmp_path / "report.json"
    result = run("fuse", corpus(DECODE), "-o", out, "--report", report, "--json", "--expect", "MlaPrologV2WeightNz=1")
    assert (result.code, result.err) == (0, "")
    assert result.json() == json.loads(report.read_text())
    data = result.json()
    assert set(data) == REPORT_KEYS
    assert data["counts"] == {"MlaPrologV2WeightNz": 1}
    assert set(data["fused"][0]) == {"operator", "overload", "anchor", "nodes", "validated", "assumed", "kept"}
    assert set(data["seconds"]) == {"load", "match", "validate", "apply", "save"}
    fused = onnx.load(out, load_external_data=False)
    assert data["nodes"]["after"] == len(fused.graph.node)
    assert [node.op_type for node in fused.graph.node if node.domain == "ai.ascend"] == ["MlaPrologV2WeightNz"]
    assert fused.functions
    onnx.checker.check_model(out, full_check=True)


def test_fuse_prints_tables_without_escapes_in_a_pipe(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    result = run("fuse", corpus(DECODE), "-o", tmp_path / "out.onnx", "--validate", "none")
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    for words in ("MlaPrologV2WeightNz", "Nodes:", "KV cache per token: 2,304 bytes"):
        assert words in result.out


def test_an_unmet_expectation_still_writes_and_ends_with_1(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    out, report = tmp_path / "out.onnx", tmp_path / "report.json"
    result = run(
        "fuse", corpus(DECODE), "-o", out, "--validate", "none", "--report", report, "--expect", "MlaPrologV2WeightNz=2"
    )
    assert result.code == 1
    assert result.err == "error: expected 2 MlaPrologV2WeightNz but 1 fuse; the report says why\n"
    assert out.exists()
    assert json.loads(report.read_text())["counts"] == {"MlaPrologV2WeightNz": 1}


def test_no_bodies(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    assert run("fuse", corpus(DECODE), "-o", out, "--validate", "none", "--no-bodies").code == 0
    fused = onnx.load(out, load_external_data=False)
    assert not fused.functions
    assert "MlaPrologV2WeightNz" in {node.op_type for node in fused.graph.node}


def test_a_model_without_anything_to_fuse(run: Run, tmp_path: Path) -> None:
    model, out = save_tiny(tmp_path / "model.onnx"), tmp_path / "out.onnx"
    result = run("fuse", model, "-o", out)
    assert result.code == 0
    assert "Nothing was fused." in result.out
    assert [node.op_type for node in onnx.load(out).graph.node] == ["Relu"]
    assert run("fuse", model, "-o", out, "--expect", "MlaPrologV2WeightNz=0").code == 0


def test_find_changes_nothing(run: Run, corpus: Corpus) -> None:
    model = corpus(DECODE)
    before = sorted(model.parent.iterdir())
    result = run("find", model, "--json", "--expect", "MlaPrologV2WeightNz=1")
    assert (result.code, result.err) == (0, "")
    assert set(result.json()) == REPORT_KEYS
    assert result.json()["nodes"]["after"] is None
    assert sorted(model.parent.iterdir()) == before
    assert run("find", model, "--expect", "MlaPrologV2WeightNz=2").code == 1


def test_a_miss_is_shown_with_its_reason(run: Run, corpus: Corpus) -> None:
    name = "attn_dsv3_decode_sdpa_op18_opt_noqlora"
    assert [entry["code"] for entry in run("find", corpus(name), "--json").json()["missed"]] == ["no-query-low-rank"]
    result = run("find", corpus(name))
    assert result.code == 0
    assert "Nothing fuses." in result.out
    for words in ("no-query-low-rank", "node_Softmax_199", "node_linear", "mla_prolog"):
        assert words in result.out


def entry(anchor: str, operator: str, **changed: Any) -> dict[str, Any]:
    """A fused entry of a report."""
    given = {"operator": operator, "overload": "", "anchor": anchor, "nodes": [f"{anchor}_inside", anchor]}
    return {**given, "validated": None, "assumed": [], "kept": [], **changed}


def test_many_fused_layers_do_not_hide_one_that_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal layers share a row; another kind of layer has its own, and a miss stands before them."""
    pair = ("MlaPrologV2WeightNz", "SparseFlashAttention")
    fused = [entry(f"softmax_{layer}", operator) for layer in range(60) for operator in pair]
    fused.append(entry("sort_3", "MoeInitRoutingV3", assumed=["expert-ids-in-range"], kept=["c_q", "scores"]))
    missed = {"fusion": "mla_prolog", "anchor": "softmax_60", "code": "bias", "message": "A projection adds a bias."}
    render.print_report(
        {
            "fused": fused,
            "missed": [{**missed, "node": "q_a", "expected": "none", "got": "a bias"}],
            "nodes": {"before": 9000, "after": None},
            "kv_cache_bytes_per_token": None,
            "seconds": {},
        }
    )
    out = capsys.readouterr().out
    assert out.index("softmax_60") < out.index("Would fuse: 61") < out.index("softmax_0")
    for words in ("Not fused: 1", "q_a", "to softmax_59", "│ 60 ", "│ 120 ", "expert-ids-in-range", "c_q", "scores"):
        assert words in out
    assert len(out.splitlines()) < 25


def test_explain_walks_through_a_candidate(run: Run, corpus: Corpus) -> None:
    model = corpus(f"{DECODE}_noqlora")
    (missed,) = run("find", model, "--json").json()["missed"]
    result = run("explain", model, "--node", missed["anchor"], "--json")
    assert result.code == 0
    (explanation,) = result.json()["explanations"]
    assert set(explanation) == {"fusion", "anchor", "fuses", "outcome", "steps"}
    assert (explanation["fusion"], explanation["fuses"]) == ("mla_prolog", False)
    assert explanation["outcome"] == missed["message"]
    assert {frozenset(step) for step in explanation["steps"]} == {frozenset({"block", "value", "found", "detail"})}
    text = run("explain", model, "--node", missed["anchor"])
    for words in ("does not fuse", "rms_norm", "hidden_states", "no low-rank pair"):
        assert words in text.out


@pytest.mark.parametrize(
    ("node", "words"),
    [("node_linear", "node_Softmax_204"), ("node_linear_4", "node_Softmax_204"), ("x", "'x'")],
)
def test_explain_says_where_candidates_are(run: Run, corpus: Corpus, node: str, words: str) -> None:
    run("explain", corpus(DECODE), "--node", node).assert_bad_input(words)


def test_schema(run: Run) -> None:
    described = run("schema", "--json").json()
    assert [operator["name"] for operator in described["operators"]] == list(OPERATORS)
    assert [o["name"] for o in run("schema", "SparseFlashAttention", "--json").json()["operators"]] == [
        "SparseFlashAttention"
    ]
    assert run("schema", "SparseFlashAttention", "--markdown").out == operator_markdown(
        OPERATORS["SparseFlashAttention"]
    )
    table = run("schema").out
    assert all(name in table for name in OPERATORS)


V32 = "lm_deepseek_v32_hf_prefill"
RING = "ring_sbh_op18_opt"


@pytest.mark.parametrize(
    ("graph", "options", "counts", "codes"),
    [
        (RING, [], {"RingAttentionUpdateV2": 1}, []),
        (RING, ["--assume", "none"], {}, ["assumption-off"]),
        (RING, ["--assume", "none", "--assume", "softmax-lanes-equal"], {"RingAttentionUpdateV2": 1}, []),
        (DECODE, ["--target", "a2"], {}, ["target"]),
        (V32, ["--only", "MoeInitRoutingV3"], {"MoeInitRoutingV3": 1}, []),
    ],
)
def test_options_of_matching_reach_it(
    run: Run, corpus: Corpus, graph: str, options: list[str], counts: dict[str, int], codes: list[str]
) -> None:
    result = run("find", corpus(graph), *options, "--json").json()
    assert (result["counts"], [missed["code"] for missed in result["missed"]]) == (counts, codes)


def test_assumptions_are_printed(run: Run, corpus: Corpus) -> None:
    assert "softmax-lanes-equal" in run("find", corpus(RING)).out


def test_verify_tells_equal_from_unequal(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    original, out = corpus(DECODE), tmp_path / "out.onnx"
    assert run("fuse", original, "-o", out, "--validate", "none").code == 0
    equal = run("verify", original, out, "--json")
    assert (equal.code, equal.err) == (0, "")
    assert equal.json()["equal"] is True
    other = onnx.load(out)
    for tensor in other.graph.initializer:
        if list(tensor.dims) == [1536]:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(1536, 1.01, np.float32), tensor.name))
    onnx.save(other, tmp_path / "other.onnx", save_as_external_data=True, location="other.data")
    unequal = run("verify", original, tmp_path / "other.onnx", "--json")
    assert (unequal.code, unequal.err) == (1, "")
    assert unequal.json()["equal"] is False


def test_verify_takes_inputs_from_files(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    model, inputs = corpus(DECODE), tmp_path / "inputs.npz"
    np.savez(inputs, **corpus_feeds(DECODE, {"batch": 3, "past": 5}))
    result = run("verify", model, model, "--inputs", inputs, "--json")
    assert (result.code, result.json()["equal"]) == (0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dim", "batch"], "NAME=VALUE"),
        (["--dim", "batch=x"], "batch=x"),
        (["--rule", "hidden_states"], "NAME=RULE"),
        (["--rule", "hidden_states=often"], "often"),
        (["--inputs", "absent.npz"], "absent.npz"),
        (["--rtol", "x"], "--rtol"),
        (["--rtol", "-1"], "--rtol"),
        (["--rtol", "nan"], "--rtol"),
        (["--dim", "batch=99999999999999"], "not enough memory"),
    ],
)
def test_verify_says_what_is_wrong_with_an_option(run: Run, corpus: Corpus, options: list[str], words: str) -> None:
    run("verify", corpus(DECODE), corpus(DECODE), *options).assert_bad_input(words)


def test_check_of_a_model_without_operators(run: Run, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model.onnx")
    result = run("check", model, "--target", "a2", "--json")
    assert (result.code, result.json()) == (0, {"target": "a2", "findings": []})


def test_check_ends_with_1_on_findings(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    assert run("fuse", corpus(DECODE), "-o", out, "--validate", "none").code == 0
    result = run("check", out, "--target", "a2", "--json")  # float32 is for the CPU alone
    assert result.code == 1
    (finding, *_) = result.json()["findings"]
    assert set(finding) == {"node", "operator", "rule", "code", "message", "source"}
    assert "MlaPrologV2WeightNz" in run("check", out, "--target", "a2").out


def test_help_and_version(run: Run) -> None:
    assert run("--version").out.startswith("ascend-onnx ")
    for command in ([], ["fuse"], ["find"], ["explain"], ["verify"], ["check"], ["schema"], ["demo"]):
        result = run(*command, "--help")
        assert (result.code, result.err) == (0, "")


def test_the_installed_command_gives_exit_codes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ascend_onnx.cli", "find"]
    good = subprocess.run([*command, save_tiny(tmp_path / "m.onnx")], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([*command, tmp_path / "absent.onnx"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ascend_onnx.cli", "schema", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
