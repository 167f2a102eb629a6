"""Cases on the emulated device: what `check` accepts runs and agrees, the rest is refused with the same code."""

from __future__ import annotations

import pytest

from ascend_onnx import check
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
def test_case_of_the_tables(case: Case) -> None:
    model = model_of(case, symbolic=False)
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    for product in PRODUCTS:
        findings = check(model, product)
        codes = {finding.code for finding in findings if finding.rule not in INVISIBLE}
        with device(product) as acl:
            if codes:
                with pytest.raises((AclError, NotPackableError)) as refused:
                    run_on_device(acl, case.operator, case.inputs, case.attributes, expected)
                assert getattr(refused.value, "code", None) in {None, *codes}, [f.message for f in findings]
            else:
                actual = run_on_device(acl, case.operator, case.inputs, case.attributes, expected)
                assert compare_all(actual, case.expected) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_of_the_device(case: Case) -> None:
    with device("a3", relax=RELAXED[:1]) as acl:
        actual = run_on_device(acl, case.operator, case.inputs, case.attributes, case.expected)
    assert compare_all(actual, case.expected) == []


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_case_with_bounds_relaxed(case: Case) -> None:
    """What runs once the bounds are loosened agrees as well."""
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    for product in PRODUCTS[1:]:
        with device(product, relax=RELAXED) as acl:
            try:
                actual = run_on_device(acl, case.operator, case.inputs, case.attributes, expected)
            except (AclError, NotPackableError):
                continue
            assert compare_all(actual, case.expected) == []
