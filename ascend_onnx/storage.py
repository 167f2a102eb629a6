"""Models from files and into files, with weights that stay on disk.

Loading reads the graph and leaves external data where it is. Saving streams: at no time does more than one tensor's
bytes, or one chunk of a copied file, lie in memory.
"""

from __future__ import annotations

__all__ = ["EXTERNAL_DATA_MODES", "MINIMUM_OPSET", "load", "save"]

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, Literal, Protocol, get_args, runtime_checkable

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from ascend_onnx.errors import InputError
from ascend_onnx.tensors import TensorSlot, external_path, tensor_slots, tensors_replaced

ExternalDataMode = Literal["auto", "link", "copy"]
EXTERNAL_DATA_MODES: tuple[str, ...] = get_args(ExternalDataMode)

MINIMUM_OPSET = 17
"""The oldest default-domain opset that function bodies can be written for."""

_INLINE_BYTES = 1024  # smaller tensors stay in the model file: most are shapes and scalars, which readers want at hand
_SINGLE_FILE_BYTES = 256 << 20  # a model without external data stays one file up to here; protobuf itself ends at 2 GB
_ALIGNMENT = 4096  # the ONNX format asks for page-aligned offsets, so that runtimes can map tensors into memory
_CHUNK_BYTES = 16 << 20


# ---------------------------------------------------------------------------------------------------------------- load


def load(model: str | Path | onnx.ModelProto | ir.Model) -> ir.Model:
    """The model as an `onnx_ir.Model`; an `onnx_ir.Model` is returned as it is.

    A file is checked by `onnx.checker`, and its external data must exist in full length; the data is not read.

    Raises:
        InputError: no such file, not an ONNX protobuf, rejected by the checker, missing or short external data, sparse
            initializers, or an opset below 17.
    """
    if isinstance(model, ir.Model):
        _require_opset(model.opset_imports.get("", model.opset_imports.get("ai.onnx")), "the given model")
        return model
    if isinstance(model, onnx.ModelProto):
        _require_supported(model, "the given model")
        return ir.from_proto(model)
    path = Path(os.path.abspath(model))
    proto = _parse(path)
    _require_supported(proto, str(path))
    _require_external_data(proto, path)
    _require_valid(path)
    loaded = ir.from_proto(proto)
    ir.external_data.set_base_dir(loaded.graph, path.parent)
    return loaded


def _parse(path: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise InputError(f"expected an ONNX model at {path}, but there is no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"expected an ONNX model at {path}, but it is a folder; name the .onnx file in it") from None
    except OSError as error:
        raise InputError(f"cannot read the ONNX model {path}: {error.strerror}") from None
    except DecodeError:
        raise InputError(
            f"expected an ONNX model at {path}, but the file is not an ONNX protobuf or is cut short; export it again"
        ) from None
    if proto.ir_version == 0 or not proto.HasField("graph"):
        raise InputError(
            f"expected an ONNX model at {path}, but the file holds no graph or no ir_version; export it again"
        )
    return proto


def _require_supported(proto: onnx.ModelProto, where: str) -> None:
    versions = [entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    _require_opset(min(versions, default=None), where)
    if any(graph.sparse_initializer for graph in _graphs(proto.graph)):
        raise InputError(
            f"{where} has sparse initializers, which are not supported; store them as dense initializers instead"
        )


def _require_opset(version: int | None, where: str) -> None:
    if version is not None and version < MINIMUM_OPSET:
        raise InputError(
            f"{where} uses opset {version}, but {MINIMUM_OPSET} or later is expected; "
            f"export it anew or raise it with onnx.version_converter.convert_version(model, {MINIMUM_OPSET})"
        )


def _require_valid(path: Path) -> None:
    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"onnx.checker rejects {path}: {reason}") from None


def _require_external_data(proto: onnx.ModelProto, path: Path) -> None:
    """Every external tensor's bytes are there, judged by the sizes of the files."""
    sizes: dict[str, int | None] = {}
    wanting: list[str] = []
    for tensor in _external_tensors(proto):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if not location or PurePath(location).is_absolute() or ".." in PurePath(location).parts:
            raise InputError(
                f"tensor {tensor.name!r} of {path} has its data at {location!r}, but a path at or below the model's "
                "own folder is expected; save the model again with its data beside it"
            )
        if location not in sizes:
            sizes[location] = _file_size(path.parent / location)
        size = sizes[location]
        end = int(entries.get("offset", 0)) + max(int(entries.get("length", 0)), _tensor_bytes(tensor))
        if size is None:
            wanting.append(f"tensor {tensor.name!r} needs {path.parent / location}, which is not there")
        elif size < end:
            wanting.append(
                f"tensor {tensor.name!r} needs the first {end} bytes of {path.parent / location}, which has only {size}"
            )
    if wanting:
        more = f" (and {len(wanting) - 1} more tensors)" if len(wanting) > 1 else ""
        raise InputError(
            f"external data of {path} is missing: {wanting[0]}{more}; put the data file beside the model "
            "or export the model again"
        )


def _file_size(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    elements = 1
    for size in tensor.dims:
        elements *= size
    return (elements * ir.DataType(tensor.data_type).bitwidth + 7) // 8


def _external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in _graphs(proto.graph):
        yield from _external(graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                yield from _external([attribute.t, *attribute.tensors])


def _external(tensors: Sequence[onnx.TensorProto]) -> Iterator[onnx.TensorProto]:
    return (tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] * attribute.HasField("g") + list(attribute.graphs):
                yield from _graphs(inner)


# ---------------------------------------------------------------------------------------------------------------- save


def save(
    model: ir.Model,
    path: str | Path,
    *,
    source: Path | None = None,
    external_data: ExternalDataMode = "auto",
) -> None:
    """Writes the model to `path`, and weights that need a new home to `path` + ".data".

    External data, with OUT for `path` and IN for `source`, the file that the model was loaded from:

    - "auto": when OUT is in IN's folder (without `source`: when the data lies at or below OUT's folder), external
      tensors keep pointing at the files they are in; elsewhere their bytes are copied.
    - "link": external tensors keep pointing at the files they are in.
    - "copy": their bytes are copied.

    Tensors in memory, and lazy ones, of 1 KiB or more go to the data file too; a model without any external data, of at
    most 256 MiB, stays one file. The files appear together or not at all: on an error the folder is as it was. `model`
    is not changed and keeps working.

    Raises:
        InputError: an unknown mode; "link" where the data is not at or below OUT's folder; OUT or its data file would
            replace a file that the model's own tensors live in; OUT's folder cannot be written.
    """
    if external_data not in EXTERNAL_DATA_MODES:
        raise InputError(f"external_data is {external_data!r}, but one of {', '.join(EXTERNAL_DATA_MODES)} is expected")
    target = Path(os.path.abspath(path))
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}; create it first")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; name a file in it")
    layout = _plan(model, target, source, external_data)
    _require_no_clash(layout, target)
    try:
        _write(model, layout, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    except EncodeError as error:
        raise InputError(f"cannot write {target}: {error}; a protobuf file ends at 2 GB, nothing was changed") from None


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
class _Layout:
    """Where tensors go that do not stay as they are, be it in the model file or as a link to the same external data."""

    linked: list[tuple[TensorSlot, ir.ExternalTensor]] = field(default_factory=list)
    copied: list[_Region] = field(default_factory=list)
    written: list[list[TensorSlot]] = field(default_factory=list)  # slots that share one tensor are one entry
    sources: set[Path] = field(default_factory=set)  # every file that an external tensor of the model lives in

    @property
    def needs_data_file(self) -> bool:
        return bool(self.copied or self.written)


def _plan(model: ir.Model, target: Path, source: Path | None, mode: str) -> _Layout:
    layout = _Layout()
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


def _require_no_clash(layout: _Layout, target: Path) -> None:
    written = {target.resolve(): str(target)}
    if layout.needs_data_file:
        data = _data_path(target)
        if data.is_dir():
            raise InputError(f"cannot write weights to {data}: it is a folder; choose another output name")
        written[data.resolve()] = str(data)
    for file, name in written.items():
        if file in layout.sources:
            raise InputError(
                f"cannot write to {name}: the model's own weights are stored there; choose another output name"
            )


def _write(model: ir.Model, layout: _Layout, target: Path) -> None:
    temporary_model, temporary_data = _temporary(target, "model"), _temporary(target, "data")
    try:
        replacements: list[tuple[TensorSlot, ir.TensorProtocol]] = list(layout.linked)
        if layout.needs_data_file:
            with open(temporary_data, "xb") as file:
                replacements.extend(_write_data(layout, file, target))
                _flush_to_disk(file)
        with tensors_replaced(replacements):
            proto = ir.to_proto(model)
        with open(temporary_model, "xb") as file:
            file.write(proto.SerializeToString())
            _flush_to_disk(file)
        if layout.needs_data_file:
            _put_both_in_place(temporary_model, temporary_data, target)
        else:
            temporary_model.replace(target)
    finally:
        temporary_model.unlink(missing_ok=True)
        temporary_data.unlink(missing_ok=True)


def _put_both_in_place(temporary_model: Path, temporary_data: Path, target: Path) -> None:
    """Renames the data file, then the model; a model file that stays because of an error keeps its data file too."""
    data, old_data = _data_path(target), _temporary(target, "old")
    had_data = data.exists()
    if had_data:
        data.rename(old_data)
    done = False
    try:
        temporary_data.rename(data)
        temporary_model.replace(target)
        done = True
    finally:
        if done:
            old_data.unlink(missing_ok=True)
        elif had_data:
            old_data.replace(data)
        else:
            data.unlink(missing_ok=True)


def _write_data(layout: _Layout, file: IO[bytes], target: Path) -> Iterator[tuple[TensorSlot, ir.TensorProtocol]]:
    """Writes the data file and yields each slot with the external tensor that now holds its bytes."""
    location = _data_path(target).name
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


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _data_path(target: Path) -> Path:
    return target.with_name(target.name + ".data")


def _temporary(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.{kind}.tmp")
