"""What the command line prints: the JSON forms of results as rich tables, and progress on terminals."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = [
    "Advance",
    "print_demo",
    "print_diagnosis",
    "print_domain",
    "print_explanations",
    "print_findings",
    "print_json",
    "print_report",
    "print_run",
    "print_verification",
    "progress",
]

Json = Mapping[str, Any]
Advance = Callable[[str, int, int], None]
"""Called with the name of a phase, the steps done in it, and all its steps."""

_PIPE_WIDTH = 160
"""Columns when no terminal gives a width: wide enough that a table row stays one line."""

_FEW = 3
"""So many names are listed in a table cell."""


def print_json(data: Json) -> None:
    """One JSON document on standard output; numbers that JSON lacks, NaN and infinities, become null."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def print_report(report: Json) -> None:
    """What did not fuse and why, what fused, and what the model gained."""
    console = _console()
    if report["missed"]:
        console.print(_missed_table(report["missed"]))
    if report["fused"]:
        console.print(_fused_table(report["fused"], "Would fuse" if report["nodes"]["after"] is None else "Fused"))
    else:
        console.print("Nothing was fused." if report["nodes"]["after"] is not None else "Nothing fuses.")
    if not report["missed"]:
        console.print("Not fused: nothing, there was no other candidate.")
    nodes = report["nodes"]
    after = "" if nodes["after"] is None else f" before, {nodes['after']:,} after"
    console.print(f"Nodes: {nodes['before']:,}{after}")
    if report["kv_cache_bytes_per_token"] is not None:
        console.print(_cache_line(report["kv_cache_bytes_per_token"]))
    if report["seconds"]:
        console.print("Seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in report["seconds"].items()))


def print_explanations(explanations: Sequence[Json]) -> None:
    """How each fusion looked at one anchor, step by step, and what it made of it."""
    console = _console()
    for explanation in explanations:
        table = Table("", "Building block", "At value", "Found", title=escape(_heading(explanation)))
        for number, step in enumerate(explanation["steps"], 1):
            detail = (
                step["detail"] if step["found"] else f"no: {step['detail'].removeprefix('not found') or 'not here'}"
            )
            table.add_row(str(number), step["block"], escape(step["value"]), escape(detail))
        console.print(table)
        console.print(escape(explanation["outcome"]))


def print_domain(domain: Json) -> None:
    """The operators of the domain, one a row."""
    table = Table("Operator", "On the device", "Products", "Inputs", "Outputs", "Attributes", "Limits")
    table.title = f"{domain['domain']}, version {domain['version']}"
    for operator in domain["operators"]:
        counts = (str(len(operator[key])) for key in ("inputs", "outputs", "attributes", "limits"))
        table.add_row(operator["name"], operator["aclnn"], ", ".join(operator["products"]), *counts)
    _console().print(table)


def print_findings(findings: Sequence[Json], target: str) -> None:
    """What would not launch on the product `target`, and why."""
    console = _console()
    if not findings:
        console.print(f"Nothing to object to for target {target}.")
        return
    table = Table("Node", "Operator", "Rule", "Code", "What is wrong", "Source", title=f"Findings for target {target}")
    for finding in findings:
        columns = ("node", "operator", "rule", "code", "message", "source")
        table.add_row(*(escape(str(finding[column])) for column in columns))
    console.print(table)


def print_verification(verification: Json) -> None:
    """The comparison of two models, output by output."""
    console = _console()
    for relation in verification["relations"]:
        console.print(f"The model runs only with {escape(relation)}")
    if verification["converted_to_float32"]:
        console.print("bfloat16 was compared as float32.")
    for run in verification["runs"]:
        console.print(_comparison_table(run))
    console.print("Equal." if verification["equal"] else f"Not equal: {escape(verification['reason'])}")


def print_demo(demo: Json) -> None:
    """What was fused, the proof, and the times."""
    print_report(demo["report"])
    print_verification(demo["verification"])
    timing = demo["timing"]
    before, after = timing["before"], timing["after"]
    _console().print(
        f"One decoding step with {timing['cached_tokens']:,} cached tokens on the CPU: {before * 1e3:.1f} ms before, "
        f"{after * 1e3:.1f} ms after, {before / after:.1f} times as fast"
    )


def print_run(run: Json) -> None:
    """Where the nodes ran, why some did not run on the NPU, and what came out."""
    console = _console()
    if run["dims"]:
        console.print("Dimensions: " + ", ".join(f"{name}={size}" for name, size in run["dims"].items()))
    operators = ", ".join(f"{name or entry['operator']}" for entry in run["on_npu"] for name in [entry["node"]])
    console.print(f"On the NPU: {len(run['on_npu'])} nodes{escape(f' ({operators})') if operators else ''}")
    console.print(f"On the CPU: {run['other_nodes'] + len(run['declined'])} nodes")
    for entry in run["declined"]:
        console.print(escape(f"  {entry['operator']} {entry['node']!r} was declined: {entry['reason']}"))
    table = Table("Output", "Type", "Shape", "Smallest", "Largest", "Not finite")
    for output in run["outputs"]:
        bounds = ["" if output[key] is None else f"{output[key]:.6g}" for key in ("smallest", "largest")]
        shape = ", ".join(map(str, output["shape"]))
        table.add_row(escape(output["name"]), output["type"], shape, *bounds, str(output["not_finite"]))
    console.print(table)
    seconds = run["seconds"]
    console.print(f"Session created in {seconds['create']:.2f} s, second run {seconds['run'] * 1e3:.2f} ms")


def print_diagnosis(provider: str, found: Json) -> None:
    """What the provider finds of CANN: the verdict first, then what was opened and what is missing."""
    console = _console()
    if found["usable"]:
        console.print(f"{found['devices']} NPU: {escape(found['soc'])}, product {found['product']}")
    else:
        console.print(escape(f"No NPU can be used: {found['reason']}"))
    console.print(escape(f"Provider: {provider}"))
    for title, key in (("Opened", "opened"), ("Not opened", "not_found"), ("Missing operators", "missing_operators")):
        if found[key]:
            console.print(f"{title}:")
            for entry in found[key]:
                console.print(escape(f"  {entry}"))


@contextlib.contextmanager
def progress() -> Iterator[Advance | None]:
    """A progress display on standard error; None, hence silence, where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        tasks = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = display.add_task(phase, total=total)
            display.update(tasks[phase], completed=done, total=total)

        yield advance


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _heading(explanation: Json) -> str:
    return f"{explanation['fusion']} at {explanation['anchor']}: {'fuses' if explanation['fuses'] else 'does not fuse'}"


def _missed_table(missed: Sequence[Json]) -> Table:
    """One row per candidate, so that no layer hides behind another."""
    table = Table("Anchor", "Fusion", "Code", "Why not", "Seen at", title=f"Not fused: {len(missed)}")
    for entry in missed:
        table.add_row(*(escape(entry[column]) for column in ("anchor", "fusion", "code", "message", "node")))
    return table


def _fused_table(fused: Sequence[Json], title: str) -> Table:
    """One row per kind of layer: candidates that fuse into the same operators under the same conditions."""
    candidates: dict[tuple[str, ...], list[Json]] = {}
    for entry in fused:
        candidates.setdefault((entry["anchor"], *entry["nodes"]), []).append(entry)
    kinds: dict[tuple[tuple[str, ...], tuple[str, ...], int], list[list[Json]]] = {}
    for entries in candidates.values():
        operators = tuple(sorted(entry["operator"] for entry in entries))
        kinds.setdefault((operators, _assumed(entries), len(_kept(entries))), []).append(entries)
    columns = ("Anchor", "Operators", "Times", "Nodes replaced", "Kept for other readers", "Validated", "Assumed")
    table = Table(*columns, title=f"{title}: {len(candidates)}")
    for (operators, assumed, _), layers in kinds.items():
        table.add_row(
            escape(_some([entries[0]["anchor"] for entries in layers])),
            "\n".join(operators),
            str(len(layers)),
            str(sum(len(entries[0]["nodes"]) for entries in layers)),
            escape(_some([name for entries in layers for name in _kept(entries)]) or "nothing"),
            _validated(layers),
            "\n".join(assumed) or "nothing",
        )
    return table


def _assumed(entries: Sequence[Json]) -> tuple[str, ...]:
    return tuple(sorted({name for entry in entries for name in entry["assumed"]}))


def _kept(entries: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry["kept"]))


def _some(names: Sequence[str]) -> str:
    """All of a few names; of many the first and the last."""
    if len(names) <= _FEW:
        return "\n".join(names)
    return f"{names[0]}\nto {names[-1]}"


def _validated(layers: Sequence[Sequence[Json]]) -> str:
    errors = [entries[0]["validated"] for entries in layers if entries[0]["validated"] is not None]
    if not errors:
        return "no"
    return f"{len(errors)} of {len(layers)}, relative error up to {max(errors):.1e}"


def _comparison_table(run: Json) -> Table:
    dims = ", ".join(f"{name}={size}" for name, size in run["dims"].items())
    rules = {output["dtype"]: output["rule"] for output in run["outputs"]}
    columns = ("Output", "Type", "Shape", "Max abs", "Max rel", "MERE", "MARE", "CANN mixed", "Verdict")
    table = Table(
        *columns,
        title=escape(run["source"] or f"Inputs drawn for {dims or 'fixed sizes'}"),
        caption=escape("Equal: " + "; ".join(f"{dtype} {rule}" for dtype, rule in rules.items())),
    )
    for output in run["outputs"]:
        shape = "x".join(map(str, output["shape"])) or "scalar"
        errors = (_error(output[key]) for key in ("max_abs", "max_rel", "mere", "mare"))
        mixed = {None: "", True: "passed", False: "failed"}[output["mixed"]]
        verdict = "equal" if output["within"] else "differs"
        table.add_row(escape(output["name"]), output["dtype"], shape, *errors, mixed, verdict)
    return table


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _cache_line(cache: Json) -> str:
    now = f"{cache['before']:,} bytes"
    if cache["after"] not in (None, cache["before"]):
        now = f"{cache['before']:,} bytes before, {cache['after']:,} after"
    return f"KV cache per token: {now} (caching keys and values per head would take {cache['per_head_equivalent']:,})"
