"""Where the native libraries are: in the package, or where an editable installation puts what was built."""

from __future__ import annotations

import errno
from pathlib import Path

import runtime_ep

__all__ = ["find_library"]


def find_library(name: str) -> Path:
    """The path of a native library of this package.

    Raises `FileNotFoundError`, with what to do, where the package was not built.
    """
    # An editable installation has two folders: the sources, and the one in site-packages with what was built.
    folders = [Path(folder) / "lib" for folder in runtime_ep.__path__]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(map(str, folders))
    why = f"no such library in {looked}; install the package with pip, which builds it"
    raise FileNotFoundError(errno.ENOENT, why, name)
