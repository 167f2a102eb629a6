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

__all__ = ["Advance", "print_demo", "print_findings", "print_json", "print_report", "print_verification", "progress"]

Json = Mapping[str, Any]
Advance = Callable[[str, int, int], None]
"""Called with the name of a phase, the steps done in it, and all its steps."""

_PIPE_WIDTH = 160
"""Columns when no terminal gives a width: wide enough that a table row stays one line."""


def print_json(data: Json) -> None:
    """One JSON document on standard output; numbers that JSON lacks, NaN and infinities, become null."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def print_report(report: Json) -> None:
    """What fused, what did not and why, and what the model gained."""
    console = _console()
    if report["fused"]:
        console.print(_fused_table(report["fused"]))
    else:
        console.print("Nothing was fused." if report["nodes"]["after"] is not None else "Nothing fuses.")
    if report["missed"]:
        console.print(_missed_table(report["missed"]))
    else:
        console.print("Not fused: nothing, there was no other candidate.")
    nodes = report["nodes"]
    after = "" if nodes["after"] is None else f" before, {nodes['after']:,} after"
    console.print(f"Nodes: {nodes['before']:,}{after}")
    if report["kv_cache_bytes_per_token"] is not None:
        console.print(_cache_line(report["kv_cache_bytes_per_token"]))
    if report["seconds"]:
        console.print("Seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in report["seconds"].items()))


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


def _fused_table(fused: Sequence[Json]) -> Table:
    columns = ("Operator", "Fused", "Nodes replaced", "Nodes kept for other readers", "Validated", "Assumed")
    table = Table(*columns, title="Fused")
    for operator in sorted({entry["operator"] for entry in fused}):
        entries = [entry for entry in fused if entry["operator"] == operator]
        assumed = sorted({name for entry in entries for name in entry["assumed"]})
        numbers = (len(entries), *(sum(len(entry[key]) for entry in entries) for key in ("nodes", "kept")))
        table.add_row(operator, *map(str, numbers), _validated(entries), ", ".join(assumed) or "nothing")
    return table


def _validated(entries: Sequence[Json]) -> str:
    errors = [entry["validated"] for entry in entries if entry["validated"] is not None]
    if not errors:
        return "no"
    return f"{len(errors)} of {len(entries)}, relative error up to {max(errors):.1e}"


def _missed_table(missed: Sequence[Json]) -> Table:
    """Equal reasons share a row; a deep model tends to have one reason per layer kind."""
    table = Table("Fusion", "Where", "Code", "Why not", title="Not fused")
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for entry in missed:
        by_reason.setdefault((entry["fusion"], entry["code"], entry["message"]), []).append(entry["anchor"])
    for (fusion, code, message), anchors in by_reason.items():
        where = anchors[0] if len(anchors) == 1 else f"{anchors[0]} and {len(anchors) - 1} more"
        table.add_row(*(escape(text) for text in (fusion, where, code, message)))
    return table


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
