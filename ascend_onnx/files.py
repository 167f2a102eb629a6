"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ascend_onnx.errors import InputError

__all__ = ["replacing", "require_writable"]

_READABLE_BY_ALL = 0o644


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name `target` when the block ends well, and leaves nothing behind when it does not."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as out:
            yield out
        os.chmod(temporary, _READABLE_BY_ALL)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def require_writable(target: Path) -> None:
    """Finds out before the work is done whether its result can be written to `target`.

    Raises:
        InputError: `target` is a folder, or its own folder does not exist or may not be written.
    """
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}; create it first")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write {target}: the folder {target.parent} is not writable")
