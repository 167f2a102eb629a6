"""The peak memory of a process, which getrusage does not tell: there a child starts with its parent's peak."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["own_peak", "peak_of"]


def own_peak() -> int:
    """The most bytes that this process ever held in memory."""
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024


def peak_of(module: str, *arguments: str) -> int:
    """The peak that `python -m module arguments` prints of itself."""
    child = [sys.executable, "-m", module, *arguments]
    return int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
