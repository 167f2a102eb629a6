"""The `ascend-onnx` command.

Exit codes: 0 done; 1 what was asked for was not reached; 2 bad input, said in one sentence on standard error; 130
interrupted.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import onnx_ir as ir
import typer
from typer.main import get_command

import fusion_patterns
from ascend_onnx import demo as demonstration
from ascend_onnx import render
from ascend_onnx.check import check as find_faults
from ascend_onnx.documentation import domain_json, operator_markdown
from ascend_onnx.errors import InputError
from ascend_onnx.external_data import data_path
from ascend_onnx.files import replacing, require_writable
from ascend_onnx.functions import strip_functions
from ascend_onnx.operators import OPERATORS
from ascend_onnx.storage import load, save
from ascend_onnx.tensors import external_path, tensor_slots
from ascend_onnx.verify import verify as compare_models

__all__ = ["app", "main"]

PROGRAM = "ascend-onnx"
NOT_REACHED = 1
BAD_INPUT = 2
INTERRUPTED = 130
_FEW = 5
"""So many names fit in a sentence."""

app = typer.Typer(
    name=PROGRAM,
    help="Fuses DeepSeek-style ONNX models into Ascend operators that still run on any stock ONNX Runtime.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[Path, typer.Argument(metavar="IN", help="The ONNX model.", show_default=False)]
KvCache = Annotated[Literal["keep"], typer.Option(help="keep: inputs and outputs of the model do not change.")]
Target = Annotated[Literal["any", "a2", "a3", "950"], typer.Option(help="The Ascend product that must launch it.")]
Validate = Annotated[
    Literal["none", "sample", "all"],
    typer.Option(help="Prove matches by running subgraph and replacement: none, one of each kind, all."),
]
Assume = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME|none", help="Add an assumption about graph inputs, or drop all. Repeatable."),
]
Only = Annotated[str | None, typer.Option(metavar="OPERATOR", help="Fuse into this operator alone.")]
Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="OPERATOR=N", help="End with exit code 1 unless exactly N are fused. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Options of the command as a whole; its help text is that of `app`."""
    if version:
        typer.echo(f"{PROGRAM} {_version()}")
        raise typer.Exit


@app.command()
def fuse(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Where the fused model goes.")],
    kv_cache: KvCache = "keep",
    target: Target = "any",
    validate: Validate = "sample",
    assume: Assume = None,
    only: Only = None,
    expect: Expect = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there, as JSON.")] = None,
    external_data: Annotated[
        Literal["auto", "link", "copy"], typer.Option(help="Whether unchanged weights stay in IN's files.")
    ] = "auto",
    no_bodies: Annotated[
        bool, typer.Option("--no-bodies", help="Leave the function bodies out: only a device can run the model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replace the subgraphs that Ascend operators compute, and write the fused model.

    The model and its report are written even if an --expect is not met.
    """
    expected = _expectations(expect)
    if output.resolve() == model.resolve():
        raise InputError(f"--output {output} would replace the model that is read; name another file")
    for written in (output, report):
        if written is not None:
            _require_place_for(written)
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        loaded = load(model)
    if report is not None and report.resolve() in {*_files_of(loaded, model), *_files_at(output)}:
        raise InputError(f"--report {report} would replace a model or its weights; name another file")
    with render.progress() as progress:
        result = fusion_patterns.fuse(
            loaded,
            kv_cache=kv_cache,
            target=target,
            validate=validate,
            assume=tuple(assume or ()),
            only=only,
            progress=progress,
        )
    with _timed(seconds, "save"):
        if no_bodies:
            strip_functions(loaded)
        save(loaded, output, source=model, external_data=external_data)
    result.seconds = {"load": seconds["load"], **result.seconds, "save": seconds["save"]}
    _deliver(result, report, as_json=as_json)
    _require(expected, result)


@app.command()
def find(
    model: Model,
    kv_cache: KvCache = "keep",
    target: Target = "any",
    assume: Assume = None,
    only: Only = None,
    expect: Expect = None,
    as_json: AsJson = False,
) -> None:
    """Say what `fuse` would fuse and what not, and change nothing."""
    expected = _expectations(expect)
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        loaded = load(model)
    result = fusion_patterns.find(loaded, kv_cache=kv_cache, target=target, assume=tuple(assume or ()), only=only)
    result.seconds = {**seconds, **result.seconds}
    _deliver(result, None, as_json=as_json)
    _require(expected, result)


@app.command()
def explain(
    model: Model,
    node: Annotated[str, typer.Option(metavar="NAME", help="The anchor of a candidate, as `find` lists it.")],
    as_json: AsJson = False,
) -> None:
    """Walk through one candidate: every building block that was looked for, and what was there."""
    loaded = load(model)
    explanations = [dataclasses.asdict(explanation) for explanation in fusion_patterns.explain(loaded, node)]
    if not explanations:
        raise InputError(f"--node {node}: {_no_anchor(loaded, node)}")
    if as_json:
        render.print_json({"node": node, "explanations": explanations})
    else:
        render.print_explanations(explanations)


@app.command()
def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model that is right.", show_default=False)],
    fused: Annotated[Path, typer.Argument(metavar="FUSED", help="The model to compare with it.", show_default=False)],
    inputs: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE.npz", help="Arrays by input name instead of drawn ones. Repeatable: a set each."),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RULE", help="How an input is drawn, for example ids:256 or arange:0. Repeatable."),
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="The size of a symbolic dimension. Repeatable.")
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(min=0, help="Largest error of float outputs, as a part of their largest magnitude.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run two models on the same inputs and compare every output; exit code 1 if they differ."""
    result = compare_models(
        original,
        fused,
        inputs=inputs or None,
        dims={name: _whole_number("--dim", name, size) for name, size in _pairs("--dim", "NAME=VALUE", dim)},
        rules=dict(_pairs("--rule", "NAME=RULE", rule)),
        seed=seed,
        rtol=rtol,
    )
    if as_json:
        render.print_json(result.to_json())
    else:
        render.print_verification(result.to_json())
    if not result.equal:
        raise typer.Exit(NOT_REACHED)


@app.command()
def check(model: Model, target: Target = "any", as_json: AsJson = False) -> None:
    """Say which nodes would not launch on a product, and why; exit code 1 if there are any."""
    findings = [dataclasses.asdict(finding) for finding in find_faults(load(model), target=target)]
    if as_json:
        render.print_json({"target": target, "findings": findings})
    else:
        render.print_findings(findings, target)
    if findings:
        raise typer.Exit(NOT_REACHED)


@app.command()
def schema(
    operator: Annotated[
        str | None, typer.Argument(metavar="[OPERATOR]", help="One operator; all by default.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
) -> None:
    """Describe the operators: inputs, outputs, attributes, and the limits of each product."""
    if as_json and as_markdown:
        raise InputError("schema prints --json or --markdown, not both; choose one")
    chosen = list(OPERATORS) if operator is None else [_known_operator("schema", operator)]
    if as_markdown:
        typer.echo("\n".join(operator_markdown(OPERATORS[name]) for name in chosen), nl=False)
        return
    described = domain_json()
    described["operators"] = [entry for entry in described["operators"] if entry["name"] in chosen]
    if as_json:
        render.print_json(described)
    else:
        render.print_domain(described)


@app.command()
def demo(as_json: AsJson = False) -> None:
    """Fuse a two-layer DeepSeek-V3 decode graph with random weights, prove it equal and time it."""
    with render.progress() as progress:
        result = demonstration.run(lambda model: fusion_patterns.fuse(model, progress=progress).to_json())
    if as_json:
        render.print_json(result.to_json())
    else:
        render.print_demo(result.to_json())
    if not result.verification.equal:
        raise typer.Exit(NOT_REACHED)


@app.command()
def run(
    model: Model,
    device: Annotated[Literal["cpu", "npu"], typer.Option(help="Where nodes of the domain run.")] = "cpu",
    dim: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="The size of a symbolic dimension. Repeatable.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RULE", help="How an input is drawn, for example ids:256 or arange:0. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other inputs.")] = 0,
    cann: Annotated[str, typer.Option(metavar="auto|emulator|PATH", help="Where CANN is, for --device npu.")] = "auto",
    require_npu: Annotated[
        bool, typer.Option("--require-npu", help="Fail if a node of the domain does not run on the NPU.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a model once on drawn inputs, and say which node ran where."""
    from ascend_onnx import render
    from ascend_onnx.run import run as run_model

    if device == "npu":
        import runtime_ep

        if not runtime_ep.register(cann):
            raise InputError(f"there is no NPU: {runtime_ep.diagnose().reason}; --cann emulator needs none")
    result = run_model(
        model,
        device,
        dims={name: _whole_number("--dim", name, size) for name, size in _pairs("--dim", "NAME=VALUE", dim)},
        rules=dict(_pairs("--rule", "NAME=RULE", rule)),
        seed=seed,
        require_npu=require_npu,
    ).to_json()
    if as_json:
        render.print_json(result)
    else:
        render.print_run(result)


@app.command()
def doctor(
    cann: Annotated[str, typer.Option(metavar="auto|emulator|PATH", help="Where to look for CANN.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Say what the execution provider finds of CANN and what it lacks; exit code 1 if it cannot use an NPU."""
    import dataclasses

    import runtime_ep
    from ascend_onnx import render

    found = runtime_ep.diagnose(cann)
    if as_json:
        render.print_json({"provider": runtime_ep.get_library_path(), **dataclasses.asdict(found)})
    else:
        render.print_diagnosis(runtime_ep.get_library_path(), dataclasses.asdict(found))
    if not found.usable:
        raise typer.Exit(NOT_REACHED)


def _deliver(result: fusion_patterns.Report, file: Path | None, *, as_json: bool) -> None:
    """Print the report, and write it to `file` as JSON."""
    data = result.to_json()
    if file is not None:
        with replacing(file) as out:
            out.write(json.dumps(data, indent=2).encode() + b"\n")
    if as_json:
        render.print_json(data)
    else:
        render.print_report(data)


def _expectations(values: list[str] | None) -> dict[str, int]:
    """The --expect options as {operator: number}."""
    expected = {}
    for name, number in _pairs("--expect", "OPERATOR=N", values):
        expected[_known_operator("--expect", name)] = _whole_number("--expect", name, number)
    return expected


def _version() -> str:
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def _known_operator(where: str, name: str) -> str:
    if name not in OPERATORS:
        raise InputError(f"{where}: there is no operator {name!r}; the operators are {', '.join(OPERATORS)}")
    return name


def _files_of(model: ir.Model, path: Path) -> set[Path]:
    """The file of a loaded model and those that its weights are in."""
    weights = (slot.tensor for slot in tensor_slots(model))
    return {path.resolve(), *(external_path(w).resolve() for w in weights if isinstance(w, ir.ExternalTensor))}


def _files_at(output: Path) -> set[Path]:
    """The files that saving a model makes."""
    return {output.resolve(), data_path(output).resolve()}


def _require_place_for(file: Path) -> None:
    require_writable(file)
    if file.exists() and not file.is_file():  # it would be replaced, be it a device or somebody's pipe
        raise InputError(f"cannot write {file}: it is no regular file; name another one")


def _no_anchor(model: ir.Model, node: str) -> str:
    """Why there is nothing to explain at a node, and where there is."""
    report = fusion_patterns.find(model)
    inside = next((entry.anchor for entry in report.fused if node in entry.nodes), None)
    if inside is not None:
        return f"no fusion starts at this node, but the one at {inside} replaces it; explain that"
    anchors = list(dict.fromkeys([*(m.anchor for m in report.missed), *(f.anchor for f in report.fused)]))
    if not anchors:
        return "no fusion starts at this node, nor at any other of the model"
    more = f" and {len(anchors) - _FEW} more nodes" if len(anchors) > _FEW else ""
    return f"no fusion starts at this node; candidates are at {', '.join(anchors[:_FEW])}{more}"


def _pairs(option: str, form: str, values: list[str] | None) -> Iterator[tuple[str, str]]:
    """The parts before and behind the last "=" of each value."""
    for value in values or ():
        name, _, rest = value.rpartition("=")
        if not (name and rest):
            raise InputError(f"{option} takes {form}, got {value!r}")
        yield name, rest


def _whole_number(option: str, name: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{option} {name}={text}: expected a whole number, got {text!r}")
    return int(text)


def _require(expected: dict[str, int], result: fusion_patterns.Report) -> None:
    """End with exit code 1 if other numbers were fused than expected."""
    unmet = [
        f"{number} {name} but {result.counts.get(name, 0)} fuse"
        for name, number in expected.items()
        if result.counts.get(name, 0) != number
    ]
    if unmet:
        _say(f"expected {' and '.join(unmet)}; the report says why")
        raise typer.Exit(NOT_REACHED)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started


def _say(message: str) -> None:
    """One line on standard error."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, the process's own by default; returns the exit code."""
    try:
        code = int(get_command(app).main(arguments, prog_name=PROGRAM, standalone_mode=False) or 0)
        if code == INTERRUPTED:
            _say("interrupted; files that were not complete are gone")
        return code
    except typer.TyperException as error:
        if error.format_message():
            _say(error.format_message())
        return error.exit_code
    except InputError as error:
        _say(str(error))
    except MemoryError as error:
        _say(f"not enough memory: {error}" if str(error) else "not enough memory")
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail again
        return NOT_REACHED
    except OSError as error:
        _say(f"{error.filename or 'input or output'}: {error.strerror}")
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
