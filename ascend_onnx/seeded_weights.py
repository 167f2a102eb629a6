"""Model files without weights: take the weights out of a graph, or put seeded ones back in.

A stripped model is a normal ONNX file whose weight matrices are external tensors; only the file that holds their bytes
is absent. `fill` writes that file. Every value follows from the tensor's name, so all machines get the same model.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ascend_onnx.errors import InputError
from ascend_onnx.files import replacing

__all__ = ["fill", "strip", "values"]

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
INTEGERS = frozenset({ir.DataType.INT8, ir.DataType.UINT8})

_SMALLEST_WEIGHT = 4097
"""Elements from which on a matrix is a weight worth leaving out."""

_PAGE = 4096
"""Tensors start at multiples of this, so that a reader can map them."""

_WEIGHT_READERS = frozenset(
    {
        "Cast",
        "DequantizeLinear",
        "Einsum",
        "Gather",
        "GatherND",
        "Gemm",
        "MatMul",
        "MatMulInteger",
        "QGemm",
        "QLinearMatMul",
        "Reshape",
        "Slice",
        "Split",
        "SplitToSequence",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that read weights or start a view of one. What only Add or Where reads is a mask or a bias."""


def values(tensor: ir.TensorProtocol) -> npt.NDArray[Any]:
    """The seeded values of a tensor, drawn from a generator seeded with the CRC-32 of its name.

    Floats are normal with standard deviation `1 / sqrt(fan_in)`, the fan-in being the larger of the last two
    dimensions; int8 is uniform over [-127, 127] and uint8 over [0, 255].

    Raises:
        InputError: for any other element type.
    """
    generator = np.random.default_rng(zlib.crc32((tensor.name or "").encode()))
    shape = tensor.shape.numpy()
    if tensor.dtype in INTEGERS:
        info = np.iinfo(tensor.dtype.numpy())
        drawn = generator.integers(max(info.min, -127), info.max, size=shape, endpoint=True)
    elif tensor.dtype in FLOATS:
        drawn = generator.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float64(max(shape[-2:], default=1)))
    else:
        raise InputError(f"tensor {tensor.name!r} is {tensor.dtype}; seeded weights are float, int8 or uint8")
    return drawn.astype(tensor.dtype.numpy())


def fill(model: str | Path) -> list[Path]:
    """Write the weight files that the model at path `model` refers to and that do not exist; returns those written.

    A file appears complete or not at all, and one that exists is never touched.

    Raises:
        InputError: if the model cannot be read, or refers to a file outside its own folder.
    """
    path = Path(model)
    by_file: dict[str, list[ir.ExternalTensor]] = {}
    for tensor in _external_tensors(path):
        by_file.setdefault(os.fspath(tensor.location), []).append(tensor)
    written = []
    for location, tensors in by_file.items():
        target = path.parent / location
        if not target.resolve().is_relative_to(path.parent.resolve()):
            raise InputError(f"{path}: external data {location!r} lies outside the model's folder")
        if target.exists():
            continue
        with replacing(target) as out:
            for tensor in tensors:
                out.seek(tensor.offset or 0)
                out.write(values(tensor).tobytes())
        written.append(target)
    return written


def strip(source: str | Path, target: str | Path) -> int:
    """Write `source` to `target` without the bytes of its weights; returns how many bytes `fill` would write.

    Documentation strings and metadata go as well: exporters keep stack traces and local paths there. Tables and masks
    (matrices whose rows are all equal, or whose first row is constant) stay, because their values matter.

    Raises:
        InputError: if the model cannot be read.
    """
    source, target = Path(source), Path(target)
    model = _load(source)
    location = f"{target.stem}.weights"
    end = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not _is_weight(value, tensor):
            continue
        offset = -(-end // _PAGE) * _PAGE
        value.const_value = ir.ExternalTensor(
            location, offset, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=value.name or ""
        )
        end = offset + tensor.nbytes
    _remove_notes(model)
    with replacing(target) as out:
        out.write(ir.to_proto(model).SerializeToString())
    return end


def _load(path: Path) -> ir.Model:
    """The graph alone: `ascend_onnx.storage.load` would insist on the data that is missing here."""
    try:
        return ir.load(path)
    except OSError as error:
        raise InputError(f"cannot read the ONNX model {path}: {error.strerror}") from None
    except DecodeError:
        raise InputError(f"expected an ONNX model at {path}, but the file is not an ONNX protobuf") from None


def _external_tensors(path: Path) -> Iterator[ir.ExternalTensor]:
    for value in _load(path).graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value


def _is_weight(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    if len(tensor.shape) < 2 or tensor.size < _SMALLEST_WEIGHT or tensor.dtype not in FLOATS | INTEGERS:
        return False
    if not any(node.op_type in _WEIGHT_READERS for node in value.consumers()):
        return False
    rows = tensor.numpy().reshape(tensor.shape.numpy()[0], -1)
    return not (np.all(rows == rows[:1]) or np.all(rows[0] == rows[0, 0]))


def _remove_notes(model: ir.Model) -> None:
    graph = model.graph
    for item in (model, graph, *graph, *(v for node in graph for v in node.outputs), *graph.inputs):
        item.doc_string = None
        item.metadata_props.clear()
    for value in graph.initializers.values():
        value.doc_string = None
        value.metadata_props.clear()
