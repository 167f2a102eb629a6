"""The emulated device itself: memory of its own, asynchronous streams, executors, faults and the ledger."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from .acl import DEVICE_TO_HOST, HOST_TO_DEVICE, Acl, AclError, device, library_path
from .launches import launch
from .merge import ATTENTION, FLOAT, OUTPUTS, merge, merge_inputs

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")

SLOW_US = 30_000


@pytest.fixture
def acl() -> Iterator[Acl]:
    with device() as found:
        yield found


@pytest.mark.parametrize(("product", "prefix"), [("a2", "Ascend910B"), ("a3", "Ascend910_93"), ("950", "Ascend950")])
def test_product(product: str, prefix: str) -> None:
    with device(product) as acl:
        assert acl.soc_name().startswith(prefix)


def test_initialisation_happens_once(acl: Acl) -> None:
    with pytest.raises(AclError) as repeated:
        acl.call("aclInit", None)
    assert repeated.value.code == 100002


def test_before_initialisation() -> None:
    acl = Acl()
    with pytest.raises(AclError) as early:
        acl.call("aclrtSetDevice", 0)
    assert early.value.code == 100001


def test_unknown_device(acl: Acl) -> None:
    with pytest.raises(AclError) as unknown:
        acl.call("aclrtSetDevice", 1)
    assert unknown.value.code == 107001
    assert "deviceId must be from 0 to 0, got 1" in unknown.value.message


def test_a_device_is_set_for_one_thread(acl: Acl) -> None:
    codes = []

    def allocate() -> None:
        try:
            acl.malloc(16)
        except AclError as error:
            codes.append(error.code)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert codes == [107002]


def test_copies_bring_back_what_was_written(acl: Acl) -> None:
    array = np.arange(1000, dtype=np.int32)
    address = acl.upload(array)
    assert np.array_equal(acl.download(address, array.shape, array.dtype), array)
    assert np.array_equal(acl.download(address + 40, (5,), array.dtype), array[10:15])
    acl.call("aclrtMemset", address, 4000, 0, 8)
    assert acl.download(address, (3,), array.dtype).tolist() == [0, 0, 2]
    acl.free(address)


def test_fresh_memory_is_not_zero(acl: Acl) -> None:
    address = acl.malloc(64)
    assert np.all(acl.download(address, (64,), np.dtype(np.uint8)) != 0)
    acl.free(address)


@pytest.mark.parametrize("kind", [HOST_TO_DEVICE, DEVICE_TO_HOST])
def test_a_copy_between_the_wrong_sides_is_refused(acl: Acl, kind: int) -> None:
    one, other = np.zeros(4, np.int32), np.zeros(4, np.int32)
    with pytest.raises(AclError) as refused:
        acl.call("aclrtMemcpy", one.ctypes.data, 16, other.ctypes.data, 16, kind)
    assert refused.value.code == 107000


def test_a_copy_longer_than_its_destination_is_refused(acl: Acl) -> None:
    array = np.zeros(4, np.int32)
    address = acl.upload(array)
    with pytest.raises(AclError) as refused:
        acl.call("aclrtMemcpy", address, 8, array.ctypes.data, 16, HOST_TO_DEVICE)
    assert refused.value.code == 100000
    acl.free(address)


def test_memory_ends(acl: Acl) -> None:
    with pytest.raises(AclError) as full:
        acl.malloc(1 << 50)
    assert full.value.code == 207001


def test_a_stream_runs_behind_the_host() -> None:
    with device(delay_us=SLOW_US) as acl:
        stream = acl.stream()
        address = acl.upload(np.zeros(4, np.int32))
        source, target = np.full(4, 7, np.int32), np.full(4, -1, np.int32)
        acl.call("aclrtMemcpyAsync", address, 16, source.ctypes.data, 16, HOST_TO_DEVICE, stream)
        acl.copy_back(address, target, stream)
        assert acl.download(address, (4,), target.dtype).tolist() == [0] * 4
        assert target.tolist() == [-1] * 4
        with pytest.raises(AclError) as impatient:
            acl.call("aclrtSynchronizeStreamWithTimeout", stream, 1)
        assert impatient.value.code == 507046
        acl.synchronise(stream)
        assert target.tolist() == [7] * 4
        acl.call("aclrtDestroyStream", stream)
        acl.free(address)


def test_an_event_orders_two_streams() -> None:
    with device(delay_us=SLOW_US) as acl:
        first, second, event = acl.stream(), acl.stream(), acl.event()
        address = acl.upload(np.zeros(4, np.int32))
        source, target = np.full(4, 7, np.int32), np.zeros(4, np.int32)
        status = ctypes.c_int32(-1)
        acl.call("aclrtMemcpyAsync", address, 16, source.ctypes.data, 16, HOST_TO_DEVICE, first)
        acl.call("aclrtRecordEvent", event, first)
        acl.call("aclrtStreamWaitEvent", second, event)
        acl.copy_back(address, target, second)
        acl.call("aclrtQueryEventStatus", event, ctypes.byref(status))
        assert status.value == 0
        acl.synchronise(second)
        assert target.tolist() == [7] * 4
        acl.call("aclrtSynchronizeEvent", event)
        acl.call("aclrtQueryEventStatus", event, ctypes.byref(status))
        assert status.value == 1
        acl.call("aclrtDestroyEvent", event)
        for stream in (first, second):
            acl.call("aclrtDestroyStream", stream)
        acl.free(address)


def test_destroying_a_stream_ends_its_work() -> None:
    with device(delay_us=SLOW_US) as acl:
        stream = acl.stream()
        address, target = acl.upload(np.full(4, 7, np.int32)), np.zeros(4, np.int32)
        acl.copy_back(address, target, stream)
        acl.call("aclrtDestroyStream", stream)
        assert target.tolist() == [7] * 4
        acl.free(address)


def test_an_executor_is_freed_by_the_second_phase(acl: Acl) -> None:
    with ExitStack() as stack:
        stream = acl.stream()
        stack.callback(acl.call, "aclrtDestroyStream", stream)
        called = merge(acl, stack)
        assert acl.live("executors") == 1
        called.second_phase(stream)
        assert acl.live("executors") == 0
        acl.synchronise(stream)
        assert np.array_equal(called.result("attn_out"), np.full(ATTENTION, 2, FLOAT))


def test_a_repeatable_executor_takes_new_addresses(acl: Acl) -> None:
    with ExitStack() as stack:
        stream = acl.stream()
        stack.callback(acl.call, "aclrtDestroyStream", stream)
        called = merge(acl, stack)
        called.set_repeatable()
        called.second_phase(stream)
        doubled = acl.upload(np.full(ATTENTION, 5, FLOAT))
        stack.callback(acl.free, doubled)
        acl.call("aclSetInputTensorAddr", called.executor, 3, called.tensors["cur_attn_out"], doubled)
        called.second_phase(stream)
        acl.synchronise(stream)
        assert np.array_equal(called.result("attn_out"), np.full(ATTENTION, 3, FLOAT))
        with pytest.raises(AclError, match="the tensor at index 0 is prevAttnOut, not the one given"):
            acl.call("aclSetInputTensorAddr", called.executor, 0, called.tensors["cur_attn_out"], doubled)


def test_a_workspace_that_is_too_small_is_refused(acl: Acl) -> None:
    with ExitStack() as stack:
        stream = acl.stream()
        stack.callback(acl.call, "aclrtDestroyStream", stream)
        called = merge(acl, stack)
        called.workspace_size -= 1
        with pytest.raises(AclError, match="workspaceSize must be at least") as refused:
            called.second_phase(stream)
        assert refused.value.code == 161002
        assert acl.live("executors") == 0


def test_kernels_that_do_nothing() -> None:
    with device(noop=True) as acl:
        outputs = launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
        assert not np.any(outputs["attn_out"] == 2)


def test_the_ledger_counts_what_is_alive(acl: Acl) -> None:
    with ExitStack() as stack:
        stream = acl.stream()
        event = acl.event()
        called = merge(acl, stack)
        array = acl.int_array([1, 2])
        host = ctypes.c_void_p()
        acl.call("aclrtMallocHost", ctypes.byref(host), 10)
        assert acl.ledger() == {
            "allocations": 9,
            "host_allocations": 1,
            "tensors": 9,
            "int_arrays": 1,
            "executors": 1,
            "streams": 1,
            "events": 1,
        }
        acl.call("aclrtFreeHost", host)
        acl.call("aclDestroyIntArray", array)
        called.destroy_executor()
        acl.call("aclrtDestroyEvent", event)
        acl.call("aclrtDestroyStream", stream)


def test_the_message_of_a_failure(acl: Acl) -> None:
    inputs = merge_inputs() | {"cur_attn_out": np.ones(ATTENTION, np.float16)}
    with pytest.raises(AclError) as refused:
        launch(acl, "RingAttentionUpdateV2", inputs, {}, OUTPUTS)
    lines = refused.value.message.splitlines()
    assert lines[0] == "EZ1001: Inner Error!"
    assert "curAttnOut must have a type out of [FLOAT], got FLOAT16[FUNC:" in lines[1]
    assert lines[2].strip() == "TraceBack (most recent call last):"
    assert acl.recent_error() is None


def test_every_function_can_fail(acl: Acl) -> None:
    called = [name for name in acl.functions() if name != "kernel"]
    assert {"aclrtMalloc", "aclCreateTensor", "aclnnMlaPreprocess"} <= set(called)
    for function in ("aclrtMalloc", "aclrtCreateStream", "aclrtMemcpy", "aclnnRingAttentionUpdateV2GetWorkspaceSize"):
        for nth in range(1, 1 + calls_of_a_launch(acl, function)):
            acl.fail(function, nth, 500_001)
            with pytest.raises(AclError) as failed:
                launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
            assert (failed.value.function, failed.value.code) == (function, 500_001)
            assert f"A fault was injected into {function}" in failed.value.message
            acl.reset_faults()


def calls_of_a_launch(acl: Acl, function: str) -> int:
    acl.reset_faults()
    launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
    return acl.calls(function)


@pytest.mark.parametrize("function", ["aclrtFree", "aclDestroyTensor", "aclrtDestroyStream"])
def test_a_failed_release_has_released(acl: Acl, function: str) -> None:
    acl.fail(function, 1, 500_001)
    with pytest.raises(AclError, match="A fault was injected"):
        launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
    assert acl.ledger() == {}


def test_a_failed_second_phase_has_freed_its_executor(acl: Acl) -> None:
    acl.fail("aclnnRingAttentionUpdateV2", 1, 361_001)
    with pytest.raises(AclError, match="A fault was injected"):
        launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
    assert acl.live("executors") == 0


def test_a_kernel_fails_when_its_stream_is_synchronised(acl: Acl) -> None:
    acl.fail("kernel", 1, 507_015)
    with pytest.raises(AclError) as failed:
        launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
    assert (failed.value.function, failed.value.code) == ("aclrtSynchronizeStream", 507_015)
    launch(acl, "RingAttentionUpdateV2", merge_inputs(), {}, OUTPUTS)
