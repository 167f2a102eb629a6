"""Where the native libraries are: beside the package, whether it is installed, editable or a source tree."""

from __future__ import annotations

import sysconfig
from pathlib import Path

__all__ = ["find_library"]


def find_library(name: str) -> Path:
    """The path of a native library of this package.

    Raises `FileNotFoundError`, with what to do, where the package was not built.
    """
    # An editable installation leaves the sources where they are and puts what was built into site-packages.
    folders = [Path(__file__).parent / "lib", Path(sysconfig.get_path("platlib")) / "runtime_ep" / "lib"]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(map(str, folders))
    raise FileNotFoundError(f"{name} is not in {looked}: install the package with pip, which builds it")
