"""Values that lie a few steps behind another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import onnx_ir as ir

from fusion_patterns.graph import Facts

__all__ = ["values_behind"]

_NEAR = 48
"""How many values are looked at when looking for a norm or a rotation behind a projection."""


def values_behind(value: ir.Value, facts: Facts, most: int = _NEAR) -> Iterator[ir.Value]:
    """Values computed from a value, the nearest first, no more than about `most`."""
    queue, seen = deque([value]), {value}
    while queue and len(seen) < most:
        for node, _ in facts.readers(queue.popleft()):
            for output in node.outputs:
                if output not in seen:
                    seen.add(output)
                    queue.append(output)
                    yield output
