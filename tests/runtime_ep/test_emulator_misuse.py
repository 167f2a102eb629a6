"""What would corrupt a device's memory ends the process with a sentence; each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from .acl import library_path

pytestmark = pytest.mark.skipif(library_path() is None, reason="the emulator is not built")

PREAMBLE = """
from contextlib import ExitStack
import ctypes
import numpy as np
from tests.runtime_ep.acl import device
from tests.runtime_ep.merge import merge

context = device(delay_us=20000)
acl = context.__enter__()
stack = ExitStack()
stream = acl.stream()
array = np.zeros(4, np.int32)
address = acl.upload(array)
"""

MISUSES = {
    "freed_twice": ("acl.free(address); acl.free(address)", "freed before, or never allocated"),
    "freed_in_the_middle": ("acl.free(address + 4)", "no live allocation"),
    "freed_host_memory": ("acl.free(array.ctypes.data)", "no device memory"),
    "freed_while_in_use": (
        "acl.copy_back(address, array, stream); acl.free(address)",
        "work on a stream still uses: synchronise first",
    ),
    "used_after_free": ("acl.free(address); acl.download(address, (4,), array.dtype)", "not allocated, or was freed"),
    "copied_too_much": (
        "acl.download(address, (5,), array.dtype)",
        "the source of a copy has 20 bytes at",
    ),
    "host_memory_freed_twice": (
        "host = ctypes.c_void_p(); acl.call('aclrtMallocHost', ctypes.byref(host), 8);"
        " acl.call('aclrtFreeHost', host); acl.call('aclrtFreeHost', host)",
        "no live host memory",
    ),
    "stream_destroyed_twice": (
        "acl.call('aclrtDestroyStream', stream); acl.call('aclrtDestroyStream', stream)",
        "no live stream",
    ),
    "event_destroyed_twice": (
        "event = acl.event(); acl.call('aclrtDestroyEvent', event); acl.call('aclrtRecordEvent', event, stream)",
        "no live event",
    ),
    "tensor_destroyed_twice": (
        "tensor = acl.tensor(address, (4,), array.dtype);"
        " acl.call('aclDestroyTensor', tensor); acl.call('aclDestroyTensor', tensor)",
        "no live tensor",
    ),
    "executor_launched_twice": (
        "called = merge(acl, stack); called.second_phase(stream); called.second_phase(stream)",
        "set it repeatable to launch twice",
    ),
    "executor_destroyed_after_launch": (
        "called = merge(acl, stack); called.second_phase(stream); acl.call('aclDestroyAclOpExecutor', called.executor)",
        "a second phase freed it",
    ),
    "tensor_destroyed_between_the_phases": (
        "called = merge(acl, stack); acl.call('aclDestroyTensor', called.tensors['cur_attn_out']);"
        " called.second_phase(stream)",
        "needs the tensor curAttnOut, which was destroyed after the first phase",
    ),
    "memory_freed_between_the_phases": (
        "called = merge(acl, stack); acl.free(called.addresses['cur_attn_out']); called.second_phase(stream)",
        "curAttnOut has 512 bytes at",  # the workspace has taken its place
    ),
    "tensor_larger_than_its_memory": (
        "called = merge(acl, stack);"
        " acl.call('aclSetRawTensorAddr', called.tensors['cur_attn_out'], address); called.second_phase(stream)",
        "curAttnOut has 512 bytes at",
    ),
    "tensor_in_host_memory": (
        "called = merge(acl, stack);"
        " acl.call('aclSetRawTensorAddr', called.tensors['attn_out'], array.ctypes.data); called.second_phase(stream)",
        "attnOutOut is at",
    ),
}


def run(script: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ASCEND_EMULATOR_LIBRARY": str(library_path())}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    statements, sentence = MISUSES[name]
    ended = run(PREAMBLE + statements)
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "ascend_emulator: " in ended.stderr
    assert sentence in ended.stderr


def test_a_host_that_follows_a_device_pointer_faults() -> None:
    ended = run(PREAMBLE + "ctypes.string_at(address, 4)")
    assert ended.returncode == -signal.SIGSEGV


def test_unknown_settings() -> None:
    ended = run("from tests.runtime_ep.acl import device\ndevice('a4').__enter__()")
    assert "ASCEND_EMULATOR_PRODUCT must be a2, a3 or 950, got a4" in ended.stderr


def test_faults_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_EMULATOR_FAIL", "aclrtMalloc:2:207001,kernel:1:507015")
    ended = run(PREAMBLE + "acl.malloc(16)")
    assert "aclrtMalloc returned 207001" in ended.stderr
