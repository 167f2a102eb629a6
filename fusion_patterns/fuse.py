"""`fuse` and `find`: the fusions over a whole model, with validation, assumptions and the report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir as ir

from ascend_onnx.check import check_call
from ascend_onnx.errors import InputError
from ascend_onnx.functions import attach_functions
from ascend_onnx.operator import DOMAIN, Product
from ascend_onnx.operators import OPERATORS
from ascend_onnx.storage import load
from fusion_patterns.engine import Decisions, Fusion, Match, Refused, apply, decide, planned, timed
from fusion_patterns.miss import Miss, miss
from fusion_patterns.mla_preprocess import MlaPreprocess
from fusion_patterns.mla_projection import MlaProjection
from fusion_patterns.mla_prolog import MlaProlog
from fusion_patterns.moe_init_routing import MoeInitRouting
from fusion_patterns.report import Fused, KvCache, Missed, Report
from fusion_patterns.ring_attention import RingAttention
from fusion_patterns.selected_attention import SelectedKeys
from fusion_patterns.shapes import complete_shapes, has_shapes
from fusion_patterns.validate import sample, validate

__all__ = ["ASSUMPTIONS", "FUSIONS", "default_assumptions", "find", "fuse"]

FUSIONS: tuple[Fusion, ...] = (
    MlaProlog(),
    MlaProjection(),
    MlaPreprocess(),
    SelectedKeys(),
    MoeInitRouting(),
    RingAttention(),
)

_DEFAULT_ASSUMPTIONS = ("expert-ids-in-range", "indices-valid", "slots-valid", "softmax-lanes-equal")
ASSUMPTIONS = (*_DEFAULT_ASSUMPTIONS, "causal-mask")
"""Facts about graph inputs that no graph can prove; all but the last hold unless switched off."""


def default_assumptions() -> frozenset[str]:
    """The assumptions that hold unless switched off."""
    return frozenset(_DEFAULT_ASSUMPTIONS)


Progress = Callable[[str, int, int], None]


def _silent(_phase: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class _Options:
    target: str
    validate: str
    only: str | None
    assumed: frozenset[str]
    progress: Progress


def fuse(
    model: onnx.ModelProto | ir.Model,
    *,
    kv_cache: Literal["keep"] = "keep",
    target: str = "any",
    validate: Literal["none", "sample", "all"] = "sample",
    assume: Collection[str] = (),
    only: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Replace what the operators compute, in place, and attach their function bodies.

    `kv_cache` "keep" leaves the graph's inputs and outputs as they are. `target` (a product, or "any") turns a match
    that would not launch there into a Miss. `validate` runs the first match of each shape class ("sample"), every match
    ("all") or none against its replacement. `assume` switches named assumptions ("none": all off). `only` is the name
    of the one operator to fuse. `progress` is called with phase, done and total.

    Raises `InputError` for an unknown option value and for an opset below 17.
    """
    options = _checked_options(kv_cache, target, validate, assume, only, progress)
    if isinstance(model, str | Path):
        raise InputError(f"fuse changes a model in place, so it takes a loaded model, not the path {str(model)!r}")
    if isinstance(model, onnx.ModelProto):
        loaded = ir.from_proto(model)
        report = _fuse(load(loaded), options)
        fused = _as_proto(loaded)
        fused.training_info.extend(model.training_info)  # onnx_ir does not carry it
        model.CopyFrom(fused)
        return report
    return _fuse(load(model), options)


def _as_proto(model: ir.Model) -> onnx.ModelProto:
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as error:
        raise InputError(
            "a weight that has to be changed has its data in a file, and a ModelProto does not say in which folder: "
            f"load the model with its weights, or give an onnx_ir model ({error.__cause__ or error})"
        ) from error


def find(
    model: str | Path | onnx.ModelProto | ir.Model,
    *,
    kv_cache: Literal["keep"] = "keep",
    target: str = "any",
    assume: Collection[str] = (),
    only: str | None = None,
) -> Report:
    """What `fuse` would do without validation; the model is not changed."""
    options = _checked_options(kv_cache, target, "none", assume, only, None)
    loaded = load(model)
    if loaded is model and not has_shapes(loaded):
        loaded = loaded.clone()  # shapes get written into it
    report = Report()
    with timed(report.seconds, "match"):
        found = _decide(loaded, options)
    report.nodes_before = _nodes(found)
    report.fused = [entry for decisions in found for match in decisions.matches for entry in planned(match)]
    _describe(report, loaded, found)
    return report


def _checked_options(
    kv_cache: str, target: str, validate: str, assume: Collection[str], only: str | None, progress: Progress | None
) -> _Options:
    _require("kv_cache", kv_cache, ("keep",))
    _require("target", target, ("any", *(product.value for product in Product)))
    _require("validate", validate, ("none", "sample", "all"))
    assume = (assume,) if isinstance(assume, str) else assume
    for name in assume:
        _require("assume", name, ("none", *ASSUMPTIONS))
    if only is not None:
        _require("only", only, tuple(OPERATORS))
    assumed = (frozenset() if "none" in assume else default_assumptions()) | (frozenset(assume) - {"none"})
    return _Options(target, validate, only, assumed, progress or _silent)


def _require(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{option} must be one of {', '.join(known)}; got {value!r}")


def _fuse(model: ir.Model, options: _Options) -> Report:
    report = Report()
    with timed(report.seconds, "match"):
        found = _decide(model, options)
    report.nodes_before = _nodes(found)
    with timed(report.seconds, "validate"):
        for decisions in found:
            _validate(model, decisions, options)
    with timed(report.seconds, "apply"):
        made = [entry for decisions in found for entry in _apply(decisions, model.graph, options)]
        if made:
            attach_functions(model)
        report.fused = [replace(entry, overload=node.overload) for entry, node in made]
    _describe(report, model, found)
    report.nodes_after = _nodes(found)
    return report


def _apply(decisions: Decisions, root: ir.Graph, options: _Options) -> list[tuple[Fused, ir.Node]]:
    def progress(done: int, total: int) -> None:
        options.progress("apply", done, total)

    return apply(decisions.graph, decisions.matches, progress, root)


def _nodes(found: Sequence[Decisions]) -> int:
    return sum(decisions.graph.num_nodes() for decisions in found)


def _decide(model: ir.Model, options: _Options) -> list[Decisions]:
    """Decisions about the main graph and every graph nested in it."""
    shapes = complete_shapes(model)
    fusions = [f for f in FUSIONS if options.only is None or options.only in f.operators]
    found: list[Decisions] = []
    graphs = [model.graph]
    while graphs:
        decisions = decide(graphs.pop(), fusions, shapes, options.assumed, options.only)
        graphs.extend(decisions.subgraphs)
        found.append(decisions)
        if options.target != "any":
            _keep(decisions, lambda match: _unlaunchable(match, options.target))
    return found


def _keep(decisions: Decisions, refuse: Callable[[Match], Miss | None]) -> None:
    """Turn the matches that `refuse` has a reason against into misses."""
    kept = []
    for match in decisions.matches:
        reason = refuse(match)
        if reason is None:
            kept.append(match)
        else:
            decisions.misses.append(Refused(match.fusion, match.anchor, reason))
    decisions.matches = kept


def _unlaunchable(match: Match, target: str) -> Miss | None:
    for call in match.calls:
        findings = check_call(call, (Product(target),))
        if findings:
            wanted = f"{call.operator.name} within the limits of {target}"
            return miss("target", match.anchor, wanted, "; ".join(finding.message for finding in findings))
    return None


def _validate(model: ir.Model, decisions: Decisions, options: _Options) -> None:
    if options.validate == "none":
        return
    chosen = decisions.matches if options.validate == "all" else sample(decisions.matches)
    position = {id(match): index for index, match in enumerate(chosen)}

    def refuse(match: Match) -> Miss | None:
        if id(match) not in position:
            return None
        options.progress("validate", position[id(match)], len(chosen))
        outcome = validate(model, match, lambda cut: _fuse_cut(cut, match, options), decisions.shapes)
        if isinstance(outcome, Miss):
            return outcome
        match.validated = outcome
        return None

    _keep(decisions, refuse)


def _fuse_cut(cut: ir.Model, match: Match, options: _Options) -> int:
    fusion = next(f for f in FUSIONS if f.name == match.fusion)
    matches = decide(cut.graph, [fusion], assumed=options.assumed, only=options.only).matches
    apply(cut.graph, matches, lambda _done, _total: None)
    return len(matches)


def _describe(report: Report, model: ir.Model, found: Sequence[Decisions]) -> None:
    """What the decisions say that does not depend on whether they were carried out."""
    report.missed = [candidate.missed() for decisions in found for candidate in decisions.misses]
    report.missed.extend(_inside_functions(model))
    matches = [match for decisions in found for match in decisions.matches]
    caches = [match.cache for match in matches if match.cache is not None]
    if caches:
        latent = sum(cache.latent for cache in caches)
        report.kv_cache = KvCache(latent, latent, sum(cache.per_head for cache in caches))


_TELLING = ("Softmax", "Attention", "TopK")


def _inside_functions(model: ir.Model) -> Iterator[Missed]:
    """Model-local functions are not searched; one that might hold a candidate is named."""
    for (domain, name, overload), function in model.functions.items():
        anchor = None if domain == DOMAIN else next((n for n in function if n.op_type in _TELLING), None)
        if anchor is not None:
            reason = miss("function-body", anchor, "nodes of the graph itself", f"the model-local function {name}")
            yield Missed.of("all", f"{domain}::{name}{overload and ':'}{overload}", reason)
