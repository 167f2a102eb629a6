"""The single walk: anchors by operator type, a Match or a Miss for each, and replacement once all is decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import onnx_ir as ir

from ascend_onnx.operator import Call
from fusion_patterns.emit import Emitter
from fusion_patterns.graph import Facts
from fusion_patterns.miss import Miss, miss
from fusion_patterns.report import Fused, Missed

__all__ = [
    "Decisions",
    "Fusion",
    "LatentCache",
    "Match",
    "Refused",
    "apply",
    "between",
    "decide",
    "label",
    "planned",
    "timed",
]


@dataclass(frozen=True)
class LatentCache:
    """Bytes one token takes in the caches of one attention layer: as the graph keeps it, and as expanded per head."""

    latent: int
    per_head: int


@dataclass
class Match:
    """A subgraph that some operators can replace, and how.

    `results` are the values that get replaced; `boundary` the values at which the subgraph begins, each with the rule
    for random inputs that respects what the graph guarantees of it (None: by its type). `emit` builds the replacement
    and says which new value stands for which result. `absorbed` are values the operators compute inside: where others
    read one, it stays and is reported as kept. `shape_of` computes what a Shape node yields without its input (None:
    it cannot), so that nothing is kept for the sake of its dimensions. `shapes` of boundary values hold
    by assumption. `sizes` are those of symbolic dimensions that let a random run say enough. `draws` is how many random
    inputs validation may try until both forms agree: more than one where numbers are rounded to integers, for one near
    a tie may fall either way.
    """

    fusion: str
    anchor: ir.Node
    calls: tuple[Call, ...]
    results: tuple[ir.Value, ...]
    boundary: dict[ir.Value, str | None]
    emit: Callable[[Emitter], dict[ir.Value, ir.Value]]
    absorbed: tuple[ir.Value, ...] = ()
    shape_of: Callable[[Emitter, ir.Node], ir.Value | None] | None = None
    assumed: tuple[str, ...] = ()
    shapes: dict[ir.Value, ir.Shape] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    cache: LatentCache | None = None
    draws: int = 1
    validated: float | None = None


class Fusion(Protocol):
    """One fusion: where to look, and what it makes of an anchor (None: the anchor was never a candidate)."""

    @property
    def name(self) -> str: ...
    @property
    def operators(self) -> tuple[str, ...]: ...
    @property
    def anchors(self) -> tuple[str, ...]: ...

    def match(self, node: ir.Node, facts: Facts) -> Iterator[Match | Refused]: ...


@dataclass(frozen=True)
class Refused:
    """A candidate that does not fuse: the fusion and the anchor it was looked at for, and the reason."""

    fusion: str
    anchor: ir.Node
    miss: Miss

    def missed(self) -> Missed:
        return Missed.of(self.fusion, label(self.anchor), self.miss)


@dataclass
class Decisions:
    """All matches of one graph in order, disjoint in what they replace, and all misses.

    `shapes` are those they were found by, `subgraphs` the bodies of its If, Loop and Scan nodes.
    """

    graph: ir.Graph
    matches: list[Match] = field(default_factory=list)
    misses: list[Refused] = field(default_factory=list)
    shapes: Mapping[ir.Value, ir.Shape] = field(default_factory=dict)
    subgraphs: list[ir.Graph] = field(default_factory=list)


def label(node: ir.Node) -> str:
    """A node's name, or that of its first output where it has none."""
    return node.name or next((o.name for o in node.outputs if o.name), "") or node.op_type


def decide(
    graph: ir.Graph,
    fusions: Sequence[Fusion],
    shapes: Mapping[ir.Value, ir.Shape] | None = None,
    assumed: Collection[str] = frozenset(),
    only: str | None = None,
) -> Decisions:
    """Look at every anchor of every fusion. Nothing is changed.

    `shapes` say more than the values do themselves; a match that stands on what is not in `assumed` is a Miss; `only`
    is the one operator to use.
    """
    by_anchor: dict[str, list[Fusion]] = {}
    for fusion in fusions:
        for op_type in fusion.anchors:
            by_anchor.setdefault(op_type, []).append(fusion)
    facts, decisions, claimed = Facts(shapes, assumed, only), Decisions(graph, shapes=shapes or {}), set[ir.Value]()
    for node in graph:
        if node.op_type in _NESTING:
            decisions.subgraphs.extend(_bodies(node))
        for fusion in by_anchor.get(node.op_type, ()):
            for outcome in fusion.match(node, facts):
                if isinstance(outcome, Refused):
                    decisions.misses.append(outcome)
                elif (open_question := _not_assumed(outcome, facts)) is not None:
                    decisions.misses.append(Refused(fusion.name, node, open_question))
                elif not claimed.isdisjoint(outcome.results):
                    shared = ", ".join(sorted(value.name or "" for value in claimed.intersection(outcome.results)))
                    overlap = miss("overlap", node, "values that no other match replaces", shared)
                    decisions.misses.append(Refused(fusion.name, node, overlap))
                else:
                    claimed.update(outcome.results)
                    decisions.matches.append(outcome)
    return decisions


_NESTING = ("If", "Loop", "Scan")


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for given in node.attributes.values():
        if given.type == ir.AttributeType.GRAPH and not given.is_ref():
            yield given.as_graph()


def _not_assumed(match: Match, facts: Facts) -> Miss | None:
    missing = [name for name in match.assumed if name not in facts.assumed]
    if not missing:
        return None
    return miss("assumption-off", match.anchor, f"the assumption {', '.join(missing)} (--assume)", "it switched off")


def apply(
    graph: ir.Graph, matches: Sequence[Match], progress: Callable[[int, int], None], root: ir.Graph | None = None
) -> list[tuple[Fused, ir.Node]]:
    """Replace every match, drop what nothing reads any more, restore topological order; the new nodes of the domain.

    New weights become initializers of `root`, the graph that all others are nested in (`graph` itself by default).
    """
    if not matches:
        return []
    emitter, sweep = Emitter(graph, root or graph), _Sweep(graph)
    made: list[tuple[Match, list[ir.Node], list[ir.Node]]] = []
    replacements: dict[ir.Value, ir.Value] = {}
    for done, match in enumerate(matches):
        progress(done, len(matches))
        before, old = len(emitter.nodes), between(match)
        replacements.update(match.emit(emitter))
        made.append((match, [node for node in emitter.nodes[before:] if node.domain], old))
    for result, value in replacements.items():  # only now: what one match reads another may have replaced
        _replace(result, value)
    entries: list[tuple[Fused, ir.Node]] = []
    for match, nodes, old in made:
        dead = sweep.drop([value.producer() for value in match.results])
        gone = [label(node) for node in [*dead, *_release_shapes(match, old, emitter, sweep)]]
        kept = [value.name or "" for value in match.absorbed if sweep.is_alive(value.producer())]
        anchor, assumed = label(match.anchor), list(match.assumed)
        for node in nodes:
            node.metadata_props.update(_provenance(match, gone))
        entries.extend((Fused(n.op_type, "", anchor, gone, match.validated, assumed, kept), n) for n in nodes)
    sweep.finish()
    emitter.commit()
    graph.sort()
    return entries


def _provenance(match: Match, replaced: list[str]) -> dict[str, str]:
    """Where a fused node comes from, for whoever inspects the model later."""
    return {
        "ascend_onnx.fusion": match.fusion,
        "ascend_onnx.anchor": label(match.anchor),
        "ascend_onnx.replaced": ",".join(replaced),
    }


def between(match: Match) -> list[ir.Node]:
    """Nodes from the results up to the boundary, each after what it reads.

    Going up stops at Shape: what it looks at belongs to the subgraph only if it is computed for something else.
    """
    members: set[ir.Node] = set()
    stack = [value.producer() for value in match.results]
    while stack:
        node = stack.pop()
        if node is None or node in members:
            continue
        members.add(node)
        if node.op_type != "Shape":
            stack.extend(v.producer() for v in node.inputs if v is not None and v not in match.boundary)
    return _in_order(members)


def _in_order(members: set[ir.Node]) -> list[ir.Node]:
    """The nodes sorted so that each stands behind its producers among them."""
    ordered: dict[ir.Node, None] = {}
    for root in members:
        stack = [root]
        while stack:
            node = stack[-1]
            producers = (value.producer() for value in node.inputs if value is not None)
            waiting = [p for p in producers if p is not None and p in members and p not in ordered]
            if waiting:
                stack.extend(waiting)
            else:
                ordered[stack.pop()] = None
    return list(ordered)


def planned(match: Match) -> list[Fused]:
    """The entries of a match that is not carried out."""
    nodes = [label(node) for node in between(match)]
    return [
        Fused(call.operator.name, call.operator.overload(call), label(match.anchor), nodes, None, list(match.assumed))
        for call in match.calls
    ]


def _release_shapes(match: Match, old: list[ir.Node], emitter: Emitter, sweep: _Sweep) -> list[ir.Node]:
    """Drop nodes of the match that only Shape still reads; what Shape yields is computed from elsewhere."""
    dropped: list[ir.Node] = []
    if match.shape_of is None:
        return dropped
    for node in reversed(old):
        shapes = [use.node for output in node.outputs for use in output.uses()]
        outputs = any(output.is_graph_output() for output in node.outputs)
        if not sweep.is_alive(node) or outputs or not shapes or any(reader.op_type != "Shape" for reader in shapes):
            continue
        for shape, value in [(shape, match.shape_of(emitter, shape)) for shape in shapes]:
            if value is not None:
                _replace(shape.outputs[0], value)
                dropped.extend(sweep.drop([shape]))
    return dropped


def _replace(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old`, and the graph's outputs, take `new`; a graph output keeps its name."""
    name, is_output = old.name, old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name = None
        new.name = name
        new.shape, new.type = old.shape, old.type


class _Sweep:
    """Nodes that nothing reads any more, taken out of a graph together: a removal looks at all outputs of the graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._dead: set[ir.Node] = set()

    def is_alive(self, node: ir.Node | None) -> bool:
        """Whether a node of the graph has not been dropped."""
        return node is not None and node.graph is self._graph and node not in self._dead

    def drop(self, suspects: Sequence[ir.Node | None]) -> list[ir.Node]:
        """Drop the suspects that nothing reads, and what then becomes unread; also their initializers."""
        dropped: list[ir.Node] = []
        stack = list(suspects)
        while stack:
            node = stack.pop()
            if node is None or not self.is_alive(node):
                continue
            if any(output.uses() or output.is_graph_output() for output in node.outputs):
                continue
            self._dead.add(node)
            dropped.append(node)
            for index, value in enumerate(node.inputs):
                if value is None:
                    continue
                node.replace_input_with(index, None)
                stack.append(value.producer())
                if value.is_initializer() and not value.uses() and not value.is_graph_output():
                    self._graph.initializers.pop(value.name or "", None)
        return dropped

    def finish(self) -> None:
        """Take the dropped nodes out of the graph."""
        self._graph.remove(self._dead)


def timed(seconds: dict[str, float], name: str) -> Timer:
    """A context that adds the time spent inside it to `seconds[name]`."""
    return Timer(seconds, name)


@dataclass
class Timer:
    seconds: dict[str, float]
    name: str
    started: float = 0.0

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.started
