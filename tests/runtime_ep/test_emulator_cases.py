"""Cases on the emulated device: what `check` accepts runs and agrees, the rest is refused with the same code."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ascend_onnx import check
from ascend_onnx.check import RELAX
from tests.cases import ALL_CASES
from tests.cases.case import Case
from tests.operators.compare import compare_all
from tests.operators.harness import model_of
from tests.oracles import ORACLES, Array, Expected

from .acl import Acl, AclError, device, library_path
from .device_cases import CASES
from .emulated import NotPackableError, run_on_device

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")

PRODUCTS = ("a2", "950")
RELAXED = ("hidden", "head_dim", "rank")
INVISIBLE = {"unproduced_output", "epsilon"}
"""Findings about a node that its launch does not show: an output's holder is always there, an epsilon is ignored."""
LIFTED = {"block_count"}
"""Lifted along with the hidden size, so that small caches run."""


def outcome(acl: Acl, case: Case, expected: Mapping[str, Expected]) -> dict[str, Array] | AclError | NotPackableError:
    """What the call gives, or why it does not."""
    try:
        return run_on_device(acl, case.operator, case.inputs, case.attributes, expected)
    except (AclError, NotPackableError) as refused:
        return refused


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_case_of_the_tables(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(case, symbolic=False)
    expected = ORACLES[case.operator](case.inputs, case.attributes)
    for relaxed, unseen in (((), INVISIBLE), (RELAXED, INVISIBLE | LIFTED)):
        monkeypatch.setenv(RELAX, ",".join(relaxed))
        for product in PRODUCTS:
            codes = {finding.code for finding in check(model, product) if finding.rule not in unseen}
            with device(product, relax=relaxed) as acl:
                result = outcome(acl, case, expected)
            if isinstance(result, AclError):
                assert result.code in codes, result
            elif isinstance(result, NotPackableError):
                assert codes or relaxed
            else:
                assert codes == set()
                assert compare_all(result, case.expected) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_of_the_device(case: Case) -> None:
    with device("a3", relax=RELAXED[:1]) as acl:
        actual = run_on_device(acl, case.operator, case.inputs, case.attributes, case.expected)
    assert compare_all(actual, case.expected) == []
