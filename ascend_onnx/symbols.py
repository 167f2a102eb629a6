"""Names of symbolic dimensions as expressions that can be computed with."""

from __future__ import annotations

import functools
import zlib

import onnx_ir as ir

__all__ = ["expression"]


@functools.cache
def expression(name: str) -> str:
    """The name itself where it is an expression ("past + 1"), else an identifier that stands for it ("batch size").

    Exporters and people may name a dimension anything; equal names always give equal expressions.
    """
    try:
        is_expression = name.isdigit() or bool(ir.SymbolicDim(name).free_symbols())
    except ValueError:
        is_expression = False
    return name if is_expression else f"dim_{zlib.crc32(name.encode()):08x}"
