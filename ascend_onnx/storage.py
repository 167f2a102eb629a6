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
from pathlib import Path, PurePath
from typing import IO, Literal, get_args

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from ascend_onnx.errors import InputError
from ascend_onnx.external_data import DataLayout, data_path, plan_layout, write_data
from ascend_onnx.tensors import TensorSlot, tensors_replaced

ExternalDataMode = Literal["auto", "link", "copy"]
EXTERNAL_DATA_MODES: tuple[str, ...] = get_args(ExternalDataMode)

MINIMUM_OPSET = 17
"""The oldest default-domain opset that function bodies can be written for."""


# ---------------------------------------------------------------------------------------------------------------- load


def load(model: str | Path | onnx.ModelProto | ir.Model) -> ir.Model:
    """The model as an `onnx_ir.Model`; an `onnx_ir.Model` is returned as it is.

    A file is checked by `onnx.checker`, and its external data must exist in full length; the data is not read.

    Raises:
        InputError: no such file, not an ONNX protobuf, rejected by the checker, missing or short external data, sparse
            initializers, or an opset below 17 or newer than the installed onnx.
    """
    if isinstance(model, ir.Model):
        _require_opset(model.opset_imports.get("", model.opset_imports.get("ai.onnx")), "the given model")
        return model
    if isinstance(model, onnx.ModelProto):
        _require_supported(model, "the given model")
        return _as_ir(model, "the given model")
    path = Path(os.path.abspath(model))
    proto = _parse(path)
    _require_supported(proto, str(path))
    _require_external_data(proto, path)
    _require_valid(path)
    loaded = _as_ir(proto, str(path))
    ir.external_data.set_base_dir(loaded.graph, path.parent)
    return loaded


def _as_ir(proto: onnx.ModelProto, where: str) -> ir.Model:
    try:
        return ir.from_proto(proto)
    except (ir.serde.SerdeError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"{where} is damaged: {reason}; export it again") from None


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
    for version in versions:
        _require_opset(version, where)
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
    newest = onnx.defs.onnx_opset_version()
    if version is not None and version > newest:
        raise InputError(
            f"{where} uses opset {version}, but onnx {onnx.__version__} knows opsets up to {newest}; "
            "export it for an older opset or update onnx"
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
        where = f"tensor {tensor.name!r} of {path}"
        offset, length = (_whole_number(entries.get(key, "0"), f"the {key} of {where}") for key in ("offset", "length"))
        needed = _tensor_bytes(tensor, where)
        if "length" in entries and length != needed:
            raise InputError(f"{where} says {length} bytes, but its shape and type take {needed}; export it again")
        end = offset + needed
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


def _whole_number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{what} must be a whole number of bytes, got {text!r}; export the model again")
    return int(text)


def _tensor_bytes(tensor: onnx.TensorProto, where: str) -> int:
    elements = 1
    for size in tensor.dims:
        elements *= size
    if tensor.data_type not in {int(known) for known in ir.DataType}:
        raise InputError(f"{where} has the element type {tensor.data_type}, which ONNX does not know")
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
    target = Path(os.path.realpath(path))  # a link keeps pointing at what gets written
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}; create it first")
    for file in (target, data_path(target)):
        if file.exists() and not file.is_file():
            raise InputError(f"cannot write {file}: it is no regular file; name another")
    layout = plan_layout(model, target, source, external_data)
    _require_no_clash(layout, target, source)
    try:
        _write(model, layout, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    except EncodeError as error:
        raise InputError(f"cannot write {target}: {error}; a protobuf file ends at 2 GB, nothing was changed") from None


def _require_no_clash(layout: DataLayout, target: Path, source: Path | None) -> None:
    """Neither the model's own data nor that of the file it came from is written over."""
    written = {target.resolve(): target}
    in_use = set(layout.sources)
    if layout.needs_data_file:
        data = data_path(target)
        written[data.resolve()] = data
        if data.exists() and source is not None and Path(source).is_file():
            in_use |= _data_files(Path(source))  # lazy tensors may still be computed from them
    for file, name in written.items():
        if file in in_use:
            raise InputError(
                f"cannot write to {name}: the model's own weights are stored there; choose another output name"
            )


def _data_files(path: Path) -> set[Path]:
    proto = _parse(path)
    entries = (entry for tensor in _external_tensors(proto) for entry in tensor.external_data)
    return {(path.parent / entry.value).resolve() for entry in entries if entry.key == "location"}


def _write(model: ir.Model, layout: DataLayout, target: Path) -> None:
    temporary_model, temporary_data = _temporary(target, "model"), _temporary(target, "data")
    try:
        replacements: list[tuple[TensorSlot, ir.TensorProtocol]] = list(layout.linked)
        if layout.needs_data_file:
            with open(temporary_data, "xb") as file:
                replacements.extend(write_data(layout, file, target))
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
    data, old_data = data_path(target), _temporary(target, "old")
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


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _temporary(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.{kind}.tmp")
