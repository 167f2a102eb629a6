"""Cases on the emulated device: what `check` accepts runs and agrees, the rest is refused with the same code."""

from __future__ import annotations

import pytest

from ascend_onnx import check
from ascend_onnx.check import RELAX
from tests.cases import ALL_CASES
from tests.cases.case import Case
from tests.operators.compare import compare_all
from tests.operators.harness import model_of
from tests.oracles import ORACLES

from .acl import AclError, device, library_path
from .device_cases import CASES
from .emulated import NotPackableError, run_on_device

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")

PRODUCTS = ("a2", "a3", "950")
RELAXED = ("hidden", "head_dim", "rank")
INVISIBLE = {"unproduced_output", "epsilon"}
"""Findings about a node that its launch does not show: an output's holder is always there, an epsilon is ignored."""


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_case_of_the_tables(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(case, symbolic=False)
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    for relaxed in ((), RELAXED):
        monkeypatch.setenv(RELAX, ",".join(relaxed))
        for product in PRODUCTS:
            codes = {finding.code for finding in check(model, product) if finding.rule not in INVISIBLE}
            with device(product, relax=relaxed) as acl:
                try:
                    actual = run_on_device(acl, case.operator, case.inputs, case.attributes, expected)
                except NotPackableError:
                    assert codes or relaxed
                except AclError as refused:
                    assert refused.code in codes, refused
                else:
                    assert codes == set()
                    assert compare_all(actual, case.expected) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_of_the_device(case: Case) -> None:
    with device("a3", relax=RELAXED[:1]) as acl:
        actual = run_on_device(acl, case.operator, case.inputs, case.attributes, case.expected)
    assert compare_all(actual, case.expected) == []
