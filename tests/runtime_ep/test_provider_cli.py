"""`ascend-onnx run` and `ascend-onnx doctor` on the emulator: what they print, and one sentence where they cannot."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from onnx import helper

import ascend_onnx
import runtime_ep
from tests.cases import ALL_CASES
from tests.operators.harness import model_of
from tests.test_cli import Result

from .provider import SHAPES, Emulator, is_built, ring_chain

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")

Command = Callable[..., Result]

ON_EMULATOR = ("--device", "npu", "--cann", "emulator")
NO_CANN = "no library of CANN was found; set ASCEND_HOME_PATH or source its set_env.sh"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command in this process, on an emulated A2; at the end nothing may be alive on it."""
    emulator = Emulator()
    monkeypatch.setenv("ASCEND_EMULATOR_PRODUCT", "a2")
    emulator.library.aclFinalize()  # so that the product is read again
    yield lambda *arguments: Result(capsys, *arguments)
    gc.collect()
    alive = emulator.ledger()
    runtime_ep.unregister()
    assert alive == {}


@pytest.fixture
def no_cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a machine without CANN has in its environment."""
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(ascend_onnx.attach_functions(model), path)
    return path


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A CPU node and two merges that an A2 takes, with bodies."""
    return save(ring_chain(2, between="Neg"), tmp_path / "chain.onnx")


@pytest.fixture
def symbolic(tmp_path: Path) -> Path:
    """A merge of three heads whose hidden size H is symbolic; the device takes multiples of three."""
    model = ring_chain(1)
    for value in (*model.graph.input, *model.graph.output):
        shape = (2, 1, "H") if value.name.endswith("attn_out") else (1, 3, 2, 8)
        value.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, shape))
    return save(model, tmp_path / "symbolic.onnx")


def test_run_says_where_nodes_ran_and_what_came_out(command: Command, chain: Path) -> None:
    result = command("run", chain, *ON_EMULATOR, "--require-npu")
    assert (result.code, result.err) == (0, "")
    assert "On the NPU: 2 nodes (merge_0, merge_1)" in result.out
    assert "On the CPU: 1 nodes" in result.out
    assert all(name in result.out for name in SHAPES)


def test_run_json(command: Command, chain: Path) -> None:
    result = command("run", chain, *ON_EMULATOR, "--json")
    assert (result.code, result.err) == (0, "")
    data = result.json()
    assert data["device"] == "npu"
    assert [entry["node"] for entry in data["on_npu"]] == ["merge_0", "merge_1"]
    assert (data["declined"], data["other_nodes"]) == ([], 1)
    assert {output["name"]: tuple(output["shape"]) for output in data["outputs"]} == SHAPES
    assert set(data["seconds"]) == {"create", "first_run", "run"}


def test_run_is_the_same_on_both_devices(command: Command, chain: Path) -> None:
    on_npu = command("run", chain, *ON_EMULATOR, "--json").json()["outputs"]
    on_cpu = command("run", chain, "--json").json()["outputs"]
    for got, expected in zip(on_npu, on_cpu, strict=True):
        assert got.pop("smallest") == pytest.approx(expected.pop("smallest"), rel=1e-5)
        assert got.pop("largest") == pytest.approx(expected.pop("largest"), rel=1e-5)
        assert got == expected


def test_run_says_why_a_node_was_declined(command: Command, tmp_path: Path) -> None:
    """Heads of 16 numbers are too narrow for the device; the body takes them."""
    case = next(case for case in ALL_CASES if str(case) == "RingAttentionUpdateV2-float32_tnd_default")
    model = model_of(case, symbolic=False)
    model.graph.node[0].name = "narrow"
    for output in model.graph.output:
        kind = output.type.tensor_type.elem_type
        output.type.CopyFrom(helper.make_tensor_type_proto(kind, case.expected[output.name].value.shape))
    path = save(model, tmp_path / "narrow.onnx")
    rows = case.inputs["prev_attn_out"].shape[0]
    options = (*ON_EMULATOR, "--rule", f"actual_seq_qlen=scalar:{rows}")
    result = command("run", path, *options, "--json")
    assert (result.code, result.err) == (0, "")
    (declined,) = result.json()["declined"]
    assert (declined["node"], declined["operator"]) == ("narrow", "RingAttentionUpdateV2")
    assert "D must be a multiple of 64 from 64 to 768, got 16" in declined["reason"]
    assert result.json()["on_npu"] == []
    assert "RingAttentionUpdateV2 'narrow' was declined: " in command("run", path, *options).out
    command("run", path, *options, "--require-npu").assert_bad_input("'narrow'", "require_npu")


def test_run_takes_the_sizes_of_symbolic_dimensions(command: Command, symbolic: Path) -> None:
    result = command("run", symbolic, *ON_EMULATOR, "--dim", "H=96", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.json()["dims"]["H"] == 96
    assert result.json()["outputs"][0]["shape"] == [2, 1, 96]


def test_a_size_that_the_device_refuses_is_one_sentence(command: Command, symbolic: Path) -> None:
    """A symbolic dimension breaks no limit, so the node is claimed; the run is where the device refuses it."""
    command("run", symbolic, *ON_EMULATOR, "--dim", "H=100").assert_bad_input(
        "RingAttentionUpdateV2 node 'merge_0'",
        "aclnnRingAttentionUpdateV2GetWorkspaceSize returned 561002 (ACLNN_ERR_INNER_TILING_ERROR",
        "got 100",
        "given prev_attn_out float32 [2, 1, 100]",
        "`ascend-onnx schema` lists the limits of the device; in a model with fixed sizes",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "gpu"], "--device"),
        ([*ON_EMULATOR, "--dim", "H"], "NAME=VALUE"),
        ([*ON_EMULATOR, "--dim", "H=two"], "whole number"),
        ([*ON_EMULATOR, "--rule", "prev_attn_out"], "NAME=RULE"),
    ],
)
def test_a_bad_option_is_one_sentence(command: Command, chain: Path, options: list[str], words: str) -> None:
    command("run", chain, *options).assert_bad_input(words)


@pytest.mark.parametrize("options", [(), ON_EMULATOR], ids=["cpu", "npu"])
def test_a_bad_model_is_one_sentence(command: Command, tmp_path: Path, options: tuple[str, ...]) -> None:
    command("run", tmp_path / "absent.onnx", *options).assert_bad_input("absent.onnx", "no such file")
    (tmp_path / "text.onnx").write_text("this is not a model")
    command("run", tmp_path / "text.onnx", *options).assert_bad_input("text.onnx", "not an ONNX protobuf")


@pytest.mark.usefixtures("no_cann")
def test_run_without_cann_is_one_sentence(command: Command, chain: Path) -> None:
    command("run", chain, "--device", "npu").assert_bad_input(f"there is no NPU: {NO_CANN}; --cann emulator needs none")


def test_run_with_a_cann_that_is_not_there_is_one_sentence(command: Command, chain: Path, tmp_path: Path) -> None:
    command("run", chain, "--device", "npu", "--cann", tmp_path / "absent").assert_bad_input("there is no NPU")


def test_run_with_a_library_that_is_no_cann_is_one_sentence(command: Command, chain: Path) -> None:
    command("run", chain, "--device", "npu", "--cann", runtime_ep.get_library_path()).assert_bad_input(
        "there is no NPU: CANN lacks the function acl"
    )


def test_a_package_that_was_not_built_is_one_sentence(
    command: Command, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runtime_ep, "__path__", [str(tmp_path)])
        for arguments in (["doctor"], ["run", chain, "--device", "npu"]):
            command(*arguments).assert_bad_input("libascend_onnx_ep.so", "install the package with pip")


def test_doctor_on_a_device(command: Command) -> None:
    result = command("doctor", "--cann", "emulator")
    assert (result.code, result.err) == (0, "")
    assert "product a2" in result.out
    assert "libascend_onnx_ep.so" in result.out
    assert "libascend_emulator.so" in result.out
    assert "Missing operators" not in result.out


def test_doctor_json(command: Command) -> None:
    result = command("doctor", "--cann", "emulator", "--json")
    assert (result.code, result.err) == (0, "")
    data = result.json()
    assert data["usable"] is True
    assert (data["product"], data["reason"], data["missing_operators"]) == ("a2", "", [])
    assert data["provider"] == runtime_ep.get_library_path()
    assert data["devices"] >= 1


@pytest.mark.usefixtures("no_cann")
def test_doctor_without_cann_says_what_is_missing(command: Command) -> None:
    result = command("doctor")
    assert (result.code, result.err) == (1, "")
    assert result.out.replace("\n", " ").startswith(f"No NPU can be used: {NO_CANN}")
    assert "libascendcl.so" in result.out
    data = command("doctor", "--json").json()
    assert (data["usable"], data["reason"], data["opened"]) == (False, NO_CANN, [])
    assert any("libopapi.so" in why for why in data["not_found"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (ON_EMULATOR, 0, ""),
        (("--device", "npu", "--cann", "/nowhere.so"), 2, "error: there is no NPU: "),
    ],
    ids=["emulator", "no_cann"],
)
def test_the_process_ends_quietly(chain: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    """The libraries are still loaded when the interpreter goes away."""
    environment = {**os.environ, "ASCEND_EMULATOR_PRODUCT": "a2"}
    ended = subprocess.run(
        [sys.executable, "-m", "ascend_onnx.cli", "run", chain, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith(words)
    assert ended.stderr.count("\n") == (1 if words else 0)
