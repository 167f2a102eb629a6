"""Sessions on the CPU: what may be fed, where results may go, and bad input in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from ascend_onnx import InputError, Session, create_session
from tests.test_session import EXOTIC, add_model, one_node_model

A, B = np.arange(3, dtype=np.float32), np.ones(3, np.float32)


@pytest.fixture
def session() -> Session:
    return create_session(add_model())


def test_runs_arrays_lists_of_the_right_type_and_values_on_the_device(session: Session) -> None:
    for a in (A, session.to_device(A), np.repeat(A, 2)[::2]):
        (c,) = session.run(None, {"b": B, "a": a})
        assert np.array_equal(c, A + B)


@pytest.mark.parametrize("onnx_type", EXOTIC)
def test_arrays_that_do_not_lie_in_one_piece(onnx_type: int) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    session = create_session(one_node_model(node, [("x", onnx_type, [None])], [("y", onnx_type, [None])]))
    x = (np.arange(1 << 16) % 64).astype(EXOTIC[onnx_type])[::2]
    (y,) = session.run(None, {"x": x})
    assert y.dtype == x.dtype
    assert np.array_equal(y, x)


def test_a_result_goes_where_it_was_asked_to(session: Session) -> None:
    into = session.to_device(np.zeros_like(A))
    assert session.run(None, {"a": A, "b": B}, into={"c": into}) == []
    assert np.array_equal(session.to_host(into), A + B)


def test_nothing_of_the_model_is_on_an_npu(session: Session) -> None:
    assert [(entry.device, entry.operator) for entry in session.placement()] == [("cpu", "Add")]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda s: s.run(None, [A, B]), "as a mapping from name to array, got a list"),
        (lambda s: s.run(None, {"a": A}), "no array was given for input 'b' (FLOAT ('n',))"),
        (lambda s: s.run(None, {"a": A, "b": B, "d": B}), "the model has no input 'd'; its inputs are a, b"),
        (lambda s: s.run(None, {"a": A, "b": [1, 2, 3]}), "input 'b' expects FLOAT, but the array is int64"),
        (lambda s: s.run(None, {"a": A, "b": B[None]}), "input 'b' expects shape ('n',), but the array has (1, 3)"),
        (lambda s: s.run(["d"], {"a": A, "b": B}), "the model has no output 'd'; its outputs are c"),
        (lambda s: create_session(add_model(), "gpu"), "the device must be cpu or npu, got 'gpu'"),
        (lambda s: create_session(add_model(), require_npu=True), "require_npu is for sessions on an NPU"),
        (lambda s: create_session("no/such.onnx"), "expected an ONNX model at no/such.onnx, but there is no such file"),
    ],
)
def test_bad_input_is_one_sentence(session: Session, bad: Callable[[Session], object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        bad(session)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "garbage.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(InputError, match=r"onnxruntime cannot load .*garbage\.onnx"):
        create_session(path)
