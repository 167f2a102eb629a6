"""The case tables through a session with the provider: what `check` accepts is claimed, all else runs from its body."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import runtime_ep
from ascend_onnx import check
from ascend_onnx.placement import noted_declines
from tests.cases import ALL_CASES
from tests.cases.case import Case
from tests.operators.compare import compare_all
from tests.operators.harness import from_ort, model_of, to_ort

from .provider import Emulator, is_built, npu_session, provider

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")


@pytest.fixture(scope="module", params=["a2", "a3", "950"])
def product(request: pytest.FixtureRequest) -> Iterator[str]:
    with provider(request.param):
        yield request.param


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_case(case: Case, product: str) -> None:
    model = model_of(case, symbolic=False)
    findings = check(model, product)
    if findings and product != "a2":
        return  # the body runs the same on every product
    with noted_declines() as declines:
        session = npu_session(model)
    claimed = [group.ep_name for group in session.get_provider_graph_assignment_info()]
    assert (runtime_ep.get_ep_name() in claimed) == (not findings)
    assert all(finding.message in decline.reason for decline in declines for finding in findings)
    assert bool(declines) == bool(findings)
    names = [output.name for output in model.graph.output]
    results = session.run_with_ort_values(names, {name: to_ort(array) for name, array in case.inputs.items()})
    assert compare_all({n: from_ort(v) for n, v in zip(names, results, strict=True)}, case.expected) == []


def test_a_declined_node_is_an_error_under_require_npu() -> None:
    case = next(case for case in ALL_CASES if check(model_of(case, symbolic=False), "a2"))
    model = model_of(case, symbolic=False)
    model.graph.node[0].name = "first"
    with provider(), pytest.raises(Exception, match=r"node 'first' cannot run on the NPU \(a2\), which require_npu"):
        npu_session(model, require_npu=True)


def test_models_without_bodies_load_where_the_domain_is_on_offer() -> None:
    import onnxruntime

    case = next(
        case
        for case in ALL_CASES
        if case.operator == "SparseFlashAttention" and not check(model_of(case, symbolic=False), "a2")
    )
    model = model_of(case, symbolic=False)
    names = [output.name for output in model.graph.output]
    for device_only in (True, False):
        with provider(device_only=device_only):
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == runtime_ep.get_ep_name()]
            options.add_provider_for_devices(devices, {})
            if not device_only:
                with pytest.raises(Exception, match="is not a registered function"):
                    onnxruntime.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
                continue
            session = onnxruntime.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
            results = session.run_with_ort_values(names, {n: to_ort(a) for n, a in case.inputs.items()})
            assert compare_all({n: from_ort(v) for n, v in zip(names, results, strict=True)}, case.expected) == []
            del session, options, devices, results


def test_the_emulator_is_the_one_that_the_provider_uses() -> None:
    with provider() as emulator:
        assert isinstance(emulator, Emulator)
        before = emulator.calls("aclrtGetDevice")
        case = next(c for c in ALL_CASES if not check(model_of(c, symbolic=False), "a2"))
        npu_session(model_of(case, symbolic=False))
        assert emulator.calls("aclrtGetDevice") > before
