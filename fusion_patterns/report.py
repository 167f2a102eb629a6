"""What a fusion run did, and what it left alone and why: as data, and as the JSON of `--report` and `find --json`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fusion_patterns.miss import Miss

__all__ = ["Fused", "KvCache", "Missed", "Report"]


@dataclass
class Fused:
    """One fused node. `validated` is the largest relative error found by running both forms, None when not run."""

    operator: str
    overload: str
    anchor: str
    nodes: list[str]
    validated: float | None = None
    assumed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Missed:
    """One candidate that did not fuse: which fusion looked at which anchor, and the reason."""

    fusion: str
    anchor: str
    code: str
    message: str
    node: str
    expected: str
    got: str

    @classmethod
    def of(cls, fusion: str, anchor: str, miss: Miss) -> Missed:
        return cls(fusion, anchor, miss.code, miss.message, miss.node, miss.expected, miss.got)


@dataclass(frozen=True)
class KvCache:
    """Bytes that one token of context occupies in the key/value caches, all multi-head latent layers together.

    `per_head_equivalent` is what caching the expanded per-head keys and values would take.
    """

    before: int
    after: int | None
    per_head_equivalent: int


@dataclass
class Report:
    """The result of `fuse` and `find`. `nodes_after` is None for `find`; times are wall-clock seconds per phase."""

    fused: list[Fused] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int | None = None
    kv_cache: KvCache | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Fused nodes per operator."""
        return dict(Counter(entry.operator for entry in self.fused))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {
            "counts": self.counts,
            "fused": [dataclasses.asdict(entry) for entry in self.fused],
            "missed": [dataclasses.asdict(entry) for entry in self.missed],
            "nodes": {"before": self.nodes_before, "after": self.nodes_after},
            "kv_cache_bytes_per_token": None if self.kv_cache is None else dataclasses.asdict(self.kv_cache),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
        }
