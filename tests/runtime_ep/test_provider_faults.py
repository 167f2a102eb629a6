"""Every call of CANN in a session's life fails once: a clean exception, nothing left behind, and the next run works."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import onnx
import pytest

import ascend_onnx
import runtime_ep
from tests.operators.harness import run_body
from tests.oracles import Array

from .provider import Emulator, is_built, provider, ring_chain, ring_feeds

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")

OUT_OF_MEMORY, DEVICE_FAILED = 207001, 507015


class Life:
    """A session's life: created, run twice, destroyed. A constant, a CPU node in front, and two claimed nodes."""

    def __init__(self) -> None:
        feeds = ring_feeds()
        self.constants = {"cur_softmax_max": feeds.pop("cur_softmax_max")}
        self.feeds = feeds
        self.model: onnx.ModelProto = ascend_onnx.attach_functions(
            ring_chain(2, between="Neg", constants=self.constants)
        )
        self.expected = run_body(ring_chain(2, between="Neg", constants=self.constants), feeds)

    def check(self, results: list[Array]) -> None:
        for got, (name, wanted) in zip(results, self.expected.items(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)

    def live(self) -> list[str]:
        """The errors on the way; a run without one is right, and so is the one after a failure.

        Their sentences, because the errors themselves hold on to the session.
        """
        raised: list[str] = []
        try:
            session = ascend_onnx.create_session(self.model, device="npu", require_npu=True)
        except ascend_onnx.InputError as error:
            return [str(error)]
        for _ in range(2):
            try:
                results = session.run(None, self.feeds)
            except ascend_onnx.InputError as error:
                raised.append(str(error))
            else:
                self.check(results)
        return raised


@pytest.fixture(scope="module")
def life() -> Life:
    return Life()


@pytest.fixture(autouse=True)
def only_new_objects_are_collected() -> Iterator[None]:
    """What earlier tests have left would make each of the many collections below slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def strike(emulator: Emulator, life: Life, function: str, nth: int) -> None:
    code = OUT_OF_MEMORY if "Malloc" in function else DEVICE_FAILED
    emulator.reset_faults()
    emulator.fail(function, nth, code)
    raised = life.live()
    gc.collect()
    where = f"call {nth} of {function}"
    assert len(raised) <= 1, f"{where}: {raised}"
    assert emulator.ledger() == {}, where
    for error in raised:
        assert "\n" not in error, where
        assert str(code) in error or "memory" in error, f"{where}: {error}"
    emulator.reset_faults()
    assert life.live() == [], where
    gc.collect()
    assert emulator.ledger() == {}, where


def test_every_call_fails_once(life: Life) -> None:
    with provider() as emulator:
        life.live()
        gc.collect()
        emulator.reset_faults()
        assert life.live() == []
        gc.collect()
        counts = {function: emulator.calls(function) for function in emulator.functions()}
        assert counts["aclnnRingAttentionUpdateV2GetWorkspaceSize"] == 4
        for function, count in counts.items():
            for nth in range(1, count + 1):
                strike(emulator, life, function, nth)


def test_a_kernel_that_fails_on_the_device(life: Life) -> None:
    with provider() as emulator:
        for nth in (1, 2, 3, 4):
            emulator.reset_faults()
            emulator.fail("kernel", nth, DEVICE_FAILED)
            (error,) = life.live()
            assert "RingAttentionUpdateV2 node 'merge_" in error
            assert str(DEVICE_FAILED) in error
            gc.collect()
            assert emulator.ledger() == {}


def test_registration_without_a_working_cann_offers_nothing_and_says_why() -> None:
    with provider() as emulator:
        pass
    emulator.library.aclFinalize()
    for function, reason in {
        "aclInit": "aclInit failed with 507015",
        "aclrtGetDeviceCount": "failed with 507015",
    }.items():
        emulator.reset_faults()
        emulator.fail(function, 1, DEVICE_FAILED)
        assert runtime_ep.register("emulator") == []
        found = runtime_ep.diagnose()
        assert not found.usable
        assert reason in found.reason
    emulator.reset_faults()
    assert runtime_ep.register("emulator")
    runtime_ep.unregister()


def test_an_error_names_operator_node_code_arguments_and_next_step(life: Life) -> None:
    with provider() as emulator:
        session = ascend_onnx.create_session(life.model, device="npu")
        session.run(None, life.feeds)
        emulator.reset_faults()
        emulator.fail("aclnnRingAttentionUpdateV2GetWorkspaceSize", 2, 561002)
        text = failure(session, life.feeds)
        del session
    assert text.startswith(
        "RingAttentionUpdateV2 node 'merge_1': aclnnRingAttentionUpdateV2GetWorkspaceSize returned 561002 "
        "(ACLNN_ERR_INNER_TILING_ERROR"
    )
    assert "prev_attn_out float32 [2, 1, 64], prev_softmax_max float32 [1, 1, 2, 8]" in text
    assert text.endswith("in a model with fixed sizes `ascend-onnx check` finds such a node and it runs on the CPU")


def failure(session: ascend_onnx.Session, feeds: dict[str, Array]) -> str:
    """The sentence of the error that a run ends with."""
    with pytest.raises(ascend_onnx.InputError) as raised:
        session.run(None, feeds)
    return str(raised.value)


def test_no_device_memory_is_an_error_and_not_a_crash() -> None:
    model = ascend_onnx.attach_functions(ring_chain(2))
    with provider():
        session = ascend_onnx.create_session(model, device="npu")
        with pytest.raises(ascend_onnx.InputError, match="no memory left"):
            session.to_device(np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (1 << 40,), (0,)))
        session.run(None, ring_feeds())
        del session
