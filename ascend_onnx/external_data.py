"""Where the bytes of a model's tensors go when the model is saved, and writing them.

A data file is written tensor by tensor, and copied in chunks: at no time does more than one tensor lie in memory.
"""

from __future__ import annotations

__all__ = ["DataLayout", "data_path", "plan_layout", "write_data"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, Protocol, runtime_checkable

import onnx_ir as ir

from ascend_onnx.errors import InputError
from ascend_onnx.tensors import TensorSlot, external_path, tensor_slots

_INLINE_BYTES = 1024  # smaller tensors stay in the model file: most are shapes and scalars, which readers want at hand
_SINGLE_FILE_BYTES = 256 << 20  # a model without external data stays one file up to here; protobuf itself ends at 2 GB
_ALIGNMENT = 4096  # the ONNX format asks for page-aligned offsets, so that runtimes can map tensors into memory
_CHUNK_BYTES = 16 << 20


def data_path(target: Path) -> Path:
    """The data file that belongs to a model file."""
    return target.with_name(target.name + ".data")


@runtime_checkable
class _Streamable(Protocol):
    """A tensor that can write its bytes to a file without a second copy in memory."""

    def tofile(self, file: Any) -> None: ...


@dataclass
class _Region:
    """A stretch of an existing data file that is copied in one piece, and the tensors whose bytes lie in it."""

    file: Path
    start: int
    end: int
    members: list[tuple[TensorSlot, int]] = field(default_factory=list)


@dataclass
class DataLayout:
    """Where tensors go that do not stay as they are, be it in the model file or as a link to the same external data."""

    linked: list[tuple[TensorSlot, ir.ExternalTensor]] = field(default_factory=list)
    copied: list[_Region] = field(default_factory=list)
    written: list[list[TensorSlot]] = field(default_factory=list)  # slots that share one tensor are one entry
    sources: set[Path] = field(default_factory=set)  # every file that an external tensor of the model lives in

    @property
    def needs_data_file(self) -> bool:
        return bool(self.copied or self.written)


def plan_layout(model: ir.Model, target: Path, source: Path | None, mode: str) -> DataLayout:
    """Decides for every tensor of the model, saved as `target`; `mode` and `source` are those of `storage.save`.

    Raises:
        InputError: `mode` is "link", and a tensor's data does not lie at or below the folder of `target`.
    """
    layout = DataLayout()
    external: list[tuple[TensorSlot, ir.ExternalTensor]] = []
    in_memory: dict[int, list[TensorSlot]] = {}
    for slot in tensor_slots(model):
        if isinstance(slot.tensor, ir.ExternalTensor):
            external.append((slot, slot.tensor))
        elif slot.initializer is not None and slot.tensor.dtype != ir.DataType.STRING:
            in_memory.setdefault(id(slot.tensor), []).append(slot)
    folder = target.parent.resolve()
    may_link = mode == "link" or (mode == "auto" and (source is None or Path(source).resolve().parent == folder))
    to_copy: list[tuple[TensorSlot, ir.ExternalTensor]] = []
    files: dict[str, Path] = {}
    for slot, tensor in external:
        file = files.setdefault(tensor.path, external_path(tensor))
        if may_link and file.is_relative_to(folder):
            if folder.joinpath(tensor.location) != file:  # the same file under another relative path
                layout.linked.append((slot, _moved(tensor, file.relative_to(folder), tensor.offset, target)))
        elif mode == "link":
            raise InputError(
                f"cannot link the data of tensor {tensor.name!r}: it is in {file}, but ONNX wants it at or below "
                f"{folder}, the folder of the new model; save there, or copy the data"
            )
        else:
            to_copy.append((slot, tensor))
    layout.sources = set(files.values())
    layout.copied = _regions(to_copy, files)
    if external or sum(slots[0].tensor.nbytes for slots in in_memory.values()) > _SINGLE_FILE_BYTES:
        layout.written = [slots for slots in in_memory.values() if slots[0].tensor.nbytes >= _INLINE_BYTES]
    return layout


def _regions(tensors: Sequence[tuple[TensorSlot, ir.ExternalTensor]], files: dict[str, Path]) -> list[_Region]:
    """Tensors to copy, joined where their bytes overlap: a stacked weight and its slices are copied once."""
    regions: list[_Region] = []
    for slot, tensor in sorted(tensors, key=lambda entry: (entry[1].path, entry[1].offset or 0)):
        start = tensor.offset or 0
        end = start + (tensor.length or tensor.nbytes)
        last = regions[-1] if regions else None
        if last is None or last.file != files[tensor.path] or start >= last.end:
            last = _Region(files[tensor.path], start, end)
            regions.append(last)
        last.end = max(last.end, end)
        last.members.append((slot, start - last.start))
    return regions


def write_data(layout: DataLayout, file: IO[bytes], target: Path) -> Iterator[tuple[TensorSlot, ir.TensorProtocol]]:
    """Writes the data file and yields each slot with the external tensor that now holds its bytes."""
    location = data_path(target).name
    for region in layout.copied:
        start = _align(file)
        _copy(region, file)
        for slot, offset in region.members:
            yield slot, _moved(slot.tensor, location, start + offset, target)
    for slots in layout.written:
        start = _align(file)
        tensor = slots[0].tensor
        if isinstance(tensor, _Streamable):
            tensor.tofile(file)
        else:
            file.write(tensor.tobytes())
        if file.tell() - start != tensor.nbytes:
            raise OSError(
                f"tensor {tensor.name!r} gave {file.tell() - start} bytes, but its shape needs {tensor.nbytes}"
            )
        for slot in slots:
            yield slot, _moved(slot.tensor, location, start, target)


def _moved(tensor: ir.TensorProtocol, location: str | PurePath, offset: int | None, target: Path) -> ir.ExternalTensor:
    """The same tensor, with its bytes at another place."""
    return ir.ExternalTensor(
        location=PurePath(location).as_posix(),
        offset=offset,
        length=tensor.nbytes,
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
        base_dir=target.parent,
    )


def _copy(region: _Region, target: IO[bytes]) -> None:
    with open(region.file, "rb") as source:
        source.seek(region.start)
        left = region.end - region.start
        while left:
            chunk = source.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{region.file} ends {left} bytes before the end of the weights in it")
            target.write(chunk)
            left -= len(chunk)


def _align(file: IO[bytes]) -> int:
    """Pads to the next aligned offset and returns it."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    return file.tell()
