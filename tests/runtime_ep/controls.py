"""The emulator's controls: faults, counts and the ledger, and the variables that it reads when it starts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Controls", "environment"]

KINDS = ("allocations", "host_allocations", "tensors", "int_arrays", "executors", "streams", "events")
"""The kinds of live objects that the ledger counts."""


class Controls:
    """The control functions of a loaded emulator."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.ascend_emulator_fail.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int32)
        library.ascend_emulator_calls.argtypes = (ctypes.c_char_p,)
        library.ascend_emulator_calls.restype = ctypes.c_uint64
        library.ascend_emulator_live.argtypes = (ctypes.c_char_p,)
        library.ascend_emulator_live.restype = ctypes.c_int64
        library.ascend_emulator_function.argtypes = (ctypes.c_uint64,)
        library.ascend_emulator_function.restype = ctypes.c_char_p

    def fail(self, function: str, nth: int, code: int) -> None:
        """Makes the `nth` call of `function` from now on return `code`."""
        self.library.ascend_emulator_fail(function.encode(), nth, code)

    def reset_faults(self) -> None:
        """Forgets faults and sets all counts to zero."""
        self.library.ascend_emulator_reset_faults()

    def calls(self, function: str) -> int:
        return int(self.library.ascend_emulator_calls(function.encode()))

    def functions(self) -> list[str]:
        """The names that `fail` takes."""
        names: list[str] = []
        while (name := self.library.ascend_emulator_function(len(names))) is not None:
            names.append(name.decode())
        return names

    def live(self, kind: str) -> int:
        return int(self.library.ascend_emulator_live(kind.encode()))

    def ledger(self) -> dict[str, int]:
        """How many objects of each kind are alive, without those that are none."""
        return {kind: count for kind in KINDS if (count := self.live(kind))}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the length of a `with` block; what was there before comes back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
